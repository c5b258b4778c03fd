"""Bytes of weights, cache and activations, computed in advance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.cache.sizing import activations as activations
    from kvad.cache.sizing import fits as fits
    from kvad.cache.sizing import memory_plan as memory_plan
    from kvad.cache.sizing.fits import MemoryBudget as MemoryBudget
    from kvad.cache.sizing.fits import available_bytes as available_bytes
    from kvad.cache.sizing.fits import describe_room as describe_room
    from kvad.cache.sizing.fits import fit_plan as fit_plan
    from kvad.cache.sizing.fits import measure_bandwidth as measure_bandwidth
    from kvad.cache.sizing.fits import require_memory as require_memory
    from kvad.cache.sizing.memory_plan import GroupPlan as GroupPlan
    from kvad.cache.sizing.memory_plan import MemoryPlan as MemoryPlan
    from kvad.cache.sizing.memory_plan import PoolPlan as PoolPlan
    from kvad.cache.sizing.memory_plan import SpeculationShape as SpeculationShape
    from kvad.cache.sizing.memory_plan import check_policy as check_policy
    from kvad.cache.sizing.memory_plan import check_summarizer as check_summarizer
    from kvad.cache.sizing.memory_plan import draft_cache as draft_cache
    from kvad.cache.sizing.memory_plan import plan_memory as plan_memory

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
