"""Kernels of a GPU: which of them run, and calls of them (``ops/triton``). Imports no triton.

They read and write the cache's blocks in place, and fuse what a decoding step would do in many small kernels. Where
they cannot, blocks are gathered and ``ops/attention.py`` computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvad.model_input import AlibiSlopes, AttentionParams, AttentionPattern
from kvad.ops import triton
from kvad.ops.triton import DTYPES as DTYPES
from kvad.ops.triton import PagedStore as PagedStore
from kvad.ops.triton import RMSNorm as RMSNorm
from kvad.ops.triton import unavailable_reason as unavailable_reason

MAX_HEAD_DIM = 256
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")
MAX_NORM_WIDTH = 1 << 15


def unsupported_blocks(device: torch.device, key_format: str, value_format: str, pattern: AttentionPattern) -> str:
    """Return why no kernel reads and writes a group's blocks in place; "" if one does."""
    if reason := unavailable_reason(device):
        return reason
    for name in (key_format, value_format):
        if reason := triton.unsupported_format(name, device):
            return reason
    return "a policy renumbers positions" if pattern.renumbers_sinks else ""


def unsupported_shape(dtype: torch.dtype, head_dim: int, value_dim: int) -> str:
    """Return why no kernel computes attention of these sizes; "" if one does."""
    if dtype not in DTYPES:
        return f"activations of {str(dtype).removeprefix('torch.')}"
    return f"heads of more than {MAX_HEAD_DIM} numbers" if max(head_dim, value_dim) > MAX_HEAD_DIM else ""


def unsupported_layer(params: AttentionParams, dtype: torch.dtype, head_dim: int, value_dim: int) -> str:
    """Return why no kernel computes a layer's attention; "" if one does."""
    if reason := unsupported_shape(dtype, head_dim, value_dim):
        return reason
    bias = params.bias
    if bias is not None and not (isinstance(bias, AlibiSlopes) and not bias.round_to_bfloat16):
        return "a position bias other than ALiBi"
    return ""


def attend_blocks(
    q: Tensor,
    stores: tuple[PagedStore, PagedStore],
    table: Tensor,
    num_slots: int,
    positions: tuple[Tensor, Tensor],
    pattern: AttentionPattern,
    params: AttentionParams,
) -> Tensor:
    """Attend with q [R * L, H, D], rotated, to the first slots of a table's blocks [R, P] -> [R * L, H, Dv].

    ``positions`` are those of all slots [blocks, block_size] and of the queries [R * L].
    """
    slots = triton.attention.PagedSlots(table, num_slots, *positions)
    return triton.attention.paged_attention(q, *stores, slots, pattern, params)


def rotate_and_write(
    inputs: tuple[Tensor, Tensor, Tensor],
    stores: tuple[PagedStore, PagedStore],
    slots: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> Tensor:
    """Rotate q [T, H, D] and k [T, K, D] of ``inputs``, write k and v [T, K, Dv] to slots [T], and return q."""
    return triton.cache_write.rotate_and_write(*inputs, *stores, slots, angles, interleaved)


def write_positions(column: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Write positions [T] to slots [T] of a column [blocks, block_size]."""
    if unavailable_reason(column.device):
        column.view(-1)[slots] = positions
    else:
        triton.cache_write.write_positions(column, slots, positions)


def rms_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """Apply RMSNorm to x [T, E]."""
    return triton.fused.rms_norm(x, norm)


def gated_activation(x: Tensor, activation: str) -> Tensor:
    """Compute activation(gate) * up from (gate, up) [T, 2 I] -> [T, I]."""
    return triton.fused.gated_activation(x, activation)


def one_row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: RMSNorm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Multiply x [1, in] by weight [out, in] and add bias [out].

    Args:
        x: The input.
        weight: The weight; with an activation (gate, up) [2 out, in].
        bias: [out], with an activation [2 out].
        norm: Applied to the input.
        activation: Compute activation(gate) * up.
        residual: [1, out], to which the product is added in place, and which is returned.
    """
    return triton.fused.one_row_linear(x, weight, bias, norm=norm, activation=activation, residual=residual)


def best_tokens(logits: Tensor, num_tokens: int) -> Tensor:
    """Return the first best token of each row of [N, V] below ``num_tokens``, and 1 if the row is finite: [N, 2]."""
    if can_draw(logits):
        return triton.sampling.best_tokens(logits, num_tokens)
    lowest, highest = torch.aminmax(logits, dim=-1)  # NaN if any number is
    is_finite = torch.isfinite(lowest) & torch.isfinite(highest)
    return torch.stack((logits[:, :num_tokens].argmax(dim=-1), is_finite.long()), dim=-1)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return numbers of the host on a device; the host does not wait for a GPU, which may still run the step before."""
    if device.type == "cuda" and values.numel():
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def can_draw(logits: Tensor) -> bool:
    """Return True if ``draw_tokens`` takes these logits."""
    return not unavailable_reason(logits.device) and logits.dtype in DTYPES


def draw_tokens(logits: Tensor, parameters: Tensor, num_tokens: int) -> Tensor:
    """Return a drawn token of each row of [N, V] below ``num_tokens``, and 1 if the row is finite: [N, 2].

    ``parameters`` [N, 5] float64: temperature (0: the best token), top-k (0: all), top-p, min-p, number in [0, 1).
    """
    return triton.sampling.draw_tokens(logits, parameters, num_tokens)
