"""Stored numbers, packed without loss: the byte of each number that says least is deflated, the others stay.

    float32, little-endian:  m0 m1 m2 es | m0 m1 m2 es | ..   ->   es es .. deflated, then m0 m0 .. m1 m1 .. m2 m2 ..

The last byte (sign and exponent) of a trained model's keys and values deflates to 0.45 of its size, and mantissas do
not at all: float32 comes to 0.86 and bfloat16 to 0.72 of what it was, at 200 and 130 MB/s (dev/LOG.md).  Numbers of one
byte gain 4%: they are left alone.  Standard library only.
"""

from __future__ import annotations

import struct
import zlib

from kvad.storage.filesystem import Buffer

MIN_SAVING = 0.95  # of its size, at most
_SIZES = struct.Struct("<QQ")


def compress(data: Buffer, width: int) -> bytes | None:
    """``data``: numbers of ``width`` bytes each, whole.  None: packing does not pay."""
    raw = bytes(data)
    if width == 1 or not raw:
        return None
    assert len(raw) % width == 0, f"{len(raw)} bytes are no numbers of {width}"
    top = zlib.compress(raw[width - 1 :: width], 1)
    if len(raw) - len(raw) // width + len(top) > MIN_SAVING * len(raw):
        return None
    return b"".join([_SIZES.pack(len(raw), len(top)), top, *(raw[at::width] for at in range(width - 1))])


def decompress(packed: bytes, width: int) -> bytearray:
    """What :func:`pack` was given."""
    size, top = _SIZES.unpack_from(packed)
    raw, at = bytearray(size), _SIZES.size + top
    raw[width - 1 :: width] = zlib.decompress(packed[_SIZES.size : at])
    count = size // width
    for plane in range(width - 1):
        raw[plane::width] = packed[at + plane * count : at + (plane + 1) * count]
    return raw
