"""The disk, as caches use it: some fifteen operations, each of which may raise OSError, and nothing else.

One seam for all that is stored (``entry.py``, ``shelf.py``): tests hand over a disk whose k-th operation fails, or one
that forgets what was not flushed when the power goes (``tests/cache/disks.py``).  Nothing here retries: after a failed
flush the pages count as clean and may be lost (Rebello et al. 2020, USENIX ATC, "Can applications recover from fsync
failures?"), so what was being written is given up.

Beside it stands what every folder of stored things needs: which names a user may give, where it lies if nobody says,
and how what dead writers left is removed.

Reads are ``pread`` into memory of ours, never a mapping: a mapped file that is cut while it is read kills the process.
Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvad.errors import UsageError
from kvad.storage.temp_paths import list_temp_paths

Buffer = bytes | bytearray | memoryview

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_SHOWN_CHARS = 80  # characters of what is no name
OWNER_ONLY = 0o600  # what a cache holds can be read back as text


class DirEntry(NamedTuple):
    """A file of a folder, its bytes, and when it was last written or used."""

    name: str
    size: int
    used_ns: int


class FileSystem:
    """The real one."""

    def create(self, path: Path) -> int:
        """A new file to write to and to read back, for its owner only; FileExistsError where there is one."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_ONLY)

    def open(self, path: Path) -> int:
        """An existing file to read from, not a link."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write(self, file: int, data: Buffer) -> None:
        """All of ``data``, at the end of what was written."""
        left = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while left:
            left = left[os.write(file, left) :]

    def write_at(self, file: int, data: Buffer, offset: int) -> None:
        """All of ``data``, from ``offset`` on; what is passed over reads as zeros."""
        left, done = memoryview(data).cast("B") if len(data) else memoryview(b""), 0
        while left:
            count = os.pwrite(file, left, offset + done)
            left, done = left[count:], done + count

    def read(self, file: int, into: Buffer, offset: int) -> int:
        """Fills ``into`` from ``offset`` on; returns the bytes that there were."""
        left, got = memoryview(into).cast("B"), 0
        while left:
            count = os.preadv(file, [left], offset + got)
            if count == 0:
                break
            left, got = left[count:], got + count
        return got

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def sync(self, file: int) -> None:
        """What was written to ``file`` survives a power cut when this returns."""
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def replace(self, source: Path, target: Path) -> None:
        """``source`` is ``target`` from now on, whole, whatever was there."""
        os.replace(source, target)

    def sync_dir(self, folder: Path) -> None:
        """Names that came and went in ``folder`` survive a power cut when this returns."""
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def make_dir(self, path: Path) -> None:
        """There is such a folder, its owner's only where it is new."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def list_files(self, folder: Path) -> list[DirEntry]:
        """The plain files of a folder; links and folders are left out."""
        with os.scandir(folder) as found:
            stats = [
                (each.name, each.stat(follow_symlinks=False)) for each in found if each.is_file(follow_symlinks=False)
            ]
        return [DirEntry(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]

    def touch(self, path: Path) -> None:
        """It was used now."""
        os.utime(path, follow_symlinks=False)

    def lock(self, path: Path) -> int:
        """Hold ``path`` (made if need be) until it is closed or this process ends, however it ends.  BlockingIOError:
        somebody else holds it."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, OWNER_ONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(file)
            raise
        return file

    def free_bytes(self, folder: Path) -> int:
        """Bytes that one without privileges may still write there."""
        stat = os.statvfs(folder)
        return stat.f_bavail * stat.f_frsize


REAL_FILE_SYSTEM = FileSystem()


def remove_temp_files(folder: Path, ours: Callable[[str], bool], disk: FileSystem = REAL_FILE_SYSTEM) -> int:
    """Remove what dead writers left half written under names that are ``ours``; how many files.  One that the disk
    keeps, or that another process has swept, is left alone; OSError: the folder cannot be looked at."""
    count = 0
    for left in list_temp_paths(folder):
        with suppress(OSError):
            if left.kind == "tmp" and ours(left.name) and not left.in_use:
                disk.remove(left.path)
                count += 1
    return count


def is_valid_name(name: str) -> bool:
    """Letters, digits, dots, dashes and underscores, the first a letter or a digit: it leads out of no folder."""
    return NAME_PATTERN.fullmatch(name) is not None


def invalid_name_error(name: str, what: str) -> UsageError:
    """``name`` is none, "of a session" say."""
    shown = name if len(name) <= MAX_SHOWN_CHARS else f"{name[:MAX_SHOWN_CHARS]}..."
    return UsageError(
        f"{shown!r} is no name {what}", "letters, digits, . _ and -, at most 64, the first a letter or a digit"
    )


def user_cache_dir(name: str) -> Path:
    """Where ``name`` lies if nobody says: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "kvad" / name
