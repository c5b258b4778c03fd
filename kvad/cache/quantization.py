"""Formats of stored keys and values: the arrays of each format and its rounding error. No torch.

``CacheFormat.arrays`` is the list that the memory plan sums and ``device/tensors.py`` allocates, so planned and
allocated bytes are equal. ``kvad/ops/quantize.py`` encodes and decodes.

==============  =============================================================  =================================
name            storage of a head of D numbers                                 decoded number
==============  =============================================================  =================================
float64 ...     D numbers of that dtype, per slot                              unchanged, or rounded to the dtype
fp8-e4m3        D bytes per slot; numbers beyond 448 are clipped               3 mantissa bits
fp8-e5m2        D bytes per slot; numbers beyond 57,344 are clipped            2 mantissa bits
int8            D bytes and a float32 scale, per slot                          within scale / 2, scale = max|x| / 127
int4            D / 2 bytes, a float32 scale and zero, per slot                within scale / 2, scale = range / 15
int8-channel    D bytes per slot; per block a float16 scale and zero for       within scale / 2, scale = range / 254
                each of the D channels
int4-channel    D / 2 bytes per slot; per block the same                       within scale / 2, scale = range / 15
==============  =============================================================  =================================

    int8, D = 64, a slot of one head: 64 + 4 = 68 bytes, 0.266 of float32's 256;  int4: 32 + 8 = 40, 0.156.

Per-token formats are written token by token, independently of other tokens. Channel formats are for keys only: a key's
channels differ far more from each other than a channel differs between tokens (KIVI, Liu et al. 2024). They are
*blockwise*: a block is encoded as a whole, once it is full.

A custom format is named "package.module:Class", a class without constructor arguments and with three methods:
``arrays(dim)`` as here, with granularity "slot", the first named "data"; ``encode`` and ``decode`` as in
``kvad/ops/quantize.py``. It may define ``loss``, ``eps`` and ``max_value`` as in ``CacheFormat``; the default
is "lossy".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvad import config
from kvad.errors import ConfigError, suggest

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
FLOAT32, FLOAT16 = (2 - 2.0**-23) * 2.0**127, 65504.0


class ArraySpec(NamedTuple):
    """One raw array of a layer's keys or values, [blocks, K, block_size or 1, width]."""

    name: str  # "data" is the payload, any other name a scale or a zero
    granularity: Literal["slot", "block"]  # one row per slot, or per block
    dtype: str
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of one head of one slot or block."""
        return self.width * BYTES[self.dtype]


@dataclass(frozen=True)
class CacheFormat:
    """Storage format of keys or values."""

    name: str
    kind: Literal["plain", "fp8", "token", "channel", "own"]
    bits: int
    loss: Literal["none", "rounding", "lossy"]  # none: as computed; rounding: to a floating-point dtype of models
    eps: float  # twice the maximum error, relative to the number or to the largest number that shares its scale
    max_value: float  # larger numbers are decoded as non-finite numbers or clipped (fp8)
    custom_class: Callable[[int], Sequence[ArraySpec]] | None = field(default=None, compare=False, repr=False)

    @property
    def is_blockwise(self) -> bool:
        """True if only whole blocks can be encoded."""
        return self.kind == "channel"

    @property
    def needs_even_dim(self) -> bool:
        """True if two numbers are packed into a byte, so the head dimension must be even."""
        return 0 < self.bits < 8

    def arrays(self, dim: int) -> tuple[ArraySpec, ...]:
        """Return the arrays that store a head of ``dim`` numbers."""
        if self.custom_class is not None:
            return _checked_arrays(self.name, self.custom_class(dim))
        if self.kind == "plain":
            return (ArraySpec("data", "slot", self.name, dim),)
        if self.kind == "fp8":
            return (ArraySpec("data", "slot", "uint8", dim),)
        dtype, width = ("uint8", dim // 2) if self.needs_even_dim else ("int8", dim)
        data, scale = ArraySpec("data", "slot", dtype, width), ArraySpec("scale", "slot", "float32", 1)
        if self.kind == "channel":
            scale = ArraySpec("scale", "block", "float16", dim)
        has_zero = self.kind == "channel" or self.needs_even_dim
        return (data, scale, scale._replace(name="zero")) if has_zero else (data, scale)


FORMATS = {
    fmt.name: fmt
    for fmt in (
        CacheFormat("float64", "plain", 64, "none", 2.0**-52, (2 - 2.0**-52) * 2.0**1023),
        CacheFormat("float32", "plain", 32, "none", 2.0**-23, FLOAT32),
        CacheFormat("bfloat16", "plain", 16, "rounding", 2.0**-7, (2 - 2.0**-7) * 2.0**127),
        CacheFormat("float16", "plain", 16, "rounding", 2.0**-10, FLOAT16),
        CacheFormat("fp8-e4m3", "fp8", 8, "lossy", 2.0**-3, 448.0),
        CacheFormat("fp8-e5m2", "fp8", 8, "lossy", 2.0**-2, 57344.0),
        CacheFormat("int8", "token", 8, "lossy", 1 / 127, FLOAT32),
        CacheFormat("int4", "token", 4, "lossy", 2 / 15, FLOAT32 / 2),
        CacheFormat("int8-channel", "channel", 8, "lossy", 1 / 127, FLOAT16),
        CacheFormat("int4-channel", "channel", 4, "lossy", 2 / 15, FLOAT16),
    )
}


def is_format(name: object) -> bool:
    """Return True for the name of a format or a plugin. Imports nothing."""
    return (isinstance(name, str) and name in FORMATS) or config.plugins.is_plugin(name, FORMATS)


def get_format(name: str, key: str = "format") -> CacheFormat:
    """Return the format of a name; ``key`` is the configuration key for errors."""
    if not is_format(name):
        raise ConfigError(f"{key}: {name!r}", suggest(str(name), FORMATS))
    if not config.plugins.is_plugin(name, FORMATS):
        return FORMATS[name]
    instance: Any = config.plugins.load_plugin(name, key)()
    for method in ("arrays", "encode", "decode"):
        if not callable(getattr(instance, method, None)):
            raise ConfigError(f"{key}: {name} has no {method}", "A format has the methods arrays, encode and decode")
    loss: Any = getattr(instance, "loss", "lossy")
    if loss not in ("none", "rounding", "lossy"):
        raise ConfigError(f"{key}: {name}: loss must be none, rounding or lossy, got {loss!r}")
    return CacheFormat(
        name, "own", 0, loss, getattr(instance, "eps", 1.0), getattr(instance, "max_value", FLOAT32), instance.arrays
    )


def _checked_arrays(name: str, specs: Sequence[ArraySpec]) -> tuple[ArraySpec, ...]:
    arrays = tuple(ArraySpec(*fmt) for fmt in specs)
    if not arrays or arrays[0].name != "data":
        raise ConfigError(f"{name}: the first array must be named 'data', the payload")
    for array in arrays:
        if array.dtype not in BYTES or array.granularity != "slot" or array.width < 1:
            raise ConfigError(
                f"{name}: unsupported array {array}", f"granularity must be 'slot', dtype one of {', '.join(BYTES)}"
            )
    return arrays


def join_format_names(keys: str, values: str) -> str:
    """Join two format names: "int8", or "int8/int4" if keys and values differ."""
    return keys if keys == values else f"{keys}/{values}"


def split_format_name(name: str) -> tuple[str, str]:
    """Split a joined name: "int8/int4" -> ("int8", "int4"), "int8" -> ("int8", "int8")."""
    keys, _, values = name.partition("/")
    return keys, values or keys
