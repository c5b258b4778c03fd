"""Packed matrices, and their dequantization to float32 as ``[outputs, inputs]``.

==================  ==============================================================================================
GPTQ                ``qweight`` [in * bits / 32, out], ``qzeros`` [groups, out * bits / 32], ``scales`` [groups, out],
                    ``g_idx`` [in] (the group of each input)
AWQ (GEMM)          ``qweight`` [in, out / 8], ``qzeros`` [groups, out / 8], ``scales`` [groups, out]
compressed-tensors  ``weight_packed`` [out, in * bits / 32], ``weight_shape`` [2], ``weight_scale`` [out, groups],
                    ``weight_zero_point`` [out * bits / 32, groups], ``weight_g_idx`` [in]; or ``weight`` in int8 or
                    FP8, with ``weight_scale`` and int8 ``weight_zero_point`` of one number, [out, groups] or by block
FP8                 ``weight`` in FP8, ``weight_scale_inv`` by block, or ``weight_scale`` of one number or [out, 1]
MXFP4               ``_blocks`` [experts, out, groups, 16] with two E2M1 numbers in a byte,
                    ``_scales`` [experts, out, groups]
==================  ==============================================================================================

A weight is ``(number - zero point) * scale``. Packed numbers are one stream of bits, the lowest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvad.checkpoint.quantized.scheme import QuantizationScheme

Parts = Mapping[str, Tensor]  # tensors of a module by suffix
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position in a word of each of 8 outputs
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT8 = (torch.float8_e4m3fn,)


class LayoutError(ValueError):
    """Parts that do not fit together."""


@dataclass(frozen=True)
class Layout:
    """A way to store one matrix in several tensors."""

    suffixes: tuple[str, ...]  # of the parts; the first is present in this layout only
    dequantize: Callable[[Parts, QuantizationScheme], Tensor]
    shape: Callable[[Parts, QuantizationScheme], tuple[int, ...]]  # of the matrix; reads no large tensor
    optional: tuple[str, ...] = ()
    name: str = ".weight"  # suffix of the matrix


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack ``count`` numbers of ``bits`` bits from int32 words; [..., W] -> [..., count] int32."""
    mask = (1 << bits) - 1
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        aligned: Tensor = ((words[..., None] >> shifts) & mask).flatten(-2)[..., :count]
        return aligned
    groups = words.unflatten(-1, (-1, bits)).long() & 0xFFFFFFFF  # 32 numbers in ``bits`` words
    start = torch.arange(32) * bits
    low = groups[..., start // 32] >> (start % 32)
    high = groups[..., (start // 32 + 1).clamp(max=bits - 1)] << (32 - start % 32)
    numbers: Tensor = ((low | high) & mask).flatten(-2)[..., :count].int()
    return numbers


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LayoutError(message)


def _require_shape(parts: Parts, name: str, *shape: int) -> Tensor:
    tensor = parts[name]
    _require(tuple(tensor.shape) == shape, f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    return tensor


def _require_words(parts: Parts, *names: str) -> None:
    for name in names:
        _require(parts[name].dtype == torch.int32, f"{name} must be int32, got {parts[name].dtype}")
        _require(parts[name].dim() == 2, f"{name} must have 2 dimensions, got {parts[name].dim()}")


def _num_groups(scheme: QuantizationScheme, inputs: int) -> int:
    return 1 if scheme.group_size is None else math.ceil(inputs / scheme.group_size)


def _group_index(parts: Parts, name: str, inputs: int, groups: int, group_size: int) -> Tensor | None:
    """Return the group of each input, None if the groups are consecutive."""
    if name not in parts:
        return None
    index = _require_shape(parts, name, inputs).long()
    if not index.any() or bool((index < 0).all()):  # a placeholder of files without activation order
        return None
    _require(int(index.min()) >= 0 and int(index.max()) < groups, f"{name} must be in [0, {groups})")
    sequential = torch.arange(inputs) // group_size
    return None if torch.equal(index, sequential) else index


def _scaled(numbers: Tensor, scales: Tensor, zeros: Tensor | None, index: Tensor | None, group_size: int) -> Tensor:
    """Return (numbers - zeros) * scales as float32; [out, in], scales and zeros [out, groups]."""
    weight = numbers.to(torch.float32, copy=True)
    for values, operation in ((zeros, weight.sub_), (scales, weight.mul_)):
        if values is None:
            continue
        spread = values.float()
        if index is not None:
            operation(spread[:, index])
        elif spread.shape[1] == 1:
            operation(spread)
        else:
            operation(spread.repeat_interleave(group_size, 1)[:, : weight.shape[1]])
    return weight


def _gptq_shape(parts: Parts, scheme: QuantizationScheme) -> tuple[int, ...]:
    _require_words(parts, "qweight")
    (bits,) = scheme.bits
    return parts["qweight"].shape[1], parts["qweight"].shape[0] * 32 // bits


def _gptq(parts: Parts, scheme: QuantizationScheme) -> Tensor:
    _require_words(parts, "qweight", "qzeros")
    (bits,) = scheme.bits
    outputs, inputs = _gptq_shape(parts, scheme)
    groups = _num_groups(scheme, inputs)
    scales = _require_shape(parts, "scales", groups, outputs)
    words = _require_shape(parts, "qzeros", groups, math.ceil(outputs * bits / 32))
    _require(parts["qweight"].shape[0] * 32 % bits == 0, f"qweight does not hold numbers of {bits} bits")
    mask = (1 << bits) - 1
    if 32 % bits == 0:  # GPTQModel subtracts 1 from all numbers of a word at once: a zero point of 0 borrows
        zeros = unpack(words + scheme.zero_offset * (0xFFFFFFFF // mask), bits, outputs)
    else:
        zeros = (unpack(words, bits, outputs) + scheme.zero_offset) & mask
    group_size = scheme.group_size or inputs
    index = _group_index(parts, "g_idx", inputs, groups, group_size)
    numbers = unpack(parts["qweight"].t(), bits, inputs)
    return _scaled(numbers, scales.t(), zeros.t(), index, group_size)


def _awq_shape(parts: Parts, scheme: QuantizationScheme) -> tuple[int, ...]:
    _require_words(parts, "qweight")
    return parts["qweight"].shape[1] * 8, parts["qweight"].shape[0]


def _awq(parts: Parts, scheme: QuantizationScheme) -> Tensor:
    _require_words(parts, "qweight", "qzeros")
    outputs, inputs = _awq_shape(parts, scheme)
    groups = _num_groups(scheme, inputs)
    scales, words = (
        _require_shape(parts, name, groups, size) for name, size in (("scales", outputs), ("qzeros", outputs // 8))
    )
    numbers, zeros = (
        unpack(packed, 4, outputs).unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2).t()
        for packed in (parts["qweight"], words)
    )
    return _scaled(numbers, scales.t(), zeros, None, scheme.group_size or inputs)


def _packed_shape(parts: Parts, scheme: QuantizationScheme) -> tuple[int, ...]:
    _require_words(parts, "weight_packed")
    shape = tuple(int(size) for size in parts["weight_shape"].flatten().tolist())
    rows, words = parts["weight_packed"].shape
    _require(
        len(shape) == 2 and shape[0] == rows and any(math.ceil(shape[1] * bits / 32) == words for bits in scheme.bits),
        f"weight_shape {list(shape)} does not fit weight_packed {[rows, words]}",
    )
    return shape


def _packed(parts: Parts, scheme: QuantizationScheme) -> Tensor:
    outputs, inputs = _packed_shape(parts, scheme)
    words, scales = parts["weight_packed"], parts["weight_scale"]
    bits = next(bits for bits in scheme.bits if math.ceil(inputs * bits / 32) == words.shape[1])
    scales, group_size = _by_group(scales, outputs, inputs)
    groups, half, zeros = scales.shape[1], 1 << (bits - 1), None
    if "weight_zero_point" in parts:
        _require_words(parts, "weight_zero_point")
        packed = _require_shape(parts, "weight_zero_point", math.ceil(outputs * bits / 32), groups)
        zeros = unpack(packed.t(), bits, outputs).t() - half
    index = _group_index(parts, "weight_g_idx", inputs, groups, group_size)
    return _scaled(unpack(words, bits, inputs) - half, scales, zeros, index, group_size)


def _by_group(scales: Tensor, outputs: int, inputs: int) -> tuple[Tensor, int]:
    """Return scales as [outputs or 1, groups], and the size of a group."""
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales[:, None] if scales.dim() == 1 else scales
    _require(
        scales.dim() == 2 and scales.shape[0] in (1, outputs) and scales.shape[1] > 0 and scales.shape[1] <= inputs,
        f"weight_scale {list(scales.shape)} does not fit a matrix of {[outputs, inputs]}",
    )
    group_size = math.ceil(inputs / scales.shape[1])
    _require(math.ceil(inputs / group_size) == scales.shape[1], f"{inputs} inputs have no {scales.shape[1]} groups")
    return scales, group_size


def _plain_shape(parts: Parts, scheme: QuantizationScheme) -> tuple[int, ...]:
    return tuple(parts["weight"].shape)


def _plain(parts: Parts, scheme: QuantizationScheme) -> Tensor:
    weight = parts["weight"]
    _require(weight.dim() == 2, f"weight must have 2 dimensions, got {weight.dim()}")
    scales = parts.get("weight_scale_inv", parts.get("weight_scale"))
    _require(scales is not None, "weight_scale is missing")
    assert scales is not None
    outputs, inputs = weight.shape
    if scheme.block is not None and scales.numel() > 1:
        rows, columns = scheme.block
        expected = [math.ceil(outputs / rows), math.ceil(inputs / columns)]
        _require(list(scales.shape) == expected, f"scales must be {expected}, got {list(scales.shape)}")
        by_row = scales.float().repeat_interleave(rows, 0)[:outputs]
        return _scaled(weight, by_row, None, None, columns)
    scales, group_size = _by_group(scales, outputs, inputs)
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        _require(zeros.numel() == scales.numel(), "weight_zero_point must have the shape of weight_scale")
        zeros = zeros.reshape(scales.shape)
    return _scaled(weight, scales, zeros, None, group_size)


def _mxfp4_shape(parts: Parts, scheme: QuantizationScheme) -> tuple[int, ...]:
    blocks = parts["_blocks"]
    _require(blocks.dim() == 4 and blocks.dtype == torch.uint8, "_blocks must be uint8 with 4 dimensions")
    return blocks.shape[0], blocks.shape[2] * blocks.shape[3] * 2, blocks.shape[1]


def _mxfp4(parts: Parts, scheme: QuantizationScheme) -> Tensor:
    """Dequantize the experts of gpt-oss; [experts, inputs, outputs]."""
    experts, _, outputs = _mxfp4_shape(parts, scheme)
    blocks = parts["_blocks"]
    scales = _require_shape(parts, "_scales", experts, outputs, blocks.shape[2])
    _require(scales.dtype == torch.uint8, f"_scales must be uint8, got {scales.dtype}")
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    numbers = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), -1).flatten(-2)
    weight = torch.ldexp(numbers, scales.int()[..., None] - 127)
    return weight.flatten(-2).transpose(1, 2)


_PLAIN = Layout(
    ("weight",), _plain, _plain_shape, ("weight_scale_inv", "weight_scale", "weight_zero_point")
)  # in int8 or FP8
LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "gptq": (Layout(("qweight", "qzeros", "scales"), _gptq, _gptq_shape, ("g_idx",)),),
    "awq": (Layout(("qweight", "qzeros", "scales"), _awq, _awq_shape),),
    "compressed-tensors": (
        Layout(
            ("weight_packed", "weight_scale", "weight_shape"), _packed, _packed_shape,
            ("weight_zero_point", "weight_g_idx"),
        ),
        _PLAIN,
    ),
    "fp8": (_PLAIN,),
    "mxfp4": (Layout(("_blocks", "_scales"), _mxfp4, _mxfp4_shape, name=""),),
}  # fmt: skip


def is_quantized_dtype(dtype: torch.dtype) -> bool:
    """Return True for the dtype of a quantized ``weight``."""
    return dtype == torch.int8 or dtype in _FLOAT8
