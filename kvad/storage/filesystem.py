"""File system interface of the caches: about twenty operations that may raise OSError.

All stores use it (``container.py``, ``cache/offload/disk_store.py``). Tests pass a file system whose k-th operation
fails, or one that loses unflushed data at a power cut (``tests/support/faulty_filesystems.py``). Nothing here retries:
after a failed flush the pages count as clean and may be lost (Rebello et al. 2020, USENIX ATC, "Can applications
recover from fsync failures?"), so the file being written is discarded.

The module also has what every store folder needs: valid names, the default folder and the removal of leftovers. All
files that a user names are opened by ``open_regular``: a pipe or device in a file's place is an error at once.

Reads are ``pread`` into our own buffers: truncating a mapped file during a read kills the process. Only packed weights
are mapped (``kvad/ops/native/packed_store.py``), whose files are replaced and removed, never truncated.
Standard library only.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvad.errors import UsageError
from kvad.storage.temp_paths import list_temp_paths

Buffer = bytes | bytearray | memoryview

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_SHOWN_CHARS = 80  # characters of an invalid name in a message
UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # Python 3.13 has the name
OWNER_ONLY = 0o600  # Cached text can be reconstructed from a cache file.
FILE_TYPES = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class DirEntry(NamedTuple):
    """A file of a folder: name, bytes, and time of the last write or use."""

    name: str
    size: int
    used_ns: int


class FileSystem:
    """The real file system."""

    def create(self, path: Path) -> int:
        """Create a file for writing and reading, for its owner only; FileExistsError if it exists."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_ONLY)

    def open(self, path: Path) -> int:
        """Open an existing regular file for reading; links are refused."""
        check_regular(os.lstat(path).st_mode, path)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)

    def write(self, file: int, data: Buffer) -> None:
        """Append all of ``data`` at the file position."""
        left = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while left:
            left = left[os.write(file, left) :]

    def write_at(self, file: int, data: Buffer, offset: int) -> None:
        """Write all of ``data`` at ``offset``; gaps read as zeros."""
        left, num_written = memoryview(data).cast("B") if len(data) else memoryview(b""), 0
        while left:
            count = os.pwrite(file, left, offset + num_written)
            left, num_written = left[count:], num_written + count

    def read(self, file: int, into: Buffer, offset: int) -> int:
        """Fill ``into`` from ``offset`` and return the number of bytes read."""
        left, count_read = memoryview(into).cast("B"), 0
        while left:
            count = os.preadv(file, [left], offset + count_read)
            if count == 0:
                break
            left, count_read = left[count:], count_read + count
        return count_read

    def map(self, file: int, offset: int, size: int) -> mmap.mmap:
        """Map bytes of a file, whose ``offset`` is a multiple of the page size; writes stay in this process."""
        return map_privately(file, offset, size)

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def sync(self, file: int) -> None:
        """Flush a file to the disk."""
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def replace(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target`` atomically, replacing an existing file."""
        os.replace(source, target)

    def sync_dir(self, folder: Path) -> None:
        """Flush the names of a folder to the disk."""
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def make_dir(self, path: Path) -> None:
        """Create a folder and its parents if missing; a new folder is accessible to its owner only."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def list_files(self, folder: Path) -> list[DirEntry]:
        """Return the regular files of a folder, without links and folders."""
        files = []
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # A writer, possibly our own thread, renamed it meanwhile.
                    if entry.is_file(follow_symlinks=False):
                        stat = entry.stat(follow_symlinks=False)
                        files.append(DirEntry(entry.name, stat.st_size, stat.st_mtime_ns))
        return files

    def touch(self, path: Path) -> None:
        os.utime(path, follow_symlinks=False)

    def lock(self, path: Path) -> int:
        """Lock a file, created if missing, until it is closed or the process ends; it contains our process id.

        The owner may remove the file before it closes it.

        Raises:
            BlockingIOError: If the lock is taken; ``lock_owner`` names the process.
        """
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, OWNER_ONLY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file).st_nlink:  # Otherwise its owner removed it after we opened it.
                    with suppress(OSError):  # On a full disk it is locked without a process id.
                        os.ftruncate(file, 0)
                        os.pwrite(file, str(os.getpid()).encode(), 0)
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def hold(self, path: Path) -> int | None:
        """Keep a file from ``remove_unused`` until the result is closed or the process ends; None if it is missing."""
        try:
            file = self.open(path)
        except FileNotFoundError:
            return None
        with suppress(BlockingIOError):  # It is being removed.
            _lock_if_possible(file, fcntl.LOCK_SH)
        return file

    def remove_unused(self, path: Path) -> bool:
        """Remove a file unless it is held (``hold``), by any process; return True if it is gone."""
        try:
            file = self.open(path)
        except FileNotFoundError:
            return True
        try:
            _lock_if_possible(file, fcntl.LOCK_EX)
            self.remove(path)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            pass
        finally:
            self.close(file)
        return True

    @contextmanager
    def locked_folder(self, folder: Path) -> Iterator[None]:
        """Lock a folder for the block; waits for other processes. A file system without locks is not locked."""
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def free_bytes(self, folder: Path) -> int:
        """Return the free bytes available to an unprivileged user."""
        stat = os.statvfs(folder)
        return stat.f_bavail * stat.f_frsize


