"""Documents from files and folders: one per file, line or JSON object, in a fixed order.

A folder is read recursively, its files sorted by path; hidden files are skipped, and so are binary and empty ones
unless they were named. A file is text if its beginning has no zero byte; it must be UTF-8, or ``errors="replace"``
substitutes U+FFFD. Formats are in ``formats.py``; only one piece of a document is in memory at a time.
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

FrameFn = Callable[[int, list[int]], list[int]]  # (index of a text, its ids) -> framed ids
Progress = Callable[[int, int], None]  # (characters read, tokens made), in total

PROBE_BYTES = 8192  # a zero byte within these means binary


@dataclass(frozen=True)
class CorpusFile:
    """File of documents."""

    path: Path
    name: str  # relative to the named path
    num_bytes: int
    sha256: str  # of the raw bytes; "" for streams, which compare names and sizes

    def manifest_entry(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.num_bytes, "sha256": self.sha256}


@dataclass(frozen=True)
class DocumentCorpus:
    """Documents of the named files and folders."""

    sources: tuple[CorpusFile, ...]
    skipped: int  # binary and empty files of named folders
    errors: str  # "strict" or "replace"
    one_per_line: bool = False  # every non-empty line is a document
    format: str = "auto"
    field: str = "text"  # of JSON objects

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)

    def texts(self) -> Iterator[str]:
        """Yield the documents in order; may be called repeatedly. DataErrors name file and line."""
        parts: list[str] = []
        for piece in self.pieces():
            parts.append(piece.text)
            if piece.closes:
                yield "".join(parts)
                parts = []

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the documents in order, long ones in pieces."""
        options = ReadOptions(self.errors, self.field)
        for source in self.sources:
            yield from FORMATS[self._file_format(source.path)](source.path, options)

    def settings(self) -> dict[str, Any]:
        """Return everything that determines the texts and their framing."""
        settings: dict[str, Any] = {
            "errors": self.errors,
            "sources": [source.manifest_entry() for source in self.sources],
        }
        if self.one_per_line:
            settings["documents"] = "lines"
        formats = {self._file_format(source.path) for source in self.sources} - {"text", "lines"}
        if formats:
            settings |= {"formats": sorted(formats), "field": self.field}
        return settings

    @property
    def whole_files(self) -> bool:
        """True if every file is one document."""
        return all(self._file_format(source.path) == "text" for source in self.sources)

    def _file_format(self, path: Path) -> str:
        file_format = detect_format(path, self.format)
        return "lines" if self.one_per_line and file_format == "text" else file_format

    def framer(self, tokenizer: Tokenizer) -> FrameFn:
        """Return a function that opens documents by the separator; raise DataError if there is none."""
        separator = tokenizer.special_tokens.separator
        if separator is None:
            raise DataError(
                "this tokenizer has no token that opens a document", "Train a tokenizer, or add <|endofdoc|>."
            )
        return lambda _number, ids: [separator, *ids]

    def summary(self) -> str:
        """Return one line about the corpus."""
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
    """Find the files and hash them; if ``hashed`` is false, only their beginnings are read.

    Raises:
        DataError: If a path is missing, unreadable, binary or empty, or the corpus has no text.
    """
    if not paths:
        raise DataError("no corpus was named", "Name text files or folders.")
    assert format == "auto" or format in FORMATS, "pairs.py reads pairs"
    sources, skipped = [], 0
    for named in paths:
        for path in _files(named, suffixes):
            if (probe := _probe_file(path, hashed)).problem:
                if path == named:
                    raise DataError(f"{path} {probe.problem}", probe.hint)
                skipped += 1
                continue
            name = path.name if path == named else f"{named.name}/{path.relative_to(named).as_posix()}"
            sources.append(CorpusFile(path, name, probe.num_bytes, probe.sha256))
    if not sources:
        which = f" ending in {', '.join(suffixes)}" if suffixes else ""
        where = ", ".join(map(str, paths))
        hint = (
            "Select files with --suffix, or leave it out for all text."
            if suffixes
            else "Name text files, or their folder."
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
    """Result of reading a file's beginning; ``problem`` says why it is not text, else ""."""

    num_bytes: int
    sha256: str
    problem: str = ""
    hint: str = ""


def _probe_file(path: Path, hashed: bool) -> _FileProbe:
    """Read the beginning up to the first text, and the whole file if it is hashed."""
    with open_decompressed(path) as file:
        first = file.read(PROBE_BYTES)
        if b"\0" in first:
            return _FileProbe(0, "", f"is binary (a zero byte at offset {first.index(0)}), not text")
        while first and not first.strip():
            first = file.read(1 << 20)
    if not first:
        return _FileProbe(0, "", "is empty", "A corpus needs text.")
    try:
        if not hashed:
            return _FileProbe(path.stat().st_size, "")
        with path.open("rb") as file:
            return _FileProbe(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def read_document(path: Path, errors: str = "strict") -> str:
    """Return a file's text without its byte order mark; DataErrors name file and byte."""
    return "".join(read_blocks(path, errors))


def _suggest_file(missing: Path) -> str:
    """Return a hint: a similar name, or the absolute path."""
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
            is_selected = not suffixes or path.suffix in suffixes or bare_suffix(path) in suffixes
            if is_selected and not name.startswith(".") and path.is_file():
                yield path
