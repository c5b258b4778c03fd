"""Bytes of weights, cache and activations, computed in advance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.cache.sizing import activations as activations
    from kvad.cache.sizing import memory_plan as memory_plan
    from kvad.cache.sizing.memory_plan import GroupPlan as GroupPlan
    from kvad.cache.sizing.memory_plan import MemoryPlan as MemoryPlan
    from kvad.cache.sizing.memory_plan import check_policy as check_policy
    from kvad.cache.sizing.memory_plan import plan_memory as plan_memory
    from kvad.cache.sizing.memory_plan import require_memory as require_memory
    from kvad.cache.sizing.system_memory import available_bytes as available_bytes

__all__ = [
    "GroupPlan",
    "MemoryPlan",
    "activations",
    "available_bytes",
    "check_policy",
    "memory_plan",
    "plan_memory",
    "require_memory",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "GroupPlan": "memory_plan",
        "MemoryPlan": "memory_plan",
        "available_bytes": "system_memory",
        "check_policy": "memory_plan",
        "plan_memory": "memory_plan",
        "require_memory": "memory_plan",
    },
    ("activations", "memory_plan"),
)
