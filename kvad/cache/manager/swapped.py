"""Swapped-out sequences, and sequences imported from another cache.

    swap_out         blocks are copied to the host, then freed
    swap_in          as many blocks are allocated, and filled in the sequence's next step
    import_sequence  a sequence from another cache is treated as if it had been swapped out here

Copies and drops are added to the next BlockOps (``SwappedSequences.attach_to_ops``); a swap-in is added to those of
the sequence's own step. A step that fails ends its sequences, so none continues with blocks that were never filled.

Invariant: a key is used once. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvad.cache.manager.block_pool import BlockPool, PrefixNode
from kvad.cache.manager.portable_layout import GroupLayout
from kvad.cache.manager.sequence_blocks import PublishedPrefix, SequenceBlocks, SwappedSequence
from kvad.model_input import BlockOps


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
        self._keys, self._epoch = itertools.count(), 0  # prefix cache resets so far
        self.pending_swap_outs: list[tuple[int, tuple[tuple[int, ...], ...]]] = []  # key, blocks per group
        self.pending_swap_ins: dict[int, PendingSwapIn] = {}  # by sequence index
        self.pending_drops: list[int] = []  # keys of sequences that will not return

    def swap_out(self, seq_index: int, sequence: SequenceBlocks) -> SwappedSequence:
        """Record the blocks of a sequence that is about to be freed, and schedule their copy."""
        if seq_index in self.pending_swap_ins:  # It has not run since it was swapped in: its copy still exists.
            return self.pending_swap_ins[seq_index].sequence
        key = next(self._keys)
        self.pending_swap_outs.append((key, _block_ids(sequence)))
        groups = tuple(
            (len(group.blocks), group.num_skipped_blocks, group.num_evicted_tokens, group.last_eviction_length)
            for group in sequence.groups
        )
        lower_levels = tuple((len(level.blocks), level.num_used_slots) for level in sequence.lower_levels)
        published = None
        if sequence.root is not None:
            tail_tokens = tuple(sequence.tail_tokens)
            published = PublishedPrefix(sequence.root, sequence.last_block, tail_tokens, self._epoch)
        return SwappedSequence(key, sequence.length, groups, lower_levels, published, sequence.min_truncate_length)

    def swap_in(self, seq_index: int, swapped: SwappedSequence) -> SequenceBlocks | None:
        """Allocate blocks that the next step fills. None and no change if a pool is too full."""
        counts = [count for count, *_ in (*swapped.groups, *swapped.lower_levels)]
        if any(count > pool.num_available for count, pool in zip(counts, self._pools, strict=True)):
            return None
        published = swapped.published
        if published is not None and published.epoch != self._epoch:
            published = None
        num_levels = len(self._pools) - self._num_token_groups
        sequence = SequenceBlocks(self._num_token_groups, num_levels, None if published is None else published.root)
        if published is not None:
            sequence.last_block, sequence.tail_tokens = published.last_block, list(published.tail_tokens)
            sequence.republish = True
        sequence.length = sequence.num_written = swapped.length
        sequence.min_truncate_length = swapped.min_truncate_length
        for group, (_, *counters) in zip(sequence.groups, swapped.groups, strict=True):
            group.num_skipped_blocks, group.num_evicted_tokens, group.last_eviction_length = counters
        for level, (_, num_used_slots) in zip(sequence.lower_levels, swapped.lower_levels, strict=True):
            level.num_used_slots = num_used_slots
        for record, pool, count in zip(sequence.all_groups, self._pools, counts, strict=True):
            record.blocks = [pool.allocate() for _ in range(count)]
        self.pending_swap_ins[seq_index] = PendingSwapIn(swapped, _block_ids(sequence))
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
        held = [layout.held_range for layout in layouts]
        groups = tuple(
            (layout.count, layout.num_skipped_blocks, held_range.num_evicted, held_range.last_eviction_length)
            for layout, held_range in zip(layouts, held, strict=True)
        )
        min_truncate_length = 0 if all(layout.whole for layout in layouts) else length
        published = None
        if root is not None and not min_truncate_length:
            published = PublishedPrefix(root, root, tuple(tokens), self._epoch)
        levels, key = tuple(lower_levels), next(self._keys)
        return SwappedSequence(key, length, groups, levels, published, min_truncate_length, has_encoder_blocks)

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
