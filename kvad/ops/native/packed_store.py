"""Packed weights on disk: written by the first process that packs the weights of a model's files, mapped by later ones.

There is one file (``storage/container.py``) for a model's files, an instruction set and a layout of panels; its
fingerprint has all of them. A section has the panels of one product, and its name is a hash of where their rows are in
the model's files. A process that opens the file compares the fingerprint and every checksum; a file that differs in
anything is written again. One process writes it while others wait for its lock. If the disk fails, or has little room,
weights are packed in memory, as those of small models are.

Checksums of a file that were compared are compared again only if the file was written since: a ``.verified`` file
stores its inode, size and times (``is_verified``). That holds for the model's files too (``checkpoint/handle.py``).

The folder is ``KVAD_PACKED_WEIGHTS`` or one in the user's cache folder; the files in it may be deleted at any time.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvad import storage
from kvad.errors import SaveError, StorageError
from kvad.ops.native.build import source_hash
from kvad.storage import REAL_FILE_SYSTEM, FileSystem

LOG = logging.getLogger(__name__)
ENVIRONMENT_VARIABLE = "KVAD_PACKED_WEIGHTS"  # "off", or a folder
KIND, SUFFIX, VERIFIED = "packed weights", ".packed", ".verified"
MIN_AGE_NS = 2 * 10**9
POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14
MIN_BYTES = 256 << 20  # of the model's files; smaller ones are packed in memory
DISK_SHARE = 4  # the files take at most this part of the free space (1/4), with their own
SECTION_BYTES = 200  # of a header at most
HEAD_BYTES, NUM_SAMPLES, SAMPLE_BYTES = 1 << 20, 64, 4096  # of a file without a checksum
LOCK_SECONDS = 120.0  # longest time to wait for another process
POLL_SECONDS = 0.05


class WeightFile(NamedTuple):
    """A file of weights that is mapped into memory."""

    path: Path
    address: int
    size: int
    fingerprint: str  # of its content
    state: tuple[int, ...]  # changes when the file is written or replaced

    @staticmethod
    def create(path: Path, content: NDArray[np.uint8], checksum: str | None) -> WeightFile:
        """Describe a file from its mapped content; without a checksum, that of samples and its times identify it."""
        state, size = _file_state(path), len(content)
        if checksum is None:
            digest = blake2b(content[:HEAD_BYTES].tobytes(), digest_size=16)
            for start in range(0, size, max(1, size // NUM_SAMPLES)):
                digest.update(content[start : start + SAMPLE_BYTES].tobytes())
            checksum = f"{state} {digest.hexdigest()}"
        return WeightFile(path, int(content.ctypes.data), size, checksum, state)


def _file_state(path: Path) -> tuple[int, ...]:
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev


class Verification:
    """The record that a file's checksums were compared; nothing is recorded in the first seconds after a write."""

    def __init__(self, path: Path, name: str, folder: Path | None, fs: FileSystem = REAL_FILE_SYSTEM) -> None:
        self._record, self._fs = None if folder is None else folder / f"{name}{VERIFIED}", fs
        try:
            self._state = _file_state(path)  # before anything is read
        except OSError:
            self._record = None

    @staticmethod
    def of_weights(path: Path, checksum: str) -> Verification:
        """Return the record of a file of weights; there is none for small files."""
        digest = blake2b(f"{checksum} {path.resolve()}".encode(), digest_size=16).hexdigest()
        folder = store_folder() if path.is_file() and path.stat().st_size >= MIN_BYTES else None
        return Verification(path, digest, folder)

    @functools.cached_property
    def is_current(self) -> bool:
        """True if the checksums were compared and the file was not written since."""
        if self._record is None:
            return False
        try:
            with storage.filesystem.open_regular(self._record) as file:
                is_equal = file.read() == repr(self._state).encode()
            self._fs.touch(self._record)  # the time of the last use
            return is_equal
        except OSError:
            return False

    def record(self) -> None:
        """Record that the checksums were right, unless that is recorded."""
        if self._record is None or self.is_current or time.time_ns() - max(self._state[1:3]) < MIN_AGE_NS:
            return  # times have a limited resolution: a later write could have the same
        with suppress(OSError, SaveError):
            self._fs.make_dir(self._record.parent)
            storage.atomic.write_bytes(self._record, repr(self._state).encode())


