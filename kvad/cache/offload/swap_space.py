"""Where the rows are that gave way: on their way out, in host memory up to a bound, on disk beyond it, or lost.

    coming     its copy is made with the next step's moves
    here       in host memory
    leaving    here, and being written
    away       on disk
    returning  being read
    lost       its copy was not made, or its file is not what was written: ``fault`` says which

Promises: what is in memory is dropped only when its file is whole; a row that is here or leaving can be woken at once;
one that is away or returning is never waited for but by :meth:`Parking.wait`; what was dropped or taken is touched by
nothing that comes late.  Rows that can be computed again (not ``needed``) pass the bound one at a time, on their way to
the disk; those that cannot are kept in memory beyond it where the disk refuses them.

Owned by the engine's thread.  Integers and opaque copies; no torch.

Parked rows on disk: one file each (``entry.py``), written and read by one thread (``worker.py``), for this
process alone.

The caller hands over work and asks later what has become of it: :meth:`ParkFiles.done` never waits, :meth:`wait` does,
for whoever has nothing else to do.  All work of one key is done in the order in which it was asked for; what was given
up meanwhile (:meth:`remove`) is skipped, and its file removed behind it.  Whatever goes wrong comes back as a
:class:`Done` with a ``fault``: the worker itself never dies of it.

Files have names of ``aside.py``: hidden, with this process's id, so that those of a process that died are known as its
leftovers and removed at the next start.  Nothing is flushed: no process reads them after this one.

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

FILE_PREFIX = "kvad-row-"
CONTAINER_KIND = "parked"
RESERVED_BYTES = 64 << 20  # bytes of the disk that are left free


class SwapResult(NamedTuple):
    """What has become of a row's writing or reading.  ``sections``: what was read."""

    operation: Literal["write", "read"]
    key: int
    nbytes: int = 0
    seconds: float = 0.0
    failure: str | None = None
    sections: Sequence[Section] = ()


class SwapFiles:
    """Rows of one engine in ``folder``, made where there is none.  ConfigError where nothing can be written there."""

    def __init__(
        self,
        folder: Path,
        *,
        disk: FileSystem = REAL_FILE_SYSTEM,
        clock: Callable[[], float] = perf_counter,
        worker: IoThread | None = None,
    ) -> None:
        self.folder, self.disk = folder, disk
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise ConfigError(f"park_dir: {folder}: {error.strerror}", "name a folder that can be written to") from None
        self.swept = storage.filesystem.remove_temp_files(folder, lambda name: FILE_PREFIX in name, disk)
        self._hand = _FileWorker(disk, clock)
        self._worker = IoThread("kvad-parking") if worker is None else worker
        self._paths: dict[int, Path] = {}
        self.pending = 0  # writes and reads of which nothing was heard yet
        weakref.finalize(self, _cleanup, self._worker, self._hand, self._paths)

    def write(self, key: int, sections: Callable[[], Sequence[Section]]) -> None:
        """``sections`` is called by the worker; what it returns must not change until this is done."""
        path = self._paths[key] = storage.temp_paths.temp_path(self.folder / f"{FILE_PREFIX}{key}", "tmp")
        self.pending += 1
        self._worker.restore(partial(self._hand.write, key, path, sections))

    def read(self, key: int) -> None:
        """What was written under ``key``."""
        self.pending += 1
        self._worker.restore(partial(self._hand.read, key, self._paths[key]))

    def remove(self, key: int) -> None:
        """Give up whatever is under way for ``key``, and its file; nothing happens where it has none."""
        path = self._paths.pop(key, None)
        if path is not None:
            _discard(self._worker, self._hand, key, path)

    def pop_finished(self) -> list[SwapResult]:
        """What was done since the last call; keys that were given up are among them."""
        found: list[SwapResult] = []
        while self.pending:
            try:
                found.append(self._hand.done.get_nowait())
            except Empty:
                break
            self.pending -= 1
        return found

    def wait(self) -> list[SwapResult]:
        """The same, of one that is under way at least."""
        if not self.pending:
            return []
        first = self._hand.done.get()
        self.pending -= 1
        return [first, *self.pop_finished()]

    def has_room(self, nbytes: int) -> bool:
        try:
            return self.disk.free_bytes(self.folder) >= nbytes + RESERVED_BYTES
        except OSError:
            return False

    def close(self) -> None:
        """Stop the worker and remove all files, for good.  What is under way ends first, what was asked for besides is
        not done."""
        for key in list(self._paths):
            self.remove(key)
        self._worker.stop()
        self.pop_finished()
        self.pending = 0


