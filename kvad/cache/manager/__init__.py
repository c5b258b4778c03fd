"""Block pool, allocation, prefix cache, demotion and swapped sequences; integers only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.cache.manager import portable_layout as portable_layout
    from kvad.cache.manager import prefix_offload as prefix_offload
    from kvad.cache.manager.allocation import BlockAllocation as BlockAllocation
    from kvad.cache.manager.allocation import TokenSpan as TokenSpan
    from kvad.cache.manager.allocation import max_blocks as max_blocks
    from kvad.cache.manager.encoder_blocks import EncoderAllocation as EncoderAllocation
    from kvad.cache.manager.kv_cache_manager import KVCacheManager as KVCacheManager
    from kvad.cache.manager.prefix_cache import CacheStats as CacheStats
    from kvad.cache.manager.prefix_history import PrefixHistory as PrefixHistory
    from kvad.cache.manager.prefix_offload import check_shareable as check_shareable
    from kvad.cache.manager.sequence_blocks import SwappedSequence as SwappedSequence

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
