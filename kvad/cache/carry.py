"""Blocks between a Memory and the tiers: every raw byte of a block, in one piece per group, and back.

A piece is what :meth:`Memory.held` names of one block, one array behind the other: positions, then each layer's keys,
values, scales and columns.  Formats are not asked: what comes back is what went out, bit for bit.  What goes out is a
copy, and what comes in is copied: no tensor of the pool is ever shared with a tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvad.cache.disk import Buffer
from kvad.cache.sizing import CacheGroup, group_bytes

__all__ = ["HostStore", "copy_blocks_in", "copy_blocks_out", "block_bytes_per_group"]

BLOCKS_PER_COPY = 8  # blocks
BlockTransfer = Sequence[tuple[int, Sequence[Sequence[int]]]]


class HostStore(Protocol):
    """The tiers, as Memory sees them."""

    def put(self, number: int, pieces: Mapping[int, Buffer]) -> None: ...

    def take(self, number: int) -> Mapping[int, Buffer]: ...

    def cancel(self, number: int) -> None: ...


class KVCacheLike(Protocol):
    """A Memory, as this module sees it."""

    groups: tuple[CacheGroup, ...]

    def array_specs(self) -> dict[str, Tensor]: ...

    def read_blocks(self, blocks: Sequence[Sequence[int]]) -> dict[str, Tensor]: ...

    def write_blocks(self, blocks: Sequence[Sequence[int]], state: Mapping[str, Tensor]) -> None: ...


def block_bytes_per_group(groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """Bytes of one block of each group."""
    return tuple(group_bytes(group).total // group.num_blocks for group in groups)


def copy_blocks_out(memory: KVCacheLike, host: HostStore, stores: BlockTransfer) -> None:
    """Give the host a copy of each block."""
    if not stores:
        return
    pieces: dict[int, dict[int, Buffer]] = {number: {} for number, _ in stores}
    blocks, numbers = _by_group(memory, stores)
    arrays = memory.read_blocks(blocks)
    for index, own in enumerate(numbers):
        if not own:
            continue
        parts = [arrays[name].contiguous().view(torch.uint8).flatten(1) for name in _names(memory, index)]
        for at, number in enumerate(own):
            piece = torch.cat([part[at] for part in parts])  # memory of its own: it outlives its neighbours
            pieces[number][index] = piece.numpy().data
    for number, given in pieces.items():
        host.put(number, given)


def copy_blocks_in(memory: KVCacheLike, host: HostStore, loads: BlockTransfer) -> None:
    """Fill each block with what the host lends, AT_ONCE blocks at a time: what is made on the way stays small."""
    for low in range(0, len(loads), BLOCKS_PER_COPY):
        some = loads[low : low + BLOCKS_PER_COPY]
        lent = {number: host.take(number) for number, _ in some}
        blocks, numbers = _by_group(memory, some)
        state = {}
        for index, own in enumerate(numbers):
            if not own:
                continue
            pieces, at = [_bytes(lent[each][index]) for each in own], 0
            for name, array in _names(memory, index).items():
                shape = array.shape[1:]
                size = shape.numel() * array.element_size()
                raw = torch.stack([piece[at : at + size] for piece in pieces])
                state[name] = raw.view(array.dtype).view(len(own), *shape)
                at += size
            assert at == len(pieces[0]), f"a piece of {len(pieces[0])} bytes for a block of {at}"
        memory.write_blocks(blocks, state)


def _bytes(piece: Buffer) -> Tensor:
    """[N] uint8, where they are if torch may have them there: it would warn of memory that cannot be written."""
    return torch.frombuffer(bytearray(piece) if memoryview(piece).readonly else piece, dtype=torch.uint8)


def _names(memory: KVCacheLike, index: int) -> dict[str, Tensor]:
    """The arrays of a group, in their order."""
    return {name: array for name, array in memory.array_specs().items() if name.startswith(f"{index}.")}


def _by_group(memory: KVCacheLike, carried: BlockTransfer) -> tuple[list[list[int]], list[list[int]]]:
    """Per group: the blocks, and whose they are."""
    num_groups = len(memory.groups)
    blocks: list[list[int]] = [[] for _ in range(num_groups)]
    numbers: list[list[int]] = [[] for _ in range(num_groups)]
    for number, own in carried:
        for index, block in enumerate(own):
            blocks[index].extend(block)
            numbers[index].extend([number] * len(block))
    return blocks, numbers
