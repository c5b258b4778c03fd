"""Which blocks hold a source: cross-attention's keys and values, written once and read by every row that shares them.

A source's k and v depend on all of its tokens (the encoder sees both ways), so its blocks are known under a root that
*is* the whole source, never under a prefix of it: a hit is all of them, in every group, or none.

    bs = 4, source of 6 tokens, blocks [7, 3]:  source token 5 lies in slot 3*4 + 1; slots 14 and 15 stay empty

Never written again: there is no copy on write.  Integers only, no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.block_pool import BlockPool, PrefixIndex, PrefixNode
from kvad.model_input import BlockOps


class EncoderAllocation(NamedTuple):
    """Where an encoder's step writes: ``slots`` per cross-attention group, one per source token, in the rows' order."""

    block_ops: BlockOps
    slots: tuple[list[int], ...]


class EncoderSequence:
    """One row's hold on a source.  ``blocks`` per group; ``written``: it has been encoded; ``name``: its root, None
    where it is not to be found by others."""

    __slots__ = ("blocks", "cache_key", "length", "tokens", "written")

    def __init__(self, tokens: tuple[int, ...], cache_key: PrefixNode | None, blocks: tuple[list[int], ...]) -> None:
        self.tokens, self.cache_key, self.blocks = tokens, cache_key, blocks
        self.length = len(tokens)
        self.written = False


class EncoderBlocks:
    """The pools of the cross-attention groups.  ``share``: sources are published, for later rows to find."""

    def __init__(
        self, groups: Sequence[CacheGroup], pools: Sequence[BlockPool], prefixes: PrefixIndex, *, share: bool
    ) -> None:
        self.groups, self.pools = tuple(groups), tuple(pools)
        self._prefixes, self._share = prefixes, share
        self.hits = self.misses = 0

    @property
    def max_source_len(self) -> int:
        """Tokens of the longest source; 0 where there is no cross-attention."""
        return min((min(g.num_usable_blocks, g.max_blocks_per_seq) * g.block_size for g in self.groups), default=0)

    def attach(self, tokens: Sequence[int], root: bytes) -> EncoderSequence | None:
        """Hold this source: the blocks that have it, or new ones that are to be written.  None: there is no room."""
        assert 0 < len(tokens) <= self.max_source_len, (
            f"a source of {len(tokens)} tokens, at most {self.max_source_len}"
        )
        packed = array("q", tokens).tobytes()
        name = self._prefixes.root(b"source\0" + root + b"\0" + packed) if self._share else None
        if name is not None:
            found = [self._find(index, name, packed) for index in range(len(self.groups))]
            whole = [blocks for blocks in found if blocks is not None]
            if len(whole) == len(found):
                for pool, blocks in zip(self.pools, whole, strict=True):
                    for block in blocks:
                        pool.incref(block)
                self.hits += 1
                source = EncoderSequence(tuple(tokens), name, tuple(whole))
                source.written = True
                return source
        needs = [-(-len(tokens) // group.block_size) for group in self.groups]
        if any(need > pool.num_available for need, pool in zip(needs, self.pools, strict=True)):
            return None
        self.misses += 1
        taken = tuple([pool.allocate()[0] for _ in range(need)] for need, pool in zip(needs, self.pools, strict=True))
        return EncoderSequence(tuple(tokens), name, taken)

    def share(self, source: EncoderSequence) -> EncoderSequence:
        """The same blocks for one more row."""
        twin = EncoderSequence(source.tokens, source.cache_key, tuple(list(blocks) for blocks in source.blocks))
        twin.written = source.written
        for pool, blocks in zip(self.pools, source.blocks, strict=True):
            for block in blocks:
                pool.incref(block)
        return twin

    def allocate_slots(self, sources: Sequence[EncoderSequence], groups_before: int) -> EncoderAllocation:
        """Slots for an encoder's step, whose blocks change hands; ``groups_before`` stand before these in Moves."""
        clear: list[tuple[int, ...]] = [()] * groups_before
        slots: list[list[int]] = []
        for index, group in enumerate(self.groups):
            size, where = group.block_size, list[int]()
            for source in sources:
                assert not source.written, "a source is written once"
                blocks = source.blocks[index]
                where.extend(blocks[at // size] * size + at % size for at in range(source.length))
            clear.append(tuple(block for source in sources for block in source.blocks[index]))
            slots.append(where)
        return EncoderAllocation(BlockOps(tuple(clear), ((),) * len(clear)), tuple(slots))

    def commit(self, source: EncoderSequence) -> None:
        """It is written, and what came out was finite: later rows may find it."""
        source.written = True
        if source.cache_key is None:
            return
        packed = array("q", source.tokens).tobytes()
        for index, pool in enumerate(self.pools):
            for block, prefix in zip(source.blocks[index], self._names(index, source.cache_key, packed), strict=True):
                if prefix is not None:
                    pool.publish(block, prefix)

    def release(self, source: EncoderSequence, *, publish: bool = True) -> None:
        """One row less.  ``publish`` False: nobody is to find it any more (its numbers cannot be trusted)."""
        for pool, blocks in zip(self.pools, source.blocks, strict=True):
            for block in reversed(blocks):
                if not publish and pool.prefixes[block] is not None:
                    pool.unpublish(block)
                pool.decref(block)

    def _names(self, index: int, name: PrefixNode, packed: bytes) -> list[PrefixNode | None]:
        """The name of each block: the root, the group's own size of blocks, and the block's number."""
        size = self.groups[index].block_size
        count = -(-len(packed) // (size * 8))
        return [self._prefixes.extend(name, b"%d/%d" % (number, size)) for number in range(count)]

    def _find(self, index: int, name: PrefixNode, packed: bytes) -> list[int] | None:
        found = []
        for prefix in self._names(index, name, packed):
            block = None if prefix is None else self.pools[index].find(prefix)
            if block is None:
                return None
            found.append(block)
        return found
