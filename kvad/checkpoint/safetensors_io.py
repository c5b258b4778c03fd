"""Tensors of a model folder in Hugging Face's layout: validated, read lazily, written.

A folder has ``model.safetensors``, or ``model.safetensors.index.json`` and the shards that it lists (if both exist,
the single file is read, as in transformers).  ``safetensors_header.py`` describes and checks the format.

Invariant: nothing is mapped, and nothing beyond a header is allocated, before all headers of a folder are consistent;
an inconsistency raises a one-line CheckpointError that names file and tensor.  After that a tensor is a private view
of its file (writes to it never reach the disk), whose bytes are read when they are used.  A change of dtype or device
is done in chunks of ``READ_CHUNK`` bytes that are read, not mapped, so that no page of the file remains in the
process.  A mapped file must not be truncated by others while it is in use (the system would end the process);
replacing it is harmless.

``safe_open`` of the library maps a file as fast, but retains the pages of every
tensor that is only converted: converting a 2.2 GB checkpoint to float32 peaked at 6.5 GB, here at 4.4 GB in 1 to 1.5
times the time.  It also opens the file once more after the check, and cannot read tensors that a header of odd length
misaligns.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kvad import storage as storage_lib
from kvad.checkpoint import safetensors_header
from kvad.checkpoint.hub import INDEX, SINGLE, check_readable_weights
from kvad.checkpoint.safetensors_header import (
    MAX_HEADER_BYTES,
    RETRY_HINT,
    TensorInfo,
    open_file,
    parse_header,
    short_repr,
    strict_json,
    tensor_label,
)
from kvad.errors import CheckpointError, SaveError

DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, (name, _) in safetensors_header.DTYPES.items()}
READ_CHUNK = 1 << 20  # bytes read at a time in a conversion; fits into the processor's cache
# Private and writable, but no memory is reserved for writes: a file may be larger than the memory.
UNRESERVED = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


# ---------------------------------------------------------------- reading


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
    def _mapped(self) -> mmap.mmap:
        try:
            return mmap.mmap(self._file, 0, flags=UNRESERVED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise CheckpointError(f"cannot map {self.path}: {error.strerror}") from error

    def view(self, entry: TensorInfo) -> Tensor:
        """Return the mapped tensor without reading it; a misaligned tensor is copied."""
        dtype = _dtype(entry)
        if entry.bytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        raw = torch.frombuffer(self._mapped, dtype=torch.uint8, count=entry.bytes, offset=entry.start)
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


class ShardedTensors(Mapping[str, Tensor]):
    """Tensors of a folder by name, in the order of its files.

    A tensor's bytes are read when they are used.  Unknown names raise KeyError.
    """

    def __init__(self, folder: Path, shards: Iterable[_Shard]) -> None:
        self.path = folder
        self._entries: dict[str, tuple[_Shard, TensorInfo]] = {}
        for shard in shards:
            for name, entry in shard.entries.items():
                if name in self._entries:
                    raise CheckpointError(f"{shard.path}: {tensor_label(name)} is in {self.file_name(name).name} too")
                self._entries[name] = shard, entry

    def __getitem__(self, name: str) -> Tensor:
        shard, entry = self._entries[name]
        return shard.view(entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

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

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows ``start <= i < stop`` of the first axis, mapped."""
        assert 0 <= start <= stop <= self.shape(name)[0], (name, start, stop)
        return self[name][start:stop]

    def chunks(self, name: str, rows: tuple[int, int] | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (index of the first element, elements [N]) in order, in chunks of ``READ_CHUNK``.

        Each chunk overwrites the one before it.  ``rows`` are the first and the last + 1 row to read (default: all).
        """
        shard, entry = self._entries[name]
        dtype = _dtype(entry)
        start, size, itemsize = entry.start, entry.bytes, dtype.itemsize
        if rows is not None:
            row_bytes = math.prod(entry.shape[1:]) * itemsize
            assert 0 <= rows[0] <= rows[1] <= entry.shape[0], (name, rows)
            start, size = start + rows[0] * row_bytes, (rows[1] - rows[0]) * row_bytes
        # Not from malloc: freeing a block of this size makes glibc retain freed tensors of the same size (150 MB).
        buffer = mmap.mmap(-1, max(1, min(size, READ_CHUNK)))
        for offset in range(0, size, READ_CHUNK):
            count = min(size - offset, READ_CHUNK)
            shard.read(start + offset, memoryview(buffer)[:count])
            yield offset // itemsize, torch.frombuffer(buffer, dtype=torch.uint8, count=count).view(dtype)

    def copy_into(self, out: Tensor, name: str, rows: tuple[int, int] | None = None) -> None:
        """Fill ``out``, of any dtype and on any device, without retaining a page of the file.

        ``out`` is contiguous, of the stored shape or that of ``rows`` (one matrix of a fused one).
        """
        shape = self.shape(name)
        expected = shape if rows is None else (rows[1] - rows[0], *shape[1:])
        assert tuple(out.shape) == expected and out.is_contiguous(), (name, out.shape, expected)
        flat = out.detach().view(-1)
        for start, chunk in self.chunks(name, rows):
            flat[start : start + len(chunk)] = chunk

    def load(self, name: str, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Tensor:
        """Return the tensor on ``device``, floating point in ``dtype``; mapped if neither changes."""
        stored = self.dtype(name)
        target = dtype if dtype is not None and stored.is_floating_point else stored
        if target == stored and torch.device(device).type == "cpu":
            return self[name]
        out = torch.empty(self.shape(name), dtype=target, device=device)
        self.copy_into(out, name)
        return out


def open_tensors(folder: Path) -> ShardedTensors:
    """Check every header of a model folder and return its tensors; no tensor is read.

    Kinds of weights that kvad does not read (pickle, GGUF, quantized, an adapter alone) are refused by name.
    """
    folder = Path(folder)
    check_readable_weights(folder)
    if (folder / SINGLE).exists():
        return ShardedTensors(folder, [_Shard(folder / SINGLE)])
    tensors_by_file = _read_index(folder / INDEX)
    tensors = ShardedTensors(
        folder, (_open_shard(folder / file, tensors_by_file[file]) for file in sorted(tensors_by_file))
    )
    _check_index(folder / INDEX, tensors_by_file, tensors)
    return tensors


def _read_index(path: Path) -> dict[str, list[str]]:
    """Return tensor names by file name; the index's total_size is often wrong and ignored."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} must be a file of at most {MAX_HEADER_BYTES:,} bytes")
        weight_map = strict_json(path.read_bytes(), str(path)).get("weight_map")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be an object of tensor names and file names")
    tensors_by_file: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_plain(file_name):
            raise CheckpointError(
                f"{path}: {tensor_label(name)}: must be in a file of the same folder, got {short_repr(file_name)}"
            )
        tensors_by_file.setdefault(file_name, []).append(name)
    return tensors_by_file


def _is_plain(name: str) -> bool:
    """Return True for a file name without path components."""
    return name.endswith(".safetensors") and name.isprintable() and len(name) < 256 and not set(name) & set("/\\:")


def _open_shard(path: Path, tensor_names: list[str]) -> _Shard:
    if not path.exists():
        message = f"{path} is missing, which has {tensor_label(tensor_names[0])} by the index"
        raise CheckpointError(message, f"The checkpoint is incomplete. {RETRY_HINT}")
    return _Shard(path)


def _check_index(path: Path, tensors_by_file: Mapping[str, list[str]], tensors: ShardedTensors) -> None:
    file_by_tensor = {name: file for file, names in tensors_by_file.items() for name in names}
    for name, file in file_by_tensor.items():
        if name not in tensors or tensors.file_name(name).name != file:
            raise CheckpointError(
                f"{path.with_name(file)} lacks {tensor_label(name)}, which it has by the index", RETRY_HINT
            )
    for name in tensors:
        if name not in file_by_tensor:
            raise CheckpointError(
                f"{tensors.file_name(name)} has {tensor_label(name)}, which {path.name} lacks", RETRY_HINT
            )


def find_nonfinite(tensors: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    """Return (name, number of NaN or infinite elements) of every tensor that has some."""
    nonfinite = []
    for name in tensors:
        chunks: Iterable[Tensor]
        if isinstance(tensors, ShardedTensors):
            chunks = (chunk for _, chunk in tensors.chunks(name))
        else:
            chunks = tensors[name].detach().reshape(-1).split(READ_CHUNK)
        if count := sum(map(_count_nonfinite, chunks)):
            nonfinite.append((name, count))
    return nonfinite


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


# ---------------------------------------------------------------- writing


def write_sharded(
    folder: Path,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int = 5 * 10**9,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write ``model.safetensors``, or shards and their index, into a folder without weights.

    Readers see no weights until all are written: the index comes last.  To replace a folder, write into
    ``storage.atomic.new_folder``.

    Args:
        folder: Folder to write into.
        tensors: Tensors by name, or pairs; one shard at a time is held in memory.  Tied tensors occur once.
        max_shard_bytes: Maximum size of a file.
        metadata: Metadata of every file (default: {"format": "pt"}).
    """
    temp_files: list[tuple[Path, dict[str, int]]] = []
    files: list[Path] = []
    try:
        _make_room(folder)
        for shard in _shards(tensors.items() if isinstance(tensors, Mapping) else tensors, max_shard_bytes):
            path = (
                folder / f".{SINGLE}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
            )  # a name that ``recover_interrupted`` removes
            temp_files.append((path, {name: tensor.nbytes for name, tensor in shard.items()}))
            _write_file(path, shard, dict(metadata or {"format": "pt"}))
            shard.clear()  # otherwise two shards would be in memory while the next one is built
        count = len(temp_files)
        for index, (path, _) in enumerate(temp_files, 1):
            name = SINGLE if count == 1 else f"model-{index:05}-of-{count:05}.safetensors"
            files.append(folder / name)
            path.rename(files[-1])
        if count > 1:
            sizes = [shard_sizes for _, shard_sizes in temp_files]
            files.append(folder / INDEX)
            storage_lib.atomic.write_bytes(files[-1], _index([path.name for path in files], sizes))
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


def _write_file(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:  # safetensors wraps the disk's error
        raise OSError(str(error)) from error
    storage_lib.atomic.fsync_path(path)


def _index(files: Sequence[str], sizes: Sequence[Mapping[str, int]]) -> bytes:
    weight_map = {name: file for file, names in zip(files, sizes, strict=False) for name in names}
    total = sum(size for names in sizes for size in names.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()
