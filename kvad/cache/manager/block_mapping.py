"""Mapping of positions to blocks in one group that takes tokens: blocks held, needed, written and freed.

All functions depend only on a group, a :class:`~kvad.cache.manager.sequence_blocks.GroupBlocks` and lengths
(``kv_cache_manager.py`` has an example). Nothing here allocates or frees a block. No torch.
"""

from __future__ import annotations

import sys

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.sequence_blocks import NEVER, GroupBlocks, SequenceBlocks, ring_offset
from kvad.model_input import AttentionPattern


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
        self.num_sink_blocks = self.num_blocks(
            self.pattern.num_sinks if group.demotion_policy is None else group.demotion_policy.num_sinks
        )
        self.has_block_bounds = group.sparse_read_policy is not None

    def num_blocks(self, slots: int) -> int:
        """Return the number of blocks that ``slots`` slots fill."""
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
            num_undemoted = group.demotion_policy.recent + group.demotion_policy.num_sinks
            return (
                num_undemoted
                + min(first_lower_group.num_usable_blocks, first_lower_group.max_blocks_per_seq) * group.block_size
            )
        return min(group.num_usable_blocks, group.max_blocks_per_seq) * group.block_size

    # ------------------------------------------------------------ visible blocks

    def first_needed(self, start: int) -> int:
        """Return the first logical block behind the sinks that a query at position ``start`` can see."""
        if self.window == NEVER:
            return 0
        return max(self.pattern.first_visible(start) // self.block_size, self.num_sink_blocks)

    def blocks_out_of_window(self, group_blocks: GroupBlocks, start: int) -> int:
        """Return the number of blocks behind the sinks that no query from ``start`` on can see."""
        if self.is_ring or self.window == NEVER:
            return 0
        return max(
            0,
            min(
                len(group_blocks.blocks) - self.num_sink_blocks,
                self.first_needed(start) - self.num_sink_blocks - group_blocks.num_skipped_blocks,
            ),
        )

    def has_window(self, group_blocks: GroupBlocks, num_written: int, length: int) -> bool:
        """Return True if the keys that a query at position ``length`` needs are still held."""
        needed = self.pattern.first_visible(length)
        if needed >= length or self.demotion_policy is not None:
            return True  # It sees only itself and sinks; or the demoted tokens are in lower groups.
        if self.is_ring:
            oldest = 0 if num_written <= self.block_size else num_written - (self.block_size - self.pattern.num_sinks)
        else:
            oldest = (
                (group_blocks.num_skipped_blocks + self.num_sink_blocks) * self.block_size
                if group_blocks.num_skipped_blocks
                else 0
            )
        return oldest <= needed

    # ------------------------------------------------------------ written blocks

    def written_blocks(self, group_blocks: GroupBlocks, start: int, end: int) -> tuple[int, int]:
        """Return the range [low, high) of block indices, new ones included, that positions start .. end - 1 write."""
        if self.is_ring:
            return 0, 1
        size = self.block_size
        num_skipped = group_blocks.num_skipped_blocks if start // size >= self.num_sink_blocks else 0
        return (start - group_blocks.num_evicted_tokens) // size - num_skipped, (
            end - group_blocks.num_evicted_tokens - 1
        ) // size + 1 - num_skipped

    def filled_slots(self, group_blocks: GroupBlocks, start: int, index: int) -> int:
        """Return the number of filled slots in block ``index`` before ``start`` is written."""
        if self.is_ring:
            return min(start - group_blocks.num_evicted_tokens, self.block_size)
        num_skipped = group_blocks.num_skipped_blocks if index >= self.num_sink_blocks else 0
        return max(0, start - group_blocks.num_evicted_tokens - (index + num_skipped) * self.block_size)

    def num_slots_to_keep(self, group_blocks: GroupBlocks, start: int) -> int | None:
        """Return the number of slots that stay if an eviction is due at length ``start``, else None."""
        if (
            self.eviction_policy is None
            or group_blocks.last_eviction_length == start
            or not self.eviction_policy.evicts_at(start)
        ):
            return None
        return min(self.eviction_policy.budget, start - group_blocks.num_evicted_tokens)

    def num_blocks_to_keep(self, num_slots: int) -> int:
        """Return the number of blocks that stay when an eviction keeps ``num_slots`` slots."""
        return 1 if self.is_ring else self.num_blocks(num_slots)

    def blocks_after_truncate(self, group_blocks: GroupBlocks, length: int) -> int:
        """Return the number of blocks that stay when the sequence is truncated to ``length`` tokens."""
        if self.is_ring:
            return len(group_blocks.blocks)
        if self.eviction_policy is not None:
            return self.num_blocks(length - group_blocks.num_evicted_tokens)
        stop = self.num_blocks(length)
        return (
            stop if stop <= self.num_sink_blocks else max(self.num_sink_blocks, stop - group_blocks.num_skipped_blocks)
        )

    def copy_for_fork(self, old: GroupBlocks, new: GroupBlocks, length: int) -> None:
        """Copy to ``new`` the blocks of the first ``length`` tokens that a query at ``length`` needs."""
        new.num_evicted_tokens, new.last_eviction_length = old.num_evicted_tokens, old.last_eviction_length
        if self.is_ring:
            new.blocks = list(old.blocks) if length else []
            return
        if self.eviction_policy is not None:
            new.blocks = old.blocks[: self.num_blocks(length - old.num_evicted_tokens)]
            return
        sinks, stop = self.num_sink_blocks, self.num_blocks(length)
        first = max(sinks + old.num_skipped_blocks, self.first_needed(length))
        new.num_skipped_blocks = first - sinks
        new.blocks = (
            old.blocks[: min(sinks, stop)]
            + old.blocks[first - old.num_skipped_blocks : max(0, stop - old.num_skipped_blocks)]
        )
        if len(new.blocks) <= sinks:
            new.num_skipped_blocks = max(0, length // self.block_size - sinks)

    def slots(self, group_blocks: GroupBlocks, start: int, end: int, slots: list[int]) -> int:
        """Append the slots of positions start .. end - 1.

        Returns:
            The end of the fast path: up to it, single tokens need no new block and no eviction.
        """
        size, position = self.block_size, start
        num_held = (
            self.pattern.num_sinks + self.window + end - start - 1
            if self.eviction_policy is None
            else end - group_blocks.num_evicted_tokens
        )
        assert not self.is_ring or end <= size or num_held <= size, "a span outgrows a ring"
        stop = position
        while position < end:
            if self.eviction_policy is not None:
                logical = (position - group_blocks.num_evicted_tokens) // size
                stop = (logical + 1) * size + group_blocks.num_evicted_tokens
                group_blocks.slot_offset = (
                    group_blocks.blocks[logical] - logical
                ) * size - group_blocks.num_evicted_tokens
            elif self.is_ring:
                group_blocks.slot_offset, stop = ring_offset(
                    group_blocks.blocks[0], size, self.pattern.num_sinks, position
                )
            else:
                logical = position // size
                stop = (logical + 1) * size
                group_blocks.slot_offset = (
                    group_blocks.blocks[
                        logical if logical < self.num_sink_blocks else logical - group_blocks.num_skipped_blocks
                    ]
                    - logical
                ) * size
            slots.extend(range(group_blocks.slot_offset + position, group_blocks.slot_offset + min(stop, end)))
            position = min(stop, end)
        fast_path_end = stop  # End of the block that is being written,
        if not self.is_ring and self.window != NEVER:  # or before its first block leaves the window,
            fast_path_end = min(
                fast_path_end,
                (group_blocks.num_skipped_blocks + self.num_sink_blocks + 1) * size
                + self.window
                - self.pattern.window_step,
            )
        policy = self.eviction_policy or self.demotion_policy
        return (
            fast_path_end if policy is None else min(fast_path_end, policy.next_trigger_length(start))
        )  # or before the next eviction

    # ------------------------------------------------------------ invariants

    def check(self, group_blocks: GroupBlocks, sequence: SequenceBlocks, label: str) -> None:
        """Assert that a sequence holds the blocks that its next query needs, in a valid table."""
        size = self.block_size
        assert len(set(group_blocks.blocks)) == len(group_blocks.blocks), f"{label}: a block is twice in its table"
        assert len(group_blocks.blocks) <= self.group.max_blocks_per_seq, (
            f"{label}: more blocks than a sequence may have"
        )
        assert sequence.length <= sequence.num_written, (
            f"{label}: committed {sequence.length}, wrote up to {sequence.num_written}"
        )
        if self.is_ring:
            assert group_blocks.num_skipped_blocks == 0 and len(group_blocks.blocks) == bool(
                sequence.length or group_blocks.blocks
            ), f"{label}: its ring is invalid"
            return
        if self.eviction_policy is not None:
            num_held = sequence.length - group_blocks.num_evicted_tokens
            assert num_held <= len(group_blocks.blocks) * size, (
                f"{label}: {num_held} slots in {len(group_blocks.blocks)} blocks"
            )
            return
        end = (group_blocks.num_skipped_blocks + len(group_blocks.blocks)) * size
        needed = (
            self.pattern.first_visible(sequence.length)
            if self.demotion_policy is None
            else max(0, group_blocks.last_eviction_length - self.demotion_policy.recent)
        )
        if needed < sequence.length:  # Otherwise its next query sees only itself and sinks.
            assert (
                not group_blocks.num_skipped_blocks
                or (group_blocks.num_skipped_blocks + self.num_sink_blocks) * size <= needed
            ), f"{label}: its window is not held"
            assert end >= sequence.length, f"{label}: {sequence.length} tokens, blocks up to {end}"
        assert not group_blocks.num_skipped_blocks or len(group_blocks.blocks) >= self.num_sink_blocks, (
            f"{label}: its sinks are not held"
        )
