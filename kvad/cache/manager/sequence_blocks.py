"""A sequence's blocks in every cache group, while it runs and while it is swapped out.

``BlockMapping`` maps positions to the blocks that a sequence holds, needs, writes and frees in one group. It depends
only on the group, a ``GroupBlocks`` and lengths, and allocates nothing (``kv_cache_manager.py`` has an example).

    swap_out         blocks are copied to the host, then freed
    swap_in          as many blocks are allocated, and filled in the sequence's next step
    import_sequence  a sequence from another cache is treated as if it had been swapped out here

Copies and drops are added to the next BlockOps (``SwappedSequences.attach_to_ops``); a swap-in is added to those of
the sequence's own step. A step that fails ends its sequences, so none continues with blocks that were never filled.

Invariant: a key is used once. No torch.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.block_pool import BlockPool
from kvad.cache.manager.encoder_blocks import EncoderSequence
from kvad.cache.manager.prefix_index import PrefixNode
from kvad.model_input import BlockOps

NEVER = 1 << 62


@dataclass(slots=True, eq=False)
class GroupBlocks:
    """Blocks of one sequence in one group that takes tokens."""

    blocks: list[int] = field(default_factory=list)
    num_skipped_blocks: int = 0  # logical blocks behind the sinks that were freed
    num_evicted_tokens: int = 0  # tokens that evictions dropped
    last_eviction_length: int = 0  # length of the sequence at the last eviction or demotion
    slot_offset: int = 0  # slot = position + slot_offset in the block that is being written


@dataclass(slots=True, eq=False)
class LevelBlocks:
    """Blocks of one sequence in a lower group, and the number of their filled slots."""

    blocks: list[int] = field(default_factory=list)
    num_used_slots: int = 0


class SequenceBlocks:
    """Blocks of one running sequence.

    Attributes:
        length: Number of committed tokens.
        num_written: End of the furthest write, committed or not.
        last_block: Prefix of the last full block; None if the sequence publishes nothing.
        tail_tokens: Tokens behind the last full block.
        fast_path_start: A single token at a position in ``fast_path_start .. fast_path_end - 1`` is written at
            ``position + slot_offset`` in every group, and nothing else has to be done for it.
        republish: The sequence was swapped in; its published prefix is published again once its blocks are filled.
        min_truncate_length: Shortest length to truncate to. Blocks of an imported sequence have empty slots that
            only queries from this position on do not read.
        request_id: Request of the sequence, for ``PrefixHistory``; -1 if it is unknown.
    """

    def __init__(self, num_groups: int, num_levels: int, root: PrefixNode | None, request_id: int = -1) -> None:
        self._num_groups, self._num_levels, self.root, self.request_id = num_groups, num_levels, root, request_id
        self.encoder_sequence: EncoderSequence | None = None
        self.reset()

    @property
    def all_groups(self) -> tuple[GroupBlocks | LevelBlocks, ...]:
        """Blocks in the order of the groups, lower groups last."""
        return *self.groups, *self.lower_levels

    def reset(self) -> None:
        """Make the sequence empty. The caller has freed its blocks."""
        self.length = self.num_written = self.fast_path_end = self.min_truncate_length = 0
        self.fast_path_start = NEVER
        self.republish = False
        self.last_block = self.root
        self.tail_tokens: list[int] = []
        self.groups = tuple(GroupBlocks() for _ in range(self._num_groups))
        self.lower_levels = tuple(LevelBlocks() for _ in range(self._num_levels))

    def copy(self) -> SequenceBlocks:
        """Return a copy with separate lists and without encoder input."""
        sequence = copy(self)
        sequence.encoder_sequence, sequence.tail_tokens = None, list(self.tail_tokens)
        sequence.groups = tuple(replace(group, blocks=list(group.blocks)) for group in self.groups)
        sequence.lower_levels = tuple(replace(level, blocks=list(level.blocks)) for level in self.lower_levels)
        return sequence


def block_index(logical: int, num_sinks: int, num_skipped_blocks: int) -> int | None:
    """Return the index of a logical block in its sequence's list, or None if it was freed."""
    if logical < num_sinks:
        return logical
    return None if logical < num_sinks + num_skipped_blocks else logical - num_skipped_blocks


def ring_offset(block: int, block_size: int, num_sinks: int, position: int) -> tuple[int, int]:
    """Map positions to slots in a ring, the only block of a contiguous sequence.

        size 8, 2 sinks:  0 1 | 2 3 4 5 6 7, then 8..13 overwrite 2..7

    Returns:
        (offset, stop): positions from ``position`` to ``stop - 1`` are stored at ``offset + position``.
    """
    if position < num_sinks:
        return block * block_size, block_size
    ring_size = block_size - num_sinks
    rounds = (position - num_sinks) // ring_size
    return block * block_size - rounds * ring_size, num_sinks + (rounds + 1) * ring_size


