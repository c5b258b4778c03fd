"""Rotation of queries and keys and the write of keys and values to the cache, in one kernel.

The rotation is that of ``ops/rotary.py`` and the encodings are those of ``ops/quantize.py``; sums are in float32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvad.ops.triton.support import PagedStore, launch_options, starts_dependent


class _Rows(NamedTuple):
    """Vectors of tokens and heads."""

    data: Any
    token_stride: int
    head_stride: int


class _Target(NamedTuple):
    """Keys or values of a layer, to be written."""

    data: Any
    scale: Any
    block_stride: int
    head_stride: int
    scale_block_stride: int
    scale_head_stride: int
    max_number: Any  # of fp8; 0: other formats
    dim: Any


class _Angles(NamedTuple):
    cos: Any  # [T, rotated / 2] float32
    sin: Any


class _Sizes(NamedTuple):
    heads: Any
    kv_heads: Any
    half: Any  # of the rotated dims
    padded_half: Any
    rest: Any  # dims that are not rotated
    padded_rest: Any
    padded_value_dim: Any
    interleaved: Any
    block_size: Any
    dependent: Any  # the kernel may begin before the one before it ends


@triton.jit
def _rounded(x) -> Any:
    """Round float32 numbers below 2^22 to integers, half to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _put(target, block, offset, head, index, x, scale, mask) -> None:
    """Encode and store a part of a vector."""
    at = target.data + block * target.block_stride + head * target.head_stride + offset * target.dim + index
    if target.scale is not None:
        x = _rounded(x / scale)
        tl.store(at, tl.where(x - x == 0, x, 0.0).to(tl.int8), mask=mask)
    elif target.max_number > 0:
        clamped = tl.minimum(tl.maximum(x, -target.max_number), target.max_number) + (x - x)
        tl.store(at, clamped.to(target.data.dtype.element_ty), mask=mask)
    else:
        tl.store(at, x.to(target.data.dtype.element_ty), mask=mask)


@triton.jit
def _put_scale(target, block, offset, head, largest, broken) -> Any:
    """Store the scale of an int8 vector, which is NaN if a number is not finite, and return it."""
    scale = tl.maximum(largest / 127, 1.1754943508222875e-38) + broken
    if target.scale is not None:
        tl.store(target.scale + block * target.scale_block_stride + head * target.scale_head_stride + offset, scale)
    return scale


@triton.jit
def _rotate_and_write(inputs, out, keys, values, slots, angles, sizes) -> None:
    """Handle one head of one token: a query head is rotated, a key-value head is rotated and written."""
    if sizes.dependent:
        gdc_launch_dependents()
        gdc_wait()
    q, k, v = inputs
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half, rest = tl.arange(0, sizes.padded_half), tl.arange(0, sizes.padded_rest)
    is_half, is_rest = half < sizes.half, rest < sizes.rest
    first, second = half, sizes.half + half
    if sizes.interleaved:
        first, second = 2 * half, 2 * half + 1
    third = 2 * sizes.half + rest
    cos = tl.load(angles.cos + token * sizes.half + half, mask=is_half, other=0.0)
    sin = tl.load(angles.sin + token * sizes.half + half, mask=is_half, other=0.0)
    if head < sizes.heads:
        source = q.data + token * q.token_stride + head * q.head_stride
    else:
        source = k.data + token * k.token_stride + (head - sizes.heads) * k.head_stride
    dtype = q.data.dtype.element_ty
    a = tl.load(source + first, mask=is_half, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=is_half, other=0.0).to(tl.float32)
    c = tl.load(source + third, mask=is_rest, other=0.0).to(tl.float32)
    a, b = (a * cos - b * sin).to(dtype).to(tl.float32), (b * cos + a * sin).to(dtype).to(tl.float32)
    if head < sizes.heads:
        target = out + (token * sizes.heads + head) * (2 * sizes.half + sizes.rest)
        tl.store(target + first, a.to(dtype), mask=is_half)
        tl.store(target + second, b.to(dtype), mask=is_half)
        tl.store(target + third, c.to(dtype), mask=is_rest)
    else:
        head -= sizes.heads
        slot = tl.load(slots + token)
        block, offset = slot // sizes.block_size, slot % sizes.block_size
        largest = tl.maximum(tl.maximum(tl.max(tl.abs(a)), tl.max(tl.abs(b))), tl.max(tl.abs(c)))
        broken = tl.sum(a - a) + tl.sum(b - b) + tl.sum(c - c)
        scale = _put_scale(keys, block, offset, head, largest, broken)
        _put(keys, block, offset, head, first, a, scale, is_half)
        _put(keys, block, offset, head, second, b, scale, is_half)
        _put(keys, block, offset, head, third, c, scale, is_rest)
        dims = tl.arange(0, sizes.padded_value_dim)
        inside = dims < values.dim
        x = tl.load(v.data + token * v.token_stride + head * v.head_stride + dims, mask=inside, other=0.0).to(
            tl.float32
        )
        scale = _put_scale(values, block, offset, head, tl.max(tl.abs(x)), tl.sum(x - x))
        _put(values, block, offset, head, dims, x, scale, inside)


@triton.jit
def _write_positions(slots, positions, column, num_tokens, size: tl.constexpr) -> None:
    token = tl.program_id(0) * size + tl.arange(0, size)
    slot = tl.load(slots + token, mask=token < num_tokens, other=0)
    tl.store(column + slot, tl.load(positions + token, mask=token < num_tokens), mask=token < num_tokens)


def write_positions(column: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Write the positions [T] of new tokens to their slots [T] of a column [blocks, block_size]."""
    assert column.is_contiguous()
    _write_positions[(triton.cdiv(len(slots), 128),)](slots, positions, column, len(slots), 128)


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: PagedStore,
    values: PagedStore,
    slots: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> Tensor:
    """Write k [T, K, D], rotated, and v [T, K, Dv] to slots [T], and return the rotated q [T, H, D].

    ``angles``: cos and sin [T, rotated / 2] in float32; None: no rotation, and q is returned.
    """
    tokens, heads, dim = q.shape
    kv_heads, value_dim = v.shape[1:]
    half = 0 if angles is None else angles[0].shape[-1]
    out = q if angles is None else torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    rotated_heads = 0 if angles is None else heads
    rest = dim - 2 * half
    padded = (max(1, triton.next_power_of_2(n)) for n in (half, rest, value_dim))
    padded_half, padded_rest, padded_value_dim = padded
    numbers = rotated_heads, kv_heads, half, padded_half, rest, padded_rest, padded_value_dim, interleaved
    dependent = starts_dependent(q.device)
    cos, sin = (q, q) if angles is None else angles
    _rotate_and_write[(tokens, rotated_heads + kv_heads)](
        (_rows(q), _rows(k), _rows(v)),
        out,
        _target(keys),
        _target(values),
        slots,
        _Angles(cos, sin),
        _Sizes(*map(tl.constexpr, (*numbers, keys.data.shape[2], dependent))),
        num_warps=1,
        **launch_options(dependent),
    )
    return out


def _rows(x: Tensor) -> _Rows:
    assert x.stride(-1) == 1
    return _Rows(x, x.stride(0), x.stride(1))


def _target(store: PagedStore) -> _Target:
    data, scale = store.numbers, store.scale
    strides = (0, 0) if scale is None else (scale.stride(0), scale.stride(1))
    largest = torch.finfo(data.dtype).max if store.format.startswith("fp8") else 0.0
    return _Target(
        data, scale, data.stride(0), data.stride(1), *strides, tl.constexpr(largest), tl.constexpr(data.shape[3])
    )
