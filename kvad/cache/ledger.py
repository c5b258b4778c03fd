"""Which blocks a row may read and where it writes: the host face of the cache.  Integers only, no torch.

A row sits in a seat (its index, kept for life).  Position p belongs to its logical block ``p // bs``.  In each cache
group the row holds its blocks in order, but for a ``gap``: so many logical blocks, behind those that hold sinks, that
no query can see any more.  A group with one block per row (contiguous) is a ring behind its sinks.

Where a policy ranks (``policy.Scored``), a row is *cut* when it has reached a length: of the slots that it holds it
keeps a number, filled up from the front, so that position p lies where ``p - dropped`` would.  Which tokens they are is
the device's to know.  Where it keeps levels, whole blocks descend (``descent.py``).

    bs = 4, no sinks,  gap = 2, blocks = [7, 3]:     positions 8..11 in block 7, 12..15 in block 3;  13 = slot 3*4 + 1
    bs = 4, 3 sinks,   gap = 2, blocks = [5, 7, 3]:  positions 0..3 in block 5, 12..15 in block 7, 16..19 in block 3

Promises:

* a block that changes hands is in ``Moves.clear``, or is the target of a ``Moves.copy``;
* a block that two rows count on, or that is published, is never written: the writer gets a copy (copy-on-write).
  Slots behind the copied ones are empty; a writer that keeps a block after its sharer copied itself away may find
  slots of *later* positions in it.  No query sees those before this row has written over them: queries are causal.
  Where a policy sums up whole blocks (``policy.Quest``) it empties them before it writes;
* a row's source (cross-attention, ``sources.py``) is held from :meth:`attach` to :meth:`release`, and written once;
* a windowed row keeps what the first query of its next span needs, and no block before that;
* :meth:`Ledger.reserve` places all spans or changes nothing.

Never: a torch import, a decision about which request runs, a look at a key, a value or a score.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvad.cache.blocks import BlockPool, Hash, LowestFirst, Prefix, Prefixes, digest
from kvad.cache.deposits import Deposits, Fetch, Tier
from kvad.cache.descent import Descended, Descents, blocks_of
from kvad.cache.policy import Spilled
from kvad.cache.seats import NEVER, Hold, Known, Parked, Seat, in_ring, place_of
from kvad.cache.sizing import Group
from kvad.cache.sources import PlacedSources, Source, Sources
from kvad.cache.standing import Laid, Standing, marks_of
from kvad.step import Compact, Moves, Reach

__all__ = ["Ledger", "LedgerStats", "Parked", "Placed", "Span"]


class Span(NamedTuple):
    """Write the tokens at positions ``start .. start + count - 1`` of a row; ``start`` is the row's length."""

    row: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody asks of a span


class Placed(NamedTuple):
    """Where a step's tokens go.

    ``slots``: per group that takes tokens, one slot per token, in span order.  ``tables``: per group (``below`` levels
    behind those that take tokens, then those of cross-attention), per span, the blocks that the row may read after this
    write; the ledger's own lists, valid until its next call: read, do not keep or change.
    """

    moves: Moves
    slots: tuple[list[int], ...]
    tables: tuple[list[list[int]], ...]
    below: int = 0


@dataclass(frozen=True)
class LedgerStats:
    """Blocks per group: ``total`` = ``used`` + ``free`` + ``evictable``, evictions so far, ``peak``: the most in use at
    once since :meth:`Ledger.restart_peak`, and ``watermark``: those that an admission leaves free.  Prefix cache:
    admissions that hit and that did not, and the tokens that need no computing because of hits."""

    total: tuple[int, ...]
    used: tuple[int, ...]
    free: tuple[int, ...]
    evictable: tuple[int, ...]
    evictions: tuple[int, ...]
    hits: int
    misses: int
    hit_tokens: int
    peak: tuple[int, ...]
    watermark: tuple[int, ...]


