"""One layer's keys or values in every format: what is written is read, by any table, and moves are raw."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.device.tensors import BlockTable, LayerTensor
from kvad.cache.groups import build_groups, group_bytes
from kvad.cache.quantization import FORMATS
from kvad.config.model import AttentionSpec
from kvad.model_input import BlockOps
from kvad.ops.quantize import CODECS

TOKENWISE = [name for name, each in FORMATS.items() if not each.is_blockwise]
BLOCKS, HEADS, SIZE, DIM = 9, 2, 4, 6


def filled(name: str) -> tuple[LayerTensor, Tensor]:
    """A store whose every block is full, and its numbers [blocks, K, block_size, D] as they come back."""
    store = LayerTensor(name, BLOCKS, HEADS, SIZE, DIM)
    x = torch.randn(BLOCKS, HEADS, SIZE, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    store.write_blocks(torch.arange(BLOCKS), x)
    return store, CODECS[name].decode(CODECS[name].encode(x), torch.float64)


def expected(whole: Tensor, blocks: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([whole[block] for block in row], dim=1) for row in blocks])


@pytest.mark.parametrize("blocks", [[[6, 2, 5], [3, 0, 0]], [[7]], [[2], [3], [4]], [[4], [2]]])
@pytest.mark.parametrize("name", FORMATS)
def test_a_read_follows_the_table(name: str, blocks: list[list[int]]) -> None:
    store, whole = filled(name)
    for slots in (SIZE * len(blocks[0]), 3):
        table = BlockTable(torch.tensor(blocks), SIZE, slots)
        got = store.read(table, torch.float64)
        assert torch.equal(got, expected(whole, blocks)[:, :, : table.slots])


def test_reading_consecutive_blocks_is_a_view() -> None:
    store, _ = filled("float64")
    view = store.read(BlockTable(torch.tensor([[2], [3]]), SIZE, SIZE), torch.float64)
    assert view.untyped_storage().data_ptr() == store.data.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", TOKENWISE)
def test_slots_are_written_one_by_one_or_together(name: str) -> None:
    together, apart = LayerTensor(name, BLOCKS, HEADS, SIZE, DIM), LayerTensor(name, BLOCKS, HEADS, SIZE, DIM)
    x = torch.randn(5, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    blocks, offsets = torch.tensor([2, 2, 7, 3, 7]), torch.tensor([1, 2, 0, 3, 3])
    together.write(blocks, offsets, x)
    for at in range(5):
        apart.write(blocks[at : at + 1], offsets[at : at + 1], x[at : at + 1])
    assert all(torch.equal(a, b) for a, b in zip(together.arrays, apart.arrays, strict=True))
    right = CODECS[name].decode(CODECS[name].encode(x), torch.float32)
    assert torch.equal(together.read_slots(blocks, offsets, torch.float32), right)
    assert together.read_slots(torch.tensor([4]), torch.tensor([0]), torch.float32).abs().sum() == 0


@pytest.mark.parametrize("name", FORMATS)
def test_copied_and_cleared_blocks_bring_their_scales(name: str) -> None:
    store, whole = filled(name)
    store.copy(5, 2)
    store.clear(torch.tensor([7, 3]))
    got = store.read(BlockTable(torch.tensor([[2, 5, 3, 7, 4]]), SIZE, 99), torch.float64)
    nothing = torch.zeros_like(whole[0])
    assert torch.equal(got[0], torch.cat([whole[5], whole[5], nothing, nothing, whole[4]], dim=1))
    assert all(not array[[7, 3]].any() for array in store.arrays)


@pytest.mark.parametrize("name", FORMATS)
def test_raw_blocks_are_equal_in_another_store(name: str) -> None:
    store, whole = filled(name)
    other = LayerTensor(name, 4, HEADS, SIZE, DIM)
    for array, raw in zip(other.arrays, store.take_blocks(torch.tensor([8, 2])), strict=True):
        array[[3, 1]] = raw
    got = other.read(BlockTable(torch.tensor([[1, 3]]), SIZE, 99), torch.float64)
    assert torch.equal(got[0], torch.cat([whole[2], whole[8]], dim=1))


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.is_blockwise])
def test_a_per_channel_format_is_written_in_whole_blocks_only(name: str) -> None:
    store, one = LayerTensor(name, BLOCKS, HEADS, SIZE, DIM), torch.tensor([2])
    with pytest.raises(AssertionError):
        store.write(one, one, torch.zeros(1, HEADS, DIM))


SPECS = [
    AttentionSpec(True, None, 2, 8, 8),
    AttentionSpec(True, 6, 3, 6, 10),
    AttentionSpec(False, None, 1, 4, 4, True),
]


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize(("keys", "values"), [*itertools.product(FORMATS, TOKENWISE)])
def test_every_byte_is_planned(keys: str, values: str, layout: str) -> None:
    config = CacheConfig(
        layout=layout, max_num_seqs=2, max_seq_len=21, block_size=4, prefill_chunk_size=5, max_source_len=7
    )  # type: ignore[arg-type]
    placed = [
        group._replace(key_format=keys, value_format=values) for group in build_groups([*SPECS, SPECS[0]], config)
    ]
    memory, sizes = KVCache(placed), [group_bytes(group) for group in placed]
    assert sum(size.payload for size in sizes) == memory.payload_bytes()
    assert sum(size.scales for size in sizes) == memory.scale_bytes()
    assert sum(size.metadata for size in sizes) == memory.metadata_bytes()
    assert sum(size.total for size in sizes) == sum(leaf.nbytes for leaf in memory.tensors())
    for group, size in zip(placed, sizes, strict=True):
        assert size.per_seq * group.num_blocks == size.total * group.max_blocks_per_seq
        assert len({leaf.data_ptr() for leaf in memory.tensors()}) == len(memory.tensors())


@pytest.mark.parametrize("name", TOKENWISE)
def test_a_copy_on_write_takes_everything_and_a_clear_leaves_nothing(name: str) -> None:
    (group,) = build_groups(
        [SPECS[0]] * 2, CacheConfig(max_num_seqs=2, max_seq_len=16, block_size=4, key_dtype=name, value_dtype=name)
    )
    memory = KVCache([group])
    for store in (*memory.keys, *memory.values):
        store.write_blocks(torch.tensor([5]), torch.randn(1, 2, 4, 8))
    memory.positions[0][5] = torch.arange(4)
    memory.apply(BlockOps(clear=((),), copy=(((5, 6, 3),),)))
    for store in (*memory.keys, *memory.values):
        assert all(torch.equal(array[5], array[6]) for array in store.arrays)
    assert memory.positions[0][6].tolist() == [0, 1, 2, -1]
    memory.apply(BlockOps(clear=((5,),), copy=((),)))
    for store in (*memory.keys, *memory.values):
        assert all(not array[5].any() and array[6].any() for array in store.arrays)
