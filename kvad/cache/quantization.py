"""The formats in which keys and values may be stored: which arrays each takes, and how much it rounds.  No torch.

The one promise: :meth:`Format.arrays` is the list that ``sizing`` sums and ``store`` allocates, so what is planned is
what lies there.  How numbers become those arrays and come back is ``kvad/ops/quantize.py``.

==============  =============================================================  =================================
name            what a head of D numbers takes                                 a number comes back
==============  =============================================================  =================================
float64 ...     D numbers of that dtype, per slot                              as it was, or rounded to the dtype
fp8-e4m3        D bytes per slot; beyond 448 numbers are cut off               with 3 bits behind the first
fp8-e5m2        D bytes per slot; beyond 57,344 they are cut off               with 2 bits behind the first
int8            D bytes and a float32 scale, per slot                          within scale / 2, scale = max|x| / 127
int4            D / 2 bytes, a float32 scale and zero, per slot                within scale / 2, scale = range / 15
int8-channel    D bytes per slot; per block a float16 scale and zero for       within scale / 2, scale = range / 254
                each of the D channels
int4-channel    D / 2 bytes per slot; per block the same                       within scale / 2, scale = range / 15
==============  =============================================================  =================================

    int8, D = 64, a slot of one head: 64 + 4 = 68 bytes, 0.266 of float32's 256;  int4: 32 + 8 = 40, 0.156.

Per-token formats are written token by token and do not depend on what else is written.  Channel formats (keys only: a
key's channels differ far more from one another than a channel does from token to token; KIVI, Liu et al. 2024) are
*sealed*: a block is encoded as a whole, once it is full.

A format of one's own goes by "package.module:Class", a class made without arguments, with three methods:
``arrays(dim)`` as here, of grain "slot", the first named "data"; ``encode`` and ``decode`` as in
``kvad/ops/quantize.py``.  It may say ``loss``, ``eps`` and ``most`` as :class:`Format` does; it is "lossy" otherwise.
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
    """One raw array of a store, [blocks, K, block_size or 1, width]: ``grain`` says which.  "data" is the payload, any
    other name a scale or a zero."""

    name: str
    granularity: Literal["slot", "block"]
    dtype: str
    width: int

    @property
    def nbytes(self) -> int:
        """Of one head of one slot, or of one block."""
        return self.width * BYTES[self.dtype]


@dataclass(frozen=True)
class CacheFormat:
    """``loss``: "none" (as computed), "rounding" (of a floating-point dtype that models compute in) or "lossy".

    ``eps``: twice the largest error, relative to the number itself (floating point) or to the largest magnitude of
    those that share its scale.  ``most``: a number beyond it is not finite when it comes back, or is cut off (fp8).
    ``sealed``: only whole blocks can be encoded.  ``own``: the arrays of a format of one's own.
    """

    name: str
    kind: Literal["plain", "fp8", "token", "channel", "own"]
    bits: int
    loss: Literal["none", "rounding", "lossy"]
    eps: float
    max_value: float
    custom_class: Callable[[int], Sequence[ArraySpec]] | None = field(default=None, compare=False, repr=False)

    @property
    def is_blockwise(self) -> bool:
        return self.kind == "channel"

    @property
    def needs_even_dim(self) -> bool:
        """Whether it packs two numbers into a byte, so that a head needs an even width."""
        return 0 < self.bits < 8

    def arrays(self, dim: int) -> tuple[ArraySpec, ...]:
        """What a head of ``dim`` numbers takes."""
        if self.custom_class is not None:
            return _checked(self.name, self.custom_class(dim))
        if self.kind == "plain":
            return (ArraySpec("data", "slot", self.name, dim),)
        if self.kind == "fp8":
            return (ArraySpec("data", "slot", "uint8", dim),)
        data = (
            ArraySpec("data", "slot", "uint8", dim // 2)
            if self.needs_even_dim
            else ArraySpec("data", "slot", "int8", dim)
        )
        if self.kind == "channel":
            return (data, ArraySpec("scale", "block", "float16", dim), ArraySpec("zero", "block", "float16", dim))
        scale = ArraySpec("scale", "slot", "float32", 1)
        return (data, scale, ArraySpec("zero", "slot", "float32", 1)) if self.needs_even_dim else (data, scale)


FORMATS = {
    each.name: each
    for each in (
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


def get_format(name: str, key: str = "format") -> CacheFormat:
    """ConfigError, with the nearest name, for one that is not known; ``key``: where it was said."""
    if ":" in str(name):
        return _own(name, key)
    if name not in FORMATS:
        raise ConfigError(f"{key}: {name!r}", suggest(str(name), FORMATS))
    return FORMATS[name]


def _own(name: str, key: str) -> CacheFormat:
    made: Any = config.plugins.load_plugin(name, key)()
    for method in ("arrays", "encode", "decode"):
        if not callable(getattr(made, method, None)):
            raise ConfigError(f"{key}: {name} has no {method}", "a format has arrays, encode and decode")
    loss: Any = getattr(made, "loss", "lossy")
    if loss not in ("none", "rounding", "lossy"):
        raise ConfigError(f"{key}: {name}: loss {loss!r}", "none, rounding or lossy")
    return CacheFormat(name, "own", 0, loss, getattr(made, "eps", 1.0), getattr(made, "most", FLOAT32), made.arrays)


def _checked(name: str, said: Sequence[ArraySpec]) -> tuple[ArraySpec, ...]:
    arrays = tuple(ArraySpec(*each) for each in said)
    if not arrays or arrays[0].name != "data":
        raise ConfigError(f"{name}: its first array must be named 'data': the payload")
    for array in arrays:
        if array.dtype not in BYTES or array.granularity != "slot" or array.width < 1:
            raise ConfigError(f"{name}: cannot hold {array}", f"of grain 'slot', a dtype of {', '.join(BYTES)}")
    return arrays


def join_format_names(keys: str, values: str) -> str:
    """A name for both: "int8", or "int8/int4" where keys and values differ."""
    return keys if keys == values else f"{keys}/{values}"


def split_format_name(name: str) -> tuple[str, str]:
    """The inverse of :func:`joined`: "int8/int4" -> ("int8", "int4"), "int8" -> ("int8", "int8")."""
    keys, _, values = name.partition("/")
    return keys, values or keys
