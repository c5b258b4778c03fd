"""Block stores in RAM and on disk, swap space, offloaded tokens, pinned prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.cache.offload import block_store as block_store
    from kvad.cache.offload import disk_store as disk_store
    from kvad.cache.offload import pinned as pinned
    from kvad.cache.offload import swap_space as swap_space
    from kvad.cache.offload import token_offload as token_offload
    from kvad.cache.offload.block_store import BlockStore as BlockStore
    from kvad.cache.offload.disk_store import DiskBlockStore as DiskBlockStore
    from kvad.cache.offload.pinned import PinnedPrefix as PinnedPrefix
    from kvad.cache.offload.swap_space import SwapFiles as SwapFiles
    from kvad.cache.offload.swap_space import SwapSpace as SwapSpace
    from kvad.cache.offload.token_offload import OffloadStats as OffloadStats

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