def _discard(worker: IoThread, hand: _FileWorker, key: int, path: Path) -> None:
    hand.given_up.add(key)
    worker.restore(partial(hand.remove, key, path))


def _cleanup(worker: IoThread, hand: _FileWorker, paths: dict[int, Path]) -> None:
    """Nobody can ask for these any more."""
    for key, path in paths.items():
        _discard(worker, hand, key, path)
    worker.finish()


class _FileWorker:
    """The thread's own half: it knows files, and nothing of who asked."""

    def __init__(self, disk: FileSystem, clock: Callable[[], float]) -> None:
        self._disk, self._clock, self._name = disk, clock, os.urandom(8).hex()
        self.done: SimpleQueue[SwapResult] = SimpleQueue()
        self.given_up: set[int] = set()  # keys whose files are yet to be removed

    def write(self, key: int, path: Path, sections: Callable[[], Sequence[Section]]) -> None:
        def work() -> tuple[int, Sequence[Section]]:
            made = sections()
            return storage.container.write_container(
                path, CONTAINER_KIND, {}, self._facts(key), made, durable=False, disk=self._disk
            ), ()

        self._try(SwapResult("write", key), work, f"{path}: it could not be written")

    def read(self, key: int, path: Path) -> None:
        def work() -> tuple[int, Sequence[Section]]:
            sections = self._sections(key, path)
            return sum(memoryview(each.data).nbytes for each in sections), sections

        self._try(SwapResult("read", key), work, f"{path}: it could not be read")

    def remove(self, key: int, path: Path) -> None:
        with suppress(OSError):
            self._disk.remove(path)
        self.given_up.discard(key)

    def _try(self, done: SwapResult, work: Callable[[], tuple[int, Sequence[Section]]], failed: str) -> None:
        if done.key in self.given_up:
            self.done.put(done._replace(failure="given up"))
            return
        began, fault = self._clock(), ""
        try:
            nbytes, sections = work()
            done = done._replace(nbytes=nbytes, sections=sections)
        except OSError as error:
            fault = f"{failed}: {error.strerror or error}"
        except KvadError as error:
            fault = error.message
        except BaseException as error:  # whoever waits must hear of it
            fault = f"{failed}: {type(error).__name__}: {error}"
        self.done.put(done._replace(seconds=self._clock() - began, failure=fault or None))

    def _sections(self, key: int, path: Path) -> list[Section]:
        with storage.container.open_container(path, self._disk) as entry:
            if entry.header.kind != CONTAINER_KIND or entry.header.metadata != self._facts(key):
                raise StorageError(f"{path}: it holds another row", reason="other")
            stored = entry.header.sections.values()
            return [Section(each.name, each.dtype, each.shape, entry.read(each.name)) for each in stored]

    def _facts(self, key: int) -> dict[str, str]:
        return {"row": f"{self._name}.{key}"}


SwapLocation = Literal["ram", "disk"]
SwapState = Literal["coming", "here", "leaving", "away", "returning", "lost"]
Order = tuple[int, int]
RETRY = 30.0  # seconds that nothing is written after the disk has refused
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SwapSpaceStats:
    """Bytes in host memory and on disk now, and the most in memory at once; rows and bytes written and read so far;
    writes and reads that failed, and what the last one said."""

    ram_bytes: int = 0
    disk_bytes: int = 0
    ram_peak: int = 0
    written: int = 0
    written_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    failed: int = 0
    fault: str = ""


class _SwapRecord:
    __slots__ = ("fault", "nbytes", "needed", "order", "origin", "state", "whole")

    def __init__(self, nbytes: int, order: Order, needed: bool) -> None:
        self.nbytes, self.order, self.needed = nbytes, order, needed
        self.state: SwapState = "coming"
        self.whole = False  # its file is
        self.origin: SwapLocation = "ram"  # whence its copy comes
        self.fault = ""


