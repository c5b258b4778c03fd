"""The process: memory in huge pages, glibc's allocator, and torch.compile.

``HostMemory`` has the arrays of a cache, or packed weights.

glibc keeps a step's freed temporaries (gathered keys and values, masks) until malloc_trim is called, so a process stays
larger than its pool. Blocks of many MB are returned at once, and allocated again as new pages. On other systems (macOS,
musl) the functions do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from kvad.ops.linear import prepare_graphs

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
DEFAULT_TRIM, DEFAULT_MMAP_MAX = 128 << 10, 65536

MIN_TRIM_BYTES = 32 << 20  # freed bytes; below, returning them costs more than it saves
ALIGNMENT = 64  # bytes, as torch's own allocations
HUGE_PAGE = 2 << 20  # bytes; NumPy asks for such pages from 4 MiB on


class HostMemory:
    """Zeros in RAM for many arrays.

    The system provides memory when it is first used, so a pool takes memory as it fills. Arrays share regions, so that
    small ones share huge pages: with pages of 4 KiB attention of 8,192 tokens takes twice as long, and weights are read
    about 10% more slowly.

    Args:
        num_bytes: Size of the first region.
        more_bytes: Size of the regions that are added when one is full (0: what does not fit has its own memory).
    """

    def __init__(self, num_bytes: int = 0, *, more_bytes: int = 0) -> None:
        self._free = _allocate_zeros(num_bytes) if num_bytes >= 2 * HUGE_PAGE else torch.empty(0, dtype=torch.uint8)
        self._more_bytes = more_bytes

    def take(self, num_bytes: int) -> Tensor:
        """Return zeros, bytes [num_bytes]."""
        if num_bytes > len(self._free):
            if num_bytes > self._more_bytes:
                return _allocate_zeros(num_bytes)
            self._free = _allocate_zeros(self._more_bytes)
        taken, self._free = self._free[:num_bytes], self._free[-(-num_bytes // ALIGNMENT) * ALIGNMENT :]
        return taken


def _allocate_zeros(num_bytes: int) -> Tensor:
    alignment = ALIGNMENT if num_bytes < 2 * HUGE_PAGE else HUGE_PAGE
    raw = torch.from_numpy(np.zeros(num_bytes + alignment, dtype=np.uint8))
    start = -raw.data_ptr() % alignment
    return raw[start : start + num_bytes]


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


def compile_error(device: str, *, backward: bool = True) -> str | None:
    """Compile a small function for a device; return the first line of the error, or None if it worked."""
    try:
        out = torch.compile(lambda x: (x * x + 1).sum())(torch.ones(4, device=device, requires_grad=backward))
        if backward:
            out.backward()
    except Exception as error:  # the compiler and its driver raise errors of many types
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    return None


def lazy_compile(function: F, backend: Callable[..., Any] | str = "inductor") -> F:
    """Return the function, compiled at the first call and again for other shapes; ``backend`` compiles a graph."""
    return cast("F", torch.compile(function, backend=backend))


class RegionCompiler:
    """Compiles functions of layers for any number of tokens, once per kind of layer, and counts the compilations."""

    def __init__(self) -> None:
        self.num_compilations = 0
        self._functions: dict[tuple[object, object], Callable[..., Any]] = {}

    def run(self, kind: tuple[object, ...], function: Callable[..., T], layer: object, *tensors: Tensor) -> T:
        """Call a function of a layer and tensors [T, ...], compiled for this kind of layer and any T."""
        tensors = tuple(tensor.reshape(-1).view(tensor.shape) for tensor in tensors)  # other strides are compiled again
        for tensor in tensors:  # dynamic=True would also make numbers of the layer variables, such as its width
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self._compiled(function, kind)(layer, *tensors)

    def _compiled(self, function: F, kind: tuple[object, ...]) -> F:
        key = (function, kind)
        if key not in self._functions:
            prepare_graphs()
            # torch limits the compilations of a code object, and compares sizes between code of one name (its profile),
            # so each kind has a copy with another name.
            original = cast("types.FunctionType", function).__code__
            code = original.replace(co_name=f"{original.co_name}_{uuid.uuid4().hex}")
            copied = types.FunctionType(code, function.__globals__, function.__name__)
            self._functions[key] = lazy_compile(copied, self._compile_graph)
        return cast("F", self._functions[key])

    def __deepcopy__(self, memo: object) -> RegionCompiler:
        return RegionCompiler()

    def _compile_graph(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx  # takes a second

        self.num_compilations += 1
        return compile_fx(graph, inputs)
