"""What one group that takes tokens asks of each of its rows: which blocks it holds, needs, writes and may let go.

Functions of a group, a :class:`~kvad.cache.seats.Hold` and lengths alone (``ledger.py`` has the example):
nothing here takes a block or gives one back.  Integers only, no torch.
"""

from __future__ import annotations

import sys

from kvad.cache.seats import NEVER, Hold, Seat, in_ring
from kvad.cache.sizing import Group
from kvad.step import Reach

__all__ = ["Rules"]


class Rules:
    """``ring``: a row is one block, a ring behind its sinks; ``sinks``: blocks that hold sinks; ``window``: tokens, or
    NEVER; ``summed``: blocks are summed up as they stand, and emptied before they are written."""

    def __init__(self, group: Group) -> None:
        self.group, self.size = group, group.block_size
        self.ring = group.blocks_per_row == 1
        self.reach = Reach.of(group.mixer)
        self.window = NEVER if self.reach.window is None else self.reach.window
        self.scored, self.levels = group.scored, group.levels
        self.sinks = self.blocks(self.reach.sinks if group.levels is None else group.levels.sinks)
        self.summed = group.chooses is not None

    def blocks(self, slots: int) -> int:
        """Blocks that so many slots fill."""
        return -(-slots // self.size)

    def longest(self, below: Group | None) -> int:
        """Tokens of the longest row that the group holds when it is alone; ``below``: its first level."""
        group = self.group
        bounded = group.mixer.window is not None or group.scored is not None
        if bounded and group.usable >= group.blocks_per_row:
            return sys.maxsize
        if group.levels is not None:
            if group.levels.packed != -1:
                return sys.maxsize
            if group.usable < group.blocks_per_row:
                return group.usable * group.block_size
            assert below is not None, "a policy of levels has one at least"
            kept = group.levels.recent + group.levels.sinks
            return kept + min(below.usable, below.blocks_per_row) * group.block_size
        return min(group.usable, group.blocks_per_row) * group.block_size

    # ------------------------------------------------------------ what a query sees

    def first_needed(self, start: int) -> int:
        """The first logical block, behind those of sinks, that a query at position ``start`` may see."""
        if self.window == NEVER:
            return 0
        return max(self.reach.oldest(start) // self.size, self.sinks)

    def passed(self, hold: Hold, start: int) -> int:
        """How many of the row's first blocks, behind those of sinks, no query from ``start`` on can see."""
        if self.ring or self.window == NEVER:
            return 0
        return max(0, min(len(hold.blocks) - self.sinks, self.first_needed(start) - self.sinks - hold.gap))

    def holds_window(self, hold: Hold, reach: int, length: int) -> bool:
        """Are the keys still held that a query at position ``length`` needs?  ``reach``: as of the row's seat."""
        needed = self.reach.oldest(length)
        if needed >= length or self.levels is not None:
            return True  # it sees nothing but itself, and sinks; or what has left it lies below
        if self.ring:
            oldest = 0 if reach <= self.size else reach - (self.size - self.reach.sinks)
        else:
            oldest = (hold.gap + self.sinks) * self.size if hold.gap else 0
        return oldest <= needed

    # ------------------------------------------------------------ what is written

    def touched(self, hold: Hold, start: int, end: int) -> tuple[int, int]:
        """Which of the row's blocks [low, high), those to come included, positions start .. end - 1 are written to."""
        if self.ring:
            return 0, 1
        size = self.size
        gap = hold.gap if start // size >= self.sinks else 0
        return (start - hold.dropped) // size - gap, (end - hold.dropped - 1) // size + 1 - gap

    def before(self, hold: Hold, start: int, place: int) -> int:
        """Slots of the row's block number ``place`` that are filled before ``start`` is written."""
        if self.ring:
            return min(start - hold.dropped, self.size)
        gap = hold.gap if place >= self.sinks else 0
        return max(0, start - hold.dropped - (place + gap) * self.size)

    def stays(self, hold: Hold, start: int) -> int | None:
        """How many slots stay, where a row of length ``start`` is to be cut now."""
        if self.scored is None or hold.cut == start or not self.scored.cuts(start):
            return None
        return min(self.scored.budget, start - hold.dropped)

    def stay(self, kept: int) -> int:
        """Blocks that stay when a cut keeps so many slots."""
        return 1 if self.ring else self.blocks(kept)

    def kept_by_rewind(self, hold: Hold, length: int) -> int:
        """How many of the row's blocks stay when it is cut short to ``length`` tokens."""
        if self.ring:
            return len(hold.blocks)
        if self.scored is not None:
            return self.blocks(length - hold.dropped)
        stop = self.blocks(length)
        return stop if stop <= self.sinks else max(self.sinks, stop - hold.gap)

    def twin(self, old: Hold, new: Hold, length: int) -> None:
        """Let ``new`` hold what ``old`` does of the row's first ``length`` tokens, as far as a query there needs it."""
        new.dropped, new.cut = old.dropped, old.cut
        if self.ring:
            new.blocks = list(old.blocks) if length else []
            return
        if self.scored is not None:
            new.blocks = old.blocks[: self.blocks(length - old.dropped)]
            return
        sinks, stop = self.sinks, self.blocks(length)
        first = max(sinks + old.gap, self.first_needed(length))
        new.gap = first - sinks
        new.blocks = old.blocks[: min(sinks, stop)] + old.blocks[first - old.gap : max(0, stop - old.gap)]
        if len(new.blocks) <= sinks:
            new.gap = max(0, length // self.size - sinks)

    def slots(self, hold: Hold, start: int, end: int, into: list[int]) -> int:
        """Add the slots of positions start .. end - 1; returns how far the next tokens may take the fast way."""
        size, at = self.size, start
        held = self.reach.sinks + self.window + end - start - 1 if self.scored is None else end - hold.dropped
        assert not self.ring or end <= size or held <= size, "a span outgrows a ring"
        stop = at
        while at < end:
            if self.scored is not None:
                logical = (at - hold.dropped) // size
                stop = (logical + 1) * size + hold.dropped
                hold.base = (hold.blocks[logical] - logical) * size - hold.dropped
            elif self.ring:
                hold.base, stop = in_ring(hold.blocks[0], size, self.reach.sinks, at)
            else:
                logical = at // size
                stop = (logical + 1) * size
                hold.base = (hold.blocks[logical if logical < self.sinks else logical - hold.gap] - logical) * size
            into.extend(range(hold.base + at, hold.base + min(stop, end)))
            at = min(stop, end)
        fast = stop  # the end of the block that is being written
        if not self.ring and self.window != NEVER:  # and before its first block leaves the window
            fast = min(fast, (hold.gap + self.sinks + 1) * size + self.window - self.reach.grain)
        ranked = self.scored or self.levels
        return fast if ranked is None else min(fast, ranked.cut_after(start))  # and before the row is cut

    # ------------------------------------------------------------ the law

    def check(self, hold: Hold, seat: Seat, where: str) -> None:
        """Assert that a row holds what its next query needs, in a table that makes sense."""
        size = self.size
        assert len(set(hold.blocks)) == len(hold.blocks), f"{where}: a block stands twice in its table"
        assert len(hold.blocks) <= self.group.blocks_per_row, f"{where}: more blocks than a row may have"
        assert seat.length <= seat.reach, f"{where}: committed {seat.length}, wrote up to {seat.reach}"
        if self.ring:
            assert hold.gap == 0 and len(hold.blocks) == bool(seat.length or hold.blocks), f"{where}: no ring"
            return
        if self.scored is not None:
            held = seat.length - hold.dropped
            assert held <= len(hold.blocks) * size, f"{where}: {held} slots in {len(hold.blocks)} blocks"
            return
        end = (hold.gap + len(hold.blocks)) * size
        needed = self.reach.oldest(seat.length) if self.levels is None else max(0, hold.cut - self.levels.recent)
        if needed < seat.length:  # else its next query sees nothing but itself, and sinks
            assert not hold.gap or (hold.gap + self.sinks) * size <= needed, f"{where}: its window is not held"
            assert end >= seat.length, f"{where}: {seat.length} tokens, blocks up to {end}"
        assert not hold.gap or len(hold.blocks) >= self.sinks, f"{where}: its sinks are not held"
