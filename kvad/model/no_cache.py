"""Fresh: the memory that forgets.  Every lane row attends to its own new tokens and nothing is kept.

Training, encoders and the uncached judge use it; ``kvad verify`` holds every cache against it.  A source is kept, with
its graph, for the forward pass that it came with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvad import ops
from kvad.config import AttentionSpec, ModelConfig, attention_specs, encoder_attention_specs
from kvad.model_input import AttentionParams, AttentionPattern, CacheView, ModelInput, SubBatch, TokenPositions


class NoCache:
    """``open`` gives one view per decoder layer and one per cross-attention; layers of equal reach share masks.

    ``specs``: the layers as a cache's policy lets them see (``CacheConfig.narrowed``), to judge that cache by;
    ``exact``: rotary angles in float64, as a cache of rows without an end has them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        specs: Sequence[AttentionSpec] | None = None,
        exact_rope: bool = False,
        kernel: ops.attention.Kernel = "auto",
        attention_hook: ops.sub_batch.AttentionHook | None = None,
    ) -> None:
        self._specs = attention_specs(config) if specs is None else tuple(specs)
        self._exact_rope = exact_rope or any(spec.renumber_positions for spec in self._specs)
        self._kernel, self._attention_hook = kernel, attention_hook

    def open(self, step: ModelInput) -> Sequence[CacheView]:
        own = [spec for spec in self._specs if not spec.is_cross_attention]
        views = _views(own, step, self._kernel, self._attention_hook, self._exact_rope)
        if step.encoder_input is not None:
            first, count = len(own), len(self._specs) - len(own)
            shared = _CrossAttentionPlan(step, step.encoder_input)
            views += [_CrossAttentionView(first + i, shared, self._kernel, self._attention_hook) for i in range(count)]
        return views


class EncoderNoCache:
    """One view per layer of the encoder: it has no other memory than this."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        kernel: ops.attention.Kernel = "auto",
        attention_hook: ops.sub_batch.AttentionHook | None = None,
    ) -> None:
        self._specs = encoder_attention_specs(config)
        self._kernel, self._attention_hook = kernel, attention_hook

    def open(self, step: ModelInput) -> Sequence[CacheView]:
        return _views(self._specs, step, self._kernel, self._attention_hook)


def _views(
    specs: Sequence[AttentionSpec],
    step: ModelInput,
    kernel: ops.attention.Kernel,
    probe: ops.sub_batch.AttentionHook | None,
    exact: bool = False,
) -> list[CacheView]:
    angles = ops.rotary.RotaryCache(step.positions, exact=exact)
    spans = ops.sub_batch.sub_batch_spans(step.sub_batches)
    readings: dict[AttentionPattern, list[ops.attention.AttentionMask]] = {}
    views: list[CacheView] = []
    for index, spec in enumerate(specs):
        reach = AttentionPattern.from_spec(spec)
        if reach not in readings:
            marks = [_token_positions(step, lane, span) for lane, span in zip(step.sub_batches, spans, strict=True)]
            readings[reach] = [ops.attention.AttentionMask(mark, mark, reach) for mark in marks]
        views.append(_SelfAttentionView(index, step.sub_batches, spans, readings[reach], angles, kernel, probe))
    return views


def _token_positions(step: ModelInput, lane: SubBatch, span: tuple[int, int]) -> TokenPositions:
    def cut(flat: Tensor) -> Tensor:
        return flat[span[0] : span[1]].view(lane.num_seqs, lane.num_new_tokens)

    return TokenPositions(
        *(None if x is None else cut(x) for x in (step.positions, step.document_ids, step.causal_order))  # type: ignore[arg-type]
    )


class _SelfAttentionView:
    def __init__(
        self,
        layer: int,
        lanes: Sequence[SubBatch],
        spans: Sequence[tuple[int, int]],
        readings: Sequence[ops.attention.AttentionMask],
        angles: ops.rotary.RotaryCache,
        kernel: ops.attention.Kernel,
        probe: ops.sub_batch.AttentionHook | None,
    ) -> None:
        self._layer, self._lanes, self._spans, self._readings = layer, lanes, spans, readings
        self._angles, self._kernel, self._probe = angles, kernel, probe

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams) -> Tensor:
        assert k is not None and v is not None, "self-attention brings its own keys and values"
        if score.rotary is not None:
            q, k = self._angles.rotate(q, score.rotary), self._angles.rotate(k, score.rotary)
        outs = []
        for number, (lane, (low, high), reading) in enumerate(
            zip(self._lanes, self._spans, self._readings, strict=True)
        ):
            queries = q[low:high].unflatten(0, (lane.num_seqs, lane.num_new_tokens))
            keys = k[low:high].unflatten(0, (lane.num_seqs, lane.num_new_tokens)).transpose(1, 2)
            values = v[low:high].unflatten(0, (lane.num_seqs, lane.num_new_tokens)).transpose(1, 2)
            at = slice(low, high)
            part = ops.merge.AttentionPart(queries, keys, values, reading)
            seen = ops.sub_batch.attend_sub_batch(self._layer, number, part, score, self._kernel, self._probe, at)
            outs.append(seen.out.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)

    def write(self, k: Tensor, v: Tensor) -> None:
        raise AssertionError("self-attention reads no source")


class _CrossAttentionPlan:
    """Which source row each decoder row attends to: shared by the cross-attention of all layers."""

    def __init__(self, step: ModelInput, source: ModelInput) -> None:
        assert len(step.sub_batches) in (0, len(source.sub_batches)), "a lane of sources for each lane of rows"
        self.spans, self.sources = (
            ops.sub_batch.sub_batch_spans(step.sub_batches),
            ops.sub_batch.sub_batch_spans(source.sub_batches),
        )
        self.lanes, self.readings = [], []
        for lane, span, there, at in zip(step.sub_batches, self.spans, source.sub_batches, self.sources, strict=False):
            self.lanes.append((ops.sub_batch.fold_rows(lane, there.num_seqs), there))
            queries, keys = (
                _token_positions(step, ops.sub_batch.fold_rows(lane, there.num_seqs), span),
                _token_positions(source, there, at),
            )
            if queries.document_id is None or keys.document_id is None:
                queries, keys = queries._replace(document_id=None), keys._replace(document_id=None)
            self.readings.append(ops.attention.AttentionMask(queries, keys, AttentionPattern(causal=False)))


class _CrossAttentionView:
    def __init__(
        self,
        layer: int,
        shared: _CrossAttentionPlan,
        kernel: ops.attention.Kernel,
        probe: ops.sub_batch.AttentionHook | None,
    ) -> None:
        self._layer, self._shared, self._kernel, self._probe = layer, shared, kernel, probe
        self._held: tuple[Tensor, Tensor] | None = None

    def write(self, k: Tensor, v: Tensor) -> None:
        self._held = k, v

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams) -> Tensor:
        assert k is None and v is None and self._held is not None, "the source is written before it is read"
        shared, (keys, values), outs = self._shared, self._held, []
        for number, (lane, there) in enumerate(shared.lanes):
            (low, high), (first, last) = shared.spans[number], shared.sources[number]
            queries, reading = q[low:high].unflatten(0, (lane.num_seqs, lane.num_new_tokens)), shared.readings[number]
            k, v = (
                x[first:last].unflatten(0, (there.num_seqs, there.num_new_tokens)).transpose(1, 2)
                for x in (keys, values)
            )
            at = slice(low, high)
            part = ops.merge.AttentionPart(queries, k, v, reading)
            seen = ops.sub_batch.attend_sub_batch(self._layer, number, part, score, self._kernel, self._probe, at)
            outs.append(seen.out.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)
