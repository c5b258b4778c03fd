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

from kvad.cache.manager.block_mapping import BlockMapping
from kvad.cache.manager.block_pool import BlockPool
from kvad.cache.manager.demotion import DemotionOps, LevelDemotion
from kvad.cache.manager.sequence_blocks import SequenceBlocks
from kvad.model_input import BlockOps, EvictOp


class TokenSpan(NamedTuple):
    """Write the tokens at positions ``start .. start + count - 1`` of a row; ``start`` is the row's length."""

    seq_index: int
    start: int
    num_tokens: int


TokenSpans = Sequence[TokenSpan] | Sequence[tuple[int, int, int]]


class BlockAllocator:
    """Of the rows in ``seats``.  ``pools``: of all groups; ``rules``: of those that take tokens, the first ones."""

    def __init__(
        self,
        mappings: Sequence[BlockMapping],
        pools: Sequence[BlockPool],
        sequences: Sequence[SequenceBlocks | None],
        descents: LevelDemotion,
    ) -> None:
        self._mappings, self._pools, self._sequences, self.descents = tuple(mappings), tuple(pools), sequences, descents
        self._moved = any(each.eviction_policy or each.demotion_policy for each in mappings)

    def allocate(self, spans: TokenSpans) -> BlockOps | None:
        """Drop what windows have passed, then give every span the blocks that it writes; None: a pool is too full."""
        moving = (
            [(self._seat(row), start) for row, start, _ in spans]
            if any(r.demotion_policy for r in self._mappings)
            else []
        )
        if not all(self._enough(index, spans) for index in range(len(self._mappings))):
            return None
        if not self.descents.has_room(moving):
            return None
        num_groups = len(self._pools)
        clears: list[tuple[int, ...]] = [()] * num_groups
        copies: list[tuple[tuple[int, int, int], ...]] = [()] * num_groups
        compacts: list[tuple[EvictOp, ...]] = [()] * num_groups
        done = DemotionOps(num_groups)
        for index, rules in enumerate(self._mappings):
            cuts = self._cut(index, spans) if rules.eviction_policy is not None else ()
            for seat, start in moving:
                self.descents.demote(index, seat, start, done)
            clear, copy = self._allocate(index, spans)
            clears[index], copies[index], compacts[index] = tuple(clear), tuple(copy), tuple(cuts)
        done.release()
        moves = BlockOps(tuple(clears), tuple(copies))
        return done.attach_to_ops(moves._replace(evict=tuple(compacts))) if self._moved else moves

    def needs_blocks(self, row: int, count: int) -> bool:
        """Do the row's next ``count`` tokens need blocks that it does not have?"""
        seat = self._seat(row)
        spans = [(row, seat.length, count)]
        if any(self.net_block_demand(index, spans) > 0 for index in range(len(self._mappings))):
            return True
        return any(self.descents.blocks_needed([(seat, seat.length)]))

    def net_block_demand(self, index: int, spans: TokenSpans) -> int:
        """Blocks that :meth:`grow` would take of a group, less those it gives back first: it counts as that does, and
        changes nothing."""
        rules, pool, need, gain = self._mappings[index], self._pools[index], 0, 0
        left: dict[int, int] = {}  # references after the releases counted so far
        for row, start, _ in spans:
            hold = self._seat(row).groups[index]
            sinks = rules.num_sink_blocks
            passed = rules.blocks_out_of_window(hold, start) or self.descents.num_leaving(index, hold, start)
            for block in hold.blocks[sinks : sinks + passed]:
                left[block] = left.get(block, pool.refs[block]) - 1
                gain += left[block] == 0
        for row, start, count in spans:
            hold = self._seat(row).groups[index]
            low, high = rules.written_blocks(hold, start, start + count)
            kept = rules.num_slots_to_keep(hold, start)
            if kept is not None:
                stay = rules.num_blocks_to_keep(kept)
                for place, block in enumerate(hold.blocks):
                    left[block] = left.get(block, pool.refs[block]) - 1
                    gain += left[block] == 0 and place >= stay
                    need += left[block] > 0 and place < stay
                need += 0 if rules.is_ring else max(0, rules.num_blocks_to_keep(kept + count) - stay)
                continue
            need += max(0, high - len(hold.blocks))
            for block in hold.blocks[low:high]:
                refs = left.get(block, pool.refs[block])
                if self.is_shared(pool, block, refs):
                    need += 1
                    left[block] = refs - 1
        return need - gain

    def is_shared(self, pool: BlockPool, block: int, refs: int) -> bool:
        """Must a writer copy this block first?  (Its own method, so that a test can break it.)"""
        return refs > 1 or pool.prefixes[block] is not None

    # ------------------------------------------------------------ inside

    def _seat(self, row: int) -> SequenceBlocks:
        seat = self._sequences[row]
        assert seat is not None, f"seat {row} is empty"
        return seat

    def _enough(self, index: int, spans: TokenSpans) -> bool:
        """Would :meth:`_grow` find enough blocks?"""
        return self.net_block_demand(index, spans) <= self._pools[index].num_available

    def _allocate(self, index: int, spans: TokenSpans) -> tuple[list[int], list[tuple[int, int, int]]]:
        """(blocks to clear, copies to make) in one group."""
        rules, pool = self._mappings[index], self._pools[index]
        clear: list[int] = []
        copy: list[tuple[int, int, int]] = []
        sources: list[int] = []  # given back last: Moves clears before it copies, so no source may be handed on here
        for row, start, _ in spans:
            hold = self._seat(row).groups[index]
            passed = rules.blocks_out_of_window(hold, start)
            if passed:
                sinks = rules.num_sink_blocks
                for block in hold.blocks[sinks : sinks + passed]:
                    pool.decref(block)
                del hold.blocks[sinks : sinks + passed]
                hold.num_skipped_blocks += passed
        for row, start, count in spans:
            seat = self._seat(row)
            hold = seat.groups[index]
            low, high = rules.written_blocks(hold, start, start + count)
            for place in range(low, high):
                if place == len(hold.blocks):
                    hold.blocks.append(pool.allocate()[0])
                    clear.append(hold.blocks[place])
                    continue
                block = hold.blocks[place]
                shared = self.is_shared(pool, block, pool.refs[block])
                if not shared and not (rules.has_block_bounds and seat.num_written > start):
                    continue
                target = hold.blocks[place] = pool.allocate()[0] if shared else block
                kept = rules.filled_slots(hold, start, place)
                if kept:
                    copy.append((block, target, kept))
                else:
                    clear.append(target)
                if not shared:
                    continue
                if pool.refs[block] > 1:
                    pool.decref(block)
                else:
                    sources.append(block)
        for block in sources:
            pool.decref(block)
        return clear, copy

    def _cut(self, index: int, spans: TokenSpans) -> list[EvictOp]:
        """Cut the rows that have reached a length at which the policy cuts; a block that others count on is theirs.

        What a cut leaves is free at once: its contents are moved before anything else is (``Moves``).
        """
        rules, pool, cut = self._mappings[index], self._pools[index], []
        for row, start, _ in spans:
            hold = self._seat(row).groups[index]
            kept = rules.num_slots_to_keep(hold, start)
            if kept is None:
                continue
            stay = rules.num_blocks_to_keep(kept)
            own = [block if pool.refs[block] == 1 else None for block in hold.blocks[:stay]]
            for block, same in zip(hold.blocks, [*own, *[None] * (len(hold.blocks) - stay)], strict=True):
                if same is None:
                    pool.decref(block)
            cut.append((row, start, hold, kept, own))
        made = []
        for row, start, hold, kept, own in cut:  # when all have given back: one may need what another leaves
            held, blocks = start - hold.num_evicted_tokens, tuple(hold.blocks)
            hold.blocks = [pool.allocate()[0] if block is None else block for block in own]
            hold.num_evicted_tokens, hold.last_eviction_length = start - kept, start
            made.append(EvictOp(row, start, blocks, held, kept, tuple(hold.blocks)))
        return made
