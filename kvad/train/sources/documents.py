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

from kvad.errors import DataError, format_count, suggest_path
from kvad.text import Tokenizer
from kvad.train.sources.formats import (
    FORMATS,
    ReadOptions,
    TextPiece,
    bare_suffix,
    detect_format,
    open_decompressed,
    read_blocks,
)

FrameFn = Callable[[int, list[int]], list[int]]  # (number of a text, its ids) -> the ids with what stands around them
Progress = Callable[[int, int], None]  # (characters read, tokens made of them), in all

PROBE_BYTES = 8192  # a zero byte among the first ones: not text


@dataclass(frozen=True)
class CorpusFile:
    """A file of documents: ``name`` is its path under what was named; ``sha256`` of its bytes as they lie ("" in a
    stream, whose files are told by name and size)."""

    path: Path
    name: str
    num_bytes: int
    sha256: str

    def manifest_entry(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.num_bytes, "sha256": self.sha256}


@dataclass(frozen=True)
class DocumentCorpus:
    """``skipped``: binary and empty files of the folders that were named.  ``lines``: every line that is not empty is
    a document, not every file.  ``format``, ``field``: as ``readers.py`` has them."""

    sources: tuple[CorpusFile, ...]
    skipped: int
    errors: str
    one_per_line: bool = False
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

    def pieces(self) -> Iterator[TextPiece]:
        """The documents in order, long ones in pieces."""
        how = ReadOptions(self.errors, self.field)
        for source in self.sources:
            yield from FORMATS[self._file_format(source.path)](source.path, how)

    def settings(self) -> dict[str, Any]:
        """What decides the texts, and how they are framed."""
        found: dict[str, Any] = {"errors": self.errors, "sources": [source.manifest_entry() for source in self.sources]}
        if self.one_per_line:
            found["documents"] = "lines"
        formats = {self._file_format(source.path) for source in self.sources} - {"text", "lines"}
        if formats:
            found |= {"formats": sorted(formats), "field": self.field}
        return found

    @property
    def whole_files(self) -> bool:
        """Whether every file is one document."""
        return all(self._file_format(source.path) == "text" for source in self.sources)

    def _file_format(self, path: Path) -> str:
        found = detect_format(path, self.format)
        return "lines" if self.one_per_line and found == "text" else found

    def framer(self, tokenizer: Tokenizer) -> FrameFn:
        """Every document is opened by the separator.  Raises DataError for a tokenizer that has none."""
        separator = tokenizer.special_tokens.separator
        if separator is None:
            raise DataError(
                "this tokenizer has no token that opens a document", "train one here, or give it <|endofdoc|>"
            )
        return lambda _number, ids: [separator, *ids]

    def summary(self) -> str:
        """One line about it."""
        skipped = f"; {format_count(self.skipped, 'binary or empty one')} left out" if self.skipped else ""
        return f"corpus: {format_count(len(self.sources), 'file')}, {self.num_bytes / 1e6:,.1f} MB{skipped}"


def open_corpus(
    paths: Sequence[Path],
    *,
    suffixes: Sequence[str] = (),
    errors: str = "strict",
    lines: bool = False,
    format: str = "auto",
    field: str = "text",
    hashed: bool = True,
) -> DocumentCorpus:
    """Find the files and hash them (``hashed``: else their beginnings are looked at).

    Raises DataError for a path that is missing, unreadable, binary or empty, and for a corpus without text.
    """
    if not paths:
        raise DataError("no corpus was named", "name text files or folders")
    assert format == "auto" or format in FORMATS, "pairs are read by pairs.py"
    sources, skipped = [], 0
    for named in paths:
        for path in _files(named, suffixes):
            if (found := _probe_file(path, hashed)).wrong:
                if path == named:
                    raise DataError(f"{path} {found.wrong}", found.hint)
                skipped += 1
                continue
            name = path.name if path == named else f"{named.name}/{path.relative_to(named).as_posix()}"
            sources.append(CorpusFile(path, name, found.num_bytes, found.sha256))
    if not sources:
        which = f" ending in {', '.join(suffixes)}" if suffixes else ""
        where = ", ".join(map(str, paths))
        hint = (
            "--suffix says which files; leave it out for all text" if suffixes else "name text files, or their folder"
        )
        raise DataError(
            f"no text files{which} in {where}",
            f"{format_count(skipped, 'file')} there {'is' if skipped == 1 else 'are'} empty or binary"
            if skipped
            else hint,
        )
    lines = lines or format == "lines"
    return DocumentCorpus(tuple(sources), skipped, errors, lines, "auto" if format == "lines" else format, field)


class _FileProbe(NamedTuple):
    """``wrong``: why a file is not text, and a ``hint``; else empty."""

    num_bytes: int
    sha256: str
    wrong: str = ""
    hint: str = ""


def _probe_file(path: Path, hashed: bool) -> _FileProbe:
    """Read once: the beginning, as text, until it says something, and all of it where it is hashed."""
    with open_decompressed(path) as file:
        first = file.read(PROBE_BYTES)
        if b"\0" in first:
            return _FileProbe(0, "", f"is binary (a zero byte at offset {first.index(0)}), not text")
        while first and not first.strip():
            first = file.read(1 << 20)
    if not first:
        return _FileProbe(0, "", "is empty", "a corpus needs text")
    try:
        if not hashed:
            return _FileProbe(path.stat().st_size, "")
        with path.open("rb") as file:
            return _FileProbe(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def read_document(path: Path, errors: str = "strict") -> str:
    """A file's text without its byte order mark.  Raises DataError naming file and byte."""
    return "".join(read_blocks(path, errors))


def _suggest_file(missing: Path) -> str:
    """A hint: the name beside it that is like it, or where it was looked for."""
    close = suggest_path(missing)
    return f"looked for {missing.absolute()}" if close is None else f"did you mean {str(close)!r}?"


def _files(named: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    if not named.exists():
        raise DataError(f"no such file or folder: {named}", _suggest_file(named))
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
