"""Operations of a decoding step that would otherwise be several kernels each, and products of one row.

``one_row_linear`` is a matrix-vector product with a norm before it and a gated activation or a residual sum behind it,
so that one token needs four of them per layer besides attention. All sums are in float32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvad.ops.triton.support import RMSNorm, launch_options, starts_dependent

ACTIVATIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "quick_gelu": 4, "relu": 5, "relu2": 6}


@triton.jit
def _activate(x, activation) -> Any:
    """Apply an activation, given by its number in ACTIVATIONS, to float32 numbers."""
    if activation == 1:
        x = x * tl.sigmoid(x)
    elif activation == 2:
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif activation == 3:
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif activation == 4:
        x = x * tl.sigmoid(1.702 * x)
    elif activation == 5:
        x = tl.maximum(x, 0.0)
    elif activation == 6:
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return x


@triton.jit
def _rms_norm(x, weight, out, stride, eps, width: tl.constexpr, padded: tl.constexpr, offset: tl.constexpr) -> None:
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    inside = column < width
    numbers = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    scaled = numbers * tl.rsqrt(tl.sum(numbers * numbers) / width + eps)
    if weight is not None:
        scaled *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """Apply RMSNorm to x [T, E]."""
    tokens, width = x.shape
    assert x.stride(1) == 1
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(width)
    warps = 4 if padded <= 2048 else 8
    _rms_norm[(tokens,)](
        x, norm.weight, out, x.stride(0), norm.eps, width, padded, float(norm.unit_offset), num_warps=warps
    )
    return out


@triton.jit
def _gated(x, out, width, activation: tl.constexpr, size: tl.constexpr) -> None:
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * size + tl.arange(0, size)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0)
    active = _activate(gate.to(tl.float32), activation).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + column, (active * up.to(tl.float32)).to(out.dtype.element_ty), mask=inside)


def gated_activation(x: Tensor, activation: str) -> Tensor:
    """Compute activation(gate) * up from (gate, up) [T, 2 I] -> [T, I]."""
    tokens, width = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous()
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    _gated[(tokens, triton.cdiv(width, 1024))](x, out, width, ACTIVATIONS[activation], 1024)
    return out


class _Product(NamedTuple):
    bias: Any
    residual: Any  # added to the product
    norm: Any  # the norm's weight
    eps: float


class _Sizes(NamedTuple):
    inputs: Any
    outputs: Any
    rows: Any  # of the weight, per program
    columns: Any  # at a time
    has_norm: Any
    norm_offset: Any
    activation: Any  # of a gate, whose rows precede those of the outputs; -1: no gate
    dependent: Any  # the kernel may begin before the one before it ends


@triton.jit
def _load_weight(lines, start, rows, sizes) -> Any:
    """Load a tile of the weight; nothing behind the last column."""
    column = start + tl.arange(0, sizes.columns)
    mask = (rows[:, None] < sizes.outputs) & (column[None, :] < sizes.inputs)
    return tl.load(lines + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _dot_rows(x, weight, rows, product, sizes) -> Any:
    """Return the products of x and rows of the weight, and of the rows behind them if there is a gate.

    The first tile of the weight is loaded before x is known, and each next one before the products with the last.
    """
    acc = tl.zeros([sizes.rows, sizes.columns], tl.float32)
    gated = tl.zeros([sizes.rows, sizes.columns], tl.float32)
    squares = tl.zeros([sizes.columns], tl.float32)
    lines = weight + rows.to(tl.int64)[:, None] * sizes.inputs
    others = lines + sizes.outputs * sizes.inputs
    tile = _load_weight(lines, 0, rows, sizes)
    other = tile
    if sizes.activation >= 0:
        other = _load_weight(others, 0, rows, sizes)
    if sizes.dependent:
        gdc_wait()
    for start in range(0, sizes.inputs, sizes.columns):
        next_tile = _load_weight(lines, start + sizes.columns, rows, sizes)
        next_other = next_tile
        if sizes.activation >= 0:
            next_other = _load_weight(others, start + sizes.columns, rows, sizes)
        column = start + tl.arange(0, sizes.columns)
        is_column = column < sizes.inputs
        numbers = tl.load(x + column, mask=is_column, other=0.0).to(tl.float32)
        if sizes.has_norm:
            squares += numbers * numbers
            if product.norm is not None:
                scale = tl.load(product.norm + column, mask=is_column, other=0.0).to(tl.float32)
                numbers *= scale + sizes.norm_offset
        acc += tile.to(tl.float32) * numbers[None, :]
        if sizes.activation >= 0:
            gated += other.to(tl.float32) * numbers[None, :]
        tile, other = next_tile, next_other
    if sizes.dependent:
        gdc_launch_dependents()
    scale = 1.0
    if sizes.has_norm:
        scale = tl.rsqrt(tl.sum(squares) / sizes.inputs + product.eps)
    return tl.sum(acc, 1) * scale, tl.sum(gated, 1) * scale


@triton.jit
def _one_row_linear(x, weight, out, product, sizes) -> None:
    rows = tl.program_id(0) * sizes.rows + tl.arange(0, sizes.rows)
    inside = rows < sizes.outputs
    numbers, others = _dot_rows(x, weight, rows, product, sizes)
    if product.bias is not None:
        numbers += tl.load(product.bias + rows, mask=inside, other=0.0).to(tl.float32)
    if sizes.activation >= 0:
        if product.bias is not None:
            others += tl.load(product.bias + sizes.outputs + rows, mask=inside, other=0.0).to(tl.float32)
        numbers = _activate(numbers, sizes.activation) * others
    if product.residual is not None:
        numbers += tl.load(product.residual + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows, numbers.to(out.dtype.element_ty), mask=inside)


def one_row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: RMSNorm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    config: tuple[int, int, int] | None = None,
) -> Tensor:
    """Multiply x [1, in] by weight [out, in], as ``ops.gpu.one_row_linear``, which describes the other arguments.

    ``config``: rows and columns of a program's tile and its warps; None: chosen by the sizes.
    """
    inputs, outputs = weight.shape[1], weight.shape[0] // (1 if activation is None else 2)
    assert x.shape == (1, inputs) and x.is_contiguous() and weight.is_contiguous()
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device) if residual is None else residual
    rows, columns, warps = choose_tile(inputs, outputs, activation is not None) if config is None else config
    norm_weight, eps, offset = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.eps, float(norm.unit_offset))
    index = -1 if activation is None else ACTIVATIONS[activation]
    dependent = starts_dependent(x.device)
    sizes = inputs, outputs, rows, columns, norm is not None, offset, index, dependent
    _one_row_linear[(triton.cdiv(outputs, rows),)](
        x,
        weight,
        out,
        _Product(bias, residual, norm_weight, eps),
        _Sizes(*map(tl.constexpr, sizes)),
        num_warps=warps,
        **launch_options(dependent),
    )
    return out


def choose_tile(inputs: int, outputs: int, gated: bool) -> tuple[int, int, int]:
    """Return rows, columns and warps of a program of ``one_row_linear``, the fastest ones on an H200."""
    if gated:
        rows, columns, warps = 2, 4096, 8
    elif inputs > 2 * outputs:
        rows, columns, warps = 4, 1024, 8
    else:
        rows, columns, warps = (4, 512, 4) if outputs <= inputs else (2, 2048, 8)
    return rows, min(columns, triton.next_power_of_2(inputs)), warps
