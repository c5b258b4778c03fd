"""One layer's keys or values in every format: reads return what was written, and blocks are copied as raw bytes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.device.tensors import BlockTable, LayerTensor, allocate_head_major
from kvad.cache.groups import build_groups, group_bytes
from kvad.cache.quantization import FORMATS
from kvad.config.model import AttentionSpec
from kvad.ops.quantize import CODECS
from kvad.ops.runtime import ALIGNMENT, HUGE_PAGE

PER_TOKEN = [name for name, each in FORMATS.items() if not each.is_blockwise]
BLOCKS, HEADS, SIZE, DIM = 9, 2, 4, 6


def resident_bytes() -> int:
    """Memory of this process in RAM (Linux)."""
    return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux reports the resident memory")
def test_a_pool_takes_memory_as_it_fills() -> None:
    before = resident_bytes()
    pool = allocate_head_major(1 << 16, 4, 16, 16, dtype=torch.bfloat16, device="cpu")  # 128 MiB
    assert resident_bytes() - before < 32 << 20
    assert pool.shape == (1 << 16, 4, 16, 16) and pool.data_ptr() % ALIGNMENT == 0 and not pool[::4999].any()
    pool.fill_(1)
    assert resident_bytes() - before > 96 << 20


@pytest.mark.parametrize("format_name", ["bfloat16", "int8", "int4"])
def test_keys_and_values_of_all_layers_share_one_region(format_name: str) -> None:
    specs = [AttentionSpec(True, None, 2, 64, 64)] * 8
    groups = build_groups(specs, CacheConfig(max_seq_len=4096, max_num_seqs=1, dtype=format_name))
    kv_cache = KVCache(groups)
    arrays = [array for store in (*kv_cache.keys, *kv_cache.values) for array in store.arrays]
    assert max(array.nbytes for array in arrays) < 2 * HUGE_PAGE < sum(array.nbytes for array in arrays)
    assert len({array.untyped_storage().data_ptr() for array in arrays}) == 1


def empty(name: str, blocks: int = BLOCKS) -> LayerTensor:
    return LayerTensor(name, blocks, HEADS, SIZE, DIM)


def filled(name: str) -> tuple[LayerTensor, Tensor]:
    """Return a store whose blocks are full, and its decoded numbers [blocks, K, block_size, D]."""
    store = empty(name)
    x = torch.randn(BLOCKS, HEADS, SIZE, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    store.write_blocks(torch.arange(BLOCKS), x)
    return store, CODECS[name].decode(CODECS[name].encode(x), torch.float64)


def read(store: LayerTensor, blocks: list[list[int]], slots: int = 99) -> Tensor:
    return store.read(BlockTable(torch.tensor(blocks), SIZE, slots), torch.float64)


CONSECUTIVE = ([[7]], [[2], [3], [4]], [[2, 3, 4]], [[2, 3], [4, 5]])
GATHERED = (
    [[6, 2, 5], [3, 0, 0]],
    [[4], [2]],
    [[2, 4, 3]],
    [[4, 3, 2]],
    [[2, 2, 4]],
    [[2, 3], [3, 4]],
    [[2, 3], [0, 0]],
)


@pytest.mark.parametrize("blocks", CONSECUTIVE + GATHERED)
@pytest.mark.parametrize("name", FORMATS)
def test_a_read_follows_the_table_and_copies_only_if_it_must(name, blocks):
    store, whole = filled(name)
    expected = torch.stack([torch.cat([whole[block] for block in row], dim=1) for row in blocks])
    for slots in (SIZE * len(blocks[0]), 3):
        result = read(store, blocks, slots)
        num_slots = BlockTable(torch.tensor(blocks), SIZE, slots).slots
        assert num_slots == result.shape[2] == (3 if len(blocks[0]) == 1 and slots == 3 else SIZE * len(blocks[0]))
        assert torch.equal(result, expected[:, :, :num_slots])
        is_view = result.untyped_storage().data_ptr() == store.data.untyped_storage().data_ptr()
        assert name != "float64" or is_view == (blocks in CONSECUTIVE)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_slots_are_written_separately_or_together(name):
    together, separate = empty(name), empty(name)
    x = torch.randn(5, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    blocks, offsets = torch.tensor([2, 2, 7, 3, 7]), torch.tensor([1, 2, 0, 3, 3])
    together.write(blocks, offsets, x)
    for index in range(5):
        separate.write(blocks[index : index + 1], offsets[index : index + 1], x[index : index + 1])
    assert all(map(torch.equal, together.arrays, separate.arrays))
    decoded = CODECS[name].decode(CODECS[name].encode(x), torch.float32)
    assert torch.equal(together.read_slots(blocks, offsets, torch.float32), decoded)
    assert not together.read_slots(torch.tensor([4]), torch.tensor([0]), torch.float32).any()


@pytest.mark.parametrize("name", FORMATS)
def test_copied_cleared_and_raw_blocks_include_their_scales(name):
    store, whole = filled(name)
    store.copy([(5, 2, SIZE), (2, 6, SIZE), (4, 5, 1)])
    store.clear([7, 3])
    assert torch.equal(read(store, [[6, 5]])[0], torch.cat([whole[5], whole[4]], dim=1))
    store.copy([(6, 5, SIZE)])
    zeros = torch.zeros_like(whole[0])
    assert torch.equal(
        read(store, [[2, 5, 3, 7, 4]])[0], torch.cat([whole[5], whole[5], zeros, zeros, whole[4]], dim=1)
    )
    assert not any(array[[7, 3]].any() for array in store.arrays)
    other = empty(name, 4)
    for array, raw in zip(other.arrays, [each[torch.tensor([8, 5])] for each in store.arrays], strict=True):
        array[[3, 1]] = raw
    assert torch.equal(read(other, [[1, 3]])[0], torch.cat([whole[5], whole[8]], dim=1))


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.is_blockwise])
def test_a_per_channel_format_is_written_in_whole_blocks_only(name):
    one = torch.tensor([2])
    with pytest.raises(AssertionError):
        empty(name).write(one, one, torch.zeros(1, HEADS, DIM))


SPECS = [
    AttentionSpec(True, None, 2, 8, 8),
    AttentionSpec(True, 6, 3, 6, 10),
    AttentionSpec(False, None, 1, 4, 4, True),
    AttentionSpec(True, None, 1, 12, 8, values_in_keys=True),
]


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize(("keys", "values"), [*itertools.product(FORMATS, PER_TOKEN)])
def test_every_byte_is_planned(keys, values, layout):
    config = CacheConfig(
        layout=layout, max_num_seqs=2, max_seq_len=21, block_size=4, prefill_chunk_size=5, max_source_len=7
    )
    groups = [
        group._replace(key_format=keys, value_format=values) for group in build_groups([*SPECS, SPECS[0]], config)
    ]
    kv_cache, sizes = KVCache(groups), [group_bytes(group) for group in groups]
    planned = [sum(getattr(size, part) for size in sizes) for part in ("payload", "scales", "metadata", "total")]
    total = sum(tensor.nbytes for tensor in kv_cache.tensors())
    assert planned == [kv_cache.payload_bytes(), kv_cache.scale_bytes(), kv_cache.metadata_bytes(), total]
    for group, size in zip(groups, sizes, strict=True):
        assert size.per_seq * group.num_blocks == size.total * group.max_blocks_per_seq
    assert len({tensor.data_ptr() for tensor in kv_cache.tensors()}) == len(kv_cache.tensors())