class Ledger:
    """Owns one :class:`BlockPool` per group and the rows in ``seats`` seats.  ``watermark``: share of a pool, of what
    rows grow in, that :meth:`fits` leaves free.  ``tier``: where published blocks go on beyond the pools."""

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        prefix: bool,
        seats: int,
        hasher: Hash = digest,
        watermark: float = 0.0,
        tier: Tier | None = None,
    ) -> None:
        self.groups = tuple(groups)  # those that take tokens first, then their levels, then those of sources
        own = [group for group in self.groups if not group.mixer.cross and group.level is None]
        below = [group for group in self.groups if group.level is not None]
        assert self.groups[: len(own)] == tuple(own), "what takes tokens stands before all others"
        assert self.groups[len(own) : len(own) + len(below)] == tuple(below), "levels stand before cross-attention"
        self.own, self.below = tuple(own), tuple(below)
        self._kept = len(own) + len(below)
        self.spare = tuple(math.ceil(watermark * group.usable) for group in self.groups[: self._kept])
        self.pools = tuple(_pool(group) for group in self.groups)
        self._pools = self.pools[: len(own)]
        self.releases = 0  # grows when a row gives its blocks back: a reason to try an admission again
        self._seats: list[Seat | None] = [None] * seats
        self._prefixes = Prefixes(hasher)
        self._ring = tuple(group.blocks_per_row == 1 for group in self.own)
        self._sizes = tuple(group.block_size for group in self.own)
        self._reaches = tuple(Reach.of(group.mixer) for group in self.own)
        self._windows = tuple(NEVER if reach.window is None else reach.window for reach in self._reaches)
        self._levels = tuple(group.levels for group in self.own)
        sinks = [
            reach.sinks if levels is None else levels.sinks
            for reach, levels in zip(self._reaches, self._levels, strict=True)
        ]
        self._sinks = tuple(-(-count // size) for count, size in zip(sinks, self._sizes, strict=True))
        self._descents = Descents(self.groups, self.pools, len(own))
        self._scored = tuple(group.scored for group in self.own)
        self._summed = tuple(group.chooses is not None for group in self.own)  # blocks are summed up as they stand
        # A preempted row is parked, never computed again.
        self.spills = any(isinstance(group.levels, Spilled) for group in self.own)
        self.lossy = not self.spills and any(group.scored or group.levels for group in self.own)
        self._moved = self.spills or self.lossy
        self._watched = any(scored is not None and scored.watch for scored in self._scored)
        self._parked = self._epoch = 0  # keys so far; times that all prefixes were forgotten
        self._park: list[tuple[int, tuple[tuple[int, ...], ...]]] = []  # told with the next moves
        self._wake: dict[int, tuple[int, tuple[tuple[int, ...], ...]]] = {}  # by row
        self._drop: list[int] = []
        # A row of one block can share no full block and leave one token to compute: nothing to publish.
        # Nor are blocks of a row that spills: they leave its table, and whoever found them would have no room for all.
        self.prefix = prefix and bool(self.own) and not any(self._ring) and not self._moved
        assert not self.prefix or len(set(self._sizes)) == 1, "prefix reuse needs one block size"
        self._hits = self._misses = self._hit_tokens = 0
        self.deposits = Deposits(tier, len(self.groups)) if tier is not None and self.prefix else None
        if self.deposits is not None:
            for index, pool in enumerate(self._pools):
                pool.evicting = partial(self.deposits.evicted, index)
        self.capacity = min((self._longest(index) for index in range(len(self.own))), default=sys.maxsize)
        kept = self._kept
        self._sources = Sources(self.groups[kept:], self.pools[kept:], self._prefixes, share=self.prefix)

    def _longest(self, index: int) -> int:
        """Tokens of the longest row that group ``index`` holds when it is alone."""
        group = self.groups[index]
        bounded = group.mixer.window is not None or group.scored is not None
        if bounded and group.usable >= group.blocks_per_row:
            return sys.maxsize
        if group.levels is not None:
            if group.levels.packed != -1:
                return sys.maxsize
            if group.usable < group.blocks_per_row:
                return group.usable * group.block_size
            packed = self.groups[self._descents.below[index][0]]
            kept = group.levels.recent + group.levels.sinks
            return kept + min(packed.usable, packed.blocks_per_row) * group.block_size
        return min(group.usable, group.blocks_per_row) * group.block_size

    # ------------------------------------------------------------ rows come and go

    def admit(
        self, row: int, tokens: Sequence[int], root: bytes, most: int | None = None, fetch: Fetch | None = None
    ) -> int | None:
        """Seat a row and claim the longest known prefix of ``tokens``; returns its length, None if the seat is taken.

        A hit is a multiple of the block size and covers at most ``len(tokens) - 1`` tokens (one is left to compute),
        at most ``most`` where given.  A group with a window needs only the blocks of the last ``window - 1`` tokens.
        ``fetch``, which is ready: what of these tokens the tiers gave back; it stands in the pools after the next step.
        """
        if self._seats[row] is not None:
            return None
        seat = Seat(len(self.own), len(self.below), self._prefixes.root(root) if self.prefix else None)
        self._seats[row] = seat
        if seat.root is None:
            return 0
        longest = len(tokens) - 1 if most is None else min(most, len(tokens) - 1)
        chain, why = self._chain(seat.root, tokens, longest, fetch), ""
        if fetch is not None and not self._room_for(chain):
            chain, why = self._chain(seat.root, tokens, longest), "no room"
        if longest >= self._sizes[0]:
            self._hits += bool(chain)
            self._misses += not chain
        if self.deposits is not None and fetch is not None and len(chain) < longest // self._sizes[0]:
            self.deposits.hits.misses[why or fetch.why() or "moved"] += 1
        if not chain:
            return 0
        length = len(chain) * self._sizes[0]
        self._claim(row, seat, chain, tokens, fetch)
        seat.length = seat.reach = length
        self._hit_tokens += length
        return length

    def fetch(self, tokens: Sequence[int], root: bytes, most: int | None = None) -> Fetch:
        """What the tiers have of these tokens and no pool does; nothing moves before it is started.

        A group with a window is fetched the blocks that the longest known prefix needs, and no others.
        """
        longest = len(tokens) - 1 if most is None else min(most, len(tokens) - 1)
        at = self._prefixes.root(root) if self.deposits is not None else None
        if at is None or self.deposits is None or longest < self._sizes[0]:
            return Fetch(None, (), {})
        tier, size, missed = self.deposits.tier, self._sizes[0], ""
        packed = array("q", tokens[: longest - longest % size]).tobytes()
        chain: list[Prefix] = []
        stored: set[Prefix] = set()
        for start in range(0, len(packed), size * 8):
            prefix = self._prefixes.extend(at, packed[start : start + size * 8])
            if prefix is None:
                missed = "collision"
                break
            lacks = [index for index, pool in enumerate(self._pools) if pool.find(prefix) is None]
            if lacks and tier.has(prefix.digest.hex()):
                stored.add(prefix)
            elif any(self._windows[index] == NEVER for index in lacks):
                missed = "unknown"
                break
            chain.append(prefix)
            at = prefix
        depth = self._served(chain, lambda index, prefix: prefix in stored or self._there(index, prefix, None))
        missed = missed or ("unknown" if depth < len(packed) // (size * 8) else "")
        wanted: dict[Prefix, tuple[int, ...]] = {}
        for index, pool in enumerate(self._pools):
            for prefix in self._needs(index, chain[:depth])[1]:
                if pool.find(prefix) is None:
                    wanted[prefix] = (*wanted.get(prefix, ()), index)
        fetch = Fetch(tier, chain[:depth], {prefix: wanted[prefix] for prefix in chain[:depth] if prefix in wanted})
        fetch.missed = missed
        return fetch

    def keys(self, tokens: Sequence[int], root: bytes) -> list[str]:
        """Under which keys the tiers have the whole blocks of these tokens."""
        made, size, at = list[Prefix](), self._sizes[0], self._prefixes.root(root)
        for start in range(0, len(tokens) - size + 1, size):
            at = None if at is None else self._prefixes.extend(at, array("q", tokens[start : start + size]).tobytes())
            if at is None:
                break
            made.append(at)
        return [prefix.digest.hex() for prefix in made]

    def _there(self, index: int, prefix: Prefix, fetch: Fetch | None) -> bool:
        """Is this block of group ``index`` in its pool, or fetched?"""
        return self.pools[index].find(prefix) is not None or (fetch is not None and fetch.has(prefix, index))

    def _needs(self, index: int, chain: Sequence[Prefix]) -> tuple[int, list[Prefix]]:
        """(the first one behind those of sinks, all) of the blocks of a chain that a row in group ``index`` holds."""
        first = self._first_needed(index, len(chain) * self._sizes[0])
        return first, [*chain[: self._sinks[index]], *chain[first:]]

    def _room_for(self, chain: Sequence[Prefix]) -> bool:
        """Are there blocks for what of a chain was fetched, beside those that it claims?"""
        for index, pool in enumerate(self._pools):
            found = [pool.find(prefix) for prefix in self._needs(index, chain)[1]]
            idle = sum(block is not None and pool.refs[block] == 0 for block in found)
            if found.count(None) > pool.available - idle:
                return False
        return True

    def _claim(self, row: int, seat: Seat, chain: Sequence[Prefix], tokens: Sequence[int], fetch: Fetch | None) -> None:
        """Hold the blocks of a chain: those in the pools are claimed before any is taken for those that were
        fetched."""
        missing: dict[Prefix, dict[int, int]] = {}
        for claimed in (True, False):
            for index, hold in enumerate(seat.holds):
                pool = self.pools[index]
                first, needed = self._needs(index, chain)
                if claimed:
                    hold.gap = first - self._sinks[index]
                    found = [pool.find(prefix) for prefix in needed]
                    for block in found:
                        if block is not None:
                            pool.acquire(block)
                    hold.blocks = [0 if block is None else block for block in found]
                    continue
                for place, prefix in enumerate(needed):
                    if not hold.blocks[place]:
                        hold.blocks[place] = missing.setdefault(prefix, {})[index] = pool.take()[0]
        sure = next((at for at, prefix in enumerate(chain) if prefix in missing), len(chain))
        seat.tip = chain[sure - 1] if sure else seat.root
        seat.tail = list(tokens[sure * self._sizes[0] : len(chain) * self._sizes[0]])
        if missing:
            assert fetch is not None and self.deposits is not None
            passed = 0 if any(hold.gap == 0 for hold in seat.holds) else sure
            self.deposits.claimed(row, fetch, missing, chain[-1], self._sizes[0], passed)

    def fork(self, row: int, child: int, length: int) -> bool:
        """Seat ``child`` on the first ``length`` tokens of ``row``: blocks are shared until one of them writes.

        False, and nothing changed: a window of ``row`` has moved past what a query at ``length`` needs, or a cut has
        dropped it, or a policy watches the attention that blocks get, which is a row's own; or ``row`` is about to
        wake or to be loaded, and its blocks are empty until its next step.
        """
        seat = self._seat(row)
        if self._watched or self._waits(row) or any(hold.cut > length for hold in seat.holds):
            return False
        assert self._seats[child] is None and 0 <= length <= seat.length, (row, child, length, seat.length)
        if not self._window_held(seat, length):
            return False
        twin = Seat(len(self.own), len(self.below), seat.root)
        for pool, old_below, new_below in zip(self.pools[len(self.own) :], seat.below, twin.below, strict=False):
            new_below.blocks, new_below.used = list(old_below.blocks), old_below.used
            for block in new_below.blocks:
                pool.acquire(block)
        twin.source = None if seat.source is None else self._sources.share(seat.source)
        for index, (old, new) in enumerate(zip(seat.holds, twin.holds, strict=True)):
            new.dropped, new.cut = old.dropped, old.cut
            if self._ring[index]:
                new.blocks = list(old.blocks) if length else []
            elif self._scored[index] is not None:
                new.blocks = old.blocks[: -(-(length - old.dropped) // self._sizes[index])]
            else:
                sinks = self._sinks[index]
                first = max(sinks + old.gap, self._first_needed(index, length))
                stop = -(-length // self._sizes[index])
                new.gap = first - sinks
                new.blocks = old.blocks[: min(sinks, stop)] + old.blocks[first - old.gap : max(0, stop - old.gap)]
                if len(new.blocks) <= sinks:
                    new.gap = max(0, length // self._sizes[index] - sinks)
            for block in new.blocks:
                self.pools[index].acquire(block)
        end = seat.reach if any(self._ring) else -(-length // self._sizes[0]) * self._sizes[0]
        twin.length, twin.reach = length, max(length, min(seat.reach, end))
        twin.tip, twin.tail = self._history(seat, length)
        seat.since = NEVER
        self._seats[child] = twin
        return True

    def rewind(self, row: int, length: int) -> int:
        """Drop the tokens from ``length`` on; returns the length kept.

        It is 0 when a window has moved past what a query at ``length`` needs: the row is then empty, compute it anew.
        """
        seat = self._seat(row)
        assert not self._waits(row), "what was parked or stored comes back whole: rewind it after its next step"
        if length >= seat.length:
            return seat.length
        if length == 0 or not self._window_held(seat, length) or any(hold.cut > length for hold in seat.holds):
            self._release_all(seat)
            seat.restart()
            self.releases += 1
            return 0
        for index, hold in enumerate(seat.holds):
            if self._scored[index] is not None and not self._ring[index]:
                keep = -(-(length - hold.dropped) // self._sizes[index])
                _release(self.pools[index], hold.blocks[keep:])
                hold.blocks = hold.blocks[:keep]
            elif not self._ring[index]:
                sinks, stop = self._sinks[index], -(-length // self._sizes[index])
                keep = stop if stop <= sinks else max(sinks, stop - hold.gap)
                _release(self.pools[index], hold.blocks[keep:])
                hold.blocks = hold.blocks[:keep]
                if keep <= sinks:
                    hold.gap = min(hold.gap, max(0, length // self._sizes[index] - sinks))
        seat.tip, seat.tail = self._history(seat, length)
        seat.length = length
        seat.since = NEVER
        self.releases += 1
        return length

    def release(self, row: int, publish: bool = True) -> None:
        """The row leaves its seat.  Blocks go back in reverse, so that the ends of prefixes are evicted first.

        ``publish=False`` (a fault: its numbers cannot be trusted, and chunks of it were committed before anybody
        looked at a logit) withdraws every prefix on this row's way, its own and those it claimed: nobody finds them
        again.  Rows that already count on such a block keep it.
        """
        seat = self._seat(row)
        fetched = None if self.deposits is None else self.deposits.left(row)
        if not publish:
            self._withdraw(seat.tip)
            self._withdraw(fetched)
        self._release_all(seat)
        if seat.source is not None:
            self._sources.release(seat.source, publish=publish)
        self._seats[row] = None
        self._wake.pop(row, None)  # it was about to wake: what is parked stays parked
        self.releases += 1

    def park(self, row: int) -> Parked:
        """A row leaves its seat and will have its blocks as they are again: they are copied out, then freed."""
        seat = self._seat(row)
        assert self.lossy or not self._moved, "what is spilled is not copied out: such a row is computed again"
        if row in self._wake:  # it has not moved since it was to wake
            key, blocks = self._wake[row]
        else:
            key, blocks = self._parked, tuple(tuple(hold.blocks) for hold in seat.every)
            self._parked += 1
            self._park.append((key, blocks))
        holds = tuple((len(hold.blocks), hold.gap, hold.dropped, hold.cut) for hold in seat.holds)
        below = tuple((len(each.blocks), each.used) for each in seat.below)
        known = None if seat.root is None else Known(seat.root, seat.tip, tuple(seat.tail), self._epoch)
        self.release(row)
        return Parked(key, seat.length, holds, below, known, seat.floor)

    def wake(self, row: int, parked: Parked) -> bool:
        """Seat a parked row where it stood; False, and no change: there is no room now."""
        assert self._seats[row] is None, f"seat {row} is taken"
        counts = [count for count, *_ in (*parked.holds, *parked.below)]
        if any(count > pool.available for count, pool in zip(counts, self.pools, strict=False)):
            return False
        known = parked.known if parked.known is not None and parked.known.epoch == self._epoch else None
        seat = Seat(len(self.own), len(self.below), None if known is None else known.root)
        if known is not None:
            seat.tip, seat.tail, seat.again = known.tip, list(known.tail), True
        seat.length = seat.reach = parked.length
        seat.floor = parked.floor
        for hold, pool, (count, *marks) in zip(seat.holds, self._pools, parked.holds, strict=True):
            hold.gap, hold.dropped, hold.cut = marks
            hold.blocks = [pool.take()[0] for _ in range(count)]
        for each, pool, (count, used) in zip(seat.below, self.pools[len(self.own) :], parked.below, strict=False):
            each.used = used
            each.blocks = [pool.take()[0] for _ in range(count)]
        self._seats[row] = seat
        self._wake[row] = parked.key, tuple(tuple(hold.blocks) for hold in seat.every)
        return True

    def standing(self, row: int) -> Standing | None:
        """What the row holds, and where, for whoever reads it before the next step; None: it is not there yet."""
        if row in self._wake:
            return None
        seat, groups = self._seat(row), self.own
        holds = tuple(
            (marks_of(group, hold, seat.length, seat.reach), hold.gap, tuple(hold.blocks))
            for group, hold in zip(groups, seat.holds, strict=True)
        )
        below = tuple((each.used, tuple(each.blocks)) for each in seat.below)
        source = seat.source
        tokens, crossed = (None, ()) if source is None else (source.tokens, tuple(map(tuple, source.blocks)))
        return Standing(seat.length, holds, below, tokens, crossed)

    def adopt(
        self,
        tokens: Sequence[int],
        root: bytes,
        laid: Sequence[Laid],
        below: Sequence[tuple[int, int]],
        *,
        source: bool,
    ) -> Parked:
        """A row of these ``tokens`` from elsewhere, as if it had been parked here: ``laid`` per group that takes
        tokens, (blocks, filled slots) per level; ``source``: its source's keys and values come with it.  Its full
        blocks are published under ``root`` when it has gone on, where that is done."""
        key, self._parked = self._parked, self._parked + 1
        length = len(tokens)
        holds = tuple((each.count, each.gap, each.marks.dropped, each.marks.cut) for each in laid)
        floor = 0 if all(each.whole for each in laid) else length
        begin = self._prefixes.root(root) if self.prefix and not floor else None
        known = None if begin is None else Known(begin, begin, tuple(tokens), self._epoch)
        return Parked(key, length, holds, tuple(below), known, floor, source)

    def forget(self, parked: Parked) -> None:
        """A parked row will not come back."""
        self._drop.append(parked.key)

    @property
    def untold(self) -> list[int]:
        """Keys of parked rows that have yet to be copied out: with the next moves."""
        return [key for key, _ in self._park]

    @property
    def waking(self) -> list[int]:
        """Keys of parked rows that are seated again, and have yet to be copied in: with the next moves of their own."""
        return [key for key, _ in self._wake.values()]

    def held(self, row: int) -> list[int]:
        """Blocks that the row holds in each group, those of sources apart."""
        return [len(each.blocks) for each in self._seat(row).every]

    def survives(self, row: int) -> int:
        """Tokens from the row's start on that would still be known if it gave its blocks back: others hold them."""
        prefix, chain = self._seat(row).tip, list[Prefix]()
        while prefix is not None and prefix.depth:
            chain.append(prefix)
            prefix = prefix.parent
        full = [pool for pool, window in zip(self._pools, self._windows, strict=True) if window == NEVER]
        count = 0
        for prefix in reversed(chain):
            blocks = [pool.find(prefix) for pool in full]
            if any(block is None or pool.refs[block] < 2 for block, pool in zip(blocks, full, strict=True)):
                break
            count += 1
        return count * self._sizes[0]

    def known(self, tokens: Sequence[int], root: bytes) -> int:
        """Tokens of which an admission would find the blocks now."""
        start = self._prefixes.root(root) if self.prefix else None
        return 0 if start is None else len(self._chain(start, tokens, len(tokens) - 1)) * self._sizes[0]

    def room(self, row: int) -> int:
        """Tokens until the row is cut next: no span goes further."""
        length = self._seat(row).length
        policies = (*self._scored, *self._levels)
        return min((policy.cut_after(length) for policy in policies if policy is not None), default=NEVER) - length

    def drop_prefixes(self) -> None:
        """Forget every published block (the weights changed); rows that are seated or parked now publish no more."""
        self._epoch += 1
        for pool in self.pools:
            for block in pool.published():
                pool.withdraw(block)
        if self.deposits is not None:
            self.deposits.forget()
        for seat in self._seats:
            if seat is not None:
                seat.root = seat.tip = None
                if seat.source is not None:
                    seat.source.name = None

    # ------------------------------------------------------------ sources

    @property
    def source_capacity(self) -> int:
        """Tokens of the longest source; 0 for a model without cross-attention."""
        return self._sources.capacity

    def attach(self, row: int, tokens: Sequence[int], root: bytes) -> bool | None:
        """Give a seated row its source.  True: it is encoded already; False: it is to be; None: there is no room."""
        seat = self._seat(row)
        assert seat.source is None, f"row {row} has a source"
        seat.source = self._sources.attach(tokens, root)
        return None if seat.source is None else seat.source.written

    def wake_source(self, row: int) -> None:
        """The source of a row that is about to wake comes back with it, and need not be encoded.  Others do not find
        it: it is not there before the row's next step."""
        source, (key, blocks) = self._source(row), self._wake[row]
        assert not source.written, "a source is written once"
        self._wake[row] = key, (*blocks, *map(tuple, source.blocks))
        source.written, source.name = True, None

    def share_source(self, row: int, child: int) -> None:
        """Give ``child``, a seated row, the source of ``row``."""
        source, seat = self._seat(row).source, self._seat(child)
        assert source is not None and seat.source is None, (row, child)
        seat.source = self._sources.share(source)

    def place_sources(self, rows: Sequence[int]) -> PlacedSources:
        """Where the encoder writes the sources of these rows, in their order."""
        return self._sources.place([self._source(row) for row in rows], self._kept)

    def commit_source(self, row: int) -> None:
        """The row's source is written, and what came out was finite."""
        self._sources.commit(self._source(row))

    def _source(self, row: int) -> Source:
        source = self._seat(row).source
        assert source is not None, f"row {row} has no source"
        return source

    # ------------------------------------------------------------ a step

    def reserve(self, spans: Sequence[Span] | Sequence[tuple[int, int, int]]) -> Placed | None:
        """Room for every span, or None and no change: a pool is too full.  At most one span per row."""
        seats = self._seats
        slow = []
        for span in spans:
            seat = seats[span[0]]
            assert seat is not None and span[1] == seat.length, f"span {span} does not start at its row's end"
            if span[2] != 1 or not seat.since <= span[1] < seat.fast:
                slow.append(span)
        moves = self._grow(slow) if slow else self._no_moves()
        if moves is None:
            return None
        moves = self._with_carried(moves, spans)
        slots: tuple[list[int], ...] = tuple([] for _ in self.own)
        tables: tuple[list[list[int]], ...] = tuple([] for _ in self.groups)
        pairs = [(where.append, table.append) for where, table in zip(slots, tables, strict=False)]
        lower, crossed = tables[len(self.own) : self._kept], tables[self._kept :]
        for row, start, count in spans:
            seat = seats[row]
            assert seat is not None
            if count == 1 and seat.since <= start < seat.fast:
                for hold, (put, show) in zip(seat.holds, pairs, strict=True):
                    put(hold.base + start)
                    show(hold.blocks)
            else:
                self._place(seat, start, start + count, slots, tables)
            for table, below in zip(lower, seat.below, strict=True):
                table.append(below.blocks)
            if crossed:
                for table, blocks in zip(crossed, self._source(row).blocks, strict=True):
                    table.append(blocks)
            if start + count > seat.reach:
                seat.reach = start + count
        return Placed(moves, slots, tables, len(self.below))

    def commit(self, row: int, tokens: Sequence[int], sure: int | None = None) -> None:
        """The row's next ``tokens`` are computed: prompt and generated ones alike.

        Full blocks are published, those within the row's first ``sure`` tokens where given: finite logits have been
        seen at or behind their last token.  The others wait for a later commit.
        """
        seat = self._seat(row)
        seat.length += len(tokens)
        assert seat.length <= seat.reach, f"row {row} commits {seat.length} tokens, {seat.reach} were reserved"
        if seat.length < seat.reach:
            seat.since = NEVER  # later tokens stand where the next one goes
        if seat.tip is not None:
            if seat.again:
                self._publish_again(seat)
            seat.tail.extend(tokens)
            if len(seat.tail) >= self._sizes[0]:
                self._publish(seat, seat.length if sure is None else sure)
        if self.deposits is not None:
            self.deposits.left(row)

    def store_now(self) -> Moves | None:
        """What is to be copied out, where no step is about to do it; None: nothing."""
        if self.deposits is None or not self.deposits.pending:
            return None
        stores = self.deposits.stores()
        return self._no_moves()._replace(store=stores) if stores else None

    # ------------------------------------------------------------ questions

    def length(self, row: int) -> int:
        return self._seat(row).length

    def holds(self, rows: int, length: int) -> bool:
        """Do ``rows`` rows of ``length`` tokens have room, if nothing else is there and they share nothing?"""
        return all(rows * blocks_of(group, self.groups, length) <= group.usable for group in self.groups[: self._kept])

    def fits(self, row: int, length: int, others: Sequence[tuple[int, int]] = ()) -> bool:
        """Could this row grow to ``length`` tokens with what is free or evictable now, above the watermark, and
        ``others`` (row, length) to theirs?"""
        rows = [(self._seat(row), length), *((self._seat(other), most) for other, most in others)]
        for index, (group, pool) in enumerate(zip(self.groups[: self._kept], self.pools, strict=False)):
            need = sum(max(0, blocks_of(group, self.groups, most) - len(s.every[index].blocks)) for s, most in rows)
            if need > pool.available - self.spare[index]:
                return False
        return True

    def grows(self, row: int, count: int) -> bool:
        """Do the row's next ``count`` tokens need blocks that it does not have?"""
        seat = self._seat(row)
        spans = [(row, seat.length, count)]
        if any(self._balance(index, spans) > 0 for index in range(len(self.own))):
            return True
        return bool(self.below) and any(self._descents.need([(seat, seat.length)]))

    def restart_peak(self) -> None:
        """Count :attr:`LedgerStats.peak` from what is in use now."""
        for pool in self.pools:
            pool.restart_peak()

    def stats(self) -> LedgerStats:
        pools = self.pools
        return LedgerStats(
            total=tuple(pool.total for pool in pools),
            used=tuple(pool.live for pool in pools),
            free=tuple(pool.free for pool in pools),
            evictable=tuple(pool.evictable for pool in pools),
            evictions=tuple(pool.evictions for pool in pools),
            hits=self._hits,
            misses=self._misses,
            hit_tokens=self._hit_tokens,
            peak=tuple(pool.peak for pool in pools),
            watermark=self.spare + (0,) * (len(pools) - len(self.spare)),
        )

    def check(self) -> None:
        """Assert the block law of every pool, and that rows own exactly what the pools count, where they need it."""
        for index, pool in enumerate(self.pools):
            pool.check()
            refs = [0] * len(pool.refs)
            for number, seat in enumerate(self._seats):
                if seat is None:
                    continue
                if index < len(self.own):
                    self._check_hold(index, number, seat)
                    blocks = seat.holds[index].blocks
                elif index < self._kept:
                    blocks = seat.below[index - len(self.own)].blocks
                    assert len(blocks) <= self.groups[index].blocks_per_row, f"group {index}: too many blocks"
                else:
                    blocks = [] if seat.source is None else seat.source.blocks[index - self._kept]
                for block in blocks:
                    refs[block] += 1
            assert refs == pool.refs, f"group {index}: rows count on other blocks than the pool says"

    def _check_hold(self, index: int, row: int, seat: Seat) -> None:
        hold, group, where = seat.holds[index], self.groups[index], f"group {index}, row {row}"
        assert len(set(hold.blocks)) == len(hold.blocks), f"{where}: a block stands twice in its table"
        assert len(hold.blocks) <= group.blocks_per_row, f"{where}: more blocks than a row may have"
        assert seat.length <= seat.reach, f"{where}: committed {seat.length}, wrote up to {seat.reach}"
        if self._ring[index]:
            assert hold.gap == 0 and len(hold.blocks) == bool(seat.length or hold.blocks), f"{where}: no ring"
            return
        if self._scored[index] is not None:
            held = seat.length - hold.dropped
            assert held <= len(hold.blocks) * group.block_size, f"{where}: {held} slots in {len(hold.blocks)} blocks"
            return
        sinks = self._sinks[index]
        end = (hold.gap + len(hold.blocks)) * group.block_size
        policy = self._levels[index]
        needed = self._reaches[index].oldest(seat.length) if policy is None else max(0, hold.cut - policy.recent)
        if needed < seat.length:  # else its next query sees nothing but itself, and sinks
            assert not hold.gap or (hold.gap + sinks) * group.block_size <= needed, f"{where}: its window is not held"
            assert end >= seat.length, f"{where}: {seat.length} tokens, blocks up to {end}"
        assert not hold.gap or len(hold.blocks) >= sinks, f"{where}: its sinks are not held"
        for place, block in enumerate(hold.blocks):
            logical = place if place < sinks else place + hold.gap
            prefix = self.pools[index].prefixes[block]
            assert prefix is None or prefix.depth == logical + 1, f"{where}: block {block} is published elsewhere"

    # ------------------------------------------------------------ inside

    def _seat(self, row: int) -> Seat:
        seat = self._seats[row]
        assert seat is not None, f"seat {row} is empty"
        return seat

    def _waits(self, row: int) -> bool:
        """Are the row's blocks still empty?"""
        return row in self._wake or (self.deposits is not None and self.deposits.waits(row))

    def _release_all(self, seat: Seat) -> None:
        for hold, pool in zip(seat.every, self.pools, strict=False):
            _release(pool, hold.blocks)

    def _no_moves(self) -> Moves:
        nothing: tuple[()] = ()
        empty = (nothing,) * len(self.groups)
        return Moves(empty, empty)

    def _first_needed(self, index: int, start: int) -> int:
        """The first logical block, behind those of sinks, that a query at position ``start`` may see."""
        if self._windows[index] == NEVER:
            return 0
        return max(self._reaches[index].oldest(start) // self._sizes[index], self._sinks[index])

    def _window_held(self, seat: Seat, length: int) -> bool:
        """Does every group still hold the keys that a query at position ``length`` needs?"""
        if length < seat.floor:
            return False
        for index, hold in enumerate(seat.holds):
            reach, size = self._reaches[index], self._sizes[index]
            needed = reach.oldest(length)
            if needed >= length or self._levels[index] is not None:
                continue  # it sees nothing but itself, and sinks; or what has left it lies below
            if self._ring[index]:
                oldest = 0 if seat.reach <= size else seat.reach - (size - reach.sinks)
            else:
                oldest = (hold.gap + self._sinks[index]) * size if hold.gap else 0
            if oldest > needed:
                return False
        return True

    def _chain(self, root: Prefix, tokens: Sequence[int], longest: int, fetch: Fetch | None = None) -> list[Prefix]:
        """The longest chain of known blocks of ``tokens`` that every group can serve, at most ``longest`` tokens."""
        size = self._sizes[0]
        stride = size * 8
        packed = array("q", tokens[: longest - longest % size]).tobytes() if longest > 0 else b""
        full = [index for index, window in enumerate(self._windows) if window == NEVER]
        chain: list[Prefix] = []
        prefix: Prefix | None = root
        named = () if fetch is None else fetch.chain
        for at in range(0, len(packed), stride):
            if len(chain) < len(named):  # its digest is known
                prefix = named[len(chain)]
            else:
                prefix = self._prefixes.find(prefix, packed[at : at + stride])
            if prefix is None or not all(self._there(index, prefix, fetch) for index in full):
                break
            chain.append(prefix)
        return chain[: self._served(chain, lambda index, prefix: self._there(index, prefix, fetch))]

    def _served(self, chain: Sequence[Prefix], there: Callable[[int, Prefix], bool]) -> int:
        """How many blocks of a chain, each of which is there in the groups without a window, all groups can serve."""
        usable = [True] * (len(chain) + 1)
        for index, window in enumerate(self._windows):
            if window != NEVER:
                run = 0  # blocks present without a gap, up to here
                sinks = self._sinks[index]
                rooted = True  # so are those of sinks
                for depth, prefix in enumerate(chain, 1):
                    run = run + 1 if there(index, prefix) else 0
                    rooted &= depth > sinks or run == depth
                    usable[depth] &= rooted and run >= depth - self._first_needed(index, depth * self._sizes[0])
        return max(depth for depth, ok in enumerate(usable) if ok)

    def _history(self, seat: Seat, length: int) -> tuple[Prefix | None, list[int]]:
        """(tip, tail) of the row's first ``length`` tokens."""
        tip = seat.tip
        if tip is None:
            return None, []
        size = self._sizes[0]
        depth, rest = divmod(length, size)
        if depth >= tip.depth:
            return tip, seat.tail[: length - tip.depth * size]
        while tip.depth > depth + 1:
            assert tip.parent is not None
            tip = tip.parent
        return tip.parent, array("q", tip.tokens).tolist()[:rest]

    def _publish(self, seat: Seat, sure: int) -> None:
        size, tail, at = self._sizes[0], seat.tail, 0
        assert seat.tip is not None
        for _ in range(sure // size - seat.tip.depth):
            tip = self._prefixes.extend(seat.tip, array("q", tail[at : at + size]).tobytes())
            if tip is None:  # its digest is another history's: this row publishes no more
                seat.tip, seat.tail = None, []
                return
            stored = {}
            for index, (hold, pool, sinks) in enumerate(zip(seat.holds, self._pools, self._sinks, strict=True)):
                place = place_of(tip.depth - 1, sinks, hold.gap)
                if place is not None:
                    pool.publish(hold.blocks[place], tip)
                    stored[index] = hold.blocks[place]
            if self.deposits is not None:
                self.deposits.published(tip, stored)
            seat.tip = tip
            at += size
        del tail[:at]

    def _publish_again(self, seat: Seat) -> None:
        """What a woken row had published before it was parked, where nobody else has it."""
        seat.again, prefix = False, seat.tip
        while prefix is not None and prefix.depth:
            for hold, pool, sinks in zip(seat.holds, self._pools, self._sinks, strict=True):
                place = place_of(prefix.depth - 1, sinks, hold.gap)
                if place is not None and pool.prefixes[hold.blocks[place]] is None:
                    pool.publish(hold.blocks[place], prefix)
            prefix = prefix.parent

    def _withdraw(self, prefix: Prefix | None) -> None:
        while prefix is not None:
            for pool in self._pools:
                block = pool.find(prefix)
                if block is not None:
                    pool.withdraw(block)
            if self.deposits is not None:
                self.deposits.withdrawn(prefix)
            prefix = prefix.parent

    def _shared(self, pool: BlockPool, block: int, refs: int) -> bool:
        """Must a writer copy this block first?  (Its own method, so that a test can break it.)"""
        return refs > 1 or pool.prefixes[block] is not None

    def _touched(self, index: int, hold: Hold, start: int, end: int) -> tuple[int, int]:
        """Which of the row's blocks [low, high), those to come included, positions start .. end - 1 are written to."""
        if self._ring[index]:
            return 0, 1
        size = self._sizes[index]
        gap = hold.gap if start // size >= self._sinks[index] else 0
        return (start - hold.dropped) // size - gap, (end - hold.dropped - 1) // size + 1 - gap

    def _stays(self, index: int, hold: Hold, start: int) -> int | None:
        """How many slots stay, where a row of length ``start`` is to be cut now."""
        scored = self._scored[index]
        if scored is None or hold.cut == start or not scored.cuts(start):
            return None
        return min(scored.budget, start - hold.dropped)

    def _stay(self, index: int, kept: int) -> int:
        """Blocks that so many slots fill."""
        return 1 if self._ring[index] else -(-kept // self._sizes[index])

    def _grow(self, spans: Sequence[Span] | Sequence[tuple[int, int, int]]) -> Moves | None:
        """Drop what windows have passed, then give every span the blocks that it writes; None: a pool is too full."""
        moving = [(self._seat(row), start) for row, start, _ in spans] if any(self._levels) else []
        if not all(self._enough(index, spans) for index in range(len(self.own))) or not self._descents.enough(moving):
            return None
        clears: list[tuple[int, ...]] = [()] * len(self.groups)
        copies: list[tuple[tuple[int, int, int], ...]] = [()] * len(self.groups)
        compacts: list[tuple[Compact, ...]] = [()] * len(self.groups)
        done = Descended(len(self.groups))
        for index in range(len(self.own)):
            cuts = self._cut_group(index, spans) if self._scored[index] is not None else ()
            for seat, start in moving:
                self._descents.descend(index, seat, start, done)
            clear, copy = self._grow_group(index, spans)
            clears[index], copies[index], compacts[index] = tuple(clear), tuple(copy), tuple(cuts)
        done.release()
        moves = Moves(tuple(clears), tuple(copies))
        return done.told(moves._replace(compact=tuple(compacts))) if self._moved else moves

    def _with_carried(self, moves: Moves, spans: Sequence[Span] | Sequence[tuple[int, int, int]]) -> Moves:
        """With what was parked and given up since the last step that was placed, and those of its rows that wake: a
        step that fails ends its rows, so none goes on with blocks that were never filled.  And with what the tiers get
        and give."""
        if self._park or self._wake or self._drop:
            rows = {span[0] for span in spans}
            wake = tuple(self._wake.pop(row) for row in sorted(rows & self._wake.keys()))
            moves = moves._replace(park=tuple(self._park), wake=wake, drop=tuple(self._drop))
            self._park, self._drop = [], []
        if self.deposits is not None and self.deposits.pending:
            moves = moves._replace(store=self.deposits.stores(), load=self.deposits.loads())
        return moves

    def _passed(self, index: int, hold: Hold, start: int) -> int:
        """How many of the row's first blocks, behind those of sinks, no query from ``start`` on can see."""
        if self._ring[index] or self._windows[index] == NEVER:
            return 0
        sinks = self._sinks[index]
        return max(0, min(len(hold.blocks) - sinks, self._first_needed(index, start) - sinks - hold.gap))

    def _enough(self, index: int, spans: Sequence[Span] | Sequence[tuple[int, int, int]]) -> bool:
        """Would :meth:`_grow_group` find enough blocks?"""
        return self._balance(index, spans) <= self.pools[index].available

    def _balance(self, index: int, spans: Sequence[Span] | Sequence[tuple[int, int, int]]) -> int:
        """Blocks that :meth:`_grow_group` would take, less those it gives back first: it counts as that does, and
        changes nothing."""
        pool, need, gain = self.pools[index], 0, 0
        left: dict[int, int] = {}  # references after the releases counted so far
        for row, start, _ in spans:
            hold = self._seat(row).holds[index]
            sinks = self._sinks[index]
            passed = self._passed(index, hold, start) or self._descents.leaving(index, hold, start)
            for block in hold.blocks[sinks : sinks + passed]:
                left[block] = left.get(block, pool.refs[block]) - 1
                gain += left[block] == 0
        for row, start, count in spans:
            hold = self._seat(row).holds[index]
            low, high = self._touched(index, hold, start, start + count)
            kept = self._stays(index, hold, start)
            if kept is not None:
                stay = self._stay(index, kept)
                for place, block in enumerate(hold.blocks):
                    left[block] = left.get(block, pool.refs[block]) - 1
                    gain += left[block] == 0 and place >= stay
                    need += left[block] > 0 and place < stay
                need += 0 if self._ring[index] else max(0, self._stay(index, kept + count) - stay)
                continue
            need += max(0, high - len(hold.blocks))
            for block in hold.blocks[low:high]:
                refs = left.get(block, pool.refs[block])
                if self._shared(pool, block, refs):
                    need += 1
                    left[block] = refs - 1
        return need - gain

    def _grow_group(
        self, index: int, spans: Sequence[Span] | Sequence[tuple[int, int, int]]
    ) -> tuple[list[int], list[tuple[int, int, int]]]:
        pool = self.pools[index]
        clear: list[int] = []
        copy: list[tuple[int, int, int]] = []
        sources: list[int] = []  # given back last: Moves clears before it copies, so no source may be handed on here
        for row, start, _ in spans:
            hold = self._seat(row).holds[index]
            passed = self._passed(index, hold, start)
            if passed:
                sinks = self._sinks[index]
                for block in hold.blocks[sinks : sinks + passed]:
                    pool.release(block)
                del hold.blocks[sinks : sinks + passed]
                hold.gap += passed
        for row, start, count in spans:
            seat = self._seat(row)
            hold = seat.holds[index]
            low, high = self._touched(index, hold, start, start + count)
            for place in range(low, high):
                if place == len(hold.blocks):
                    hold.blocks.append(pool.take()[0])
                    clear.append(hold.blocks[place])
                    continue
                block = hold.blocks[place]
                shared = self._shared(pool, block, pool.refs[block])
                if not shared and not (self._summed[index] and seat.reach > start):
                    continue
                target = hold.blocks[place] = pool.take()[0] if shared else block
                kept = self._before(index, hold, start, place)
                if kept:
                    copy.append((block, target, kept))
                else:
                    clear.append(target)
                if not shared:
                    continue
                if pool.refs[block] > 1:
                    pool.release(block)
                else:
                    sources.append(block)
        for block in sources:
            pool.release(block)
        return clear, copy

    def _before(self, index: int, hold: Hold, start: int, place: int) -> int:
        """Slots of the row's block number ``place`` that are filled before ``start`` is written."""
        size = self._sizes[index]
        if self._ring[index]:
            return min(start - hold.dropped, size)
        gap = hold.gap if place >= self._sinks[index] else 0
        return max(0, start - hold.dropped - (place + gap) * size)

    def _cut_group(self, index: int, spans: Sequence[Span] | Sequence[tuple[int, int, int]]) -> list[Compact]:
        """Cut the rows that have reached a length at which the policy cuts; a block that others count on is theirs.

        What a cut leaves is free at once: its contents are moved before anything else is (``Moves``).
        """
        pool, cut = self.pools[index], []
        for row, start, _ in spans:
            hold = self._seat(row).holds[index]
            kept = self._stays(index, hold, start)
            if kept is None:
                continue
            stay = self._stay(index, kept)
            own = [block if pool.refs[block] == 1 else None for block in hold.blocks[:stay]]
            for block, same in zip(hold.blocks, [*own, *[None] * (len(hold.blocks) - stay)], strict=True):
                if same is None:
                    pool.release(block)
            cut.append((row, start, hold, kept, own))
        made = []
        for row, start, hold, kept, own in cut:  # when all have given back: one may need what another leaves
            held, blocks = start - hold.dropped, tuple(hold.blocks)
            hold.blocks = [pool.take()[0] if block is None else block for block in own]
            hold.dropped, hold.cut = start - kept, start
            made.append(Compact(row, start, blocks, held, kept, tuple(hold.blocks)))
        return made

    def _place(
        self, seat: Seat, start: int, end: int, slots: tuple[list[int], ...], tables: tuple[list[list[int]], ...]
    ) -> None:
        """Slots of positions start .. end - 1, and how long the next tokens may take the fast way."""
        fast = NEVER
        for index, hold in enumerate(seat.holds):
            size, ring, at = self._sizes[index], self._ring[index], start
            group = self.groups[index]
            assert len(hold.blocks) <= group.blocks_per_row, f"a row outgrows its {group.blocks_per_row} blocks"
            window, sinks = self._windows[index], self._sinks[index]
            held = self._reaches[index].sinks + window + end - start - 1
            if self._scored[index] is not None:
                held = end - hold.dropped
            assert not ring or end <= size or held <= size, "a span outgrows a ring"
            stop = at
            while at < end:
                if self._scored[index] is not None:
                    logical = (at - hold.dropped) // size
                    stop = (logical + 1) * size + hold.dropped
                    hold.base = (hold.blocks[logical] - logical) * size - hold.dropped
                elif ring:
                    hold.base, stop = in_ring(hold.blocks[0], size, self._reaches[index].sinks, at)
                else:
                    logical = at // size
                    stop = (logical + 1) * size
                    hold.base = (hold.blocks[logical if logical < sinks else logical - hold.gap] - logical) * size
                slots[index].extend(range(hold.base + at, hold.base + min(stop, end)))
                at = min(stop, end)
            tables[index].append(hold.blocks)
            fast = min(fast, stop)  # the end of the block that is being written
            if not ring and window != NEVER:  # and before its first block leaves the window
                fast = min(fast, (hold.gap + sinks + 1) * size + window - self._reaches[index].grain)
            ranked = self._scored[index] or self._levels[index]
            if ranked is not None:  # and before the row is cut
                fast = min(fast, ranked.cut_after(start))
        seat.since, seat.fast = end, fast


def _release(pool: BlockPool, blocks: list[int]) -> None:
    for block in reversed(blocks):
        pool.release(block)


def _pool(group: Group) -> BlockPool:
    spilled = group.level is not None and group.level.spilled
    return LowestFirst(group.blocks) if spilled else BlockPool(group.blocks)
