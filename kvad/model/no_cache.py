"""NoCache: every sequence attends to its new tokens of the current model_input only.

Used by training, encoders and the uncached reference of ``kvad verify``. An encoder's output is stored, with its graph,
for the same forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvad import ops
from kvad.config import AttentionSpec, ModelConfig, attention_specs, encoder_attention_specs
from kvad.model_input import AttentionParams, AttentionPattern, CacheView, ModelInput, SubBatch, TokenPositions


class NoCache:
    """A CacheProtocol without stored keys and values; layers with equal patterns share masks.

    Args:
        config: The model's configuration.
        specs: Attention specs as restricted by a cache's policy, to serve as that cache's reference.
        exact_rope: Compute rotary angles in float64, as a cache for endless sequences does.
        kernel: The attention kernel.
        attention_hook: Called with each layer's AttentionTrace.
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

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        self_specs = [spec for spec in self._specs if not spec.is_cross_attention]
        views = _views(self_specs, model_input, self._kernel, self._attention_hook, self._exact_rope)
        if model_input.encoder_input is not None:
            first, count = len(self_specs), len(self._specs) - len(self_specs)
            plan = _CrossAttentionPlan(model_input, model_input.encoder_input)
            views += [_CrossAttentionView(first + i, plan, self._kernel, self._attention_hook) for i in range(count)]
        return views


