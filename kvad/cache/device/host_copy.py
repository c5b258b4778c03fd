"""Host copies of blocks: swapped sequences, and transfers to and from the block store.

On a GPU, copies are pinned and asynchronous: the device stream orders them before later writes to the blocks and after
earlier ones, and ``HostCopier.wait`` must precede reading a copy on the host. On a CPU a copy is complete when the
call returns.

A transfer to the block store is one byte buffer per block and group: the arrays that ``KVCache.iter_arrays`` names,
concatenated: positions, then each layer's keys, values, scales and metadata. Formats are not interpreted, so a loaded
block is equal bit for bit. Both directions copy: no tensor of the pool is shared with a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kvad.cache.device.tensor_bytes import section_to_tensor, tensor_to_section
from kvad.cache.device.tensors import ArrayBlocks
from kvad.cache.groups import CacheGroup, group_bytes
from kvad.storage import Buffer, Section

CopyCallback = Callable[[Literal["out", "in"], int, float], None]


class _PendingCopy(NamedTuple):
    """An asynchronous copy with its timing events."""

    direction: Literal["out", "in"]
    nbytes: int
    started: torch.cuda.Event
    ended: torch.cuda.Event


class HostCopier:
    """Copies blocks between a device and the host; ``on_copied`` receives bytes and seconds."""

    def __init__(self, device: torch.device) -> None:
        self.on_copied: CopyCallback = lambda *_: None
        self._cuda = device.type == "cuda"
        self._pending: dict[tuple[str, int], _PendingCopy] = {}

    def copy_out(self, key: int, selections: Iterable[ArrayBlocks]) -> list[Tensor]:
        """Copy blocks to contiguous host tensors; call ``wait`` before reading them."""
        self._report_finished()
        started = self._record_time()
        copies = [self._to_host(selection.array[selection.blocks]) for selection in selections]
        self._finish("out", key, copies, started)
        return copies

    def copy_in(self, key: int, selections: Iterable[ArrayBlocks], copies: Sequence[Tensor]) -> None:
        """Copy host tensors into as many blocks."""
        self._report_finished()
        started = self._record_time()
        for selection, copy in zip(selections, copies, strict=True):
            selection.array[selection.blocks] = copy.to(selection.array.device, non_blocking=True)
        self._finish("in", key, copies, started)

    def wait(self, key: int) -> None:
        """Wait for the copy out of ``key``. Thread-safe."""
        pending = self._pending.get(("out", key))
        if pending is not None:
            pending.ended.synchronize()

    def _to_host(self, blocks: Tensor) -> Tensor:
        if not self._cuda:
            return blocks.cpu().contiguous()
        host = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=True)
        return host.copy_(blocks, non_blocking=True)

    def _record_time(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _finish(
        self, direction: Literal["out", "in"], key: int, copies: Sequence[Tensor], started: float | torch.cuda.Event
    ) -> None:
        nbytes, ended = sum(copy.nbytes for copy in copies), self._record_time()
        if isinstance(started, float) and isinstance(ended, float):
            self.on_copied(direction, nbytes, ended - started)
        elif not isinstance(started, float) and not isinstance(ended, float):
            self._pending[direction, key] = _PendingCopy(direction, nbytes, started, ended)

    def _report_finished(self) -> None:
        for name, pending in list(self._pending.items()):
            if pending.ended.query():
                del self._pending[name]
                self.on_copied(pending.direction, pending.nbytes, pending.started.elapsed_time(pending.ended) / 1e3)


def to_sections(copies: Sequence[Tensor]) -> list[Section]:
    """Return contiguous host tensors as sections named by index, without a copy."""
    return [tensor_to_section(str(index), copy) for index, copy in enumerate(copies)]


def from_sections(sections: Sequence[Section]) -> list[Tensor]:
    """Return the tensors of ``to_sections``; they share the sections' memory."""
    return [section_to_tensor(section) for section in sorted(sections, key=lambda section: int(section.name))]


BLOCKS_PER_COPY = 8  # loads of one batch: bounds temporary memory
BlockTransfer = Sequence[tuple[int, Sequence[Sequence[int]]]]  # (copy id, blocks per group)


