"""Formats: decompression, and the start and end of documents in files.

==========  ================================================================  =====================================
format      a file is                                                         default for
==========  ================================================================  =====================================
``text``    one document                                                      everything else
``lines``   a document per line, empty ones skipped                           ``data.document_unit = "lines"``
``jsonl``   a JSON object per line; the document is its ``field``              ``.jsonl``, ``.ndjson``
``pairs``   a pair per line: ``source<TAB>target``, or two fields of an object an encoder-decoder (``pairs.py``)
==========  ================================================================  =====================================

``.gz`` and ``.zst`` files are decompressed. Only a newline ends a line. One piece of a text is in memory at a time: a
document of more than ``MAX_PIECE_CHARS`` characters is read in pieces, cut where a space follows a word, and each is
encoded separately (``text/base.py`` lists the tokenizers for which that changes no id: all but SentencePiece's, which
may see a space there). ``FORMATS`` is the table: a custom reader is one function and one line. No torch.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from kvad import storage
from kvad import text as text_lib
from kvad.errors import DataError, suggest

COMPRESSED = (".gz", ".zst")
JSON_LINES = (".jsonl", ".ndjson")
CHAT_HINT = "messages are conversations: kvad train --objective chat, kvad eval --task chat"
JSONL_HINT = "Write one JSON object per line."
READ_CHUNK = 1 << 20  # bytes read at a time


class TextPiece(NamedTuple):
    """Text or part of one."""

    text: str
    opens: bool = True  # begins a document
    closes: bool = True  # ends a document


FormatReader = Callable[[Path, str, str], Iterator[TextPiece]]  # (file, errors, field of JSON objects) -> pieces


def bare_suffix(path: Path) -> str:
    """Return the suffix without compression, such as ``.jsonl`` for ``x.jsonl.gz``."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def detect_format(path: Path, format: str) -> str:
    """Return the format of a file of documents; ``auto`` uses its name."""
    return format if format != "auto" else "jsonl" if bare_suffix(path) in JSON_LINES else "text"


@contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    """Open a file's decompressed bytes; DataErrors, also from the block, name the file."""
    try:
        with storage.filesystem.open_regular(path) as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw) as file:
                    yield cast("BinaryIO", file)
            elif path.suffix == ".zst":
                yield _zstd(path, raw)
            else:
                yield raw
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile, _DamagedFileError) as error:
        raise DataError(f"{path} is damaged or truncated: {error}", "Compress it again.") from None
    except OSError as error:
        hint = "Write it to a file; a corpus is read more than once." if error.errno == errno.EINVAL else ""
        raise DataError(f"cannot read {path}: {error.strerror}", hint) from error


class _DamagedFileError(Exception):
    pass


def _zstd(path: Path, raw: BinaryIO) -> BinaryIO:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise DataError(
            f"{path} is compressed by zstd, and zstandard is not installed", "pip install zstandard"
        ) from None

    class Frames(io.RawIOBase):
        """All frames of the file in order; an end within a frame is an error."""

        def __init__(self) -> None:
            self.frame = zstandard.ZstdDecompressor().decompressobj()
            self.compressed = self.pending = b""
            self.is_complete = True  # not within a frame

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            while not self.pending and self._decompress():
                pass
            size = min(len(buffer), len(self.pending))
            buffer[:size] = self.pending[:size]
            self.pending = self.pending[size:]
            return size

        def _decompress(self) -> bool:
            """Decompress more bytes; return False at the end."""
            block = self.compressed or raw.read(READ_CHUNK)
            if not block:
                if not self.is_complete:
                    raise _DamagedFileError("the last frame does not end")
                return False
            try:
                self.pending = self.frame.decompress(block)
            except zstandard.ZstdError as error:
                raise _DamagedFileError(str(error)) from None
            self.compressed, self.is_complete = self.frame.unused_data, self.frame.eof
            if self.is_complete:
                self.frame = zstandard.ZstdDecompressor().decompressobj()
            return True

    return io.BufferedReader(Frames(), READ_CHUNK)


