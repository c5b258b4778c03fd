"""Who has a seat and who waits for one: rows come with what the cache has of them, and leave with it or without.

Invariants: a row is in exactly one of *waiting* (no seat, no blocks), *running* (a seat) and neither (it has ended, or
is a beam that has no history, with a seat that is kept for it or without); the lowest free seat is taken first; both
lists stand in the order in which rows came.  Never: a decision about whose turn it is.  Integers only, no torch.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence

from kvad.cache.ledger import Ledger
from kvad.engine.row import DONE, IDLE, RUNNING, WAITING, Request, Row
from kvad.engine.swaps import Swaps

__all__ = ["Seating"]

FETCHES = 2  # rows whose blocks are brought from the tiers at once, and the oldest: their bytes are in host memory


class Seating:
    """Of ``num_seats`` rows at once; ``free``: seats that nobody has, a heap."""

    def __init__(self, ledger: Ledger, num_seats: int) -> None:
        self._ledger, self.num_seats = ledger, num_seats
        self.free = list(range(num_seats))
        self.running: list[Row] = []
        self.waiting: list[Row] = []

    # ------------------------------------------------------------ a row comes

    def wait(self, row: Row) -> None:
        """The row waits, at its place in the order."""
        insort(self.waiting, row, key=_order)

    def able(self, row: Row) -> bool:
        """Could a waiting row go on if it had a seat?"""
        return self.ready(row) and self._fetched(row)

    def ready(self, row: Row) -> bool:
        """Samples 1 .. n-1 wait until sample 0 has computed the prompt that they share."""
        first = row.group.rows[0]
        if row is first or first.state in (DONE, IDLE):
            return True
        return first.state == RUNNING and first.computed >= row.prompt_len

    def _fetched(self, row: Row) -> bool:
        """Is all here that the tiers have of this row?  It is asked when a row might be admitted; few are brought at
        once, and only they wait: who needs nothing from there goes past them."""
        if self._ledger.deposits is None or row.parked is not None or not row.tokens:
            return True
        if row.fetch is None:
            row.fetch = self._ledger.fetch(row.tokens, row.group.root, _most(row))
        if row.fetch.ready():
            return True
        others = sum(other.fetch is not None and bool(other.fetch.tickets) for other in self.waiting)
        if row.fetch.started or (others >= FETCHES and row is not self.waiting[0]):  # the oldest waits for nobody
            return False
        row.fetch.start()
        return row.fetch.ready()

    def enter(self, row: Row, swaps: Swaps, fresh: Sequence[Row] = ()) -> bool:
        """Give a row a seat and what the cache knows of it; False, and no change, if its tokens have no room now,
        beside those that run and ``fresh`` ones that are about to."""
        idle, others = self._idle_beams(row), [*self.running, *fresh]
        if len(self.free) <= len(idle) or not swaps.ready(row):
            return False
        if others and not swaps.safe(row, others):
            return False
        seat = row.seat = self.free[0]
        if row.parked is not None and not self._ledger.wake(seat, row.parked):
            row.seat = -1
            return False
        length = row.parked.length if row.parked is not None else self._share(row, seat)
        if length is None:
            length = self._ledger.admit(seat, row.tokens, row.group.root, _most(row), row.fetch)
            assert length is not None, f"seat {seat} is taken"
        if row.group.source is not None and not row.encoded and not self._attach(row, seat, row.group.source):
            self.leave(row, seated=False)
            return False
        row.computed = length
        # Others have still to take blocks for what they were admitted with.  An admission looks past that, as long as
        # no watermark has to be kept: they may preempt it.
        claims = [(each.seat, len(each.tokens)) for each in others] if any(self._ledger.spare) else []
        if others and not self._ledger.fits(seat, len(row.tokens), claims):
            self.leave(row, seated=False)
            return False
        heapq.heappop(self.free)
        for beam in idle:
            beam.seat = heapq.heappop(self.free)
        return True

    def sit(self, row: Row, now: float) -> None:
        """The row, which has taken its seat, runs from ``now`` on."""
        row.state = RUNNING
        insort(self.running, row, key=_order)
        usage = row.group.usage
        if usage.admitted is None:
            usage.admitted = now
            usage.cached = row.computed

    def _share(self, row: Row, seat: int) -> int | None:
        """Fork a new sample from a sibling that has the prompt: all of it but the last token, which gives logits."""
        length = row.prompt_len - 1
        if row.sample == 0 or row.generated or length == 0:
            return None
        for sibling in row.group.rows:
            if sibling.state == RUNNING and sibling.computed >= row.prompt_len:
                if not self._ledger.fork(sibling.seat, seat, length):
                    return None
                row.encoded = True
                return length
        return None

    def _attach(self, row: Row, seat: int, source: tuple[int, ...]) -> bool:
        """Hold the row's source: a sibling's, a known one, or room for it; False: there is no room now."""
        if not row.tokens:
            return True  # nothing is kept
        for sibling in row.group.rows:
            if sibling is not row and sibling.state == RUNNING and sibling.encoded:
                self._ledger.share_source(sibling.seat, seat)
                row.encoded = True
                return True
        known = self._ledger.attach(seat, source, row.group.root)
        if known is False and row.parked is not None and row.parked.source:
            self._ledger.wake_source(seat)
            known = True
        row.encoded = known is True
        return known is not None

    def _idle_beams(self, row: Row) -> list[Row]:
        """Beams that take a seat with this row, the first of its search to be seated: they will be forked into it."""
        rows = row.group.rows if row.group.beams is not None else []
        return [beam for beam in rows if beam.state == IDLE and beam.seat < 0]

    def fork(self, row: Row, twin: Row) -> Row:
        """The beam ``twin``, which is idle, goes on from where ``row`` stands."""
        forked = self._ledger.fork(row.seat, twin.seat, row.computed)
        assert forked, "the end of a row can be forked"
        twin.tokens, twin.computed, twin.width = list(row.tokens), row.computed, row.width
        twin.encoded, twin.state = True, RUNNING
        insort(self.running, twin, key=_order)
        return twin

    # ------------------------------------------------------------ and leaves

    def leave(self, row: Row, *, seated: bool = True, publish: bool = True, released: bool = False) -> None:
        """The row gives its blocks back (``released``: it has) and its seat (``seated``: it had taken it)."""
        if not released:
            self._ledger.release(row.seat, publish)
        if seated:
            heapq.heappush(self.free, row.seat)
        row.seat, row.computed, row.width = -1, 0, 0
        row.encoded = row.group.source is None

    def unseat_idle(self, request: Request) -> None:
        """Beams without a history give up the seats that are kept for them."""
        for beam in request.rows:
            if beam.state == IDLE and beam.seat >= 0:
                heapq.heappush(self.free, beam.seat)
                beam.seat = -1

    def check(self, rows: Sequence[Row]) -> None:
        """Assert that every one of ``rows``, all that there are, is in one place, and that seats add up."""
        beams = [row for row in rows if row.state == IDLE]
        idle = [row.seat for row in beams if row.seat >= 0]
        assert len(self.running) + len(idle) + len(self.free) == self.num_seats, "seats leak"
        seats = sorted([row.seat for row in self.running] + idle + self.free)
        assert seats == list(range(self.num_seats)), "a seat is taken twice"
        for listed, state in ((self.running, RUNNING), (self.waiting, WAITING)):
            assert all(row.state == state for row in listed), f"a row in the {state} list is not {state}"
            assert [_order(row) for row in listed] == sorted({_order(row) for row in listed}), f"{state}: out of order"
        alive = [row for row in rows if row.state not in (DONE, IDLE)]
        assert len(alive) == len(self.running) + len(self.waiting), "a row is lost"
        for row in self.running:
            assert row.computed == self._ledger.length(row.seat), "the row and the ledger disagree on its length"
            answered = (row.group.source is not None and not row.tokens) or row.pending is not None
            assert answered or row.computed < len(row.tokens) <= row.limit, "a row with nothing to compute is running"


def _most(row: Row) -> int | None:
    """Tokens that a hit of this row may cover, where prompt log-probabilities are wanted."""
    return row.scored if row.wants_prompt and row.scored < row.prompt_len - 1 else None


def _order(row: Row) -> tuple[int, int]:
    return row.order
