"""Give back what the C allocator keeps: glibc holds on to freed scratch, so a process stays larger than its pool.

A step's scratch (gathered keys and values, masks) is freed when the step ends, but glibc returns it to the system only
when it is asked.  Elsewhere (macOS, musl) there is nothing to ask and nothing is done.
"""

from __future__ import annotations

import ctypes
import functools

__all__ = ["give_back"]

WORTH = 32 << 20  # bytes kept; below, returning them costs more than it saves


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h (glibc 2.33)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def give_back(worth: int = WORTH) -> bool:
    """Return freed memory to the system if the allocator keeps more than ``worth`` bytes; True if it was asked to."""
    libc = _libc()
    if libc is None or libc.mallinfo2().fordblks <= worth:
        return False
    libc.malloc_trim(0)
    return True


@functools.cache
def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _Mallinfo2
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
    except (OSError, AttributeError, TypeError):
        return None
    return libc
