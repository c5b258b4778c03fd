"""Packing loses nothing."""

import numpy as np
import pytest

from kvad.cache.manager.prefix_offload import BlockKey
from kvad.cache.offload.ram_store import RamBlockStore
from kvad.errors import ConfigError
from kvad.storage.byte_shuffle import compress, decompress


@pytest.mark.parametrize(("dtype", "most"), [("float64", 0.99), ("float32", 0.9), ("float16", 0.92)])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_what_is_unpacked_is_what_was_packed(dtype, most, count):
    numbers = (np.random.default_rng(0).standard_normal(count) * 0.1).astype(dtype)
    packed = compress(memoryview(numbers).cast("B"), numbers.itemsize)
    if packed is None:
        assert count < 1000 or dtype == "float64"
        return
    assert decompress(packed, numbers.itemsize) == numbers.tobytes()
    assert len(packed) < most * numbers.nbytes


@pytest.mark.parametrize("width", [1, 2, 4])
def test_noise_is_left_as_it_is(width):
    assert compress(np.random.default_rng(0).bytes(4096), width) is None


def test_numbers_of_one_byte_are_left_as_they_are():
    assert compress(bytes(4096), 1) is None


def name(number):
    return BlockKey(f"{number:04x}", "", bytes([number]))


def fill(attic, numbers, size=4096):
    for number in numbers:
        piece = np.full(size // 4, number, np.float32)
        kept = attic.put(name(number), {0: memoryview(piece).cast("B")})
        while kept is not None:
            attic.on_compressed(kept, attic.compress_job(kept)())
            kept = attic.oldest()


def test_an_attic_is_bounded_packs_what_lies_long_and_gives_all_back():
    attic = RamBlockStore(5 * 4096, [4])
    fill(attic, range(12))
    stats = attic.stats()
    assert stats.bytes <= attic.limit and stats.compressed and stats.evictions and stats.num_blocks >= 5
    found = [number for number in range(12) if attic.has(name(number).key)]
    for number in found:
        kept = attic.get(name(number), (0,))
        assert bytes(attic.decompress_job(kept, (0,))()[0]) == np.full(1024, number, np.float32).tobytes()
    assert 11 in found and 0 not in found
    for number in found:
        attic.drop(name(number).key)
    assert attic.stats().bytes == 0 == attic._raw


def test_groups_of_one_block_come_together_and_another_history_does_not():
    attic = RamBlockStore(1 << 20, [1, 1])
    attic.put(name(1), {0: b"a"})
    assert attic.get(name(1), (0, 1)) is None
    attic.put(name(1), {1: b"b"})
    kept = attic.get(name(1), (0, 1))
    assert {g: bytes(p) for g, p in attic.decompress_job(kept, (0, 1))().items()} == {0: b"a", 1: b"b"}
    assert attic.get(name(1)._replace(parent_digest="ff"), (0,)) is None
    attic.put(name(1)._replace(parent_digest="ff"), {0: b"c"})
    assert attic.get(name(1), (0,)) is None and attic.stats().num_blocks == 1


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="prefix_cache_ram: must be at least 1"):
        RamBlockStore(0, [4])
