"""What a cache costs in quality: perplexity and KL against budget, and how much is found again.

Everything runs through the real engine, with the cache that is judged; the judge is the model without any cache
(:class:`~kvad.model.fresh.Fresh`).  Three measures:

*perplexity*: teacher-forced over rows of real text.  A row is read in chunks of ``chunk`` tokens, so a token sees what
the cache has kept, and at most so many tokens of its own chunk.  *kl*: the mean over the same tokens of
KL(model without a cache || model with this one), in nats.  *recall*: the share of tasks (``tasks.py``) whose answer
comes out when the likeliest token is taken every time.

A recall says something only where the full cache finds what was hidden: :data:`ENOUGH`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.engine.engine import Engine
from kvad.engine.request import SamplingParams
from kvad.engine.runner import ModelRunner
from kvad.engine.scheduler import SchedulerOutput
from kvad.errors import EngineError, UsageError
from kvad.lab.tasks import TASK_KINDS, HaystackLanguage, Kind, NeedleTask, make_task
from kvad.lab.variants import Variant, build_engine
from kvad.llm import LLM

__all__ = [
    "MIN_FULL_RECALL",
    "QuestionPosition",
    "QualityOptions",
    "NeedleCell",
    "TextQuality",
    "greedy_answers",
    "grid_cells",
    "reference_logprobs",
    "attach_logit_hook",
    "measure_cell",
    "measure_perplexity",
]

JITTER = 0.05  # of a task's depth, to each side
MIN_FULL_RECALL = 0.95  # recall of the full cache below which a bench of recall says nothing
QuestionPosition = Literal["after", "before"]
EvictionTiming = Literal["often", "once"]


@dataclass(frozen=True)
class QualityOptions:
    """``lengths`` and ``depths``: of the heat map's grid, ``tasks``: of each of its cells.  ``texts``: rows of text,
    ``text_length`` tokens each.  ``rows``: at a time.

    ``asked``: only ``after`` the prompt was read and cut, token by token; or the prompt tells ``before`` what will be
    asked then, so that a cache that looks at queries can know what it will be good for (kvpress' query-agnostic and
    query-aware).  ``chunk``: tokens of a row in one step.  ``cut``: a policy that ranks cuts after every chunk, as it
    must where memory is scarce, and holds up to a chunk more than its budget in between; or, of tasks, only ``once``,
    right behind the prompt, as kvpress' do.
    """

    tasks: tuple[Kind, ...] = TASK_KINDS
    lengths: tuple[int, ...] = (128, 256, 512)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples_per_cell: int = 8
    num_texts: int = 8
    text_length: int = 512
    question_position: QuestionPosition = "after"
    evict_after: EvictionTiming = "often"
    max_num_seqs: int = 8
    prefill_chunk_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples_per_cell", "max_num_seqs", "prefill_chunk_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: must be at least 1, found {getattr(self, name)}")
        if self.num_texts < 0 or self.text_length < 2:
            raise UsageError(f"texts {self.num_texts} of {self.text_length} tokens: none at least, of two at least")
        for kind in self.tasks:
            if kind not in TASK_KINDS:
                raise UsageError(f"unknown task {kind!r}", ", ".join(TASK_KINDS))
        if any(not 0 <= depth <= 1 for depth in self.depths) or not self.depths:
            raise UsageError(f"depths {self.depths}: shares of the haystack, from 0 to 1")


@dataclass(frozen=True)
class TextQuality:
    """What a variant makes of the texts.  ``ratio``: perplexity over that without a cache; ``agree``: the share of
    tokens whose likeliest successor is the same."""

    perplexity: float
    reference: float
    kl: float
    agree: float
    tokens: int

    @property
    def ratio(self) -> float:
        return self.perplexity / self.reference


# ---------------------------------------------------------------- texts


LogitHook = Callable[[SchedulerOutput, Tensor], None]


class _LogitHookRunner(ModelRunner):
    """The engine's runner, which shows the plan and its logits [N, V] to ``hear``."""

    hear: LogitHook

    def execute(self, plan: SchedulerOutput) -> Tensor:
        logits = super().execute(plan)
        self.hear(plan, logits)
        return logits


def attach_logit_hook(engine: Engine, hear: LogitHook) -> None:
    """From now on ``hear`` is shown every step's plan and logits [N, V]."""
    ear = _LogitHookRunner(engine.model, engine.kv_cache)
    ear.hear = hear
    engine.runner = ear


def reference_logprobs(llm: LLM, tokens: Sequence[int]) -> Tensor:
    """[T, V] log-probabilities in float32: what the model says without a cache."""
    return llm.logits(tokens).float().log_softmax(-1)


@dataclass
class _ScoreSums:
    """Sums over the tokens that were scored."""

    own: float = 0.0
    judge: float = 0.0
    kl: float = 0.0
    agree: int = 0
    tokens: int = 0

    def add(self, true: Tensor, have: Tensor, targets: Tensor) -> None:
        """``true``, ``have`` [n, V] log-probabilities; ``targets`` [n]."""
        at = targets.unsqueeze(-1)
        self.own -= float(have.gather(-1, at).double().sum())
        self.judge -= float(true.gather(-1, at).double().sum())
        self.kl += float((true.exp() * (true - have)).sum(-1).clamp(min=0).double().sum())
        self.agree += int((true.argmax(-1) == have.argmax(-1)).sum())
        self.tokens += len(targets)

    def told(self) -> TextQuality:
        count = self.tokens
        own, judge = _exp(self.own / count), _exp(self.judge / count)
        return TextQuality(own, judge, self.kl / count, self.agree / count, count)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:  # a model that is sure of what is wrong
        return math.inf


