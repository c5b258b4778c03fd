"""Atomic replacement of folders and files.

A folder is written under a hidden temporary name in the same parent, every file and folder in it is flushed to the
disk, and one rename makes it visible. Then the parent is flushed, so that the rename survives a power cut. An
existing folder of the final name is renamed first and deleted only when the new one is durable (``temp_paths.py``).

Invariant: at every moment, ``find_interrupted(NAME)`` or NAME is a complete folder, if one was ever written. After a
failed flush nothing is retried: the temporary folder is dropped and SaveError is raised.
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
    """Yield an empty folder to write into; it becomes ``final`` if the block succeeds.

    ``replaces`` are other folders of the same parent that are removed in the same operation.

    Raises:
        SaveError: If the disk fails, in the block or afterwards. The previous folder is then complete.
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
    except SaveError as error:  # of a file in the folder; the user gave the final name
        raise SaveError(error.message.replace(str(temporary), str(final)), error.hint) from (error.__cause__ or error)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # After a success nothing has this name.


def _swap(temporary: Path, final: Path, replaces: Sequence[Path]) -> None:
    """Rename the old folders, rename the new one, flush; undo all renames if a step fails."""
    moved: list[tuple[Path, Path]] = []
    try:
        for old in replaces:
            if old.exists():  # ``final`` may occur twice.
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
        with suppress(OSError):  # The new folder is durable; a later save deletes what is left.
            _delete(set_aside, final)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that a partial folder is never visible under its name."""
    try:
        _delete(folder, folder)
    except OSError as error:
        raise disk_error(folder, error) from error


def _delete(path: Path, final: Path) -> None:
    """Delete a folder under a .tmp name of ``final``, so that no part of it is ever restored."""
    gone = temp_path(final, "tmp")
    path.rename(gone)
    fsync_path(gone.parent)  # Otherwise a power cut could restore the name without all of its files.
    shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; it replaces ``path`` atomically and durably if the block succeeds.

    Raises:
        SaveError: If the disk fails. The file then has its old or its new content, complete.
    """
    temporary = temp_path(path, "tmp")
    try:
        _make(path.parent)
        yield temporary
        fsync_path(temporary)
        temporary.replace(path)
        fsync_path(path.parent)
    except OSError as error:
        raise disk_error(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace one file atomically and durably. After a SaveError it has its old or its new content, complete."""
    with new_file(path) as temporary:
        temporary.write_bytes(content)


def find_interrupted(final: Path) -> Path | None:
    """Return the folder that was ``final`` until a process died between two renames, or None."""
    candidates = [left.path for left in interrupted_writes(final.parent) if left.name == final.name]
    return max(candidates, key=lambda path: path.stat().st_mtime_ns, default=None)


def disk_error(path: Path, error: OSError) -> SaveError:
    """Build the SaveError of a failed disk operation."""
    return SaveError(
        f"cannot save {path}: {error.strerror or error}",
        "The previous version is complete. Free some space or choose another location.",
    )


def recover_interrupted(parent: Path) -> None:
    """Restore folders left between two renames, and delete the leftovers of dead processes."""
    for left in interrupted_writes(parent):  # All of them, before the .tmp that marks them is deleted.
        if not left.in_use and not (parent / left.name).exists():
            left.path.rename(parent / left.name)
    for left in list_temp_paths(parent):
        with suppress(FileNotFoundError):  # Another process deleted it.
            if left.in_use:
                continue
            if left.kind != "tmp":
                _delete(left.path, parent / left.name)
            elif left.path.is_dir() and not left.path.is_symlink():
                shutil.rmtree(left.path, ignore_errors=True)
            else:
                left.path.unlink()


def _make(folder: Path) -> None:
    """Create a folder and its parents durably."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync_path(path.parent)


def _flush_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        fsync_path(path)
    fsync_path(folder)


def fsync_path(path: Path) -> None:
    """Flush a file, or the names of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
