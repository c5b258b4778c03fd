"""KVCacheManager: the block tables and slots of all running sequences, on the host. No torch.

A sequence has an index that is fixed while it runs. Position p belongs to logical block ``p // block_size``. In each
cache group the sequence holds its blocks in order, except for the skipped blocks: logical blocks behind the sinks that
no query can see any more. A group with one block per sequence (contiguous) is a ring behind its sinks.

Under an eviction policy (``policy.EvictionPolicy``) a sequence keeps a number of its slots at certain lengths. They
are moved to the front, so position p is stored where ``p - num_evicted_tokens`` would be. Only the device knows which
tokens they are. Under a tiered policy, whole blocks are demoted (``demotion.py``).

    block size 4, no sinks, 2 skipped, blocks [7, 3]:    positions 8..11 in block 7, 12..15 in block 3 (13: slot 13)
    block size 4, 3 sinks, 2 skipped, blocks [5, 7, 3]:  positions 0..3 in block 5, 12..15 in block 7, 16..19 in block 3

The parts: ``block_mapping.py`` maps positions to blocks, ``prefix_cache.py`` finds and publishes prefixes,
``allocation.py`` allocates blocks, ``swapped.py`` records swapped sequences, ``encoder_blocks.py`` cross-attention.

Invariants, in addition to those of the parts:

* The encoder input of a sequence (cross-attention) is held from :meth:`KVCacheManager.attach_encoder_input` to
  :meth:`KVCacheManager.free`, and written once.
* A windowed sequence holds the blocks that the first query of its next span needs, and none before them.
* :meth:`KVCacheManager.allocate_slots` places all spans or changes nothing.

The manager does not decide which request runs, and never reads a key, a value or a score.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.allocation import BlockAllocator, TokenSpans
from kvad.cache.manager.block_mapping import BlockMapping
from kvad.cache.manager.block_pool import BlockPool, HashFn, LowestFreeBlockPool, PrefixIndex, digest
from kvad.cache.manager.demotion import LevelDemotion, max_blocks
from kvad.cache.manager.encoder_blocks import EncoderAllocation, EncoderBlocks, EncoderSequence
from kvad.cache.manager.portable_layout import GroupLayout, SequenceLayout, held_range
from kvad.cache.manager.prefix_cache import PrefixCache
from kvad.cache.manager.prefix_offload import BlockStoreProtocol, PrefetchRequest, PrefixOffload
from kvad.cache.manager.sequence_blocks import NEVER, SequenceBlocks, SwappedSequence
from kvad.cache.manager.swapped import SwappedSequences
from kvad.cache.policy import OffloadPolicy
from kvad.model_input import BlockOps


class BlockAllocation(NamedTuple):
    """Slots and block tables of one step.

    Block tables are the manager's own lists, valid until its next call: do not store or change them.
    """

    block_ops: BlockOps
    slots: tuple[list[int], ...]  # per group that takes tokens: one slot per token, in the order of the spans
    # Per group (token groups, lower groups, cross-attention), per span: the blocks to read after this write.
    block_tables: tuple[list[list[int]], ...]
    num_lower_levels: int = 0  # number of lower groups


@dataclass(frozen=True)
class CacheStats:
    """Block counts per group, and prefix cache statistics. ``total = used + free + evictable``."""

    total: tuple[int, ...]
    used: tuple[int, ...]
    free: tuple[int, ...]
    evictable: tuple[int, ...]
    evictions: tuple[int, ...]  # published blocks that were reused so far
    hits: int  # admissions with a cached prefix
    misses: int  # admissions without
    hit_tokens: int  # tokens that were not computed because of hits
    peak: tuple[int, ...]  # maximum of used since KVCacheManager.reset_peak
    watermark: tuple[int, ...]  # blocks that an admission leaves free


class KVCacheManager:
    """Owns one :class:`BlockPool` per group and the block records of up to ``max_num_seqs`` sequences.

    Args:
        groups: Token groups first, then lower groups, then cross-attention groups.
        prefix_caching: Share blocks of equal prefixes, if the groups allow it.
        max_num_seqs: Maximum number of running sequences.
        hash_fn: Hash of a block's history.
        watermark: Fraction of each pool that :meth:`can_allocate` leaves free.
        block_store: Store of published blocks beyond the pools.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        prefix_caching: bool,
        max_num_seqs: int,
        hash_fn: HashFn = digest,
        watermark: float = 0.0,
        block_store: BlockStoreProtocol | None = None,
    ) -> None:
        self.groups = tuple(groups)
        lower_groups = [group for group in self.groups if group.lower_level is not None]
        upper_groups = [group for group in self.groups if group.lower_level is None]
        token_groups = [group for group in upper_groups if not group.spec.is_cross_attention]
        assert self.groups[: len(token_groups)] == tuple(token_groups), "token groups must come first"
        assert self.groups[len(token_groups) : len(token_groups) + len(lower_groups)] == tuple(lower_groups), (
            "lower groups must precede cross-attention"
        )
        self.token_groups, self.lower_groups = tuple(token_groups), tuple(lower_groups)
        self._num_block_groups = len(token_groups) + len(lower_groups)
        self.watermark_blocks = tuple(
            math.ceil(watermark * group.num_usable_blocks) for group in self.groups[: self._num_block_groups]
        )
        self.pools = tuple(_build_pool(group) for group in self.groups)
        self._pools = self.pools[: len(token_groups)]
        self.num_frees = 0  # Grows when blocks are freed. Retry admission only after that.
        self._sequences: list[SequenceBlocks | None] = [None] * max_num_seqs
        self.block_mappings = tuple(map(BlockMapping, self.token_groups))
        demotion = LevelDemotion(self.groups, self.pools, len(token_groups))
        self._allocator = BlockAllocator(self.block_mappings, self.pools, self._sequences, demotion)
        # A preempted sequence is swapped out, never recomputed.
        self.uses_offload = any(isinstance(group.demotion_policy, OffloadPolicy) for group in self.token_groups)
        is_lossy = any(group.eviction_policy or group.demotion_policy for group in self.token_groups)
        self.lossy = is_lossy and not self.uses_offload
        evictions = [group.eviction_policy for group in self.token_groups if group.eviction_policy is not None]
        self._observes_attention = any(policy.observed_queries for policy in evictions)
        # A sequence of one block can share no full block and leave one token to compute: nothing to publish.
        # Blocks of an offloading sequence leave its table, and another sequence would have no room for all of them.
        has_rings = any(mapping.is_ring for mapping in self.block_mappings)
        can_share = bool(self.token_groups) and not (has_rings or self.uses_offload or self.lossy)
        self.prefix_caching = prefix_caching and can_share
        block_sizes = {mapping.block_size for mapping in self.block_mappings}
        assert not self.prefix_caching or len(block_sizes) == 1, "prefix reuse needs one block size"
        prefix_offload = None
        if block_store is not None and self.prefix_caching:
            prefix_offload = PrefixOffload(block_store, len(self.groups))
            for index, pool in enumerate(self._pools):
                pool.on_evict = partial(prefix_offload.on_evicted, index)
        prefixes = PrefixIndex(hash_fn)
        self._prefix_cache = PrefixCache(self.block_mappings, self._pools, prefixes, prefix_offload)
        self._swapped = SwappedSequences(self.pools[: self._num_block_groups], len(token_groups))
        first_lower_groups = [
            next((self.groups[group_index] for group_index in levels), None) for levels in demotion.lower_groups
        ]
        max_lengths = [
            mapping.max_length(first) for mapping, first in zip(self.block_mappings, first_lower_groups, strict=True)
        ]
        self.capacity = min(max_lengths, default=sys.maxsize)
        cross = slice(self._num_block_groups, None)
        self._encoder = EncoderBlocks(self.groups[cross], self.pools[cross], prefixes, share=self.prefix_caching)

    @property
    def prefix_offload(self) -> PrefixOffload | None:
        """Connection to the block store, or None."""
        return self._prefix_cache.offload

    # ------------------------------------------------------------ add, fork, free, swap

    def add_sequence(
        self,
        seq_index: int,
        token_ids: Sequence[int],
        prefix_root: bytes,
        max_tokens: int | None = None,
        prefetched: PrefetchRequest | None = None,
    ) -> int | None:
        """Add a sequence and acquire its longest cached prefix.

        A hit is a multiple of the block size and leaves at least one token to compute. A group with a window needs
        only the blocks of the last ``window - 1`` tokens.

        Args:
            seq_index: Index of the new sequence.
            token_ids: Its tokens.
            prefix_root: Bytes that separate prefixes of different weights, adapters, tenants, ...
            max_tokens: Maximum length of the hit.
            prefetched: A finished request; its blocks are filled in the next step.

        Returns:
            The length of the cached prefix, or None if the index is in use.
        """
        if self._sequences[seq_index] is not None:
            return None
        sequence = SequenceBlocks(
            len(self.token_groups),
            len(self.lower_groups),
            self._prefix_cache.prefixes.root(prefix_root) if self.prefix_caching else None,
        )
        self._sequences[seq_index] = sequence
        if sequence.root is None:
            return 0
        sequence.length = sequence.num_written = self._prefix_cache.acquire_longest(
            seq_index, sequence, token_ids, _max_hit(token_ids, max_tokens), prefetched
        )
        return sequence.length

    def prefetch(self, token_ids: Sequence[int], prefix_root: bytes, max_tokens: int | None = None) -> PrefetchRequest:
        """Build a request for blocks that are in the block store and in no pool. The caller starts it."""
        return self._prefix_cache.prefetch(token_ids, prefix_root, _max_hit(token_ids, max_tokens))

    def block_keys(self, token_ids: Sequence[int], prefix_root: bytes) -> list[str]:
        """Return the block store keys of the full blocks of these tokens."""
        return self._prefix_cache.block_keys(token_ids, prefix_root)

    def fork(self, seq_index: int, child: int, length: int) -> bool:
        """Add ``child`` with the first ``length`` tokens of a sequence. Blocks are shared until one of them writes.

        Returns:
            False, and no change, if a window or an eviction has dropped what a query at ``length`` needs, if a policy
            accumulates attention per sequence, or if the sequence's blocks are filled only in its next step.
        """
        sequence = self._sequence(seq_index)
        if (
            self._observes_attention
            or self.is_loading(seq_index)
            or any(group_blocks.last_eviction_length > length for group_blocks in sequence.groups)
        ):
            return False
        assert self._sequences[child] is None and 0 <= length <= sequence.length, (
            seq_index,
            child,
            length,
            sequence.length,
        )
        if not self._window_held(sequence, length):
            return False
        forked = SequenceBlocks(len(self.token_groups), len(self.lower_groups), sequence.root)
        for pool, old_level, new_level in zip(
            self.pools[len(self.token_groups) :], sequence.lower_levels, forked.lower_levels, strict=False
        ):
            new_level.blocks, new_level.num_used_slots = list(old_level.blocks), old_level.num_used_slots
            for block in new_level.blocks:
                pool.incref(block)
        forked.encoder_sequence = (
            None if sequence.encoder_sequence is None else self._encoder.share(sequence.encoder_sequence)
        )
        for mapping, pool, old, new in zip(
            self.block_mappings, self._pools, sequence.groups, forked.groups, strict=True
        ):
            mapping.copy_for_fork(old, new, length)
            for block in new.blocks:
                pool.incref(block)
        is_ring = any(mapping.is_ring for mapping in self.block_mappings)
        end = (
            sequence.num_written
            if is_ring
            else self.block_mappings[0].num_blocks(length) * self.block_mappings[0].block_size
        )
        forked.length, forked.num_written = length, max(length, min(sequence.num_written, end))
        forked.last_block, forked.tail_tokens = self._prefix_cache.history(sequence, length)
        sequence.fast_path_start = NEVER
        self._sequences[child] = forked
        return True

    def truncate(self, seq_index: int, length: int) -> int:
        """Drop the tokens from ``length`` on.

        Returns:
            The new length. It is 0 if a window has passed what a query at ``length`` needs: recompute the sequence.
        """
        sequence = self._sequence(seq_index)
        assert not self.is_loading(seq_index), "truncate a swapped or loaded sequence after its next step"
        if length >= sequence.length:
            return sequence.length
        if (
            length == 0
            or not self._window_held(sequence, length)
            or any(group_blocks.last_eviction_length > length for group_blocks in sequence.groups)
        ):
            self._free_all(sequence)
            sequence.reset()
            self.num_frees += 1
            return 0
        for mapping, pool, group_blocks in zip(self.block_mappings, self._pools, sequence.groups, strict=True):
            num_blocks = mapping.blocks_after_truncate(group_blocks, length)
            _decref_all(pool, group_blocks.blocks[num_blocks:])
            group_blocks.blocks = group_blocks.blocks[:num_blocks]
            if num_blocks <= mapping.num_sink_blocks and not mapping.is_ring and mapping.eviction_policy is None:
                group_blocks.num_skipped_blocks = min(
                    group_blocks.num_skipped_blocks, max(0, length // mapping.block_size - mapping.num_sink_blocks)
                )
        sequence.last_block, sequence.tail_tokens = self._prefix_cache.history(sequence, length)
        sequence.length = length
        sequence.fast_path_start = NEVER
        self.num_frees += 1
        return length

    def free(self, seq_index: int, publish: bool = True) -> None:
        """Free a sequence. Blocks are freed in reverse order, so that the ends of prefixes are evicted first.

        With ``publish=False`` (a numerical error; chunks were committed before a logit was checked) every prefix of the
        sequence is unpublished, including acquired ones. Sequences that already reference such a block keep it.
        """
        sequence = self._sequence(seq_index)
        loaded = None if self.prefix_offload is None else self.prefix_offload.on_released(seq_index)
        if not publish:
            self._prefix_cache.invalidate(sequence.last_block)
            self._prefix_cache.invalidate(loaded)
        self._free_all(sequence)
        if sequence.encoder_sequence is not None:
            self._encoder.release(sequence.encoder_sequence, publish=publish)
        self._sequences[seq_index] = None
        self._swapped.pending_swap_ins.pop(seq_index, None)  # a pending swap-in: its copy remains
        self.num_frees += 1

    def swap_out(self, seq_index: int) -> SwappedSequence:
        """Swap out a sequence: its blocks are copied out by the next BlockOps, then freed."""
        sequence = self._sequence(seq_index)
        assert seq_index in self._swapped.pending_swap_ins or not self.is_loading(seq_index), (
            "a sequence whose blocks are loading has nothing to copy"
        )
        assert not self.uses_offload, "offloading sequences are not swapped: they are recomputed"
        swapped = self._swapped.swap_out(seq_index, sequence)
        self.free(seq_index)
        return swapped

    def swap_in(self, seq_index: int, swapped: SwappedSequence) -> bool:
        """Restore a swapped sequence. Return False, and no change, if a pool is too full."""
        assert self._sequences[seq_index] is None, f"index {seq_index} is in use"
        sequence = self._sequences[seq_index] = self._swapped.swap_in(seq_index, swapped)
        return sequence is not None

    def export_layout(self, seq_index: int) -> SequenceLayout | None:
        """Return the blocks of a sequence, valid until the next step; None if they are not filled yet."""
        if self.is_loading(seq_index):
            return None
        sequence = self._sequence(seq_index)
        groups = tuple(
            (
                held_range(group, group_blocks, sequence.length, sequence.num_written),
                group_blocks.num_skipped_blocks,
                tuple(group_blocks.blocks),
            )
            for group, group_blocks in zip(self.token_groups, sequence.groups, strict=True)
        )
        lower_levels = tuple((level.num_used_slots, tuple(level.blocks)) for level in sequence.lower_levels)
        encoder_sequence = sequence.encoder_sequence
        encoder_tokens, encoder_blocks = (
            (None, ())
            if encoder_sequence is None
            else (encoder_sequence.tokens, tuple(map(tuple, encoder_sequence.blocks)))
        )
        return SequenceLayout(sequence.length, groups, lower_levels, encoder_tokens, encoder_blocks)

    def import_sequence(
        self,
        token_ids: Sequence[int],
        prefix_root: bytes,
        layouts: Sequence[GroupLayout],
        lower_levels: Sequence[tuple[int, int]],
        *,
        has_encoder_blocks: bool,
    ) -> SwappedSequence:
        """Register a sequence from another cache as if it had been swapped out here.

        Its full blocks are published under ``prefix_root`` after its next step, if prefixes are shared.

        Args:
            token_ids: Tokens of the sequence.
            prefix_root: As for :meth:`add_sequence`.
            layouts: Layout per token group.
            lower_levels: (blocks, filled slots) per lower group.
            has_encoder_blocks: Cross-attention keys and values are imported too.
        """
        root = self._prefix_cache.prefixes.root(prefix_root) if self.prefix_caching else None
        return self._swapped.import_sequence(
            token_ids, root, layouts, lower_levels, has_encoder_blocks=has_encoder_blocks
        )

    def drop_swapped(self, swapped: SwappedSequence) -> None:
        """Drop a swapped sequence that will not return."""
        self._swapped.drop(swapped)

    @property
    def pending_swap_outs(self) -> list[int]:
        """Keys of swapped sequences that the next BlockOps copy out."""
        return [key for key, _ in self._swapped.pending_swap_outs]

    @property
    def pending_swap_ins(self) -> list[int]:
        """Keys of swapped-in sequences that the BlockOps of their next step copy in."""
        return [swap_in.sequence.key for swap_in in self._swapped.pending_swap_ins.values()]

    def num_blocks(self, seq_index: int) -> list[int]:
        """Return the number of blocks per group, cross-attention not included."""
        return [len(group_blocks.blocks) for group_blocks in self._sequence(seq_index).all_groups]

    def retained_prefix_length(self, seq_index: int) -> int:
        """Return the length of the prefix that other sequences reference too."""
        return self._prefix_cache.retained_prefix_length(self._sequence(seq_index))

    def cached_prefix_length(self, token_ids: Sequence[int], prefix_root: bytes) -> int:
        """Return the length of the prefix that an admission would find now."""
        start = self._prefix_cache.prefixes.root(prefix_root) if self.prefix_caching else None
        return (
            0
            if start is None
            else len(self._prefix_cache.find(start, token_ids, len(token_ids) - 1)) * self.block_mappings[0].block_size
        )

    def tokens_until_eviction(self, seq_index: int) -> int:
        """Return the number of tokens until the next eviction or demotion. A span must end there."""
        length = self._sequence(seq_index).length
        policies = [
            policy for mapping in self.block_mappings for policy in (mapping.eviction_policy, mapping.demotion_policy)
        ]
        return (
            min((policy.next_trigger_length(length) for policy in policies if policy is not None), default=NEVER)
            - length
        )

    def reset_prefix_cache(self) -> None:
        """Unpublish every block (the weights changed). Running and swapped sequences publish no more."""
        self._swapped.drop_prefixes()
        for pool in self.pools:
            for block in pool.published():
                pool.unpublish(block)
        if self.prefix_offload is not None:
            self.prefix_offload.forget()
        for sequence in self._sequences:
            if sequence is not None:
                sequence.root = sequence.last_block = None
                if sequence.encoder_sequence is not None:
                    sequence.encoder_sequence.cache_key = None

    # ------------------------------------------------------------ cross-attention

    @property
    def max_source_len(self) -> int:
        """Maximum number of encoder tokens; 0 without cross-attention."""
        return self._encoder.max_source_len

    def attach_encoder_input(self, seq_index: int, token_ids: Sequence[int], prefix_root: bytes) -> bool | None:
        """Attach an encoder input.

        Returns:
            True if it is encoded already, False if it must be encoded, None if a pool is too full.
        """
        sequence = self._sequence(seq_index)
        assert sequence.encoder_sequence is None, f"sequence {seq_index} has an encoder input"
        sequence.encoder_sequence = self._encoder.attach(token_ids, prefix_root)
        return None if sequence.encoder_sequence is None else sequence.encoder_sequence.written

    def restore_encoder_blocks(self, seq_index: int) -> None:
        """Restore the cross-attention blocks of a swapped-in sequence. Other sequences do not find them."""
        encoder_sequence = self._encoder_sequence(seq_index)
        assert not encoder_sequence.written, "an encoder input is written once"
        self._swapped.restore_encoder_blocks(seq_index, encoder_sequence.blocks)
        encoder_sequence.written, encoder_sequence.cache_key = True, None

    def share_encoder_blocks(self, seq_index: int, child: int) -> None:
        """Attach the encoder input of a sequence to ``child`` too."""
        encoder_sequence, sequence = self._sequence(seq_index).encoder_sequence, self._sequence(child)
        assert encoder_sequence is not None and sequence.encoder_sequence is None, (seq_index, child)
        sequence.encoder_sequence = self._encoder.share(encoder_sequence)

    def allocate_encoder_slots(self, seq_indices: Sequence[int]) -> EncoderAllocation:
        """Return the slots that the encoder writes for these sequences, in their order."""
        return self._encoder.allocate_slots(
            [self._encoder_sequence(seq_index) for seq_index in seq_indices], self._num_block_groups
        )

    def commit_encoder_blocks(self, seq_index: int) -> None:
        """Mark the encoder input of a sequence as written with finite outputs."""
        self._encoder.commit(self._encoder_sequence(seq_index))

    def _encoder_sequence(self, seq_index: int) -> EncoderSequence:
        encoder_sequence = self._sequence(seq_index).encoder_sequence
        assert encoder_sequence is not None, f"sequence {seq_index} has no encoder input"
        return encoder_sequence

    # ------------------------------------------------------------ a step

    def allocate_slots(self, spans: TokenSpans) -> BlockAllocation | None:
        """Allocate slots for every span, at most one per sequence. None and no change if a pool is too full."""
        sequences = self._sequences
        slow_spans = []
        for span in spans:
            sequence = sequences[span[0]]
            assert sequence is not None and span[1] == sequence.length, (
                f"span {span} does not start at its sequence's end"
            )
            if span[2] != 1 or not sequence.fast_path_start <= span[1] < sequence.fast_path_end:
                slow_spans.append(span)
        block_ops = self._allocator.allocate(slow_spans) if slow_spans else self._empty_ops()
        if block_ops is None:
            return None
        block_ops = self._swapped.attach_to_ops(block_ops, [span[0] for span in spans])
        if self.prefix_offload is not None and self.prefix_offload.pending:
            block_ops = block_ops._replace(
                store=self.prefix_offload.take_stores(), load=self.prefix_offload.take_loads()
            )
        slots: tuple[list[int], ...] = tuple([] for _ in self.token_groups)
        tables: tuple[list[list[int]], ...] = tuple([] for _ in self.groups)
        pairs = [(group_slots.append, table.append) for group_slots, table in zip(slots, tables, strict=False)]
        lower_tables, cross_tables = (
            tables[len(self.token_groups) : self._num_block_groups],
            tables[self._num_block_groups :],
        )
        for seq_index, start, count in spans:
            sequence = sequences[seq_index]
            assert sequence is not None
            if count == 1 and sequence.fast_path_start <= start < sequence.fast_path_end:
                for group_blocks, (add_slot, add_table) in zip(sequence.groups, pairs, strict=True):
                    add_slot(group_blocks.slot_offset + start)
                    add_table(group_blocks.blocks)
            else:
                self._place_tokens(sequence, start, start + count, slots, tables)
            for table, level in zip(lower_tables, sequence.lower_levels, strict=True):
                table.append(level.blocks)
            if cross_tables:
                for table, blocks in zip(cross_tables, self._encoder_sequence(seq_index).blocks, strict=True):
                    table.append(blocks)
            if start + count > sequence.num_written:
                sequence.num_written = start + count
        return BlockAllocation(block_ops, slots, tables, len(self.lower_groups))

    def commit(self, seq_index: int, token_ids: Sequence[int], num_sure: int | None = None) -> None:
        """Commit computed tokens, prompt and generated ones alike, and publish full blocks.

        Args:
            seq_index: Index of the sequence.
            token_ids: The computed tokens.
            num_sure: Publish only blocks within the first ``num_sure`` tokens: logits at or behind their last token
                were finite. The others are published by a later commit.
        """
        sequence = self._sequence(seq_index)
        sequence.length += len(token_ids)
        assert sequence.length <= sequence.num_written, (
            f"sequence {seq_index} commits {sequence.length} tokens, {sequence.num_written} were allocated"
        )
        if sequence.length < sequence.num_written:
            sequence.fast_path_start = NEVER  # later tokens occupy the next slot
        if sequence.last_block is not None:
            if sequence.republish:
                self._prefix_cache.republish(sequence)
            sequence.tail_tokens.extend(token_ids)
            if len(sequence.tail_tokens) >= self.block_mappings[0].block_size:
                self._prefix_cache.publish(sequence, sequence.length if num_sure is None else num_sure)
        if self.prefix_offload is not None:
            self.prefix_offload.on_released(seq_index)

    def flush_offload(self) -> BlockOps | None:
        """Return pending copies to the block store when no step will make them, or None."""
        if self.prefix_offload is None or not self.prefix_offload.pending:
            return None
        stores = self.prefix_offload.take_stores()
        return self._empty_ops()._replace(store=stores) if stores else None

    # ------------------------------------------------------------ queries

    def seq_len(self, seq_index: int) -> int:
        return self._sequence(seq_index).length

    def is_loading(self, seq_index: int) -> bool:
        """Return True if the sequence's next step will fill its blocks: it is swapped in or loading."""
        return seq_index in self._swapped.pending_swap_ins or (
            self.prefix_offload is not None and self.prefix_offload.is_loading(seq_index)
        )

    def has_capacity(self, num_seqs: int, length: int) -> bool:
        """Return True if ``num_seqs`` sequences of ``length`` tokens fit into empty pools without sharing."""
        return all(
            num_seqs * max_blocks(group, self.groups, length) <= group.num_usable_blocks
            for group in self.groups[: self._num_block_groups]
        )

    def can_allocate(self, seq_index: int, length: int, others: Sequence[tuple[int, int]] = ()) -> bool:
        """Return True if available blocks above the watermark let a sequence grow to ``length`` tokens.

        ``others`` are (sequence index, length) of sequences that must be able to grow at the same time.
        """
        targets = [
            (self._sequence(seq_index), length),
            *((self._sequence(other), other_length) for other, other_length in others),
        ]
        for index, (group, pool) in enumerate(zip(self.groups[: self._num_block_groups], self.pools, strict=False)):
            num_needed = sum(
                max(0, max_blocks(group, self.groups, target) - len(sequence.all_groups[index].blocks))
                for sequence, target in targets
            )
            if num_needed > pool.num_available - self.watermark_blocks[index]:
                return False
        return True

    def needs_blocks(self, seq_index: int, count: int) -> bool:
        """Return True if the next ``count`` tokens of a sequence need new blocks."""
        return self._allocator.needs_blocks(seq_index, count)

    def reset_peak(self) -> None:
        """Restart :attr:`CacheStats.peak` from the blocks in use now."""
        for pool in self.pools:
            pool.reset_peak()

    def stats(self) -> CacheStats:
        pools = self.pools
        return CacheStats(
            total=tuple(pool.total for pool in pools),
            used=tuple(pool.num_live for pool in pools),
            free=tuple(pool.num_free for pool in pools),
            evictable=tuple(pool.evictable for pool in pools),
            evictions=tuple(pool.evictions for pool in pools),
            hits=self._prefix_cache.hits,
            misses=self._prefix_cache.misses,
            hit_tokens=self._prefix_cache.hit_tokens,
            peak=tuple(pool.peak for pool in pools),
            watermark=self.watermark_blocks + (0,) * (len(pools) - len(self.watermark_blocks)),
        )

    def check(self) -> None:
        """Assert the invariant of every pool, and that reference counts equal the sequences' blocks."""
        for index, pool in enumerate(self.pools):
            pool.check()
            refs = [0] * len(pool.refs)
            for seq_index, sequence in enumerate(self._sequences):
                if sequence is None:
                    continue
                if index < len(self.token_groups):
                    self._check_group_blocks(index, seq_index, sequence)
                    blocks = sequence.groups[index].blocks
                elif index < self._num_block_groups:
                    blocks = sequence.lower_levels[index - len(self.token_groups)].blocks
                    assert len(blocks) <= self.groups[index].max_blocks_per_seq, f"group {index}: too many blocks"
                else:
                    blocks = (
                        []
                        if sequence.encoder_sequence is None
                        else sequence.encoder_sequence.blocks[index - self._num_block_groups]
                    )
                for block in blocks:
                    refs[block] += 1
            assert refs == pool.refs, f"group {index}: the sequences' blocks differ from the reference counts"

    # ------------------------------------------------------------ inside

    def _sequence(self, seq_index: int) -> SequenceBlocks:
        sequence = self._sequences[seq_index]
        assert sequence is not None, f"no sequence has index {seq_index}"
        return sequence

    def _free_all(self, sequence: SequenceBlocks) -> None:
        for group_blocks, pool in zip(sequence.all_groups, self.pools, strict=False):
            _decref_all(pool, group_blocks.blocks)

    def _empty_ops(self) -> BlockOps:
        nothing: tuple[()] = ()
        empty = (nothing,) * len(self.groups)
        return BlockOps(empty, empty)

    def _window_held(self, sequence: SequenceBlocks, length: int) -> bool:
        """Return True if every group still holds the keys that a query at position ``length`` needs."""
        if length < sequence.min_truncate_length:
            return False
        groups = zip(self.block_mappings, sequence.groups, strict=True)
        return all(mapping.has_window(group_blocks, sequence.num_written, length) for mapping, group_blocks in groups)

    def _place_tokens(
        self,
        sequence: SequenceBlocks,
        start: int,
        end: int,
        slots: tuple[list[int], ...],
        tables: tuple[list[list[int]], ...],
    ) -> None:
        """Append the slots of positions start .. end - 1, and compute the end of the fast path."""
        fast_path_end = NEVER
        for mapping, group_blocks, group_slots, table in zip(
            self.block_mappings, sequence.groups, slots, tables, strict=False
        ):
            max_tokens = mapping.group.max_blocks_per_seq
            assert len(group_blocks.blocks) <= max_tokens, f"a sequence outgrows its {max_tokens} blocks"
            fast_path_end = min(fast_path_end, mapping.slots(group_blocks, start, end, group_slots))
            table.append(group_blocks.blocks)
        sequence.fast_path_start, sequence.fast_path_end = end, fast_path_end

    def _check_group_blocks(self, index: int, seq_index: int, sequence: SequenceBlocks) -> None:
        group_blocks, mapping, label = (
            sequence.groups[index],
            self.block_mappings[index],
            f"group {index}, sequence {seq_index}",
        )
        mapping.check(group_blocks, sequence, label)
        if mapping.is_ring or mapping.eviction_policy is not None:
            return
        for index_in_sequence, block in enumerate(group_blocks.blocks):
            logical = (
                index_in_sequence
                if index_in_sequence < mapping.num_sink_blocks
                else index_in_sequence + group_blocks.num_skipped_blocks
            )
            prefix = self.pools[index].prefixes[block]
            assert prefix is None or prefix.depth == logical + 1, (
                f"{label}: block {block} is published at another depth"
            )


def _max_hit(token_ids: Sequence[int], max_tokens: int | None) -> int:
    """Return the maximum length of a hit: at least one token is left to compute."""
    return len(token_ids) - 1 if max_tokens is None else min(max_tokens, len(token_ids) - 1)


def _decref_all(pool: BlockPool, blocks: list[int]) -> None:
    for block in reversed(blocks):
        pool.decref(block)


def _build_pool(group: CacheGroup) -> BlockPool:
    is_offloaded = group.lower_level is not None and group.lower_level.is_offloaded
    return LowestFreeBlockPool(group.num_blocks) if is_offloaded else BlockPool(group.num_blocks)
