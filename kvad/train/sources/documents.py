"""Documents from files and folders: one per file, line or JSON object, in a fixed order.

A folder is read recursively, its files sorted by path; hidden files are skipped, and so are binary and empty ones
unless they were named. A file is text if its beginning has no zero byte; it must be UTF-8, or ``errors="replace"``
substitutes U+FFFD. Formats are in ``formats.py``; only one piece of a document is in memory at a time.
"""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from kvad import storage
from kvad.errors import DataError, format_count, suggest_path
from kvad.text import Tokenizer
from kvad.train.sources.formats import FORMATS, TextPiece, bare_suffix, detect_format, open_decompressed, read_blocks

FrameFn = Callable[[int, list[int]], list[int]]  # (index of a text, its ids) -> framed ids
Progress = Callable[[int, int], None]  # (characters read, tokens made), in total

TOKEN_FILE = re.compile(r"offsets\.bin|tokens-\d{5}\.bin")  # of a token store (``data/token_store.py``)
PROBE_BYTES = 8192  # a zero byte within these means binary


@dataclass(frozen=True)
class CorpusFile:
    """File of documents."""

    path: Path
    name: str  # relative to the named path
    num_bytes: int
    sha256: str  # of the raw bytes; "" for streams, which compare names and sizes


def describe_files(sources: Sequence[CorpusFile]) -> str:
    """Return the number and size of files, such as "3 files, 1.2 MB"."""
    return f"{format_count(len(sources), 'file')}, {sum(source.num_bytes for source in sources) / 1e6:,.1f} MB"


class Corpus(ABC):
    """Texts of files that were read once; ``texts`` and ``pieces`` read them again."""

    sources: tuple[CorpusFile, ...]
    errors: str  # "strict" or "replace"
    noun: ClassVar[str] = "document"  # for one text
    labels: tuple[str, ...] = ()  # of tags or texts
    num_held_out: int = 0  # texts at the end that are for validation only; 0 holds out a fraction

    @abstractmethod
    def texts(self) -> Iterator[str]:
        """Yield the texts in order; may be called repeatedly. DataErrors name file and line."""

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the texts in order, long documents in pieces."""
        return map(TextPiece, self.texts())

    def settings(self) -> dict[str, Any]:
        """Return everything that determines the texts and their framing."""
        entries = [{"name": source.name, "bytes": source.num_bytes, "sha256": source.sha256} for source in self.sources]
        return {"errors": self.errors, "sources": entries}

    def framer(self, tokenizer: Tokenizer) -> FrameFn:
        """Return the framing function, by default the tokenizer's; raise DataError if the tokenizer lacks a token."""
        return lambda _number, ids: tokenizer.add_special_tokens(ids)

    @abstractmethod
    def summary(self) -> str:
        """Return one line about the corpus."""

    def template_files(self, tokenizer: Tokenizer) -> dict[str, bytes]:
        """Return the chat template as checkpoint files by name; {} for texts without one."""
        return {}