def _lock_if_possible(file: int, mode: int) -> None:
    """Lock an open file; BlockingIOError if it is locked, no lock on a file system without them."""
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


REAL_FILE_SYSTEM = FileSystem()


def map_privately(file: int, offset: int = 0, size: int = 0) -> mmap.mmap:
    """Map bytes of a file (0: up to its end), so that writes stay in this process.

    No memory is reserved for writes: a file may be larger than the memory.
    """
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(file, size, flags=mmap.MAP_PRIVATE | UNRESERVED, prot=prot, offset=offset)


def lock_owner(path: Path) -> str:
    """Name the owner of a taken lock: "this process", "process 123", or "another process" if it is unknown."""
    try:
        pid = int(path.read_bytes())
    except (OSError, ValueError):
        return "another process"
    return "this process" if pid == os.getpid() else f"process {pid}"


def check_regular(mode: int, path: Path) -> None:
    """Raise OSError unless a file's ``st_mode`` is that of a regular file or a link."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if (kind := FILE_TYPES.get(stat.S_IFMT(mode))) is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; a folder, pipe, socket or device raises OSError without being opened."""
    check_regular(os.stat(path).st_mode, path)
    return path.open("rb")


def open_input(path: Path) -> io.BufferedReader:
    """Open a file that is read once: a regular one, or one that the shell has opened (``<(...)``, ``/dev/stdin``)."""
    is_open = path.parent == Path("/dev/fd") or path == Path("/dev/stdin")
    return path.open("rb") if is_open else open_regular(path)


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return the content of a regular file in UTF-8, with line ends as ``Path.read_text`` returns them."""
    with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
        return file.read()


def remove_temp_files(folder: Path, is_own: Callable[[str], bool], fs: FileSystem = REAL_FILE_SYSTEM) -> int:
    """Remove temporary files of dead writers and return their number; ``is_own`` selects final names of the caller.

    Files that cannot be removed, or that another process removed, are skipped.
    """
    count = 0
    for left in list_temp_paths(folder):
        with suppress(OSError):
            if left.kind == "tmp" and is_own(left.name) and not left.in_use:
                fs.remove(left.path)
                count += 1
    return count


def is_valid_name(name: str) -> bool:
    """True for letters, digits, dots, dashes and underscores; it cannot name another folder."""
    return NAME_PATTERN.fullmatch(name) is not None


def invalid_name_error(name: str, purpose: str) -> UsageError:
    """Build the error for an invalid name; ``purpose`` is "of a session", for example."""
    shown = name if len(name) <= MAX_SHOWN_CHARS else f"{name[:MAX_SHOWN_CHARS]}..."
    return UsageError(
        f"{shown!r} is not a valid name {purpose}",
        "Use letters, digits, . _ and -, at most 64, beginning with a letter or a digit.",
    )


def user_cache_dir(name: str) -> Path:
    """Return the default folder ``name`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "kvad" / name
