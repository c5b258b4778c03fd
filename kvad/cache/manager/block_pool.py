"""Block ownership: one ``BlockPool`` per cache group.

The invariant, checked by ``BlockPool.check`` after every step of the tests::

    free + evictable + live == total

*Live*: referenced by at least one sequence. *Evictable*: not referenced, but published (it holds a known prefix that a
later sequence may acquire). *Free*: neither. Free and evictable blocks form one list, the free list that is also the
LRU list: free blocks at the head, then published blocks, the least recently released first. All operations are O(1).

After nano-vllm's ``engine/block_manager.py`` and vLLM's ``v1/core/block_pool.py``.
"""

from __future__ import annotations

import heapq
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.prefix_index import PrefixNode
from kvad.model_input import RESERVED_BLOCKS

LOG = logging.getLogger(__name__)


class BlockPool:
    """Blocks ``RESERVED_BLOCKS .. blocks - 1`` of one group, with reference counts and published prefixes.

    ``on_evict`` is called with a published block before it is reused.
    """

    def __init__(self, blocks: int) -> None:
        self.total = blocks - RESERVED_BLOCKS
        self.refs = [0] * blocks
        self.prefixes: list[PrefixNode | None] = [None] * blocks
        self.evictable = 0
        self.evictions = 0
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(RESERVED_BLOCKS, blocks))
        self._min_idle = len(self._idle)
        self._published: dict[PrefixNode, int] = {}
        self.on_evict: Callable[[int, PrefixNode], None] | None = None

    @property
    def num_available(self) -> int:
        """Number of blocks that ``allocate`` can return: free and evictable ones."""
        return len(self._idle)

    @property
    def num_free(self) -> int:
        return len(self._idle) - self.evictable

    @property
    def num_live(self) -> int:
        return self.total - len(self._idle)

    @property
    def peak(self) -> int:
        """Maximum number of live blocks since ``reset_peak``."""
        return self.total - self._min_idle

    def reset_peak(self) -> None:
        self._min_idle = len(self._idle)

    def allocate(self) -> int:
        """Take the block at the head of the list. Its contents belong to another sequence: clear it."""
        block, _ = self._idle.popitem(last=False)
        self._min_idle = min(self._min_idle, len(self._idle))
        self.refs[block] = 1
        prefix = self.prefixes[block]
        if prefix is not None:
            LOG.debug("block %d is evicted from the prefix cache", block)
            if self.on_evict is not None:
                self.on_evict(block, prefix)
            self.prefixes[block] = None
            del self._published[prefix]
            self.evictable -= 1
            self.evictions += 1
        return block

    def incref(self, block: int) -> None:
        """Add a reference to a live or published block."""
        if self.refs[block] == 0:
            assert self.prefixes[block] is not None, f"block {block} is free and cannot be acquired"
            del self._idle[block]
            self._min_idle = min(self._min_idle, len(self._idle))
            self.evictable -= 1
        self.refs[block] += 1

    def decref(self, block: int) -> None:
        """Remove a reference. Without any, the block is evictable (end of the list) if published, else free (head)."""
        assert self.refs[block] > 0, f"block {block} is freed twice"
        self.refs[block] -= 1
        if self.refs[block]:
            return
        self._idle[block] = None
        if self.prefixes[block] is None:
            self._idle.move_to_end(block, last=False)
        else:
            self.evictable += 1

    def decref_all(self, blocks: Sequence[int]) -> None:
        """Remove a reference of each block, the last one first."""
        for block in reversed(blocks):
            self.decref(block)

    def find(self, prefix: PrefixNode) -> int | None:
        return self._published.get(prefix)

    def publish(self, block: int, prefix: PrefixNode) -> bool:
        """Publish ``block`` under ``prefix``. Return False if another block already holds it."""
        if prefix in self._published:
            return False
        assert self.refs[block] > 0 and self.prefixes[block] is None, f"block {block} cannot be published"
        self._published[prefix] = block
        self.prefixes[block] = prefix
        return True

    def unpublish(self, block: int) -> None:
        """Undo ``publish``. Sequences that reference the block keep it."""
        prefix = self.prefixes[block]
        assert prefix is not None, f"block {block} is not published"
        del self._published[prefix]
        self.prefixes[block] = None
        if self.refs[block] == 0:
            self.evictable -= 1
            self._idle.move_to_end(block, last=False)

    def check(self) -> None:
        """Assert the invariant, and that every block is either referenced or idle."""
        blocks = range(RESERVED_BLOCKS, len(self.refs))
        assert all(count == 0 for count in self.refs[:RESERVED_BLOCKS]), "a reserved block is owned"
        assert not any(block < RESERVED_BLOCKS for block in self._idle), "a reserved block is in the free list"
        live = sum(1 for block in blocks if self.refs[block] > 0)
        evictable = sum(1 for block in self._idle if self.prefixes[block] is not None)
        assert evictable == self.evictable, f"{evictable} evictable blocks, {self.evictable} counted"
        assert self.num_free + self.evictable + live == self.total, "free + evictable + live != total"
        for block in blocks:
            assert self.refs[block] >= 0, f"block {block} has {self.refs[block]} owners"
            assert (self.refs[block] == 0) == (block in self._idle), f"block {block} is both owned and idle, or neither"
        expected = {prefix: block for block, prefix in enumerate(self.prefixes) if prefix is not None}
        assert expected == self._published, "published blocks and their index differ"
        seen_published = False
        for block in self._idle:
            published = self.prefixes[block] is not None
            assert published or not seen_published, "a free block is behind an evictable one"
            seen_published = published


class LowestFreeBlockPool(BlockPool):
    """Pool of offloaded blocks: allocates the lowest free block, because the first blocks are in RAM."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self._heap = list(self._idle)

    def allocate(self) -> int:
        self._idle.move_to_end(heapq.heappop(self._heap), last=False)
        return super().allocate()

    def decref(self, block: int) -> None:
        super().decref(block)
        if not self.refs[block]:
            heapq.heappush(self._heap, block)


def build_pool(group: CacheGroup) -> BlockPool:
    return LowestFreeBlockPool(group.num_blocks) if group.is_offloaded else BlockPool(group.num_blocks)
