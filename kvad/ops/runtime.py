"""The process: glibc's allocator, which returns freed memory or keeps it for reuse, and torch.compile.

glibc keeps a step's freed temporaries (gathered keys and values, masks) until malloc_trim is called, so a process stays
larger than its pool. Blocks of many MB are returned at once, and allocated again as new pages. On other systems (macOS,
musl) the functions do nothing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
DEFAULT_TRIM, DEFAULT_MMAP_MAX = 128 << 10, 65536

MIN_TRIM_BYTES = 32 << 20  # freed bytes; below, returning them costs more than it saves


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h (glibc 2.33)."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def trim_heap(min_bytes: int = MIN_TRIM_BYTES) -> bool:
    """Return freed memory to the system if the allocator keeps more than ``min_bytes``; True if malloc_trim ran."""
    libc = _libc()
    if libc is None or libc.mallinfo2().fordblks <= min_bytes:
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
    """Keep freed memory, large blocks included, while the context is active.

    Training steps allocate the same memory repeatedly; without this, the system maps and clears new pages every time.
    The memory is returned at the end.
    """
    libc = _libc()
    if libc is None:
        yield
        return
    libc.mallopt(M_MMAP_MAX, 0)  # no separate mappings for large blocks
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_MAX, DEFAULT_MMAP_MAX)
        libc.mallopt(M_TRIM_THRESHOLD, DEFAULT_TRIM)
        trim_heap()


def compile_error(device: str) -> str | None:
    """Compile a small function for a device; return the first line of the error, or None if it worked."""
    try:
        x = torch.ones(4, device=device, requires_grad=True)
        torch.compile(lambda x: (x * x + 1).sum())(x).backward()
    except Exception as error:  # the compiler and its driver raise errors of many types
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    return None


def lazy_compile(function: F) -> F:
    """Return the function, compiled at the first call and again for other shapes."""
    return cast("F", torch.compile(function))
