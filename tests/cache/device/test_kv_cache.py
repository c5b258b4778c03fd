"""The device face: stores are moved by the ledger's integers and by nothing else."""

from __future__ import annotations

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.device.tensors import BlockTable, LayerTensor, gather_blocks
from kvad.cache.groups import build_groups
from kvad.config.model import attention_specs
from kvad.errors import CacheError
from kvad.model_input import NULL_BLOCK, PADDING_BLOCK, BlockOps, ModelInput, SlotMapping, SubBatch
from tests.support.driver import Stream, drive
from tests.support.random_models import build, model_config


def memory_of(layout: str = "paged", **fields: object) -> KVCache:
    config = model_config(heads="window-mix")
    cache = CacheConfig(
        layout=layout, dtype="float64", max_num_seqs=3, max_seq_len=32, block_size=4, prefill_chunk_size=8, **fields
    )  # type: ignore[arg-type]
    return KVCache(build_groups(attention_specs(config), cache))


def test_clear_makes_positions_invisible_and_contents_zero() -> None:
    memory = memory_of()
    for leaf in memory.tensors():
        leaf.fill_(3)
    memory.apply(BlockOps(clear=((4, 2), ()), copy=((), ())))
    for layer in memory.groups[0].layers:
        assert memory.keys[layer].data[[4, 2]].abs().sum() == 0 and (memory.keys[layer].data[3] == 3).all()
        assert memory.values[layer].data[[4, 2]].abs().sum() == 0
    assert (memory.positions[0][[2, 4]] == -1).all() and (memory.positions[0][3] == 3).all()
    assert all((memory.keys[layer].data == 3).all() for layer in memory.groups[1].layers)


def test_copy_keeps_the_first_slots_and_empties_the_others() -> None:
    memory = memory_of()
    memory.positions[0][5] = torch.tensor([8, 9, 10, 11])
    memory.positions[0][6] = torch.tensor([4, 5, 6, 7])  # of its previous owner
    layer = memory.groups[0].layers[0]
    keys = memory.keys[layer].data
    keys[5] = torch.rand_like(keys[5])
    memory.apply(BlockOps(clear=((), ()), copy=(((5, 6, 2),), ())))
    assert memory.positions[0][6].tolist() == [8, 9, -1, -1]
    assert torch.equal(keys[6], keys[5])


def test_the_empty_block_is_never_written_and_the_bin_never_read() -> None:
    model = build(model_config())
    cache = CacheConfig(dtype="float64", max_num_seqs=4, max_seq_len=48, block_size=4, prefill_chunk_size=7)
    import tests.support.driver as driver

    kept: list[tuple[torch.Tensor, list[LayerTensor]]] = []

    class Kept(driver.Engine):
        def close(self) -> None:
            kept.append((self.kv_cache.positions[0], [*self.kv_cache.keys, *self.kv_cache.values]))
            super().close()

    driver.Engine, before = Kept, driver.Engine  # type: ignore[misc]
    try:
        drive(model, cache, [Stream(list(range(1, 30)), [[1] * 8]), Stream([5], [[2] * 9])])
    finally:
        driver.Engine = before  # type: ignore[misc]
    ((positions, stores),) = kept
    assert (positions[NULL_BLOCK] == -1).all() and (positions[PADDING_BLOCK] == -1).all() and (positions >= 0).any()
    assert all(store.data[NULL_BLOCK].abs().sum() == 0 for store in stores)


def test_contiguous_rows_side_by_side_are_read_without_a_copy() -> None:
    memory = memory_of("contiguous")
    store = memory.keys[memory.groups[1].layers[0]].data
    view = gather_blocks(store, BlockTable(torch.tensor([[2], [3]]), 32, 16))
    assert view.shape == (2, store.shape[1], 16, store.shape[3])
    assert view.untyped_storage().data_ptr() == store.untyped_storage().data_ptr()
    apart = gather_blocks(store, BlockTable(torch.tensor([[2], [4]]), 32, 16))
    assert apart.untyped_storage().data_ptr() != store.untyped_storage().data_ptr()
    assert torch.equal(apart[1], store[4][:, :16])


def test_blocks_that_ascend_are_read_without_a_copy() -> None:
    store = memory_of().keys[0].data
    store.copy_(torch.rand_like(store))
    for blocks in ([[2, 3, 4]], [[2, 3], [4, 5]], [[7]]):
        got = gather_blocks(store, BlockTable(torch.tensor(blocks), 4, 12))
        assert got.untyped_storage().data_ptr() == store.untyped_storage().data_ptr(), blocks
        assert torch.equal(got, torch.stack([torch.cat([store[b] for b in row], dim=1) for row in blocks]))
    for blocks in ([[2, 4, 3]], [[2, 3], [3, 4]], [[2, 3], [0, 0]], [[4, 3, 2]], [[2, 2, 4]]):
        got = gather_blocks(store, BlockTable(torch.tensor(blocks), 4, 12))
        assert got.untyped_storage().data_ptr() != store.untyped_storage().data_ptr(), blocks
        assert torch.equal(got, torch.stack([torch.cat([store[b] for b in row], dim=1) for row in blocks]))


def test_paged_reads_follow_the_table_and_not_the_order_of_blocks() -> None:
    memory = memory_of()
    store = memory.keys[0].data
    store.copy_(torch.rand_like(store))
    got = gather_blocks(store, BlockTable(torch.tensor([[6, 2, 5], [3, 0, 0]]), 4, 12))
    expected = torch.stack([torch.cat([store[b] for b in row], dim=1) for row in ([6, 2, 5], [3, 0, 0])])
    assert torch.equal(got, expected)


def test_a_gradient_through_a_memory_is_refused_by_name() -> None:
    config = model_config()
    model = build(config)
    cache = CacheConfig(dtype="float64", max_num_seqs=1, max_seq_len=8, block_size=4)
    memory = KVCache(build_groups(attention_specs(config), cache))
    every = torch.arange(3)
    place = SlotMapping(torch.tensor([8, 9, 10]), (torch.tensor([[2]]),))
    step = ModelInput(every, every, (SubBatch(1, 3, 4),), every, slot_mappings=(place,))
    with pytest.raises(CacheError, match="gradient"):
        model(step, memory)
    with torch.no_grad():
        assert model(step, memory).isfinite().all()


def test_the_cache_allocates_nothing_after_start() -> None:
    model = build(model_config(heads="window-mix"))
    cache = CacheConfig(dtype="float64", max_num_seqs=4, max_seq_len=96, block_size=4, prefill_chunk_size=8)
    from kvad.engine.engine import Engine
    from kvad.engine.scheduling.request import SamplingParams

    engine = Engine(model, cache)
    before = [(leaf.data_ptr(), leaf.shape) for leaf in engine.kv_cache.tensors()]
    for length in (3, 30, 60):
        engine.add_request(list(range(length)), SamplingParams(temperature=0, max_tokens=12))
    while not engine.idle:
        engine.step()
    assert [(leaf.data_ptr(), leaf.shape) for leaf in engine.kv_cache.tensors()] == before
