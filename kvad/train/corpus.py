"""Files and folders -> documents, one per file or one per line, in a fixed order.

A folder is read recursively, its files sorted by path; hidden ones are left out, and so are binary and empty ones,
unless they were named.  A file is text if it begins without a zero byte; it must be UTF-8, or ``errors="replace"`` puts
U+FFFD for what is not.  Nothing is kept in memory but one document at a time.  Standard library only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvad.errors import DataError, counted
from kvad.text.base import Tokenizer

__all__ = ["PROBE_BYTES", "Corpus", "Framer", "Source", "open_corpus"]

Framer = Callable[[int, list[int]], list[int]]  # (number of a text, its ids) -> the ids with what stands around them

PROBE_BYTES = 8192  # a zero byte among the first ones: not text


@dataclass(frozen=True)
class Source:
    """A file that is a document: ``name`` is its path under what was named."""

    path: Path
    name: str
    num_bytes: int
    sha256: str

    def entry(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.num_bytes, "sha256": self.sha256}


@dataclass(frozen=True)
class Corpus:
    """``skipped``: binary and empty files of the folders that were named.  ``lines``: every line that is not empty is
    a document, not every file."""

    sources: tuple[Source, ...]
    skipped: int
    errors: str
    lines: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)

    def texts(self) -> Iterator[str]:
        """The documents in order; may be called again.  Raises DataError naming file and byte."""
        for source in self.sources:
            text = read_text(source.path, self.errors)
            if self.lines:
                yield from (line for line in text.splitlines() if line.strip())
            else:
                yield text

    def settings(self) -> dict[str, Any]:
        """What decides the texts, and how they are framed."""
        lines = {"documents": "lines"} if self.lines else {}
        return {"errors": self.errors, "sources": [source.entry() for source in self.sources], **lines}

    def framer(self, tokenizer: Tokenizer) -> Framer:
        """Every document is opened by the separator.  Raises DataError for a tokenizer that has none."""
        separator = tokenizer.specials.separator
        if separator is None:
            raise DataError(
                "this tokenizer has no token that opens a document", "train one here, or give it <|endofdoc|>"
            )
        return lambda _number, ids: [separator, *ids]

    def told(self) -> str:
        """One line about it."""
        skipped = f"; {counted(self.skipped, 'binary or empty one')} left out" if self.skipped else ""
        return f"corpus: {counted(len(self.sources), 'file')}, {self.num_bytes / 1e6:,.1f} MB{skipped}"


def open_corpus(
    paths: Sequence[Path], *, suffixes: Sequence[str] = (), errors: str = "strict", lines: bool = False
) -> Corpus:
    """Find the files and hash them.

    Raises DataError for a path that is missing, unreadable, binary or empty, and for a corpus without text.
    """
    if not paths:
        raise DataError("no corpus was named", "name text files or folders")
    sources, skipped = [], 0
    for named in paths:
        for path in _files(named, suffixes):
            content = _read(path)
            if not content.strip() or b"\0" in content[:PROBE_BYTES]:
                if path == named:
                    _refuse(path, content)
                skipped += 1
                continue
            name = path.name if path == named else f"{named.name}/{path.relative_to(named).as_posix()}"
            sources.append(Source(path, name, len(content), hashlib.sha256(content).hexdigest()))
    if not sources:
        which = f" ending in {', '.join(suffixes)}" if suffixes else ""
        where = ", ".join(map(str, paths))
        raise DataError(f"no text files{which} in {where}", counted(skipped, "empty or binary one") if skipped else "")
    return Corpus(tuple(sources), skipped, errors, lines)


def read_text(path: Path, errors: str = "strict") -> str:
    """A file's text without its byte order mark.  Raises DataError naming file and byte."""
    content = _read(path)
    try:
        return content.decode("utf-8", errors).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte 0x{content[error.start]:02X} at offset {error.start}",
            "--errors replace puts U+FFFD in its place",
        ) from None


def _files(named: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    if not named.exists():
        raise DataError(f"no such file or folder: {named}")
    if not named.is_dir():
        yield named
        return

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error

    for folder, inner, names in os.walk(named, onerror=fail):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and (not suffixes or path.suffix in suffixes) and path.is_file():
                yield path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _refuse(path: Path, content: bytes) -> None:
    if not content.strip():
        raise DataError(f"{path} is empty", "a corpus needs text")
    raise DataError(f"{path} is binary (a zero byte at offset {content.index(0)}), not text")
