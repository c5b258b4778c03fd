"""How a row gives way: its blocks copied out and in again, or given back and its tokens computed again.

What a lossy row keeps is a matter of what it saw, so it is always copied (parked).  An exact row is copied where the
parking has room and that is expected to take less time than computing again what no other row keeps; when it comes back
the way in is weighed once more against what is known by then.  Which it was is never seen in what a row says.

Where parking is bounded, lossy rows are seated side by side only as far as all but those that fit into the pool at
their longest could be parked: so one that must give way always can, and the oldest goes on alone if need be.

Integers, and costs as they are told; no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvad.cache.descent import blocks_of
from kvad.cache.ledger import Ledger
from kvad.cache.parking import Parking, ParkingStats, Room
from kvad.cache.sizing import group_bytes
from kvad.engine.costs import Costs, Way
from kvad.engine.row import Row

__all__ = ["SwapStats", "Swapped", "Swaps"]

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SwapStats:
    """Rows that gave way, by what was done, and tokens and bytes of them; those that were parked and are lost.
    ``seconds``: of copying, by way; ``costs``: microseconds per token, nanoseconds per byte (``Costs.measured``)."""

    recomputed: int = 0
    recomputed_tokens: int = 0
    to_ram: int = 0
    to_disk: int = 0
    swapped_bytes: int = 0
    lost: int = 0
    seconds: dict[Way, float] = field(default_factory=dict)
    parking: ParkingStats = field(default_factory=ParkingStats)
    costs: dict[str, float] = field(default_factory=dict)


class Swapped(NamedTuple):
    """What became of a row that gave way: its copy went "out" or came "back", its tokens are computed "again", or its
    copy is "lost" or "dropped" (enough of it is known by now).  ``place``: to or from where; None: to host memory
    beyond its bound, or back from elsewhere (``Ledger.adopt``)."""

    what: Literal["out", "back", "again", "lost", "dropped"]
    place: Room | None = None
    nbytes: int = 0
    why: str = ""


class Swaps:
    """Decides for the rows of one scheduler.  ``parking`` None: lossy rows are copied without a bound and kept by the
    device alone, exact ones are always computed again.  ``block_bytes``: of each group, as the memory says."""

    def __init__(
        self,
        ledger: Ledger,
        costs: Costs | None = None,
        parking: Parking | None = None,
        block_bytes: Sequence[int] | None = None,
    ) -> None:
        self._ledger, self.costs, self.parking = ledger, Costs() if costs is None else costs, parking
        self._groups = ledger.groups[: len(ledger.own) + len(ledger.below)]
        if block_bytes is None:
            block_bytes = [group_bytes(group).total // group.blocks for group in self._groups]
        self._block_bytes = block_bytes[: len(self._groups)]
        self._recomputed = self._tokens = self._ram = self._disk = self._bytes = self._lost = 0
        self._seconds: dict[Way, float] = {}
        self.witness: Callable[[Row, Swapped], None] | None = None  # hears what becomes of every row
        if parking is not None:
            parking.told = self.told

    def told(self, way: Way, nbytes: int, seconds: float) -> None:
        """So many bytes were copied."""
        self._seconds[way] = self._seconds.get(way, 0.0) + seconds
        self.costs.copied(way, nbytes, seconds)

    # ------------------------------------------------------------ a row gives way

    def leave(self, row: Row) -> str:
        """Park a seated row, or leave it to be computed again (``row.parked`` None); says which, and why."""
        if row.parked is None and not self._parks(row):
            self._recomputed += 1
            self._tokens += row.computed
            self._tell(row, Swapped("again"))
            return f"its {row.computed} tokens are to be computed again"
        anew, nbytes = row.parked is None, self.nbytes(row)
        where = "ram" if self.parking is None else self.parking.room(nbytes, needed=self._ledger.lossy)
        row.parked = self._ledger.park(row.seat)
        if not anew:
            return "its copy was not touched yet"
        if self.parking is not None:
            self.parking.keep(row.parked.key, nbytes, row.order, needed=self._ledger.lossy)
        self._bytes += nbytes
        self._tell(row, Swapped("out", where, nbytes))
        self._ram, self._disk = self._ram + (where != "disk"), self._disk + (where == "disk")
        return f"{nbytes:,} bytes are swapped to {where or 'host memory, beyond its bound: nothing else has room'}"

    def _parks(self, row: Row) -> bool:
        if not row.computed or (row.parked is None and self._ledger.waits(row.seat)):
            return False  # there is nothing to copy yet
        if self._ledger.lossy:
            return True
        if self.parking is None or row.group.beams is not None:  # beams share what would be copied for each
            return False
        if self._ledger.spills:  # most of such a row lies outside the pool already
            return False
        nbytes = self.nbytes(row)
        where = self.parking.room(nbytes)
        tokens = row.computed - self._ledger.survives(row.seat)
        if where is not None and self.costs.swap_is_cheaper(nbytes, tokens, disk=where == "disk"):
            return True
        if where is not None:
            self.costs.fade()
        return False

    def nbytes(self, row: Row) -> int:
        """What a seated row's blocks hold, sources apart."""
        held = self._ledger.held(row.seat)
        return sum(count * size for count, size in zip(held, self._block_bytes, strict=True))

    # ------------------------------------------------------------ and comes back

    def poll(self) -> bool:
        """See what the parking has done.  True: rows that wait may find something changed."""
        return self.parking is not None and self.parking.poll(self._ledger.untold, self._ledger.waking)

    def fetch(self, row: Row) -> None:
        """The row is the next that could be seated: have its copy in memory by then."""
        if self.parking is not None and row.parked is not None and self.parking.state(row.parked.key) == "away":
            if self._known_by_now(row):
                self.forget(row)
                self._tell(row, Swapped("dropped"))
            else:
                self.parking.fetch(row.parked.key)

    def ready(self, row: Row) -> bool:
        """Can a parked row be woken (or, ``row.parked`` None by now, be computed again)?"""
        if self.parking is None or row.parked is None:
            return True
        self.fetch(row)
        return row.parked is None or self.parking.state(row.parked.key) in ("coming", "here", "leaving")

    def _known_by_now(self, row: Row) -> bool:
        """Has enough of an exact row become known that computing the rest is cheaper than reading its copy?"""
        if self._ledger.lossy or row.parked is None:
            return False
        known = self._ledger.known(row.tokens, row.group.root)
        nbytes = 0 if self.parking is None else self.parking.nbytes(row.parked.key)
        left = max(0, row.parked.length - known)
        return known > 0 and not self.costs.swap_is_cheaper(nbytes, left, disk=True, back=True)

    def woken(self, row: Row) -> None:
        """The moves that wake the row are told."""
        if self.parking is not None and row.parked is not None:
            key = row.parked.key
            self._tell(row, Swapped("back", self.parking.origin(key), self.parking.nbytes(key)))
            self.parking.take(key)
        row.parked = None

    def forget(self, row: Row) -> None:
        """The row's copy is wanted no more."""
        if row.parked is not None:
            self._ledger.forget(row.parked)
            if self.parking is not None:
                self.parking.drop(row.parked.key)
            row.parked = None

    def lost(self, rows: Sequence[Row]) -> list[tuple[Row, str]]:
        """Which of the rows that wait have lost their copy, and why.  Exact ones have forgotten it already, and will be
        computed again; the others cannot go on."""
        ended = []
        for row in rows:
            if self.parking is None or row.parked is None or self.parking.state(row.parked.key) != "lost":
                continue
            why = self.parking.fault(row.parked.key)
            self._lost += 1
            self.forget(row)
            self._tell(row, Swapped("lost", why=why))
            if self._ledger.lossy:
                ended.append((row, f"what the cache had kept of this row is lost, and cannot be computed again: {why}"))
            else:
                LOG.info("request %d, sample %d: it is computed again: %s", row.request, row.sample, why)
                self._recomputed += 1
        return ended

    def _tell(self, row: Row, swapped: Swapped) -> None:
        if self.witness is not None:
            self.witness(row, swapped)

    @property
    def holding(self) -> bool:
        """Whether a parking holds a row."""
        return self.parking is not None and len(self.parking) > 0

    @property
    def pending(self) -> bool:
        return self.parking is not None and self.parking.pending

    def wait(self) -> None:
        """For one read or write that is under way: there is nothing else to do."""
        assert self.parking is not None
        self.parking.wait(self._ledger.waking)

    # ------------------------------------------------------------ room

    def safe(self, row: Row, others: Sequence[Row]) -> bool:
        """Could every row that may have to give way be parked at its longest, if ``row`` were seated too?"""
        if not self._ledger.lossy or self.parking is None or not self.parking.bounded:
            return True
        rows = sorted([*others, row], key=lambda each: (each.on_full not in ("refuse", "stop"), each.order))
        left = [group.usable for group in self._groups]
        fits, parked = True, 0
        for number, each in enumerate(rows):
            need = [blocks_of(group, self._ledger.groups, _longest(each)) for group in self._groups]
            left = [have - count for have, count in zip(left, need, strict=True)]
            fits = fits and all(have >= 0 for have in left)
            if not fits and (number or each.on_full in ("refuse", "stop")):
                parked += sum(count * size for count, size in zip(need, self._block_bytes, strict=True))
        back = 0 if row.parked is None else self.parking.nbytes(row.parked.key)
        return self.parking.holds(max(0, parked - back))

    def stats(self) -> SwapStats:
        parking = ParkingStats() if self.parking is None else self.parking.stats()
        return SwapStats(
            self._recomputed, self._tokens, self._ram, self._disk, self._bytes, self._lost, dict(self._seconds),
            parking, self.costs.measured(),
        )  # fmt: skip

    def close(self) -> None:
        if self.parking is not None:
            self.parking.close()


def _longest(row: Row) -> int:
    return max(len(row.tokens), row.limit - 1)
