"""Swap files without a device: copies are bytes, and the worker runs only when a test requests it."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

from kvad.cache.offload.swap_space import SwapFiles, SwapSpace
from kvad.storage.container import Section
from kvad.storage.filesystem import REAL_FILE_SYSTEM, FileSystem
from kvad.storage.io_thread import IoThread, T, run_job


def as_section(copy: bytes) -> list[Section]:
    return [Section("0", "uint8", (len(copy),), copy)]


def as_bytes(sections: Sequence[Section]) -> bytes:
    (section,) = sections
    return bytes(section.data)


class LateFuture(Future[T]):
    """Calls ``before_done`` whenever its state is read."""

    def __init__(self, before_done: Callable[[], None]) -> None:
        super().__init__()
        self._before_done = before_done

    def done(self) -> bool:
        self._before_done()
        return super().done()


class LateWorker(IoThread):
    """Worker without a thread: the test runs the jobs, and ``jobs()`` of them whenever a result is requested."""

    def __init__(self, jobs: Callable[[], int]) -> None:
        super().__init__("late")
        self.jobs = jobs

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future = LateFuture[T](lambda: self.work(self.jobs()))
        self._jobs.waiting.append((future, job))
        return future

    def work(self, count: int) -> None:
        for _ in range(min(count, len(self._jobs.waiting))):
            run_job(*self._jobs.waiting.popleft())

    def stop(self, seconds: float | None = None) -> bool:
        self.work(1 << 30)
        return True


class LateFiles(SwapFiles):
    """Files of a ``LateWorker``."""

    def __init__(self, folder: Path, jobs: Callable[[], int], disk: FileSystem = REAL_FILE_SYSTEM) -> None:
        self.late = LateWorker(jobs)
        self.work = self.late.work
        super().__init__(folder, fs=disk, worker=self.late)


class LateSwapSpace(SwapSpace):
    """Runs jobs of its LateFiles in ``wait`` until one has a result."""

    def wait(self, swapping_in: Collection[int] = ()) -> None:
        assert isinstance(self.files, LateFiles)
        while not any(record.job is not None and record.job.done() for record in self._records.values()):
            self.files.work(1)
        super().wait(swapping_in)


class UnluckyDisk(FileSystem):
    """Fails some reads and writes, and changes some files, at random."""

    def __init__(self, rng: random.Random, fail: float = 0.0, spoil: float = 0.0) -> None:
        self.rng, self.fail, self.spoil = rng, fail, spoil
        self.failed = self.spoiled = 0

    @property
    def bad(self) -> bool:
        return self.failed + self.spoiled > 0

    def _maybe(self) -> None:
        if self.rng.random() < self.fail:
            self.failed += 1
            raise OSError(5, "Input/output error")

    def create(self, path: Path) -> int:
        self._maybe()
        return super().create(path)

    def open(self, path: Path) -> int:
        self._maybe()
        return super().open(path)

    def replace(self, source: Path, target: Path) -> None:
        self._maybe()
        super().replace(source, target)
        if self.rng.random() < self.spoil:
            self.spoiled += 1
            spoil(target, self.rng)


def spoil(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    else:
        del raw[rng.randrange(len(raw)) :]
    path.write_bytes(raw)
