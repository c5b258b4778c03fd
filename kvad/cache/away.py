"""Rows that left their seats and will have their blocks back as they were, and rows from elsewhere that come likewise.

    park   blocks are copied out, then freed       wake     as many are taken, and filled with the row's next step
    adopt  a row that was never here, as if it had been parked                 forget   it will not come back

What is to be copied and dropped is told with the next moves (:meth:`Away.told`), a waking row's with those of its own
step: a step that fails ends its rows, so none goes on with blocks that were never filled.

Invariant: a key is used once.  Integers only, no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvad.cache.blocks import BlockPool, Prefix
from kvad.cache.seats import Known, Parked, Seat
from kvad.cache.standing import Laid
from kvad.step import Moves

__all__ = ["Away"]

Told = tuple[int, tuple[tuple[int, ...], ...]]  # a key, and blocks per group


class Waking(NamedTuple):
    """A row that is seated again: as it was parked, and what its next step fills."""

    parked: Parked
    blocks: tuple[tuple[int, ...], ...]


class Away:
    """``pools``: of the groups that a row's tokens are in, ``own`` that take tokens, then their levels."""

    def __init__(self, pools: Sequence[BlockPool], own: int) -> None:
        self._pools, self._own = tuple(pools), own
        self._keys = self._epoch = 0  # keys so far; times that all prefixes were forgotten
        self.park_next: list[Told] = []  # told with the next moves
        self.waking: dict[int, Waking] = {}  # by row
        self.drop_next: list[int] = []

    def park(self, row: int, seat: Seat) -> Parked:
        """What the row's blocks are known by when it has left its seat, which it is about to do."""
        if row in self.waking:  # it has not moved since it was to wake
            return self.waking[row].parked
        key = self._key()
        self.park_next.append((key, tuple(tuple(hold.blocks) for hold in seat.every)))
        holds = tuple((len(hold.blocks), hold.gap, hold.dropped, hold.cut) for hold in seat.holds)
        below = tuple((len(each.blocks), each.used) for each in seat.below)
        known = None if seat.root is None else Known(seat.root, seat.tip, tuple(seat.tail), self._epoch)
        return Parked(key, seat.length, holds, below, known, seat.floor)

    def wake(self, row: int, parked: Parked) -> Seat | None:
        """The row's new seat, with blocks that its next step fills; None, and no change: there is no room now."""
        counts = [count for count, *_ in (*parked.holds, *parked.below)]
        if any(count > pool.available for count, pool in zip(counts, self._pools, strict=True)):
            return None
        known = parked.known if parked.known is not None and parked.known.epoch == self._epoch else None
        seat = Seat(self._own, len(self._pools) - self._own, None if known is None else known.root)
        if known is not None:
            seat.tip, seat.tail, seat.again = known.tip, list(known.tail), True
        seat.length = seat.reach = parked.length
        seat.floor = parked.floor
        for hold, (_, *marks) in zip(seat.holds, parked.holds, strict=True):
            hold.gap, hold.dropped, hold.cut = marks
        for level, (_, used) in zip(seat.below, parked.below, strict=True):
            level.used = used
        for each, pool, count in zip(seat.every, self._pools, counts, strict=True):
            each.blocks = [pool.take()[0] for _ in range(count)]
        self.waking[row] = Waking(parked, tuple(tuple(hold.blocks) for hold in seat.every))
        return seat

    def adopt(
        self,
        tokens: Sequence[int],
        begin: Prefix | None,
        laid: Sequence[Laid],
        below: Sequence[tuple[int, int]],
        *,
        source: bool,
    ) -> Parked:
        """As :meth:`Ledger.adopt <kvad.cache.ledger.Ledger.adopt>`; ``begin``: the root under which it may publish."""
        length = len(tokens)
        holds = tuple((each.count, each.gap, each.marks.dropped, each.marks.cut) for each in laid)
        floor = 0 if all(each.whole for each in laid) else length
        known = None if begin is None or floor else Known(begin, begin, tuple(tokens), self._epoch)
        return Parked(self._key(), length, holds, tuple(below), known, floor, source)

    def forget(self, parked: Parked) -> None:
        """It will not come back."""
        self.drop_next.append(parked.key)

    def forget_prefixes(self) -> None:
        """Rows that are away publish no more."""
        self._epoch += 1

    def add_source(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        """A waking row's source comes back with it."""
        parked, own = self.waking[row]
        self.waking[row] = Waking(parked, (*own, *map(tuple, blocks)))

    def told(self, moves: Moves, rows: Collection[int]) -> Moves:
        """With what was parked and given up since moves were last told, and those of these ``rows`` that wake."""
        if not (self.park_next or self.waking or self.drop_next):
            return moves
        woken = [self.waking.pop(row) for row in sorted(set(rows) & self.waking.keys())]
        wake = tuple((parked.key, blocks) for parked, blocks in woken)
        moves = moves._replace(park=tuple(self.park_next), wake=wake, drop=tuple(self.drop_next))
        self.park_next, self.drop_next = [], []
        return moves

    def _key(self) -> int:
        self._keys += 1
        return self._keys - 1