def measure_perplexity(
    llm: LLM, variant: Variant, texts: Sequence[Sequence[int]], chunk: int, tick: Callable[[], None] = lambda: None
) -> TextQuality:
    """Perplexity and KL of a variant over rows of token ids, one row at a time."""
    tally = _ScoreSums()
    longest = max(map(len, texts))
    engine = build_engine(llm, variant, longest, rows=1, capacity=longest, chunk=chunk)
    try:
        for tokens in texts:
            true = reference_logprobs(llm, tokens)
            attach_logit_hook(engine, _against(true, tokens, tally))
            _run(engine, [engine.add_request(tokens, SamplingParams(max_tokens=0, prompt_logprobs=0))])
            tick()
    finally:
        engine.close()
    return tally.told()


def _against(true: Tensor, tokens: Sequence[int], tally: _ScoreSums) -> LogitHook:
    """Tallies a row's logits as its chunks come, beside ``true`` [T, V]."""
    ids = torch.tensor(tokens, device=true.device)

    def hear(plan: SchedulerOutput, logits: Tensor) -> None:
        (work,) = plan.scheduled
        first = work.start + work.logit_offsets.start
        last = min(first + len(work.logit_offsets), len(tokens) - 1)
        if last > first:
            have = F.log_softmax(logits[: last - first].float(), dim=-1)
            tally.add(true[first:last], have, ids[first + 1 : last + 1])

    return hear


def _run(engine: Engine, requests: Sequence[int]) -> dict[int, list[int]]:
    """The tokens that each request was answered with."""
    found: dict[int, list[int]] = {request: [] for request in requests}
    while not engine.idle:
        for piece in engine.step():
            if piece.error is not None:
                raise EngineError(f"request {piece.request}: {piece.error}")
            if piece.token_id is not None:
                found[piece.request].append(piece.token_id)
    return found


# ---------------------------------------------------------------- tasks


def greedy_answers(engine: Engine, tasks: Sequence[NeedleTask]) -> list[list[int]]:
    """What the engine answers to each task, greedily, ``task.room`` tokens each; all tasks are submitted at once."""
    requests = [_ask(engine, task) for task in tasks]
    found = _run(engine, requests)
    return [found[request][len(task.question) :] for request, task in zip(requests, tasks, strict=True)]


def _ask(engine: Engine, task: NeedleTask) -> int:
    """The question's tokens are generated, each the only one that is allowed in its place."""
    every, asked = range(engine.model.config.vocab_size), len(task.prompt)

    def allowed(tokens: Sequence[int]) -> Sequence[int]:
        place = len(tokens) - asked
        return (task.question[place],) if place < len(task.question) else every

    most = len(task.question) + task.answer_tokens
    return engine.add_request(
        task.prompt, SamplingParams(max_tokens=most, temperature=0, ignore_eos=True, allowed_tokens_fn=allowed)
    )


def grid_cells(options: QualityOptions, kind: Kind) -> Iterator[tuple[int, float]]:
    """(length, depth) of a kind's grid; a chain has one column: its links are spread over the haystack."""
    depths = options.depths if kind != "chain" else (0.0,)
    for length in options.lengths:
        for depth in depths:
            yield length, depth


@dataclass(frozen=True)
class NeedleCell:
    """One cell: how much was found of what was hidden at ``depth`` of ``length`` tokens; ``budget``: what stayed of
    the tokens that were read before the cache was cut for the last time."""

    kind: Kind
    length: int
    depth: float
    recall: float
    tasks: int
    budget: int


def measure_cell(
    llm: LLM,
    variant: Variant,
    language: HaystackLanguage,
    kind: Kind,
    length: int,
    depth: float,
    options: QualityOptions,
) -> NeedleCell:
    """One cell of one variant: ``options.tasks`` tasks, of a chain as many per depth; the same for every variant."""
    count = options.samples_per_cell * (
        len(options.depths) if kind == "chain" else 1
    )  # a chain's one column weighs as much
    seeds = range(options.seed * 1_000_003, options.seed * 1_000_003 + count)
    how: dict[str, Any] = {"align": options.prefill_chunk_size, "told": options.question_position == "before"}
    tasks = [make_task(kind, language, length, _near(depth, seed), seed, **how) for seed in seeds]
    shares = []
    for read in sorted({len(task.prompt) for task in tasks}):
        some = [task for task in tasks if len(task.prompt) == read]
        every = read if options.evict_after == "once" else None
        rows = min(options.max_num_seqs, len(some))
        engine = build_engine(
            llm, variant, read, rows=rows, capacity=length, chunk=options.prefill_chunk_size, every=every
        )
        try:
            found = greedy_answers(engine, some)
        finally:
            engine.close()
        shares += [language.answer_score(task.expected, answer) for task, answer in zip(some, found, strict=True)]
    return NeedleCell(kind, length, depth, math.fsum(shares) / count, count, variant.budget(read))


def _near(depth: float, seed: int) -> float:
    """Somewhere around the depth: what a policy keeps may hang on one position, and a cell should not."""
    return min(1.0, max(0.0, depth + random.Random(seed).uniform(-JITTER, JITTER)))
