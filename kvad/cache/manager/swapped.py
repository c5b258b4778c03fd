"""Swapped-out sequences, and sequences imported from another cache.

    swap_out         blocks are copied to the host, then freed
    swap_in          as many blocks are allocated, and filled in the sequence's next step
    import_sequence  a sequence from another cache is treated as if it had been swapped out here
    drop             a swapped sequence will not return

Copies and drops are added to the next BlockOps (:meth:`SwappedSequences.attach_to_ops`); a swap-in is added to those of
the sequence's own step. A step that fails ends its sequences, so none continues with blocks that were never filled.

Invariant: a key is used once. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvad.cache.manager.block_pool import BlockPool, PrefixNode
from kvad.cache.manager.portable_layout import GroupLayout
from kvad.cache.manager.sequence_blocks import PublishedPrefix, SequenceBlocks, SwappedSequence
from kvad.model_input import BlockOps

SwapCopy = tuple[int, tuple[tuple[int, ...], ...]]  # (key, blocks per group)


class PendingSwapIn(NamedTuple):
    """Swapped sequence that has new blocks, which its next step fills."""

    sequence: SwappedSequence
    blocks: tuple[tuple[int, ...], ...]


class SwappedSequences:
    """Records of swapped sequences.

    ``pools`` are those of the ``num_token_groups`` groups that take tokens, then those of their lower groups.
    """

    def __init__(self, pools: Sequence[BlockPool], num_token_groups: int) -> None:
        self._pools, self._num_token_groups = tuple(pools), num_token_groups
        self._num_keys = self._epoch = 0  # keys so far; prefix cache resets so far
        self.pending_swap_outs: list[SwapCopy] = []  # for the next BlockOps
        self.pending_swap_ins: dict[int, PendingSwapIn] = {}  # by sequence index
        self.pending_drops: list[int] = []

    def swap_out(self, seq_index: int, sequence: SequenceBlocks) -> SwappedSequence:
        """Record the blocks of a sequence that is about to be freed, and schedule their copy."""
        if seq_index in self.pending_swap_ins:  # It has not run since it was swapped in: its copy still exists.
            return self.pending_swap_ins[seq_index].sequence
        key = self._next_key()
        self.pending_swap_outs.append((key, tuple(tuple(group_blocks.blocks) for group_blocks in sequence.all_groups)))
        groups = tuple(
            (
                len(group_blocks.blocks),
                group_blocks.num_skipped_blocks,
                group_blocks.num_evicted_tokens,
                group_blocks.last_eviction_length,
            )
            for group_blocks in sequence.groups
        )
        lower_levels = tuple((len(level.blocks), level.num_used_slots) for level in sequence.lower_levels)
        published = (
            None
            if sequence.root is None
            else PublishedPrefix(sequence.root, sequence.last_block, tuple(sequence.tail_tokens), self._epoch)
        )
        return SwappedSequence(key, sequence.length, groups, lower_levels, published, sequence.min_truncate_length)

    def swap_in(self, seq_index: int, swapped: SwappedSequence) -> SequenceBlocks | None:
        """Allocate blocks that the next step fills. None and no change if a pool is too full."""
        counts = [count for count, *_ in (*swapped.groups, *swapped.lower_levels)]
        if any(count > pool.num_available for count, pool in zip(counts, self._pools, strict=True)):
            return None
        published = (
            swapped.published if swapped.published is not None and swapped.published.epoch == self._epoch else None
        )
        sequence = SequenceBlocks(
            self._num_token_groups,
            len(self._pools) - self._num_token_groups,
            None if published is None else published.root,
        )
        if published is not None:
            sequence.last_block, sequence.tail_tokens, sequence.republish = (
                published.last_block,
                list(published.tail_tokens),
                True,
            )
        sequence.length = sequence.num_written = swapped.length
        sequence.min_truncate_length = swapped.min_truncate_length
        for group_blocks, (_, *counters) in zip(sequence.groups, swapped.groups, strict=True):
            group_blocks.num_skipped_blocks, group_blocks.num_evicted_tokens, group_blocks.last_eviction_length = (
                counters
            )
        for level, (_, num_used_slots) in zip(sequence.lower_levels, swapped.lower_levels, strict=True):
            level.num_used_slots = num_used_slots
        for record, pool, count in zip(sequence.all_groups, self._pools, counts, strict=True):
            record.blocks = [pool.allocate()[0] for _ in range(count)]
        self.pending_swap_ins[seq_index] = PendingSwapIn(
            swapped, tuple(tuple(group_blocks.blocks) for group_blocks in sequence.all_groups)
        )
        return sequence

    def import_sequence(
        self,
        tokens: Sequence[int],
        root: PrefixNode | None,
        layouts: Sequence[GroupLayout],
        lower_levels: Sequence[tuple[int, int]],
        *,
        has_encoder_blocks: bool,
    ) -> SwappedSequence:
        """Record an imported sequence, as KVCacheManager.import_sequence does; ``root`` is its prefix root, if any."""
        length = len(tokens)
        groups = tuple(
            (
                layout.count,
                layout.num_skipped_blocks,
                layout.held_range.num_evicted,
                layout.held_range.last_eviction_length,
            )
            for layout in layouts
        )
        min_truncate_length = 0 if all(layout.whole for layout in layouts) else length
        published = (
            None if root is None or min_truncate_length else PublishedPrefix(root, root, tuple(tokens), self._epoch)
        )
        return SwappedSequence(
            self._next_key(), length, groups, tuple(lower_levels), published, min_truncate_length, has_encoder_blocks
        )

    def drop(self, swapped: SwappedSequence) -> None:
        """Drop a swapped sequence: its copy is deleted with the next BlockOps."""
        self.pending_drops.append(swapped.key)

    def drop_prefixes(self) -> None:
        """Let swapped sequences publish nothing when they return."""
        self._epoch += 1

    def restore_encoder_blocks(self, seq_index: int, blocks: Sequence[Sequence[int]]) -> None:
        """Add cross-attention blocks to a pending swap-in."""
        swapped, group_blocks = self.pending_swap_ins[seq_index]
        self.pending_swap_ins[seq_index] = PendingSwapIn(swapped, (*group_blocks, *map(tuple, blocks)))

    def attach_to_ops(self, block_ops: BlockOps, seq_indices: Collection[int]) -> BlockOps:
        """Add pending swap-outs and drops, and the swap-ins of these sequences."""
        if not (self.pending_swap_outs or self.pending_swap_ins or self.pending_drops):
            return block_ops
        swapped_in = [
            self.pending_swap_ins.pop(seq_index)
            for seq_index in sorted(set(seq_indices) & self.pending_swap_ins.keys())
        ]
        swap_in = tuple((swapped.key, blocks) for swapped, blocks in swapped_in)
        block_ops = block_ops._replace(
            swap_out=tuple(self.pending_swap_outs), swap_in=swap_in, drop_swapped=tuple(self.pending_drops)
        )
        self.pending_swap_outs, self.pending_drops = [], []
        return block_ops

    def _next_key(self) -> int:
        self._num_keys += 1
        return self._num_keys - 1
