"""What the C allocator keeps: glibc holds on to freed scratch, so a process stays larger than its pool.

A step's scratch (gathered keys and values, masks) is freed when the step ends, but glibc returns it to the system only
when it is asked; blocks of many MB go back at once, and come again as new pages.  Elsewhere (macOS, musl) there is
nothing to ask and nothing is done.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
DEFAULT_TRIM, DEFAULT_MMAP_MAX = 128 << 10, 65536

MIN_TRIM_BYTES = 32 << 20  # bytes kept; below, returning them costs more than it saves


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


def trim_heap(worth: int = MIN_TRIM_BYTES) -> bool:
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
        libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    except (OSError, AttributeError, TypeError):
        return None
    return libc


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Within it freed memory is kept, large blocks too: what takes the same memory again and again, as training steps
    do, is not handed new pages each time, which the system has to clear and to map.  It goes back at the end."""
    libc = _libc()
    if libc is None:
        yield
        return
    libc.mallopt(M_MMAP_MAX, 0)  # no mappings of their own for large blocks
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_MAX, DEFAULT_MMAP_MAX)
        libc.mallopt(M_TRIM_THRESHOLD, DEFAULT_TRIM)
        trim_heap()
