"""Host copies: swapped sequences, transfers to and from the block store, and sequences by slot.

On a GPU, copies are pinned and move in a stream of their own, while the next steps are computed. Blocks are gathered
into other memory of the device first, so that they may be written at once; a copy that returns is complete before it is
written into its blocks. Without room for a sequence beside the pool, it moves in the stream of the steps, array by
array. ``HostCopier.wait`` must precede reading a copy on the host. On a CPU a copy is complete when the call returns.

A transfer to the block store is one byte buffer per block and group: the arrays that ``KVCache.iter_arrays`` names,
concatenated: positions, then each layer's keys, values, scales and metadata. Formats are not interpreted, so a loaded
block is equal bit for bit. Both directions copy: no tensor of the pool is shared with a store.

Sequences are copied between caches by slot. An array ``[blocks, K, block_size(, width)]`` is stored head by head. Seen
as lines ``[K * blocks * block_size(, width)]``, a slot of a head is one line, whatever the block size:

    3 blocks of 4, 2 heads, slots 5 6 9  ->  lines 5 17, 6 18, 9 21  ->  [3, K(, width)]

Copying out is one gather per array without a second copy. Copying in is one copy per run of consecutive slots (in a
pool with room, the whole sequence; at worst each block), or one scatter if runs are short. Groups without slots (lower
levels) are copied in whole blocks.

Block bounds (``quest.py``) are not copied: they are recomputed from the keys.

Sections (``container.py``) share the memory of tensors. Numbers are in the machine's byte order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvad.cache.device.tensors import ArrayBlocks
from kvad.cache.groups import CacheGroup, group_bytes
from kvad.cache.offload import BlockStore
from kvad.storage import Buffer, Section

BLOCKS_PER_COPY = 8  # loads of one batch: bounds temporary memory
MIN_RUN_LENGTH = 64  # mean slots per run from which runs are copied one by one
BlockIndex = Sequence[Sequence[int]]  # blocks per group
SlotIndex = Sequence[Tensor | None]  # slots per group
BlockTransfer = Sequence[tuple[int, BlockIndex]]  # (copy id, blocks per group)
CopyCallback = Callable[[Literal["out", "in"], int, float], None]


class CopyCompletion(Protocol):
    """The end of copies that a stream runs."""

    def is_complete(self) -> bool: ...

    def synchronize(self) -> None: ...

    def seconds(self) -> float:
        """Return how long the copies took, once they are complete."""
        ...


class CopyStream(Protocol):
    """Runs copies beside the stream of the steps."""

    def run(self, copy: Callable[[], None], tensors: Sequence[Tensor]) -> CopyCompletion:
        """Run copies from or to device ``tensors`` after all that the stream of the steps was given so far."""
        ...

    def before_next_step(self, completion: CopyCompletion) -> None:
        """Let what the stream of the steps is given from now on run after these copies."""
        ...

    def has_room(self, nbytes: int) -> bool:
        """Return True if the device has room for ``nbytes`` that are not planned."""
        ...


class _CudaCompletion:
    def __init__(self, started: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._started, self.ended = started, ended

    def is_complete(self) -> bool:
        return bool(self.ended.query())

    def synchronize(self) -> None:
        self.ended.synchronize()

    def seconds(self) -> float:
        return float(self._started.elapsed_time(self.ended)) / 1e3


class _CudaCopyStream:
    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def run(self, copy: Callable[[], None], tensors: Sequence[Tensor]) -> _CudaCompletion:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            started.record()
            copy()
            ended.record()
        for tensor in tensors:  # their memory is not reused before
            tensor.record_stream(self._stream)
        return _CudaCompletion(started, ended)

    def before_next_step(self, completion: CopyCompletion) -> None:
        assert isinstance(completion, _CudaCompletion)
        torch.cuda.current_stream(self._device).wait_event(completion.ended)

    def has_room(self, nbytes: int) -> bool:
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return 2 * nbytes <= torch.cuda.mem_get_info(self._device)[0] + cached


class HostCopier:
    """Copies blocks between a device and the host; ``on_copied`` receives bytes and seconds.

    ``stream`` is None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_copied: CopyCallback = lambda *_: None
        self._device = device
        self.stream: CopyStream | None = _CudaCopyStream(device) if device.type == "cuda" else None
        # Bytes of the copies that the stream runs; 0: they are not measured.
        self._pending: dict[tuple[Literal["out", "in"], int], tuple[int, CopyCompletion]] = {}
        self._staged: dict[int, tuple[list[Tensor], CopyCompletion]] = {}  # on the device: at most one sequence

    def copy_out(self, key: int, selections: Iterable[ArrayBlocks]) -> list[Tensor]:
        """Copy blocks to contiguous host tensors; call ``wait`` before reading them."""
        self._report_finished()
        if self.stream is None:
            start = perf_counter()
            copies = [selection.array[selection.blocks].cpu().contiguous() for selection in selections]
            self.on_copied("out", _num_bytes(copies), perf_counter() - start)
            return copies
        selections = list(selections)
        copies = [_pinned(selection) for selection in selections]
        num_bytes = _num_bytes(copies)
        if self.stream.has_room(num_bytes):
            blocks = [selection.array[selection.blocks] for selection in selections]
            self._pending["out", key] = num_bytes, self.stream.run(lambda: _copy(blocks, copies), blocks)
        else:
            for selection, copy in zip(selections, copies, strict=True):
                copy.copy_(selection.array[selection.blocks], non_blocking=True)
            self._pending["out", key] = 0, self.stream.run(lambda: None, ())
        return copies

    def prefetch(self, key: int, copies: Sequence[Tensor]) -> None:
        """Start the way back of pinned copies into memory of the device, if there is room and no other copy on it."""
        if self.stream is None or self._staged or not copies[0].is_pinned():
            return
        if self.stream.has_room(_num_bytes(copies)):
            self._staged[key] = self._stage(copies)

    def drop(self, key: int) -> None:
        """Drop what ``prefetch`` has moved."""
        self._staged.pop(key, None)

    def copy_in(self, key: int, selections: Iterable[ArrayBlocks], copies: Sequence[Tensor]) -> None:
        """Copy host tensors into as many blocks."""
        self._report_finished()
        if self.stream is None:
            start = perf_counter()
            for selection, copy in zip(selections, copies, strict=True):
                selection.array[selection.blocks] = copy.to(selection.array.device)
            self.on_copied("in", _num_bytes(copies), perf_counter() - start)
            return
        num_bytes, staged = _num_bytes(copies), self._staged.pop(key, None)
        if staged is None and self.stream.has_room(num_bytes):
            staged = self._stage(copies)
        values, completion = (copies, self.stream.run(lambda: None, ())) if staged is None else staged
        self.stream.before_next_step(completion)
        for selection, value in zip(selections, values, strict=True):
            selection.array[selection.blocks] = value.to(selection.array.device, non_blocking=True)
        if staged is not None:
            self._pending["in", key] = num_bytes, completion

    def wait(self, key: int) -> None:
        """Wait for the copy out of ``key``. Thread-safe."""
        pending = self._pending.get(("out", key))
        if pending is not None:
            pending[1].synchronize()

    def _stage(self, copies: Sequence[Tensor]) -> tuple[list[Tensor], CopyCompletion]:
        assert self.stream is not None
        staged = [torch.empty(copy.shape, dtype=copy.dtype, device=self._device) for copy in copies]
        return staged, self.stream.run(lambda: _copy(copies, staged), staged)

    def _report_finished(self) -> None:
        for name, (nbytes, completion) in list(self._pending.items()):
            if completion.is_complete():
                del self._pending[name]
                if nbytes:
                    self.on_copied(name[0], nbytes, completion.seconds())


