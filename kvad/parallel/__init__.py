"""Mesh, process groups, tensor and pipeline parallelism, applied to a model from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.parallel import mesh as mesh
    from kvad.parallel import process_groups as process_groups
    from kvad.parallel.distributed_cache import build_follower_cache as build_follower_cache
    from kvad.parallel.distributed_cache import leader_cache_factory as leader_cache_factory
    from kvad.parallel.distributed_cache import run_follower as run_follower
    from kvad.parallel.mesh import Mesh as Mesh
    from kvad.parallel.partition import RankPlan as RankPlan
    from kvad.parallel.partition import plan_ranks as plan_ranks
    from kvad.parallel.process_groups import connect_groups as connect_groups
    from kvad.parallel.tensor_parallel import shard_model as shard_model

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
