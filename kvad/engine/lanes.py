"""How a step's rows are cut into lanes: rows with as many new tokens and like reading lengths side by side.

Integers only: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvad.cache.ledger import Placed
from kvad.cache.sizing import Group
from kvad.engine.row import Row
from kvad.step import Lane

__all__ = ["Item", "Lanes", "fold_lanes"]

SHORT_READ = 64  # slots; rows that read less are not told apart: one more lane would cost more than the reading

Item = tuple[int, Row, int]  # sort key, row, number of new tokens


class Lanes:
    """Cuts the steps of one cache."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = tuple(groups)
        many = [group for group in self._groups if group.blocks_per_row > 1]
        self._unit = max([SHORT_READ, *(group.block_size for group in many)])
        self._reads = max((g.blocks_per_row * g.block_size for g in self._groups), default=1)  # of a row at most

    def key(self, row: Row, new: int) -> int:
        """Sorts by (new tokens, read bucket, seat); the bucket is a power of two of units."""
        end = row.computed + new
        if end > row.width:
            units = -(-min(end, self._reads) // self._unit)
            row.width = self._unit << (units - 1).bit_length()
        return ((new << 40 | row.width) << 16) + row.seat

    def cut(self, items: list[Item], placed: Placed) -> tuple[Lane, ...]:
        lanes, begin = [], 0
        for stop in range(1, len(items) + 1):
            if stop == len(items) or items[stop][0] >> 16 != items[begin][0] >> 16:
                lanes.append(Lane(stop - begin, items[begin][2], self._read(items, placed, begin, stop)))
                begin = stop
        return tuple(lanes)

    def _read(self, items: list[Item], placed: Placed, begin: int, stop: int) -> int:
        """Slots that the lane's widest row reads in the group where it reads most."""
        read = 0
        for group, tables in zip(self._groups, placed.tables, strict=True):
            if group.level is not None:
                continue
            if group.blocks_per_row > 1:
                slots = max(map(len, tables[begin:stop])) * group.block_size
            else:  # a row's only block: no further than it is written
                longest = max(row.computed + new for _, row, new in items[begin:stop])
                slots = min(group.block_size, -(-longest // SHORT_READ) * SHORT_READ)
            read = max(read, slots)
        return read


def fold_lanes(items: list[Item], lanes: tuple[Lane, ...]) -> tuple[Lane, ...]:
    """The lanes as cross-attention cuts them: each run of rows of one request is one row, where all runs of a lane
    are equally long.  ``read`` is the longest source's length in whole blocks."""
    folded, begin = [], 0
    for lane in lanes:
        rows = [row for _, row, _ in items[begin : begin + lane.rows]]
        begin += lane.rows
        runs = [1]
        for before, row in pairwise(rows):
            if row.group is before.group:
                runs[-1] += 1
            else:
                runs.append(1)
        beams = runs[0] if len(set(runs)) == 1 else 1
        read = max(len(row.group.source or ()) for row in rows)
        folded.append(Lane(lane.rows // beams, beams * lane.new, read))
    return tuple(folded)
