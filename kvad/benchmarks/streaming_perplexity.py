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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.benchmarks.cache_quality import attach_logit_hook
from kvad.benchmarks.variants import Variant, build_engine
from kvad.engine.scheduling import SamplingParams, SchedulerOutput
from kvad.errors import EngineError, UsageError
from kvad.llm import LLM
from kvad.model import NoCache
from kvad.model_input import ModelInput, SubBatch

BATCH = 4096  # tokens of the windows that the reference computes at a time
Progress = Callable[[str, int, int], None]  # (label, tokens done, total)


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
    """Result of ``kvad bench streaming``.

    ``worst``: the largest ratio; ``mean``: over all tokens.
    """

    cache: str
    tokens: int
    limit: int
    chunk: int
    spans: tuple[SpanPerplexity, ...]
    flatness: float
    raw: float
    worst: float
    mean: float


def bench_streaming(
    llm: LLM,
    variant: Variant,
    tokens: Sequence[int],
    *,
    span: int = 10_000,
    chunk: int = 16,
    progress: Progress = lambda _what, _done, _total: None,
) -> StreamingResult:
    """Stream ``tokens`` through the variant's cache.

    Raises:
        UsageError: For fewer than two spans, or chunks that do not fit the limit.
        RequestError: For a cache that cannot hold a sequence beyond the model's limit.
    """
    limit = llm.model.config.max_seq_len
    if len(tokens) < 2 * span:
        raise UsageError(
            f"{len(tokens):,} tokens of text are less than two spans of {span:,}",
            "give more --text, or a smaller --span-length",
        )
    own = _cached_logprobs(llm, variant, tokens, chunk, progress)
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


def _cached_logprobs(llm: LLM, variant: Variant, tokens: Sequence[int], chunk: int, progress: Progress) -> Tensor:
    """Return [T], the log-probability of every token through the cache, 0 for the first."""
    ids, found = torch.tensor(tokens), torch.zeros(len(tokens), dtype=torch.float64)

    def record(plan: SchedulerOutput, logits: Tensor) -> None:
        (work,) = plan.scheduled
        first = work.start + work.logit_offsets.start
        last = min(first + len(work.logit_offsets), len(tokens) - 1)
        if last > first:
            message = F.log_softmax(logits[: last - first].float(), dim=-1).cpu()
            found[first + 1 : last + 1] = message.gather(-1, ids[first + 1 : last + 1, None]).squeeze(-1).double()
        progress("stream", last, len(tokens))

    limit = llm.model.config.max_seq_len
    engine = build_engine(llm, variant, limit, rows=1, capacity=limit, chunk=chunk)
    try:
        attach_logit_hook(engine, record)
        engine.add_request(tokens, SamplingParams(max_tokens=0, prompt_logprobs=0))
        while not engine.idle:
            for piece in engine.step():
                if piece.error is not None:
                    raise EngineError(f"bench streaming: {piece.error}")
    finally:
        engine.close()
    return found


@torch.inference_mode()
def reference_logprobs_windowed(
    llm: LLM, tokens: Sequence[int], progress: Progress = lambda _what, _done, _total: None
) -> Tensor:
    """Return [T], the log-probability of every token without a cache, 0 for the first.

    Each is computed from at least three quarters of the limit before it, if available.
    """
    limit = min(llm.model.config.max_seq_len, len(tokens))
    stride = max(1, limit // 4)
    ids, found = torch.tensor(tokens), torch.zeros(len(tokens), dtype=torch.float64)
    starts = list(dict.fromkeys((*range(0, len(tokens) - limit, stride), len(tokens) - limit)))
    known = 1
    for low in range(0, len(starts), max(1, BATCH // limit)):
        batch = starts[low : low + max(1, BATCH // limit)]
        rows = torch.stack([ids[start : start + limit] for start in batch])
        logits = _uncached_logprobs(llm, rows)[:, :-1]
        message = (
            F.log_softmax(logits.float(), dim=-1).gather(-1, rows[:, 1:, None].to(logits.device)).squeeze(-1).cpu()
        )
        for start, row in zip(batch, message, strict=True):
            found[known : start + limit] = row[known - start - 1 :].double()
            known = start + limit
        progress("reference", known, len(tokens))
    return found


def _uncached_logprobs(llm: LLM, rows: Tensor) -> Tensor:
    """Compute [R, L] -> [R, L, V] without a cache."""
    model, (count, length) = llm.model, rows.shape
    flat = rows.reshape(-1).to(model.token_embedding.device)
    every = torch.arange(len(flat), device=flat.device)
    positions = every % length
    step = ModelInput(
        flat, positions, (SubBatch(count, length, length),), every, max_seq_lens=torch.full_like(every, length)
    )
    logits: Tensor = model.logits(model(step, NoCache(model.config)), every)
    return logits.view(count, length, -1)


def _perplexity(logprobs: Tensor) -> float:
    return math.exp(-float(logprobs.mean()))