def num_sinks(group: CacheGroup) -> int:
    """Return the number of tokens that always stay at the start."""
    if group.demotion_policy is not None:
        return group.demotion_policy.num_sinks
    return group.spec.pattern.num_sinks


class BlockMapping:
    """Maps the positions of a sequence to its blocks in one group.

    Attributes:
        is_ring: A sequence has one block, a ring behind its sinks.
        num_sink_blocks: Number of blocks that hold sinks.
        window: Number of visible tokens, or NEVER.
        has_block_bounds: Blocks have key bounds (Quest), so a block is cleared before it is written again.
    """

    def __init__(self, group: CacheGroup) -> None:
        self.group, self.block_size = group, group.block_size
        self.is_ring = group.max_blocks_per_seq == 1
        self.pattern = group.spec.pattern
        self.window = NEVER if self.pattern.window is None else self.pattern.window
        self.eviction_policy, self.demotion_policy = group.eviction_policy, group.demotion_policy
        self.num_sink_blocks = self.num_blocks(num_sinks(group))
        self.has_block_bounds = group.sparse_read_policy is not None

    def num_blocks(self, slots: int) -> int:
        return -(-slots // self.block_size)

    def max_length(self, first_lower_group: CacheGroup | None) -> int:
        """Return the length of the longest sequence that the group can hold when no other sequence runs."""
        group = self.group
        bounded = group.spec.window is not None or group.eviction_policy is not None
        if bounded and group.num_usable_blocks >= group.max_blocks_per_seq:
            return sys.maxsize
        if group.demotion_policy is not None:
            if group.demotion_policy.quantized != -1:
                return sys.maxsize
            if group.num_usable_blocks < group.max_blocks_per_seq:
                return group.num_usable_blocks * group.block_size
            assert first_lower_group is not None, "a tiered policy has at least one lower group"
            num_lower_blocks = min(first_lower_group.num_usable_blocks, first_lower_group.max_blocks_per_seq)
            num_undemoted = group.demotion_policy.recent + group.demotion_policy.num_sinks
            return num_undemoted + num_lower_blocks * group.block_size
        return min(group.num_usable_blocks, group.max_blocks_per_seq) * group.block_size

    def first_needed(self, start: int) -> int:
        """Return the first logical block behind the sinks that a query at position ``start`` can see."""
        if self.window == NEVER:
            return 0
        return max(self.pattern.first_visible(start) // self.block_size, self.num_sink_blocks)

    def blocks_out_of_window(self, group_blocks: GroupBlocks, start: int) -> int:
        """Return the number of blocks behind the sinks that no query from ``start`` on can see."""
        if self.is_ring or self.window == NEVER:
            return 0
        num_passed = self.first_needed(start) - self.num_sink_blocks - group_blocks.num_skipped_blocks
        return max(0, min(len(group_blocks.blocks) - self.num_sink_blocks, num_passed))

    def has_window(self, group_blocks: GroupBlocks, num_written: int, length: int) -> bool:
        """Return True if the keys that a query at position ``length`` needs are still held."""
        needed = self.pattern.first_visible(length)
        if needed >= length or self.demotion_policy is not None:
            return True  # It sees only itself and sinks; or the demoted tokens are in lower groups.
        if self.is_ring:
            ring_size = self.block_size - self.pattern.num_sinks
            return num_written <= self.block_size or num_written - ring_size <= needed
        num_skipped = group_blocks.num_skipped_blocks
        return not num_skipped or (num_skipped + self.num_sink_blocks) * self.block_size <= needed

    def written_blocks(self, group_blocks: GroupBlocks, start: int, end: int) -> tuple[int, int]:
        """Return the range [low, high) of block indices, new ones included, that positions start .. end - 1 write."""
        if self.is_ring:
            return 0, 1
        size, num_evicted = self.block_size, group_blocks.num_evicted_tokens
        num_skipped = group_blocks.num_skipped_blocks if start // size >= self.num_sink_blocks else 0
        return (start - num_evicted) // size - num_skipped, (end - num_evicted - 1) // size + 1 - num_skipped

    def filled_slots(self, group_blocks: GroupBlocks, start: int, index: int) -> int:
        """Return the number of filled slots in block ``index`` before ``start`` is written."""
        if self.is_ring:
            return min(start - group_blocks.num_evicted_tokens, self.block_size)
        num_skipped = group_blocks.num_skipped_blocks if index >= self.num_sink_blocks else 0
        return max(0, start - group_blocks.num_evicted_tokens - (index + num_skipped) * self.block_size)

    def num_slots_to_keep(self, group_blocks: GroupBlocks, start: int) -> int | None:
        """Return the number of slots that stay if an eviction is due at length ``start``, else None."""
        policy = self.eviction_policy
        if policy is None or group_blocks.last_eviction_length == start or not policy.evicts_at(start):
            return None
        return min(policy.budget, start - group_blocks.num_evicted_tokens)

    def num_blocks_to_keep(self, num_slots: int) -> int:
        """Return the number of blocks that stay when an eviction keeps ``num_slots`` slots."""
        return 1 if self.is_ring else self.num_blocks(num_slots)

    def blocks_after_truncate(self, group_blocks: GroupBlocks, length: int) -> int:
        """Return the number of blocks that stay when the sequence is truncated to ``length`` tokens."""
        if self.is_ring:
            return len(group_blocks.blocks)
        if self.eviction_policy is not None:
            return self.num_blocks(length - group_blocks.num_evicted_tokens)
        stop, sinks = self.num_blocks(length), self.num_sink_blocks
        return stop if stop <= sinks else max(sinks, stop - group_blocks.num_skipped_blocks)

    def copy_for_fork(self, old: GroupBlocks, new: GroupBlocks, length: int) -> None:
        """Copy to ``new`` the blocks of the first ``length`` tokens that a query at ``length`` needs."""
        new.num_evicted_tokens, new.last_eviction_length = old.num_evicted_tokens, old.last_eviction_length
        if self.is_ring:
            new.blocks = list(old.blocks) if length else []
            return
        if self.eviction_policy is not None:
            new.blocks = old.blocks[: self.num_blocks(length - old.num_evicted_tokens)]
            return
        sinks, stop, num_skipped = self.num_sink_blocks, self.num_blocks(length), old.num_skipped_blocks
        first = max(sinks + num_skipped, self.first_needed(length))
        new.num_skipped_blocks = first - sinks
        new.blocks = old.blocks[: min(sinks, stop)] + old.blocks[first - num_skipped : max(0, stop - num_skipped)]
        if len(new.blocks) <= sinks:
            new.num_skipped_blocks = max(0, length // self.block_size - sinks)

    def slots(self, group_blocks: GroupBlocks, start: int, end: int, slots: list[int]) -> int:
        """Append the slots of positions start .. end - 1.

        Returns:
            The end of the fast path: up to it, single tokens need no new block and no eviction.
        """
        size, num_held = self.block_size, end - group_blocks.num_evicted_tokens
        if self.eviction_policy is None:
            num_held = self.pattern.num_sinks + self.window + end - start - 1
        assert not self.is_ring or end <= size or num_held <= size, "a span outgrows a ring"
        fast_path_end = self.append_slots(group_blocks, start, end, slots)  # End of the block that is being written,
        if not self.is_ring and self.window != NEVER:  # or before its first block leaves the window,
            num_passed = group_blocks.num_skipped_blocks + self.num_sink_blocks + 1
            end_of_window = num_passed * size + self.window - self.pattern.window_step
            fast_path_end = min(fast_path_end, end_of_window)
        policy = self.eviction_policy or self.demotion_policy  # or before the next eviction
        return fast_path_end if policy is None else min(fast_path_end, policy.next_trigger_length(start))

    def append_slots(self, group_blocks: GroupBlocks, start: int, end: int, slots: list[int]) -> int:
        """Append the slots of positions start .. end - 1. Return the first position behind the last one's block."""
        size, num_evicted = self.block_size, group_blocks.num_evicted_tokens
        position = stop = start
        while position < end:
            if self.is_ring and self.eviction_policy is None:
                offset, stop = ring_offset(group_blocks.blocks[0], size, self.pattern.num_sinks, position)
            else:
                logical = (position - num_evicted) // size
                stop = (logical + 1) * size + num_evicted
                index = logical if logical < self.num_sink_blocks else logical - group_blocks.num_skipped_blocks
                offset = (group_blocks.blocks[index] - logical) * size - num_evicted
            slots.extend(range(offset + position, offset + min(stop, end)))
            group_blocks.slot_offset, position = offset, min(stop, end)
        return stop

    def check(self, group_blocks: GroupBlocks, sequence: SequenceBlocks, pool: BlockPool, label: str) -> None:
        """Assert that a sequence holds the blocks that its next query needs, in a valid table."""
        size, blocks, sinks = self.block_size, group_blocks.blocks, self.num_sink_blocks
        length, num_skipped = sequence.length, group_blocks.num_skipped_blocks
        assert len(set(blocks)) == len(blocks), f"{label}: a block is twice in its table"
        assert len(blocks) <= self.group.max_blocks_per_seq, f"{label}: more blocks than a sequence may have"
        assert length <= sequence.num_written, f"{label}: committed {length}, wrote up to {sequence.num_written}"
        if self.is_ring:
            assert num_skipped == 0 and len(blocks) == bool(length or blocks), f"{label}: its ring is invalid"
            return
        if self.eviction_policy is not None:
            num_held = length - group_blocks.num_evicted_tokens
            assert num_held <= len(blocks) * size, f"{label}: {num_held} slots in {len(blocks)} blocks"
            return
        if self.demotion_policy is None:
            needed = self.pattern.first_visible(length)
        else:
            needed = max(0, group_blocks.last_eviction_length - self.demotion_policy.recent)
        if needed < length:  # Otherwise its next query sees only itself and sinks.
            end = (num_skipped + len(blocks)) * size
            assert not num_skipped or (num_skipped + sinks) * size <= needed, f"{label}: its window is not held"
            assert end >= length, f"{label}: {length} tokens, blocks up to {end}"
        assert not num_skipped or len(blocks) >= sinks, f"{label}: its sinks are not held"
        for index, block in enumerate(blocks):
            depth = (index if index < sinks else index + num_skipped) + 1
            prefix = pool.prefixes[block]
            assert prefix is None or prefix.depth == depth, f"{label}: block {block} is published at another depth"


class SwappedSequence(NamedTuple):
    """A swapped-out sequence, from which it is restored."""

    key: int  # names the copy in the swap space
    blocks: SequenceBlocks  # as they were; their ids are no longer valid
    has_encoder_blocks: bool = False  # the cross-attention blocks were copied too

    @property
    def length(self) -> int:
        return self.blocks.length

    @property
    def num_blocks(self) -> int:
        return sum(len(group_blocks.blocks) for group_blocks in self.blocks.all_groups)


class PendingSwapIn(NamedTuple):
    """Swapped sequence that has new blocks, which its next step fills."""

    sequence: SwappedSequence
    blocks: tuple[tuple[int, ...], ...]


class SwappedSequences:
    """Pending copies of swapped sequences; ``pools`` are those of the groups that take tokens and of lower groups."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = tuple(pools)
        self._keys = itertools.count()
        self.pending_swap_outs: list[tuple[int, tuple[tuple[int, ...], ...]]] = []  # key, blocks per group
        self.pending_swap_ins: dict[int, PendingSwapIn] = {}  # by sequence index
        self.pending_drops: list[int] = []  # keys of sequences that will not return

    def swap_out(self, seq_index: int, sequence: SequenceBlocks) -> SwappedSequence:
        """Record a sequence that is about to be freed, and schedule the copy of its blocks."""
        if seq_index in self.pending_swap_ins:  # It has not run since it was swapped in: its copy still exists.
            return self.pending_swap_ins[seq_index].sequence
        swapped = self.add(sequence)
        self.pending_swap_outs.append((swapped.key, _block_ids(sequence)))
        return swapped

    def add(self, sequence: SequenceBlocks, *, has_encoder_blocks: bool = False) -> SwappedSequence:
        """Record a sequence whose copy others make, under a new key."""
        return SwappedSequence(next(self._keys), sequence, has_encoder_blocks)

    def swap_in(self, seq_index: int, swapped: SwappedSequence) -> SequenceBlocks | None:
        """Allocate blocks that the next step fills. None and no change if a pool is too full."""
        sequence = swapped.blocks.copy()
        pairs = list(zip(sequence.all_groups, self._pools, strict=True))
        if any(len(record.blocks) > pool.num_available for record, pool in pairs):
            return None
        sequence.republish = sequence.root is not None
        sequence.num_written, sequence.fast_path_start = max(sequence.num_written, sequence.length), NEVER
        for record, pool in pairs:
            record.blocks = [pool.allocate() for _ in record.blocks]
        self.pending_swap_ins[seq_index] = PendingSwapIn(swapped, _block_ids(sequence))
        return sequence

    def restore_encoder_blocks(self, seq_index: int, blocks: Sequence[Sequence[int]]) -> None:
        """Add cross-attention blocks to a pending swap-in."""
        swapped, group_blocks = self.pending_swap_ins[seq_index]
        self.pending_swap_ins[seq_index] = PendingSwapIn(swapped, (*group_blocks, *map(tuple, blocks)))

    def attach_to_ops(self, block_ops: BlockOps, seq_indices: Collection[int]) -> BlockOps:
        """Add pending swap-outs and drops, and the swap-ins of these sequences."""
        if not (self.pending_swap_outs or self.pending_swap_ins or self.pending_drops):
            return block_ops
        swapped_in = sorted(set(seq_indices) & self.pending_swap_ins.keys())
        swap_ins = [self.pending_swap_ins.pop(seq_index) for seq_index in swapped_in]
        block_ops = block_ops._replace(
            swap_out=tuple(self.pending_swap_outs),
            swap_in=tuple((swapped.key, blocks) for swapped, blocks in swap_ins),
            drop_swapped=tuple(self.pending_drops),
        )
        self.pending_swap_outs, self.pending_drops = [], []
        return block_ops


def _block_ids(sequence: SequenceBlocks) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(group_blocks.blocks) for group_blocks in sequence.all_groups)
