"""Summarizer objective: attention over summaries approximates full attention.

The model is frozen. It reads the rows once without a cache, and every layer's queries, keys, values and outputs are
recorded. Then each layer's attention is computed again, ``interval`` queries at a time, over what a cache would hold
for them: the latest ``recent`` tokens unchanged, and one summary for every ``ratio`` older ones::

    recent 8, interval 8, ratio 4, queries 16 .. 23: summaries of 0-3, 4-7 | tokens 8 .. 15 | the queries' own 16 .. 23

The loss is the squared difference of the outputs over the squared outputs, averaged over layers: 0.01 means that
attention deviates by a tenth of its size. Chunks that span two documents are not summarized.
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
    TokenPositions,
    WrappedView,
)
from kvad.train.config import SummarizerConfig
from kvad.train.data import Batch
from kvad.train.objectives.cross_entropy import Autocast, EvalResult


class SummaryDistillation:
    """Objective of a summarizer's training; ``model`` gets no gradient."""

    def __init__(
        self, model: Transformer, summarizer: Summarizer, options: SummarizerConfig, autocast: Autocast
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self._layers, self._options, self._autocast = summarizer.by_layer(), options, autocast

    def accumulate_gradients(self, batch: Batch, total: float) -> float:
        """Add the gradient of this batch's share of the loss; return the loss times its targets."""
        summed, count = 0.0, len(batch.targets)
        for loss in self._losses(batch):
            share = loss * (count / len(self._layers))
            (share / total).backward()
            summed += share.item()
        return summed

    @torch.no_grad()
    def evaluate_loss(self, batches: Iterable[Batch]) -> EvalResult:
        """Return the mean loss, weighted by each batch's targets, and the number of targets."""
        summed, count = 0.0, 0
        for batch in batches:
            losses = [loss.item() for loss in self._losses(batch)]
            summed += math.fsum(losses) / len(losses) * len(batch.targets)
            count += len(batch.targets)
        return EvalResult(summed / max(count, 1), count)

    def _losses(self, batch: Batch) -> Iterator[Tensor]:
        """Yield the loss of each layer that has a summarizer."""
        rows = _Rows(batch.model_input, self._options)
        recorder = _Recorder(NoCache(self.model.config), self._layers)
        with torch.no_grad(), self._autocast():
            self.model(batch.model_input, recorder)
        for number, layer in self._layers.items():
            record = recorder.records.pop(number)
            yield rows.loss(record, layer)


class _LayerRecord(NamedTuple):
    """Inputs and output of one layer's attention."""

    q: Tensor  # [T, H, D]
    k: Tensor  # [T, K, D], not rotated
    v: Tensor  # [T, K, Dv]
    params: AttentionParams
    out: Tensor  # [T, H, Dv]


class _Recorder:
    """Cache that forwards to another one and records the attention of ``layers``."""

    def __init__(self, cache: CacheProtocol, layers: Iterable[int]) -> None:
        self._cache, self._layers = cache, frozenset(layers)
        self.records: dict[int, _LayerRecord] = {}

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        views = self._cache.open(model_input)
        return [_RecordingView(self.records, n, view) if n in self._layers else view for n, view in enumerate(views)]


class _RecordingView(WrappedView):
    def __init__(self, records: dict[int, _LayerRecord], layer: int, view: CacheView) -> None:
        super().__init__(view)
        self._records, self._layer = records, layer

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        assert k is not None and v is not None, "self-attention passes its own keys and values"
        out = self.view.attend(q, k, v, params)
        q, k, v, output = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v, out))
        self._records[self._layer] = _LayerRecord(q, k, v, params, output)
        return out


class _Span(NamedTuple):
    """Queries ``low`` to ``high``; tokens before ``first`` are read as summaries."""

    first: int
    low: int
    high: int
    recent: ops.attention.AttentionMask
    older: ops.attention.AttentionMask
    exact: ops.attention.AttentionMask | None  # older tokens of chunks that are not summarized


