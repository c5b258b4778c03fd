"""Rows whose older tokens descend to levels of their own (``policy.Hierarchy``): the host's half.  Integers only.

When a row has reached a multiple of ``every``, the blocks that are no longer recent leave the group that takes tokens.
They are packed into the blocks of the next level, or folded into a few slots of it; what a level holds beyond its share
goes on to the one below, and at the end it is gone.

    recent 8, packed 16, block size 4, a row of 32 tokens:  blocks 6 7 as they are | 2 3 4 5 packed | 0 1 folded or gone
"""

from __future__ import annotations

from collections.abc import Sequence

from kvad.cache.blocks import BlockPool
from kvad.cache.seats import Below, Hold, Seat
from kvad.cache.sizing import Group
from kvad.step import Fold, Moves

__all__ = ["Descended", "Descents", "blocks_of"]


def blocks_of(group: Group, groups: Sequence[Group], length: int) -> int:
    """Blocks that a row of ``length`` tokens holds in a group at most."""
    if group.level is not None:
        policy = groups[group.level.of].levels
        assert policy is not None
        length = max(0, length - policy.recent - policy.sinks)
    return min(-(-length // group.block_size), group.blocks_per_row)


class Descended:
    """The moves of one step, per group, and what is released when all rows have moved."""

    def __init__(self, groups: int) -> None:
        self.pack: list[list[tuple[int, int]]] = [[] for _ in range(groups)]
        self.fold: list[list[Fold]] = [[] for _ in range(groups)]
        self.passed: list[tuple[BlockPool, int]] = []

    def release(self) -> None:
        for pool, block in self.passed:
            pool.release(block)

    def told(self, moves: Moves) -> Moves:
        return moves._replace(pack=tuple(map(tuple, self.pack)), fold=tuple(map(tuple, self.fold)))


class Descents:
    """Of the first ``own`` groups, those that take tokens, to the levels behind them."""

    def __init__(self, groups: Sequence[Group], pools: Sequence[BlockPool], own: int) -> None:
        self._groups, self._pools, self._own = tuple(groups), tuple(pools), own
        levels = [(number, group.level) for number, group in enumerate(groups) if group.level is not None]
        self.below = tuple(tuple(n for n, level in levels if level.of == index) for index in range(own))
        self._count = len(levels)

    def leaving(self, index: int, hold: Hold, start: int) -> int:
        """Blocks behind the sinks that leave group ``index``, of a row of length ``start``."""
        group = self._groups[index]
        policy, size = group.levels, group.block_size
        if policy is None or hold.cut == start or start % policy.every:
            return 0
        return max(0, (start - policy.recent) // size - policy.sinks // size - hold.gap)

    def enough(self, rows: Sequence[tuple[Seat, int]]) -> bool:
        """Would :meth:`descend` find enough blocks for rows of these lengths?  What it gives back is not counted on."""
        return all(n <= pool.available for n, pool in zip(self.need(rows), self._pools[self._own :], strict=False))

    def need(self, rows: Sequence[tuple[Seat, int]]) -> list[int]:
        """Blocks that :meth:`descend` would take of each level."""
        need = [0] * self._count
        for index, numbers in enumerate(self.below):
            for seat, start in rows if numbers else ():
                moving = self.leaving(index, seat.holds[index], start)
                for number in numbers:
                    group, below = self._groups[number], seat.below[number - self._own]
                    assert group.level is not None
                    if group.level.ratio > 1:
                        shared = self._shared(number, below) and moving > 0
                        filled = below.used + moving * group.block_size // group.level.ratio
                        need[number - self._own] += -(-filled // group.block_size) - len(below.blocks) + shared
                    else:
                        need[number - self._own] += moving
                        moving = max(0, len(below.blocks) + moving - group.level.most)
        return need

    def descend(self, index: int, seat: Seat, start: int, done: Descended) -> None:
        """Move one row.  What it leaves is free at once, for ``Moves.pack`` and ``fold`` read it before it is cleared;
        what a level gives on is released by ``done``, for the pack of another row would overwrite it."""
        hold, group = seat.holds[index], self._groups[index]
        moving = self.leaving(index, hold, start)
        if not moving:
            return
        assert group.levels is not None
        sinks, hold.cut = group.levels.sinks // group.block_size, start
        leaving = hold.blocks[sinks : sinks + moving]
        del hold.blocks[sinks : sinks + moving]
        hold.gap += moving
        for block in leaving:
            self._pools[index].release(block)
        for number in self.below[index]:
            level, below = self._groups[number].level, seat.below[number - self._own]
            assert level is not None
            if level.ratio > 1:
                self._fold(number, below, leaving, done)
                return
            leaving = self._pack(number, below, leaving, done)

    def _pack(self, number: int, below: Below, blocks: Sequence[int], done: Descended) -> list[int]:
        """-> the blocks that go on."""
        group, pool = self._groups[number], self._pools[number]
        assert group.level is not None
        taken = [pool.take()[0] for _ in blocks]
        done.pack[number].extend(zip(blocks, taken, strict=True))
        below.blocks.extend(taken)
        gone = below.blocks[: max(0, len(below.blocks) - group.level.most)]
        del below.blocks[: len(gone)]
        below.used = len(below.blocks) * group.block_size
        done.passed.extend((pool, block) for block in gone)
        return gone

    def _fold(self, number: int, below: Below, blocks: Sequence[int], done: Descended) -> None:
        group, pool = self._groups[number], self._pools[number]
        assert group.level is not None
        for block in blocks:
            slot = below.used % group.block_size
            if slot == 0:
                below.blocks.append(pool.take()[0])
            base = below.blocks[-1]
            if self._shared(number, below):
                below.blocks[-1] = pool.take()[0]
                done.passed.append((pool, base))
            done.fold[number].append(Fold(block, below.blocks[-1], slot, base))
            below.used += group.block_size // group.level.ratio
        gone = below.blocks[: max(0, len(below.blocks) - group.level.most)]
        del below.blocks[: len(gone)]
        below.used -= len(gone) * group.block_size
        done.passed.extend((pool, block) for block in gone)

    def _shared(self, number: int, below: Below) -> bool:
        """Whether another row counts on the block that is being filled."""
        filling = below.used % self._groups[number].block_size
        return bool(filling) and self._pools[number].refs[below.blocks[-1]] > 1
