"""The tensors of a model folder as the Hugging Face hub has it: checked, then read lazily; and written.

A folder holds ``model.safetensors``, or ``model.safetensors.index.json`` and the shards that it names (where both
are there, the single file counts, as in transformers).  A file::

    8 bytes      n, little-endian
    n bytes      {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"format": "pt"}}
    the rest     the tensors' bytes, row by row, without gaps: offsets count from here

Invariant: nothing is mapped, and nothing is allocated beyond a header, before all headers of a folder add up; what
does not is a CheckpointError of one line that names file and tensor.  After that a tensor is a private view of its
file (a write to it never reaches the disk), and its bytes are read when they are used.  What changes dtype or device
travels in pieces of ``PIECE`` bytes that are read, not mapped: so no page of the file stays in the process.  A mapped
file must not be cut short by others while it is in use (the system would end the process); replacing it is harmless.

The format: github.com/huggingface/safetensors.  Its own ``safe_open`` maps a file too, as fast, but keeps the pages
of every tensor that is only converted: a 2.2 GB checkpoint made float32 peaked at 6.5 GB, here at 4.4 GB, which took
1 to 1.5 times as long.  It also opens the file once more after the check, and cannot read what a header of an odd
length puts askew.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kvad import storage as storage_lib
from kvad.checkpoint.hub import INDEX, SINGLE, check_readable_weights
from kvad.errors import CheckpointError, SaveError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER_BYTES = 100_000_000  # bytes; the format's own limit, taken for the index too
LARGEST, MAX_DIMS = 2**63 - 1, 64  # what torch can count, and index
READ_CHUNK = 1 << 20  # bytes read at a time where a tensor is converted: it stays in the processor's cache
# Private and writable, but without a promise of memory for writes that never come: it may be larger than the memory.
UNRESERVED = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
FIELDS = {"dtype", "shape", "data_offsets"}
RETRY_HINT = "download or copy it again"


class TensorEntry(NamedTuple):
    """Where a tensor lies: ``size`` bytes from byte ``start`` of its file, the header included."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


# ---------------------------------------------------------------- headers


def read_tensor_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, in the order of their data; no tensor is read.

    Raises CheckpointError for a file that is missing, or in which anything does not add up.
    """
    return _Shard(path).entries


class _Shard:
    """One file, open: its entries checked, its bytes mapped on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe of that name must not block
            weakref.finalize(self, os.close, self._file)
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is no regular file")
            self.entries = self._checked(status.st_size)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing", f"the checkpoint is not whole: {RETRY_HINT}") from error
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    def _checked(self, size: int) -> dict[str, TensorEntry]:
        start = os.pread(self._file, 64, 0)
        length = int.from_bytes(start[:8], "little")
        if start.startswith(b"version https://git-lfs"):
            raise CheckpointError(f"{self.path} is a Git LFS pointer, not the file itself", "run: git lfs pull")
        if size < 8 or length > size - 8:
            what = f"{size:,} bytes, of which the header takes {length:,}" if size >= 8 else f"{size:,} bytes"
            raise CheckpointError(f"{self.path} is cut off, or is no safetensors file: {what}", RETRY_HINT)
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.path}: a header of {length:,} bytes; the limit is {MAX_HEADER_BYTES:,}")
        header = _strict_json(os.pread(self._file, length, 8), f"{self.path}: its header")
        _check_metadata(header.pop("__metadata__", None), self.path)
        found = [(name, _entry(value, 8 + length, f"{self.path}: {_tensor(name)}")) for name, value in header.items()]
        found.sort(key=lambda pair: (pair[1].start, pair[1].size))
        _check_offsets(self.path, found, 8 + length, size)
        return dict(found)

    @cached_property
    def _mapped(self) -> mmap.mmap:
        try:
            return mmap.mmap(self._file, 0, flags=UNRESERVED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise CheckpointError(f"cannot map {self.path}: {error.strerror}") from error

    def view(self, entry: TensorEntry) -> Tensor:
        """The mapped tensor; nothing is read, but where a foreign writer's tensor lies askew it is copied."""
        if entry.size == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = torch.frombuffer(self._mapped, dtype=torch.uint8, count=entry.size, offset=entry.start)
        return (raw.clone() if entry.start % entry.dtype.itemsize else raw).view(entry.dtype).view(entry.shape)

    def read(self, start: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self._file, [into], start)
            if count == 0:
                raise CheckpointError(f"{self.path} was cut off at byte {start:,} while it was being read")
            start, into = start + count, into[count:]


def _strict_json(content: bytes, what: str) -> dict[str, Any]:
    """Like ``json.loads``, but UTF-8 only, an object only, and no key twice at any depth."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = sorted(name for name, _ in pairs)
            twice = next(name for name, following in itertools.pairwise(names) if name == following)
            raise CheckpointError(f"{what} names {_short(twice)} twice")
        return found

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{what} is not JSON: {reason}", RETRY_HINT) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is not a JSON object")
    return value


def _check_metadata(metadata: object, path: Path) -> None:
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise CheckpointError(f"{path}: its __metadata__ is not an object of strings")


def _entry(value: object, data: int, where: str) -> TensorEntry:
    """``data``: where the file's data begins."""
    if not isinstance(value, dict) or set(value) != FIELDS:
        raise CheckpointError(f"{where}: its entry is not {{dtype, shape, data_offsets}}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has dtype {_short(dtype)}, which kvad does not read", ", ".join(DTYPES))
    if not _are_counts(shape) or len(shape) > MAX_DIMS or math.prod(max(1, n) for n in shape) > LARGEST // 16:
        raise CheckpointError(f"{where}: its shape is not a list of sizes")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: its data_offsets are not [begin, end]")
    size, wanted = offsets[1] - offsets[0], math.prod(shape) * DTYPES[dtype].itemsize
    if size != wanted:
        raise CheckpointError(f"{where}: {dtype} {shape} takes {wanted:,} bytes, its data_offsets hold {size:,}")
    return TensorEntry(DTYPES[dtype], tuple(shape), data + offsets[0], size)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= LARGEST for n in value)


