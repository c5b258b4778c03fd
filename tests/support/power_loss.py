"""Simulated power cuts: the states that a disk may have after losing what was not flushed.

    with PowerCuts(root, check, scratch): ...     after every operation check(scratch) is called with a possible state

Model: a file has the bytes of its last flush, and later bytes fully, partly or not at all; a folder has the names of
its last flush or of any moment since. A rename is therefore seen whole or not at all, and folders are independent.
The operations are those of ``checkpoint/atomic.py`` and ``kept.py``.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

Names = dict[str, tuple[str, Any]]  # name -> ("link", target) or ("folder" or "file", inode)


class PowerCuts:
    """Calls a check with every possible disk state of an existing ``root``.

    Args:
        mute: Selects flushes to skip, to show that the check then fails.
    """

    def __init__(
        self,
        root: Path,
        check: Callable[[Path], None],
        scratch: Path,
        skip_flush: Callable[[Path], bool] = lambda path: False,
    ) -> None:
        self.root, self.check, self.scratch, self.skip_flush = root, check, scratch, skip_flush
        self.num_checks = 0
        self._names: dict[int, list[Names]] = {}  # per folder: at its last flush, and all states since
        self._bytes: dict[int, bytes] = {}  # per file: at its last flush
        self._open_files: dict[int, int] = {}  # keeps inodes from being reused
        self._random = random.Random(0)
        self._real: list[tuple[Any, str, Any]] = []
        self._checking = False

    def __enter__(self) -> PowerCuts:
        self._record()
        self._names[self.root.stat().st_ino] = [self._entries(self.root)]
        for owner, name in (
            (Path, "rename"),
            (Path, "replace"),
            (Path, "mkdir"),
            (Path, "symlink_to"),
            (Path, "unlink"),
        ):
            self._patch(owner, name, self._checked(getattr(owner, name)))
        self._patch(os, "fsync", self._fsync)
        self._patch(shutil, "rmtree", self._rmtree)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for owner, name, real in reversed(self._real):
            setattr(owner, name, real)
        for descriptor in self._open_files.values():
            os.close(descriptor)

    def _patch(self, owner: Any, name: str, result: Any) -> None:
        self._real.append((owner, name, getattr(owner, name)))
        setattr(owner, name, result)

    def _checked(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            self.check_states()
            return result

        return operation

    def _fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if self.skip_flush(path):
            return
        self._record()
        inode = os.fstat(descriptor).st_ino
        if path.is_dir():
            self._names[inode] = [self._entries(path)]
        else:
            self._bytes[inode] = path.read_bytes()
        self.check_states()

    def _rmtree(self, path: Path, ignore_errors: bool = False) -> None:
        for each in sorted(Path(path).rglob("*"), reverse=True) if Path(path).is_dir() else []:
            each.rmdir() if each.is_dir() else os.unlink(each)
            self.check_states()
        if Path(path).is_dir():
            Path(path).rmdir()
            self.check_states()

    # ------------------------------------------------------------ current and possible states

    def _entries(self, folder: Path) -> Names:
        check: Names = {}
        for path in folder.iterdir():
            if path.is_symlink():
                check[path.name] = "link", os.readlink(path)
            else:
                self._keep_open(path)
                check[path.name] = "folder" if path.is_dir() else "file", path.stat().st_ino
        return check

    def _keep_open(self, path: Path) -> None:
        inode = path.stat().st_ino
        if inode not in self._open_files:
            self._open_files[inode] = os.open(path, os.O_RDONLY)

    def _record(self) -> None:
        for folder in (self.root, *(path for path in self.root.rglob("*") if path.is_dir() and not path.is_symlink())):
            history = self._names.setdefault(folder.stat().st_ino, [{}])
            if (now := self._entries(folder)) != history[-1]:
                history.append(now)

    def check_states(self) -> None:
        if self._checking or not self.root.exists():
            return
        self._checking = True
        try:
            self._record()
            for choose in (lambda history: 0, lambda history: len(history) - 1, *[self._any] * 3):
                self._write_state(self.scratch, self.root.stat().st_ino, choose)
                self.check(self.scratch)
                self._remove(self.scratch)
                self.num_checks += 1
        finally:
            self._checking = False

    def _any(self, history: list[Names]) -> int:
        return self._random.randrange(len(history))

    def _write_state(self, folder: Path, inode: int, choose: Callable[[list[Names]], int]) -> None:
        os.mkdir(folder)
        history = self._names.get(inode, [{}])
        for name, (kind, value) in history[choose(history)].items():
            if kind == "link":
                os.symlink(value, folder / name)
            elif kind == "folder":
                self._write_state(folder / name, value, choose)
            else:
                (folder / name).write_bytes(self._possible_bytes(value))

    def _possible_bytes(self, inode: int) -> bytes:
        descriptor = self._open_files[inode]
        current = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        flushed = self._bytes.get(inode, b"")
        return self._random.choice((flushed, flushed, current, flushed + current[len(flushed) : len(current) // 2]))

    def _remove(self, folder: Path) -> None:
        for path in folder.iterdir():
            self._remove(path) if path.is_dir() and not path.is_symlink() else os.unlink(path)
        os.rmdir(folder)
