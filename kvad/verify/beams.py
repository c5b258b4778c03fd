"""Beam searches, with the logits of every beam compared with the reference of the tokens behind it.

The tokens of a search are not known before it runs, so its computed spans are recorded with all tokens before them.
Afterwards the reference computes each beam that is no prefix of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from kvad import benchmarks
from kvad.cache import CacheConfig
from kvad.engine import Engine, EngineConfig
from kvad.engine.execution import ModelRunner
from kvad.engine.scheduling import SamplingParams, SchedulerOutput
from kvad.model import Transformer
from kvad.verify.reference_model import WholeSequence
from kvad.verify.replay import ReplayResult, ReplayStream

MAX_TOKENS = 8  # of a beam: each step adds beams that the reference computes


class BeamSpan(NamedTuple):
    """Logits of a computed span, ``tokens`` up to its end."""

    stream: int
    tokens: tuple[int, ...]
    logits: Tensor


class BeamRun(NamedTuple):
    """Logits of a search by sequence number, and the sequences that the reference computes."""

    replay: ReplayResult
    sequences: list[WholeSequence]


class _SpanRunner(ModelRunner):
    """Computes the logits of every position, and records them with their tokens."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.model, engine.kv_cache)
        self.spans: list[BeamSpan] = []

    def execute(self, output: SchedulerOutput) -> Tensor:
        logits, first, requested = super().execute(benchmarks.scorers.with_all_logits(output)), 0, list[int]()
        for scheduled in output.scheduled:
            tokens = tuple(scheduled.sequence.token_ids[: scheduled.start + scheduled.num_tokens])
            part = logits[first : first + scheduled.num_tokens].cpu()
            self.spans.append(BeamSpan(scheduled.sequence.request_id, tokens, part))
            requested += [first + offset for offset in scheduled.logit_offsets]
            first += scheduled.num_tokens
        return logits[requested]


def run_beams(
    model: Transformer, cache: CacheConfig, streams: Sequence[ReplayStream], num_beams: int, config: EngineConfig
) -> BeamRun:
    """Search from each stream's prompt with ``num_beams`` beams.

    Raises:
        ConfigError, RequestError: If the engine does not support it.
    """
    cache = replace(cache, max_num_seqs=max(num_beams, cache.max_num_seqs), num_blocks=None)
    engine = Engine(model, cache, config)
    runner = engine.runner = _SpanRunner(engine)
    counts = [min(MAX_TOKENS, len(stream.forced_tokens[0])) for stream in streams]
    try:
        for stream, count in zip(streams, counts, strict=True):
            sampling = SamplingParams(max_tokens=count, temperature=0, num_beams=num_beams, ignore_eos=True)
            engine.add_request(stream.prompt, sampling, encoder_token_ids=stream.source, cache_salt=stream.salt)
        benchmarks.scorers.run_engine(engine)
    finally:
        engine.close()
    sequences, run = list[WholeSequence](), ReplayResult({})
    for index, (stream, count) in enumerate(zip(streams, counts, strict=True)):
        spans = [span for span in runner.spans if span.stream == index]
        longest = list[tuple[int, ...]]()
        for tokens in sorted({span.tokens for span in spans}, key=len, reverse=True):
            if not any(other[: len(tokens)] == tokens for other in longest):
                longest.append(tokens)
        numbers = range(len(sequences), len(sequences) + len(longest))
        for span in spans:
            behind = zip(numbers, longest, strict=True)
            number = next(n for n, other in behind if other[: len(span.tokens)] == span.tokens)
            run.pieces.setdefault((number, 0), []).append((len(span.tokens) - len(span.logits), span.logits))
        sequences += [WholeSequence(tokens, len(stream.prompt) + count, stream.source) for tokens in longest]
    return BeamRun(run, sequences)
