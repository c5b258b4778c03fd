"""Memory that the allocator keeps is returned to the system, if glibc offers it."""

import ctypes
import resource
import subprocess
import sys

import pytest

from kvad.ops import runtime
from kvad.ops.runtime import keep_freed_memory, trim_heap


def fragmented():
    """Free sixty mebibytes between blocks that stay allocated: glibc keeps them."""
    blocks = [ctypes.create_string_buffer(100_000) for _ in range(1200)]
    stay = blocks[::2]
    blocks.clear()
    return stay


@pytest.mark.skipif(not sys.platform.startswith("linux") or runtime._libc() is None, reason="requires glibc")
def test_free_memory_is_returned_to_the_system():
    trim_heap(0)
    stay = fragmented()
    free_bytes = runtime._libc().mallinfo2().fordblks
    assert free_bytes > runtime.MIN_TRIM_BYTES and len(stay) == 600
    assert not trim_heap(min_bytes=1 << 40)
    assert trim_heap() and trim_heap(0)


def test_without_glibc_nothing_is_returned(monkeypatch):
    monkeypatch.setattr(runtime, "_libc", lambda: None)
    assert trim_heap(0) is False


def count_page_faults():
    """Count the page faults while a block of 64 MiB is allocated, filled and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ctypes.memset(ctypes.create_string_buffer(64 << 20), 1, 64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux") or runtime._libc() is None, reason="requires glibc")
def test_repeated_allocations_reuse_pages():
    """In its own process: what other tests freed would serve the allocations."""
    code = "from tests.ops.test_runtime import check_reuse; check_reuse()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def check_reuse():
    count_page_faults()
    assert count_page_faults() > 1000
    with keep_freed_memory():
        count_page_faults()
        assert count_page_faults() < 100
        assert runtime._libc().mallinfo2().fordblks > 60 << 20
    assert count_page_faults() > 1000  # the block was returned


def test_without_glibc_pages_are_not_reused(monkeypatch):
    monkeypatch.setattr(runtime, "_libc", lambda: None)
    with keep_freed_memory():
        pass
