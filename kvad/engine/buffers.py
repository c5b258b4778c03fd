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

from kvad.engine.row import Plan
from kvad.step import EMPTY_BLOCK, Lane, Place, Step

__all__ = ["Bucket", "StepBuffers"]

ALIGNED = 8  # integers: 64 bytes
SMALLEST = 1 << 12  # integers
MOST_BUCKETS = 256  # kept; beyond it they are made anew


class Bucket(NamedTuple):
    """``widths``: per cache group and lane, the blocks of its longest row.  The first ``own`` groups take tokens; the
    groups of cross-attention, behind the first ``kept``, cut the tokens into the lanes ``cross``."""

    lanes: tuple[Lane, ...]
    wanted: int
    widths: tuple[tuple[int, ...], ...]
    cross: tuple[Lane, ...] | None = None
    own: int = 0
    kept: int = 0

    @staticmethod
    def of(plan: Plan) -> Bucket:
        placed = plan.placed
        widths, own = tuple(_widths(plan.lanes, tables) for tables in placed.tables), len(placed.slots)
        wanted = sum(len(work.wanted) for work in plan.work)
        return Bucket(plan.lanes, wanted, widths, plan.cross, own, own + placed.below)

    def rows(self, group: int) -> tuple[Lane, ...]:
        """The lanes of one group."""
        return self.lanes if group < self.kept or self.cross is None else self.cross


class _Static(NamedTuple):
    """One bucket's tensors, and the host's side of each of them in the same order."""

    step: Step
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    wanted: NDArray[np.int64]
    limits: NDArray[np.int64] | None
    slots: list[NDArray[np.int64]]
    tables: list[list[NDArray[np.int64]]]
    strides: list[list[int]]
    used: int


class StepBuffers:
    """``longest``: the model's limit, where its rotary regime asks for each row's; else None."""

    def __init__(self, device: torch.device, *, longest: int | None) -> None:
        self.device, self._longest = device, longest
        self._buckets: dict[Bucket, _Static] = {}
        self._allocate(SMALLEST)

    def leaves(self) -> list[Tensor]:
        """Every tensor that a step's tensors are views of."""
        return [self._there]

    def fill(self, plan: Plan) -> Step:
        """The plan's integers, in its bucket's tensors."""
        static = self._bucket(Bucket.of(plan))
        tokens: list[int] = []
        positions: list[int] = []
        limits: list[int] = []
        wanted: list[int] = []
        for work in plan.work:
            end = work.start + work.count
            wanted.extend(len(tokens) + offset for offset in work.wanted)
            tokens.extend(work.row.tokens[work.start : end])
            positions.extend(range(work.start, end))
            if self._longest is not None:
                limits.extend([min(work.row.limit, self._longest)] * work.count)
        static.tokens[:] = tokens
        static.positions[:] = positions
        static.wanted[:] = wanted
        if static.limits is not None:
            static.limits[:] = limits
        for group, slots in enumerate(plan.placed.slots):
            static.slots[group][:] = slots
        for group, rows in enumerate(plan.placed.tables):
            _write_tables(static.tables[group], static.strides[group], rows)
        if self._there is not self._here:  # the host waits for every step's logits: nothing reads this copy any more
            self._there[: static.used].copy_(self._here[: static.used], non_blocking=True)
        return static.step

    def _bucket(self, bucket: Bucket) -> _Static:
        static = self._buckets.get(bucket)
        if static is None:
            sizes = _sizes(bucket, self._longest is not None)
            need = sum(map(_aligned, map(math.prod, sizes)))
            if need > len(self._here):
                self._allocate(1 << (need - 1).bit_length())
            if len(self._buckets) >= MOST_BUCKETS:
                self._buckets.clear()
            static = self._buckets[bucket] = self._views(bucket, sizes)
        return static

    def _allocate(self, integers: int) -> None:
        self._buckets.clear()
        self._here = torch.zeros(integers, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._there = self._here if self.device.type == "cpu" else torch.zeros_like(self._here, device=self.device)

    def _views(self, bucket: Bucket, sizes: Sequence[tuple[int, ...]]) -> _Static:
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
            slots = next(tensors) if group < bucket.own else None
            tables = tuple(next(tensors) for _ in widths)
            places.append(Place(slots, tables, None if group < bucket.kept else bucket.cross))
        step = Step(tokens, positions, bucket.lanes, wanted, limits=limits, places=tuple(places))
        first = next(hosts), next(hosts), next(hosts), next(hosts) if self._longest is not None else None
        written, filled, strides = [], [], []
        for group, widths in enumerate(bucket.widths):
            if group < bucket.own:
                written.append(next(hosts))
            filled.append([next(hosts) for _ in widths])
            folded = zip(bucket.lanes, bucket.rows(group), strict=True)
            strides.append([lane.rows // rows.rows for lane, rows in folded])
        return _Static(step, *first, written, filled, strides, at)


def _sizes(bucket: Bucket, with_limits: bool) -> list[tuple[int, ...]]:
    """Shapes of tokens, positions, wanted, [limits], and per group its slots (of its own tokens), its lanes' tables."""
    tokens = sum(lane.rows * lane.new for lane in bucket.lanes)
    sizes: list[tuple[int, ...]] = [(tokens,), (tokens,), (bucket.wanted,)]
    if with_limits:
        sizes.append((tokens,))
    for group, widths in enumerate(bucket.widths):
        if group < bucket.own:
            sizes.append((tokens,))
        sizes.extend((lane.rows, width) for lane, width in zip(bucket.rows(group), widths, strict=True))
    return sizes


def _aligned(integers: int) -> int:
    return -(-integers // ALIGNED) * ALIGNED


def _widths(lanes: Sequence[Lane], tables: Sequence[Sequence[int]]) -> tuple[int, ...]:
    widths, start = [], 0
    for lane in lanes:
        widths.append(max(map(len, tables[start : start + lane.rows])))
        start += lane.rows
    return tuple(widths)


def _write_tables(lanes: Sequence[NDArray[np.int64]], strides: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
    """Each row's blocks, padded with the empty block to its lane's longest row; of ``stride`` rows that share a source,
    the first one's."""
    start = 0
    for table, stride in zip(lanes, strides, strict=True):
        stop = start + len(table) * stride
        for blocks, line in zip(rows[start:stop:stride], table, strict=True):
            line[: len(blocks)] = blocks
            line[len(blocks) :] = EMPTY_BLOCK
        start = stop