def _num_bytes(copies: Sequence[Tensor]) -> int:
    return sum(copy.nbytes for copy in copies)


def _pinned(selection: ArrayBlocks) -> Tensor:
    """Return host memory for the blocks of an array."""
    array = selection.array
    return torch.empty((len(selection.blocks), *array.shape[1:]), dtype=array.dtype, pin_memory=array.is_cuda)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor; writable if the tensor is."""
    assert tensor.is_contiguous(), "a section must be contiguous"
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(bytearray())


def tensor_to_section(name: str, tensor: Tensor) -> Section:
    """Return a tensor as a section that shares its memory."""
    return Section(name, f"{tensor.dtype}".removeprefix("torch."), tuple(tensor.shape), as_bytes(tensor))


def to_sections(copies: Sequence[Tensor]) -> list[Section]:
    """Return contiguous host tensors as sections named by index, without a copy."""
    return [tensor_to_section(str(index), copy) for index, copy in enumerate(copies)]


def from_sections(sections: Sequence[Section]) -> list[Tensor]:
    """Return the tensors of ``to_sections``; they share the sections' memory."""
    tensors = []
    for section in sorted(sections, key=lambda section: int(section.name)):
        dtype: torch.dtype = getattr(torch, section.dtype)
        is_empty = 0 in section.shape
        flat = torch.empty(0, dtype=dtype) if is_empty else torch.frombuffer(section.data, dtype=dtype)
        tensors.append(flat.view(section.shape))
    return tensors


