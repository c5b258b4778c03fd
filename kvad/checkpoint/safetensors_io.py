"""Tensors of a model folder in Hugging Face's layout: validated, read lazily, written.

A folder has ``model.safetensors``, or ``model.safetensors.index.json`` and the shards that it lists (if both exist,
the single file is read, as in transformers).  ``safetensors_header.py`` describes and checks the format.  Without
either, ``pytorch_model.bin`` or its shards are read by torch's loader of plain tensors (``weights_only``).

Invariant: nothing is mapped, and nothing beyond a header is allocated, before all headers of a folder are consistent;
an inconsistency raises a one-line CheckpointError that names file and tensor.  After that a tensor is a private view
of its file (writes to it never reach the disk), whose bytes are read when they are used.  A mapped file must not be
truncated by others while it is in use (the system would end the process); replacing it is harmless.  The library's
``safe_open`` would open the file again after the check, and cannot read tensors that an odd header misaligns.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kvad import storage as storage_lib
from kvad.checkpoint.folder import INDEX, MODEL, PICKLE, PICKLE_INDEX, check_readable_weights
from kvad.checkpoint.safetensors_header import (
    MAX_HEADER_BYTES,
    RETRY_HINT,
    TensorInfo,
    open_file,
    parse_header,
    parse_object,
    short_repr,
    tensor_label,
)
from kvad.errors import CheckpointError, SaveError

FILE_METADATA = {"format": "pt"}  # required by transformers
READ_CHUNK = 1 << 20  # bytes read at a time in a conversion; fits into the processor's cache


class _Shard:
    """One open file: its header is checked, its bytes are mapped on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_file(path)
        weakref.finalize(self, os.close, self._file)
        try:
            self.entries = {tensor.name: tensor for tensor in parse_header(self._file, path)}
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    @cached_property
    def content(self) -> mmap.mmap:
        """The mapped file."""
        try:
            return storage_lib.filesystem.map_privately(self._file)
        except OSError as error:
            raise CheckpointError(f"cannot map {self.path}: {error.strerror}") from error

    def view(self, entry: TensorInfo) -> Tensor:
        """Return the mapped tensor without reading it; a misaligned tensor is copied."""
        dtype = _dtype(entry)
        if entry.bytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        raw = torch.frombuffer(self.content, dtype=torch.uint8, count=entry.bytes, offset=entry.start)
        return (raw.clone() if entry.start % dtype.itemsize else raw).view(dtype).view(entry.shape)

    def read(self, start: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self._file, [into], start)
            if count == 0:
                raise CheckpointError(f"{self.path} was truncated at byte {start:,} while it was being read")
            start, into = start + count, into[count:]


def _dtype(entry: TensorInfo) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype


