"""KVCache: tensors of keys and values, views, eviction, demotion, host copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.cache.device import host_copy as host_copy
    from kvad.cache.device.eviction import EvictionEvent as EvictionEvent
    from kvad.cache.device.kv_cache import KVCache as KVCache
    from kvad.cache.device.offload_reader import OffloadReader as OffloadReader
    from kvad.cache.device.views import paged_reason as paged_reason

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
