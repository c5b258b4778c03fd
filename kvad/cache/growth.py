"""How rows get the blocks that their next tokens are written to: what is dropped, cut, cleared and copied for it.

Promises:

* a block that changes hands is in ``Moves.clear``, or is the target of a ``Moves.copy``;
* a block that two rows count on, or that is published, is never written: the writer gets a copy (copy-on-write).
  Slots behind the copied ones are empty; a writer that keeps a block after its sharer copied itself away may find
  slots of *later* positions in it.  No query sees those before this row has written over them: queries are causal.
  Where a policy sums up whole blocks (``policy.Quest``) it empties them before it writes;
* :meth:`Growth.grow` gives every span its blocks or changes nothing: :meth:`Growth.balance` counts as it does.

Integers only, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvad.cache.blocks import BlockPool
from kvad.cache.descent import Descended, Descents
from kvad.cache.rules import Rules
from kvad.cache.seats import Seat
from kvad.step import Compact, Moves

__all__ = ["Growth", "Span", "Spans"]


class Span(NamedTuple):
    """Write the tokens at positions ``start .. start + count - 1`` of a row; ``start`` is the row's length."""

    row: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody asks of a span


Spans = Sequence[Span] | Sequence[tuple[int, int, int]]


class Growth:
    """Of the rows in ``seats``.  ``pools``: of all groups; ``rules``: of those that take tokens, the first ones."""

    def __init__(
        self, rules: Sequence[Rules], pools: Sequence[BlockPool], seats: Sequence[Seat | None], descents: Descents
    ) -> None:
        self._rules, self._pools, self._seats, self.descents = tuple(rules), tuple(pools), seats, descents
        self._moved = any(each.scored or each.levels for each in rules)

    def grow(self, spans: Spans) -> Moves | None:
        """Drop what windows have passed, then give every span the blocks that it writes; None: a pool is too full."""
        moving = [(self._seat(row), start) for row, start, _ in spans] if any(r.levels for r in self._rules) else []
        if not all(self._enough(index, spans) for index in range(len(self._rules))):
            return None
        if not self.descents.enough(moving):
            return None
        num_groups = len(self._pools)
        clears: list[tuple[int, ...]] = [()] * num_groups
        copies: list[tuple[tuple[int, int, int], ...]] = [()] * num_groups
        compacts: list[tuple[Compact, ...]] = [()] * num_groups
        done = Descended(num_groups)
        for index, rules in enumerate(self._rules):
            cuts = self._cut(index, spans) if rules.scored is not None else ()
            for seat, start in moving:
                self.descents.descend(index, seat, start, done)
            clear, copy = self._grow(index, spans)
            clears[index], copies[index], compacts[index] = tuple(clear), tuple(copy), tuple(cuts)
        done.release()
        moves = Moves(tuple(clears), tuple(copies))
        return done.told(moves._replace(compact=tuple(compacts))) if self._moved else moves

    def needs(self, row: int, count: int) -> bool:
        """Do the row's next ``count`` tokens need blocks that it does not have?"""
        seat = self._seat(row)
        spans = [(row, seat.length, count)]
        if any(self.balance(index, spans) > 0 for index in range(len(self._rules))):
            return True
        return any(self.descents.need([(seat, seat.length)]))

    def balance(self, index: int, spans: Spans) -> int:
        """Blocks that :meth:`grow` would take of a group, less those it gives back first: it counts as that does, and
        changes nothing."""
        rules, pool, need, gain = self._rules[index], self._pools[index], 0, 0
        left: dict[int, int] = {}  # references after the releases counted so far
        for row, start, _ in spans:
            hold = self._seat(row).holds[index]
            sinks = rules.sinks
            passed = rules.passed(hold, start) or self.descents.leaving(index, hold, start)
            for block in hold.blocks[sinks : sinks + passed]:
                left[block] = left.get(block, pool.refs[block]) - 1
                gain += left[block] == 0
        for row, start, count in spans:
            hold = self._seat(row).holds[index]
            low, high = rules.touched(hold, start, start + count)
            kept = rules.stays(hold, start)
            if kept is not None:
                stay = rules.stay(kept)
                for place, block in enumerate(hold.blocks):
                    left[block] = left.get(block, pool.refs[block]) - 1
                    gain += left[block] == 0 and place >= stay
                    need += left[block] > 0 and place < stay
                need += 0 if rules.ring else max(0, rules.stay(kept + count) - stay)
                continue
            need += max(0, high - len(hold.blocks))
            for block in hold.blocks[low:high]:
                refs = left.get(block, pool.refs[block])
                if self.shared(pool, block, refs):
                    need += 1
                    left[block] = refs - 1
        return need - gain

    def shared(self, pool: BlockPool, block: int, refs: int) -> bool:
        """Must a writer copy this block first?  (Its own method, so that a test can break it.)"""
        return refs > 1 or pool.prefixes[block] is not None

    # ------------------------------------------------------------ inside

    def _seat(self, row: int) -> Seat:
        seat = self._seats[row]
        assert seat is not None, f"seat {row} is empty"
        return seat

    def _enough(self, index: int, spans: Spans) -> bool:
        """Would :meth:`_grow` find enough blocks?"""
        return self.balance(index, spans) <= self._pools[index].available

    def _grow(self, index: int, spans: Spans) -> tuple[list[int], list[tuple[int, int, int]]]:
        """(blocks to clear, copies to make) in one group."""
        rules, pool = self._rules[index], self._pools[index]
        clear: list[int] = []
        copy: list[tuple[int, int, int]] = []
        sources: list[int] = []  # given back last: Moves clears before it copies, so no source may be handed on here
        for row, start, _ in spans:
            hold = self._seat(row).holds[index]
            passed = rules.passed(hold, start)
            if passed:
                sinks = rules.sinks
                for block in hold.blocks[sinks : sinks + passed]:
                    pool.release(block)
                del hold.blocks[sinks : sinks + passed]
                hold.gap += passed
        for row, start, count in spans:
            seat = self._seat(row)
            hold = seat.holds[index]
            low, high = rules.touched(hold, start, start + count)
            for place in range(low, high):
                if place == len(hold.blocks):
                    hold.blocks.append(pool.take()[0])
                    clear.append(hold.blocks[place])
                    continue
                block = hold.blocks[place]
                shared = self.shared(pool, block, pool.refs[block])
                if not shared and not (rules.summed and seat.reach > start):
                    continue
                target = hold.blocks[place] = pool.take()[0] if shared else block
                kept = rules.before(hold, start, place)
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

    def _cut(self, index: int, spans: Spans) -> list[Compact]:
        """Cut the rows that have reached a length at which the policy cuts; a block that others count on is theirs.

        What a cut leaves is free at once: its contents are moved before anything else is (``Moves``).
        """
        rules, pool, cut = self._rules[index], self._pools[index], []
        for row, start, _ in spans:
            hold = self._seat(row).holds[index]
            kept = rules.stays(hold, start)
            if kept is None:
                continue
            stay = rules.stay(kept)
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
