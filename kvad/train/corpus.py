"""Files and folders -> documents, one per file, per line or per JSON object, in a fixed order.

A folder is read recursively, its files sorted by path; hidden ones are left out, and so are binary and empty ones,
unless they were named.  A file is text if it begins without a zero byte; it must be UTF-8, or ``errors="replace"`` puts
U+FFFD for what is not.  How a file is read is ``readers.py``'s; nothing is kept in memory but a piece of a document.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvad.errors import DataError, counted, nearest_file
from kvad.text.base import Tokenizer
from kvad.train.readers import FORMATS, Piece, Reading, bare_suffix, blocks_of, format_of, opened

__all__ = ["PROBE_BYTES", "Corpus", "Framer", "Progress", "Source", "open_corpus", "read_text"]

Framer = Callable[[int, list[int]], list[int]]  # (number of a text, its ids) -> the ids with what stands around them
Progress = Callable[[int, int], None]  # (characters read, tokens made of them), in all

PROBE_BYTES = 8192  # a zero byte among the first ones: not text


@dataclass(frozen=True)
class Source:
    """A file of documents: ``name`` is its path under what was named; ``sha256`` of its bytes as they lie ("" in a
    stream, whose files are told by name and size)."""

    path: Path
    name: str
    num_bytes: int
    sha256: str

    def entry(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.num_bytes, "sha256": self.sha256}


@dataclass(frozen=True)
class Corpus:
    """``skipped``: binary and empty files of the folders that were named.  ``lines``: every line that is not empty is
    a document, not every file.  ``format``, ``field``: as ``readers.py`` has them."""

    sources: tuple[Source, ...]
    skipped: int
    errors: str
    lines: bool = False
    format: str = "auto"
    field: str = "text"

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)

    def texts(self) -> Iterator[str]:
        """The documents in order; may be called again.  Raises DataError naming file and line."""
        held: list[str] = []
        for piece in self.pieces():
            held.append(piece.text)
            if piece.closes:
                yield "".join(held)
                held = []

    def pieces(self) -> Iterator[Piece]:
        """The documents in order, long ones in pieces."""
        how = Reading(self.errors, self.field)
        for source in self.sources:
            yield from FORMATS[self._format_of(source.path)](source.path, how)

    def settings(self) -> dict[str, Any]:
        """What decides the texts, and how they are framed."""
        found: dict[str, Any] = {"errors": self.errors, "sources": [source.entry() for source in self.sources]}
        if self.lines:
            found["documents"] = "lines"
        formats = {self._format_of(source.path) for source in self.sources} - {"text", "lines"}
        if formats:
            found |= {"formats": sorted(formats), "field": self.field}
        return found

    @property
    def whole_files(self) -> bool:
        """Whether every file is one document."""
        return all(self._format_of(source.path) == "text" for source in self.sources)

    def _format_of(self, path: Path) -> str:
        found = format_of(path, self.format)
        return "lines" if self.lines and found == "text" else found

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
    paths: Sequence[Path],
    *,
    suffixes: Sequence[str] = (),
    errors: str = "strict",
    lines: bool = False,
    format: str = "auto",
    field: str = "text",
    hashed: bool = True,
) -> Corpus:
    """Find the files and hash them (``hashed``: else their beginnings are looked at).

    Raises DataError for a path that is missing, unreadable, binary or empty, and for a corpus without text.
    """
    if not paths:
        raise DataError("no corpus was named", "name text files or folders")
    assert format == "auto" or format in FORMATS, "pairs are read by pairs.py"
    sources, skipped = [], 0
    for named in paths:
        for path in _files(named, suffixes):
            if (found := _look(path, hashed)).wrong:
                if path == named:
                    raise DataError(f"{path} {found.wrong}", found.hint)
                skipped += 1
                continue
            name = path.name if path == named else f"{named.name}/{path.relative_to(named).as_posix()}"
            sources.append(Source(path, name, found.num_bytes, found.sha256))
    if not sources:
        which = f" ending in {', '.join(suffixes)}" if suffixes else ""
        where = ", ".join(map(str, paths))
        hint = (
            "--suffix says which files; leave it out for all text" if suffixes else "name text files, or their folder"
        )
        raise DataError(
            f"no text files{which} in {where}",
            f"{counted(skipped, 'file')} there {'is' if skipped == 1 else 'are'} empty or binary" if skipped else hint,
        )
    lines = lines or format == "lines"
    return Corpus(tuple(sources), skipped, errors, lines, "auto" if format == "lines" else format, field)


class _Look(NamedTuple):
    """``wrong``: why a file is not text, and a ``hint``; else empty."""

    num_bytes: int
    sha256: str
    wrong: str = ""
    hint: str = ""


def _look(path: Path, hashed: bool) -> _Look:
    """Read once: the beginning, as text, until it says something, and all of it where it is hashed."""
    with opened(path) as file:
        first = file.read(PROBE_BYTES)
        if b"\0" in first:
            return _Look(0, "", f"is binary (a zero byte at offset {first.index(0)}), not text")
        while first and not first.strip():
            first = file.read(1 << 20)
    if not first:
        return _Look(0, "", "is empty", "a corpus needs text")
    try:
        if not hashed:
            return _Look(path.stat().st_size, "")
        with path.open("rb") as file:
            return _Look(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def read_text(path: Path, errors: str = "strict") -> str:
    """A file's text without its byte order mark.  Raises DataError naming file and byte."""
    return "".join(blocks_of(path, errors))


def _near(missing: Path) -> str:
    """A hint: the name beside it that is like it, or where it was looked for."""
    close = nearest_file(missing)
    return f"looked for {missing.absolute()}" if close is None else f"did you mean {str(close)!r}?"


def _files(named: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    if not named.exists():
        raise DataError(f"no such file or folder: {named}", _near(named))
    if not named.is_dir():
        yield named
        return

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error

    for folder, inner, names in os.walk(named, onerror=fail):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            wanted = not suffixes or path.suffix in suffixes or bare_suffix(path) in suffixes
            if wanted and not name.startswith(".") and path.is_file():
                yield path
