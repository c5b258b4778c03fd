"""Rows whose older tokens descend to levels of their own (``policy.Hierarchy``): the host's half.  Integers only.

When a row has reached a multiple of ``every``, the blocks that are no longer recent leave the group that takes tokens.
They are packed into the blocks of the next level, or folded into a few slots of it; what a level holds beyond its share
goes on to the one below, and at the end it is gone.

    recent 8, packed 16, block size 4, a row of 32 tokens:  blocks 6 7 as they are | 2 3 4 5 packed | 0 1 folded or gone
"""

from __future__ import annotations

from collections.abc import Sequence

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.block_pool import BlockPool
from kvad.cache.manager.sequence_blocks import GroupBlocks, LevelBlocks, SequenceBlocks
from kvad.model_input import BlockOps, MergeOp


def max_blocks(group: CacheGroup, groups: Sequence[CacheGroup], length: int) -> int:
    """Blocks that a row of ``length`` tokens holds in a group at most."""
    if group.lower_level is not None:
        policy = groups[group.lower_level.token_group].demotion_policy
        assert policy is not None
        length = max(0, length - policy.recent - policy.num_sinks)
    return min(-(-length // group.block_size), group.max_blocks_per_seq)


class DemotionOps:
    """The moves of one step, per group, and what is released when all rows have moved."""

    def __init__(self, groups: int) -> None:
        self.quantize: list[list[tuple[int, int]]] = [[] for _ in range(groups)]
        self.merge: list[list[MergeOp]] = [[] for _ in range(groups)]
        self.passed: list[tuple[BlockPool, int]] = []

    def release(self) -> None:
        for pool, block in self.passed:
            pool.decref(block)

    def attach_to_ops(self, moves: BlockOps) -> BlockOps:
        return moves._replace(quantize=tuple(map(tuple, self.quantize)), merge=tuple(map(tuple, self.merge)))


class LevelDemotion:
    """Of the first ``own`` groups, those that take tokens, to the levels behind them."""

    def __init__(self, groups: Sequence[CacheGroup], pools: Sequence[BlockPool], own: int) -> None:
        self._groups, self._pools, self._own = tuple(groups), tuple(pools), own
        levels = [(number, group.lower_level) for number, group in enumerate(groups) if group.lower_level is not None]
        self.below = tuple(tuple(n for n, level in levels if level.token_group == index) for index in range(own))
        self._count = len(levels)

    def num_leaving(self, index: int, hold: GroupBlocks, start: int) -> int:
        """Blocks behind the sinks that leave group ``index``, of a row of length ``start``."""
        group = self._groups[index]
        policy, size = group.demotion_policy, group.block_size
        if policy is None or hold.last_eviction_length == start or start % policy.interval:
            return 0
        return max(0, (start - policy.recent) // size - policy.num_sinks // size - hold.num_skipped_blocks)

    def has_room(self, rows: Sequence[tuple[SequenceBlocks, int]]) -> bool:
        """Would :meth:`descend` find enough blocks for rows of these lengths?  What it gives back is not counted on."""
        return all(
            n <= pool.num_available for n, pool in zip(self.blocks_needed(rows), self._pools[self._own :], strict=False)
        )

    def blocks_needed(self, rows: Sequence[tuple[SequenceBlocks, int]]) -> list[int]:
        """Blocks that :meth:`descend` would take of each level."""
        need = [0] * self._count
        for index, numbers in enumerate(self.below):
            for seat, start in rows if numbers else ():
                moving = self.num_leaving(index, seat.groups[index], start)
                for number in numbers:
                    group, below = self._groups[number], seat.lower_levels[number - self._own]
                    assert group.lower_level is not None
                    if group.lower_level.ratio > 1:
                        shared = self._shared(number, below) and moving > 0
                        filled = below.num_used_slots + moving * group.block_size // group.lower_level.ratio
                        need[number - self._own] += -(-filled // group.block_size) - len(below.blocks) + shared
                    else:
                        need[number - self._own] += moving
                        moving = max(0, len(below.blocks) + moving - group.lower_level.max_blocks)
        return need

    def demote(self, index: int, seat: SequenceBlocks, start: int, done: DemotionOps) -> None:
        """Move one row.  What it leaves is free at once, for ``Moves.pack`` and ``fold`` read it before it is cleared;
        what a level gives on is released by ``done``, for the pack of another row would overwrite it."""
        hold, group = seat.groups[index], self._groups[index]
        moving = self.num_leaving(index, hold, start)
        if not moving:
            return
        assert group.demotion_policy is not None
        sinks, hold.last_eviction_length = group.demotion_policy.num_sinks // group.block_size, start
        leaving = hold.blocks[sinks : sinks + moving]
        del hold.blocks[sinks : sinks + moving]
        hold.num_skipped_blocks += moving
        for block in leaving:
            self._pools[index].decref(block)
        for number in self.below[index]:
            level, below = self._groups[number].lower_level, seat.lower_levels[number - self._own]
            assert level is not None
            if level.ratio > 1:
                self._fold(number, below, leaving, done)
                return
            leaving = self._pack(number, below, leaving, done)

    def _pack(self, number: int, below: LevelBlocks, blocks: Sequence[int], done: DemotionOps) -> list[int]:
        """-> the blocks that go on."""
        group, pool = self._groups[number], self._pools[number]
        assert group.lower_level is not None
        taken = [pool.allocate()[0] for _ in blocks]
        done.quantize[number].extend(zip(blocks, taken, strict=True))
        below.blocks.extend(taken)
        gone = below.blocks[: max(0, len(below.blocks) - group.lower_level.max_blocks)]
        del below.blocks[: len(gone)]
        below.num_used_slots = len(below.blocks) * group.block_size
        done.passed.extend((pool, block) for block in gone)
        return gone

    def _fold(self, number: int, below: LevelBlocks, blocks: Sequence[int], done: DemotionOps) -> None:
        group, pool = self._groups[number], self._pools[number]
        assert group.lower_level is not None
        for block in blocks:
            slot = below.num_used_slots % group.block_size
            if slot == 0:
                below.blocks.append(pool.allocate()[0])
            base = below.blocks[-1]
            if self._shared(number, below):
                below.blocks[-1] = pool.allocate()[0]
                done.passed.append((pool, base))
            done.merge[number].append(MergeOp(block, below.blocks[-1], slot, base))
            below.num_used_slots += group.block_size // group.lower_level.ratio
        gone = below.blocks[: max(0, len(below.blocks) - group.lower_level.max_blocks)]
        del below.blocks[: len(gone)]
        below.num_used_slots -= len(gone) * group.block_size
        done.passed.extend((pool, block) for block in gone)

    def _shared(self, number: int, below: LevelBlocks) -> bool:
        """Whether another row counts on the block that is being filled."""
        filling = below.num_used_slots % self._groups[number].block_size
        return bool(filling) and self._pools[number].refs[below.blocks[-1]] > 1