def _not_utf8(path: Path, line: str, error: UnicodeDecodeError, offset: int) -> DataError:
    """Return the error for undecodable bytes in a buffer that begins at ``offset`` of the file."""
    place = f"byte 0x{error.object[error.start]:02X} at offset {offset + error.start}"
    hint = "Use --encoding-errors replace to substitute U+FFFD."
    return DataError(f"{path}, line {line}, is not UTF-8: {place}", hint)


def read_blocks(path: Path, errors: str) -> Iterator[str]:
    """Yield a file's text in blocks, without byte order mark; DataErrors name the place."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    offset, line, first = 0, 1, True
    with open_decompressed(path) as file:
        while True:
            block = file.read(READ_CHUNK)
            num_buffered = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                raise _not_utf8(path, f"{line:,}", error, offset - num_buffered) from None
            offset += len(block)
            line += text.count("\n")
            if text:
                yield text.removeprefix("\ufeff") if first else text
                first = False
            if not block:
                return


def read_lines(path: Path, errors: str) -> Iterator[str]:
    """Yield lines without their ends and without byte order mark; only a newline ends a line."""
    offset = 0
    with open_decompressed(path) as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8", errors)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, str(number), error, offset) from None
            offset += len(raw)
            yield line.removesuffix("\n").removesuffix("\r").removeprefix("\ufeff" if number == 1 else "")


def read_json_objects(path: Path, errors: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a JSONL file, without empty lines; DataErrors name file and line."""
    for number, line in enumerate(read_lines(path, errors), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}, is not JSON: {error}", JSONL_HINT) from None
        if not isinstance(content, dict):
            raise DataError(f"{path}, line {number}: must be an object, got {type(content).__name__}", JSONL_HINT)
        yield number, content


def json_field(where: str, content: dict[str, Any], field: str, kinds: tuple[type, ...] = (str,)) -> Any:
    """Return a field of an object, a text or of one of ``kinds``; DataErrors begin with ``where``."""
    if field not in content:
        hint = CHAT_HINT if "messages" in content else suggest(field, map(str, content)) if content else ""
        raise DataError(f"{where}: no field {field!r}", hint)
    value = content[field]
    if not isinstance(value, kinds) or isinstance(value, bool):
        expected = "a text or a whole number" if int in kinds else "a text"
        raise DataError(f"{where}: {field} must be {expected}, got {json.dumps(value)[:40]}")
    return value


def read_json_fields(path: Path, errors: str, *fields: str) -> Iterator[tuple[str, ...]]:
    """Yield the texts of ``fields`` of every object; DataErrors name file and line."""
    for number, content in read_json_objects(path, errors):
        yield tuple(json_field(f"{path}, line {number}", content, field) for field in fields)


def _pieces(blocks: Iterable[str]) -> Iterator[TextPiece]:
    """Yield the pieces of one document that is read in blocks."""
    pending, opens = "", True
    for block in chain(blocks, (None,)):
        pending += block or ""
        if block is None or len(pending) > 2 * text_lib.base.MAX_PIECE_CHARS:
            *complete, pending = text_lib.base.split_text(pending)
            for text in complete:
                yield TextPiece(text, opens, closes=False)
                opens = False
    yield TextPiece(pending, opens)


def _text(path: Path, errors: str, field: str) -> Iterator[TextPiece]:
    return _pieces(read_blocks(path, errors))


def _lines(path: Path, errors: str, field: str) -> Iterator[TextPiece]:
    if bare_suffix(path) in JSON_LINES:
        raise DataError(f"{path} has the name of JSON lines", "Use --format jsonl or --format text.")
    for line in read_lines(path, errors):
        if line.strip():
            yield from _pieces([line])


def _jsonl(path: Path, errors: str, field: str) -> Iterator[TextPiece]:
    for (text,) in read_json_fields(path, errors, field):
        if text.strip():
            yield from _pieces([text])


FORMATS: dict[str, FormatReader] = {"text": _text, "lines": _lines, "jsonl": _jsonl}