def _check_offsets(path: Path, found: Sequence[tuple[str, TensorEntry]], data: int, size: int) -> None:
    """Tensors lie end to end, from the end of the header to the end of the file; ``found``: in order."""
    end, before = data, "the header"
    for name, entry in found:
        if not name.isprintable():
            raise CheckpointError(f"{path}: the name of {_tensor(name)} is not printable")
        if entry.start < end:
            raise CheckpointError(f"{path}: {_tensor(name)} begins at byte {entry.start:,}, inside {before}")
        if entry.start > end:
            raise CheckpointError(f"{path}: bytes {end:,} to {entry.start:,}, before {_tensor(name)}, are nobody's")
        end, before = entry.start + entry.size, _tensor(name)
    if end > size:
        raise CheckpointError(f"{path} is cut off: {size:,} of {end:,} bytes are there", RETRY_HINT)
    if end < size:
        raise CheckpointError(f"{path} is too long: {size:,} bytes, its tensors end at {end:,}", RETRY_HINT)


def _tensor(name: str) -> str:
    return f"tensor {_short(name)}"


def _short(value: object) -> str:
    """For a message of one line, whatever a file may hold."""
    if not isinstance(value, str | int | float | None):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


# ---------------------------------------------------------------- reading


class ShardedTensors(Mapping[str, Tensor]):
    """The tensors of a folder by name, in the order of its files; a tensor's bytes are read when they are used.

    Names that are not there are a KeyError.
    """

    def __init__(self, folder: Path, shards: Iterable[_Shard]) -> None:
        self.path = folder
        self._places: dict[str, tuple[_Shard, TensorEntry]] = {}
        for shard in shards:
            for name, entry in shard.entries.items():
                if name in self._places:
                    raise CheckpointError(f"{shard.path}: {_tensor(name)} is in {self.file_name(name).name} too")
                self._places[name] = shard, entry

    def __getitem__(self, name: str) -> Tensor:
        shard, entry = self._places[name]
        return shard.view(entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name][1].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._places[name][1].dtype

    def bytes(self, name: str) -> int:
        return self._places[name][1].size

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for _, entry in self._places.values())

    def file_name(self, name: str) -> Path:
        return self._places[name][0].path

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start <= i < stop`` of the first axis, mapped."""
        assert 0 <= start <= stop <= self.shape(name)[0], (name, start, stop)
        return self[name][start:stop]

    def chunks(self, name: str, rows: tuple[int, int] | None = None) -> Iterator[tuple[int, Tensor]]:
        """(number of its first element, elements [N]) from first to last, each of at most ``PIECE`` bytes.

        ``rows``: only those, numbered from the first of them.  Each piece lies where the one before it lay.
        """
        shard, entry = self._places[name]
        start, size, item = entry.start, entry.size, entry.dtype.itemsize
        if rows is not None:
            row = math.prod(entry.shape[1:]) * item
            assert 0 <= rows[0] <= rows[1] <= entry.shape[0], (name, rows)
            start, size = start + rows[0] * row, (rows[1] - rows[0]) * row
        # Not from malloc: to free a block of this size makes glibc keep what tensors of its size give back (150 MB).
        buffer = mmap.mmap(-1, max(1, min(size, READ_CHUNK)))
        for offset in range(0, size, READ_CHUNK):
            count = min(size - offset, READ_CHUNK)
            shard.read(start + offset, memoryview(buffer)[:count])
            yield offset // item, torch.frombuffer(buffer, dtype=torch.uint8, count=count).view(entry.dtype)

    def copy_into(self, out: Tensor, name: str, rows: tuple[int, int] | None = None) -> None:
        """Fill ``out``, of any dtype and on any device, without keeping a page of the file.

        ``out`` has the tensor's shape, or that of ``rows`` of it (one matrix of a fused one).
        """
        shape = self.shape(name)
        wanted = shape if rows is None else (rows[1] - rows[0], *shape[1:])
        assert tuple(out.shape) == wanted and out.is_contiguous(), (name, out.shape, wanted)
        flat = out.detach().view(-1)
        for first, piece in self.chunks(name, rows):
            flat[first : first + len(piece)] = piece

    def load(self, name: str, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Tensor:
        """The tensor on ``device``, in ``dtype`` if it is one of floating point; mapped where neither changes."""
        stored = self.dtype(name)
        target = dtype if dtype is not None and stored.is_floating_point else stored
        if target == stored and torch.device(device).type == "cpu":
            return self[name]
        out = torch.empty(self.shape(name), dtype=target, device=device)
        self.copy_into(out, name)
        return out


def open_tensors(folder: Path) -> ShardedTensors:
    """Check every header of a model folder, and hand out its tensors; no tensor is read.

    Raises CheckpointError for a folder that is not whole, that contradicts itself, or whose weights are of a kind
    that kvad does not read (pickle, GGUF, quantized, an adapter alone), with the way out.
    """
    folder = Path(folder)
    check_readable_weights(folder)
    if (folder / SINGLE).exists():
        return ShardedTensors(folder, [_Shard(folder / SINGLE)])
    wanted = _read_index(folder / INDEX)
    tensors = ShardedTensors(folder, (_open_shard(folder / file, wanted[file]) for file in sorted(wanted)))
    _check_index(folder / INDEX, wanted, tensors)
    return tensors


def _read_index(path: Path) -> dict[str, list[str]]:
    """File name -> the tensors that the index says are in it.  Its total_size is not believed: many are wrong."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} is no file of at most {MAX_HEADER_BYTES:,} bytes")
        places = _strict_json(path.read_bytes(), str(path)).get("weight_map")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path} has no weight_map: an object of tensor names and file names")
    wanted: dict[str, list[str]] = {}
    for name, file_name in places.items():
        if not isinstance(file_name, str) or not _is_plain(file_name):
            raise CheckpointError(
                f"{path}: {_tensor(name)} is said to be in {_short(file_name)}, no name of a file beside it"
            )
        wanted.setdefault(file_name, []).append(name)
    return wanted