class EncoderNoCache:
    """NoCache for the encoder: one view per layer."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        kernel: ops.attention.Kernel = "auto",
        attention_hook: ops.sub_batch.AttentionHook | None = None,
    ) -> None:
        self._specs = encoder_attention_specs(config)
        self._kernel, self._attention_hook = kernel, attention_hook

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        return _views(self._specs, model_input, self._kernel, self._attention_hook)


def _views(
    specs: Sequence[AttentionSpec],
    model_input: ModelInput,
    kernel: ops.attention.Kernel,
    attention_hook: ops.sub_batch.AttentionHook | None,
    exact_rope: bool = False,
) -> list[CacheView]:
    angles = ops.rotary.RotaryCache(model_input.positions, exact=exact_rope)
    spans = ops.sub_batch.sub_batch_spans(model_input.sub_batches)
    masks: dict[AttentionPattern, list[ops.attention.AttentionMask]] = {}
    views: list[CacheView] = []
    for index, spec in enumerate(specs):
        pattern = AttentionPattern.from_spec(spec)
        if pattern not in masks:
            pairs = zip(model_input.sub_batches, spans, strict=True)
            positions = [_token_positions(model_input, sub_batch, span) for sub_batch, span in pairs]
            masks[pattern] = [ops.attention.AttentionMask(x, x, pattern) for x in positions]
        views.append(
            _SelfAttentionView(index, model_input.sub_batches, spans, masks[pattern], angles, kernel, attention_hook)
        )
    return views


def _token_positions(model_input: ModelInput, sub_batch: SubBatch, span: tuple[int, int]) -> TokenPositions:
    def select(flat: Tensor) -> Tensor:
        return flat[span[0] : span[1]].view(sub_batch.num_seqs, sub_batch.num_new_tokens)

    return TokenPositions(
        *(
            None if x is None else select(x)
            for x in (model_input.positions, model_input.document_ids, model_input.causal_order)
        )  # type: ignore[arg-type]
    )


class _SelfAttentionView:
    def __init__(
        self,
        layer: int,
        sub_batches: Sequence[SubBatch],
        spans: Sequence[tuple[int, int]],
        masks: Sequence[ops.attention.AttentionMask],
        angles: ops.rotary.RotaryCache,
        kernel: ops.attention.Kernel,
        attention_hook: ops.sub_batch.AttentionHook | None,
    ) -> None:
        self._layer, self._sub_batches, self._spans, self._masks = layer, sub_batches, spans, masks
        self._angles, self._kernel, self._attention_hook = angles, kernel, attention_hook

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        assert k is not None and v is not None, "self-attention needs keys and values"
        if params.rotary is not None:
            q, k = self._angles.rotate(q, params.rotary), self._angles.rotate(k, params.rotary)
        outs = []
        for index, (sub_batch, (low, high), mask) in enumerate(
            zip(self._sub_batches, self._spans, self._masks, strict=True)
        ):
            queries = q[low:high].unflatten(0, (sub_batch.num_seqs, sub_batch.num_new_tokens))
            keys = k[low:high].unflatten(0, (sub_batch.num_seqs, sub_batch.num_new_tokens)).transpose(1, 2)
            values = v[low:high].unflatten(0, (sub_batch.num_seqs, sub_batch.num_new_tokens)).transpose(1, 2)
            at = slice(low, high)
            part = ops.merge.AttentionPart(queries, keys, values, mask)
            seen = ops.sub_batch.attend_sub_batch(
                self._layer, index, part, params, self._kernel, self._attention_hook, at
            )
            outs.append(seen.out.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)

    def write(self, k: Tensor, v: Tensor) -> None:
        raise AssertionError("self-attention has no encoder output to write")


class _CrossAttentionPlan:
    """The encoder sequence of each decoder sequence, plan by the cross-attention of all layers."""

    def __init__(self, model_input: ModelInput, encoder_input: ModelInput) -> None:
        assert len(model_input.sub_batches) in (0, len(encoder_input.sub_batches)), (
            "encoder and decoder sub-batches must match"
        )
        self.spans, self.encoder_spans = (
            ops.sub_batch.sub_batch_spans(model_input.sub_batches),
            ops.sub_batch.sub_batch_spans(encoder_input.sub_batches),
        )
        self.sub_batches, self.masks = [], []
        for sub_batch, span, encoder_sub_batch, at in zip(
            model_input.sub_batches, self.spans, encoder_input.sub_batches, self.encoder_spans, strict=False
        ):
            self.sub_batches.append((ops.sub_batch.fold_rows(sub_batch, encoder_sub_batch.num_seqs), encoder_sub_batch))
            queries, keys = (
                _token_positions(model_input, ops.sub_batch.fold_rows(sub_batch, encoder_sub_batch.num_seqs), span),
                _token_positions(encoder_input, encoder_sub_batch, at),
            )
            if queries.document_id is None or keys.document_id is None:
                queries, keys = queries._replace(document_id=None), keys._replace(document_id=None)
            self.masks.append(ops.attention.AttentionMask(queries, keys, AttentionPattern(causal=False)))


class _CrossAttentionView:
    def __init__(
        self,
        layer: int,
        plan: _CrossAttentionPlan,
        kernel: ops.attention.Kernel,
        attention_hook: ops.sub_batch.AttentionHook | None,
    ) -> None:
        self._layer, self._plan, self._kernel, self._attention_hook = layer, plan, kernel, attention_hook
        self._written: tuple[Tensor, Tensor] | None = None

    def write(self, k: Tensor, v: Tensor) -> None:
        self._written = k, v

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        assert k is None and v is None and self._written is not None, (
            "the encoder output must be written before it is read"
        )
        plan, (keys, values), outs = self._plan, self._written, []
        for index, (sub_batch, encoder_sub_batch) in enumerate(plan.sub_batches):
            (low, high), (first, last) = plan.spans[index], plan.encoder_spans[index]
            queries, mask = q[low:high].unflatten(0, (sub_batch.num_seqs, sub_batch.num_new_tokens)), plan.masks[index]
            k, v = (
                x[first:last]
                .unflatten(0, (encoder_sub_batch.num_seqs, encoder_sub_batch.num_new_tokens))
                .transpose(1, 2)
                for x in (keys, values)
            )
            at = slice(low, high)
            part = ops.merge.AttentionPart(queries, k, v, mask)
            seen = ops.sub_batch.attend_sub_batch(
                self._layer, index, part, params, self._kernel, self._attention_hook, at
            )
            outs.append(seen.out.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)
