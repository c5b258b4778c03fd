"""What the allocator keeps is given back, where it can be asked."""

import ctypes
import resource
import sys

import pytest

from kvad.ops import malloc
from kvad.ops.malloc import keep_freed_memory, trim_heap


def fragmented():
    """Sixty mebibytes freed between blocks that stay: glibc keeps them."""
    blocks = [ctypes.create_string_buffer(100_000) for _ in range(1200)]
    stay = blocks[::2]
    blocks.clear()
    return stay


@pytest.mark.skipif(not sys.platform.startswith("linux") or malloc._libc() is None, reason="asks glibc")
def test_kept_memory_is_returned_when_it_is_worth_it():
    trim_heap(0)
    stay = fragmented()
    kept = malloc._libc().mallinfo2().fordblks
    assert kept > malloc.MIN_TRIM_BYTES and len(stay) == 600
    assert not trim_heap(min_bytes=1 << 40)
    assert trim_heap() and trim_heap(0)


def test_without_glibc_nothing_is_done(monkeypatch):
    monkeypatch.setattr(malloc, "_libc", lambda: None)
    assert trim_heap(0) is False


def new_pages():
    """How many pages the system had to make while a block of 64 MiB was taken, filled and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ctypes.memset(ctypes.create_string_buffer(64 << 20), 1, 64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux") or malloc._libc() is None, reason="asks glibc")
def test_memory_that_is_taken_again_and_again_is_not_made_anew():
    new_pages()
    assert new_pages() > 1000
    with keep_freed_memory():
        new_pages()
        assert new_pages() < 100
        assert malloc._libc().mallinfo2().fordblks > 60 << 20
    assert new_pages() > 1000  # it went back


def test_without_glibc_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(malloc, "_libc", lambda: None)
    with keep_freed_memory():
        pass
