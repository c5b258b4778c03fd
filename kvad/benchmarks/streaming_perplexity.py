"""Perplexity of a text much longer than the model's limit, per span of one endless stream.

The text goes through the real engine as one sequence, teacher-forced, in chunks. The cache drops tokens (sinks and a
window, for example), so every token attends to what the cache has kept.

Texts have easy and hard places, so a span's perplexity alone is not informative. The *reference* predicts the same
tokens without a cache, from windows recomputed at positions from 0, of ``limit`` tokens of which the last
``limit // 4`` are scored. The quotient is the ``ratio``: the text's own difficulty cancels.

*flatness* is the largest ratio over the smallest. 1.05 means that the worst 10,000 tokens are predicted 5% worse than
the best, measured by the same text. ``raw`` is the same for the perplexities themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from kvad.benchmarks.results import Progress, no_progress
from kvad.benchmarks.scorers import CachedScorer, ScoredRow, UncachedScorer
from kvad.benchmarks.variants import Variant, build_engine
from kvad.errors import UsageError
from kvad.llm import LLM

BATCH = 4096  # tokens of the windows that the reference computes at a time


@dataclass(frozen=True)
class SpanPerplexity:
    """Tokens ``start`` to ``stop`` of the stream: perplexities through the cache and by the reference."""

    start: int
    stop: int
    perplexity: float
    reference: float

    @property
    def ratio(self) -> float:
        return self.perplexity / self.reference


@dataclass(frozen=True)
class StreamingResult:
    """Result of ``kvad bench streaming``."""

    cache: str
    tokens: int
    limit: int
    chunk: int
    spans: tuple[SpanPerplexity, ...]
    flatness: float
    raw: float
    worst: float  # the largest ratio
    mean: float  # over all tokens


def bench_streaming(
    llm: LLM,
    variant: Variant,
    tokens: Sequence[int],
    *,
    span: int = 10_000,
    chunk: int = 16,
    progress: Progress = no_progress,
) -> StreamingResult:
    """Stream ``tokens`` through the variant's cache.

    UsageError for fewer than two spans; RequestError for a cache that cannot hold a sequence beyond the model's limit.
    """
    limit = llm.model.config.max_seq_len
    if len(tokens) < 2 * span:
        raise UsageError(
            f"{len(tokens):,} tokens of text are less than two spans of {span:,}",
            "give more --text, or a smaller --span-length",
        )
    with closing(build_engine(llm, variant, limit, rows=1, capacity=limit, chunk=chunk)) as engine:
        scorer = CachedScorer(engine, lambda position: progress("stream", position, len(tokens)))
        (scores,) = scorer.score([ScoredRow(torch.tensor(tokens))])
    own = torch.cat([torch.zeros(1), -scores.nats])
    true = reference_logprobs_windowed(llm, tokens, progress)
    edges = range(0, len(tokens) - span + 1, span)
    spans = tuple(
        SpanPerplexity(start, start + span, *(_perplexity(one[max(1, start) : start + span]) for one in (own, true)))
        for start in edges
    )
    ratios = [one.ratio for one in spans]
    raw = [one.perplexity for one in spans]
    return StreamingResult(
        cache=variant.label,
        tokens=len(tokens),
        limit=limit,
        chunk=chunk,
        spans=spans,
        flatness=max(ratios) / min(ratios),
        raw=max(raw) / min(raw),
        worst=max(ratios),
        mean=_perplexity(own[1:]) / _perplexity(true[1:]),
    )


def reference_logprobs_windowed(llm: LLM, tokens: Sequence[int], progress: Progress = no_progress) -> Tensor:
    """Return [T], the log-probability of every token without a cache, 0 for the first.

    Each is computed from at least three quarters of the limit before it, if available.
    """
    limit, scorer = min(llm.model.config.max_seq_len, len(tokens)), UncachedScorer(llm.model)
    ids, logprobs = torch.tensor(tokens), torch.zeros(len(tokens), dtype=torch.float64)
    starts = list(dict.fromkeys((*range(0, len(tokens) - limit, max(1, limit // 4)), len(tokens) - limit)))
    known, at_once = 1, max(1, BATCH // limit)
    for low in range(0, len(starts), at_once):
        batch = starts[low : low + at_once]
        windows = [ScoredRow(ids[start : start + limit]) for start in batch]
        for start, scores in zip(batch, scorer.score(windows), strict=True):
            logprobs[known : start + limit] = -scores.nats[known - start - 1 :]
            known = start + limit
        progress("reference", known, len(tokens))
    return logprobs


def _perplexity(logprobs: Tensor) -> float:
    return math.exp(-float(logprobs.mean()))
