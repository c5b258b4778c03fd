"""Parked rows on disk: one file each (``entry.py``), written and read by one thread (``worker.py``), for this
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

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Literal, NamedTuple

from kvad.aside import temp_path
from kvad.cache.disk import REAL_FILE_SYSTEM, FileSystem, remove_temp_files
from kvad.cache.entry import Section, open_container, write_container
from kvad.cache.worker import IoThread
from kvad.errors import ConfigError, KvadError, StorageError

__all__ = ["SwapResult", "SwapFiles"]

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
        self.swept = remove_temp_files(folder, lambda name: FILE_PREFIX in name, disk)
        self._hand = _FileWorker(disk, clock)
        self._worker = IoThread("kvad-parking") if worker is None else worker
        self._paths: dict[int, Path] = {}
        self.pending = 0  # writes and reads of which nothing was heard yet
        weakref.finalize(self, _cleanup, self._worker, self._hand, self._paths)

    def write(self, key: int, sections: Callable[[], Sequence[Section]]) -> None:
        """``sections`` is called by the worker; what it returns must not change until this is done."""
        path = self._paths[key] = temp_path(self.folder / f"{FILE_PREFIX}{key}", "tmp")
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
            return write_container(path, CONTAINER_KIND, {}, self._facts(key), made, durable=False, disk=self._disk), ()

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
        with open_container(path, self._disk) as entry:
            if entry.header.kind != CONTAINER_KIND or entry.header.metadata != self._facts(key):
                raise StorageError(f"{path}: it holds another row", reason="other")
            stored = entry.header.sections.values()
            return [Section(each.name, each.dtype, each.shape, entry.read(each.name)) for each in stored]

    def _facts(self, key: int) -> dict[str, str]:
        return {"row": f"{self._name}.{key}"}
