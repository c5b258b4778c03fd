"""What the allocator keeps is given back, where it can be asked."""

import ctypes
import sys

import pytest

from kvad.ops import heap
from kvad.ops.heap import give_back


def fragmented():
    """Sixty mebibytes freed between blocks that stay: glibc keeps them."""
    blocks = [ctypes.create_string_buffer(100_000) for _ in range(1200)]
    stay = blocks[::2]
    blocks.clear()
    return stay


@pytest.mark.skipif(not sys.platform.startswith("linux") or heap._libc() is None, reason="asks glibc")
def test_kept_memory_is_returned_when_it_is_worth_it():
    give_back(0)
    stay = fragmented()
    kept = heap._libc().mallinfo2().fordblks
    assert kept > heap.WORTH and len(stay) == 600
    assert not give_back(worth=1 << 40)
    assert give_back() and give_back(0)


def test_without_glibc_nothing_is_done(monkeypatch):
    monkeypatch.setattr(heap, "_libc", lambda: None)
    assert give_back(0) is False
