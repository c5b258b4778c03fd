"""File systems that fail: the k-th operation, or everything not flushed at a power cut."""

import errno
import os
import random
from pathlib import Path

from kvad.storage.filesystem import FileSystem

OPERATIONS = (
    *("create", "open", "write", "write_at", "read", "size", "sync", "close", "replace", "sync_dir", "remove"),
    *("free_bytes", "make_dir", "list_files", "touch", "lock"),
)


class WatchedFileSystem(FileSystem):
    """Calls ``before`` ahead of every operation."""

    def before(self, name, *args):
        raise NotImplementedError


def _watch(name):
    def operation(self, *args):
        self.before(name, *args)
        return getattr(FileSystem, name)(self, *args)

    operation.__name__ = name
    return operation


for _name in OPERATIONS:
    setattr(WatchedFileSystem, _name, _watch(_name))


class FailingDisk(WatchedFileSystem):
    """The k-th operation of the kinds ``which`` raises ``code``; a failing write has written half.

    Args:
        k: Number of the operation, from 0; None counts operations in ``count`` without a failure.
        on: All later operations fail too.
    """

    def __init__(self, k=None, which=OPERATIONS, code=errno.EIO, on=False):
        self.k, self.which, self.code, self.on = k, which, code, on
        self.count, self.failed = 0, 0

    def before(self, name, *args):
        if name not in self.which:
            return
        number, self.count = self.count, self.count + 1
        if self.k is None or (number < self.k if self.on else number != self.k):
            return
        self.failed += 1
        if name == "write":
            file, data = args
            half = memoryview(data).cast("B")[: len(memoryview(data).cast("B")) // 2] if len(data) else b""
            os.write(file, half)
        if name == "write_at":
            file, data, offset = args
            os.pwrite(file, memoryview(data).cast("B")[: memoryview(data).nbytes // 2], offset)
        if name == "close":
            os.close(args[0])  # the descriptor is closed even if close fails
        raise OSError(self.code, os.strerror(self.code))


class PowerCutDisk(WatchedFileSystem):
    """Tracks what was flushed.

    ``power_cut`` leaves a state that a real file system may leave: any part of a file written since its last
    flush, with some bytes changed; any subset of the renames and removals since the folder was last flushed.
    """

    def __init__(self, seed=0):
        self._random = random.Random(seed)
        self._paths, self._dirty = {}, set()
        self._names = []  # renames and removals that were not flushed

    def before(self, name, *args):
        getattr(self, f"_{name}", lambda *args: None)(*args)

    def create(self, path):
        file = FileSystem.create(self, path)
        self._paths[file] = path
        self._dirty.add(path)
        return file

    def open(self, path):
        file = FileSystem.open(self, path)
        self._paths[file] = path
        return file

    def _write(self, file, data):
        self._dirty.add(self._paths[file])

    def _write_at(self, file, data, offset):
        self._write(file, data)

    def _sync(self, file):
        self._dirty.discard(self._paths.get(file))

    def _replace(self, source, target):
        old = target.read_bytes() if target.exists() else None
        self._names.append((source, target, old, target in self._dirty))
        if source in self._dirty:
            self._dirty.discard(source)
            self._dirty.add(target)
        else:
            self._dirty.discard(target)

    def _remove(self, path):
        self._dirty.discard(path)
        self._names.append((None, path, path.read_bytes() if path.exists() else None, False))

    def _sync_dir(self, folder):
        self._names = [each for each in self._names if each[1].parent != Path(folder)]

    def power_cut(self):
        for path in list(self._dirty):
            if path.exists() and self._random.random() < 0.8:
                raw = bytearray(path.read_bytes())
                raw = raw[: self._random.randrange(len(raw) + 1)]
                for _ in range(self._random.randrange(3)):
                    if raw:
                        raw[self._random.randrange(len(raw))] = self._random.randrange(256)
                path.write_bytes(raw)
        for source, target, old, _ in reversed(self._names):
            if self._random.random() < 0.5:
                continue
            if source is not None and target.exists():
                target.rename(source)
            if old is not None:
                target.write_bytes(old)
        self._names, self._dirty = [], set()
