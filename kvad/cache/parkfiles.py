"""Parked rows on disk: one file each (``entry.py``), written and read by one worker thread, for this process alone.

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
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Literal, NamedTuple

from kvad.aside import aside, leftovers
from kvad.cache.disk import DISK, Disk
from kvad.cache.entry import Section, open_entry, write_entry
from kvad.errors import ConfigError, EntryError, KvadError

__all__ = ["Done", "ParkFiles"]

NAME = "kvad-row-"
KIND = "parked"
SPARE = 64 << 20  # bytes of the disk that are left free


class Done(NamedTuple):
    """What has become of a row's writing or reading.  ``sections``: what was read."""

    what: Literal["write", "read"]
    key: int
    nbytes: int
    seconds: float
    fault: str | None
    sections: Sequence[Section] = ()


class _Job(NamedTuple):
    what: Literal["write", "read", "remove", "stop"]
    key: int = -1
    path: Path = Path()
    sections: Callable[[], Sequence[Section]] = tuple


class ParkFiles:
    """Rows of one engine in ``folder``, made where there is none.  ConfigError where nothing can be written there."""

    def __init__(self, folder: Path, *, disk: Disk = DISK, clock: Callable[[], float] = perf_counter) -> None:
        self.folder, self.disk, self._clock = folder, disk, clock
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise ConfigError(f"park_dir: {folder}: {error.strerror}", "name a folder that can be written to") from None
        self.swept = self._sweep()
        self._name = os.urandom(8).hex()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._paths: dict[int, Path] = {}
        self._given_up: set[int] = set()  # read by the worker
        self._thread: threading.Thread | None = None
        self.pending = 0  # writes and reads of which nothing was heard yet

    def write(self, key: int, sections: Callable[[], Sequence[Section]]) -> None:
        """``sections`` is called by the worker; what it returns must not change until this is done."""
        path = self._paths[key] = aside(self.folder / f"{NAME}{key}", "tmp")
        self._ask(_Job("write", key, path, sections))

    def read(self, key: int) -> None:
        """What was written under ``key``."""
        self._ask(_Job("read", key, self._paths[key]))

    def remove(self, key: int) -> None:
        """Give up whatever is under way for ``key``, and its file; nothing happens where it has none."""
        path = self._paths.pop(key, None)
        if path is not None:
            self._given_up.add(key)
            self._jobs.put(_Job("remove", key, path))

    def done(self) -> list[Done]:
        """What was done since the last call; keys that were given up are among them."""
        found: list[Done] = []
        while self.pending:
            try:
                found.append(self._done.get_nowait())
            except Empty:
                break
            self.pending -= 1
        return found

    def wait(self) -> list[Done]:
        """The same, of one that is under way at least."""
        if not self.pending:
            return []
        first = self._done.get()
        self.pending -= 1
        return [first, *self.done()]

    def has_room(self, nbytes: int) -> bool:
        try:
            return self.disk.free(self.folder) >= nbytes + SPARE
        except OSError:
            return False

    def close(self) -> None:
        """Stop the worker and remove all files.  What is under way ends first, what was asked for besides is not
        done."""
        for key in list(self._paths):
            self.remove(key)
        if self._thread is not None:
            self._jobs.put(_Job("stop"))
            self._thread.join()
            self._thread = None
        self.done()
        self.pending = 0

    # ------------------------------------------------------------ inside

    def _ask(self, job: _Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._worker().run, name="kvad-parking", daemon=True)
            self._thread.start()
            weakref.finalize(self, _forgotten, self._jobs, self._paths, self._given_up)
        self.pending += 1
        self._jobs.put(job)

    def _worker(self) -> _Worker:
        return _Worker(self.disk, self._clock, self._name, self._jobs, self._done, self._given_up)

    def _sweep(self) -> int:
        """Remove what processes that died have left; returns how many files."""
        count = 0
        for each in leftovers(self.folder):
            with suppress(OSError):
                if NAME in each.name and each.kind == "tmp" and not each.in_use:
                    self.disk.remove(each.path)
                    count += 1
        return count


def _forgotten(jobs: SimpleQueue[_Job], paths: dict[int, Path], given_up: set[int]) -> None:
    """Nobody can ask for these any more."""
    for key, path in paths.items():
        given_up.add(key)
        jobs.put(_Job("remove", key, path))
    jobs.put(_Job("stop"))


class _Worker:
    """The thread's own half: it knows queues and files, and nothing of who asked."""

    def __init__(
        self,
        disk: Disk,
        clock: Callable[[], float],
        name: str,
        jobs: SimpleQueue[_Job],
        done: SimpleQueue[Done],
        given_up: set[int],
    ) -> None:
        self._disk, self._clock, self._name = disk, clock, name
        self._jobs, self._done, self._given_up = jobs, done, given_up

    def run(self) -> None:
        while self.step():
            pass

    def step(self) -> bool:
        """Do one job; False: there are to be no more."""
        job = self._jobs.get()
        if job.what == "remove":
            with suppress(OSError):
                self._disk.remove(job.path)
            self._given_up.discard(job.key)
        elif job.what != "stop":
            self._done.put(self._tried(job))
        return job.what != "stop"

    def _tried(self, job: _Job) -> Done:
        assert job.what == "write" or job.what == "read"
        began = self._clock()
        nbytes, fault, sections = 0, None, list[Section]()
        if job.key in self._given_up:
            return Done(job.what, job.key, 0, 0.0, "given up")
        try:
            if job.what == "write":
                made = job.sections()
                nbytes = write_entry(job.path, KIND, {}, self._facts(job), made, durable=False, disk=self._disk)
            else:
                sections = self._read(job)
                nbytes = sum(memoryview(each.data).nbytes for each in sections)
        except OSError as error:
            fault = f"{self._where(job)}: {error.strerror or error}"
        except KvadError as error:
            fault = error.message
        except BaseException as error:  # whoever waits must hear of it
            fault = f"{self._where(job)}: {type(error).__name__}: {error}"
        return Done(job.what, job.key, nbytes, self._clock() - began, fault, sections)

    def _read(self, job: _Job) -> list[Section]:
        with open_entry(job.path, self._disk) as entry:
            if entry.header.kind != KIND or entry.header.facts != self._facts(job):
                raise EntryError(f"{job.path}: it holds another row", why="other")
            stored = entry.header.sections.values()
            return [Section(each.name, each.dtype, each.shape, entry.read(each.name)) for each in stored]

    def _facts(self, job: _Job) -> dict[str, str]:
        return {"row": f"{self._name}.{job.key}"}

    def _where(self, job: _Job) -> str:
        return f"{job.path}: it could not be {'written' if job.what == 'write' else 'read'}"
