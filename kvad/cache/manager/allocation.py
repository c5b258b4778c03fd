"""Block allocation for the next tokens of sequences: freeing, eviction, demotion, clearing and copy-on-write.

Under a tiered policy (``policy.TieredPolicy``), the blocks that are no longer recent leave the group that takes tokens
when a sequence's length reaches a multiple of ``interval``. They are quantized into blocks of the next level, or merged
into a few of its slots. What exceeds a level's size is demoted to the next one; after the last level it is dropped.

    recent 8, quantized 16, block size 4, 32 tokens:  blocks 6 7 unchanged | 2 3 4 5 quantized | 0 1 merged or dropped

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

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.block_pool import BlockPool
from kvad.cache.manager.prefix_history import PrefixHistory
from kvad.cache.manager.sequence_blocks import NEVER, BlockMapping, GroupBlocks, LevelBlocks, SequenceBlocks
from kvad.model_input import BlockOps, EvictOp, MergeOp


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


def max_blocks(group: CacheGroup, groups: Sequence[CacheGroup], length: int) -> int:
    """Return the maximum number of blocks that a sequence of ``length`` tokens holds in a group."""
    if group.lower_level is not None:
        policy = groups[group.lower_level.token_group].demotion_policy
        assert policy is not None
        length = max(0, length - policy.recent - policy.num_sinks)
    return min(-(-length // group.block_size), group.max_blocks_per_seq)


class DemotionOps:
    """Demotions of one step, per group, and the blocks that are freed after all sequences were demoted."""

    def __init__(self, groups: int) -> None:
        self.quantize: list[list[tuple[int, int]]] = [[] for _ in range(groups)]
        self.merge: list[list[MergeOp]] = [[] for _ in range(groups)]
        self.freed_later: list[tuple[BlockPool, int]] = []


class LevelDemotion:
    """Demotes blocks from the first ``num_token_groups`` groups to the lower groups behind them."""

    def __init__(self, groups: Sequence[CacheGroup], pools: Sequence[BlockPool], num_token_groups: int) -> None:
        self._groups, self._pools, self._num_token_groups = tuple(groups), tuple(pools), num_token_groups
        self._levels = {group_index: group.lower_level for group_index, group in enumerate(groups) if group.lower_level}
        self.lower_groups = tuple(
            tuple(group_index for group_index, level in self._levels.items() if level.token_group == index)
            for index in range(num_token_groups)
        )

    def num_leaving(self, index: int, group_blocks: GroupBlocks, start: int) -> int:
        """Return the number of blocks behind the sinks that leave group ``index`` at length ``start``."""
        group = self._groups[index]
        policy, size = group.demotion_policy, group.block_size
        if policy is None or group_blocks.last_eviction_length == start or start % policy.interval:
            return 0
        return max(0, (start - policy.recent) // size - policy.num_sinks // size - group_blocks.num_skipped_blocks)

    def blocks_needed(self, sequences: Sequence[tuple[SequenceBlocks, int]]) -> list[int]:
        """Return the number of blocks that ``demote`` would take from each lower group, those it frees not counted."""
        num_needed = [0] * len(self._levels)
        for index, lower_groups in enumerate(self.lower_groups):
            for sequence, start in sequences if lower_groups else ():
                num_demoted = self.num_leaving(index, sequence.groups[index], start)
                for group_index in lower_groups:
                    size, level = self._groups[group_index].block_size, self._levels[group_index]
                    level_index = group_index - self._num_token_groups
                    level_blocks = sequence.lower_levels[level_index]
                    if level.ratio > 1:
                        shared = self._is_shared(group_index, level_blocks) and num_demoted > 0
                        num_filled = level_blocks.num_used_slots + num_demoted * size // level.ratio
                        num_needed[level_index] += -(-num_filled // size) - len(level_blocks.blocks) + shared
                    else:
                        num_needed[level_index] += num_demoted
                        num_demoted = max(0, len(level_blocks.blocks) + num_demoted - level.max_blocks)
        return num_needed

    def demote(self, index: int, sequence: SequenceBlocks, start: int, ops: DemotionOps) -> None:
        """Demote the older blocks of one sequence.

        Blocks that leave the group ``index`` are freed at once, because ``BlockOps.quantize`` and ``merge`` read them
        before they are cleared. Blocks that leave a lower group are freed after all sequences were demoted, because
        quantizing another sequence's blocks would overwrite them.
        """
        group_blocks, group = sequence.groups[index], self._groups[index]
        num_demoted = self.num_leaving(index, group_blocks, start)
        if not num_demoted:
            return
        assert group.demotion_policy is not None
        sinks, group_blocks.last_eviction_length = group.demotion_policy.num_sinks // group.block_size, start
        leaving = group_blocks.blocks[sinks : sinks + num_demoted]
        del group_blocks.blocks[sinks : sinks + num_demoted]
        group_blocks.num_skipped_blocks += num_demoted
        for block in leaving:
            self._pools[index].decref(block)
        for group_index in self.lower_groups[index]:
            level_blocks = sequence.lower_levels[group_index - self._num_token_groups]
            if self._levels[group_index].ratio > 1:
                self._merge(group_index, level_blocks, leaving, ops)
                return
            leaving = self._quantize(group_index, level_blocks, leaving, ops)

    def _quantize(
        self, group_index: int, level_blocks: LevelBlocks, blocks: Sequence[int], ops: DemotionOps
    ) -> list[int]:
        """Quantize blocks into a lower group. Return the blocks that leave it for the next one."""
        allocated = [self._pools[group_index].allocate() for _ in blocks]
        ops.quantize[group_index].extend(zip(blocks, allocated, strict=True))
        level_blocks.blocks.extend(allocated)
        level_blocks.num_used_slots += len(allocated) * self._groups[group_index].block_size
        return self._drop_excess(group_index, level_blocks, ops)

    def _merge(self, group_index: int, level_blocks: LevelBlocks, blocks: Sequence[int], ops: DemotionOps) -> None:
        size, pool = self._groups[group_index].block_size, self._pools[group_index]
        for block in blocks:
            slot = level_blocks.num_used_slots % size
            if slot == 0:
                level_blocks.blocks.append(pool.allocate())
            source = level_blocks.blocks[-1]
            if self._is_shared(group_index, level_blocks):
                level_blocks.blocks[-1] = pool.allocate()
                ops.freed_later.append((pool, source))
            ops.merge[group_index].append(MergeOp(block, level_blocks.blocks[-1], slot, source))
            level_blocks.num_used_slots += size // self._levels[group_index].ratio
        self._drop_excess(group_index, level_blocks, ops)

    def _drop_excess(self, group_index: int, level_blocks: LevelBlocks, ops: DemotionOps) -> list[int]:
        """Drop the oldest blocks beyond the level's size and return them."""
        dropped = level_blocks.blocks[: max(0, len(level_blocks.blocks) - self._levels[group_index].max_blocks)]
        del level_blocks.blocks[: len(dropped)]
        level_blocks.num_used_slots -= len(dropped) * self._groups[group_index].block_size
        ops.freed_later.extend((self._pools[group_index], block) for block in dropped)
        return dropped

    def _is_shared(self, group_index: int, level_blocks: LevelBlocks) -> bool:
        """Return True if another sequence references the block that is being filled."""
        filling = level_blocks.num_used_slots % self._groups[group_index].block_size
        return bool(filling) and self._pools[group_index].refs[level_blocks.blocks[-1]] > 1


