"""Swap space: host copies of preempted sequences, in RAM up to a limit, then on disk.

    pending  its copy is made with the next step's BlockOps
    in-ram   its copy is in RAM
    writing  in RAM, and being written
    on-disk  in its file only
    reading  being read
    lost     its copy was not made, or its file is damaged: ``fault`` has the cause

Invariants: a copy leaves RAM only after its file is complete. A sequence that is in-ram or writing can be swapped in
at once; one that is on-disk or reading is waited for only in :meth:`SwapSpace.wait`. Late results never change a
dropped or swapped-in sequence. Sequences that can be recomputed (not ``required``) exceed the limit one at a time,
while they are written; the others stay in RAM beyond the limit if the disk refuses them.

Owned by the engine thread. Integers and opaque copies; no torch.

:class:`SwapFiles` writes one container per sequence (``container.py``) in one thread (``io_thread.py``), for this
process only. The caller submits jobs and polls :meth:`SwapFiles.pop_finished`, which never waits;
:meth:`SwapFiles.wait` does. Jobs of a key run in order; jobs of a key that was removed meanwhile are skipped, and its
file is removed. Every failure is returned as a :class:`SwapResult` with ``failure``; the thread never dies of it.

File names are temporary names (``temp_paths.py``) with this process's id, so that files of a dead process are removed
at the next start. Nothing is flushed: no process reads the files later.

Standard library only; no torch.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Literal, NamedTuple

from kvad import storage
from kvad.errors import ConfigError, KvadError, StorageError
from kvad.storage import REAL_FILE_SYSTEM, FileSystem, IoThread, Section

FILE_PREFIX = "kvad-swap-"
CONTAINER_KIND = "swap"
RESERVED_BYTES = 64 << 20  # bytes that stay free on the disk


class SwapResult(NamedTuple):
    """Result of a write or a read; ``sections`` is the content that was read."""

    operation: Literal["write", "read"]
    key: int
    nbytes: int = 0
    seconds: float = 0.0
    failure: str | None = None
    sections: Sequence[Section] = ()


class SwapFiles:
    """Files of one engine's swapped sequences.

    Args:
        folder: Folder of the files, created if missing.
        fs: File system.
        clock: Seconds; measures each operation.
        worker: Thread of the file operations; a new one by default.

    Raises:
        ConfigError: If the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fs: FileSystem = REAL_FILE_SYSTEM,
        clock: Callable[[], float] = perf_counter,
        worker: IoThread | None = None,
    ) -> None:
        self.folder, self.fs = folder, fs
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise ConfigError(f"swap_dir: {folder}: {error.strerror}", "Give a writable folder.") from None
        self.swept = storage.filesystem.remove_temp_files(folder, lambda name: FILE_PREFIX in name, fs)
        self._file_worker = _FileWorker(fs, clock)
        self._worker = IoThread("kvad-swap") if worker is None else worker
        self._paths: dict[int, Path] = {}
        self.pending = 0  # writes and reads without a result yet
        weakref.finalize(self, _cleanup, self._worker, self._file_worker, self._paths)

    def write(self, key: int, sections: Callable[[], Sequence[Section]]) -> None:
        """Write a sequence. The thread calls ``sections``; its content must not change until then."""
        path = self._paths[key] = storage.temp_paths.temp_path(self.folder / f"{FILE_PREFIX}{key}", "tmp")
        self.pending += 1
        self._worker.submit(partial(self._file_worker.write, key, path, sections))

    def read(self, key: int) -> None:
        """Read the sequence that was written under ``key``."""
        self.pending += 1
        self._worker.submit(partial(self._file_worker.read, key, self._paths[key]))

    def remove(self, key: int) -> None:
        """Cancel the jobs of ``key`` and remove its file, if any."""
        path = self._paths.pop(key, None)
        if path is not None:
            _discard(self._worker, self._file_worker, key, path)

    def pop_finished(self) -> list[SwapResult]:
        """Return the results since the last call, those of removed keys included."""
        results: list[SwapResult] = []
        while self.pending:
            try:
                results.append(self._file_worker.results.get_nowait())
            except Empty:
                break
            self.pending -= 1
        return results

    def wait(self) -> list[SwapResult]:
        """Wait for at least one result if any job is pending; return all results."""
        if not self.pending:
            return []
        first = self._file_worker.results.get()
        self.pending -= 1
        return [first, *self.pop_finished()]

    def has_room(self, nbytes: int) -> bool:
        """True if the disk has room for ``nbytes`` and the reserve."""
        try:
            return self.fs.free_bytes(self.folder) >= nbytes + RESERVED_BYTES
        except OSError:
            return False

    def close(self) -> None:
        """Stop the thread and remove all files. The running job ends first, queued ones are dropped."""
        for key in list(self._paths):
            self.remove(key)
        self._worker.stop()
        self.pop_finished()
        self.pending = 0


