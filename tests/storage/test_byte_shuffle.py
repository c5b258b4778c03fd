"""Byte shuffling and the compressed RAM store lose no data."""

import numpy as np
import pytest

from kvad.cache.manager.prefix_offload import BlockKey
from kvad.cache.offload.ram_store import RamBlockStore
from kvad.errors import ConfigError
from kvad.storage.byte_shuffle import compress, decompress


@pytest.mark.parametrize(("dtype", "most"), [("float64", 0.99), ("float32", 0.9), ("float16", 0.92)])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_round_trip_restores_the_bytes(dtype, most, count):
    numbers = (np.random.default_rng(0).standard_normal(count) * 0.1).astype(dtype)
    packed = compress(memoryview(numbers).cast("B"), numbers.itemsize)
    if packed is None:
        assert count < 1000 or dtype == "float64"
        return
    assert decompress(packed, numbers.itemsize) == numbers.tobytes()
    assert len(packed) < most * numbers.nbytes


@pytest.mark.parametrize("width", [1, 2, 4])
def test_noise_is_stored_uncompressed(width):
    assert compress(np.random.default_rng(0).bytes(4096), width) is None


def test_single_bytes_are_not_shuffled():
    assert compress(bytes(4096), 1) is None


def name(number):
    return BlockKey(f"{number:04x}", "", bytes([number]))


def fill(store, numbers, size=4096):
    for number in numbers:
        buffer = np.full(size // 4, number, np.float32)
        if store.put(name(number), {0: memoryview(buffer).cast("B")}):
            while (block := store.next_to_compress()) is not None:
                store.replace(block, block.compress([4]))


def test_full_store_compresses_then_drops_oldest_blocks():
    store = RamBlockStore(5 * 4096, [4])
    fill(store, range(12))
    stats = store.stats()
    assert stats.bytes <= stats.limit and stats.compressed and stats.evictions and stats.num_blocks >= 5
    stored = [number for number in range(12) if name(number).key in store]
    for number in stored:
        block = store.get(name(number), (0,))
        assert bytes(block.raw((0,), [4])[0]) == np.full(1024, number, np.float32).tobytes()
    assert 11 in stored and 0 not in stored
    for number in stored:
        store.drop(name(number).key)
    assert store.stats().bytes == 0 == store._raw_bytes


def test_groups_of_a_block_are_found_by_hash_only():
    store = RamBlockStore(1 << 20, [1, 1])
    store.put(name(1), {0: b"a"})
    assert store.get(name(1), (0, 1)) is None
    store.put(name(1), {1: b"b"})
    block = store.get(name(1), (0, 1))
    assert {g: bytes(p) for g, p in block.raw((0, 1), [1, 1]).items()} == {0: b"a", 1: b"b"}
    assert store.get(name(1)._replace(parent_digest="ff"), (0,)) is None
    store.put(name(1)._replace(parent_digest="ff"), {0: b"c"})
    assert store.get(name(1), (0,)) is None and store.stats().num_blocks == 1


def test_block_dropped_during_compression_stays_dropped():
    store = RamBlockStore(8192, [4])
    store.put(name(1), {0: bytes(8000)})
    block = store.next_to_compress()
    store.drop(name(1).key)
    store.replace(block, block.compress([4]))
    assert name(1).key not in store and store.stats().bytes == 0


def test_zero_budget_is_refused():
    with pytest.raises(ConfigError, match="prefix_cache_ram: must be at least 1"):
        RamBlockStore(0, [4])