class BlockAllocator:
    """Allocates blocks to sequences.

    Args:
        mappings: Those of the groups that take tokens, which come first.
        pools: Those of all groups.
        sequences: The running sequences by their index.
        demotion: Demotion to lower groups.
        history: Gets the request for which blocks are evicted.
    """

    def __init__(
        self,
        mappings: Sequence[BlockMapping],
        pools: Sequence[BlockPool],
        sequences: Sequence[SequenceBlocks | None],
        demotion: LevelDemotion,
        history: PrefixHistory,
    ) -> None:
        self._history = history
        self._mappings, self._pools, self._sequences, self.demotion = tuple(mappings), tuple(pools), sequences, demotion
        self._evicts_or_demotes = any(mapping.eviction_policy or mapping.demotion_policy for mapping in mappings)

    def allocate(self, spans: TokenSpans) -> BlockOps | None:
        """Free blocks out of the window, evict and demote, then allocate the blocks that the spans write.

        Returns:
            The block operations, or None and no change if a pool is too full.
        """
        if any(need > pool.num_available for need, pool in zip(self.block_demand(spans), self._pools, strict=False)):
            return None
        num_groups = len(self._pools)
        clears: list[tuple[int, ...]] = [()] * num_groups
        copies: list[tuple[tuple[int, int, int], ...]] = [()] * num_groups
        evictions: list[tuple[EvictOp, ...]] = [()] * num_groups
        demotion_ops = DemotionOps(num_groups)
        for index, mapping in enumerate(self._mappings):
            evictions_in_group = self._evict(index, spans) if mapping.eviction_policy is not None else ()
            for seq_index, start, _ in spans if mapping.demotion_policy is not None else ():
                self.demotion.demote(index, self._sequence(seq_index), start, demotion_ops)
            clears[index], copies[index] = self._allocate(index, spans)
            evictions[index] = tuple(evictions_in_group)
        for pool, block in demotion_ops.freed_later:
            pool.decref(block)
        if not self._evicts_or_demotes:
            return BlockOps(tuple(clears), tuple(copies))
        return BlockOps(
            tuple(clears),
            tuple(copies),
            evict=tuple(evictions),
            quantize=tuple(map(tuple, demotion_ops.quantize)),
            merge=tuple(map(tuple, demotion_ops.merge)),
        )

    def place_tokens(self, spans: TokenSpans) -> tuple[tuple[list[int], ...], tuple[list[list[int]], ...]]:
        """Return the slots of the spans, and their block tables (see ``BlockAllocation``)."""
        num_token_groups, num_groups = len(self._mappings), len(self._pools)
        slots: tuple[list[int], ...] = tuple([] for _ in range(num_token_groups))
        tables: tuple[list[list[int]], ...] = tuple([] for _ in range(num_groups))
        pairs = [(group_slots.append, table.append) for group_slots, table in zip(slots, tables, strict=False)]
        for seq_index, start, count in spans:
            sequence, end = self._sequence(seq_index), start + count
            if count == 1 and sequence.fast_path_start <= start < sequence.fast_path_end:
                for group_blocks, (add_slot, add_table) in zip(sequence.groups, pairs, strict=True):
                    add_slot(group_blocks.slot_offset + start)
                    add_table(group_blocks.blocks)
            else:
                fast_path_end = NEVER
                groups = zip(self._mappings, sequence.groups, slots, tables, strict=False)
                for mapping, group_blocks, group_slots, table in groups:
                    limit = mapping.group.max_blocks_per_seq
                    assert len(group_blocks.blocks) <= limit, f"a sequence outgrows its {limit} blocks"
                    fast_path_end = min(fast_path_end, mapping.slots(group_blocks, start, end, group_slots))
                    table.append(group_blocks.blocks)
                sequence.fast_path_start, sequence.fast_path_end = end, fast_path_end
            for index, level in enumerate(sequence.lower_levels, num_token_groups):
                tables[index].append(level.blocks)
            first_cross = num_token_groups + len(sequence.lower_levels)
            if first_cross < num_groups:
                assert sequence.encoder_sequence is not None, f"sequence {seq_index} has no encoder input"
                for index, blocks in enumerate(sequence.encoder_sequence.blocks, first_cross):
                    tables[index].append(blocks)
            if end > sequence.num_written:
                sequence.num_written = end
        return slots, tables

    def block_demand(self, spans: TokenSpans) -> list[int]:
        """Return per token group and lower group the number of blocks that ``allocate`` must find."""
        demands = [self.net_block_demand(index, spans) for index in range(len(self._mappings))]
        starts = [(self._sequence(seq_index), start) for seq_index, start, _ in spans]
        return demands + self.demotion.blocks_needed(starts)

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

    def _allocate(self, index: int, spans: TokenSpans) -> tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]]:
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
            self._history.request_id = sequence.request_id
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
        return tuple(clear), tuple(copy)

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
