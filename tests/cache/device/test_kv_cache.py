"""KVCache: block operations change the named blocks and nothing else."""

from __future__ import annotations

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import build_groups
from kvad.cache.quantization import FORMATS
from kvad.config.model import AttentionSpec, attention_specs
from kvad.engine.engine import Engine
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import CacheError
from kvad.model_input import NULL_BLOCK, PADDING_BLOCK, BlockOps, ModelInput, SlotMapping, SubBatch
from tests.support.random_models import build, model_config


def make_cache() -> KVCache:
    config = model_config(heads="window-mix")
    cache = CacheConfig(dtype="float64", max_num_seqs=3, max_seq_len=32, block_size=4, prefill_chunk_size=8)
    return KVCache(build_groups(attention_specs(config), cache))


def test_cleared_blocks_are_invisible_and_zero():
    kv_cache = make_cache()
    for tensor in kv_cache.tensors():
        tensor.fill_(3)
    kv_cache.apply(BlockOps(clear=((4, 2), ()), copy=((), ())))
    for layer in kv_cache.groups[0].layers:
        assert not kv_cache.keys[layer].data[[4, 2]].any() and (kv_cache.keys[layer].data[3] == 3).all()
        assert not kv_cache.values[layer].data[[4, 2]].any()
    assert (kv_cache.positions[0][[2, 4]] == -1).all() and (kv_cache.positions[0][3] == 3).all()
    assert all((kv_cache.keys[layer].data == 3).all() for layer in kv_cache.groups[1].layers)


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if not each.is_blockwise])
def test_a_copy_has_all_arrays_and_shows_the_first_slots_only(name):
    spec = AttentionSpec(True, None, 2, 8, 8)
    config = CacheConfig(max_num_seqs=2, max_seq_len=16, block_size=4, key_dtype=name, value_dtype=name)
    kv_cache = KVCache(build_groups([spec] * 2, config))
    stores = (*kv_cache.keys, *kv_cache.values)
    for store in stores:
        store.write_blocks(torch.tensor([5]), torch.randn(1, 2, 4, 8))
    kv_cache.positions[0][5] = torch.tensor([8, 9, 10, 11])
    kv_cache.positions[0][6] = torch.tensor([4, 5, 6, 7])  # of its previous owner
    kv_cache.apply(BlockOps(clear=((),), copy=(((5, 6, 2),),)))
    assert kv_cache.positions[0][6].tolist() == [8, 9, -1, -1]
    assert all(torch.equal(array[5], array[6]) for store in stores for array in store.arrays)
    kv_cache.apply(BlockOps(clear=((5,),), copy=((),)))
    assert all(not array[5].any() and array[6].any() for store in stores for array in store.arrays)


def test_gradients_are_refused():
    config = model_config()
    model, tokens = build(config), torch.arange(3)
    cache = CacheConfig(dtype="float64", max_num_seqs=1, max_seq_len=8, block_size=4)
    kv_cache = KVCache(build_groups(attention_specs(config), cache))
    slot_mapping = SlotMapping(torch.tensor([8, 9, 10]), (torch.tensor([[2]]),))
    step = ModelInput(tokens, tokens, (SubBatch(1, 3, 4),), tokens, slot_mappings=(slot_mapping,))
    with pytest.raises(CacheError, match="gradient"):
        model(step, kv_cache)
    with torch.no_grad():
        assert model(step, kv_cache).isfinite().all()


@pytest.mark.parametrize("heads", ["window-mix", "gqa"])
def test_a_run_allocates_nothing_and_writes_no_reserved_block(heads):
    """The null block is never written. Padding blocks are, but their positions stay invisible."""
    cache = CacheConfig(dtype="float64", max_num_seqs=4, max_seq_len=96, block_size=4, prefill_chunk_size=7)
    engine = Engine(build(model_config(heads=heads)), cache)
    kv_cache = engine.kv_cache
    before = [(tensor.data_ptr(), tensor.shape) for tensor in kv_cache.tensors()]
    for length in (1, 3, 30, 60):
        engine.add_request(list(range(length)), SamplingParams(temperature=0, max_tokens=12))
    while not engine.idle:
        engine.step()
    assert [(tensor.data_ptr(), tensor.shape) for tensor in kv_cache.tensors()] == before
    for positions in kv_cache.positions:
        assert (positions[[NULL_BLOCK, PADDING_BLOCK]] == -1).all() and (positions >= 0).any()
    assert not any(store.data[NULL_BLOCK].any() for store in (*kv_cache.keys, *kv_cache.values))
