"""A row's raw numbers out of a memory by slot, and into one: what lies in each array, in the row's own order.

An array is ``[blocks, K, block_size(, width)]`` and lies head by head, so seen as lines ``[K * blocks * block_size(,
width)]`` a slot of a head is one of them, whatever the size of a block:

    3 blocks of 4, 2 heads, slots 5 6 9  ->  lines 5 17, 6 18, 9 21  ->  [3, K(, width)]

Out of a memory that is one gather per array, without a copy beside it.  Into one it is a copy for each stretch of slots
that ascend by one (all of a row's, in a pool with room; each block of it at worst), or one scatter where those are
short.  Groups without slots (levels) go by whole blocks.

Bounds of blocks (``quest.py``) are never copied: they follow from the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvad.cache.device.quest import BlockKeyBounds
from kvad.cache.device.tensors import split_slots
from kvad.cache.groups import CacheGroup

LONG_STRETCH = 64  # slots of a stretch, on the average, from which stretches are copied one by one
BlockIndex = Sequence[Sequence[int]]
SlotIndex = Sequence[Tensor | None]


class RawArray(Protocol):
    """``blocks`` [n] of ``array`` [blocks, ...]."""

    @property
    def name(self) -> str: ...

    @property
    def array(self) -> Tensor: ...

    @property
    def blocks(self) -> Tensor: ...


class SlotStorage(Protocol):
    """A Memory, as this module sees it."""

    groups: tuple[CacheGroup, ...]
    block_bounds: dict[int, BlockKeyBounds]

    def iter_arrays(self, blocks: BlockIndex) -> Iterator[RawArray]: ...

    def clear(self, number: int, blocks: Sequence[int]) -> None: ...


def copy_slots_out(memory: SlotStorage, blocks: BlockIndex, slots: SlotIndex) -> dict[str, Tensor]:
    """Copies on the host, by the names of ``held``: of each group its ``slots`` [m] (block * block_size + offset) in
    their order, [m, K, width] and positions [m]; where those are None, whole ``blocks`` [n, ...]."""
    places = [None if each is None else _SlotPlan(each) for each in slots]
    found = {}
    for name, array, where in _all_arrays(memory, blocks):
        at = places[int(name.partition(".")[0])]
        found[name] = (array[where] if at is None else at.out(array)).cpu()
    return found


def copy_slots_in(memory: SlotStorage, blocks: BlockIndex, slots: SlotIndex, arrays: Mapping[str, Tensor]) -> None:
    """The inverse, into ``blocks`` that changed hands; slots of theirs that are not named are empty."""
    places = [None if each is None else _SlotPlan(each) for each in slots]
    for number, at in enumerate(places):
        if at is not None:
            _clear(memory, number, blocks[number], at)
    for name, array, where in _all_arrays(memory, blocks):
        at, kept = places[int(name.partition(".")[0])], arrays[name].to(array.device)
        if at is None:
            array[where] = kept
        else:
            at.put(array, kept)
    for group, every in zip(memory.groups, slots, strict=False):
        if group.sparse_read_policy is None or every is None:
            continue
        for layer in group.layers:
            bounds = memory.block_bounds[layer]
            bounds.update(*split_slots(every.to(bounds.key_min.device), group.block_size))


def _clear(memory: SlotStorage, number: int, blocks: Sequence[int], places: _SlotPlan) -> None:
    """Those of whose slots some are left empty; the others are written whole, but for their bounds."""
    group = memory.groups[number]
    filled = places.filled(group.block_size)
    rest = [block for block in blocks if block not in filled]
    if rest:
        memory.clear(number, rest)
    for layer in group.layers if group.sparse_read_policy is not None and filled else ():
        bounds = memory.block_bounds[layer]
        bounds.clear(torch.tensor(sorted(filled), device=bounds.key_min.device))


def _all_arrays(memory: SlotStorage, blocks: BlockIndex) -> Iterator[tuple[str, Tensor, Tensor]]:
    for each in memory.iter_arrays(blocks):
        if each.name.split(".")[2:3] != ["bounds"]:
            yield each.name, each.array, each.blocks


class _Stretch(NamedTuple):
    """Slots ``low .. low + size - 1``, which are the ``start``-th and those behind it."""

    low: int
    start: int
    size: int


class _SlotPlan:
    """Slots [m] of one group, as lines of whatever array of it."""

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots
        self._lines: dict[tuple[int, int], Tensor] = {}
        self._stretches = _stretches(slots)

    def filled(self, block_size: int) -> set[int]:
        """Blocks of which every slot is among these."""
        blocks, counts = (self._slots // block_size).unique(return_counts=True)
        return set(blocks[counts == block_size].tolist())

    def out(self, array: Tensor) -> Tensor:
        """[m, K, ...], of positions [m]."""
        if array.dim() == 2:
            return array.view(-1)[self._slots.to(array.device)]
        heads = array.shape[1]
        found = _plain(_by_row(array)).index_select(0, self._of(array))
        return found.view(array.dtype).view(len(self._slots), heads, *array.shape[3:])

    def put(self, array: Tensor, kept: Tensor) -> None:
        """The inverse of :meth:`out`."""
        if array.dim() == 2:
            array.view(-1)[self._slots.to(array.device)] = kept
        elif len(self._stretches) * LONG_STRETCH <= len(self._slots):
            lines = array.transpose(0, 1).view(array.shape[1], array.shape[0] * array.shape[2], *array.shape[3:])
            for low, start, size in self._stretches:
                lines[:, low : low + size] = kept[start : start + size].transpose(0, 1)
        else:
            _plain(_by_row(array)).index_copy_(0, self._of(array), _plain(kept.flatten(0, 1)))

    def _of(self, array: Tensor) -> Tensor:
        """[m * K]: which lines, slot by slot."""
        heads, every = array.shape[1], array.shape[0] * array.shape[2]
        if (heads, every) not in self._lines:
            first = torch.arange(0, heads * every, every)
            self._lines[heads, every] = (self._slots.unsqueeze(1) + first).flatten().to(array.device)
        return self._lines[heads, every]


def _by_row(array: Tensor) -> Tensor:
    """A view."""
    return array.transpose(0, 1).view(array.shape[0] * array.shape[1] * array.shape[2], *array.shape[3:])


def _plain(lines: Tensor) -> Tensor:
    """Numbers of one byte as bytes: torch moves not all formats of eight bits."""
    return lines.view(torch.uint8) if lines.element_size() == 1 else lines


def _stretches(slots: Tensor) -> list[_Stretch]:
    if not len(slots):
        return []
    starts = [0, *((slots.diff() != 1).nonzero().flatten() + 1).tolist()]
    lows = slots[starts].tolist()
    ends = [*starts[1:], len(slots)]
    return [_Stretch(low, start, end - start) for low, start, end in zip(lows, starts, ends, strict=True)]