@dataclass(frozen=True)
class DocumentCorpus(Corpus):
    """Documents of the named files and folders."""

    sources: tuple[CorpusFile, ...]
    skipped: int  # binary and empty files of named folders
    errors: str
    one_per_line: bool = False  # every non-empty line is a document
    format: str = "auto"
    field: str = "text"  # of JSON objects
    # opened by the separator, framed like an encoder's input ([CLS] x [SEP]), or not framed
    frame: Literal["separator", "tokenizer", "none"] = "separator"

    def texts(self) -> Iterator[str]:
        parts: list[str] = []
        for piece in self._pieces():
            parts.append(piece.text)
            if piece.closes:
                yield "".join(parts)
                parts = []

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the documents in order, long ones in pieces unless a frame encloses each of them."""
        return self._pieces() if self.frame == "separator" else map(TextPiece, self.texts())

    def _pieces(self) -> Iterator[TextPiece]:
        for source in self.sources:
            yield from FORMATS[self._file_format(source.path)](source.path, self.errors, self.field)

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        if self.one_per_line:
            settings["documents"] = "lines"
        formats = {self._file_format(source.path) for source in self.sources} - {"text", "lines"}
        if formats:
            settings |= {"formats": sorted(formats), "field": self.field}
        if self.frame != "separator":
            settings["frame"] = self.frame
        return settings

    @property
    def whole_files(self) -> bool:
        """True if every file is one document."""
        return all(self._file_format(source.path) == "text" for source in self.sources)

    def _file_format(self, path: Path) -> str:
        file_format = detect_format(path, self.format)
        return "lines" if self.one_per_line and file_format == "text" else file_format

    def framer(self, tokenizer: Tokenizer) -> FrameFn:
        if self.frame != "separator":
            return super().framer(tokenizer) if self.frame == "tokenizer" else lambda _number, ids: ids
        separator = tokenizer.special_tokens.separator
        if separator is None:
            raise DataError(
                "this tokenizer has no token that opens a document", "Train a tokenizer, or add <|endofdoc|>."
            )
        return lambda _number, ids: [separator, *ids]

    def summary(self) -> str:
        skipped = f"; {format_count(self.skipped, 'binary or empty one')} left out" if self.skipped else ""
        return f"corpus: {describe_files(self.sources)}{skipped}"


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

    Raises DataError if a path is missing, unreadable, binary or empty, or the corpus has no text.
    """
    if not paths:
        raise DataError("no corpus was named", "Name text files or folders.")
    assert format == "auto" or format in FORMATS, "pairs.py reads pairs"
    sources, skipped = [], 0
    for named in paths:
        for path in _files(named, suffixes):
            name = path.name if path == named else f"{named.name}/{path.relative_to(named).as_posix()}"
            try:
                sources.append(probe_file(path, name, hashed=hashed))
            except NotTextError:
                if path == named:
                    raise
                skipped += 1
    if not sources:
        which, hint = "", "Name text files, or their folder."
        if suffixes:
            which = f" ending in {', '.join(suffixes)}"
            hint = "Select files with --suffix, or leave it out for all text."
        if skipped:
            hint = f"{format_count(skipped, 'file')} there {'is' if skipped == 1 else 'are'} empty or binary"
        raise DataError(f"no text files{which} in {', '.join(map(str, paths))}", hint)
    lines = lines or format == "lines"
    return DocumentCorpus(tuple(sources), skipped, errors, lines, "auto" if format == "lines" else format, field)


class NotTextError(DataError):
    """A file is binary or empty."""


def probe_file(path: Path, name: str, *, hashed: bool = True, may_be_empty: bool = False) -> CorpusFile:
    """Read a file up to its first text, or all of it if hashed; raise NotTextError if it is binary or empty."""
    with open_decompressed(path) as file:
        first = file.read(PROBE_BYTES)
        if b"\0" in first:
            raise NotTextError(f"{path} is binary (a zero byte at offset {first.index(0)}), not text")
        while not may_be_empty and first and not first.strip():
            first = file.read(1 << 20)
    if not first and not may_be_empty:
        raise NotTextError(f"{path} is empty", "A corpus needs text.")
    try:
        with storage.filesystem.open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest() if hashed else ""
        return CorpusFile(path, name, path.stat().st_size, digest)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def read_document(path: Path) -> str:
    """Return a file's text without its byte order mark; bytes that are not UTF-8 are replaced."""
    return "".join(read_blocks(path, "replace"))


def _files(named: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    if not named.exists():
        close = suggest_path(named)
        hint = f"looked for {named.absolute()}" if close is None else f"did you mean {str(close)!r}?"
        raise DataError(f"no such file or folder: {named}", hint)
    if not named.is_dir():
        yield named
        return

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error

    for folder, inner, names in os.walk(named, onerror=fail):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        if not suffixes and any(map(TOKEN_FILE.fullmatch, names)):
            hint = "Name that folder itself to train on it, or select text files with --suffix."
            raise DataError(f"{folder} has tokens, as kvad data prepare writes them, and no text", hint)
        for name in sorted(names):
            path = Path(folder, name)
            is_selected = not suffixes or path.suffix in suffixes or bare_suffix(path) in suffixes
            if is_selected and not name.startswith(".") and path.is_file():
                yield path
