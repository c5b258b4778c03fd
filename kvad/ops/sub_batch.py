"""Sub-batches: spans in the flat tokens, and attention of one sub-batch with an optional hook."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from kvad.model_input import AttentionParams, SubBatch, TokenPositions
from kvad.ops.attention import AttentionMask, AttentionOutput, Kernel, TileSizes, dot_product_attention
from kvad.ops.batch_invariant import invariant_attention
from kvad.ops.merge import AttentionPart, drain, merge_attention
from kvad.ops.rotary import rotate_by


class AttentionTrace(NamedTuple):
    """Inputs and outputs of one attention layer in one sub-batch."""

    layer: int
    sub_batch: int
    q: Tensor  # [R, L, H, D], rotated
    k: Tensor  # [R, K, S, D], rotated
    v: Tensor  # [R, K, S, Dv]
    positions: Tensor  # [R, S], of the keys
    scores: Tensor  # logits [R, H, L, S]
    weights: Tensor  # [R, H, L, S]
    out: Tensor  # [R, L, H, Dv]


AttentionHook = Callable[[AttentionTrace], None]


def sub_batch_spans(sub_batches: Sequence[SubBatch]) -> list[tuple[int, int]]:
    """Return (first, last + 1) of each sub-batch in the flat tokens."""
    spans, start = [], 0
    for sub_batch in sub_batches:
        spans.append((start, start + sub_batch.num_seqs * sub_batch.num_new_tokens))
        start = spans[-1][1]
    return spans


def fold_rows(sub_batch: SubBatch, num_inputs: int) -> SubBatch:
    """Treat sequences that share an encoder input as one, with the same tokens.

    SubBatch(num_seqs=6, num_new_tokens=1, num_read_slots=S) over 2 inputs -> SubBatch(2, 3, S)
    """
    assert sub_batch.num_seqs % num_inputs == 0, f"{sub_batch.num_seqs} sequences, {num_inputs} encoder inputs"
    return SubBatch(num_inputs, sub_batch.num_seqs // num_inputs * sub_batch.num_new_tokens, sub_batch.num_read_slots)


class SubBatchCall(NamedTuple):
    """One layer's attention in one sub-batch."""

    layer: int
    sub_batch: int  # index in the step
    span: slice  # of the flat tokens
    kernel: Kernel
    attention_hook: AttentionHook | None  # called with the concatenated keys of all parts


def attend_sub_batch(
    call: SubBatchCall,
    part: AttentionPart,
    params: AttentionParams,
    count: Tensor | None = None,
    lower_parts: Iterable[AttentionPart] = (),
) -> AttentionOutput:
    """Compute attention in one sub-batch.

    Args:
        call: The layer and the sub-batch.
        part: The sub-batch's own part.
        params: The layer's parameters.
        count: Request ``AttentionOutput.mass`` with these factors of the queries [R, L].
        lower_parts: Parts that precede ``part``, such as lower levels; created one at a time unless a hook is called.
    """
    q, k, v, mask = part
    kernel, attention_hook = call.kernel, call.attention_hook
    iterator = iter(lower_parts)
    first = next(iterator, None)
    is_single = first is None
    parts: Iterable[AttentionPart] = (part,) if first is None else chain(drain([first]), iterator, (part,))
    del first
    if attention_hook is not None or count is not None:
        parts = list(parts)
    sink_shift, return_weights = mask.sink_shift if params.rotary is not None else None, attention_hook is not None
    if isinstance(kernel, TileSizes):
        assert is_single and sink_shift is None and count is None, "batch-invariant tiles need whole tokens in one part"
        output = AttentionOutput(invariant_attention(q, k, v, mask, params, kernel))
        if return_weights:
            output = dot_product_attention(q, k, v, mask, params, return_weights=True)._replace(out=output.out)
    elif sink_shift is not None:
        assert is_single, "renumbered sinks cannot be combined with lower levels"
        output = _attend_renumbered(part, sink_shift, params, kernel, return_weights, call.span)
    elif count is not None or not is_single:
        output = merge_attention(parts, params, kernel=kernel, return_weights=return_weights, count=count)
    else:
        output = dot_product_attention(q, k, v, mask, params, kernel=kernel, return_weights=return_weights)
    if attention_hook is not None:
        assert output.scores is not None and output.weights is not None
        k, v = torch.cat([part.k for part in parts], dim=2), torch.cat([part.v for part in parts], dim=2)
        positions = torch.cat([part.mask.keys.position for part in parts], dim=-1)
        scores, weights = output.scores, output.weights
        attention_hook(AttentionTrace(call.layer, call.sub_batch, q, k, v, positions, scores, weights, output.out))
    return output


def trace_inputs(call: SubBatchCall, part: AttentionPart, out: Tensor) -> None:
    """Report a convolution to the hook as attention without weights: its inputs are queries, keys and values.

    Args:
        call: The layer and the sub-batch.
        part: New inputs [R, L, 1, C], all readable ones [R, 1, S, C] twice, and their mask.
        out: Output [R, L, C].
    """
    if call.attention_hook is not None:
        q, k, v, mask = part
        visible = mask.pattern.visible(mask.queries, mask.keys).unsqueeze(1)
        scores = (q.transpose(1, 2) @ k.transpose(2, 3)).masked_fill(~visible, -math.inf)
        positions, weights = mask.keys.position, visible.to(q.dtype)
        call.attention_hook(
            AttentionTrace(call.layer, call.sub_batch, q, k, v, positions, scores, weights, out.unsqueeze(2))
        )


def _attend_renumbered(
    part: AttentionPart, sink_shift: Tensor, params: AttentionParams, kernel: Kernel, return_weights: bool, at: slice
) -> AttentionOutput:
    """Compute attention with sinks ``sink_shift`` [R, L] nearer than the rotated positions say.

    With one query per sequence, the sink keys are rotated. With several, whose shifts differ, the sinks become a
    separate part whose queries are rotated back.
    """
    assert params.rotary is not None
    q, k, v, mask = part
    positions = mask.keys.position
    sinks = positions < mask.pattern.num_sinks
    if sink_shift.shape[1] == 1:
        width = mask.num_sink_slots
        nearer = rotate_by(k[:, :, :width], sink_shift * sinks[:, :width], params.rotary, at)
        k = torch.cat((nearer, k[:, :, width:]), 2)
        return dot_product_attention(q, k, v, mask, params, kernel=kernel, return_weights=return_weights)
    back = rotate_by(q.transpose(1, 2), -sink_shift, params.rotary, at).transpose(1, 2)
    first, rest = (
        AttentionMask(mask.queries, TokenPositions(positions.masked_fill(hidden, -1)), mask.pattern)
        for hidden in (~sinks, sinks)
    )
    halves = AttentionPart(back, k, v, first), AttentionPart(q, k, v, rest)
    output = merge_attention(halves, params, kernel=kernel, return_weights=return_weights)
    if not return_weights:
        return output
    assert output.scores is not None and output.weights is not None  # both parts have all keys, masked complementarily
    (a, b), (c, d) = output.scores.chunk(2, dim=-1), output.weights.chunk(2, dim=-1)
    return output._replace(scores=torch.maximum(a, b), weights=c + d)