def _discard(worker: IoThread, file_worker: _FileWorker, key: int, path: Path) -> None:
    file_worker.canceled.add(key)
    worker.submit(partial(file_worker.remove, key, path))


def _cleanup(worker: IoThread, file_worker: _FileWorker, paths: dict[int, Path]) -> None:
    """Remove the files of a garbage-collected SwapFiles."""
    for key, path in paths.items():
        _discard(worker, file_worker, key, path)
    worker.finish()


class _FileWorker:
    """The thread's half: runs file operations and queues their results."""

    def __init__(self, fs: FileSystem, clock: Callable[[], float]) -> None:
        self._fs, self._clock, self._name = fs, clock, os.urandom(8).hex()
        self.results: SimpleQueue[SwapResult] = SimpleQueue()
        self.canceled: set[int] = set()  # keys whose files the thread has yet to remove

    def write(self, key: int, path: Path, sections: Callable[[], Sequence[Section]]) -> None:
        def job() -> tuple[int, Sequence[Section]]:
            written_sections = sections()
            return storage.container.write_container(
                path, CONTAINER_KIND, {}, self._metadata(key), written_sections, durable=False, fs=self._fs
            ), ()

        self._run(SwapResult("write", key), job, f"{path}: could not be written")

    def read(self, key: int, path: Path) -> None:
        def job() -> tuple[int, Sequence[Section]]:
            sections = self._sections(key, path)
            return sum(memoryview(section.data).nbytes for section in sections), sections

        self._run(SwapResult("read", key), job, f"{path}: could not be read")

    def remove(self, key: int, path: Path) -> None:
        with suppress(OSError):
            self._fs.remove(path)
        self.canceled.discard(key)

    def _run(self, result: SwapResult, job: Callable[[], tuple[int, Sequence[Section]]], context: str) -> None:
        if result.key in self.canceled:
            self.results.put(result._replace(failure="canceled"))
            return
        start, failure = self._clock(), ""
        try:
            nbytes, sections = job()
            result = result._replace(nbytes=nbytes, sections=sections)
        except OSError as error:
            failure = f"{context}: {error.strerror or error}"
        except KvadError as error:
            failure = error.message
        except BaseException as error:  # The engine waits for a result in every case.
            failure = f"{context}: {type(error).__name__}: {error}"
        self.results.put(result._replace(seconds=self._clock() - start, failure=failure or None))

    def _sections(self, key: int, path: Path) -> list[Section]:
        with storage.container.open_container(path, self._fs) as container:
            if container.header.kind != CONTAINER_KIND or container.header.metadata != self._metadata(key):
                raise StorageError(f"{path}: contains another sequence", reason="mismatch")
            stored = container.header.sections.values()
            return [Section(info.name, info.dtype, info.shape, container.read(info.name)) for info in stored]

    def _metadata(self, key: int) -> dict[str, str]:
        return {"sequence": f"{self._name}.{key}"}


SwapLocation = Literal["ram", "disk"]
SwapState = Literal["pending", "in-ram", "writing", "on-disk", "reading", "lost"]
Order = tuple[int, int]
RETRY = 30.0  # seconds without writes after the disk refused one
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
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