class _PickleShard:
    """One ``pytorch_model.bin``: tensors only, memory-mapped if the file is of torch 1.6 or later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_lib.filesystem.open_regular(path):
            pass  # refuses a FIFO or a device
        try:
            try:
                state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except RuntimeError:  # an old file cannot be mapped
                state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle's, zip's and torch's errors have no common type
            hint = "The file is damaged, or has more than tensors, which could be code. Look for safetensors."
            raise CheckpointError(f"{path} cannot be read as tensors: {type(error).__name__}", hint) from error
        if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
            raise CheckpointError(
                f"{path} must be a mapping of names to tensors", "It may be a checkpoint of a trainer."
            )
        self._tensors: dict[str, Tensor] = {str(name): value.detach() for name, value in state.items()}
        self.entries: dict[str, TensorInfo] = {}
        start = 0
        for name, tensor in self._tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.entries[name] = TensorInfo(name, dtype, tuple(tensor.shape), tensor.nbytes, start)
            start += tensor.nbytes

    def view(self, entry: TensorInfo) -> Tensor:
        return self._tensors[entry.name].contiguous()

    def read(self, start: int, into: memoryview) -> None:
        entry = next(each for each in self.entries.values() if each.start <= start < each.start + each.bytes)
        raw = self.view(entry).view(-1).view(torch.uint8)[start - entry.start :][: len(into)]
        into[:] = raw.numpy().data


class LazyTensors(Mapping[str, Tensor]):
    """Base of mappings whose tensors are read when they are used; ``_entries`` has their names."""

    _entries: Mapping[str, Any]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries


class ShardedTensors(LazyTensors):
    """Tensors of a folder or a file by name, in the order of the files.

    A tensor's bytes are read when they are used.  Unknown names raise KeyError.
    """

    def __init__(self, path: Path, shards: Iterable[_Shard | _PickleShard]) -> None:
        self.path = path
        self._entries: dict[str, tuple[_Shard | _PickleShard, TensorInfo]] = {}
        for shard in shards:
            for name, entry in shard.entries.items():
                if name in self._entries:
                    raise CheckpointError(f"{shard.path}: {tensor_label(name)} is in {self.file_name(name).name} too")
                self._entries[name] = shard, entry

    def __getitem__(self, name: str) -> Tensor:
        shard, entry = self._entries[name]
        return shard.view(entry)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name][1].shape

    def dtype(self, name: str) -> torch.dtype:
        return _dtype(self._entries[name][1])

    def bytes(self, name: str) -> int:
        return self._entries[name][1].bytes

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for _, entry in self._entries.values())

    def file_name(self, name: str) -> Path:
        return self._entries[name][0].path

    def contents(self) -> dict[Path, mmap.mmap]:
        """Return the mapped content of the safetensors files, by path."""
        return {shard.path: shard.content for shard, _ in self._entries.values() if isinstance(shard, _Shard)}

    def map_files(self) -> None:
        """Map every file now instead of at its first use; no tensor is read."""
        for name in self:
            self[name]

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Yield the elements in order, ``READ_CHUNK`` bytes at a time; each chunk overwrites the one before it.

        Bytes are read, not mapped, so that no page of the file remains in the process.
        """
        shard, entry = self._entries[name]
        # Not from malloc: freeing a block of this size makes glibc retain freed tensors of the same size (150 MB).
        buffer = mmap.mmap(-1, max(1, min(entry.bytes, READ_CHUNK)))
        for offset in range(0, entry.bytes, READ_CHUNK):
            count = min(entry.bytes - offset, READ_CHUNK)
            shard.read(entry.start + offset, memoryview(buffer)[:count])
            yield torch.frombuffer(buffer, dtype=torch.uint8, count=count).view(_dtype(entry))


def open_file_tensors(path: Path) -> ShardedTensors:
    """Check the header of one safetensors file and return its tensors; no tensor is read."""
    return ShardedTensors(path, [_Shard(path)])


def open_tensors(folder: Path) -> ShardedTensors:
    """Check every header of a model folder and return its tensors; no tensor is read.

    Kinds of weights that kvad does not read (quantized, an adapter alone) are refused by name.
    """
    folder = Path(folder)
    check_readable_weights(folder)
    if (folder / MODEL).exists():
        return ShardedTensors(folder, [_Shard(folder / MODEL)])
    is_pickle = not (folder / INDEX).exists()
    if is_pickle and (folder / PICKLE).exists():
        return ShardedTensors(folder, [_PickleShard(folder / PICKLE)])
    index = PICKLE_INDEX if is_pickle else INDEX
    tensors_by_file = _read_index(folder / index, ".bin" if is_pickle else ".safetensors")
    for file, names in sorted(tensors_by_file.items()):
        if not (folder / file).exists():
            message = f"{folder / file} is missing, which has {tensor_label(names[0])} by the index"
            raise CheckpointError(message, f"The checkpoint is incomplete. {RETRY_HINT}")
    shard = _PickleShard if is_pickle else _Shard
    tensors = ShardedTensors(folder, (shard(folder / file) for file in sorted(tensors_by_file)))
    file_by_tensor = {name: file for file, names in tensors_by_file.items() for name in names}
    for name, file in file_by_tensor.items():
        if name not in tensors or tensors.file_name(name).name != file:
            message = f"{folder / file} lacks {tensor_label(name)}, which it has by the index"
            raise CheckpointError(message, RETRY_HINT)
    for name in tensors:
        if name not in file_by_tensor:
            message = f"{tensors.file_name(name)} has {tensor_label(name)}, which {index} lacks"
            raise CheckpointError(message, RETRY_HINT)
    return tensors


