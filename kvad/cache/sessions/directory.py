"""Session directory: names, paths, headers and leftovers of session files.

Session NAME is the file ``NAME.session``. A name has letters, digits, dots, dashes and underscores and begins with a
letter or a digit, so it cannot name another folder; links that lead out of the folder are refused. Sections are not
read. No torch.
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
SESSION_DIR_VARIABLE = "KVAD_SESSION_DIR"


class SessionFile(NamedTuple):
    """A file of a session directory."""

    path: Path
    state: str  # "whole", "damaged", "foreign", "leftover" (dead writer), "writing" or "unread" (disk error)
    problem: str = ""  # details of the state
    header: storage.container.Header | None = None


def default_session_dir() -> Path:
    """Return ``KVAD_SESSION_DIR`` if set, else a folder in the user's data folder."""
    from platformdirs import user_data_path

    chosen = os.environ.get(SESSION_DIR_VARIABLE)
    return Path(chosen) if chosen else user_data_path("kvad", appauthor=False) / "sessions"


def session_path(name: str, folder: Path) -> Path:
    """Return the file of a session.

    Raises:
        UsageError: If the name is not valid or leads out of the folder.
    """
    if not storage.filesystem.is_valid_name(name):
        raise storage.filesystem.invalid_name_error(name, "of a session")
    path = folder / f"{name}{FILE_SUFFIX}"
    if path.resolve().parent != folder.resolve():
        raise UsageError(f"session {name!r}: {path} is a link out of its folder", "Links there are not followed.")
    return path


def check_overwritable(path: Path, fs: FileSystem = REAL_FILE_SYSTEM) -> None:
    """Check that ``path`` is missing or a session before it is overwritten.

    Raises:
        StorageError: If another kind of file exists.
        OSError: If the disk fails.
    """
    try:
        kind = storage.container.read_header(path, fs).kind
    except StorageError as error:
        if error.reason == "foreign":
            raise
        return
    if kind != CONTAINER_KIND:
        raise not_a_session(path, kind)


def not_a_session(path: Path, kind: str) -> StorageError:
    return StorageError(f"{path}: a {kind}, not a session", "The file is left unchanged.", reason="foreign")


def is_session_dir(folder: Path) -> bool:
    """True if the folder contains sessions or their leftovers, and no checkpoint."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return False
    has_leftovers = any(temp.name.endswith(FILE_SUFFIX) for temp in storage.temp_paths.list_temp_paths(folder))
    return has_leftovers or any(path.suffix == FILE_SUFFIX for path in folder.iterdir())


def list_sessions(folder: Path, fs: FileSystem = REAL_FILE_SYSTEM) -> Iterator[SessionFile]:
    """Yield the sessions of a folder by name; only headers are read."""
    for path in sorted(folder.glob(f"*{FILE_SUFFIX}")) if folder.is_dir() else []:
        yield _inspect(path, fs, whole=False)


def inspect_session(folder: Path, fs: FileSystem = REAL_FILE_SYSTEM) -> Iterator[SessionFile]:
    """Yield every file of a folder; sessions are read and verified completely."""
    for left in storage.temp_paths.list_temp_paths(folder):
        in_use = left.in_use
        problem = "is being written" if in_use else f"process {left.pid} died while writing {left.name}"
        yield SessionFile(left.path, "writing" if in_use else "leftover", problem)
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir():
            if path.suffix == FILE_SUFFIX:  # It prevents a session of this name.
                yield SessionFile(path, "foreign", "it is a folder")
        elif not path.name.startswith("."):
            yield _inspect(path, fs, whole=True)


def read_tokens(path: Path, last: int, fs: FileSystem = REAL_FILE_SYSTEM) -> list[int]:
    """Return the last ``last`` tokens of a session."""
    with storage.container.open_container(path, fs) as container:
        tokens = array("q", bytes(container.read("history")))
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens[-last:].tolist() if last else []


def remove_session_leftovers(folder: Path, fs: FileSystem = REAL_FILE_SYSTEM) -> int:
    """Remove unfinished session files of dead writers; returns their number."""
    return storage.filesystem.remove_temp_files(folder, lambda name: name.endswith(FILE_SUFFIX), fs)


def _inspect(path: Path, fs: FileSystem, *, whole: bool) -> SessionFile:
    try:
        with storage.container.open_container(path, fs) as container:
            if path.suffix == FILE_SUFFIX and container.header.kind != CONTAINER_KIND:
                raise not_a_session(path, container.header.kind)
            if whole:
                container.check()
            return SessionFile(path, "whole", header=container.header)
    except StorageError as error:
        return SessionFile(path, "foreign" if error.reason == "foreign" else "damaged", error.message)
    except OSError as error:
        return SessionFile(path, "unread", f"{path}: {error.strerror}")
