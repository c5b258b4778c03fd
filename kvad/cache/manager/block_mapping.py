"""What one group that takes tokens asks of each of its rows: which blocks it holds, needs, writes and may let go.

Functions of a group, a :class:`~kvad.cache.manager.sequence_blocks.GroupBlocks` and lengths alone (``ledger.py`` has the example):
nothing here takes a block or gives one back.  Integers only, no torch.
"""

from __future__ import annotations

import sys

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.sequence_blocks import NEVER, GroupBlocks, SequenceBlocks, ring_offset
from kvad.model_input import AttentionPattern


class BlockMapping:
    """``ring``: a row is one block, a ring behind its sinks; ``sinks``: blocks that hold sinks; ``window``: tokens, or
    NEVER; ``summed``: blocks are summed up as they stand, and emptied before they are written."""

    def __init__(self, group: CacheGroup) -> None:
        self.group, self.block_size = group, group.block_size
        self.is_ring = group.max_blocks_per_seq == 1
        self.reach = AttentionPattern.from_spec(group.spec)
        self.window = NEVER if self.reach.window is None else self.reach.window
        self.eviction_policy, self.demotion_policy = group.eviction_policy, group.demotion_policy
        self.num_sink_blocks = self.num_blocks(
            self.reach.num_sinks if group.demotion_policy is None else group.demotion_policy.num_sinks
        )
        self.has_block_bounds = group.sparse_read_policy is not None

    def num_blocks(self, slots: int) -> int:
        """Blocks that so many slots fill."""
        return -(-slots // self.block_size)

    def max_length(self, below: CacheGroup | None) -> int:
        """Tokens of the longest row that the group holds when it is alone; ``below``: its first level."""
        group = self.group
        bounded = group.spec.window is not None or group.eviction_policy is not None
        if bounded and group.num_usable_blocks >= group.max_blocks_per_seq:
            return sys.maxsize
        if group.demotion_policy is not None:
            if group.demotion_policy.quantized != -1:
                return sys.maxsize
            if group.num_usable_blocks < group.max_blocks_per_seq:
                return group.num_usable_blocks * group.block_size
            assert below is not None, "a policy of levels has one at least"
            kept = group.demotion_policy.recent + group.demotion_policy.num_sinks
            return kept + min(below.num_usable_blocks, below.max_blocks_per_seq) * group.block_size
        return min(group.num_usable_blocks, group.max_blocks_per_seq) * group.block_size

    # ------------------------------------------------------------ what a query sees

    def first_needed(self, start: int) -> int:
        """The first logical block, behind those of sinks, that a query at position ``start`` may see."""
        if self.window == NEVER:
            return 0
        return max(self.reach.first_visible(start) // self.block_size, self.num_sink_blocks)

    def blocks_out_of_window(self, hold: GroupBlocks, start: int) -> int:
        """How many of the row's first blocks, behind those of sinks, no query from ``start`` on can see."""
        if self.is_ring or self.window == NEVER:
            return 0
        return max(
            0,
            min(
                len(hold.blocks) - self.num_sink_blocks,
                self.first_needed(start) - self.num_sink_blocks - hold.num_skipped_blocks,
            ),
        )

    def has_window(self, hold: GroupBlocks, reach: int, length: int) -> bool:
        """Are the keys still held that a query at position ``length`` needs?  ``reach``: as of the row's seat."""
        needed = self.reach.first_visible(length)
        if needed >= length or self.demotion_policy is not None:
            return True  # it sees nothing but itself, and sinks; or what has left it lies below
        if self.is_ring:
            oldest = 0 if reach <= self.block_size else reach - (self.block_size - self.reach.num_sinks)
        else:
            oldest = (
                (hold.num_skipped_blocks + self.num_sink_blocks) * self.block_size if hold.num_skipped_blocks else 0
            )
        return oldest <= needed

    # ------------------------------------------------------------ what is written

    def written_blocks(self, hold: GroupBlocks, start: int, end: int) -> tuple[int, int]:
        """Which of the row's blocks [low, high), those to come included, positions start .. end - 1 are written to."""
        if self.is_ring:
            return 0, 1
        size = self.block_size
        gap = hold.num_skipped_blocks if start // size >= self.num_sink_blocks else 0
        return (start - hold.num_evicted_tokens) // size - gap, (end - hold.num_evicted_tokens - 1) // size + 1 - gap

    def filled_slots(self, hold: GroupBlocks, start: int, place: int) -> int:
        """Slots of the row's block number ``place`` that are filled before ``start`` is written."""
        if self.is_ring:
            return min(start - hold.num_evicted_tokens, self.block_size)
        gap = hold.num_skipped_blocks if place >= self.num_sink_blocks else 0
        return max(0, start - hold.num_evicted_tokens - (place + gap) * self.block_size)

    def num_slots_to_keep(self, hold: GroupBlocks, start: int) -> int | None:
        """How many slots stay, where a row of length ``start`` is to be cut now."""
        if (
            self.eviction_policy is None
            or hold.last_eviction_length == start
            or not self.eviction_policy.evicts_at(start)
        ):
            return None
        return min(self.eviction_policy.budget, start - hold.num_evicted_tokens)

    def num_blocks_to_keep(self, kept: int) -> int:
        """Blocks that stay when a cut keeps so many slots."""
        return 1 if self.is_ring else self.num_blocks(kept)

    def blocks_after_truncate(self, hold: GroupBlocks, length: int) -> int:
        """How many of the row's blocks stay when it is cut short to ``length`` tokens."""
        if self.is_ring:
            return len(hold.blocks)
        if self.eviction_policy is not None:
            return self.num_blocks(length - hold.num_evicted_tokens)
        stop = self.num_blocks(length)
        return stop if stop <= self.num_sink_blocks else max(self.num_sink_blocks, stop - hold.num_skipped_blocks)

    def copy_for_fork(self, old: GroupBlocks, new: GroupBlocks, length: int) -> None:
        """Let ``new`` hold what ``old`` does of the row's first ``length`` tokens, as far as a query there needs it."""
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

    def slots(self, hold: GroupBlocks, start: int, end: int, into: list[int]) -> int:
        """Add the slots of positions start .. end - 1; returns how far the next tokens may take the fast way."""
        size, at = self.block_size, start
        held = (
            self.reach.num_sinks + self.window + end - start - 1
            if self.eviction_policy is None
            else end - hold.num_evicted_tokens
        )
        assert not self.is_ring or end <= size or held <= size, "a span outgrows a ring"
        stop = at
        while at < end:
            if self.eviction_policy is not None:
                logical = (at - hold.num_evicted_tokens) // size
                stop = (logical + 1) * size + hold.num_evicted_tokens
                hold.slot_offset = (hold.blocks[logical] - logical) * size - hold.num_evicted_tokens
            elif self.is_ring:
                hold.slot_offset, stop = ring_offset(hold.blocks[0], size, self.reach.num_sinks, at)
            else:
                logical = at // size
                stop = (logical + 1) * size
                hold.slot_offset = (
                    hold.blocks[logical if logical < self.num_sink_blocks else logical - hold.num_skipped_blocks]
                    - logical
                ) * size
            into.extend(range(hold.slot_offset + at, hold.slot_offset + min(stop, end)))
            at = min(stop, end)
        fast = stop  # the end of the block that is being written
        if not self.is_ring and self.window != NEVER:  # and before its first block leaves the window
            fast = min(
                fast, (hold.num_skipped_blocks + self.num_sink_blocks + 1) * size + self.window - self.reach.window_step
            )
        ranked = self.eviction_policy or self.demotion_policy
        return fast if ranked is None else min(fast, ranked.next_trigger_length(start))  # and before the row is cut

    # ------------------------------------------------------------ the law

    def check(self, hold: GroupBlocks, seat: SequenceBlocks, where: str) -> None:
        """Assert that a row holds what its next query needs, in a table that makes sense."""
        size = self.block_size
        assert len(set(hold.blocks)) == len(hold.blocks), f"{where}: a block stands twice in its table"
        assert len(hold.blocks) <= self.group.max_blocks_per_seq, f"{where}: more blocks than a row may have"
        assert seat.length <= seat.num_written, f"{where}: committed {seat.length}, wrote up to {seat.num_written}"
        if self.is_ring:
            assert hold.num_skipped_blocks == 0 and len(hold.blocks) == bool(seat.length or hold.blocks), (
                f"{where}: no ring"
            )
            return
        if self.eviction_policy is not None:
            held = seat.length - hold.num_evicted_tokens
            assert held <= len(hold.blocks) * size, f"{where}: {held} slots in {len(hold.blocks)} blocks"
            return
        end = (hold.num_skipped_blocks + len(hold.blocks)) * size
        needed = (
            self.reach.first_visible(seat.length)
            if self.demotion_policy is None
            else max(0, hold.last_eviction_length - self.demotion_policy.recent)
        )
        if needed < seat.length:  # else its next query sees nothing but itself, and sinks
            assert not hold.num_skipped_blocks or (hold.num_skipped_blocks + self.num_sink_blocks) * size <= needed, (
                f"{where}: its window is not held"
            )
            assert end >= seat.length, f"{where}: {seat.length} tokens, blocks up to {end}"
        assert not hold.num_skipped_blocks or len(hold.blocks) >= self.num_sink_blocks, (
            f"{where}: its sinks are not held"
        )