def store_folder() -> Path | None:
    """Return the folder of the files, or None if it is "off"."""
    requested = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if requested == "off":
        return None
    return Path(requested) if requested else storage.filesystem.user_cache_dir("packed-weights")


class PackedStore:
    """The packed weights of one model's files. After ``open``, it is mapped, or it is written until ``close``."""

    def __init__(self, files: Sequence[WeightFile], folder: Path, fs: FileSystem = REAL_FILE_SYSTEM) -> None:
        self._files, self._folder, self._fs = files, folder, fs
        self._mapping: mmap.mmap | None = None
        self._sections: dict[str, tuple[int, int]] = {}  # offset and bytes
        self._writer: storage.container.ContainerWriter | None = None
        self._lock: int | None = None
        self._path, self._is_open, self._misses = folder, False, False
        self._fingerprint: Mapping[str, str] = {}

    @staticmethod
    def create(files: Sequence[WeightFile]) -> PackedStore | None:
        """Return the store of the mapped files of a model, or None if they are small or it is off."""
        folder = store_folder()
        return None if folder is None or sum(file.size for file in files) < MIN_BYTES else PackedStore(files, folder)

    def open(self, variant: str, num_weights: int) -> None:
        """Map the file for an instruction set, or start to write it; without either, ``add`` does nothing.

        Args:
            variant: Name of the instruction set.
            num_weights: At least the number of panels that will be added.
        """
        if self._is_open:
            return
        self._is_open = True
        sources = " ".join(f"{file.size} {file.fingerprint}" for file in self._files)
        layout = f"{source_hash()} {sys.byteorder}"
        fingerprint = storage.CacheFingerprint(sources=sources, variant=variant, layout=layout)
        self._fingerprint, self._path = fingerprint.parts, self._folder / f"{fingerprint.digest().hex()}{SUFFIX}"
        try:
            self._fs.make_dir(self._folder)
            if not self._map() and self._take_lock() and not self._map():
                self._start(num_weights)
        except OSError as error:
            LOG.info("packed weights are not stored: %s", error)
            self._release()
        if self._writer is None:
            self._release()

    def _map(self) -> bool:
        """Map the file and verify all of it; False if it is missing or differs in anything."""
        verification = Verification(self._path, self._path.stem, self._folder, self._fs)
        try:
            with storage.container.open_container(self._path, self._fs) as file:
                header, mapping = file.header, file.map()
            # Huge pages are read where the file is not cached; all is mapped at once instead of at a fault per page.
            advise(torch.frombuffer(mapping, dtype=torch.uint8), getattr(mmap, "MADV_HUGEPAGE", 14), POPULATE_READ)
        except StorageError as error:
            if error.reason != "missing":
                LOG.warning("%s It is written again.", error.message)
            return False
        sections = list(header.sections.values())
        problem = "belongs to other weights"
        if header.kind == KIND and header.fingerprint == self._fingerprint:
            problem = "" if verification.is_current or _are_intact(mapping, sections) else "has a wrong checksum"
        if problem:
            LOG.warning("%s %s. It is written again.", self._path, problem)
            return False
        verification.record()
        self._sections = {each.name: (each.offset, each.nbytes) for each in sections}
        self._mapping = mapping
        return True

    def _take_lock(self) -> bool:
        """Lock the file's name for writing; False if another process holds the lock for too long."""
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                self._lock = self._fs.lock(self._lock_path)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(POLL_SECONDS)

    @property
    def _lock_path(self) -> Path:
        return self._path.with_suffix(".lock")

    def _start(self, num_weights: int) -> None:
        page = storage.container.HUGE_PAGE
        needed = -(-sum(file.size for file in self._files) // page) * page
        storage.filesystem.remove_temp_files(self._folder, lambda name: name.endswith((SUFFIX, VERIFIED)), self._fs)
        entries = self._fs.list_files(self._folder)
        last_use = {entry.name.removesuffix(VERIFIED): entry.used_ns for entry in entries}
        stored = [entry for entry in entries if entry.name.endswith(SUFFIX)]
        stored.sort(key=lambda entry: max(entry.used_ns, last_use.get(entry.name.removesuffix(SUFFIX), 0)))
        used = sum(entry.size for entry in stored)
        allowed = (self._fs.free_bytes(self._folder) + used) // DISK_SHARE
        if needed > allowed:
            LOG.info("packed weights are not stored: %s may have %s bytes", self._folder, f"{allowed:,}")
            return
        for entry in stored:
            if used + needed <= allowed:
                break
            self._fs.remove(self._folder / entry.name)
            used -= entry.size
        self._writer = storage.container.ContainerWriter(self._path, 4096 + SECTION_BYTES * num_weights, self._fs)

    def name(self, tensors: Sequence[Tensor], kind: str) -> str | None:
        """Return the name of the panels of ``tensors``, or None if one of them is in none of the files."""
        parts = [kind]
        for tensor in tensors:
            address, end = tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)
            index = next(
                (
                    i
                    for i, file in enumerate(self._files)
                    if file.address <= address and end <= file.address + file.size
                ),
                None,
            )
            if index is None:
                return None
            offset = address - self._files[index].address
            parts.append(f"{index} {offset} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}")
        return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def find(self, name: str, like: Tensor) -> Tensor | None:
        """Return stored panels of the shape and dtype of ``like``, mapped, or None."""
        if self._mapping is None:
            return None
        offset, size = self._sections.get(name, (0, -1))
        self._misses |= size < like.nbytes
        return None if size < like.nbytes else _tensor(self._mapping, offset, like)

    def add(self, name: str, packed: Tensor) -> Tensor:
        """Write panels if the file is being written, and return them, mapped from it.

        Raises:
            OSError: If the disk fails; all tensors of this store must be packed again.
        """
        if self._writer is None:
            return packed
        offset = self._writer.write(name, packed.view(-1).view(torch.uint8).numpy().data)
        low = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        return _tensor(self._fs.map(self._writer.file, low, offset - low + packed.nbytes), offset - low, packed)

    def close(self, *, complete: bool) -> None:
        """Commit a ``complete`` file unless the model's files have changed; remove a mapped one that lacked panels."""
        try:
            if self._writer is not None:
                if complete and all(_file_state(file.path) == file.state for file in self._files):
                    self._writer.commit(KIND, self._fingerprint)
            elif self._misses:
                self._fs.remove(self._path)
        except OSError as error:
            LOG.info("packed weights are not stored: %s", error)
        if self._writer is not None:
            self._writer.close()
        self._writer, self._misses = None, False
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                self._fs.remove(self._lock_path)
            with suppress(OSError):
                self._fs.close(self._lock)
            self._lock = None


