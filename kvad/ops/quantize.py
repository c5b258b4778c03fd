"""Encode keys and values as the raw arrays of a quantization format, and decode them.

``encode`` takes numbers [..., D] (channel formats: whole blocks [n, K, block_size, D]) and returns the arrays listed in
``kvad/cache/quantization.py``, in that order; ``decode`` takes these arrays and the compute dtype.

Guarantees:

* Non-finite values stay visible: a vector with NaN or infinity decodes without new finite numbers (integers: the scale
  is not finite, so the whole vector is not; fp8: the number itself is NaN).
* Zeros decode as zeros, and so do cleared arrays (all zero).
* A token's arrays depend on that token's numbers only (channel formats: on those of its block).
* Encoding uses float32: a float64 beyond its range becomes non-finite, and so does an int4 range beyond it.

int8 (symmetric):  x = [-0.5, 2.54, 0.0]  ->  scale = 2.54 / 127 = 0.02, data = [-25, 127, 0]
int4:              x = [-1.0, 0.1, 2.0, 0.5]  ->  zero = -1, scale = 3 / 15 = 0.2, data = [0, 6 (5.5), 15, 8 (7.5)],
                   packed as 0 | 6 << 4 = 96 and 15 | 8 << 4 = 143; back: [-1.0, 0.2, 2.0, 0.6]

Integers are widened as int8, which torch vectorizes; on CPU it widens uint8 and fp8 one by one (8 to 20 times as long),
so those bits are shifted into place as int16 instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvad import config
from kvad.errors import ConfigError

TINY = 2.0**-126  # the smallest scale, used by vectors of zeros, so that no number is divided by zero
FP8 = {"fp8-e4m3": ("float8_e4m3fn", 448.0), "fp8-e5m2": ("float8_e5m2", 57344.0)}
RawArrays = Sequence[Tensor]


class FormatCodec(NamedTuple):
    """The two functions of a format."""

    encode: Callable[[Tensor], tuple[Tensor, ...]]  # [..., D] -> arrays
    decode: Callable[[RawArrays, torch.dtype], Tensor]  # (arrays, dtype) -> [..., D] in that dtype


def get_codec(name: str, device: torch.device | str = "cpu") -> FormatCodec:
    """Return the codec of a format, or of a plugin.

    Raises:
        ConfigError: If torch or the device does not support the format's dtype, or the class does not exist.
    """
    if config.plugins.is_plugin(name, CODECS):
        custom = config.plugins.load_plugin(name, "format")()
        return FormatCodec(custom.encode, custom.decode)
    if name in FP8:
        dtype = FP8[name][0]
        try:
            torch.zeros(1, device=device).to(getattr(torch, dtype))
        except (AttributeError, RuntimeError, TypeError):
            message = f"{name}: torch {torch.__version__} has no {dtype} on {device}"
            raise ConfigError(message, "use int8, which has the same size") from None
    return CODECS[name]


def _encode_plain(stored: torch.dtype, x: Tensor) -> tuple[Tensor, ...]:
    return (x.to(stored),)


def _decode_plain(arrays: RawArrays, dtype: torch.dtype) -> Tensor:
    return arrays[0].to(dtype)


def _encode_fp8(name: str, x: Tensor) -> tuple[Tensor, ...]:
    """Clamp to the format's largest number; ``x - x`` is NaN if x is not finite, else 0."""
    dtype, max_value = FP8[name]
    x = x.to(torch.float32)
    return ((x.clamp(-max_value, max_value) + (x - x)).to(getattr(torch, dtype)).view(torch.uint8),)


def _decode_e5m2(arrays: RawArrays, dtype: torch.dtype) -> Tensor:
    """Decode e5m2, whose bits are the upper bytes of float16."""
    bits = arrays[0].to(torch.int16)
    bits <<= 8
    wide = torch.promote_types(dtype, torch.float32)  # float16 to bfloat16 is slow on a CPU
    return bits.view(torch.float16).to(wide).to(dtype)


