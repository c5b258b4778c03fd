"""Block allocation for the next tokens of sequences: freeing, eviction, demotion, clearing and copy-on-write.

Invariants:

* A block that changes its owner is in ``BlockOps.clear``, or is the target of a ``BlockOps.copy``.
* A shared or published block is never written: the writer gets a copy (copy-on-write). Slots behind the copied ones
  are empty. A writer that keeps a block after another sequence copied it may find slots of *later* positions in it.
  No query sees them before the sequence has overwritten them, because queries are causal. If blocks have key bounds
  (``policy.Quest``), the block is cleared before it is written.
* ``BlockAllocator.allocate`` gives every span its blocks or changes nothing;
  ``BlockAllocator.net_block_demand`` counts exactly as it allocates.

No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvad.cache.manager.block_mapping import BlockMapping
from kvad.cache.manager.block_pool import BlockPool
from kvad.cache.manager.demotion import DemotionOps, LevelDemotion
from kvad.cache.manager.sequence_blocks import NEVER, SequenceBlocks
from kvad.model_input import BlockOps, EvictOp


class TokenSpan(NamedTuple):
    """New tokens at positions ``start .. start + num_tokens - 1``; ``start`` is the sequence's length."""

    seq_index: int
    start: int
    num_tokens: int


class BlockAllocation(NamedTuple):
    """Slots and block tables of one step.

    Block tables are the manager's own lists, valid until its next call: do not store or change them.
    """

    block_ops: BlockOps
    slots: tuple[list[int], ...]  # per group that takes tokens: one slot per token, in the order of the spans
    # Per group (token groups, lower groups, cross-attention), per span: the blocks to read after this write.
    block_tables: tuple[list[list[int]], ...]
    num_lower_levels: int = 0  # number of lower groups


TokenSpans = Sequence[TokenSpan] | Sequence[tuple[int, int, int]]


