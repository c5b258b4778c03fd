"""NoCache: every sequence attends to its new tokens of the current model_input only.

Used by training, encoders and the uncached reference of ``kvad verify``. An encoder's output is stored, with its graph,
for the same forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad import ops
from kvad.config import AttentionSpec, ModelConfig, attention_specs
from kvad.model_input import (
    AttentionParams,
    AttentionPattern,
    CacheView,
    DeltaInputs,
    ModelInput,
    SubBatch,
    TokenPositions,
)


def whole_sequences(token_ids: Sequence[Sequence[int]], device: torch.device, *, last_only: bool = False) -> ModelInput:
    """Build the input of whole sequences, a sub-batch each, with logits at every token or (``last_only``) the last."""
    lengths = [len(tokens) for tokens in token_ids]

    def flat(lists: Iterable[Iterable[int]]) -> Tensor:
        return torch.tensor([number for numbers in lists for number in numbers], dtype=torch.int64, device=device)

    ends = list(itertools.accumulate(lengths))
    return ModelInput(
        token_ids=flat(token_ids),
        positions=flat(map(range, lengths)),
        sub_batches=tuple(SubBatch(1, length, length) for length in lengths),
        logit_indices=flat([(end - 1 for end in ends)] if last_only else [range(sum(lengths))]),
        seq_lens=flat([length] * length for length in lengths),
    )


class NoCache:
    """A CacheProtocol without stored keys and values; layers with equal patterns share masks.

    Args:
        specs: Other specs than the decoder's: the encoder's, or as restricted by a cache's policy.
        exact_rope: Compute rotary angles in float64, as a cache for endless sequences does.
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
        self.specs = attention_specs(config) if specs is None else tuple(specs)
        self._exact_rope = exact_rope or any(spec.renumber_positions for spec in self.specs)
        self._kernel, self._attention_hook = kernel, attention_hook

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        angles = ops.rotary.RotaryCache(model_input.positions, exact=self._exact_rope)
        layouts: dict[AttentionPattern, list[_SubBatchLayout]] = {}
        views: list[CacheView] = []
        for spec in (spec for spec in self.specs if not spec.is_cross_attention):
            pattern = spec.pattern
            if pattern not in layouts:
                layouts[pattern] = _self_attention_layouts(model_input, pattern)
            views.append(_View(len(views), layouts[pattern], angles, self._kernel, self._attention_hook))
        if model_input.encoder_input is not None:
            cross = _cross_attention_layouts(model_input, model_input.encoder_input)
            while len(views) < len(self.specs):
                views.append(_View(len(views), cross, None, self._kernel, self._attention_hook))
        return views


class _SubBatchLayout(NamedTuple):
    """Queries and keys of one sub-batch, as spans of the flat tokens."""

    span: tuple[int, int]
    queries: SubBatch
    key_span: tuple[int, int]  # in the encoder's tokens for cross-attention
    keys: SubBatch
    mask: ops.attention.AttentionMask


def _self_attention_layouts(model_input: ModelInput, pattern: AttentionPattern) -> list[_SubBatchLayout]:
    layouts = []
    spans = ops.sub_batch.sub_batch_spans(model_input.sub_batches)
    for sub_batch, span in zip(model_input.sub_batches, spans, strict=True):
        positions = _token_positions(model_input, sub_batch, span)
        mask = ops.attention.AttentionMask(positions, positions, pattern)
        layouts.append(_SubBatchLayout(span, sub_batch, span, sub_batch, mask))
    return layouts


def _cross_attention_layouts(model_input: ModelInput, encoder_input: ModelInput) -> list[_SubBatchLayout]:
    """Pair the decoder's sub-batches with the encoder's; sequences of one encoder input are folded."""
    num_sub_batches = len(model_input.sub_batches)
    assert num_sub_batches in (0, len(encoder_input.sub_batches)), "encoder and decoder sub-batches must match"
    spans = ops.sub_batch.sub_batch_spans(model_input.sub_batches)
    key_spans = ops.sub_batch.sub_batch_spans(encoder_input.sub_batches)
    layouts = []
    for sub_batch, span, keys, key_span in zip(
        model_input.sub_batches, spans, encoder_input.sub_batches, key_spans, strict=False
    ):
        queries = ops.sub_batch.fold_rows(sub_batch, keys.num_seqs)
        query_positions = _token_positions(model_input, queries, span)
        key_positions = _token_positions(encoder_input, keys, key_span)
        if query_positions.document_id is None or key_positions.document_id is None:
            query_positions = query_positions._replace(document_id=None)
            key_positions = key_positions._replace(document_id=None)
        mask = ops.attention.AttentionMask(query_positions, key_positions, AttentionPattern(causal=False))
        layouts.append(_SubBatchLayout(span, queries, key_span, keys, mask))
    return layouts


