"""A folder of sessions: their names, where they lie, what their headers say, and what dead writers left behind.

A session NAME is the file ``NAME.session``.  A name has letters, digits, dots, dashes and underscores and begins with a
letter or a digit, so it names no other folder; what a link leads out of the folder is refused.  Nothing here reads a
section.  No torch.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvad import storage
from kvad.errors import StorageError, UsageError
from kvad.storage import REAL_FILE_SYSTEM, FileSystem

CONTAINER_KIND, FILE_SUFFIX = "session", ".session"
SESSION_DIR_VARIABLE = "KVAD_SESSIONS"


class SessionFile(NamedTuple):
    """A file of a folder.  ``state``: "whole", "torn", "alien" (not ours, or of another version), "leftover" (of a
    writer that died), "writing" (of one that lives) or "unread" (the disk refused); ``says``: more of it."""

    path: Path
    state: str
    problem: str = ""
    header: storage.container.Header | None = None


def default_session_dir() -> Path:
    """Where ``KVAD_SESSIONS`` says, else in the user's own data folder."""
    from platformdirs import user_data_path

    chosen = os.environ.get(SESSION_DIR_VARIABLE)
    return Path(chosen) if chosen else user_data_path("kvad", appauthor=False) / "sessions"


def session_path(name: str, folder: Path) -> Path:
    """The file of a session.  UsageError: no name, or one that leads out of the folder."""
    if not storage.filesystem.is_valid_name(name):
        raise storage.filesystem.invalid_name_error(name, "of a session")
    path = folder / f"{name}{FILE_SUFFIX}"
    if path.resolve().parent != folder.resolve():
        raise UsageError(f"session {name!r}: {path} leads out of its folder", "kvad follows no link there")
    return path


def check_overwritable(path: Path, disk: FileSystem = REAL_FILE_SYSTEM) -> None:
    """Before a session is written to ``path``: EntryError where a file is there that is none, damaged or not, for
    nothing of it would be left.  OSError as the disk says it."""
    try:
        kind = storage.container.read_header(path, disk).kind
    except StorageError as error:
        if error.reason == "alien":
            raise
        return
    if kind != CONTAINER_KIND:
        raise StorageError(f"{path}: it is a {kind}, no session", "it is left as it is", reason="alien")


def is_session_dir(folder: Path) -> bool:
    """Whether this is a folder of sessions, or of what their writers left: no checkpoint, and one of them is in it."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return False
    left = any(each.name.endswith(FILE_SUFFIX) for each in storage.temp_paths.list_temp_paths(folder))
    return left or any(path.suffix == FILE_SUFFIX for path in folder.iterdir())


def list_sessions(folder: Path, disk: FileSystem = REAL_FILE_SYSTEM) -> Iterator[SessionFile]:
    """The sessions of a folder, by name, whose headers alone are read; none where there is no folder."""
    for path in sorted(folder.glob(f"*{FILE_SUFFIX}")) if folder.is_dir() else []:
        yield _inspected(path, disk, whole=False)


def inspect_session(folder: Path, disk: FileSystem = REAL_FILE_SYSTEM) -> Iterator[SessionFile]:
    """Every file of a folder, each byte of what is ours read."""
    for left in storage.temp_paths.list_temp_paths(folder):
        alive = left.in_use
        what = "is being written" if alive else f"process {left.pid} died while it wrote {left.name}"
        yield SessionFile(left.path, "writing" if alive else "leftover", what)
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir():
            if path.suffix == FILE_SUFFIX:  # in the way of a session
                yield SessionFile(path, "alien", "it is a folder")
        elif not path.name.startswith("."):
            yield _inspected(path, disk, whole=True)


def read_tokens(path: Path, last: int, disk: FileSystem = REAL_FILE_SYSTEM) -> list[int]:
    """The last tokens of a session.  EntryError, OSError: as the file or the disk says it."""
    with storage.container.open_container(path, disk) as entry:
        every = array("q", bytes(entry.read("history")))
    if sys.byteorder == "big":
        every.byteswap()
    return every[-last:].tolist() if last else []


def remove_session_leftovers(folder: Path, disk: FileSystem = REAL_FILE_SYSTEM) -> int:
    """Remove what dead writers left of sessions; how many there were.  A disk that refuses is left alone."""
    return storage.filesystem.remove_temp_files(folder, lambda name: name.endswith(FILE_SUFFIX), disk)


def _inspected(path: Path, disk: FileSystem, *, whole: bool) -> SessionFile:
    try:
        with storage.container.open_container(path, disk) as entry:
            if path.suffix == FILE_SUFFIX and entry.header.kind != CONTAINER_KIND:
                return SessionFile(path, "alien", f"{path}: it is a {entry.header.kind}, no session")
            if whole:
                entry.check()
            return SessionFile(path, "whole", header=entry.header)
    except StorageError as error:
        return SessionFile(path, "alien" if error.reason == "alien" else "torn", error.message)
    except OSError as error:
        return SessionFile(path, "unread", f"{path}: {error.strerror}")