def advise(content: Tensor, *advice: int) -> None:
    """Give the system advice about the whole pages of a tensor; what it does not support is ignored.

    Other threads run meanwhile, unlike in ``mmap.madvise``.
    """
    low = -(-content.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (content.data_ptr() + _extent(content)) // mmap.PAGESIZE * mmap.PAGESIZE - low
    if size > 0 and sys.platform == "linux":
        for each in advice:
            _libc().madvise(ctypes.c_void_p(low), ctypes.c_size_t(size), each)


def _extent(content: Tensor) -> int:
    """Return the bytes from a tensor's first number to its last one; those of columns of a matrix have gaps."""
    steps = sum((size - 1) * stride for size, stride in zip(content.shape, content.stride(), strict=True))
    return (steps + 1) * content.itemsize if content.numel() else 0


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _are_intact(mapping: mmap.mmap, sections: Sequence[storage.container.SectionInfo]) -> bool:
    with memoryview(mapping) as view, ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        checksums = pool.map(lambda each: crc32(view[each.offset : each.offset + each.nbytes]), sections)
        return all(crc == each.crc for crc, each in zip(checksums, sections, strict=True))


def _tensor(mapping: mmap.mmap, offset: int, like: Tensor) -> Tensor:
    raw = torch.frombuffer(mapping, dtype=torch.uint8, count=like.nbytes, offset=offset)
    return raw.view(like.dtype).view(like.shape)
