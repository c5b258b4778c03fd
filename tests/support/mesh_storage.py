"""What a mesh has beside its pool: rows that are parked, tiers; and what is refused because it would be rank 0's alone.

``mesh_cases.py`` runs :func:`beside` on each rank.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from kvad.cache.config import CacheConfig
from kvad.engine.engine import Engine
from kvad.engine.scheduling.preemption import SwapCostModel
from kvad.errors import ConfigError
from kvad.model.fingerprint import weights_fingerprint
from kvad.parallel.distributed_cache import build_follower_cache, leader_cache_factory, run_follower
from kvad.parallel.mesh import Mesh
from kvad.parallel.process_groups import connect_groups
from tests.support.mesh_worker import TIMEOUT, Case, Result, cut, greedy
from tests.support.random_models import build

ROOM = 1 << 22


class Swaps(SwapCostModel):
    """To copy is always cheaper."""

    def swap_is_cheaper(self, *_: Any, **__: Any) -> bool:
        return True


def beside(case: Case, rank: int, store: Store) -> Result | None:
    """Texts of engines on the mesh, and of one process that stores blocks for it and reads what it has stored."""
    links = connect_groups(
        Mesh.parse(case.mesh).with_rank(rank), dist.PrefixStore("beside", store), timeout=TIMEOUT, idle=TIMEOUT
    )
    model = cut(case, links)
    if rank:
        for _ in range(5):  # two of them are refused when their memory is there
            run_follower(model, build_follower_cache(model, case.cache, links))
        return None
    whole = build(case.config)
    known = {"weights_fingerprint": weights_fingerprint(whole)}
    right = greedy(Engine(whole, case.cache), case)

    def engine(cache: CacheConfig, **options: Any) -> Engine:
        return Engine(model, cache, cache_factory=leader_cache_factory(model, links), **options)

    made = engine(replace(case.cache, swap_space=ROOM), cost_model=Swaps())
    result: Result = {"parked": greedy(made, case) == right, "swaps": made.preemption.stats().to_ram}
    made.close()
    made = engine(replace(case.cache, prefix_cache_ram=ROOM))
    result["kept"], result["from_ram"] = _again(made, case, right), _fetched(made)
    made.close()
    with tempfile.TemporaryDirectory() as folder:
        cache = replace(case.cache, prefix_cache_dir=folder)
        made = engine(cache, **known)
        result["stored"], result["on_mesh"] = _again(made, case, right), _fetched(made)
        made.close()
        made = Engine(whole, cache, **known)
        result["stored"] &= greedy(made, case) == right
        result["from_disk"], result["torn"] = (
            _fetched(made),
            made.block_store is None or made.block_store.stats().disk.failures > 0,
        )
        made.close()
        result["unknown"] = _refused(engine, replace(case.cache, prefix_cache_dir=folder))
        result["swap_dir"] = _refused(engine, case.cache, swap_dir=folder)
        result["offload"] = _refused(
            engine, replace(case.cache, overflow="offload", max_seq_len=24, offload_dir=folder)
        )
    result["said"] = sum(map(len, right.values()))
    return result


def _again(engine: Engine, case: Case, right: dict[str, list[int]]) -> bool:
    """Twice the same texts, the second time with what the tiers have of the first."""
    first = greedy(engine, case)
    if (
        engine.cache.prefix_cache_dir is not None
    ):  # what is dropped is on disk already; host memory has what others pushed out
        engine.flush_offload()
        engine.kv_cache_manager.reset_prefix_cache()
    again = greedy(engine, case)
    every = [sorted(texts.items(), key=lambda each: int(each[0])) for texts in (again, right)]
    return first == right and [text for _, text in every[0]] == [text for _, text in every[1]]


def _fetched(engine: Engine) -> int:
    assert engine.block_store is not None
    return engine.block_store.stats().bytes_in


def _refused(engine: Any, cache: CacheConfig, **options: Any) -> str:
    try:
        engine(cache, **options)
    except ConfigError as error:
        return str(error)
    return ""