class _Rows:
    """Rows of one sub-batch, cut into chunks and spans; shared by all layers."""

    def __init__(self, model_input: ModelInput, options: SummarizerConfig) -> None:
        (sub_batch,) = model_input.sub_batches
        self.rows, self.length, self.ratio = sub_batch.num_seqs, sub_batch.num_new_tokens, options.ratio
        self.angles = ops.rotary.RotaryCache(model_input.positions)
        position = model_input.positions.view(self.rows, self.length)
        document = None if model_input.document_ids is None else model_input.document_ids.view(self.rows, self.length)
        self.chunks = self.length // self.ratio
        num_chunked = self.chunks * self.ratio
        shape = (self.rows, self.chunks, self.ratio)
        self.middle = position[:, :num_chunked].view(shape).double().mean(-1)  # [R, C]
        is_exact = torch.arange(self.chunks, device=position.device) < options.num_sinks // self.ratio
        is_exact = is_exact.expand(self.rows, -1)
        owner = None
        if document is not None:
            owners = document[:, :num_chunked].view(shape)
            is_exact, owner = is_exact | (owners != owners[..., :1]).any(-1), owners[..., 0]
        self._all = TokenPositions(position, document)
        self._exact = TokenPositions(
            position[:, :num_chunked].masked_fill(~is_exact.repeat_interleave(self.ratio, 1), -1), document
        )
        self._older = TokenPositions(self.middle.long().masked_fill(is_exact, -1), owner)
        self.spans = list(self._build_spans(options, bool(is_exact.any())))

    def _build_spans(self, options: SummarizerConfig, is_exact: bool) -> Iterator[_Span]:
        pattern = AttentionPattern()
        for low in range(0, self.length, options.interval):
            first = max(0, low - options.recent) // self.ratio * self.ratio
            if first <= options.num_sinks:
                continue
            high = min(low + options.interval, self.length)
            queries, chunks = _part(self._all, low, high), first // self.ratio
            recent = ops.attention.AttentionMask(queries, _part(self._all, first, high), pattern)
            exact = ops.attention.AttentionMask(queries, _part(self._exact, 0, first), pattern) if is_exact else None
            older = ops.attention.AttentionMask(queries, _part(self._older, 0, chunks), pattern)
            yield _Span(first, low, high, recent, older, exact)

    def loss(self, record: _LayerRecord, layer_summarizer: torch.nn.Module) -> Tensor:
        """Return the loss of one layer."""
        expected = self._flat(record.out)
        error = norm = expected.new_zeros(())
        for span, answer in self.answers(record, layer_summarizer):
            target = expected[:, span.low : span.high]
            error = error + (answer - target).square().sum()
            norm = norm + target.square().sum()
        return error / norm.clamp(min=torch.finfo(norm.dtype).tiny)

    def answers(self, record: _LayerRecord, layer_summarizer: torch.nn.Module) -> Iterator[tuple[_Span, Tensor]]:
        """Yield each span and attention with summaries of older tokens [R, high - low, H, Dv]."""
        rotary, params = record.params.rotary, record.params
        q, k = record.q, record.k
        if rotary is not None:
            q, k = self.angles.rotate(q, rotary), self.angles.rotate(k, rotary)
        q = self._flat(q)
        k, v = self._flat(k).transpose(1, 2), self._flat(record.v).transpose(1, 2)
        key, value, weight = self._summaries(record, layer_summarizer)
        for span in self.spans:
            queries, count = q[:, span.low : span.high], span.first // self.ratio
            older = span.older.with_weight(weight[:, :, :count])
            parts = [ops.merge.AttentionPart(queries, key[:, :, :count], value[:, :, :count], older)]
            if span.exact is not None:
                parts.append(ops.merge.AttentionPart(queries, k[:, :, : span.first], v[:, :, : span.first], span.exact))
            recent = slice(span.first, span.high)
            parts.append(ops.merge.AttentionPart(queries, k[:, :, recent], v[:, :, recent], span.recent))
            yield span, ops.merge.merge_attention(parts, params).out

    def _summaries(self, record: _LayerRecord, layer_summarizer: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Return cached keys [R, K, C, D], values [R, K, C, Dv] and weights [R, K, C]."""
        rotary, short = record.params.rotary, []
        for x in (record.k, record.v):
            x = self._flat(x)[:, : self.chunks * self.ratio]
            short.append(x.unflatten(1, (self.chunks, self.ratio)).transpose(2, 3).flatten(0, 1))
        summaries = layer_summarizer(*short)
        key, value, weight = (x.unflatten(0, (self.rows, self.chunks)).transpose(1, 2) for x in summaries)
        if rotary is not None:
            inv_freq = rotary.inv_freq if rotary.inv_freq.dim() == 1 else rotary.inv_freq[0]  # equal limits
            key = ops.rotary.rotate_blocks(key, self.middle, rotary._replace(inv_freq=inv_freq), rotary.factor)
        return key, value, weight + math.log(self.ratio)

    def _flat(self, x: Tensor) -> Tensor:
        """Reshape [T, ...] to [R, L, ...]."""
        rows: Tensor = x.unflatten(0, (self.rows, self.length))
        return rows


def _part(positions: TokenPositions, low: int, high: int) -> TokenPositions:
    return TokenPositions(
        positions.position[:, low:high], None if positions.document_id is None else positions.document_id[:, low:high]
    )
