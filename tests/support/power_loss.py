"""A disk that forgets, at a power cut, what was not flushed: what may be found when the machine comes up again.

    with PowerCuts(root, found, scratch): ...     after every operation found(scratch) is called, with what may be left

The model: a file's bytes are there as of its last flush, later ones perhaps, in part or not; a folder's names are those
of its last flush, or of any moment since (so a rename is seen whole or not at all, and folders do not wait for each
other).  Operations are those of ``checkpoint/atomic.py`` and ``kept.py``.
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
    """``root`` is there already, and stays.  ``mute``: flushes that are not made, to see that the judge objects."""

    def __init__(
        self,
        root: Path,
        found: Callable[[Path], None],
        scratch: Path,
        mute: Callable[[Path], bool] = lambda path: False,
    ) -> None:
        self.root, self.found, self.scratch, self.mute = root, found, scratch, mute
        self.looks = 0
        self._names: dict[int, list[Names]] = {}  # of a folder: as of its last flush, and all since
        self._bytes: dict[int, bytes] = {}  # of a file, as of its last flush
        self._held: dict[int, int] = {}  # so that no inode is used again
        self._random = random.Random(0)
        self._real: list[tuple[Any, str, Any]] = []
        self._busy = False

    def __enter__(self) -> PowerCuts:
        self._record()
        self._names[self.root.stat().st_ino] = [self._listed(self.root)]
        for owner, name in (
            (Path, "rename"),
            (Path, "replace"),
            (Path, "mkdir"),
            (Path, "symlink_to"),
            (Path, "unlink"),
        ):
            self._patch(owner, name, self._then_look(getattr(owner, name)))
        self._patch(os, "fsync", self._fsync)
        self._patch(shutil, "rmtree", self._rmtree)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for owner, name, real in reversed(self._real):
            setattr(owner, name, real)
        for descriptor in self._held.values():
            os.close(descriptor)

    def _patch(self, owner: Any, name: str, made: Any) -> None:
        self._real.append((owner, name, getattr(owner, name)))
        setattr(owner, name, made)

    def _then_look(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            made = real(*arguments, **options)
            self.look()
            return made

        return operation

    def _fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if self.mute(path):
            return
        self._record()
        inode = os.fstat(descriptor).st_ino
        if path.is_dir():
            self._names[inode] = [self._listed(path)]
        else:
            self._bytes[inode] = path.read_bytes()
        self.look()

    def _rmtree(self, path: Path, ignore_errors: bool = False) -> None:
        for each in sorted(Path(path).rglob("*"), reverse=True) if Path(path).is_dir() else []:
            each.rmdir() if each.is_dir() else os.unlink(each)
            self.look()
        if Path(path).is_dir():
            Path(path).rmdir()
            self.look()

    # ------------------------------------------------------------ what is there, and what may be left

    def _listed(self, folder: Path) -> Names:
        found: Names = {}
        for path in folder.iterdir():
            if path.is_symlink():
                found[path.name] = "link", os.readlink(path)
            else:
                self._hold(path)
                found[path.name] = "folder" if path.is_dir() else "file", path.stat().st_ino
        return found

    def _hold(self, path: Path) -> None:
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)

    def _record(self) -> None:
        for folder in (self.root, *(path for path in self.root.rglob("*") if path.is_dir() and not path.is_symlink())):
            history = self._names.setdefault(folder.stat().st_ino, [{}])
            if (now := self._listed(folder)) != history[-1]:
                history.append(now)

    def look(self) -> None:
        if self._busy or not self.root.exists():
            return
        self._busy = True
        try:
            self._record()
            for choose in (lambda history: 0, lambda history: len(history) - 1, *[self._any] * 3):
                self._leave(self.scratch, self.root.stat().st_ino, choose)
                self.found(self.scratch)
                self._remove(self.scratch)
                self.looks += 1
        finally:
            self._busy = False

    def _any(self, history: list[Names]) -> int:
        return self._random.randrange(len(history))

    def _leave(self, folder: Path, inode: int, choose: Callable[[list[Names]], int]) -> None:
        os.mkdir(folder)
        history = self._names.get(inode, [{}])
        for name, (kind, what) in history[choose(history)].items():
            if kind == "link":
                os.symlink(what, folder / name)
            elif kind == "folder":
                self._leave(folder / name, what, choose)
            else:
                (folder / name).write_bytes(self._left(what))

    def _left(self, inode: int) -> bytes:
        descriptor = self._held[inode]
        whole = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        flushed = self._bytes.get(inode, b"")
        return self._random.choice((flushed, flushed, whole, flushed + whole[len(flushed) : len(whole) // 2]))

    def _remove(self, folder: Path) -> None:
        for path in folder.iterdir():
            self._remove(path) if path.is_dir() and not path.is_symlink() else os.unlink(path)
        os.rmdir(folder)