def _read_index(path: Path, suffix: str) -> dict[str, list[str]]:
    """Return tensor names by file name; the index's total_size is often wrong and ignored."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} must be a file of at most {MAX_HEADER_BYTES:,} bytes")
        weight_map = parse_object(path.read_bytes(), str(path)).get("weight_map")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be an object of tensor names and file names")
    tensors_by_file: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        is_tensor_file = isinstance(file_name, str) and file_name.endswith(suffix) and file_name.isprintable()
        if not is_tensor_file or len(file_name) >= 256 or set(file_name) & set("/\\:"):
            message = f"{tensor_label(name)}: must be in a file of the same folder, got {short_repr(file_name)}"
            raise CheckpointError(f"{path}: {message}")
        tensors_by_file.setdefault(file_name, []).append(name)
    return tensors_by_file


def find_nonfinite(tensors: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    """Return (name, number of NaN or infinite elements) of every tensor that has some."""
    counts = {}
    for name in tensors:
        if isinstance(tensors, ShardedTensors):
            counts[name] = sum(map(_count_nonfinite, tensors.chunks(name)))
        else:
            counts[name] = sum(map(_count_nonfinite, tensors[name].detach().reshape(-1).split(READ_CHUNK)))
    return [(name, count) for name, count in counts.items() if count]


def _count_nonfinite(chunk: Tensor) -> int:
    """Count NaN and infinite elements; a finite sum proves in one pass that there are none."""
    if not chunk.is_floating_point() and not chunk.is_complex():
        return 0
    if chunk.is_complex():
        chunk = torch.view_as_real(chunk)
    elif chunk.dtype.itemsize == 1:
        chunk = chunk.float()
    if math.isfinite(chunk.sum(dtype=torch.promote_types(chunk.dtype, torch.float32)).item()):
        return 0
    return chunk.numel() - int(chunk.isfinite().sum())


def save_tensors(
    folder: Path, path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file; a SaveError names ``folder``."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path, metadata)
    except SafetensorError as error:  # safetensors wraps the disk's error
        raise storage_lib.atomic.disk_error(folder, OSError(str(error))) from error


def write_sharded(
    folder: Path, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, max_shard_bytes: int = 5 * 10**9
) -> list[Path]:
    """Write ``model.safetensors``, or shards and their index, into a folder without weights.

    Readers see no weights until all are written: the index comes last.  To replace a folder, write into
    ``storage.atomic.new_folder``.

    Args:
        folder: Folder to write into.
        tensors: Tensors by name, or pairs; one shard at a time is held in memory.  Tied tensors occur once.
        max_shard_bytes: Maximum size of a file.
    """
    temp_files: list[tuple[Path, dict[str, int]]] = []
    files: list[Path] = []
    try:
        _make_room(folder)
        for shard in _shards(tensors.items() if isinstance(tensors, Mapping) else tensors, max_shard_bytes):
            # A name that ``recover_interrupted`` removes.
            path = folder / f".{MODEL}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
            temp_files.append((path, {name: tensor.nbytes for name, tensor in shard.items()}))
            save_tensors(folder, path, shard, FILE_METADATA)
            storage_lib.atomic.fsync_path(path)
            shard.clear()  # otherwise two shards would be in memory while the next one is built
        count = len(temp_files)
        for index, (path, _) in enumerate(temp_files, 1):
            name = MODEL if count == 1 else f"model-{index:05}-of-{count:05}.safetensors"
            files.append(folder / name)
            path.rename(files[-1])
        if count > 1:
            weight_map = {name: file.name for file, (_, sizes) in zip(files, temp_files, strict=True) for name in sizes}
            total = sum(size for _, sizes in temp_files for size in sizes.values())
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            files.append(folder / INDEX)
            text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
            storage_lib.atomic.write_bytes(files[-1], text.encode())
        storage_lib.atomic.fsync_path(folder)
    except BaseException as error:
        for path in [*files, *(path for path, _ in temp_files)]:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_lib.atomic.disk_error(folder, error) from error
        raise
    return files


def _make_room(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    storage_lib.atomic.recover_interrupted(folder)
    existing = sorted(path.name for path in folder.glob("model*.safetensors*"))
    if existing:
        raise SaveError(f"{folder} already has weights: {existing[0]}", "Choose another folder, or remove it first.")


def _shards(pairs: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Group tensors in order into shards of ``max_bytes``; a larger tensor has its own shard."""
    shard: dict[str, Tensor] = {}
    names: set[str] = set()
    seen: dict[tuple[int, int, int], StorageWeakRef] = {}  # a held reference keeps its address from being reused
    for name, tensor in pairs:
        assert name not in names, f"{name} occurs twice"
        storage = StorageWeakRef(tensor.untyped_storage())
        region = storage.cdata, int(tensor.storage_offset()), tensor.numel()
        assert not tensor.numel() or region not in seen, f"{name} is tied to another"
        names.add(name)
        seen[region] = storage
        if shard and sum(other.nbytes for other in shard.values()) + tensor.nbytes > max_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    if shard or not names:
        yield shard
