"""A row's bytes out of the pool and in again: host copies of whole blocks, and the same as sections of a file.

On a GPU copies are pinned and asynchronous: the device's own queue orders them before whatever overwrites the blocks
and behind whatever wrote them, and :meth:`Copier.arrived` is for whoever reads a copy on the host.  Elsewhere a copy is
there when the call returns.

Blocks between a Memory and the tiers: every raw byte of a block, in one piece per group, and back.

A piece is what :meth:`Memory.held` names of one block, one array behind the other: positions, then each layer's keys,
values, scales and columns.  Formats are not asked: what comes back is what went out, bit for bit.  What goes out is a
copy, and what comes in is copied: no tensor of the pool is ever shared with a tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kvad import storage
from kvad.cache.device.tensor_bytes import section_to_tensor, tensor_to_section
from kvad.cache.groups import CacheGroup, group_bytes
from kvad.storage import Section

CopyCallback = Callable[[Literal["out", "in"], int, float], None]


class BlockSelection(Protocol):
    """``blocks`` [n] of ``array`` [blocks, ...]."""

    @property
    def array(self) -> Tensor: ...

    @property
    def blocks(self) -> Tensor: ...


class _PendingCopy(NamedTuple):
    way: Literal["out", "in"]
    nbytes: int
    began: torch.cuda.Event
    ended: torch.cuda.Event


class HostCopier:
    """Copies of one device; ``told`` hears the bytes and the seconds of each, when they are known."""

    def __init__(self, device: torch.device) -> None:
        self.on_copied: CopyCallback = lambda *_: None
        self._cuda = device.type == "cuda"
        self._flying: dict[tuple[str, int], _PendingCopy] = {}

    def copy_out(self, key: int, held: Iterable[BlockSelection]) -> list[Tensor]:
        """The blocks, contiguous, on the host; :meth:`arrived` before their numbers are read there."""
        self._hear()
        began = self._mark()
        copies = [self._host(each.array[each.blocks]) for each in held]
        self._done("out", key, copies, began)
        return copies

    def copy_in(self, key: int, held: Iterable[BlockSelection], copies: Sequence[Tensor]) -> None:
        """The inverse, into as many blocks."""
        self._hear()
        began = self._mark()
        for each, copy in zip(held, copies, strict=True):
            each.array[each.blocks] = copy.to(each.array.device, non_blocking=True)
        self._done("in", key, copies, began)

    def wait(self, key: int) -> None:
        """Wait until what was copied out under ``key`` is there.  From any thread."""
        flying = self._flying.get(("out", key))
        if flying is not None:
            flying.ended.synchronize()

    def _host(self, blocks: Tensor) -> Tensor:
        if not self._cuda:
            return blocks.cpu().contiguous()
        host = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=True)
        return host.copy_(blocks, non_blocking=True)

    def _mark(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _done(
        self, way: Literal["out", "in"], key: int, copies: Sequence[Tensor], began: float | torch.cuda.Event
    ) -> None:
        nbytes, ended = sum(each.nbytes for each in copies), self._mark()
        if isinstance(began, float) and isinstance(ended, float):
            self.on_copied(way, nbytes, ended - began)
        elif isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            self._flying[way, key] = _PendingCopy(way, nbytes, began, ended)

    def _hear(self) -> None:
        """Tell of those that have arrived."""
        for name, flying in list(self._flying.items()):
            if flying.ended.query():
                del self._flying[name]
                self.on_copied(flying.way, flying.nbytes, flying.began.elapsed_time(flying.ended) / 1e3)


def to_sections(copies: Sequence[Tensor]) -> list[Section]:
    """Contiguous host tensors as sections, named by their place; no copy is made."""
    return [tensor_to_section(str(at), each) for at, each in enumerate(copies)]


def from_sections(sections: Sequence[Section]) -> list[Tensor]:
    """The inverse; the tensors lie in the sections' own memory."""
    return [section_to_tensor(each) for each in sorted(sections, key=lambda each: int(each.name))]


BLOCKS_PER_COPY = 8  # blocks
BlockTransfer = Sequence[tuple[int, Sequence[Sequence[int]]]]


class HostStore(Protocol):
    """The tiers, as Memory sees them."""

    def put(self, number: int, pieces: Mapping[int, storage.filesystem.Buffer]) -> None: ...

    def take(self, number: int) -> Mapping[int, storage.filesystem.Buffer]: ...

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
    pieces: dict[int, dict[int, storage.filesystem.Buffer]] = {number: {} for number, _ in stores}
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


def _bytes(piece: storage.filesystem.Buffer) -> Tensor:
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
