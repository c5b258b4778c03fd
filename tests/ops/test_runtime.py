"""Memory that the allocator keeps is returned to the system, if glibc offers it."""

import ctypes
import itertools
import resource
import subprocess
import sys

import pytest

from kvad.ops import runtime
from kvad.ops.runtime import ALIGNMENT, HUGE_PAGE, HostMemory, keep_freed_memory, trim_heap


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


def test_arrays_of_a_host_memory_are_zero_aligned_and_apart():
    memory = HostMemory(2 * HUGE_PAGE)
    taken = [memory.take(size) for size in (100, HUGE_PAGE, 1, HUGE_PAGE - 1000, 900)]  # the last one does not fit
    spans = sorted((part.data_ptr(), part.data_ptr() + len(part)) for part in taken)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(part.data_ptr() % ALIGNMENT == 0 and not part.any() for part in taken)
    assert taken[0].data_ptr() % HUGE_PAGE == 0
    assert len({part.untyped_storage().data_ptr() for part in taken[:-1]}) == 1
    assert taken[-1].untyped_storage().data_ptr() != taken[0].untyped_storage().data_ptr()


def test_a_host_memory_adds_a_region_for_what_does_not_fit():
    memory = HostMemory(more_bytes=2 * HUGE_PAGE)
    first, second, third = (memory.take(HUGE_PAGE - 64) for _ in range(3))
    large = memory.take(2 * HUGE_PAGE + 64)
    fourth = memory.take(64)
    regions = [part.untyped_storage().data_ptr() for part in (first, second, third, large, fourth)]
    assert regions[0] == regions[1] and regions[2] == regions[4] and len(set(regions)) == 3
    assert not any(part.any() for part in (first, second, third, large, fourth))
