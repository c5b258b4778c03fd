"""Slot-wise copies of a sequence's raw arrays between KVCache and host.

An array ``[blocks, K, block_size(, width)]`` is stored head by head. Seen as lines ``[K * blocks * block_size(,
width)]``, a slot of a head is one line, whatever the block size:

    3 blocks of 4, 2 heads, slots 5 6 9  ->  lines 5 17, 6 18, 9 21  ->  [3, K(, width)]

Copying out is one gather per array without a second copy. Copying in is one copy per run of consecutive slots (in a
pool with room, the whole sequence; at worst each block), or one scatter if runs are short. Groups without slots (lower
levels) are copied in whole blocks.

Block bounds (``quest.py``) are not copied: they are recomputed from the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvad.cache.device.quest import BlockKeyBounds
from kvad.cache.device.tensors import ArrayBlocks, split_slots
from kvad.cache.groups import CacheGroup

MIN_RUN_LENGTH = 64  # mean slots per run from which runs are copied one by one
BlockIndex = Sequence[Sequence[int]]
SlotIndex = Sequence[Tensor | None]


class SlotStorage(Protocol):
    """The part of KVCache that this module calls."""

    groups: tuple[CacheGroup, ...]
    block_bounds: dict[int, BlockKeyBounds]

    def iter_arrays(self, blocks: BlockIndex) -> Iterator[ArrayBlocks]: ...

    def clear(self, number: int, blocks: Sequence[int]) -> None: ...


def copy_slots_out(kv_cache: SlotStorage, blocks: BlockIndex, slots: SlotIndex) -> dict[str, Tensor]:
    """Copy a sequence's arrays to the host, by the names of ``iter_arrays``.

    ``slots`` are those of each group in token order [m] (block * block_size + offset); None copies whole blocks.
    Returns arrays [m, K, width] and positions [m], or whole blocks [n, ...].
    """
    plans = [None if group_slots is None else _SlotPlan(group_slots) for group_slots in slots]
    copies = {}
    for name, array, block_ids in _arrays(kv_cache, blocks):
        plan = plans[int(name.partition(".")[0])]
        copies[name] = (array[block_ids] if plan is None else plan.out(array)).cpu()
    return copies


def copy_slots_in(kv_cache: SlotStorage, blocks: BlockIndex, slots: SlotIndex, arrays: Mapping[str, Tensor]) -> None:
    """Write the arrays of ``copy_slots_out`` into cleared ``blocks``."""
    plans = [None if slots_of_group is None else _SlotPlan(slots_of_group) for slots_of_group in slots]
    for group_index, plan in enumerate(plans):
        if plan is not None:
            _clear(kv_cache, group_index, blocks[group_index], plan)
    for name, array, block_ids in _arrays(kv_cache, blocks):
        plan, values = plans[int(name.partition(".")[0])], arrays[name].to(array.device)
        if plan is None:
            array[block_ids] = values
        else:
            plan.put(array, values)
    for group, group_slots in zip(kv_cache.groups, slots, strict=False):
        if group.sparse_read_policy is None or group_slots is None:
            continue
        for layer in group.layers:
            bounds = kv_cache.block_bounds[layer]
            bounds.update(*split_slots(group_slots.to(bounds.key_min.device), group.block_size))


def _clear(kv_cache: SlotStorage, group_index: int, blocks: Sequence[int], plan: _SlotPlan) -> None:
    """Clear partially filled blocks; of full ones, only the bounds."""
    group = kv_cache.groups[group_index]
    filled = plan.filled(group.block_size)
    partial_blocks = [block for block in blocks if block not in filled]
    if partial_blocks:
        kv_cache.clear(group_index, partial_blocks)
    for layer in group.layers if group.sparse_read_policy is not None and filled else ():
        bounds = kv_cache.block_bounds[layer]
        bounds.clear(torch.tensor(sorted(filled), device=bounds.key_min.device))


def _arrays(kv_cache: SlotStorage, blocks: BlockIndex) -> Iterator[ArrayBlocks]:
    return (item for item in kv_cache.iter_arrays(blocks) if item.name.split(".")[2:3] != ["block_bounds"])


class _SlotRun(NamedTuple):
    """Consecutive slots ``low .. low + size - 1``, starting at index ``start`` of all slots."""

    low: int
    start: int
    size: int


class _SlotPlan:
    """Slots [m] of one group as line indices of its arrays."""

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots
        self._lines: dict[tuple[int, int], Tensor] = {}
        self._runs = _slot_runs(slots)

    def filled(self, block_size: int) -> set[int]:
        """Return the blocks all of whose slots are included."""
        blocks, counts = (self._slots // block_size).unique(return_counts=True)
        return set(blocks[counts == block_size].tolist())

    def out(self, array: Tensor) -> Tensor:
        """Return the slots' values [m, K, ...]; positions [m]."""
        if array.dim() == 2:
            return array.view(-1)[self._slots.to(array.device)]
        heads = array.shape[1]
        gathered = _plain(_by_row(array)).index_select(0, self._line_index(array))
        return gathered.view(array.dtype).view(len(self._slots), heads, *array.shape[3:])

    def put(self, array: Tensor, values: Tensor) -> None:
        """Write values [m, K, ...] into the slots."""
        if array.dim() == 2:
            array.view(-1)[self._slots.to(array.device)] = values
        elif len(self._runs) * MIN_RUN_LENGTH <= len(self._slots):
            lines = array.transpose(0, 1).view(array.shape[1], array.shape[0] * array.shape[2], *array.shape[3:])
            for low, start, size in self._runs:
                lines[:, low : low + size] = values[start : start + size].transpose(0, 1)
        else:
            _plain(_by_row(array)).index_copy_(0, self._line_index(array), _plain(values.flatten(0, 1)))

    def _line_index(self, array: Tensor) -> Tensor:
        """Return the line index of each slot and head, [m * K]."""
        heads, num_lines = array.shape[1], array.shape[0] * array.shape[2]
        if (heads, num_lines) not in self._lines:
            first = torch.arange(0, heads * num_lines, num_lines)
            self._lines[heads, num_lines] = (self._slots.unsqueeze(1) + first).flatten().to(array.device)
        return self._lines[heads, num_lines]


def _by_row(array: Tensor) -> Tensor:
    """Return a view of the array as lines."""
    return array.transpose(0, 1).view(array.shape[0] * array.shape[1] * array.shape[2], *array.shape[3:])


def _plain(lines: Tensor) -> Tensor:
    """View one-byte formats as uint8, because torch cannot index all of them."""
    return lines.view(torch.uint8) if lines.element_size() == 1 else lines


def _slot_runs(slots: Tensor) -> list[_SlotRun]:
    if not len(slots):
        return []
    starts = [0, *((slots.diff() != 1).nonzero().flatten() + 1).tolist()]
    lows = slots[starts].tolist()
    ends = [*starts[1:], len(slots)]
    return [_SlotRun(low, start, end - start) for low, start, end in zip(lows, starts, ends, strict=True)]