def _is_plain(name: str) -> bool:
    """A file of the same folder: no way up, no way down."""
    return name.endswith(".safetensors") and name.isprintable() and len(name) < 256 and not set(name) & set("/\\:")


def _open_shard(path: Path, wanted: list[str]) -> _Shard:
    if not path.exists():
        message = f"{path} is missing, of which the index says that it holds {_tensor(wanted[0])}"
        raise CheckpointError(message, f"the checkpoint is not whole: {RETRY_HINT}")
    return _Shard(path)


def _check_index(path: Path, wanted: Mapping[str, list[str]], tensors: ShardedTensors) -> None:
    named = {name: file for file, names in wanted.items() for name in names}
    for name, file in named.items():
        if name not in tensors or tensors.file_name(name).name != file:
            raise CheckpointError(
                f"{path.with_name(file)} lacks {_tensor(name)}, which the index says it holds", RETRY_HINT
            )
    for name in tensors:
        if name not in named:
            raise CheckpointError(
                f"{tensors.file_name(name)} holds {_tensor(name)}, which {path.name} lacks", RETRY_HINT
            )


def find_nonfinite(tensors: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    """(name, how many elements are NaN or infinite) of every tensor that has some; a piece at a time in memory."""
    found = []
    for name in tensors:
        pieces: Iterable[Tensor]
        if isinstance(tensors, ShardedTensors):
            pieces = (piece for _, piece in tensors.chunks(name))
        else:
            pieces = tensors[name].detach().reshape(-1).split(READ_CHUNK)
        if count := sum(map(_count_nonfinite, pieces)):
            found.append((name, count))
    return found


def _count_nonfinite(piece: Tensor) -> int:
    """A sum that is finite has no NaN and no infinity in it: one fast pass, which nearly always is enough."""
    if not piece.is_floating_point() and not piece.is_complex():
        return 0
    if piece.is_complex():
        piece = torch.view_as_real(piece)
    elif piece.dtype.itemsize == 1:
        piece = piece.float()
    if math.isfinite(piece.sum(dtype=torch.promote_types(piece.dtype, torch.float32)).item()):
        return 0
    return piece.numel() - int(piece.isfinite().sum())


# ---------------------------------------------------------------- writing


def write_sharded(
    folder: Path,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int = 5 * 10**9,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write ``model.safetensors``, or shards and their index, into a folder without weights; the files written.

    Tensors are taken one shard at a time, so that an iterable may make them as it goes.  A tied tensor is named once:
    the same memory under two names is our bug.  ``metadata``: of every file, {"format": "pt"} if None.  Raises
    SaveError if the disk refuses, or where there are weights already: to replace a folder, write into
    ``atomic.new_folder``.  A reader sees no weights until all of them are there: the index comes last.
    """
    temporary: list[tuple[Path, dict[str, int]]] = []
    final: list[Path] = []
    try:
        _make_room(folder)
        for shard in _shards(tensors.items() if isinstance(tensors, Mapping) else tensors, max_shard_bytes):
            path = folder / f".{SINGLE}.{os.getpid()}.{os.urandom(4).hex()}.tmp"  # a name that `sweep` knows
            temporary.append((path, {name: tensor.nbytes for name, tensor in shard.items()}))
            _write_file(path, shard, dict(metadata or {"format": "pt"}))
            shard.clear()  # or two shards would be in memory while the next is made
        count = len(temporary)
        for number, (path, _) in enumerate(temporary, 1):
            name = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            final.append(folder / name)
            path.rename(final[-1])
        if count > 1:
            sizes = [held for _, held in temporary]
            final.append(folder / INDEX)
            storage_lib.atomic.write_bytes(final[-1], _index([path.name for path in final], sizes))
        storage_lib.atomic.fsync_path(folder)
    except BaseException as error:
        for path in [*final, *(path for path, _ in temporary)]:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_lib.atomic.disk_error(folder, error) from error
        raise
    return final


def _make_room(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    storage_lib.atomic.recover_interrupted(folder)
    old = sorted(path.name for path in folder.glob("model*.safetensors*"))
    if old:
        raise SaveError(f"{folder} holds weights already: {old[0]}", "choose another folder, or remove it first")


def _shards(pairs: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in their order, ``most`` bytes at a time; a larger one gets a shard of its own."""
    shard: dict[str, Tensor] = {}
    names: set[str] = set()
    memory: dict[tuple[int, int, int], StorageWeakRef] = {}  # while it is held, no other storage has its number
    for name, tensor in pairs:
        assert name not in names, f"{name} comes twice"
        storage = StorageWeakRef(tensor.untyped_storage())
        place = storage.cdata, int(tensor.storage_offset()), tensor.numel()
        assert not tensor.numel() or place not in memory, f"{name} is tied to another"
        names.add(name)
        memory[place] = storage
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > most:
            yield shard
            shard = {}
        shard[name] = tensor
    if shard or not names:
        yield shard


def _write_file(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:  # the library's name for what the disk says
        raise OSError(str(error)) from error
    storage_lib.atomic.fsync_path(path)


def _index(files: Sequence[str], sizes: Sequence[Mapping[str, int]]) -> bytes:
    places = {name: file for file, held in zip(files, sizes, strict=False) for name in held}
    total = sum(size for held in sizes for size in held.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()