def _decode_e4m3(arrays: RawArrays, dtype: torch.dtype) -> Tensor:
    """Decode e4m3 as a float16 with an exponent 8 too small: ``s eeee mmm`` -> ``s 0 eeee mmm 0000000``, times 256.

    An int8 is widened with its sign, ``ssssssss seeeemmm``: after the shift bit 14 is a sign bit too, and is cleared.
    NaN (all seven bits set) would decode as 480, so arrays that contain it are converted by torch.
    """
    data = arrays[0]
    if data.device.type != "cpu" or (data.numel() and int((data & 127).amax()) == 127):
        return data.view(torch.float8_e4m3fn).to(dtype)
    bits = data.view(torch.int8).to(torch.int16)
    bits <<= 7
    bits &= ~0x4000
    return bits.view(torch.float16).to(torch.promote_types(dtype, torch.float32)).mul_(256).to(dtype)


def _encode_int8(x: Tensor) -> tuple[Tensor, ...]:
    x = x.to(torch.float32)
    scale = x.abs().amax(dim=-1, keepdim=True).div_(127).clamp_(min=TINY)
    return (x / scale).round_().to(torch.int8), scale


def _decode_int8(arrays: RawArrays, dtype: torch.dtype) -> Tensor:
    data, scale = arrays
    return data.to(torch.promote_types(dtype, torch.float32)).mul_(scale).to(dtype)


def _encode_int4(x: Tensor) -> tuple[Tensor, ...]:
    x = x.to(torch.float32)
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp_(min=TINY)
    return _pack_int4(((x - low) / scale).round_().to(torch.uint8)), scale, low


def _decode_int4(arrays: RawArrays, dtype: torch.dtype) -> Tensor:
    data, scale, zero = arrays
    return _unpack_int4(data).to(torch.promote_types(dtype, torch.float32)).mul_(scale).add_(zero).to(dtype)


def _pack_int4(data: Tensor) -> Tensor:
    """Pack numbers 0..15 [..., D] into bytes [..., D / 2]: number 2i in the lower half of byte i."""
    return data[..., ::2] | data[..., 1::2] << 4


def _unpack_int4(data: Tensor) -> Tensor:
    """Unpack [..., D / 2] to [..., D] int8: ``0000 0000 hhhh llll`` -> ``0000 hhhh 0000 llll``, lower byte first."""
    pairs = data.to(torch.int16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    numbers: Tensor = pairs.view(torch.int8)
    return numbers


def _encode_channel(bits: int, x: Tensor) -> tuple[Tensor, ...]:
    """Encode x [n, K, block_size, D] as data, scale [n, K, 1, D], zero [n, K, 1, D].

    The zero of int4 is the minimum, that of int8 the middle. Numbers are encoded with the rounded scale and zero that
    are stored; a scale beyond float16 is not finite.
    """
    x = x.to(torch.float32)
    low, high = torch.aminmax(x, dim=-2, keepdim=True)
    minimum, maximum = (0, 15) if bits == 4 else (-127, 127)
    zero = (low if bits == 4 else (low + high) / 2).to(torch.float16)
    scale = ((high - low) / (maximum - minimum)).clamp_(min=2.0**-24).to(torch.float16)
    data = ((x - zero) / scale).round_().clamp_(minimum, maximum)
    return (_pack_int4(data.to(torch.uint8)) if bits == 4 else data.to(torch.int8)), scale, zero


def _decode_channel(bits: int, arrays: RawArrays, dtype: torch.dtype) -> Tensor:
    """Decode data [..., P * block_size, w], scale and zero [..., P, D] to [..., P * block_size, D]."""
    data, scale, zero = arrays
    numbers = (_unpack_int4(data) if bits == 4 else data).to(torch.promote_types(dtype, torch.float32))
    blocks: Tensor = numbers.unflatten(-2, (scale.shape[-2], -1))
    return blocks.mul_(scale.unsqueeze(-2)).add_(zero.unsqueeze(-2)).flatten(-3, -2).to(dtype)


CODECS = {
    **{
        name: FormatCodec(partial(_encode_plain, getattr(torch, name)), _decode_plain)
        for name in ("float64", "float32", "bfloat16", "float16")
    },
    "fp8-e4m3": FormatCodec(partial(_encode_fp8, "fp8-e4m3"), _decode_e4m3),
    "fp8-e5m2": FormatCodec(partial(_encode_fp8, "fp8-e5m2"), _decode_e5m2),
    "int8": FormatCodec(_encode_int8, _decode_int8),
    "int4": FormatCodec(_encode_int4, _decode_int4),
    "int8-channel": FormatCodec(partial(_encode_channel, 8), partial(_decode_channel, 8)),
    "int4-channel": FormatCodec(partial(_encode_channel, 4), partial(_decode_channel, 4)),
}
