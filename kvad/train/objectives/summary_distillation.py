"""The objective of learned summaries: with them, attention is to answer what it answers with every token.

The model is frozen.  It reads the rows once, without a cache, and every layer's queries, keys, values and answer are
kept.  Then each layer is asked again, ``every`` queries at a time, with what a cache would hold for them: the latest
``recent`` tokens as they are, and one summary for every ``ratio`` older ones::

    recent 8, every 8, ratio 4, queries 16 .. 23:   summaries of 0-3, 4-7 | tokens 8 .. 15 | the queries' own 16 .. 23

The loss is the squared difference of the answers over the squared answers, a mean over layers: 0.01 says that attention
is off by a tenth of its own size.  Tokens of a chunk that two documents share stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvad import ops
from kvad.model import NoCache, Summarizer, Transformer
from kvad.model_input import (
    AttentionParams,
    AttentionPattern,
    CacheProtocol,
    CacheView,
    ModelInput,
    Rotary,
    TokenPositions,
)
from kvad.train.config import SummarizerConfig
from kvad.train.data import Batch
from kvad.train.objectives.cross_entropy import Autocast, EvalResult


class SummaryDistillation:
    """What the loop trains a compressor by; ``model`` gets no gradient."""

    def __init__(
        self, model: Transformer, compressor: Summarizer, options: SummarizerConfig, autocast: Autocast
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self._layers, self._options, self._autocast = compressor.by_layer(), options, autocast

    def accumulate_gradients(self, batch: Batch, total: float) -> float:
        """Add the gradient of this batch's share of the loss; returns the loss times its targets."""
        summed, count = 0.0, len(batch.targets)
        for loss in self._losses(batch):
            share = loss * (count / len(self._layers))
            (share / total).backward()
            summed += share.item()
        return summed

    @torch.no_grad()
    def evaluate_loss(self, batches: Iterable[Batch]) -> EvalResult:
        """Mean loss, each batch by its targets, and how many targets there were."""
        summed, count = 0.0, 0
        for batch in batches:
            losses = [loss.item() for loss in self._losses(batch)]
            summed += math.fsum(losses) / len(losses) * len(batch.targets)
            count += len(batch.targets)
        return EvalResult(summed / max(count, 1), count)

    def _losses(self, batch: Batch) -> Iterator[Tensor]:
        """Of each layer that has a compressor."""
        rows = _Rows(batch.model_input, self._options)
        recorder = _Recorder(NoCache(self.model.config), self._layers)
        with torch.no_grad(), self._autocast():
            self.model(batch.model_input, recorder)
        for number, layer in self._layers.items():
            seen = recorder.seen.pop(number)
            yield rows.loss(seen, layer)


# ---------------------------------------------------------------- what a layer saw


