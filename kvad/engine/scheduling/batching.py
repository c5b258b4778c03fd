"""Grouping of a step's sequences into sub-batches.

The sequences of a sub-batch have equally many new tokens and similar read lengths. Integers only: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvad.cache import CacheGroup
from kvad.cache.manager import BlockAllocation
from kvad.engine.scheduling.sequence import TokenSequence
from kvad.model_input import SubBatch

MIN_READ_BUCKET = 64  # slots; shorter reads share a bucket, because another sub-batch costs more than reading

BatchItem = tuple[int, TokenSequence, int]  # sort key, sequence, number of new tokens


class SubBatchBuilder:
    """Builds the sub-batches of one cache's steps."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups = tuple(groups)
        paged_groups = [group for group in self._groups if group.max_blocks_per_seq > 1]
        self._bucket_unit = max([MIN_READ_BUCKET, *(group.block_size for group in paged_groups)])
        self._max_read_slots = max(
            (g.max_blocks_per_seq * g.block_size for g in self._groups), default=1
        )  # per sequence

    def sort_key(self, seq: TokenSequence, num_new_tokens: int) -> int:
        """Return a sort key: (new tokens, read bucket, index).

        Buckets are units times powers of two.
        """
        end = seq.num_computed_tokens + num_new_tokens
        if end > seq.read_bucket:
            units = -(-min(end, self._max_read_slots) // self._bucket_unit)
            seq.read_bucket = self._bucket_unit << (units - 1).bit_length()
        return ((num_new_tokens << 40 | seq.read_bucket) << 16) + seq.seq_index

    def build(self, items: list[BatchItem], allocation: BlockAllocation) -> tuple[SubBatch, ...]:
        """Split sorted items into sub-batches."""
        sub_batches, begin = [], 0
        for stop in range(1, len(items) + 1):
            if stop == len(items) or items[stop][0] >> 16 != items[begin][0] >> 16:
                sub_batches.append(
                    SubBatch(stop - begin, items[begin][2], self._num_read_slots(items, allocation, begin, stop))
                )
                begin = stop
        return tuple(sub_batches)

    def _num_read_slots(self, items: list[BatchItem], allocation: BlockAllocation, begin: int, stop: int) -> int:
        """Return the slots that the sub-batch's longest sequence reads in the group with most slots."""
        num_read_slots = 0
        for group, tables in zip(self._groups, allocation.block_tables, strict=True):
            if group.lower_level is not None:
                continue
            if group.max_blocks_per_seq > 1:
                slots = max(map(len, tables[begin:stop])) * group.block_size
            else:  # a sequence's only block is read up to its last written slot
                max_length = max(
                    seq.num_computed_tokens + num_new_tokens for _, seq, num_new_tokens in items[begin:stop]
                )
                slots = min(group.block_size, -(-max_length // MIN_READ_BUCKET) * MIN_READ_BUCKET)
            num_read_slots = max(num_read_slots, slots)
        return num_read_slots


def group_by_source(items: list[BatchItem], sub_batches: tuple[SubBatch, ...]) -> tuple[SubBatch, ...]:
    """Regroup sub-batches for cross-attention: runs of one request's sequences become one row.

    Applies if all runs of a sub-batch have the same length. ``num_read_slots`` is the longest encoder input's length.
    """
    cross_sub_batches, begin = [], 0
    for sub_batch in sub_batches:
        seqs = [seq for _, seq, _ in items[begin : begin + sub_batch.num_seqs]]
        begin += sub_batch.num_seqs
        runs = [1]
        for previous, seq in pairwise(seqs):
            if seq.request is previous.request:
                runs[-1] += 1
            else:
                runs.append(1)
        run_length = runs[0] if len(set(runs)) == 1 else 1
        num_read_slots = max(len(seq.request.encoder_tokens or ()) for seq in seqs)
        cross_sub_batches.append(
            SubBatch(sub_batch.num_seqs // run_length, run_length * sub_batch.num_new_tokens, num_read_slots)
        )
    return tuple(cross_sub_batches)