class SwapSpace:
    """``store``: host copies by key, as the device fills and empties it; ``ram``: bytes of them, None: no bound.

    ``pack`` tells a copy as sections (in the worker's thread), ``unpack`` makes one of them; ``told`` hears bytes and
    seconds of each write and read.
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
        assert files is None or (to_sections is not None and from_sections is not None), "a disk takes sections"
        self.copies, self.ram, self.files = copies, ram, files
        self._to_sections, self._from_sections, self.on_copied, self._clock = (
            to_sections,
            from_sections,
            on_copied,
            clock,
        )
        self._rows: dict[int, _SwapRecord] = {}
        self._wanted = -1  # whom :meth:`fetch` has asked for last
        self._waking: Collection[int] = ()
        self._refused = float("-inf")  # when the disk did
        self._stats = SwapSpaceStats()
        self._changed = False  # since the last poll

    def __len__(self) -> int:
        """Rows that are parked."""
        return len(self._rows)

    # ------------------------------------------------------------ room

    @property
    def bounded(self) -> bool:
        """Whether there may be no room."""
        return self.ram is not None

    def location_for(self, nbytes: int, *, needed: bool = False) -> SwapLocation | None:
        """Where a row of ``nbytes`` would go now; None: there is no room."""
        if self.ram is None or self._here() + nbytes <= self.ram:
            return "ram"
        if not self._writes() or (not needed and self._on_its_way()):
            return None
        assert self.files is not None
        waiting = max(0, self._here() - self.ram) + self._leaving()
        return "disk" if self.files.has_room(waiting + nbytes) else None

    def has_room(self, nbytes: int) -> bool:
        """Would rows of so many bytes in all have room beside those that are parked?"""
        if self.ram is None:
            return True
        left = max(0, self.ram - self._here())
        if nbytes <= left:
            return True
        return self.files is not None and self._writes() and self.files.has_room(nbytes - left + self._leaving())

    def _here(self) -> int:
        """Bytes that stay in memory, or will."""
        return sum(
            row.nbytes
            for key, row in self._rows.items()
            if row.state == "coming" or (row.state == "here" and not (row.whole and key == self._wanted))
        )

    def _leaving(self) -> int:
        return sum(row.nbytes for row in self._rows.values() if row.state == "leaving")

    def _on_its_way(self) -> bool:
        return self._here() > (self.ram or 0) or self._leaving() > 0

    def _writes(self) -> bool:
        return self.files is not None and self._clock() >= self._refused + RETRY

    # ------------------------------------------------------------ rows

    def store(self, key: int, nbytes: int, order: Order, *, needed: bool) -> None:
        """A row gives way: its copy is made with the next moves.  ``order``: the greatest is wanted last.  One that
        was taken back before it woke is here already."""
        if key not in self._rows:
            self._rows[key] = _SwapRecord(nbytes, order, needed)

    def state(self, key: int) -> SwapState:
        """Of a row that somebody else has put into the store: here."""
        return self._rows[key].state if key in self._rows else "here"

    def failure(self, key: int) -> str:
        """Why a row is lost."""
        return self._rows[key].fault

    def nbytes(self, key: int) -> int:
        """0 for a row of somebody else's."""
        return self._rows[key].nbytes if key in self._rows else 0

    def read_from(self, key: int) -> SwapLocation | None:
        """Whence the copy of a row comes that is here: was it read?  None: it is somebody else's."""
        return self._rows[key].origin if key in self._rows else None

    def prefetch(self, key: int) -> None:
        """Have a row in memory soon: it is the next one that is wanted."""
        self._wanted = key
        row = self._rows[key]
        if row.state == "away":
            assert self.files is not None
            row.state = "returning"
            self.files.read(key)

    def pop(self, key: int) -> None:
        """The moves that wake a row are told: it is the device's again."""
        self._leave(key)

    def drop(self, key: int) -> None:
        """Nobody wants the row any more, one that somebody else has put into the store included."""
        row = self._leave(key)
        if row is None or row.state != "coming":  # else its copy is yet to be made: the moves drop it
            self.copies.pop(key, None)

    def _leave(self, key: int) -> _SwapRecord | None:
        row = self._rows.pop(key, None)
        self._changed = True  # there is more room
        if row is not None and self.files is not None:
            self.files.remove(key)
        return row

    # ------------------------------------------------------------ time passes

    def poll(self, untold: Collection[int] = (), waking: Collection[int] = ()) -> bool:
        """See what has been done, and have written what is beyond the bound.  ``untold``: keys of rows that have yet to
        be copied out; ``waking``: in, so that they stay.  True: something has changed for those who wait."""
        self._waking = waking
        if self.files is not None and self.files.pending:
            for done in self.files.pop_finished():
                self._settle(done)
        for key, row in self._rows.items():
            if row.state == "coming" and key not in untold:
                row.state = "here" if key in self.copies else self._lost(row, "its copy was not made: the step failed")
                self._changed = True
        if self._rows:
            self._balance()
        changed, self._changed = self._changed, False
        return changed

    @property
    def pending(self) -> bool:
        """Whether a read or a write is under way."""
        return self.files is not None and self.files.pending > 0

    def wait(self, waking: Collection[int] = ()) -> None:
        """Until one that is under way is done."""
        assert self.files is not None
        self._waking = waking
        for done in self.files.wait():
            self._settle(done)

    def _settle(self, done: SwapResult) -> None:
        row = self._rows.get(done.key)
        if row is None:
            return  # given up meanwhile
        self._changed = True
        if done.failure is not None:
            self._failed(done, row)
        elif done.operation == "write":
            row.whole, row.state = True, "here"
            self._let_go(done.key, row)
            written, nbytes = self._stats.written + 1, self._stats.written_bytes + done.nbytes
            self._stats = replace(self._stats, written=written, written_bytes=nbytes)
            self.on_copied("write", done.nbytes, done.seconds)
        else:
            assert self._from_sections is not None
            self.copies[done.key] = self._from_sections(done.sections)
            row.state, row.origin = "here", "disk"
            read, nbytes = self._stats.read + 1, self._stats.read_bytes + done.nbytes
            self._stats = replace(self._stats, read=read, read_bytes=nbytes)
            self.on_copied("read", done.nbytes, done.seconds)

    def _failed(self, done: SwapResult, row: _SwapRecord) -> None:
        assert done.failure is not None and self.files is not None
        self._stats = replace(self._stats, failed=self._stats.failed + 1, fault=done.failure)
        LOG.warning("a parked row: %s", done.failure)
        if done.operation == "read":
            row.state = self._lost(row, done.failure)
            return
        self._refused = self._clock()
        self.files.remove(done.key)
        row.state = "here"
        if not row.needed and done.key not in self._waking:
            del self.copies[done.key]
            row.state = self._lost(row, done.failure)

    def _lost(self, row: _SwapRecord, fault: str) -> SwapState:
        row.fault = fault
        return "lost"

    def _balance(self) -> None:
        """What is beyond the bound leaves, whoever is wanted last first."""
        here = self._here()
        self._peak()
        if self.ram is None or here <= self.ram or self.files is None:
            return
        assert self._to_sections is not None
        staying = [
            (row.order, key) for key, row in self._rows.items() if row.state == "here" and key not in self._waking
        ]
        for _, key in sorted(staying, reverse=True):
            row, made = self._rows[key], partial(self._to_sections, key, self.copies[key])
            if here <= self.ram:
                return
            if row.whole:
                here -= row.nbytes if self._let_go(key, row) else 0
            elif self._writes():
                row.state = "leaving"
                self.files.write(key, made)
                here -= row.nbytes

    def _let_go(self, key: int, row: _SwapRecord) -> bool:
        """Drop the copy of a row that is here and on disk, unless it is about to be read."""
        if key == self._wanted or key in self._waking:
            return False
        row.state = "away"
        del self.copies[key]
        return True

    # ------------------------------------------------------------ told

    def stats(self) -> SwapSpaceStats:
        ram = self._in_memory()
        disk = sum(row.nbytes for row in self._rows.values() if row.whole)
        return replace(self._stats, ram_bytes=ram, disk_bytes=disk)

    def _in_memory(self) -> int:
        states = ("here", "leaving", "returning")
        return sum(row.nbytes for row in self._rows.values() if row.state in states)

    def _peak(self) -> None:
        self._stats = replace(self._stats, ram_peak=max(self._stats.ram_peak, self._in_memory()))

    def close(self) -> None:
        """Stop the worker and forget every row."""
        if self.files is not None:
            self.files.close()
        self._rows.clear()

    def check(self) -> None:
        """Assert that the store has what the states say."""
        for key, row in self._rows.items():
            if row.state in ("here", "leaving"):
                assert key in self.copies, f"parked row {key} is {row.state}, and its copy is not there"
            elif row.state in ("away", "returning"):
                assert key not in self.copies and row.whole, f"parked row {key} is {row.state}"