class BlockAllocator:
    """Allocates blocks to sequences.

    Args:
        mappings: Those of the groups that take tokens, which come first.
        pools: Those of all groups.
        sequences: The running sequences by their index.
        demotion: Demotion to lower groups.
    """

    def __init__(
        self,
        mappings: Sequence[BlockMapping],
        pools: Sequence[BlockPool],
        sequences: Sequence[SequenceBlocks | None],
        demotion: LevelDemotion,
    ) -> None:
        self._mappings, self._pools, self._sequences, self.demotion = tuple(mappings), tuple(pools), sequences, demotion
        self._evicts_or_demotes = any(mapping.eviction_policy or mapping.demotion_policy for mapping in mappings)

    def allocate(self, spans: TokenSpans) -> BlockOps | None:
        """Free blocks out of the window, evict and demote, then allocate the blocks that the spans write.

        Returns:
            The block operations, or None and no change if a pool is too full.
        """
        demotes = any(mapping.demotion_policy for mapping in self._mappings)
        demoted = [(self._sequence(seq_index), start) for seq_index, start, _ in spans] if demotes else []
        if not all(self._has_blocks(index, spans) for index in range(len(self._mappings))):
            return None
        if not self.demotion.has_room(demoted):
            return None
        num_groups = len(self._pools)
        clears: list[tuple[int, ...]] = [()] * num_groups
        copies: list[tuple[tuple[int, int, int], ...]] = [()] * num_groups
        evictions: list[tuple[EvictOp, ...]] = [()] * num_groups
        demotion_ops = DemotionOps(num_groups)
        for index, mapping in enumerate(self._mappings):
            evictions_in_group = self._evict(index, spans) if mapping.eviction_policy is not None else ()
            for sequence, start in demoted:
                self.demotion.demote(index, sequence, start, demotion_ops)
            clear, copy = self._allocate(index, spans)
            clears[index], copies[index], evictions[index] = tuple(clear), tuple(copy), tuple(evictions_in_group)
        demotion_ops.release()
        block_ops = BlockOps(tuple(clears), tuple(copies))
        if not self._evicts_or_demotes:
            return block_ops
        return demotion_ops.attach_to_ops(block_ops._replace(evict=tuple(evictions)))

    def place_tokens(self, spans: TokenSpans) -> tuple[tuple[list[int], ...], tuple[list[list[int]], ...]]:
        """Return the slots of the spans, and their block tables (see ``BlockAllocation``)."""
        num_token_groups, num_groups = len(self._mappings), len(self._pools)
        slots: tuple[list[int], ...] = tuple([] for _ in range(num_token_groups))
        tables: tuple[list[list[int]], ...] = tuple([] for _ in range(num_groups))
        pairs = [(group_slots.append, table.append) for group_slots, table in zip(slots, tables, strict=False)]
        for seq_index, start, count in spans:
            sequence = self._sequence(seq_index)
            if count == 1 and sequence.fast_path_start <= start < sequence.fast_path_end:
                for group_blocks, (add_slot, add_table) in zip(sequence.groups, pairs, strict=True):
                    add_slot(group_blocks.slot_offset + start)
                    add_table(group_blocks.blocks)
            else:
                self._place_span(sequence, start, start + count, slots, tables)
            for index, level in enumerate(sequence.lower_levels, num_token_groups):
                tables[index].append(level.blocks)
            first_cross = num_token_groups + len(sequence.lower_levels)
            if first_cross < num_groups:
                assert sequence.encoder_sequence is not None, f"sequence {seq_index} has no encoder input"
                for index, blocks in enumerate(sequence.encoder_sequence.blocks, first_cross):
                    tables[index].append(blocks)
            if start + count > sequence.num_written:
                sequence.num_written = start + count
        return slots, tables

    def _place_span(
        self,
        sequence: SequenceBlocks,
        start: int,
        end: int,
        slots: tuple[list[int], ...],
        tables: tuple[list[list[int]], ...],
    ) -> None:
        """Append the slots of positions start .. end - 1, and compute the end of the fast path."""
        fast_path_end = NEVER
        groups = zip(self._mappings, sequence.groups, slots, tables, strict=False)
        for mapping, group_blocks, group_slots, table in groups:
            limit = mapping.group.max_blocks_per_seq
            assert len(group_blocks.blocks) <= limit, f"a sequence outgrows its {limit} blocks"
            fast_path_end = min(fast_path_end, mapping.slots(group_blocks, start, end, group_slots))
            table.append(group_blocks.blocks)
        sequence.fast_path_start, sequence.fast_path_end = end, fast_path_end

    def needs_blocks(self, seq_index: int, count: int) -> bool:
        sequence = self._sequence(seq_index)
        spans = [(seq_index, sequence.length, count)]
        if any(self.net_block_demand(index, spans) > 0 for index in range(len(self._mappings))):
            return True
        return any(self.demotion.blocks_needed([(sequence, sequence.length)]))

    def net_block_demand(self, index: int, spans: TokenSpans) -> int:
        """Return the number of blocks that ``allocate`` would take from a group, less those it frees first."""
        mapping, pool, need, freed = self._mappings[index], self._pools[index], 0, 0
        refs_left: dict[int, int] = {}  # references after the blocks counted so far are freed
        for seq_index, start, _ in spans:
            group_blocks = self._sequence(seq_index).groups[index]
            sinks, num_passed = mapping.num_sink_blocks, mapping.blocks_out_of_window(group_blocks, start)
            num_passed = num_passed or self.demotion.num_leaving(index, group_blocks, start)
            for block in group_blocks.blocks[sinks : sinks + num_passed]:
                refs_left[block] = refs_left.get(block, pool.refs[block]) - 1
                freed += refs_left[block] == 0
        for seq_index, start, count in spans:
            group_blocks = self._sequence(seq_index).groups[index]
            first, stop = mapping.written_blocks(group_blocks, start, start + count)
            retained_slots = mapping.num_slots_to_keep(group_blocks, start)
            if retained_slots is not None:
                retained_blocks = mapping.num_blocks_to_keep(retained_slots)
                for index_in_sequence, block in enumerate(group_blocks.blocks):
                    refs_left[block] = refs_left.get(block, pool.refs[block]) - 1
                    freed += refs_left[block] == 0 and index_in_sequence >= retained_blocks
                    need += refs_left[block] > 0 and index_in_sequence < retained_blocks
                if not mapping.is_ring:
                    need += max(0, mapping.num_blocks_to_keep(retained_slots + count) - retained_blocks)
                continue
            need += max(0, stop - len(group_blocks.blocks))
            for block in group_blocks.blocks[first:stop]:
                refs = refs_left.get(block, pool.refs[block])
                if self.is_shared(pool, block, refs):
                    need += 1
                    refs_left[block] = refs - 1
        return need - freed

    def is_shared(self, pool: BlockPool, block: int, refs: int) -> bool:
        """Return True if a writer must copy this block first (a method, so that a test can break it)."""
        return refs > 1 or pool.prefixes[block] is not None

    def _sequence(self, seq_index: int) -> SequenceBlocks:
        sequence = self._sequences[seq_index]
        assert sequence is not None, f"no sequence has index {seq_index}"
        return sequence

    def _has_blocks(self, index: int, spans: TokenSpans) -> bool:
        """Return True if ``_allocate`` would find enough blocks."""
        return self.net_block_demand(index, spans) <= self._pools[index].num_available

    def _allocate(self, index: int, spans: TokenSpans) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Allocate in one group. Return the blocks to clear and the copies (source, target, slots)."""
        mapping, pool = self._mappings[index], self._pools[index]
        clear: list[int] = []
        copy: list[tuple[int, int, int]] = []
        # Freed last: BlockOps clears before it copies, so no source may be allocated again here.
        copied_blocks: list[int] = []
        for seq_index, start, _ in spans:
            group_blocks = self._sequence(seq_index).groups[index]
            num_passed = mapping.blocks_out_of_window(group_blocks, start)
            passed = slice(mapping.num_sink_blocks, mapping.num_sink_blocks + num_passed)
            for block in group_blocks.blocks[passed]:
                pool.decref(block)
            del group_blocks.blocks[passed]
            group_blocks.num_skipped_blocks += num_passed
        for seq_index, start, count in spans:
            sequence = self._sequence(seq_index)
            group_blocks = sequence.groups[index]
            first, stop = mapping.written_blocks(group_blocks, start, start + count)
            for index_in_sequence in range(first, stop):
                if index_in_sequence == len(group_blocks.blocks):
                    group_blocks.blocks.append(pool.allocate())
                    clear.append(group_blocks.blocks[index_in_sequence])
                    continue
                block = group_blocks.blocks[index_in_sequence]
                shared = self.is_shared(pool, block, pool.refs[block])
                if not shared and not (mapping.has_block_bounds and sequence.num_written > start):
                    continue
                target = group_blocks.blocks[index_in_sequence] = pool.allocate() if shared else block
                retained_slots = mapping.filled_slots(group_blocks, start, index_in_sequence)
                if retained_slots:
                    copy.append((block, target, retained_slots))
                else:
                    clear.append(target)
                if not shared:
                    continue
                if pool.refs[block] > 1:
                    pool.decref(block)
                else:
                    copied_blocks.append(block)
        for block in copied_blocks:
            pool.decref(block)
        return clear, copy

    def _evict(self, index: int, spans: TokenSpans) -> list[EvictOp]:
        """Evict from the sequences that reached a length at which the policy evicts; shared blocks are replaced.

        Blocks are freed at once: ``BlockOps`` moves their contents before any other operation.
        """
        mapping, pool, evicting = self._mappings[index], self._pools[index], []
        for seq_index, start, _ in spans:
            group_blocks = self._sequence(seq_index).groups[index]
            retained_slots = mapping.num_slots_to_keep(group_blocks, start)
            if retained_slots is None:
                continue
            retained_blocks = mapping.num_blocks_to_keep(retained_slots)
            reused = [block if pool.refs[block] == 1 else None for block in group_blocks.blocks[:retained_blocks]]
            for block in group_blocks.blocks:
                if block not in reused:
                    pool.decref(block)
            evicting.append((seq_index, start, group_blocks, retained_slots, reused))
        ops = []
        # After all have freed: one may need a block of another.
        for seq_index, start, group_blocks, retained_slots, reused in evicting:
            num_held, blocks = start - group_blocks.num_evicted_tokens, tuple(group_blocks.blocks)
            group_blocks.blocks = [pool.allocate() if block is None else block for block in reused]
            group_blocks.num_evicted_tokens, group_blocks.last_eviction_length = start - retained_slots, start
            ops.append(EvictOp(seq_index, start, blocks, num_held, retained_slots, tuple(group_blocks.blocks)))
        return ops