class _LayerRecord(NamedTuple):
    """q [T, H, D], k [T, K, D] not rotated, v [T, K, Dv], and the answer [T, H, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    score: AttentionParams
    out: Tensor


class _Recorder:
    """A memory that keeps what the layers ``wanted`` ask of another, and what they are told."""

    def __init__(self, memory: CacheProtocol, wanted: Iterable[int]) -> None:
        self._memory, self._wanted = memory, frozenset(wanted)
        self.seen: dict[int, _LayerRecord] = {}

    def open(self, step: ModelInput) -> Sequence[CacheView]:
        views = self._memory.open(step)
        return [_RecordingView(self.seen, n, view) if n in self._wanted else view for n, view in enumerate(views)]


class _RecordingView:
    def __init__(self, seen: dict[int, _LayerRecord], layer: int, view: CacheView) -> None:
        self._seen, self._layer, self._view = seen, layer, view

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams) -> Tensor:
        assert k is not None and v is not None, "self-attention brings its own keys and values"
        out = self._view.attend(q, k, v, score)
        q, k, v, told = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v, out))
        self._seen[self._layer] = _LayerRecord(q, k, v, score, told)
        return out

    def write(self, k: Tensor, v: Tensor) -> None:
        raise AssertionError("self-attention reads no source")


# ---------------------------------------------------------------- what it is asked again


class _Span(NamedTuple):
    """Queries ``low`` to ``high``: they read the tokens from ``first`` on, and what is older by summaries (``exact``:
    by themselves, where a chunk has none)."""

    first: int
    low: int
    high: int
    recent: ops.attention.AttentionMask
    older: ops.attention.AttentionMask
    exact: ops.attention.AttentionMask | None


class _Rows:
    """The rows of one step, of one lane, cut into chunks and spans; shared by all layers."""

    def __init__(self, step: ModelInput, options: SummarizerConfig) -> None:
        (lane,) = step.sub_batches
        self.rows, self.length, self.ratio = lane.num_seqs, lane.num_new_tokens, options.ratio
        self.angles = ops.rotary.RotaryCache(step.positions)
        position = step.positions.view(self.rows, self.length)
        document = None if step.document_ids is None else step.document_ids.view(self.rows, self.length)
        self.chunks = self.length // self.ratio
        whole = self.chunks * self.ratio
        cut = (self.rows, self.chunks, self.ratio)
        self.middle = position[:, :whole].view(cut).double().mean(-1)  # [R, C]
        kept = torch.arange(self.chunks, device=position.device) < options.num_sinks // self.ratio
        kept = kept.expand(self.rows, -1)
        owner = None
        if document is not None:
            owners = document[:, :whole].view(cut)
            kept, owner = kept | (owners != owners[..., :1]).any(-1), owners[..., 0]
        self._every = TokenPositions(position, document)
        self._exact = TokenPositions(
            position[:, :whole].masked_fill(~kept.repeat_interleave(self.ratio, 1), -1), document
        )
        self._older = TokenPositions(self.middle.long().masked_fill(kept, -1), owner)
        self.spans = list(self._cut(options, bool(kept.any())))

    def _cut(self, options: SummarizerConfig, kept: bool) -> Iterator[_Span]:
        reach = AttentionPattern()
        for low in range(0, self.length, options.interval):
            first = max(0, low - options.recent) // self.ratio * self.ratio
            if first <= options.num_sinks:
                continue
            high = min(low + options.interval, self.length)
            queries, chunks = _part(self._every, low, high), first // self.ratio
            recent = ops.attention.AttentionMask(queries, _part(self._every, first, high), reach)
            exact = ops.attention.AttentionMask(queries, _part(self._exact, 0, first), reach) if kept else None
            older = ops.attention.AttentionMask(queries, _part(self._older, 0, chunks), reach)
            yield _Span(first, low, high, recent, older, exact)

    def loss(self, seen: _LayerRecord, compress: torch.nn.Module) -> Tensor:
        """Of one layer."""
        told = self._flat(seen.out)
        wrong = norm = told.new_zeros(())
        for span, answer in self.answers(seen, compress):
            right = told[:, span.low : span.high]
            wrong = wrong + (answer - right).square().sum()
            norm = norm + right.square().sum()
        return wrong / norm.clamp(min=torch.finfo(norm.dtype).tiny)

    def answers(self, seen: _LayerRecord, compress: torch.nn.Module) -> Iterator[tuple[_Span, Tensor]]:
        """What attention answers to each span with summaries in the place of older tokens: [R, high - low, H, Dv]."""
        rotary, score = seen.score.rotary, seen.score
        q, k = seen.q, seen.k
        if rotary is not None:
            q, k = self.angles.rotate(q, rotary), self.angles.rotate(k, rotary)
        q = self._flat(q)
        k, v = self._flat(k).transpose(1, 2), self._flat(seen.v).transpose(1, 2)
        key, value, weight = self._summaries(seen, rotary, compress)
        for span in self.spans:
            asked, count = q[:, span.low : span.high], span.first // self.ratio
            older = span.older.with_weight(weight[:, :, :count])
            parts = [ops.merge.AttentionPart(asked, key[:, :, :count], value[:, :, :count], older)]
            if span.exact is not None:
                parts.append(ops.merge.AttentionPart(asked, k[:, :, : span.first], v[:, :, : span.first], span.exact))
            parts.append(
                ops.merge.AttentionPart(
                    asked, k[:, :, span.first : span.high], v[:, :, span.first : span.high], span.recent
                )
            )
            yield span, ops.merge.merge_attention(parts, score).out

    def _summaries(
        self, seen: _LayerRecord, rotary: Rotary | None, compress: torch.nn.Module
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys as a cache keeps them [R, K, C, D], values [R, K, C, Dv] and weights [R, K, C]."""
        short = []
        for x in (seen.k, seen.v):
            x = self._flat(x)[:, : self.chunks * self.ratio]
            short.append(x.unflatten(1, (self.chunks, self.ratio)).transpose(2, 3).flatten(0, 1))
        made = compress(*short)
        key, value, weight = (x.unflatten(0, (self.rows, self.chunks)).transpose(1, 2) for x in made)
        if rotary is not None:
            one = rotary if rotary.inv_freq.dim() == 1 else rotary._replace(inv_freq=rotary.inv_freq[0])  # equal limits
            key = ops.rotary.rotate_blocks(key, self.middle, one, rotary.factor)
        return key, value, weight + math.log(self.ratio)

    def _flat(self, x: Tensor) -> Tensor:
        """[T, ...] -> [R, L, ...]."""
        rows: Tensor = x.unflatten(0, (self.rows, self.length))
        return rows


def _part(mark: TokenPositions, low: int, high: int) -> TokenPositions:
    return TokenPositions(
        mark.position[:, low:high], None if mark.document_id is None else mark.document_id[:, low:high]
    )
