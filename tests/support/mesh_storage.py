"""Swap space and block stores on a mesh, and the options refused because only rank 0 would apply them.

``mesh_cases.py`` runs ``run_storage`` on each rank.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from kvad.cache.config import CacheConfig
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.preemption import SwapCostModel
from kvad.errors import ConfigError
from kvad.model.fingerprint import weights_fingerprint
from kvad.parallel.distributed_cache import build_follower_cache, leader_cache_factory, run_follower
from kvad.parallel.mesh import Mesh
from tests.support.manager_driver import unpublish_all
from tests.support.mesh_worker import Case, Result, build_shard, connect, greedy
from tests.support.random_models import build

SPACE = 1 << 22


class AlwaysSwap(SwapCostModel):
    """Always prefers a copy."""

    def swap_is_cheaper(self, *_: Any, **__: Any) -> bool:
        return True


def run_storage(case: Case, rank: int, store: Store) -> Result | None:
    """Compare texts of engines on the mesh with one process that writes blocks for the mesh and reads its blocks."""
    groups = connect(Mesh.parse(case.mesh), rank, dist.PrefixStore("storage", store))
    model = build_shard(case, groups)
    if rank:
        for _ in range(5):  # two engines are refused after their KVCache was built
            run_follower(model, build_follower_cache(model, case.cache, groups))
        return None
    full_model = build(case.config)
    identity = {"weights_fingerprint": weights_fingerprint(full_model)}
    expected = greedy(Engine(full_model, case.cache), case)

    def engine(cache: CacheConfig, **options: Any) -> Engine:
        return Engine(model, cache, EngineConfig(cache_factory=leader_cache_factory(model, groups), **options))

    instance = engine(replace(case.cache, swap_space=SPACE), cost_model=AlwaysSwap())
    result: Result = {"swapped": greedy(instance, case) == expected, "swaps": instance.preemption.stats().to_ram}
    instance.close()
    instance = engine(replace(case.cache, prefix_cache_ram=SPACE))
    result["ram_store"], result["from_ram"] = _texts_repeat(instance, case, expected), _bytes_in(instance)
    instance.close()
    with tempfile.TemporaryDirectory() as folder:
        cache = replace(case.cache, prefix_cache_dir=folder)
        instance = engine(cache, **identity)
        result["disk_store"], result["from_disk_on_mesh"] = _texts_repeat(instance, case, expected), _bytes_in(instance)
        instance.close()
        instance = Engine(full_model, cache, EngineConfig(**identity))
        result["disk_store"] &= greedy(instance, case) == expected
        result["from_disk"], result["store_failed"] = (
            _bytes_in(instance),
            instance.block_store is None or instance.block_store.stats().disk.failures > 0,
        )
        instance.close()
        result["fingerprint_required"] = _refusal(engine, replace(case.cache, prefix_cache_dir=folder))
        result["swap_dir"] = _refusal(engine, case.cache, swap_dir=folder)
        result["offload"] = _refusal(
            engine, replace(case.cache, overflow="offload", max_seq_len=24, offload_dir=folder)
        )
    result["num_tokens"] = sum(map(len, expected.values()))
    return result


def _texts_repeat(engine: Engine, case: Case, expected: dict[str, list[int]]) -> bool:
    """Generate the same texts twice, the second time with the blocks that the stores have of the first."""
    first = greedy(engine, case)
    if (
        engine.cache.prefix_cache_dir is not None
    ):  # dropped blocks are on disk already; the RAM store has evicted blocks
        engine.flush_offload()
        unpublish_all(engine.kv_cache_manager)
    second = greedy(engine, case)
    sorted_texts = [sorted(texts.items(), key=lambda each: int(each[0])) for texts in (second, expected)]
    return first == expected and [text for _, text in sorted_texts[0]] == [text for _, text in sorted_texts[1]]


def _bytes_in(engine: Engine) -> int:
    assert engine.block_store is not None
    return engine.block_store.stats().bytes_in


def _refusal(engine: Any, cache: CacheConfig, **options: Any) -> str:
    try:
        engine(cache, **options)
    except ConfigError as error:
        return str(error)
    return ""
