"""Input buffers: a step's integers at the same addresses whenever a batch shape recurs.

A :class:`BatchShape` is everything about a step except the numbers in its tensors: sub-batches, number of logits, table
widths. All integers are in one host buffer, which goes to an accelerator in one copy; the tensors of each shape are
created once, as views. Equal shapes give the model the same tensors with other contents: a captured graph needs this,
and an eager step saves a dozen small allocations.

    sub-batch (2 sequences x 1 token), one group, tables 3 wide:
    tokens 2 | positions 2 | logit indices 2 | slots 2 | table 2 x 3

A ModelInput from here is valid until the next :meth:`InputBuffers.fill`.
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

ALIGNED = 8  # integers, 64 bytes
MIN_CAPACITY = 1 << 12  # integers
MAX_SHAPES = 256  # cached; all are rebuilt when the limit is exceeded


class BatchShape(NamedTuple):
    """Shape of a step.

    ``widths``: per cache group and sub-batch, the blocks of its longest sequence. The first ``num_token_groups`` groups
        store
    tokens; groups after the first ``num_cached_groups`` (cross-attention) use ``cross_sub_batches``.
    """

    sub_batches: tuple[SubBatch, ...]
    num_logits: int
    widths: tuple[tuple[int, ...], ...]
    cross_sub_batches: tuple[SubBatch, ...] | None = None
    num_token_groups: int = 0
    num_cached_groups: int = 0

    @staticmethod
    def from_output(output: SchedulerOutput) -> BatchShape:
        allocation = output.allocation
        widths, num_token_groups = (
            tuple(_widths(output.sub_batches, tables) for tables in allocation.block_tables),
            len(allocation.slots),
        )
        logit_indices = sum(len(scheduled.logit_offsets) for scheduled in output.scheduled)
        return BatchShape(
            output.sub_batches,
            logit_indices,
            widths,
            output.cross_sub_batches,
            num_token_groups,
            num_token_groups + allocation.num_lower_levels,
        )

    def group_sub_batches(self, group: int) -> tuple[SubBatch, ...]:
        """Return the sub-batches of one group."""
        return (
            self.sub_batches
            if group < self.num_cached_groups or self.cross_sub_batches is None
            else self.cross_sub_batches
        )


class _ShapeBuffers(NamedTuple):
    """Tensors of one shape, and their host arrays in the same order."""

    model_input: ModelInput
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    logit_indices: NDArray[np.int64]
    max_seq_lens: NDArray[np.int64] | None
    slots: list[NDArray[np.int64]]
    tables: list[list[NDArray[np.int64]]]
    strides: list[list[int]]
    num_used: int


class InputBuffers:
    """Buffers for all shapes.

    ``max_model_len`` is the model's limit if its rotary regime depends on lengths.
    """

    def __init__(self, device: torch.device, *, max_model_len: int | None) -> None:
        self.device, self._max_model_len = device, max_model_len
        self._shapes: dict[BatchShape, _ShapeBuffers] = {}
        self._allocate(MIN_CAPACITY)

    def tensors(self) -> list[Tensor]:
        """Return every tensor that a step's tensors are views of."""
        return [self._device_buffer]

    def fill(self, output: SchedulerOutput) -> ModelInput:
        """Write the step's integers to the tensors of its shape."""
        buffers = self._buffers_for(BatchShape.from_output(output))
        tokens: list[int] = []
        positions: list[int] = []
        max_seq_lens: list[int] = []
        logit_indices: list[int] = []
        for scheduled in output.scheduled:
            end = scheduled.start + scheduled.num_tokens
            logit_indices.extend(len(tokens) + offset for offset in scheduled.logit_offsets)
            tokens.extend(scheduled.sequence.token_ids[scheduled.start : end])
            positions.extend(range(scheduled.start, end))
            if self._max_model_len is not None:
                max_seq_lens.extend([min(scheduled.sequence.max_len, self._max_model_len)] * scheduled.num_tokens)
        buffers.tokens[:] = tokens
        buffers.positions[:] = positions
        buffers.logit_indices[:] = logit_indices
        if buffers.max_seq_lens is not None:
            buffers.max_seq_lens[:] = max_seq_lens
        for group, slots in enumerate(output.allocation.slots):
            buffers.slots[group][:] = slots
        for group, tables_of_group in enumerate(output.allocation.block_tables):
            _write_tables(buffers.tables[group], buffers.strides[group], tables_of_group)
        # The host waits for every step's logits, so the device buffer is no longer in use.
        if self._device_buffer is not self._host_buffer:
            self._device_buffer[: buffers.num_used].copy_(self._host_buffer[: buffers.num_used], non_blocking=True)
        return buffers.model_input

    def _buffers_for(self, shape: BatchShape) -> _ShapeBuffers:
        buffers = self._shapes.get(shape)
        if buffers is None:
            sizes = _sizes(shape, self._max_model_len is not None)
            num_integers = sum(map(_aligned, map(math.prod, sizes)))
            if num_integers > len(self._host_buffer):
                self._allocate(1 << (num_integers - 1).bit_length())
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            buffers = self._shapes[shape] = self._views(shape, sizes)
        return buffers

    def _allocate(self, integers: int) -> None:
        self._shapes.clear()
        self._host_buffer = torch.zeros(integers, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._device_buffer = (
            self._host_buffer if self.device.type == "cpu" else torch.zeros_like(self._host_buffer, device=self.device)
        )

    def _views(self, shape: BatchShape, sizes: Sequence[tuple[int, ...]]) -> _ShapeBuffers:
        host, device_views, offset = [], [], 0
        for dims in sizes:
            size = math.prod(dims)
            host.append(self._host_buffer[offset : offset + size].view(dims).numpy())
            device_views.append(self._device_buffer[offset : offset + size].view(dims))
            offset += _aligned(size)
        hosts, tensors = iter(host), iter(device_views)
        tokens, positions, logit_indices = next(tensors), next(tensors), next(tensors)
        max_seq_lens = next(tensors) if self._max_model_len is not None else None
        slot_mappings = []
        for group, widths in enumerate(shape.widths):
            slots = next(tensors) if group < shape.num_token_groups else None
            tables = tuple(next(tensors) for _ in widths)
            slot_mappings.append(
                SlotMapping(slots, tables, None if group < shape.num_cached_groups else shape.cross_sub_batches)
            )
        model_input = ModelInput(
            tokens,
            positions,
            shape.sub_batches,
            logit_indices,
            max_seq_lens=max_seq_lens,
            slot_mappings=tuple(slot_mappings),
        )
        first = next(hosts), next(hosts), next(hosts), next(hosts) if self._max_model_len is not None else None
        host_slots, host_tables, strides = [], [], []
        for group, widths in enumerate(shape.widths):
            if group < shape.num_token_groups:
                host_slots.append(next(hosts))
            host_tables.append([next(hosts) for _ in widths])
            sub_batch_pairs = zip(shape.sub_batches, shape.group_sub_batches(group), strict=True)
            strides.append([sub_batch.num_seqs // group_batch.num_seqs for sub_batch, group_batch in sub_batch_pairs])
        return _ShapeBuffers(model_input, *first, host_slots, host_tables, strides, offset)


def _sizes(shape: BatchShape, with_limits: bool) -> list[tuple[int, ...]]:
    """Return the shapes of tokens, positions, logit indices, limits, slots and tables."""
    tokens = sum(sub_batch.num_seqs * sub_batch.num_new_tokens for sub_batch in shape.sub_batches)
    sizes: list[tuple[int, ...]] = [(tokens,), (tokens,), (shape.num_logits,)]
    if with_limits:
        sizes.append((tokens,))
    for group, widths in enumerate(shape.widths):
        if group < shape.num_token_groups:
            sizes.append((tokens,))
        sizes.extend(
            (sub_batch.num_seqs, width) for sub_batch, width in zip(shape.group_sub_batches(group), widths, strict=True)
        )
    return sizes


def _aligned(integers: int) -> int:
    return -(-integers // ALIGNED) * ALIGNED


def _widths(sub_batches: Sequence[SubBatch], tables: Sequence[Sequence[int]]) -> tuple[int, ...]:
    widths, start = [], 0
    for sub_batch in sub_batches:
        widths.append(max(map(len, tables[start : start + sub_batch.num_seqs])))
        start += sub_batch.num_seqs
    return tuple(widths)


def _write_tables(
    sub_batches: Sequence[NDArray[np.int64]], strides: Sequence[int], tables_of_group: Sequence[Sequence[int]]
) -> None:
    """Write each sequence's blocks, padded with NULL_BLOCK.

    Of ``stride`` sequences, only the first one's.
    """
    start = 0
    for table, stride in zip(sub_batches, strides, strict=True):
        stop = start + len(table) * stride
        for blocks, table_row in zip(tables_of_group[start:stop:stride], table, strict=True):
            table_row[: len(blocks)] = blocks
            table_row[len(blocks) :] = NULL_BLOCK
        start = stop
