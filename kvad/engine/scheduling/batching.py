"""How a step's rows are cut into lanes: rows with as many new tokens and like reading lengths side by side.

Integers only: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvad.cache import CacheGroup
from kvad.cache.manager import BlockAllocation
from kvad.engine.scheduling.sequence import TokenSequence
from kvad.model_input import SubBatch

MIN_READ_BUCKET = 64  # slots; rows that read less are not told apart: one more lane would cost more than the reading

BatchItem = tuple[int, TokenSequence, int]  # sort key, row, number of new tokens


class SubBatchBuilder:
    """Cuts the steps of one cache."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups = tuple(groups)
        many = [group for group in self._groups if group.max_blocks_per_seq > 1]
        self._unit = max([MIN_READ_BUCKET, *(group.block_size for group in many)])
        self._reads = max((g.max_blocks_per_seq * g.block_size for g in self._groups), default=1)  # of a row at most

    def sort_key(self, row: TokenSequence, new: int) -> int:
        """Sorts by (new tokens, read bucket, seat); the bucket is a power of two of units."""
        end = row.num_computed_tokens + new
        if end > row.read_bucket:
            units = -(-min(end, self._reads) // self._unit)
            row.read_bucket = self._unit << (units - 1).bit_length()
        return ((new << 40 | row.read_bucket) << 16) + row.seq_index

    def build(self, items: list[BatchItem], placed: BlockAllocation) -> tuple[SubBatch, ...]:
        lanes, begin = [], 0
        for stop in range(1, len(items) + 1):
            if stop == len(items) or items[stop][0] >> 16 != items[begin][0] >> 16:
                lanes.append(SubBatch(stop - begin, items[begin][2], self._read(items, placed, begin, stop)))
                begin = stop
        return tuple(lanes)

    def _read(self, items: list[BatchItem], placed: BlockAllocation, begin: int, stop: int) -> int:
        """Slots that the lane's widest row reads in the group where it reads most."""
        read = 0
        for group, tables in zip(self._groups, placed.block_tables, strict=True):
            if group.lower_level is not None:
                continue
            if group.max_blocks_per_seq > 1:
                slots = max(map(len, tables[begin:stop])) * group.block_size
            else:  # a row's only block: no further than it is written
                longest = max(row.num_computed_tokens + new for _, row, new in items[begin:stop])
                slots = min(group.block_size, -(-longest // MIN_READ_BUCKET) * MIN_READ_BUCKET)
            read = max(read, slots)
        return read


def group_by_source(items: list[BatchItem], lanes: tuple[SubBatch, ...]) -> tuple[SubBatch, ...]:
    """The lanes as cross-attention cuts them: each run of rows of one request is one row, where all runs of a lane
    are equally long.  ``read`` is the longest source's length in whole blocks."""
    folded, begin = [], 0
    for lane in lanes:
        rows = [row for _, row, _ in items[begin : begin + lane.num_seqs]]
        begin += lane.num_seqs
        runs = [1]
        for before, row in pairwise(rows):
            if row.request is before.request:
                runs[-1] += 1
            else:
                runs.append(1)
        beams = runs[0] if len(set(runs)) == 1 else 1
        read = max(len(row.request.encoder_tokens or ()) for row in rows)
        folded.append(SubBatch(lane.num_seqs // beams, beams * lane.num_new_tokens, read))
    return tuple(folded)
