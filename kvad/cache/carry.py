"""Blocks between a Memory and the tiers: every raw byte of a block, in one piece per group, and back.

A piece is what :meth:`Memory.held` names of one block, one array behind the other: positions, then each layer's keys,
values, scales and columns.  Formats are not asked: what comes back is what went out, bit for bit.  What goes out is a
copy, and what comes in is copied: no tensor of the pool is ever shared with a tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvad.cache.disk import Buffer
from kvad.cache.sizing import Group, group_bytes

__all__ = ["Host", "carry_in", "carry_out", "piece_sizes"]

Carried = Sequence[tuple[int, Sequence[Sequence[int]]]]


class Host(Protocol):
    """The tiers, as Memory sees them."""

    def give(self, number: int, pieces: Mapping[int, Buffer]) -> None: ...

    def take(self, number: int) -> Mapping[int, Buffer]: ...

    def cancel(self, number: int) -> None: ...


class Holder(Protocol):
    """A Memory, as this module sees it."""

    groups: tuple[Group, ...]

    def held(self, blocks: Sequence[Sequence[int]]) -> Iterator[tuple[str, Tensor, Tensor]]: ...


def piece_sizes(groups: Sequence[Group]) -> tuple[int, ...]:
    """Bytes of one block of each group."""
    return tuple(group_bytes(group).total // group.blocks for group in groups)


def carry_out(memory: Holder, host: Host, stores: Carried) -> None:
    """Give the host a copy of each block."""
    if not stores:
        return
    pieces: dict[int, dict[int, Buffer]] = {number: {} for number, _ in stores}
    for index, (numbers, arrays) in _by_group(memory, stores).items():
        parts = [array[blocks].cpu().contiguous().view(torch.uint8).flatten(1) for array, blocks in arrays]
        for number, raw in zip(numbers, torch.cat(parts, 1), strict=True):
            pieces[number][index] = memoryview(raw.clone().numpy())  # its own memory: it outlives its neighbours
    for number, given in pieces.items():
        host.give(number, given)


def carry_in(memory: Holder, host: Host, loads: Carried) -> None:
    """Fill each block with what the host lends."""
    if not loads:
        return
    lent = {number: host.take(number) for number, _ in loads}
    for index, (numbers, arrays) in _by_group(memory, loads).items():
        raw = torch.stack([torch.frombuffer(bytearray(lent[number][index]), dtype=torch.uint8) for number in numbers])
        at = 0
        for array, blocks in arrays:
            size = array[0].nbytes
            part = raw[:, at : at + size].contiguous().view(array.dtype)
            array[blocks] = part.view(len(numbers), *array.shape[1:]).to(array.device)
            at += size
        assert at == raw.shape[1], f"a piece of {raw.shape[1]} bytes for a block of {at}"


def _by_group(memory: Holder, carried: Carried) -> dict[int, tuple[list[int], list[tuple[Tensor, Tensor]]]]:
    """Per group: whose blocks, and the arrays with them."""
    num_groups = len(memory.groups)
    blocks: list[list[int]] = [[] for _ in range(num_groups)]
    numbers: list[list[int]] = [[] for _ in range(num_groups)]
    for number, own in carried:
        for index, block in enumerate(own):
            blocks[index].extend(block)
            numbers[index].extend([number] * len(block))
    found: dict[int, tuple[list[int], list[tuple[Tensor, Tensor]]]] = {}
    for name, array, ids in memory.held(blocks):
        index = int(name.partition(".")[0])
        if numbers[index]:
            found.setdefault(index, (numbers[index], []))[1].append((array, ids))
    return found