def _token_positions(model_input: ModelInput, sub_batch: SubBatch, span: tuple[int, int]) -> TokenPositions:
    flat = (model_input.positions, model_input.document_ids, model_input.causal_order)
    return TokenPositions(*(None if x is None else _by_sequence(x, sub_batch, span) for x in flat))  # type: ignore[arg-type]


def _by_sequence(flat: Tensor, sub_batch: SubBatch, span: tuple[int, int]) -> Tensor:
    """Select a sub-batch: [T, ...] -> [R, L, ...]."""
    selected: Tensor = flat[span[0] : span[1]].unflatten(0, (sub_batch.num_seqs, sub_batch.num_new_tokens))
    return selected


@dataclass
class _View:
    """View of one layer. Cross-attention, which has no rotary angles, reads what was written before."""

    layer: int
    layouts: Sequence[_SubBatchLayout]
    angles: ops.rotary.RotaryCache | None
    kernel: ops.attention.Kernel
    attention_hook: ops.sub_batch.AttentionHook | None
    written: tuple[Tensor, Tensor] | None = None  # keys and values of the encoder's output

    def write(self, k: Tensor, v: Tensor) -> None:
        assert self.angles is None, "self-attention has no encoder output to write"
        self.written = k, v

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        if self.angles is None:
            assert k is None and v is None, "cross-attention has no new keys and values"
            assert self.written is not None, "the encoder output must be written before it is read"
            k, v = self.written
        assert k is not None and v is not None, "self-attention needs keys and values"
        if self.angles is not None and params.rotary is not None:
            q, k = self.angles.rotate(q, params.rotary), self.angles.rotate(k, params.rotary)
        outs = []
        for index, layout in enumerate(self.layouts):
            queries = _by_sequence(q, layout.queries, layout.span)
            keys, values = (_by_sequence(x, layout.keys, layout.key_span).transpose(1, 2) for x in (k, v))
            part = ops.merge.AttentionPart(queries, keys, values, layout.mask)
            span = slice(*layout.span)
            call = ops.sub_batch.SubBatchCall(self.layer, index, span, self.kernel, self.attention_hook)
            if params.disentangled is not None:
                positions = layout.mask.queries.position, layout.mask.keys.position
                terms = ops.position_bias.disentangled_bias(params.disentangled, queries, keys, positions, params.scale)
                params = params._replace(bias=terms)
            outs.append(ops.sub_batch.attend_sub_batch(call, part, params).out.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        outs = []
        for index, layout in enumerate(self.layouts):
            inputs = _by_sequence(x, layout.queries, layout.span)
            history, documents = F.pad(inputs, (0, 0, kernel.shape[1] - 1, 0)), layout.mask.queries.document_id
            out = ops.recurrence.causal_convolution(history, kernel, documents)
            keys = inputs.unsqueeze(1)
            part = ops.merge.AttentionPart(inputs.unsqueeze(2), keys, keys, layout.mask)
            call = ops.sub_batch.SubBatchCall(self.layer, index, slice(*layout.span), self.kernel, self.attention_hook)
            ops.sub_batch.trace_inputs(call, part, out)
            outs.append(out.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)

    def recur(self, x: Tensor, log_decay: Tensor) -> Tensor:
        outs = []
        for layout in self.layouts:
            inputs, decay = (_by_sequence(each, layout.queries, layout.span) for each in (x, log_decay))
            is_first = ops.recurrence.first_tokens(layout.mask.queries.document_id, inputs)
            states = ops.recurrence.gated_recurrence(torch.zeros_like(inputs[:, 0]), inputs, decay, is_first)
            outs.append(states.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)

    def delta(self, inputs: DeltaInputs) -> Tensor:
        outs = []
        for layout in self.layouts:
            rows = DeltaInputs(*(_by_sequence(each, layout.queries, layout.span) for each in inputs))
            outs.append(_delta(rows, layout.mask.queries.document_id).flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)


def _delta(inputs: DeltaInputs, document_id: Tensor | None) -> Tensor:
    """Apply the gated delta rule chunk by chunk from empty states: inputs [R, L, ...] -> [R, L, H, Dv]."""
    k, v = inputs.k, inputs.v
    documents = ops.recurrence.first_tokens(document_id, v).cumsum(dim=1)
    state, outs = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3]), []
    for start in range(0, v.shape[1], ops.recurrence.DELTA_CHUNK):
        chunk = slice(start, start + ops.recurrence.DELTA_CHUNK)
        part, number = DeltaInputs(*(each[:, chunk] for each in inputs)), None
        if document_id is not None:
            number = documents[:, chunk] - documents[:, max(0, start - 1)].unsqueeze(1)
        with torch.autocast(v.device.type, enabled=False):
            out, state = ops.recurrence.gated_delta_rule(state, part, number)
        outs.append(out)
    return torch.cat(outs, dim=1)
