"""Which blocks a row may read and where it writes: the host face of the cache.  Integers only, no torch.

A row sits in a seat (its index, kept for life).  Position p belongs to its logical block ``p // bs``.  In each cache
group the row holds its blocks in order, but for a ``gap``: so many logical blocks, behind those that hold sinks, that
no query can see any more.  A group with one block per row (contiguous) is a ring behind its sinks.

Where a policy ranks (``policy.Scored``), a row is *cut* when it has reached a length: of the slots that it holds it
keeps a number, filled up from the front, so that position p lies where ``p - dropped`` would.  Which tokens they are is
the device's to know.  Where it keeps levels, whole blocks descend (``descent.py``).

    bs = 4, no sinks,  gap = 2, blocks = [7, 3]:     positions 8..11 in block 7, 12..15 in block 3;  13 = slot 3*4 + 1
    bs = 4, 3 sinks,   gap = 2, blocks = [5, 7, 3]:  positions 0..3 in block 5, 12..15 in block 7, 16..19 in block 3

What a group asks of its rows stands in ``rules.py``; what is known of their tokens in ``chains.py``; how they get
blocks for what they write in ``growth.py``; rows that leave and come back in ``away.py``; their sources in
``sources.py``.  The ledger seats rows, and is the one door to all of that.

Promises:

* what those modules promise: blocks that change hands are told, shared ones are not written, prefixes are whole;
* a row's source (cross-attention) is held from :meth:`attach` to :meth:`release`, and written once;
* a windowed row keeps what the first query of its next span needs, and no block before that;
* :meth:`Ledger.reserve` places all spans or changes nothing.

Never: a torch import, a decision about which request runs, a look at a key, a value or a score.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvad.cache.away import Away
from kvad.cache.blocks import BlockPool, Hash, LowestFirst, Prefixes, digest
from kvad.cache.chains import Chains
from kvad.cache.deposits import Deposits, Fetch, Tier
from kvad.cache.descent import Descents, blocks_of
from kvad.cache.growth import Growth, Span, Spans
from kvad.cache.policy import Spilled
from kvad.cache.rules import Rules
from kvad.cache.seats import NEVER, Parked, Seat
from kvad.cache.sizing import Group
from kvad.cache.sources import PlacedSources, Source, Sources
from kvad.cache.standing import Laid, Standing, marks_of
from kvad.step import Moves

__all__ = ["Ledger", "LedgerStats", "Parked", "Placed", "Span"]


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
        self.rules = tuple(map(Rules, self.own))
        descents = Descents(self.groups, self.pools, len(own))
        self._growth = Growth(self.rules, self.pools, self._seats, descents)
        # A preempted row is parked, never computed again.
        self.spills = any(isinstance(group.levels, Spilled) for group in self.own)
        self.lossy = not self.spills and any(group.scored or group.levels for group in self.own)
        self._watched = any(group.scored is not None and group.scored.watch for group in self.own)
        # A row of one block can share no full block and leave one token to compute: nothing to publish.
        # Nor are blocks of a row that spills: they leave its table, and whoever found them would have no room for all.
        rings = any(rules.ring for rules in self.rules)
        self.prefix = prefix and bool(self.own) and not (rings or self.spills or self.lossy)
        assert not self.prefix or len({rules.size for rules in self.rules}) == 1, "prefix reuse needs one block size"
        deposits = Deposits(tier, len(self.groups)) if tier is not None and self.prefix else None
        if deposits is not None:
            for index, pool in enumerate(self._pools):
                pool.evicting = partial(deposits.evicted, index)
        prefixes = Prefixes(hasher)
        self._chains = Chains(self.rules, self._pools, prefixes, deposits)
        self._away = Away(self.pools[: self._kept], len(own))
        firsts = [next((self.groups[number] for number in levels), None) for levels in descents.below]
        longest = [rules.longest(first) for rules, first in zip(self.rules, firsts, strict=True)]
        self.capacity = min(longest, default=sys.maxsize)
        kept = self._kept
        self._sources = Sources(self.groups[kept:], self.pools[kept:], prefixes, share=self.prefix)

    @property
    def deposits(self) -> Deposits | None:
        """What is said to the tiers, where there are any and prefixes are shared."""
        return self._chains.deposits

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
        seat = Seat(len(self.own), len(self.below), self._chains.prefixes.root(root) if self.prefix else None)
        self._seats[row] = seat
        if seat.root is None:
            return 0
        seat.length = seat.reach = self._chains.claim(row, seat, tokens, _longest(tokens, most), fetch)
        return seat.length

    def fetch(self, tokens: Sequence[int], root: bytes, most: int | None = None) -> Fetch:
        """What the tiers have of these tokens and no pool does (``chains.py``); nothing moves before it is started."""
        return self._chains.fetch(tokens, root, _longest(tokens, most))

    def keys(self, tokens: Sequence[int], root: bytes) -> list[str]:
        """Under which keys the tiers have the whole blocks of these tokens."""
        return self._chains.keys(tokens, root)

    def fork(self, row: int, child: int, length: int) -> bool:
        """Seat ``child`` on the first ``length`` tokens of ``row``: blocks are shared until one of them writes.

        False, and nothing changed: a window of ``row`` has moved past what a query at ``length`` needs, or a cut has
        dropped it, or a policy watches the attention that blocks get, which is a row's own; or ``row`` is about to
        wake or to be loaded, and its blocks are empty until its next step.
        """
        seat = self._seat(row)
        if self._watched or self.waits(row) or any(hold.cut > length for hold in seat.holds):
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
        for rules, pool, old, new in zip(self.rules, self._pools, seat.holds, twin.holds, strict=True):
            rules.twin(old, new, length)
            for block in new.blocks:
                pool.acquire(block)
        one = any(rules.ring for rules in self.rules)
        end = seat.reach if one else self.rules[0].blocks(length) * self.rules[0].size
        twin.length, twin.reach = length, max(length, min(seat.reach, end))
        twin.tip, twin.tail = self._chains.history(seat, length)
        seat.since = NEVER
        self._seats[child] = twin
        return True

    def rewind(self, row: int, length: int) -> int:
        """Drop the tokens from ``length`` on; returns the length kept.

        It is 0 when a window has moved past what a query at ``length`` needs: the row is then empty, compute it anew.
        """
        seat = self._seat(row)
        assert not self.waits(row), "what was parked or stored comes back whole: rewind it after its next step"
        if length >= seat.length:
            return seat.length
        if length == 0 or not self._window_held(seat, length) or any(hold.cut > length for hold in seat.holds):
            self._release_all(seat)
            seat.restart()
            self.releases += 1
            return 0
        for rules, pool, hold in zip(self.rules, self._pools, seat.holds, strict=True):
            keep = rules.kept_by_rewind(hold, length)
            _release(pool, hold.blocks[keep:])
            hold.blocks = hold.blocks[:keep]
            if keep <= rules.sinks and not rules.ring and rules.scored is None:
                hold.gap = min(hold.gap, max(0, length // rules.size - rules.sinks))
        seat.tip, seat.tail = self._chains.history(seat, length)
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
            self._chains.withdraw(seat.tip)
            self._chains.withdraw(fetched)
        self._release_all(seat)
        if seat.source is not None:
            self._sources.release(seat.source, publish=publish)
        self._seats[row] = None
        self._away.waking.pop(row, None)  # it was about to wake: what is parked stays parked
        self.releases += 1

    def park(self, row: int) -> Parked:
        """A row leaves its seat and will have its blocks as they are again: they are copied out, then freed."""
        seat = self._seat(row)
        assert row in self._away.waking or not self.waits(row), "a row that waits for its blocks has nothing to copy"
        assert not self.spills, "what is spilled is not copied out: such a row is computed again"
        parked = self._away.park(row, seat)
        self.release(row)
        return parked

    def wake(self, row: int, parked: Parked) -> bool:
        """Seat a parked row where it stood; False, and no change: there is no room now."""
        assert self._seats[row] is None, f"seat {row} is taken"
        seat = self._seats[row] = self._away.wake(row, parked)
        return seat is not None

    def standing(self, row: int) -> Standing | None:
        """What the row holds, and where, for whoever reads it before the next step; None: it is not there yet."""
        if self.waits(row):
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
        begin = self._chains.prefixes.root(root) if self.prefix else None
        return self._away.adopt(tokens, begin, laid, below, source=source)

    def forget(self, parked: Parked) -> None:
        """A parked row will not come back."""
        self._away.forget(parked)

    @property
    def untold(self) -> list[int]:
        """Keys of parked rows that have yet to be copied out: with the next moves."""
        return [key for key, _ in self._away.park_next]

    @property
    def waking(self) -> list[int]:
        """Keys of parked rows that are seated again, and have yet to be copied in: with the next moves of their own."""
        return [each.parked.key for each in self._away.waking.values()]

    def held(self, row: int) -> list[int]:
        """Blocks that the row holds in each group, those of sources apart."""
        return [len(each.blocks) for each in self._seat(row).every]

    def survives(self, row: int) -> int:
        """Tokens from the row's start on that would still be known if it gave its blocks back: others hold them."""
        return self._chains.survives(self._seat(row))

    def known(self, tokens: Sequence[int], root: bytes) -> int:
        """Tokens of which an admission would find the blocks now."""
        start = self._chains.prefixes.root(root) if self.prefix else None
        return 0 if start is None else len(self._chains.find(start, tokens, len(tokens) - 1)) * self.rules[0].size

    def room(self, row: int) -> int:
        """Tokens until the row is cut next: no span goes further."""
        length = self._seat(row).length
        policies = [policy for rules in self.rules for policy in (rules.scored, rules.levels)]
        return min((policy.cut_after(length) for policy in policies if policy is not None), default=NEVER) - length

    def drop_prefixes(self) -> None:
        """Forget every published block (the weights changed); rows that are seated or parked now publish no more."""
        self._away.forget_prefixes()
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
        source = self._source(row)
        assert not source.written, "a source is written once"
        self._away.add_source(row, source.blocks)
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

    def reserve(self, spans: Spans) -> Placed | None:
        """Room for every span, or None and no change: a pool is too full.  At most one span per row."""
        seats = self._seats
        slow = []
        for span in spans:
            seat = seats[span[0]]
            assert seat is not None and span[1] == seat.length, f"span {span} does not start at its row's end"
            if span[2] != 1 or not seat.since <= span[1] < seat.fast:
                slow.append(span)
        moves = self._growth.grow(slow) if slow else self._no_moves()
        if moves is None:
            return None
        moves = self._away.told(moves, [span[0] for span in spans])
        if self.deposits is not None and self.deposits.pending:
            moves = moves._replace(store=self.deposits.stores(), load=self.deposits.loads())
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
                self._chains.publish_again(seat)
            seat.tail.extend(tokens)
            if len(seat.tail) >= self.rules[0].size:
                self._chains.publish(seat, seat.length if sure is None else sure)
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

    def waits(self, row: int) -> bool:
        """Are the row's blocks still empty?  It is about to wake, or to be given what the tiers had: with its step."""
        return row in self._away.waking or (self.deposits is not None and self.deposits.waits(row))

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
        return self._growth.needs(row, count)

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
            hits=self._chains.hits,
            misses=self._chains.misses,
            hit_tokens=self._chains.hit_tokens,
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

    # ------------------------------------------------------------ inside

    def _seat(self, row: int) -> Seat:
        seat = self._seats[row]
        assert seat is not None, f"seat {row} is empty"
        return seat

    def _release_all(self, seat: Seat) -> None:
        for hold, pool in zip(seat.every, self.pools, strict=False):
            _release(pool, hold.blocks)

    def _no_moves(self) -> Moves:
        nothing: tuple[()] = ()
        empty = (nothing,) * len(self.groups)
        return Moves(empty, empty)

    def _window_held(self, seat: Seat, length: int) -> bool:
        """Does every group still hold the keys that a query at position ``length`` needs?"""
        if length < seat.floor:
            return False
        holds = zip(self.rules, seat.holds, strict=True)
        return all(rules.holds_window(hold, seat.reach, length) for rules, hold in holds)

    def _place(
        self, seat: Seat, start: int, end: int, slots: tuple[list[int], ...], tables: tuple[list[list[int]], ...]
    ) -> None:
        """Slots of positions start .. end - 1, and how long the next tokens may take the fast way."""
        fast = NEVER
        for rules, hold, into, table in zip(self.rules, seat.holds, slots, tables, strict=False):
            most = rules.group.blocks_per_row
            assert len(hold.blocks) <= most, f"a row outgrows its {most} blocks"
            fast = min(fast, rules.slots(hold, start, end, into))
            table.append(hold.blocks)
        seat.since, seat.fast = end, fast

    def _check_hold(self, index: int, row: int, seat: Seat) -> None:
        hold, rules, where = seat.holds[index], self.rules[index], f"group {index}, row {row}"
        rules.check(hold, seat, where)
        if rules.ring or rules.scored is not None:
            return
        for place, block in enumerate(hold.blocks):
            logical = place if place < rules.sinks else place + hold.gap
            prefix = self.pools[index].prefixes[block]
            assert prefix is None or prefix.depth == logical + 1, f"{where}: block {block} is published elsewhere"


def _longest(tokens: Sequence[int], most: int | None) -> int:
    """Tokens that a hit covers at most: one is left to compute."""
    return len(tokens) - 1 if most is None else min(most, len(tokens) - 1)


def _release(pool: BlockPool, blocks: list[int]) -> None:
    for block in reversed(blocks):
        pool.release(block)


def _pool(group: Group) -> BlockPool:
    spilled = group.level is not None and group.level.spilled
    return LowestFirst(group.blocks) if spilled else BlockPool(group.blocks)
