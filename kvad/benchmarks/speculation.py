"""``kvad bench speculative``: greedy generation with and without speculative decoding, by turns.

Two engines with the same weights generate after the same prompt. Speed is measured from the first new token on, and is
a median over the repeats; drafts are counted over all of them. ``SpeculativeConfig.adaptive`` is off: the engine drafts
in every step, also where it would stop drafting in a server because that is faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from kvad.benchmarks.results import Progress, commit_id, machine_info, no_progress
from kvad.engine import Engine
from kvad.engine.scheduling import SamplingParams, SpeculativeConfig
from kvad.errors import EngineError, RequestError
from kvad.llm import LLM

WARM_TOKENS = 16


@dataclass(frozen=True)
class SpeculationResult:
    """Result of ``kvad bench speculative``."""

    what: str
    machine: str
    commit: str
    dtype: str
    parameters: int
    speculative: SpeculativeConfig
    prompt: int  # tokens
    new_tokens: int
    repeats: int
    baseline_tokens_per_second: float  # without drafts
    tokens_per_second: float
    steps: int  # with speculation, of all repeats
    draft_steps: int  # of them, those that checked drafts
    draft_tokens: int
    accepted_tokens: int
    outputs_agree: int  # leading tokens that are equal with and without drafts, in all repeats

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.baseline_tokens_per_second

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts over drafts; None without any."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens of a step with drafts, including the one that the model adds; None without such a step."""
        return 1 + self.accepted_tokens / self.draft_steps if self.draft_steps else None


def bench_speculation(
    llm: LLM, new_tokens: int = 128, repeats: int = 3, progress: Progress = no_progress, *, prompt: str = ""
) -> SpeculationResult:
    """Measure the generation after ``prompt`` (empty: the opening token) with the drafts of ``llm`` and without.

    Raises:
        RequestError: If the numbers are impossible, or beyond the model's limit.
    """
    config = llm.engine.config
    assert config.speculative is not None
    speculative = replace(config.speculative, adaptive=False)
    start, limit = llm.encode(prompt), llm.model.config.max_seq_len
    for name, number, least in (("new_tokens", new_tokens, 2), ("repeats", repeats, 1)):
        if number < least:
            raise RequestError(f"{name}: must be at least {least}, got {number}")
    if len(start) + new_tokens > limit:
        message = f"{len(start)} prompt tokens and {new_tokens} new ones exceed the model's limit of {limit}"
        raise RequestError(message, f"--new-tokens up to {limit - len(start)}")
    cache = replace(llm.cache_config, max_num_seqs=1, max_seq_len=len(start) + new_tokens, num_blocks=None)
    plain = replace(config, speculative=None, draft_model=None)
    drafting = replace(config, speculative=speculative)
    with ExitStack() as stack:
        engines = [Engine(llm.model, cache, each, tokenizer=llm.tokenizer) for each in (plain, drafting)]
        for engine in engines:
            stack.callback(engine.close)
            _generate(engine, start, min(WARM_TOKENS, new_tokens), "warm")
        runs: tuple[list[_Run], list[_Run]] = [], []
        for number in range(repeats):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                runs[which].append(_generate(engines[which], start, new_tokens, str(number)))
            progress("speculation", number + 1, repeats)
    expected, drafted = runs
    unequal = (at for at in range(new_tokens) if len({run.tokens[at] for run in (*expected, *drafted)}) > 1)
    speeds = [statistics.median(run.tokens_per_second for run in each) for each in runs]
    return SpeculationResult(
        what="bench speculative",
        machine=machine_info(),
        commit=commit_id(),
        dtype=llm.model.dtype_name,
        parameters=sum(parameter.numel() for parameter in llm.model.parameters()),
        speculative=speculative,
        prompt=len(start),
        new_tokens=new_tokens,
        repeats=repeats,
        baseline_tokens_per_second=speeds[0],
        tokens_per_second=speeds[1],
        steps=sum(run.steps for run in drafted),
        draft_steps=sum(run.draft_steps for run in drafted),
        draft_tokens=sum(run.draft_tokens for run in drafted),
        accepted_tokens=sum(run.accepted_tokens for run in drafted),
        outputs_agree=next(unequal, new_tokens),
    )


@dataclass(frozen=True)
class _Run:
    tokens: list[int]
    tokens_per_second: float
    steps: int
    draft_steps: int
    draft_tokens: int
    accepted_tokens: int


def _generate(engine: Engine, prompt: Sequence[int], new_tokens: int, salt: str) -> _Run:
    """Generate greedily; the salt keeps the prompt out of the prefix cache of the other runs."""
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    request = engine.add_request(prompt, sampling, cache_salt=f"bench {salt}")
    metrics, tokens = engine.metrics(request), list[int]()
    steps = draft_steps = num_first = 0
    begin = 0.0
    while not engine.idle:
        num_drafts = metrics.num_draft_tokens
        for chunk in engine.step():
            if chunk.error is not None:
                raise EngineError(f"bench: {chunk.error}")
            tokens += [] if chunk.token_id is None else [chunk.token_id]
        steps, draft_steps = steps + 1, draft_steps + (metrics.num_draft_tokens > num_drafts)
        if tokens and not num_first:
            begin, num_first = time.perf_counter(), len(tokens)
    speed = (len(tokens) - num_first) / (time.perf_counter() - begin)
    return _Run(tokens, speed, steps, draft_steps, metrics.num_draft_tokens, metrics.num_accepted_tokens)
