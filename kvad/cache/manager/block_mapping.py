"""Mapping of positions to blocks in one group that takes tokens: blocks held, needed, written and freed.

All functions depend only on a group, a ``kvad.cache.manager.sequence_blocks.GroupBlocks`` and lengths
(``kv_cache_manager.py`` has an example). Nothing here allocates or frees a block. No torch.
"""

from __future__ import annotations

import sys

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.block_pool import BlockPool
from kvad.cache.manager.sequence_blocks import NEVER, GroupBlocks, SequenceBlocks, ring_offset
from kvad.model_input import AttentionPattern


def num_sinks(group: CacheGroup) -> int:
    """Return the number of tokens that always stay at the start."""
    if group.demotion_policy is not None:
        return group.demotion_policy.num_sinks
    return AttentionPattern.from_spec(group.spec).num_sinks


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
        self.pattern = AttentionPattern.from_spec(group.spec)
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
        size, sinks, blocks = self.block_size, self.num_sink_blocks, group_blocks.blocks
        num_evicted, num_skipped = group_blocks.num_evicted_tokens, group_blocks.num_skipped_blocks
        num_held = end - num_evicted
        if self.eviction_policy is None:
            num_held = self.pattern.num_sinks + self.window + end - start - 1
        assert not self.is_ring or end <= size or num_held <= size, "a span outgrows a ring"
        position = stop = start
        while position < end:
            if self.is_ring and self.eviction_policy is None:
                offset, stop = ring_offset(blocks[0], size, self.pattern.num_sinks, position)
            else:
                logical = (position - num_evicted) // size
                stop = (logical + 1) * size + num_evicted
                block = blocks[logical if logical < sinks else logical - num_skipped]
                offset = (block - logical) * size - num_evicted
            slots.extend(range(offset + position, offset + min(stop, end)))
            group_blocks.slot_offset, position = offset, min(stop, end)
        fast_path_end = stop  # End of the block that is being written,
        if not self.is_ring and self.window != NEVER:  # or before its first block leaves the window,
            end_of_window = (num_skipped + sinks + 1) * size + self.window - self.pattern.window_step
            fast_path_end = min(fast_path_end, end_of_window)
        policy = self.eviction_policy or self.demotion_policy  # or before the next eviction
        return fast_path_end if policy is None else min(fast_path_end, policy.next_trigger_length(start))

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