class _SwapRecord:
    """State of one swapped sequence."""

    __slots__ = ("fault", "is_written", "nbytes", "order", "origin", "required", "state")

    def __init__(self, nbytes: int, order: Order, required: bool) -> None:
        self.nbytes, self.order, self.required = nbytes, order, required
        self.state: SwapState = "pending"
        self.is_written = False  # Its file is complete.
        self.origin: SwapLocation = "ram"  # Where its copy was read from.
        self.fault = ""


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
        assert files is None or (to_sections is not None and from_sections is not None), (
            "files require to_sections and from_sections"
        )
        self.copies, self.ram, self.files = copies, ram, files
        self._to_sections, self._from_sections, self.on_copied, self._clock = (
            to_sections,
            from_sections,
            on_copied,
            clock,
        )
        self._records: dict[int, _SwapRecord] = {}
        self._prefetched = -1  # key of the last :meth:`prefetch`
        self._swapping_in: Collection[int] = ()
        self._fs_refused_at = float("-inf")  # time of the last failed write
        self._stats = SwapSpaceStats()
        self._changed = False  # since the last poll

    def __len__(self) -> int:
        """Return the number of swapped sequences."""
        return len(self._records)

    # ------------------------------------------------------------ room

    @property
    def bounded(self) -> bool:
        """True if RAM is limited."""
        return self.ram is not None

    def location_for(self, nbytes: int, *, required: bool = False) -> SwapLocation | None:
        """Choose where a sequence would be stored now.

        Args:
            nbytes: Size of the sequence's blocks.
            required: The sequence cannot be recomputed, so RAM may exceed its limit.

        Returns:
            "ram" or "disk", or None if there is no room.
        """
        if self.ram is None or self._ram_bytes() + nbytes <= self.ram:
            return "ram"
        if not self._can_write() or (not required and self._is_writing()):
            return None
        assert self.files is not None
        waiting = max(0, self._ram_bytes() - self.ram) + self._writing_bytes()
        return "disk" if self.files.has_room(waiting + nbytes) else None

    def has_room(self, nbytes: int) -> bool:
        """True if sequences of ``nbytes`` bytes in total fit next to the stored ones."""
        if self.ram is None:
            return True
        left = max(0, self.ram - self._ram_bytes())
        if nbytes <= left:
            return True
        return (
            self.files is not None and self._can_write() and self.files.has_room(nbytes - left + self._writing_bytes())
        )

    def _ram_bytes(self) -> int:
        """Return the bytes that are, or will be, in RAM and are not being written."""
        return sum(
            record.nbytes
            for key, record in self._records.items()
            if record.state == "pending"
            or (record.state == "in-ram" and not (record.is_written and key == self._prefetched))
        )

    def _writing_bytes(self) -> int:
        return sum(record.nbytes for record in self._records.values() if record.state == "writing")

    def _is_writing(self) -> bool:
        return self._ram_bytes() > (self.ram or 0) or self._writing_bytes() > 0

    def _can_write(self) -> bool:
        return self.files is not None and self._clock() >= self._fs_refused_at + RETRY

    # ------------------------------------------------------------ sequences

    def store(self, key: int, nbytes: int, order: Order, *, required: bool) -> None:
        """Register a sequence whose copy is made with the next BlockOps.

        A sequence that was canceled before its swap-in was applied is still registered.

        Args:
            key: Key of the copy.
            nbytes: Size of the sequence's blocks.
            order: Priority; the greatest is needed last.
            required: The sequence cannot be recomputed.
        """
        if key not in self._records:
            self._records[key] = _SwapRecord(nbytes, order, required)

    def state(self, key: int) -> SwapState:
        """Return the state of a sequence; "in-ram" for a copy that others added to ``copies``."""
        return self._records[key].state if key in self._records else "in-ram"

    def failure(self, key: int) -> str:
        """Return why a sequence is lost."""
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

    def pop(self, key: int) -> None:
        """Remove a sequence whose swap-in is in the BlockOps; the device owns its copy."""
        self._remove(key)

    def drop(self, key: int) -> None:
        """Drop a sequence and its copy, also one that others added."""
        record = self._remove(key)
        if record is None or record.state != "pending":  # Otherwise the BlockOps that make the copy drop it.
            self.copies.pop(key, None)

    def _remove(self, key: int) -> _SwapRecord | None:
        record = self._records.pop(key, None)
        self._changed = True  # There is more room.
        if record is not None and self.files is not None:
            self.files.remove(key)
        return record

    # ------------------------------------------------------------ progress

    def poll(self, not_copied: Collection[int] = (), swapping_in: Collection[int] = ()) -> bool:
        """Apply finished reads and writes, and start writing copies beyond the limit.

        Args:
            not_copied: Keys of sequences whose copies are not made yet.
            swapping_in: Keys that are being swapped in and stay in RAM.

        Returns:
            True if waiting sequences may be able to continue.
        """
        self._swapping_in = swapping_in
        if self.files is not None and self.files.pending:
            for result in self.files.pop_finished():
                self._apply_result(result)
        for key, record in self._records.items():
            if record.state == "pending" and key not in not_copied:
                record.state = (
                    "in-ram"
                    if key in self.copies
                    else self._mark_lost(record, "the copy was not made: the step failed")
                )
                self._changed = True
        if self._records:
            self._balance()
        changed, self._changed = self._changed, False
        return changed

    @property
    def pending(self) -> bool:
        """True if a read or a write is in progress."""
        return self.files is not None and self.files.pending > 0

    def wait(self, swapping_in: Collection[int] = ()) -> None:
        """Wait for at least one read or write."""
        assert self.files is not None
        self._swapping_in = swapping_in
        for result in self.files.wait():
            self._apply_result(result)

    def _apply_result(self, result: SwapResult) -> None:
        record = self._records.get(result.key)
        if record is None:
            return  # dropped meanwhile
        self._changed = True
        if result.failure is not None:
            self._on_failure(result, record)
        elif result.operation == "write":
            record.is_written, record.state = True, "in-ram"
            self._drop_copy(result.key, record)
            written, nbytes = self._stats.written + 1, self._stats.written_bytes + result.nbytes
            self._stats = replace(self._stats, written=written, written_bytes=nbytes)
            self.on_copied("write", result.nbytes, result.seconds)
        else:
            assert self._from_sections is not None
            self.copies[result.key] = self._from_sections(result.sections)
            record.state, record.origin = "in-ram", "disk"
            read, nbytes = self._stats.read + 1, self._stats.read_bytes + result.nbytes
            self._stats = replace(self._stats, read=read, read_bytes=nbytes)
            self.on_copied("read", result.nbytes, result.seconds)

    def _on_failure(self, result: SwapResult, record: _SwapRecord) -> None:
        assert result.failure is not None and self.files is not None
        self._stats = replace(self._stats, failed=self._stats.failed + 1, fault=result.failure)
        LOG.warning("swapped sequence: %s", result.failure)
        if result.operation == "read":
            record.state = self._mark_lost(record, result.failure)
            return
        self._fs_refused_at = self._clock()
        self.files.remove(result.key)
        record.state = "in-ram"
        if not record.required and result.key not in self._swapping_in:
            del self.copies[result.key]
            record.state = self._mark_lost(record, result.failure)

    def _mark_lost(self, record: _SwapRecord, failure: str) -> SwapState:
        record.fault = failure
        return "lost"

    def _balance(self) -> None:
        """Write copies beyond the limit; the sequence that is needed last first."""
        ram_bytes = self._ram_bytes()
        self._update_peak()
        if self.ram is None or ram_bytes <= self.ram or self.files is None:
            return
        assert self._to_sections is not None
        candidates = [
            (record.order, key)
            for key, record in self._records.items()
            if record.state == "in-ram" and key not in self._swapping_in
        ]
        for _, key in sorted(candidates, reverse=True):
            record, build_sections = self._records[key], partial(self._to_sections, key, self.copies[key])
            if ram_bytes <= self.ram:
                return
            if record.is_written:
                ram_bytes -= record.nbytes if self._drop_copy(key, record) else 0
            elif self._can_write():
                record.state = "writing"
                self.files.write(key, build_sections)
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
        """Return the statistics of the swap space."""
        ram = self._resident_bytes()
        fs = sum(record.nbytes for record in self._records.values() if record.is_written)
        return replace(self._stats, ram_bytes=ram, disk_bytes=fs)

    def _resident_bytes(self) -> int:
        states = ("in-ram", "writing", "reading")
        return sum(record.nbytes for record in self._records.values() if record.state in states)

    def _update_peak(self) -> None:
        self._stats = replace(self._stats, ram_peak=max(self._stats.ram_peak, self._resident_bytes()))

    def close(self) -> None:
        """Stop the file thread and drop every sequence."""
        if self.files is not None:
            self.files.close()
        self._records.clear()

    def check(self) -> None:
        """Assert that the copies match the states."""
        for key, record in self._records.items():
            if record.state in ("in-ram", "writing"):
                assert key in self.copies, f"swapped sequence {key} is {record.state} without a copy"
            elif record.state in ("on-disk", "reading"):
                assert key not in self.copies and record.is_written, f"swapped sequence {key} is {record.state}"
