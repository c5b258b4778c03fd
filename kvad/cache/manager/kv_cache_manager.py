"""KVCacheManager: the block tables and slots of all running sequences, on the host. No torch.

A sequence has an index that is fixed while it runs. Position p belongs to logical block ``p // block_size``. In each
cache group the sequence holds its blocks in order, except for the skipped blocks: logical blocks behind the sinks that
no query can see any more. A group with one block per sequence (contiguous) is a ring behind its sinks.

Under an eviction policy (``policy.EvictionPolicy``) a sequence keeps a number of its slots at certain lengths. They
are moved to the front, so position p is stored where ``p - num_evicted_tokens`` would be. Only the device knows which
tokens they are. Under a tiered policy, whole blocks are demoted (``allocation.py``).

    block size 4, no sinks, 2 skipped, blocks [7, 3]:    positions 8..11 in block 7, 12..15 in block 3 (13: slot 13)
    block size 4, 3 sinks, 2 skipped, blocks [5, 7, 3]:  positions 0..3 in block 5, 12..15 in block 7, 16..19 in block 3

Invariant, in addition to those of the parts: a windowed sequence holds the blocks that the first query of its next span
needs, and none before them. The manager does not decide which request runs, and never reads a key, a value or a score.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.allocation import BlockAllocation, BlockAllocator, LevelDemotion, TokenSpans, max_blocks
from kvad.cache.manager.block_pool import build_pool
from kvad.cache.manager.encoder_blocks import EncoderAllocation, EncoderBlocks, EncoderSequence
from kvad.cache.manager.portable_layout import GroupLayout, SequenceLayout, blocks_to_import, describe_layout
from kvad.cache.manager.prefix_cache import CacheStats, PrefixCache
from kvad.cache.manager.prefix_history import PrefixHistory, PrefixLookup
from kvad.cache.manager.prefix_index import HashFn, PrefixIndex, PrefixNode, digest
from kvad.cache.manager.prefix_offload import BlockStoreProtocol, PrefetchRequest, PrefixOffload
from kvad.cache.manager.sequence_blocks import NEVER, BlockMapping, SequenceBlocks, SwappedSequence, SwappedSequences
from kvad.cache.policy import OffloadPolicy
from kvad.model_input import BlockOps


class KVCacheManager:
    """Owns one ``BlockPool`` per group and the block records of up to ``max_num_seqs`` sequences.

    Args:
        groups: Token groups first, then lower groups, then cross-attention groups.
        prefix_caching: Share blocks of equal prefixes, if the groups allow it.
        max_num_seqs: Maximum number of running sequences.
        hash_fn: Hash of a block's history.
        watermark: Fraction of each pool that ``can_allocate`` leaves free.
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
        upper = [group for group in self.groups if group.lower_level is None]
        self.token_groups = tuple(group for group in upper if not group.spec.is_cross_attention)
        self.lower_groups = tuple(group for group in self.groups if group.lower_level is not None)
        num_token_groups, count = len(self.token_groups), len(self.token_groups) + len(self.lower_groups)
        assert self.groups[:count] == self.token_groups + self.lower_groups, (
            "token groups must come first, then lower groups, then cross-attention"
        )
        self._num_block_groups = count
        self.watermark_blocks = tuple(math.ceil(watermark * group.num_usable_blocks) for group in self.groups[:count])
        self.pools = tuple(map(build_pool, self.groups))
        self.num_frees = 0  # Grows when blocks are freed. Retry admission only after that.
        self._sequences: list[SequenceBlocks | None] = [None] * max_num_seqs
        self.block_mappings = tuple(map(BlockMapping, self.token_groups))
        self.history = PrefixHistory()
        demotion = LevelDemotion(self.groups, self.pools, num_token_groups)
        self._allocator = BlockAllocator(self.block_mappings, self.pools, self._sequences, demotion, self.history)
        # A preempted sequence is swapped out, never recomputed.
        self.uses_offload = any(isinstance(group.demotion_policy, OffloadPolicy) for group in self.token_groups)
        is_lossy = any(group.eviction_policy or group.demotion_policy for group in self.token_groups)
        self.lossy = is_lossy and not self.uses_offload
        policies = [group.eviction_policy for group in self.token_groups]
        self.observes_attention = any(policy is not None and policy.observed_queries for policy in policies)
        # A sequence of one block can share no full block and leave one token to compute: nothing to publish.
        # Blocks of an offloading sequence leave its table, and another sequence would have no room for all of them.
        has_rings = any(mapping.is_ring for mapping in self.block_mappings)
        can_share = bool(self.token_groups) and not (has_rings or self.uses_offload or self.lossy)
        self.prefix_caching = prefix_caching and can_share
        block_sizes = {mapping.block_size for mapping in self.block_mappings}
        assert not self.prefix_caching or len(block_sizes) == 1, "prefix reuse needs one block size"
        self._pools = self.pools[:num_token_groups]
        self.prefix_offload: PrefixOffload | None = None  # connection to the block store
        if block_store is not None and self.prefix_caching:
            self.prefix_offload = PrefixOffload(block_store, len(self.groups))
        prefixes = PrefixIndex(hash_fn)
        self._prefix_cache = PrefixCache(self.block_mappings, self._pools, prefixes, self.prefix_offload, self.history)
        for index, pool in enumerate(self._pools):
            pool.on_evict = partial(self._prefix_cache.on_evicted, index)
        for pool in self.pools[count:]:
            pool.on_evict = lambda block, prefix: self.history.on_evicted(prefix)
        self._swapped = SwappedSequences(self.pools[:count])
        first_lower_groups = [self.groups[levels[0]] if levels else None for levels in demotion.lower_groups]
        max_lengths = map(BlockMapping.max_length, self.block_mappings, first_lower_groups)
        self.capacity = min(max_lengths, default=sys.maxsize)
        self._encoder = EncoderBlocks(self.groups[count:], self.pools[count:], prefixes, share=self.prefix_caching)

    # ------------------------------------------------------------ add, fork, truncate, free

    def add_sequence(
        self,
        seq_index: int,
        token_ids: Sequence[int],
        prefix_root: bytes,
        max_tokens: int | None = None,
        prefetched: PrefetchRequest | None = None,
        request_id: int = -1,
    ) -> int | None:
        """Add a sequence, acquire its longest cached prefix and return its length; None if the index is in use.

        A hit is a multiple of the block size and leaves at least one token to compute. A group with a window needs
        only the blocks of the last ``window - 1`` tokens.

        Args:
            seq_index: Index of the new sequence.
            token_ids: Its tokens.
            prefix_root: Bytes that separate prefixes of different weights, adapters, tenants, ...
            max_tokens: Maximum length of the hit.
            prefetched: A finished request; its blocks are filled in the next step.
            request_id: Request of the sequence, for ``history``.
        """
        if self._sequences[seq_index] is not None:
            return None
        sequence = self._sequences[seq_index] = self._new_sequence(self._root(prefix_root), request_id)
        self.history.lookup = PrefixLookup(reason="off")
        if sequence.root is not None:
            with self.history.allocating("load", request_id):
                sequence.length = sequence.num_written = self._prefix_cache.acquire_longest(
                    seq_index, sequence, token_ids, _max_hit(token_ids, max_tokens), prefetched
                )
        return sequence.length

    def prefetch(self, token_ids: Sequence[int], prefix_root: bytes, max_tokens: int | None = None) -> PrefetchRequest:
        """Build a request for blocks that are in the block store and in no pool. The caller starts it."""
        return self._prefix_cache.prefetch(token_ids, prefix_root, _max_hit(token_ids, max_tokens))

    def block_keys(self, token_ids: Sequence[int], prefix_root: bytes) -> list[str]:
        return self._prefix_cache.block_keys(token_ids, prefix_root)

    def fork(self, seq_index: int, child: int, length: int) -> bool:
        """Add ``child`` with the first ``length`` tokens of a sequence. Blocks are shared until one of them writes.

        Returns:
            False, and no change, if a window or an eviction has dropped what a query at ``length`` needs, if a policy
            accumulates attention per sequence, or if the sequence's blocks are filled only in its next step.
        """
        sequence = self._sequence(seq_index)
        assert self._sequences[child] is None and 0 <= length <= sequence.length, (seq_index, child, length)
        if self.observes_attention or self.is_loading(seq_index) or not self._window_held(sequence, length):
            return False
        forked = self._new_sequence(sequence.root, sequence.request_id)
        for old_level, new_level in zip(sequence.lower_levels, forked.lower_levels, strict=True):
            new_level.blocks, new_level.num_used_slots = list(old_level.blocks), old_level.num_used_slots
        for mapping, old, new in zip(self.block_mappings, sequence.groups, forked.groups, strict=True):
            mapping.copy_for_fork(old, new, length)
        for pool, group_blocks in zip(self.pools, forked.all_groups, strict=False):
            for block in group_blocks.blocks:
                pool.incref(block)
        if sequence.encoder_sequence is not None:
            forked.encoder_sequence = self._encoder.share(sequence.encoder_sequence)
        end = sequence.num_written
        if not any(mapping.is_ring for mapping in self.block_mappings):
            end = min(end, self.block_mappings[0].num_blocks(length) * self.block_mappings[0].block_size)
        forked.length, forked.num_written = length, max(length, end)
        forked.last_block, forked.tail_tokens = self._prefix_cache.history(sequence, length)
        sequence.fast_path_start = NEVER
        self._sequences[child] = forked
        return True

    def truncate(self, seq_index: int, length: int) -> int:
        """Drop the tokens from ``length`` on and return the new length.

        It is 0 if a window has passed what a query at ``length`` needs: recompute the sequence.
        """
        sequence = self._sequence(seq_index)
        assert not self.is_loading(seq_index), "truncate a swapped or loaded sequence after its next step"
        if length >= sequence.length:
            return sequence.length
        self.num_frees += 1
        if length == 0 or not self._window_held(sequence, length):
            self._free_all(sequence)
            sequence.reset()
            return 0
        for mapping, pool, group_blocks in zip(self.block_mappings, self._pools, sequence.groups, strict=True):
            num_blocks, sinks = mapping.blocks_after_truncate(group_blocks, length), mapping.num_sink_blocks
            pool.decref_all(group_blocks.blocks[num_blocks:])
            group_blocks.blocks = group_blocks.blocks[:num_blocks]
            if num_blocks <= sinks and not mapping.is_ring and mapping.eviction_policy is None:
                num_skipped = max(0, length // mapping.block_size - sinks)
                group_blocks.num_skipped_blocks = min(group_blocks.num_skipped_blocks, num_skipped)
        sequence.last_block, sequence.tail_tokens = self._prefix_cache.history(sequence, length)
        sequence.length, sequence.fast_path_start = length, NEVER
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

    # ------------------------------------------------------------ swap, export, import

    def swap_out(self, seq_index: int) -> SwappedSequence:
        """Swap out a sequence: its blocks are copied out by the next BlockOps, then freed."""
        sequence, is_swapping_in = self._sequence(seq_index), seq_index in self._swapped.pending_swap_ins
        assert is_swapping_in or not self.is_loading(seq_index), "a sequence that is loading has nothing to copy"
        assert not self.uses_offload, "offloading sequences are not swapped: they are recomputed"
        swapped = self._swapped.swap_out(seq_index, sequence)
        self.free(seq_index)
        return swapped

    def swap_in(self, seq_index: int, swapped: SwappedSequence, request_id: int = -1) -> bool:
        """Restore a swapped sequence. Return False, and no change, if a pool is too full."""
        assert self._sequences[seq_index] is None, f"index {seq_index} is in use"
        with self.history.allocating("swap-in", request_id):
            sequence = self._sequences[seq_index] = self._swapped.swap_in(seq_index, swapped)
        if sequence is not None:
            sequence.request_id = request_id
        return sequence is not None

    def export_layout(self, seq_index: int) -> SequenceLayout | None:
        """Return the blocks of a sequence, valid until the next step; None if they are not filled yet."""
        if self.is_loading(seq_index):
            return None
        return describe_layout(self.token_groups, self._sequence(seq_index))

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

        Its full blocks are published under ``prefix_root`` after its next step, if prefixes are shared. Layouts are
        per token group, ``lower_levels`` are (blocks, filled slots) per lower group.
        """
        sequence = blocks_to_import(token_ids, self._root(prefix_root), layouts, lower_levels)
        return self._swapped.add(sequence, has_encoder_blocks=has_encoder_blocks)

    def drop_swapped(self, swapped: SwappedSequence) -> None:
        """Drop a swapped sequence that will not return: its copy is deleted with the next BlockOps."""
        self._swapped.pending_drops.append(swapped.key)

    @property
    def pending_swap_outs(self) -> list[int]:
        """Keys of swapped sequences that the next BlockOps copy out."""
        return [key for key, _ in self._swapped.pending_swap_outs]

    @property
    def pending_swap_ins(self) -> list[int]:
        """Keys of swapped-in sequences that the BlockOps of their next step copy in."""
        return [swap_in.sequence.key for swap_in in self._swapped.pending_swap_ins.values()]

    # ------------------------------------------------------------ cross-attention

    @property
    def max_source_len(self) -> int:
        """Maximum number of encoder tokens; 0 without cross-attention."""
        return self._encoder.max_source_len

    def attach_encoder_input(self, seq_index: int, token_ids: Sequence[int], prefix_root: bytes) -> bool | None:
        """Attach an encoder input, which is held until ``free`` and written once.

        Returns True if it is encoded already, False if it must be encoded, None if a pool is too full.
        """
        sequence = self._sequence(seq_index)
        assert sequence.encoder_sequence is None, f"sequence {seq_index} has an encoder input"
        with self.history.allocating("input", sequence.request_id):
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
        sequence = self._sequence(child)
        assert sequence.encoder_sequence is None, (seq_index, child)
        sequence.encoder_sequence = self._encoder.share(self._encoder_sequence(seq_index))

    def allocate_encoder_slots(self, seq_indices: Sequence[int]) -> EncoderAllocation:
        """Return the slots that the encoder writes for these sequences, in their order."""
        return self._encoder.allocate_slots(list(map(self._encoder_sequence, seq_indices)), self._num_block_groups)

    def commit_encoder_blocks(self, seq_index: int) -> None:
        self._encoder.commit(self._encoder_sequence(seq_index))

    # ------------------------------------------------------------ a step

    def allocate_slots(self, spans: TokenSpans) -> BlockAllocation | None:
        """Allocate slots for every span, at most one per sequence. None and no change if a pool is too full."""
        sequences = self._sequences
        slow_spans = []
        for span in spans:
            sequence = sequences[span[0]]
            assert sequence is not None and span[1] == sequence.length, f"{span} does not start at its sequence's end"
            if span[2] != 1 or not sequence.fast_path_start <= span[1] < sequence.fast_path_end:
                slow_spans.append(span)
        block_ops = self._allocator.allocate(slow_spans) if slow_spans else self._empty_ops()
        if block_ops is None:
            return None
        block_ops = self._swapped.attach_to_ops(block_ops, [span[0] for span in spans])
        if self.prefix_offload is not None and self.prefix_offload.pending:
            stores, loads = self.prefix_offload.take_stores(), self.prefix_offload.take_loads()
            block_ops = block_ops._replace(store=stores, load=loads)
        slots, tables = self._allocator.place_tokens(spans)
        return BlockAllocation(block_ops, slots, tables, len(self.lower_groups))

    def commit(self, seq_index: int, token_ids: Sequence[int], num_sure: int | None = None) -> None:
        """Commit computed tokens, prompt and generated ones alike, and publish full blocks.

        Only blocks within the first ``num_sure`` tokens are published: logits at or behind their last token were
        finite. The others are published by a later commit.
        """
        sequence = self._sequence(seq_index)
        sequence.length += len(token_ids)
        assert sequence.length <= sequence.num_written, f"sequence {seq_index} commits more tokens than were allocated"
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

    def publish(self, seq_index: int, num_sure: int) -> None:
        """Publish full blocks of committed tokens within the first ``num_sure`` (``commit``)."""
        sequence = self._sequence(seq_index)
        if sequence.last_block is not None and len(sequence.tail_tokens) >= self.block_mappings[0].block_size:
            self._prefix_cache.publish(sequence, num_sure)

    def flush_offload(self) -> BlockOps | None:
        """Return pending copies to the block store when no step will make them, or None."""
        stores = () if self.prefix_offload is None else self.prefix_offload.take_stores()
        return self._empty_ops()._replace(store=stores) if stores else None

    # ------------------------------------------------------------ queries

    def seq_len(self, seq_index: int) -> int:
        return self._sequence(seq_index).length

    def num_blocks(self, seq_index: int) -> list[int]:
        return [len(group_blocks.blocks) for group_blocks in self._sequence(seq_index).all_groups]

    def is_loading(self, seq_index: int) -> bool:
        """Return True if the sequence's next step will fill its blocks: it is swapped in or loading."""
        offload = self.prefix_offload
        return seq_index in self._swapped.pending_swap_ins or (offload is not None and offload.is_loading(seq_index))

    def retained_prefix_length(self, seq_index: int) -> int:
        """Return the length of the prefix that other sequences reference too."""
        return self._prefix_cache.retained_prefix_length(self._sequence(seq_index))

    def cached_prefix_length(self, token_ids: Sequence[int], prefix_root: bytes) -> int:
        """Return the length of the prefix that an admission would find now."""
        root = self._root(prefix_root)
        chain = () if root is None else self._prefix_cache.find(root, token_ids, len(token_ids) - 1)
        return len(chain) * self.block_mappings[0].block_size if chain else 0

    def tokens_until_eviction(self, seq_index: int) -> int:
        """Return the number of tokens until the next eviction or demotion. A span must end there."""
        length = self._sequence(seq_index).length
        policies = [mapping.eviction_policy or mapping.demotion_policy for mapping in self.block_mappings]
        lengths = (policy.next_trigger_length(length) for policy in policies if policy is not None)
        return min(lengths, default=NEVER) - length

    def has_capacity(self, num_seqs: int, length: int) -> bool:
        """Return True if ``num_seqs`` sequences of ``length`` tokens fit into empty pools without sharing."""
        groups = self.groups[: self._num_block_groups]
        return all(num_seqs * max_blocks(group, self.groups, length) <= group.num_usable_blocks for group in groups)

    def can_allocate(self, seq_index: int, length: int, others: Sequence[tuple[int, int]] = ()) -> bool:
        """Return True if available blocks above the watermark let a sequence grow to ``length`` tokens.

        ``others`` are (sequence index, length) of sequences that must be able to grow at the same time.
        """
        targets = [(self._sequence(index).all_groups, end) for index, end in ((seq_index, length), *others)]
        for index, watermark in enumerate(self.watermark_blocks):
            group = self.groups[index]
            needs = (max_blocks(group, self.groups, end) - len(blocks[index].blocks) for blocks, end in targets)
            if sum(max(0, need) for need in needs) > self.pools[index].num_available - watermark:
                return False
        return True

    def needs_blocks(self, seq_index: int, count: int) -> bool:
        return any(need > 0 for need in self._allocator.block_demand([(seq_index, self.seq_len(seq_index), count)]))

    def reset_peak(self) -> None:
        """Restart ``CacheStats.peak`` from the blocks in use now."""
        for pool in self.pools:
            pool.reset_peak()

    def blocks(self, seq_index: int) -> tuple[tuple[int, ...], ...]:
        """Return the blocks of a sequence, per group; a window may have dropped some."""
        sequence = self._sequence(seq_index)
        encoder_blocks = () if sequence.encoder_sequence is None else sequence.encoder_sequence.blocks
        return (*(tuple(group.blocks) for group in sequence.all_groups), *map(tuple, encoder_blocks))

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
        expected = [[0] * len(pool.refs) for pool in self.pools]
        for seq_index, sequence in enumerate(self._sequences):
            if sequence is None:
                continue
            encoder_blocks = () if sequence.encoder_sequence is None else sequence.encoder_sequence.blocks
            tables = [*(group_blocks.blocks for group_blocks in sequence.all_groups), *encoder_blocks]
            for refs, blocks in zip(expected, tables, strict=False):
                for block in blocks:
                    refs[block] += 1
            for mapping, pool, group_blocks in zip(self.block_mappings, self._pools, sequence.groups, strict=True):
                mapping.check(group_blocks, sequence, pool, f"sequence {seq_index}")
            for group, level in zip(self.lower_groups, sequence.lower_levels, strict=True):
                assert len(level.blocks) <= group.max_blocks_per_seq, f"sequence {seq_index}: too many lower blocks"
        for index, (pool, refs) in enumerate(zip(self.pools, expected, strict=True)):
            pool.check()
            assert refs == pool.refs, f"group {index}: the sequences' blocks differ from the reference counts"

    # ------------------------------------------------------------ inside

    def _root(self, prefix_root: bytes) -> PrefixNode | None:
        return self._prefix_cache.prefixes.root(prefix_root) if self.prefix_caching else None

    def _new_sequence(self, root: PrefixNode | None, request_id: int) -> SequenceBlocks:
        return SequenceBlocks(len(self.token_groups), len(self.lower_groups), root, request_id)

    def _sequence(self, seq_index: int) -> SequenceBlocks:
        sequence = self._sequences[seq_index]
        assert sequence is not None, f"no sequence has index {seq_index}"
        return sequence

    def _encoder_sequence(self, seq_index: int) -> EncoderSequence:
        encoder_sequence = self._sequence(seq_index).encoder_sequence
        assert encoder_sequence is not None, f"sequence {seq_index} has no encoder input"
        return encoder_sequence

    def _free_all(self, sequence: SequenceBlocks) -> None:
        for group_blocks, pool in zip(sequence.all_groups, self.pools, strict=False):
            pool.decref_all(group_blocks.blocks)

    def _empty_ops(self) -> BlockOps:
        empty: tuple[tuple[()], ...] = ((),) * len(self.groups)
        return BlockOps(empty, empty)

    def _window_held(self, sequence: SequenceBlocks, length: int) -> bool:
        """Return True if every group still holds the keys that a query at position ``length`` needs."""
        return length >= sequence.min_truncate_length and all(
            group_blocks.last_eviction_length <= length
            and mapping.has_window(group_blocks, sequence.num_written, length)
            for mapping, group_blocks in zip(self.block_mappings, sequence.groups, strict=True)
        )


def _max_hit(token_ids: Sequence[int], max_tokens: int | None) -> int:
    """Return the maximum length of a hit: at least one token is left to compute."""
    return len(token_ids) - 1 if max_tokens is None else min(max_tokens, len(token_ids) - 1)
