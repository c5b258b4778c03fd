"""Folders that appear on disk whole or not at all.

A folder is written under a hidden temporary name *beside* its final one, every file and folder in it is flushed to
the disk, and one rename makes it visible; then the parent is flushed, so that the rename itself survives a power cut.
Where a folder of that name exists, it is first renamed aside and is deleted only when the new one is durable::

    .NAME.PID.RANDOM.tmp    being written, or left behind by a process that died: never read, swept by the next write
    .NAME.PID.RANDOM.old    replaced; while NAME is missing (killed between two renames) it is the whole one

Invariant: at every moment, ``survivor(NAME)`` or NAME is a whole folder, if ever one was written.  After a failed
flush nothing is tried again as if it were clean: the temporary folder is dropped and SaveError is raised.
Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvad.errors import SaveError

__all__ = ["discard", "flush", "new_folder", "refused", "survivor", "sweep", "write_bytes"]

_STARTED_NS = time.time_ns()
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.(?P<kind>tmp|old)")


@contextmanager
def new_folder(final: Path, *, replaces: Sequence[Path] = ()) -> Iterator[Path]:
    """Yields an empty folder to write into; when the block ends well, it is ``final``.

    ``replaces``: other folders of the same parent that give way in the same move; ``final`` itself always does.
    Raises SaveError if the disk refuses, in the block or afterwards; what was there before is then whole.
    """
    parent, temporary = final.parent, _aside(final, "tmp")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        temporary.mkdir()
        yield temporary
        _flush_tree(temporary)
        _swap(temporary, final, [final, *replaces])
    except OSError as error:
        raise refused(final, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after a success there is nothing under this name


def _swap(temporary: Path, final: Path, replaces: Sequence[Path]) -> None:
    """Set aside, rename, flush; if any of it fails, everything back to where it was."""
    moved: list[tuple[Path, Path]] = []
    try:
        for old in replaces:
            if old.exists():  # final may be named twice
                moved.append((_aside(old, "old"), old))
                old.rename(moved[-1][0])
        temporary.rename(final)
        flush(final.parent)
    except BaseException:
        with suppress(OSError):
            if not temporary.exists():
                final.rename(temporary)
        for aside, old in reversed(moved):
            with suppress(OSError):
                aside.rename(old)
        raise
    for aside, _ in moved:
        shutil.rmtree(aside, ignore_errors=True)


def discard(folder: Path) -> None:
    """Delete a folder so that no half of it is ever seen under its name."""
    aside = _aside(folder, "tmp")
    try:
        folder.rename(aside)
    except OSError as error:
        raise refused(folder, error) from error
    shutil.rmtree(aside, ignore_errors=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace one file: written beside, flushed, renamed.  Raises SaveError; the file is then whole, old or new."""
    temporary = _aside(path, "tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        flush(path.parent)
    except OSError as error:
        raise refused(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def survivor(final: Path) -> Path | None:
    """The folder that was ``final`` until a process died between two renames; None where there is none."""
    found = [path for path, name, kind in _leftovers(final.parent) if kind == "old" and name == final.name]
    return max(found, key=lambda path: path.stat().st_mtime_ns) if found and not final.exists() else None


def refused(path: Path, error: OSError) -> SaveError:
    return SaveError(
        f"cannot save {path}: {error.strerror or error}",
        "what was saved there before is whole; free some space or choose another place",
    )


def _aside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.{kind}")


def _leftovers(parent: Path) -> Iterator[tuple[Path, str, str]]:
    """(path, the name that it had or was to have, "tmp" or "old")."""
    if parent.is_dir():
        for path in sorted(parent.iterdir()):
            if match := _LEFTOVER.fullmatch(path.name):
                yield path, match["name"], match["kind"]


def sweep(parent: Path) -> None:
    """Bring back what was left between two renames, and delete what dead processes left behind."""
    for path, name, kind in list(_leftovers(parent)):
        if _is_in_use(path):
            continue
        if kind == "old" and not (parent / name).exists():
            path.rename(parent / name)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_in_use(leftover: Path) -> bool:
    """Whether a living process is at work on it; one of our own id from before our time was another's (containers)."""
    match = _LEFTOVER.fullmatch(leftover.name)
    assert match is not None, leftover
    pid = int(match["pid"])
    if pid == os.getpid():
        return leftover.stat().st_mtime_ns >= _STARTED_NS
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        flush(path)
    flush(folder)


def flush(path: Path) -> None:
    """What was written to a file, or a folder's names, is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
