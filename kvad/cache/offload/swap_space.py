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
_FileJob = Callable[[], tuple[int, Sequence[Section]]]  # returns the bytes, and the sections that it read


class SwapResult(NamedTuple):
    """Result of a write or a read; ``sections`` is the content that was read."""

    operation: Literal["write", "read"]
    key: int
    nbytes: int = 0
    seconds: float = 0.0
    failure: str | None = None
    sections: Sequence[Section] = ()


class SwapFiles:
    """Files of one engine's swapped sequences: one container per sequence, for this process only.

    Jobs of a key run in order. Every failure is returned as a ``SwapResult``. The folder is created if missing.

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
        self._jobs: list[tuple[int, Future[SwapResult]]] = []  # by key: writes and reads whose result was not returned
        weakref.finalize(self, _remove_all, self._worker, fs, self._paths)

    def write(self, key: int, sections: Callable[[], Sequence[Section]]) -> None:
        """Write a sequence. The thread calls ``sections``; its content must not change until then."""
        path = self._paths[key] = storage.temp_paths.temp_path(self.folder / f"{FILE_PREFIX}{key}", "tmp")
        self._submit(key, path, "write", partial(_write, self.fs, path, self._metadata(key), sections))

    def read(self, key: int) -> None:
        """Read the sequence that was written under ``key``."""
        path = self._paths[key]
        self._submit(key, path, "read", partial(_read, self.fs, path, self._metadata(key)))

    def _metadata(self, key: int) -> dict[str, str]:
        return {"sequence": f"{self._name}.{key}"}

    def _submit(self, key: int, path: Path, operation: Literal["write", "read"], job: _FileJob) -> None:
        self._jobs.append((key, self._worker.submit(partial(_run, SwapResult(operation, key), path, job))))

    def remove(self, key: int) -> None:
        """Cancel the jobs of ``key`` and remove its file, if any."""
        path = self._paths.pop(key, None)
        if path is not None:
            for job in [job for other, job in self._jobs if other == key]:
                job.cancel()
            self._jobs = [entry for entry in self._jobs if entry[0] != key]  # A later write may have the same key.
            self._worker.submit(partial(_remove, self.fs, path))

    @property
    def pending(self) -> bool:
        """True if a write or a read has not returned its result."""
        return bool(self._jobs)

    def pop_finished(self) -> list[SwapResult]:
        """Return the results since the last call."""
        finished = [entry for entry in self._jobs if entry[1].done()]
        self._jobs = [entry for entry in self._jobs if entry not in finished]
        return [job.result() for _, job in finished]

    def wait(self) -> list[SwapResult]:
        """Wait for at least one result if any job is pending; return all results."""
        futures.wait([job for _, job in self._jobs], return_when=futures.FIRST_COMPLETED)
        return self.pop_finished()

    def has_room(self, nbytes: int) -> bool:
        """True if the disk has room for ``nbytes`` and the reserve."""
        try:
            return self.fs.free_bytes(self.folder) >= nbytes + RESERVED_BYTES
        except OSError:
            return False

    def close(self) -> None:
        """Stop the thread and remove all files. The running job ends first, queued ones are canceled."""
        for key in list(self._paths):
            self.remove(key)
        self._worker.stop()
        self._jobs.clear()


# Jobs of the thread; they do not reference the SwapFiles, so that it can be garbage collected.


def _write(
    fs: FileSystem, path: Path, metadata: Mapping[str, str], build_sections: Callable[[], Sequence[Section]]
) -> tuple[int, Sequence[Section]]:
    sections = build_sections()
    return storage.container.write_container(path, CONTAINER_KIND, {}, metadata, sections, durable=False, fs=fs), ()


def _read(fs: FileSystem, path: Path, metadata: Mapping[str, str]) -> tuple[int, Sequence[Section]]:
    with storage.container.open_container(path, fs) as container:
        if container.header.kind != CONTAINER_KIND or container.header.metadata != metadata:
            raise StorageError(f"{path}: contains another sequence", reason="mismatch")
        infos = container.header.sections.values()
        sections = [Section(info.name, info.dtype, info.shape, container.read(info.name)) for info in infos]
    return sum(info.nbytes for info in infos), sections


def _run(result: SwapResult, path: Path, job: _FileJob) -> SwapResult:
    context = f"{path}: could not be {'written' if result.operation == 'write' else 'read'}"
    start, failure = time.perf_counter(), None
    try:
        nbytes, sections = job()
        result = result._replace(nbytes=nbytes, sections=sections)
    except OSError as error:
        failure = f"{context}: {error.strerror or error}"
    except KvadError as error:
        failure = error.message
    except BaseException as error:  # The engine waits for a result in every case.
        failure = f"{context}: {type(error).__name__}: {error}"
    return result._replace(seconds=time.perf_counter() - start, failure=failure)


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
class _SwapRecord:
    """State of one swapped sequence."""

    nbytes: int
    order: Order
    required: bool  # cannot be recomputed
    state: SwapState = "pending"
    is_written: bool = False  # Its file is complete.
    origin: SwapLocation = "ram"  # Where its copy was read from.
    fault: str = ""


class SwapSpace:
    """Stores the blocks of preempted sequences.

    Invariant: every key is in exactly one state (pending, in-ram, writing, on-disk, reading, lost).

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
        self._records: dict[int, _SwapRecord] = {}
        self._prefetched = -1  # key of the last ``prefetch``
        self._swapping_in: Collection[int] = ()
        self._refused_at = float("-inf")  # time of the last failed write
        self._stats = SwapSpaceStats()
        self._changed = False  # since the last poll

    def __len__(self) -> int:
        return len(self._records)

    # ------------------------------------------------------------ room

    @property
    def bounded(self) -> bool:
        return self.ram is not None

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
        self._records.setdefault(key, _SwapRecord(nbytes, order, required))

    def state(self, key: int) -> SwapState:
        """Return the state of a sequence; "in-ram" for a copy that others added to ``copies``."""
        return self._records[key].state if key in self._records else "in-ram"

    def failure(self, key: int) -> str:
        return self._records[key].fault

    def nbytes(self, key: int) -> int:
        """Return the size of a sequence; 0 for a copy that others added."""
        return self._records[key].nbytes if key in self._records else 0

    def read_from(self, key: int) -> SwapLocation | None:
        """Return where the copy was read from; None for a copy that others added."""
        return self._records[key].origin if key in self._records else None

    def prefetch(self, key: int) -> None:
        """Start reading the sequence that is swapped in next."""
        self._prefetched = key
        record = self._records[key]
        if record.state == "on-disk":
            assert self.files is not None
            record.state = "reading"
            self.files.read(key)

    def pop(self, key: int) -> _SwapRecord | None:
        """Remove a sequence whose swap-in is in the BlockOps; the device owns its copy."""
        self._changed = True  # There is more room.
        if key in self._records and self.files is not None:
            self.files.remove(key)
        return self._records.pop(key, None)

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
        if self.files is not None and self.files.pending:
            for result in self.files.pop_finished():
                self._apply_result(result)
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
        return self.files is not None and self.files.pending

    def wait(self, swapping_in: Collection[int] = ()) -> None:
        """Wait for at least one read or write."""
        assert self.files is not None
        self._swapping_in = swapping_in
        for result in self.files.wait():
            self._apply_result(result)

    def _apply_result(self, result: SwapResult) -> None:
        record, stats = self._records.get(result.key), self._stats
        if record is None:
            return  # dropped meanwhile
        self._changed = True
        if result.failure is not None:
            self._on_failure(result, record, result.failure)
            return
        record.state = "in-ram"
        if result.operation == "write":
            record.is_written = True
            self._drop_copy(result.key, record)
            stats.written, stats.written_bytes = stats.written + 1, stats.written_bytes + result.nbytes
        else:
            assert self._from_sections is not None
            self.copies[result.key] = self._from_sections(result.sections)
            record.origin = "disk"
            stats.read, stats.read_bytes = stats.read + 1, stats.read_bytes + result.nbytes
        self.on_copied(result.operation, result.nbytes, result.seconds)

    def _on_failure(self, result: SwapResult, record: _SwapRecord, failure: str) -> None:
        self._stats.failed, self._stats.fault = self._stats.failed + 1, failure
        LOG.warning("swapped sequence: %s", failure)
        if result.operation == "write":
            assert self.files is not None
            self._refused_at = self._clock()
            self.files.remove(result.key)
            if record.required or result.key in self._swapping_in:
                record.state = "in-ram"
                return
            del self.copies[result.key]
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
                self.files.write(key, partial(self._to_sections, key, self.copies[key]))
                ram_bytes -= record.nbytes

    def _drop_copy(self, key: int, record: _SwapRecord) -> bool:
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
        if self.files is not None:
            self.files.close()
        self._records.clear()

    def check(self) -> None:
        for key, record in self._records.items():
            if record.state in ("in-ram", "writing"):
                assert key in self.copies, f"swapped sequence {key} is {record.state} without a copy"
            elif record.state in ("on-disk", "reading"):
                assert key not in self.copies and record.is_written, f"swapped sequence {key} is {record.state}"
