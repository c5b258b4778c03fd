"""Swap files without a device: copies are bytes, and the worker runs only when a test requests it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from kvad.cache.offload.swap_space import SwapFiles, SwapResult
from kvad.storage.container import Section
from kvad.storage.filesystem import REAL_FILE_SYSTEM, FileSystem
from kvad.storage.io_thread import IoThread, T, run_job


def as_section(copy: bytes) -> list[Section]:
    return [Section("0", "uint8", (len(copy),), copy)]


def as_bytes(sections: Sequence[Section]) -> bytes:
    (section,) = sections
    return bytes(section.data)


class LateWorker(IoThread):
    """Worker without a thread: the test runs the jobs."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.waiting.append((future, job))
        return future

    def work(self, count: int) -> None:
        for _ in range(min(count, len(self._jobs.waiting))):
            run_job(*self._jobs.waiting.popleft())

    def stop(self, seconds: float | None = None) -> bool:
        self.work(1 << 30)
        return True


class LateFiles(SwapFiles):
    """Runs ``jobs()`` jobs at each poll, and in ``wait`` as many as needed."""

    def __init__(self, folder: Path, jobs: Callable[[], int], disk: FileSystem = REAL_FILE_SYSTEM) -> None:
        self.jobs, self.work = jobs, (late := LateWorker("late")).work
        super().__init__(folder, fs=disk, worker=late)

    def pop_finished(self) -> list[SwapResult]:
        self.work(self.jobs())
        return super().pop_finished()

    def wait(self) -> list[SwapResult]:
        while not any(job.done() for _, job in self._jobs):
            self.work(1)
        return super().wait()


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