class KVCacheLike(Protocol):
    """The part of KVCache that this module calls."""

    groups: tuple[CacheGroup, ...]

    def array_specs(self) -> dict[str, Tensor]: ...

    def read_blocks(self, blocks: BlockIndex) -> dict[str, Tensor]: ...

    def write_blocks(self, blocks: BlockIndex, state: Mapping[str, Tensor]) -> None: ...


def block_bytes_per_group(groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    return tuple(group_bytes(group).total // group.num_blocks for group in groups)


def copy_blocks_out(kv_cache: KVCacheLike, block_store: BlockStore, transfers: BlockTransfer) -> None:
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
        block_store.put(copy_id, block_buffers)


def copy_blocks_in(kv_cache: KVCacheLike, block_store: BlockStore, transfers: BlockTransfer) -> None:
    """Fill blocks from the block store, BLOCKS_PER_COPY at a time to bound temporary memory."""
    for start in range(0, len(transfers), BLOCKS_PER_COPY):
        batch = transfers[start : start + BLOCKS_PER_COPY]
        loaded = {copy_id: block_store.take(copy_id) for copy_id, _ in batch}
        blocks, ids_per_group = _by_group(kv_cache, batch)
        state = {}
        for group_index, copy_ids in enumerate(ids_per_group):
            if not copy_ids:
                continue
            buffers, offset = [_to_tensor(loaded[copy_id][group_index]) for copy_id in copy_ids], 0
            for name, array in _names(kv_cache, group_index).items():
                shape = array.shape[1:]
                size = shape.numel() * array.element_size()
                raw = torch.stack([buffer[offset : offset + size] for buffer in buffers])
                state[name] = raw.view(array.dtype).view(len(copy_ids), *shape)
                offset += size
            assert offset == len(buffers[0]), f"buffer of {len(buffers[0])} bytes, block of {offset}"
        kv_cache.write_blocks(blocks, state)


def _to_tensor(buffer: Buffer) -> Tensor:
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


class SlotPlan:
    """Slots [m] of one group as line indices of its arrays."""

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots
        self._lines: dict[tuple[int, int], Tensor] = {}
        self._runs = _slot_runs(slots)

    def filled(self, block_size: int) -> set[int]:
        """Return the blocks all of whose slots are included."""
        blocks, counts = (self._slots // block_size).unique(return_counts=True)
        return set(blocks[counts == block_size].tolist())

    def ended_blocks(self, block_size: int) -> Tensor:
        """Return the blocks whose last slot is included [n], in the order of the slots."""
        return self._slots[self._slots % block_size == block_size - 1] // block_size

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
    return array.transpose(0, 1).view(array.shape[0] * array.shape[1] * array.shape[2], *array.shape[3:])


def _plain(lines: Tensor) -> Tensor:
    """View one-byte formats as uint8, because torch cannot index all of them."""
    return lines.view(torch.uint8) if lines.element_size() == 1 else lines


def _slot_runs(slots: Tensor) -> list[tuple[int, int, int]]:
    """Return runs of consecutive slots: first slot, its index among all slots, and length."""
    if not len(slots):
        return []
    starts = [0, *((slots.diff() != 1).nonzero().flatten() + 1).tolist()]
    lows = slots[starts].tolist()
    ends = [*starts[1:], len(slots)]
    return [(low, start, end - start) for low, start, end in zip(lows, starts, ends, strict=True)]
