"""Swap space: host copies of preempted sequences, in RAM up to a limit, then on disk.

    pending  its copy is made with the next step's BlockOps
    in-ram   its copy is in RAM
    writing  in RAM, and being written
    on-disk  in its file only
    reading  being read
    lost     its copy was not made, or its file is damaged: ``fault`` has the cause

Invariants: a copy leaves RAM only after its file is complete. A sequence that is in-ram or writing can be swapped in
at once; one that is on-disk or reading is waited for only in ``SwapSpace.wait``. Late results never change a
dropped or swapped-in sequence. Sequences that can be recomputed (not ``required``) exceed the limit one at a time,
while they are written; the others stay in RAM beyond the limit if the disk refuses them.

Owned by the engine thread; file operations run in one background thread. Integers and opaque copies; no torch.

Files have temporary names (``temp_paths.py``): those of a dead process are removed at the next start. Nothing is
flushed, because no process reads the files later.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvad import storage
from kvad.errors import ConfigError, KvadError, StorageError
from kvad.storage import REAL_FILE_SYSTEM, FileSystem, IoThread, Section

FILE_PREFIX = "kvad-swap-"
CONTAINER_KIND = "swap"
RESERVED_BYTES = 64 << 20  # bytes that stay free on the disk
RETRY = 30.0  # seconds without writes after the disk refused one
LOG = logging.getLogger(__name__)

SwapLocation = Literal["ram", "disk"]
SwapState = Literal["pending", "in-ram", "writing", "on-disk", "reading", "lost"]
Order = tuple[int, int]


class SwapResult(NamedTuple):
    """Result of a write or a read."""

    nbytes: int = 0
    sections: Sequence[Section] = ()  # the content that was read
    seconds: float = 0.0
    failure: str = ""


class SwapFiles:
    """Files of one engine's swapped sequences: one container per sequence, for this process only.

    Jobs run in order in one thread. A failure is part of the result. The folder is created if missing.

    Raises:
        ConfigError: If the folder cannot be written.
    """

    def __init__(self, folder: Path, *, fs: FileSystem = REAL_FILE_SYSTEM, worker: IoThread | None = None) -> None:
        self.folder, self.fs = folder, fs
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise ConfigError(f"swap_dir: {folder}: {error.strerror}", "Give a writable folder.") from None
        self.swept = storage.filesystem.remove_temp_files(folder, lambda name: FILE_PREFIX in name, fs)
        self._worker, self._name = IoThread("kvad-swap") if worker is None else worker, os.urandom(8).hex()
        self._paths: dict[int, Path] = {}
        weakref.finalize(self, _remove_all, self._worker, fs, self._paths)

    def write(self, key: int, sections: Callable[[], Sequence[Section]]) -> Future[SwapResult]:
        """Write a sequence. The thread calls ``sections``; its content must not change until then."""
        path = self._paths[key] = storage.temp_paths.temp_path(self.folder / f"{FILE_PREFIX}{key}", "tmp")
        return self._worker.submit(partial(_run, self.fs, path, {"sequence": f"{self._name}.{key}"}, sections))

    def read(self, key: int) -> Future[SwapResult]:
        """Read the sequence that was written under ``key``."""
        return self._worker.submit(partial(_run, self.fs, self._paths[key], {"sequence": f"{self._name}.{key}"}, None))

    def remove(self, key: int) -> None:
        """Remove the file of ``key``, if any, after the queued jobs."""
        path = self._paths.pop(key, None)
        if path is not None:
            self._worker.submit(partial(_remove, self.fs, path))

    def has_room(self, nbytes: int) -> bool:
        """True if the disk has room for ``nbytes`` and the reserve."""
        try:
            return self.fs.free_bytes(self.folder) >= nbytes + RESERVED_BYTES
        except OSError:
            return False

    def close(self) -> None:
        """Stop the thread and remove all files, after the queued jobs."""
        for key in list(self._paths):
            self.remove(key)
        self._worker.stop()


# Jobs of the thread; they do not reference the SwapFiles, so that it can be garbage collected.


def _read(fs: FileSystem, path: Path, metadata: Mapping[str, str]) -> tuple[int, Sequence[Section]]:
    with storage.container.open_container(path, fs) as container:
        if container.header.kind != CONTAINER_KIND or container.header.metadata != metadata:
            raise StorageError(f"{path}: contains another sequence", reason="mismatch")
        infos = container.header.sections.values()
        sections = [Section(info.name, info.dtype, info.shape, container.read(info.name)) for info in infos]
    return sum(info.nbytes for info in infos), sections


def _run(
    fs: FileSystem, path: Path, metadata: Mapping[str, str], build_sections: Callable[[], Sequence[Section]] | None
) -> SwapResult:
    """Write the sections, or read them if None."""
    start, context = time.perf_counter(), f"{path}: could not be {'read' if build_sections is None else 'written'}"
    try:
        if build_sections is None:
            nbytes, sections = _read(fs, path, metadata)
        else:
            content, sections = build_sections(), ()
            nbytes = storage.container.write_container(
                path, CONTAINER_KIND, {}, metadata, content, durable=False, fs=fs
            )
        return SwapResult(nbytes, sections, time.perf_counter() - start)
    except OSError as error:
        return SwapResult(failure=f"{context}: {error.strerror or error}")
    except KvadError as error:
        return SwapResult(failure=error.message)
    except BaseException as error:  # The engine waits for a result in every case.
        return SwapResult(failure=f"{context}: {type(error).__name__}: {error}")


def _remove(fs: FileSystem, path: Path) -> None:
    with suppress(OSError):
        fs.remove(path)


def _remove_all(worker: IoThread, fs: FileSystem, paths: dict[int, Path]) -> None:
    for path in paths.values():
        worker.submit(partial(_remove, fs, path))
    worker.finish()


@dataclass
class SwapSpaceStats:
    """Statistics of a swap space."""

    ram_bytes: int = 0  # now
    disk_bytes: int = 0  # now
    ram_peak: int = 0  # most bytes in RAM at once
    written: int = 0  # sequences
    written_bytes: int = 0
    read: int = 0  # sequences
    read_bytes: int = 0
    failed: int = 0  # writes and reads
    fault: str = ""  # message of the last failure


@dataclass(slots=True)
class SwapRecord:
    """State of one swapped sequence."""

    nbytes: int
    order: Order
    required: bool  # cannot be recomputed
    state: SwapState = "pending"
    is_written: bool = False  # Its file is complete.
    origin: SwapLocation | None = "ram"  # Where its copy was read from.
    fault: str = ""
    job: Future[SwapResult] | None = None  # its write or read, until the result is applied


class SwapSpace:
    """Stores the blocks of preempted sequences. Every key is in exactly one state.

    Args:
        copies: Host copies by key, added and removed by KVCache.
        ram: Maximum bytes of the copies in RAM; None for no limit.
        files: Files for copies beyond the limit; None for none.
        to_sections: Converts a copy to sections, in the file thread.
        from_sections: Converts sections to a copy.
        on_copied: Called with the bytes and the seconds of each write and read.
        clock: Seconds; limits retries after a refused write.
    """

    def __init__(
        self,
        copies: MutableMapping[int, Any],
        *,
        ram: int | None = None,
        files: SwapFiles | None = None,
        to_sections: Callable[[int, Any], Sequence[Section]] | None = None,
        from_sections: Callable[[Sequence[Section]], Any] | None = None,
        on_copied: Callable[[Literal["write", "read"], int, float], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert files is None or (to_sections and from_sections), "files require to_sections and from_sections"
        self.copies, self.ram, self.files, self.on_copied, self._clock = copies, ram, files, on_copied, clock
        self._to_sections, self._from_sections = to_sections, from_sections
        self._records: dict[int, SwapRecord] = {}
        self._prefetched = -1  # key of the last ``prefetch``
        self._swapping_in: Collection[int] = ()
        self._refused_at = float("-inf")  # time of the last failed write
        self._stats = SwapSpaceStats()
        self._changed = False  # since the last poll

    def __len__(self) -> int:
        return len(self._records)

    # ------------------------------------------------------------ room

    def location_for(self, nbytes: int, *, required: bool = False) -> SwapLocation | None:
        """Return where a sequence would be stored now; None if there is no room.

        RAM may exceed its limit for a sequence that cannot be recomputed (``required``).
        """
        ram_bytes, writing_bytes = self._ram_bytes(), self._bytes_in("writing")
        if self.ram is None or ram_bytes + nbytes <= self.ram:
            return "ram"
        excess = max(0, ram_bytes - self.ram)
        if self.files is None or not self._can_write() or (not required and (excess or writing_bytes)):
            return None
        return "disk" if self.files.has_room(excess + writing_bytes + nbytes) else None

    def has_room(self, nbytes: int) -> bool:
        """True if sequences of ``nbytes`` bytes in total fit next to the stored ones."""
        if self.ram is None:
            return True
        excess = nbytes - max(0, self.ram - self._ram_bytes())
        if excess <= 0:
            return True
        return self.files is not None and self._can_write() and self.files.has_room(excess + self._bytes_in("writing"))

    def _ram_bytes(self) -> int:
        """Return the bytes that are, or will be, in RAM and are not being written."""
        prefetched = self._records.get(self._prefetched)
        is_copied = prefetched is not None and prefetched.state == "in-ram" and prefetched.is_written
        return self._bytes_in("pending", "in-ram") - (prefetched.nbytes if prefetched and is_copied else 0)

    def _bytes_in(self, *states: SwapState) -> int:
        return sum(record.nbytes for record in self._records.values() if record.state in states)

    def _can_write(self) -> bool:
        return self._clock() >= self._refused_at + RETRY

    # ------------------------------------------------------------ sequences

    def store(self, key: int, nbytes: int, order: Order, *, required: bool) -> None:
        """Register a sequence whose copy is made with the next BlockOps; the greatest ``order`` is needed last.

        A sequence that was canceled before its swap-in was applied is still registered.
        """
        self._records.setdefault(key, SwapRecord(nbytes, order, required))

    def record(self, key: int) -> SwapRecord:
        """Return the record of a sequence. A copy that others added to ``copies`` is in RAM, without size or origin."""
        return self._records.get(key, SwapRecord(0, (0, 0), False, "in-ram", origin=None))

    def prefetch(self, key: int) -> None:
        """Start reading the sequence that is swapped in next."""
        self._prefetched = key
        record = self._records[key]
        if record.state == "on-disk":
            assert self.files is not None
            record.state, record.job = "reading", self.files.read(key)

    def pop(self, key: int) -> SwapRecord | None:
        """Remove a sequence whose swap-in is in the BlockOps; the device owns its copy."""
        self._changed = True  # There is more room.
        record = self._records.pop(key, None)
        if record is not None and self.files is not None:
            if record.job is not None:
                record.job.cancel()
            self.files.remove(key)
        return record

    def drop(self, key: int) -> None:
        """Drop a sequence and its copy, also one that others added."""
        record = self.pop(key)
        if record is None or record.state != "pending":  # Otherwise the BlockOps that make the copy drop it.
            self.copies.pop(key, None)

    # ------------------------------------------------------------ progress

    def poll(self, not_copied: Collection[int] = (), swapping_in: Collection[int] = ()) -> bool:
        """Apply finished reads and writes, and start writing copies beyond the limit.

        Copies of ``not_copied`` keys are not made yet; those of ``swapping_in`` stay in RAM. Returns True if waiting
        sequences may be able to continue.
        """
        self._swapping_in = swapping_in
        self._apply_results()
        for key, record in self._records.items():
            if record.state == "pending" and key not in not_copied:
                record.state, self._changed = "in-ram", True
                if key not in self.copies:
                    record.state, record.fault = "lost", "the copy was not made: the step failed"
        if self._records:
            self._balance()
        changed, self._changed = self._changed, False
        return changed

    @property
    def pending(self) -> bool:
        """True if a read or a write is in progress."""
        return any(record.job is not None for record in self._records.values())

    def wait(self, swapping_in: Collection[int] = ()) -> None:
        """Wait for at least one read or write."""
        self._swapping_in = swapping_in
        jobs = [record.job for record in self._records.values() if record.job is not None]
        futures.wait(jobs, return_when=futures.FIRST_COMPLETED)
        self._apply_results()

    def _apply_results(self) -> None:
        for key, record in self._records.items():
            if record.job is not None and record.job.done():
                result, record.job, self._changed = record.job.result(), None, True
                if result.failure:
                    self._on_failure(key, record, result.failure)
                else:
                    self._on_success(key, record, result)

    def _on_success(self, key: int, record: SwapRecord, result: SwapResult) -> None:
        stats, is_write = self._stats, record.state == "writing"
        record.state = "in-ram"
        if is_write:
            record.is_written = True
            self._drop_copy(key, record)
            stats.written, stats.written_bytes = stats.written + 1, stats.written_bytes + result.nbytes
        else:
            assert self._from_sections is not None
            self.copies[key] = self._from_sections(result.sections)
            record.origin = "disk"
            stats.read, stats.read_bytes = stats.read + 1, stats.read_bytes + result.nbytes
        self.on_copied("write" if is_write else "read", result.nbytes, result.seconds)

    def _on_failure(self, key: int, record: SwapRecord, failure: str) -> None:
        self._stats.failed, self._stats.fault = self._stats.failed + 1, failure
        LOG.warning("swapped sequence: %s", failure)
        if record.state == "writing":
            assert self.files is not None
            self._refused_at = self._clock()
            self.files.remove(key)
            if record.required or key in self._swapping_in:
                record.state = "in-ram"
                return
            del self.copies[key]
        record.state, record.fault = "lost", failure

    def _balance(self) -> None:
        """Write copies beyond the limit; the sequence that is needed last first."""
        ram_bytes = self._ram_bytes()
        self._stats.ram_peak = max(self._stats.ram_peak, self._resident_bytes())
        if self.ram is None or ram_bytes <= self.ram or self.files is None:
            return
        assert self._to_sections is not None
        candidates = [
            (record.order, key)
            for key, record in self._records.items()
            if record.state == "in-ram" and key not in self._swapping_in
        ]
        for _, key in sorted(candidates, reverse=True):
            record = self._records[key]
            if ram_bytes <= self.ram:
                return
            if record.is_written:
                ram_bytes -= record.nbytes if self._drop_copy(key, record) else 0
            elif self._can_write():
                record.state = "writing"
                record.job = self.files.write(key, partial(self._to_sections, key, self.copies[key]))
                ram_bytes -= record.nbytes

    def _drop_copy(self, key: int, record: SwapRecord) -> bool:
        """Drop a copy that is also on disk, unless its sequence is swapped in next."""
        if key == self._prefetched or key in self._swapping_in:
            return False
        record.state = "on-disk"
        del self.copies[key]
        return True

    # ------------------------------------------------------------ statistics

    def stats(self) -> SwapSpaceStats:
        disk_bytes = sum(record.nbytes for record in self._records.values() if record.is_written)
        return replace(self._stats, ram_bytes=self._resident_bytes(), disk_bytes=disk_bytes)

    def _resident_bytes(self) -> int:
        return self._bytes_in("in-ram", "writing", "reading")

    def close(self) -> None:
        """Stop the file thread and drop every sequence."""
        for key in list(self._records):
            self.pop(key)
        if self.files is not None:
            self.files.close()

    def check(self) -> None:
        for key, record in self._records.items():
            if record.state in ("in-ram", "writing"):
                assert key in self.copies, f"swapped sequence {key} is {record.state} without a copy"
            elif record.state in ("on-disk", "reading"):
                assert key not in self.copies and record.is_written, f"swapped sequence {key} is {record.state}"
