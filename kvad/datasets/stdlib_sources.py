"""Real text that every machine has: the source of the running Python's own standard library.

Found by ``sysconfig``; where it comes without sources, the sources of installed packages.  Nothing is downloaded.
Tests, generated tables and vendored code are left out: a small model should not spend its minutes on them.

A tenth of the files is held out, by a hash of their names: whoever trains on the rest (``kvad corpus python``) can be
judged on texts that it never saw, on any machine with the same Python.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvad.errors import DataError

EXCLUDED_FOLDERS = {
    "__pycache__",
    "ensurepip",
    "encodings",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "turtledemo",
}
MIN_BYTES = 2_000_000  # bytes: less would not keep a model busy for two minutes
HELD_OUT_PER_256 = 26  # of 256
MAX_FILE_BYTES = 200_000  # bytes: a larger file is a table more often than a program


class SourceFiles(NamedTuple):
    """``what`` says in words where the files come from."""

    description: str
    root: Path
    files: tuple[Path, ...]
    num_bytes: int


def find_sources(places: Iterable[tuple[str, str]] | None = None) -> SourceFiles:
    """The first place with enough Python sources; DataError, naming the places, where there is none.

    ``places``: (what, folder) in order of preference, this Python's own by default.
    """
    tried = []
    for what, folder in places if places is not None else _candidate_folders():
        root = Path(folder)
        files = tuple(sorted(_sources(root))) if root.is_dir() else ()
        size = sum(path.stat().st_size for path in files)
        if size >= MIN_BYTES:
            return SourceFiles(what, root, files, size)
        tried.append(f"{root} ({size:,} bytes)")
    where = ", ".join(tried)
    raise DataError(f"no Python sources found in {where}", "train on your own text: kvad train FILE --out DIR")


def is_held_out(name: str) -> bool:
    """Whether the file of this name (its path under ``Sources.root``, with slashes) is kept from training."""
    return hashlib.sha256(name.encode()).digest()[0] < HELD_OUT_PER_256


def _candidate_folders() -> list[tuple[str, str]]:
    paths = sysconfig.get_paths()
    return [
        ("the standard library of this Python", paths["stdlib"]),
        ("the packages installed in this Python", paths["purelib"]),
        ("the packages installed in this Python", paths["platlib"]),
    ]


def _sources(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name not in EXCLUDED_FOLDERS:
            yield from _sources(path)
        elif path.suffix == ".py" and path.is_file() and 0 < path.stat().st_size <= MAX_FILE_BYTES:
            yield path
