"""Python's own source code as training text that every machine has.

The standard library is found by ``sysconfig``; if it has no sources, installed packages are used. Nothing is
downloaded. Tests, generated tables and vendored code are excluded, so that a small model does not train on them.

About a tenth of the files is held out by a hash of their names: a model trained on the rest (``kvad data create
python``) can be evaluated on unseen text on any machine with the same Python.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvad.errors import DataError

EXCLUDED_FOLDERS = {
    "__pycache__", "ensurepip", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages",
    "test", "tests", "turtledemo",
}  # fmt: skip
MIN_BYTES = 2_000_000  # minimum size of the text: enough for two minutes of training
HELD_OUT_PER_256 = 26  # held-out files of 256
MAX_FILE_BYTES = 200_000  # Larger files are more often tables than programs.


class SourceFiles(NamedTuple):
    """Python source files; ``description`` names their origin."""

    description: str
    root: Path
    files: tuple[Path, ...]
    num_bytes: int


def find_sources(candidates: Iterable[tuple[str, str]] | None = None) -> SourceFiles:
    """Return the first candidate (description, folder) with enough sources [default: this Python's folders].

    Raises:
        DataError: If no folder has enough; the message names the folders.
    """
    tried = []
    for description, folder in candidates if candidates is not None else _candidate_folders():
        root = Path(folder)
        files = tuple(sorted(_sources(root))) if root.is_dir() else ()
        size = sum(path.stat().st_size for path in files)
        if size >= MIN_BYTES:
            return SourceFiles(description, root, files, size)
        tried.append(f"{root} ({size:,} bytes)")
    listing = ", ".join(tried)
    raise DataError(f"no Python sources found in {listing}", "Train on your own text: kvad train FILE --out DIR.")


def is_held_out(name: str) -> bool:
    """True if the file is excluded from training; ``name`` is relative to ``SourceFiles.root``, with slashes."""
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
