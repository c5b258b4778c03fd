"""Static buffers: a step's integers, written to the same addresses whenever the same shape of step comes again.

A step's *bucket* is everything about it that is not a number in a tensor: its lanes, how many logits it wants, how wide
its tables are.  All its integers lie one behind the other in one buffer on the host, which on an accelerator goes over
in one copy; per bucket the tensors that the model is given are made once, as views.  So equal buckets give the model
the very same tensors, with other contents: what a captured graph needs, and what saves an eager step a dozen small
allocations.

    lanes (2 rows x 1 token), one group, tables 3 wide:   tokens 2 | positions 2 | wanted 2 | slots 2 | table 2 x 3

A Step from here is valid until the next :meth:`StepBuffers.fill`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvad.engine.scheduling import SchedulerOutput
from kvad.model_input import NULL_BLOCK, ModelInput, SlotMapping, SubBatch

ALIGNED = 8  # integers: 64 bytes
MIN_CAPACITY = 1 << 12  # integers
MAX_SHAPES = 256  # kept; beyond it they are made anew


class BatchShape(NamedTuple):
    """``widths``: per cache group and lane, the blocks of its longest row.  The first ``own`` groups take tokens; the
    groups of cross-attention, behind the first ``kept``, cut the tokens into the lanes ``cross``."""

    sub_batches: tuple[SubBatch, ...]
    num_logits: int
    widths: tuple[tuple[int, ...], ...]
    cross_sub_batches: tuple[SubBatch, ...] | None = None
    num_token_groups: int = 0
    num_cached_groups: int = 0

    @staticmethod
    def from_output(plan: SchedulerOutput) -> BatchShape:
        placed = plan.allocation
        widths, own = tuple(_widths(plan.sub_batches, tables) for tables in placed.block_tables), len(placed.slots)
        wanted = sum(len(work.logit_offsets) for work in plan.scheduled)
        return BatchShape(plan.sub_batches, wanted, widths, plan.cross_sub_batches, own, own + placed.num_lower_levels)

    def group_sub_batches(self, group: int) -> tuple[SubBatch, ...]:
        """The lanes of one group."""
        return (
            self.sub_batches
            if group < self.num_cached_groups or self.cross_sub_batches is None
            else self.cross_sub_batches
        )


class _Static(NamedTuple):
    """One bucket's tensors, and the host's side of each of them in the same order."""

    step: ModelInput
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    wanted: NDArray[np.int64]
    limits: NDArray[np.int64] | None
    slots: list[NDArray[np.int64]]
    tables: list[list[NDArray[np.int64]]]
    strides: list[list[int]]
    used: int


class InputBuffers:
    """``longest``: the model's limit, where its rotary regime asks for each row's; else None."""

    def __init__(self, device: torch.device, *, longest: int | None) -> None:
        self.device, self._longest = device, longest
        self._buckets: dict[BatchShape, _Static] = {}
        self._allocate(MIN_CAPACITY)

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step's tensors are views of."""
        return [self._there]

    def fill(self, plan: SchedulerOutput) -> ModelInput:
        """The plan's integers, in its bucket's tensors."""
        static = self._bucket(BatchShape.from_output(plan))
        tokens: list[int] = []
        positions: list[int] = []
        limits: list[int] = []
        wanted: list[int] = []
        for work in plan.scheduled:
            end = work.start + work.num_tokens
            wanted.extend(len(tokens) + offset for offset in work.logit_offsets)
            tokens.extend(work.sequence.token_ids[work.start : end])
            positions.extend(range(work.start, end))
            if self._longest is not None:
                limits.extend([min(work.sequence.max_len, self._longest)] * work.num_tokens)
        static.tokens[:] = tokens
        static.positions[:] = positions
        static.wanted[:] = wanted
        if static.limits is not None:
            static.limits[:] = limits
        for group, slots in enumerate(plan.allocation.slots):
            static.slots[group][:] = slots
        for group, rows in enumerate(plan.allocation.block_tables):
            _write_tables(static.tables[group], static.strides[group], rows)
        if self._there is not self._here:  # the host waits for every step's logits: nothing reads this copy any more
            self._there[: static.used].copy_(self._here[: static.used], non_blocking=True)
        return static.step

    def _bucket(self, bucket: BatchShape) -> _Static:
        static = self._buckets.get(bucket)
        if static is None:
            sizes = _sizes(bucket, self._longest is not None)
            need = sum(map(_aligned, map(math.prod, sizes)))
            if need > len(self._here):
                self._allocate(1 << (need - 1).bit_length())
            if len(self._buckets) >= MAX_SHAPES:
                self._buckets.clear()
            static = self._buckets[bucket] = self._views(bucket, sizes)
        return static

    def _allocate(self, integers: int) -> None:
        self._buckets.clear()
        self._here = torch.zeros(integers, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._there = self._here if self.device.type == "cpu" else torch.zeros_like(self._here, device=self.device)

    def _views(self, bucket: BatchShape, sizes: Sequence[tuple[int, ...]]) -> _Static:
        here, there, at = [], [], 0
        for shape in sizes:
            size = math.prod(shape)
            here.append(self._here[at : at + size].view(shape).numpy())
            there.append(self._there[at : at + size].view(shape))
            at += _aligned(size)
        hosts, tensors = iter(here), iter(there)
        tokens, positions, wanted = next(tensors), next(tensors), next(tensors)
        limits = next(tensors) if self._longest is not None else None
        places = []
        for group, widths in enumerate(bucket.widths):
            slots = next(tensors) if group < bucket.num_token_groups else None
            tables = tuple(next(tensors) for _ in widths)
            places.append(
                SlotMapping(slots, tables, None if group < bucket.num_cached_groups else bucket.cross_sub_batches)
            )
        step = ModelInput(
            tokens, positions, bucket.sub_batches, wanted, max_seq_lens=limits, slot_mappings=tuple(places)
        )
        first = next(hosts), next(hosts), next(hosts), next(hosts) if self._longest is not None else None
        written, filled, strides = [], [], []
        for group, widths in enumerate(bucket.widths):
            if group < bucket.num_token_groups:
                written.append(next(hosts))
            filled.append([next(hosts) for _ in widths])
            folded = zip(bucket.sub_batches, bucket.group_sub_batches(group), strict=True)
            strides.append([lane.num_seqs // rows.num_seqs for lane, rows in folded])
        return _Static(step, *first, written, filled, strides, at)


def _sizes(bucket: BatchShape, with_limits: bool) -> list[tuple[int, ...]]:
    """Shapes of tokens, positions, wanted, [limits], and per group its slots (of its own tokens), its lanes' tables."""
    tokens = sum(lane.num_seqs * lane.num_new_tokens for lane in bucket.sub_batches)
    sizes: list[tuple[int, ...]] = [(tokens,), (tokens,), (bucket.num_logits,)]
    if with_limits:
        sizes.append((tokens,))
    for group, widths in enumerate(bucket.widths):
        if group < bucket.num_token_groups:
            sizes.append((tokens,))
        sizes.extend(
            (lane.num_seqs, width) for lane, width in zip(bucket.group_sub_batches(group), widths, strict=True)
        )
    return sizes


def _aligned(integers: int) -> int:
    return -(-integers // ALIGNED) * ALIGNED


def _widths(lanes: Sequence[SubBatch], tables: Sequence[Sequence[int]]) -> tuple[int, ...]:
    widths, start = [], 0
    for lane in lanes:
        widths.append(max(map(len, tables[start : start + lane.num_seqs])))
        start += lane.num_seqs
    return tuple(widths)


def _write_tables(lanes: Sequence[NDArray[np.int64]], strides: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
    """Each row's blocks, padded with the empty block to its lane's longest row; of ``stride`` rows that share a source,
    the first one's."""
    start = 0
    for table, stride in zip(lanes, strides, strict=True):
        stop = start + len(table) * stride
        for blocks, line in zip(rows[start:stop:stride], table, strict=True):
            line[: len(blocks)] = blocks
            line[len(blocks) :] = NULL_BLOCK
        start = stop
