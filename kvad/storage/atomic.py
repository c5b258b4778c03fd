"""Folders that appear on disk whole or not at all.

A folder is written under a hidden temporary name *beside* its final one, every file and folder in it is flushed to
the disk, and one rename makes it visible; then the parent is flushed, so that the rename itself survives a power cut.
Where a folder of that name exists, it is first renamed aside and is deleted only when the new one is durable::

    .NAME.PID.RANDOM.tmp    being written, or left behind by a process that died: never read, swept by the next write
    .NAME.PID.RANDOM.old    replaced; while NAME is missing (killed between two renames) it is the whole one
    .NAME.PID.RANDOM.gone   gives way to another name, that of the .tmp of the same PID and RANDOM; while there is one
                            (killed before its rename) it is whole, and it is garbage afterwards

Invariant: at every moment, ``survivor(NAME)`` or NAME is a whole folder, if ever one was written.  After a failed
flush nothing is tried again as if it were clean: the temporary folder is dropped and SaveError is raised.
Standard library only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvad.errors import SaveError
from kvad.storage.temp_paths import interrupted_writes, list_temp_paths, replaced_path, temp_path


@contextmanager
def new_folder(final: Path, *, replaces: Sequence[Path] = ()) -> Iterator[Path]:
    """Yields an empty folder to write into; when the block ends well, it is ``final``.

    ``replaces``: other folders of the same parent that give way in the same move; ``final`` itself always does.
    Raises SaveError if the disk refuses, in the block or afterwards; what was there before is then whole.
    """
    parent, temporary = final.parent, temp_path(final, "tmp")
    try:
        _make(parent)
        recover_interrupted(parent)
        temporary.mkdir()
        yield temporary
        _flush_tree(temporary)
        _swap(temporary, final, [final, *replaces])
    except OSError as error:
        raise disk_error(final, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after a success there is nothing under this name


def _swap(temporary: Path, final: Path, replaces: Sequence[Path]) -> None:
    """Set aside, rename, flush; if any of it fails, everything back to where it was."""
    moved: list[tuple[Path, Path]] = []
    try:
        for old in replaces:
            if old.exists():  # final may be named twice
                moved.append((temp_path(old, "old") if old == final else replaced_path(old, temporary), old))
                old.rename(moved[-1][0])
        temporary.rename(final)
        fsync_path(final.parent)
    except BaseException:
        with suppress(OSError):
            if not temporary.exists():
                final.rename(temporary)
        for set_aside, old in reversed(moved):
            with suppress(OSError):
                set_aside.rename(old)
        raise
    for set_aside, _ in moved:
        shutil.rmtree(set_aside, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that no half of it is ever seen under its name."""
    gone = temp_path(folder, "tmp")
    try:
        folder.rename(gone)
        fsync_path(folder.parent)  # else a power cut could bring the name back, and not all of its files
    except OSError as error:
        raise disk_error(folder, error) from error
    shutil.rmtree(gone, ignore_errors=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace one file: written beside, flushed, renamed.  Raises SaveError; the file is then whole, old or new."""
    temporary = temp_path(path, "tmp")
    try:
        _make(path.parent)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_path(path.parent)
    except OSError as error:
        raise disk_error(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def find_interrupted(final: Path) -> Path | None:
    """The folder that was ``final`` until a process died between two renames; None where there is none."""
    found = [each.path for each in interrupted_writes(final.parent) if each.name == final.name]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def disk_error(path: Path, error: OSError) -> SaveError:
    return SaveError(
        f"cannot save {path}: {error.strerror or error}",
        "what was saved there before is whole; free some space or choose another place",
    )


def recover_interrupted(parent: Path) -> None:
    """Bring back what was left between two renames, and delete what dead processes left behind."""
    for left in interrupted_writes(parent):  # all of them, before the .tmp that says so is deleted
        if not left.in_use and not (parent / left.name).exists():
            left.path.rename(parent / left.name)
    for left in list_temp_paths(parent):
        path = left.path
        if left.in_use:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _make(folder: Path) -> None:
    """A folder and those above it, durably."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        fsync_path(path.parent)


def _flush_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        fsync_path(path)
    fsync_path(folder)


def fsync_path(path: Path) -> None:
    """What was written to a file, or a folder's names, is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
