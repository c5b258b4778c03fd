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

from kvad.aside import leftovers
from kvad.cache.disk import DISK, Disk, is_name, no_name, remove_leftovers
from kvad.cache.entry import Header, open_entry, read_header
from kvad.errors import EntryError, UsageError

__all__ = ["KIND", "SUFFIX", "VARIABLE", "Found", "check_ours", "default_folder", "examined", "history", "is_folder"]
__all__ += ["is_name", "listed", "named", "sweep"]

KIND, SUFFIX = "session", ".session"
VARIABLE = "KVAD_SESSIONS"


class Found(NamedTuple):
    """A file of a folder.  ``state``: "whole", "torn", "alien" (not ours, or of another version), "leftover" (of a
    writer that died), "writing" (of one that lives) or "unread" (the disk refused); ``says``: more of it."""

    path: Path
    state: str
    says: str = ""
    header: Header | None = None


def default_folder() -> Path:
    """Where ``KVAD_SESSIONS`` says, else in the user's own data folder."""
    from platformdirs import user_data_path

    chosen = os.environ.get(VARIABLE)
    return Path(chosen) if chosen else user_data_path("kvad", appauthor=False) / "sessions"


def named(name: str, folder: Path) -> Path:
    """The file of a session.  UsageError: no name, or one that leads out of the folder."""
    if not is_name(name):
        raise no_name(name, "of a session")
    path = folder / f"{name}{SUFFIX}"
    if path.resolve().parent != folder.resolve():
        raise UsageError(f"session {name!r}: {path} leads out of its folder", "kvad follows no link there")
    return path


def check_ours(path: Path, disk: Disk = DISK) -> None:
    """Before a session is written to ``path``: EntryError where a file is there that is none, damaged or not, for
    nothing of it would be left.  OSError as the disk says it."""
    try:
        kind = read_header(path, disk).kind
    except EntryError as error:
        if error.why == "alien":
            raise
        return
    if kind != KIND:
        raise EntryError(f"{path}: it is a {kind}, no session", "it is left as it is", why="alien")


def is_folder(folder: Path) -> bool:
    """Whether this is a folder of sessions, or of what their writers left: no checkpoint, and one of them is in it."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return False
    left = any(each.name.endswith(SUFFIX) for each in leftovers(folder))
    return left or any(path.suffix == SUFFIX for path in folder.iterdir())


def listed(folder: Path, disk: Disk = DISK) -> Iterator[Found]:
    """The sessions of a folder, by name, whose headers alone are read; none where there is no folder."""
    for path in sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []:
        yield _looked(path, disk, whole=False)


def examined(folder: Path, disk: Disk = DISK) -> Iterator[Found]:
    """Every file of a folder, each byte of what is ours read."""
    for left in leftovers(folder):
        alive = left.in_use
        what = "is being written" if alive else f"process {left.pid} died while it wrote {left.name}"
        yield Found(left.path, "writing" if alive else "leftover", what)
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir():
            if path.suffix == SUFFIX:  # in the way of a session
                yield Found(path, "alien", "it is a folder")
        elif not path.name.startswith("."):
            yield _looked(path, disk, whole=True)


def history(path: Path, last: int, disk: Disk = DISK) -> list[int]:
    """The last tokens of a session.  EntryError, OSError: as the file or the disk says it."""
    with open_entry(path, disk) as entry:
        every = array("q", bytes(entry.read("history")))
    if sys.byteorder == "big":
        every.byteswap()
    return every[-last:].tolist() if last else []


def sweep(folder: Path, disk: Disk = DISK) -> int:
    """Remove what dead writers left of sessions; how many there were.  A disk that refuses is left alone."""
    return remove_leftovers(folder, lambda name: name.endswith(SUFFIX), disk)


def _looked(path: Path, disk: Disk, *, whole: bool) -> Found:
    try:
        with open_entry(path, disk) as entry:
            if path.suffix == SUFFIX and entry.header.kind != KIND:
                return Found(path, "alien", f"{path}: it is a {entry.header.kind}, no session")
            if whole:
                entry.check()
            return Found(path, "whole", header=entry.header)
    except EntryError as error:
        return Found(path, "alien" if error.why == "alien" else "torn", error.message)
    except OSError as error:
        return Found(path, "unread", f"{path}: {error.strerror}")
