"""Who owns which block: one :class:`BlockPool` per cache group, and the :class:`Prefixes` that its blocks may hold.

The law, checked by :meth:`BlockPool.check` after every step of the tests::

    free + evictable + live == total

*live*: at least one row counts on it.  *evictable*: no row does, but it is published (it holds a known prefix that a
later row may claim).  *free*: neither.  Free and evictable blocks stand in one list, the free list that is also the
LRU list: free ones at its head, then the published ones, the least recently released first.  All operations are O(1).

A :class:`Prefix` is the whole history up to the end of one full block: its own tokens and the prefix before it.  It is
found by a chained digest, ``H(parent's digest + tokens)``, and *the digest is never trusted*: tokens and parent are
compared on every hit, and there is at most one Prefix object per history, so that identity is equality.  With a hash
of 8 bits the cache hits less often; it is never wrong (tests/cache/test_blocks.py).

After nano-vllm's ``engine/block_manager.py`` and vLLM's ``v1/core/block_pool.py``.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import blake2b
from weakref import WeakValueDictionary

from kvad.model_input import RESERVED_BLOCKS

HashFn = Callable[[bytes], bytes]


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


class PrefixNode:
    """A history that ends with a full block.  ``tokens``: that block's, packed as int64; ``depth``: blocks so far."""

    __slots__ = ("__weakref__", "depth", "digest", "full_digest", "parent", "tokens")

    def __init__(self, digest: bytes, parent: PrefixNode | None, tokens: bytes) -> None:
        self.digest = digest
        self.parent = parent
        self.tokens = tokens
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.full_digest = b""  # for tiers, where it was asked for (deposits.py)


class PrefixIndex:
    """The one Prefix of each history, found by digest.  It lives while a block, a longer prefix or a row holds it."""

    def __init__(self, hasher: HashFn = digest) -> None:
        self._hash = hasher
        self._known: WeakValueDictionary[bytes, PrefixNode] = WeakValueDictionary()

    def root(self, name: bytes) -> PrefixNode | None:
        """The empty history under ``name`` (weights, adapter, tenant ...); None: its digest is another's."""
        return self.extend(None, name)

    def find(self, parent: PrefixNode | None, tokens: bytes) -> PrefixNode | None:
        """The history ``parent`` + ``tokens``, if it is known."""
        return self._look(self._key(parent, tokens), parent, tokens)

    def extend(self, parent: PrefixNode | None, tokens: bytes) -> PrefixNode | None:
        """The same, made known.  None: its digest is another history's, so this one cannot be published."""
        key = self._key(parent, tokens)
        if key in self._known:
            return self._look(key, parent, tokens)
        prefix = self._known[key] = PrefixNode(key, parent, tokens)
        return prefix

    def _key(self, parent: PrefixNode | None, tokens: bytes) -> bytes:
        return self._hash((parent.digest if parent is not None else b"root:") + tokens)

    def _look(self, key: bytes, parent: PrefixNode | None, tokens: bytes) -> PrefixNode | None:
        known = self._known.get(key)
        if known is None or known.parent is not parent or known.tokens != tokens:
            return None
        return known


class BlockPool:
    """Blocks ``RESERVED_BLOCKS .. blocks - 1`` of one group: counted by ``refs``, published under a Prefix, or free."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks - RESERVED_BLOCKS
        self.refs = [0] * blocks
        self.prefixes: list[PrefixNode | None] = [None] * blocks
        self.evictable = 0
        self.evictions = 0
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(RESERVED_BLOCKS, blocks))
        self._least = len(self._idle)
        self._where: dict[PrefixNode, int] = {}
        self.on_evict: Callable[[int, PrefixNode], None] | None = (
            None  # told of a published block before it is handed on
        )

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`take` can give: free and evictable ones."""
        return len(self._idle)

    @property
    def num_free(self) -> int:
        return len(self._idle) - self.evictable

    @property
    def num_live(self) -> int:
        return self.total - len(self._idle)

    @property
    def peak(self) -> int:
        """The most blocks that were live at once since :meth:`restart_peak`."""
        return self.total - self._least

    def reset_peak(self) -> None:
        self._least = len(self._idle)

    def allocate(self) -> tuple[int, bool]:
        """(the block at the head of the list, was it evicted).  Its contents are another row's: clear it."""
        block, _ = self._idle.popitem(last=False)
        self._least = min(self._least, len(self._idle))
        self.refs[block] = 1
        prefix = self.prefixes[block]
        if prefix is None:
            return block, False
        if self.on_evict is not None:
            self.on_evict(block, prefix)
        self.prefixes[block] = None
        del self._where[prefix]
        self.evictable -= 1
        self.evictions += 1
        return block, True

    def incref(self, block: int) -> None:
        """One more row counts on a live or published block."""
        if self.refs[block] == 0:
            assert self.prefixes[block] is not None, f"block {block} is free: nobody may claim it"
            del self._idle[block]
            self._least = min(self._least, len(self._idle))
            self.evictable -= 1
        self.refs[block] += 1

    def decref(self, block: int) -> None:
        """One row less.  The last one leaves it evictable (the list's end) if published, else free (its head)."""
        assert self.refs[block] > 0, f"block {block} is released twice"
        self.refs[block] -= 1
        if self.refs[block]:
            return
        self._idle[block] = None
        if self.prefixes[block] is None:
            self._idle.move_to_end(block, last=False)
        else:
            self.evictable += 1

    def find(self, prefix: PrefixNode) -> int | None:
        return self._where.get(prefix)

    def publish(self, block: int, prefix: PrefixNode) -> bool:
        """Let later rows find ``block`` under ``prefix``.  False: another block holds it already."""
        if prefix in self._where:
            return False
        assert self.refs[block] > 0 and self.prefixes[block] is None, f"block {block} cannot be published"
        self._where[prefix] = block
        self.prefixes[block] = prefix
        return True

    def unpublish(self, block: int) -> None:
        """The inverse of :meth:`publish`: nobody finds it any more; rows that count on it keep it."""
        prefix = self.prefixes[block]
        assert prefix is not None, f"block {block} is not published"
        del self._where[prefix]
        self.prefixes[block] = None
        if self.refs[block] == 0:
            self.evictable -= 1
            self._idle.move_to_end(block, last=False)

    def published(self) -> Iterable[int]:
        return tuple(self._where.values())

    def check(self) -> None:
        """Assert the law, and that every block is owned once, shared by count, or idle."""
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
        holders = {prefix: block for block, prefix in enumerate(self.prefixes) if prefix is not None}
        assert holders == self._where, "published blocks and their index differ"
        seen_published = False
        for block in self._idle:
            published = self.prefixes[block] is not None
            assert published or not seen_published, "a free block stands behind an evictable one"
            seen_published = published


class LowestFreeBlockPool(BlockPool):
    """A pool that gives its lowest free block, and publishes none: of a spool, whose first blocks are the fastest."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self._heap = list(self._idle)

    def allocate(self) -> tuple[int, bool]:
        self._idle.move_to_end(heapq.heappop(self._heap), last=False)
        return super().allocate()

    def decref(self, block: int) -> None:
        super().decref(block)
        if not self.refs[block]:
            heapq.heappush(self._heap, block)