class HostStore(Protocol):
    """The part of a BlockStore that KVCache calls."""

    def put(self, copy_id: int, buffers: Mapping[int, Buffer]) -> None: ...

    def take(self, copy_id: int) -> Mapping[int, Buffer]: ...

    def cancel(self, copy_id: int) -> None: ...


class KVCacheLike(Protocol):
    """The part of KVCache that this module calls."""

    groups: tuple[CacheGroup, ...]

    def array_specs(self) -> dict[str, Tensor]: ...

    def read_blocks(self, blocks: Sequence[Sequence[int]]) -> dict[str, Tensor]: ...

    def write_blocks(self, blocks: Sequence[Sequence[int]], state: Mapping[str, Tensor]) -> None: ...


def block_bytes_per_group(groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    return tuple(group_bytes(group).total // group.num_blocks for group in groups)


def copy_blocks_out(kv_cache: KVCacheLike, host: HostStore, transfers: BlockTransfer) -> None:
    """Pass a copy of each block to the block store."""
    if not transfers:
        return
    buffers: dict[int, dict[int, Buffer]] = {copy_id: {} for copy_id, _ in transfers}
    blocks, ids_per_group = _by_group(kv_cache, transfers)
    arrays = kv_cache.read_blocks(blocks)
    for group_index, copy_ids in enumerate(ids_per_group):
        if not copy_ids:
            continue
        parts = [arrays[name].contiguous().view(torch.uint8).flatten(1) for name in _names(kv_cache, group_index)]
        for position, copy_id in enumerate(copy_ids):
            buffer = torch.cat([part[position] for part in parts])  # Separate memory: blocks are dropped one by one.
            buffers[copy_id][group_index] = buffer.numpy().data
    for copy_id, block_buffers in buffers.items():
        host.put(copy_id, block_buffers)


def copy_blocks_in(kv_cache: KVCacheLike, host: HostStore, transfers: BlockTransfer) -> None:
    """Fill blocks from the block store, BLOCKS_PER_COPY at a time to bound temporary memory."""
    for start in range(0, len(transfers), BLOCKS_PER_COPY):
        batch = transfers[start : start + BLOCKS_PER_COPY]
        loaded = {copy_id: host.take(copy_id) for copy_id, _ in batch}
        blocks, ids_per_group = _by_group(kv_cache, batch)
        state = {}
        for group_index, copy_ids in enumerate(ids_per_group):
            if not copy_ids:
                continue
            buffers, offset = [_bytes(loaded[copy_id][group_index]) for copy_id in copy_ids], 0
            for name, array in _names(kv_cache, group_index).items():
                shape = array.shape[1:]
                size = shape.numel() * array.element_size()
                raw = torch.stack([buffer[offset : offset + size] for buffer in buffers])
                state[name] = raw.view(array.dtype).view(len(copy_ids), *shape)
                offset += size
            assert offset == len(buffers[0]), f"buffer of {len(buffers[0])} bytes, block of {offset}"
        kv_cache.write_blocks(blocks, state)


def _bytes(buffer: Buffer) -> Tensor:
    """Return a uint8 tensor [N]; read-only buffers are copied, because torch warns of them."""
    return torch.frombuffer(bytearray(buffer) if memoryview(buffer).readonly else buffer, dtype=torch.uint8)


def _names(kv_cache: KVCacheLike, group_index: int) -> dict[str, Tensor]:
    return {name: array for name, array in kv_cache.array_specs().items() if name.startswith(f"{group_index}.")}


def _by_group(kv_cache: KVCacheLike, transfers: BlockTransfer) -> tuple[list[list[int]], list[list[int]]]:
    """Return per group the blocks and the copy ids that they belong to."""
    blocks: list[list[int]] = [[] for _ in kv_cache.groups]
    ids_per_group: list[list[int]] = [[] for _ in kv_cache.groups]
    for copy_id, group_blocks in transfers:
        for group_index, block_ids in enumerate(group_blocks):
            blocks[group_index].extend(block_ids)
            ids_per_group[group_index].extend([copy_id] * len(block_ids))
    return blocks, ids_per_group
