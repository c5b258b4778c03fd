"""Files -> texts: what is compressed is opened, and a format says where a document begins and ends.

==========  ================================================================  =====================================
format      a file is                                                         of itself for
==========  ================================================================  =====================================
``text``    one document                                                      everything else
``lines``   a document a line, empty ones left out                            ``data.documents = "lines"``
``jsonl``   a JSON object a line; the document is its ``field``                ``.jsonl``, ``.ndjson``
``pairs``   a pair a line: ``source<TAB>target``, or two fields of an object   an encoder-decoder (``pairs.py``)
==========  ================================================================  =====================================

``.gz`` and ``.zst`` behind a name are read through.  Only a newline ends a line.  Nothing is held but one piece of a
text: a document of more than ``CUT_CHARS`` characters comes in pieces, cut where a space follows a word, and each is
encoded apart (``text/base.py`` says for which tokenizers that changes no id: all but SentencePiece's, which may see a
space there).  :data:`FORMATS` is the table: a reader of one's own is one function and one line.  No torch.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from kvad import text as text_lib
from kvad.errors import DataError, suggest

COMPRESSED = (".gz", ".zst")
JSON_LINES = (".jsonl", ".ndjson")
CHAT_HINT = "messages are conversations: kvad train --objective chat, kvad eval --task chat"
READ_CHUNK = 1 << 20  # bytes read at a time


class TextPiece(NamedTuple):
    """A text, or a part of one: whether it begins and whether it ends a document."""

    text: str
    opens: bool = True
    closes: bool = True


class ReadOptions(NamedTuple):
    """How to read: ``errors`` of bytes that are not UTF-8 (``strict``, ``replace``), ``field`` of an object's text."""

    errors: str = "strict"
    field: str = "text"


FormatReader = Callable[[Path, ReadOptions], Iterator[TextPiece]]


def bare_suffix(path: Path) -> str:
    """``.jsonl`` of ``x.jsonl.gz``."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def detect_format(path: Path, wanted: str) -> str:
    """The format of a file of documents; ``auto`` goes by its name."""
    return wanted if wanted != "auto" else "jsonl" if bare_suffix(path) in JSON_LINES else "text"


@contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed.  Raises DataError naming it, in the block too."""
    try:
        with path.open("rb") as raw:
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
        raise DataError(f"{path} is damaged or cut short: {error}", "compress it again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


class _DamagedFileError(Exception):
    pass


def _zstd(path: Path, raw: BinaryIO) -> BinaryIO:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise DataError(
            f"{path} is compressed by zstd, and zstandard is not installed", "pip install 'kvad[zstd]'"
        ) from None

    class Frames(io.RawIOBase):
        """All frames of the file, one behind the other; an end in the middle of one is an error."""

        def __init__(self) -> None:
            self.frame = zstandard.ZstdDecompressor().decompressobj()
            self.compressed = self.held = b""
            self.whole = True  # no frame is begun and not ended

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            while not self.held and self._decompress():
                pass
            size = min(len(buffer), len(self.held))
            buffer[:size] = self.held[:size]
            self.held = self.held[size:]
            return size

        def _decompress(self) -> bool:
            """Some more of it; False at the end."""
            block = self.compressed or raw.read(READ_CHUNK)
            if not block:
                if not self.whole:
                    raise _DamagedFileError("the last frame does not end")
                return False
            try:
                self.held = self.frame.decompress(block)
            except zstandard.ZstdError as error:
                raise _DamagedFileError(str(error)) from None
            self.compressed, self.whole = self.frame.unused_data, self.frame.eof
            if self.whole:
                self.frame = zstandard.ZstdDecompressor().decompressobj()
            return True

    return io.BufferedReader(Frames(), READ_CHUNK)


def read_blocks(path: Path, errors: str) -> Iterator[str]:
    """A file's text a block at a time, without its byte order mark.  Raises DataError naming file, line and byte."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    offset, line, first = 0, 1, True
    with open_decompressed(path) as file:
        while True:
            block = file.read(READ_CHUNK)
            kept = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                raise DataError(
                    f"{path}, line {line:,}, is not UTF-8: byte 0x{error.object[error.start]:02X} at offset "
                    f"{offset - kept + error.start}",
                    "--errors replace puts U+FFFD in its place",
                ) from None
            offset += len(block)
            line += text.count("\n")
            if text:
                yield text.removeprefix("\ufeff") if first else text
                first = False
            if not block:
                return


def read_lines(path: Path, errors: str) -> Iterator[str]:
    """Lines without their ends and without the byte order mark; only a newline ends a line."""
    offset = 0
    with open_decompressed(path) as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8", errors)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}, is not UTF-8: byte 0x{raw[error.start]:02X} at offset "
                    f"{offset + error.start}",
                    "--errors replace puts U+FFFD in its place",
                ) from None
            offset += len(raw)
            yield line.removesuffix("\n").removesuffix("\r").removeprefix("\ufeff" if number == 1 else "")


def read_json_fields(path: Path, errors: str, *fields: str) -> Iterator[tuple[str, ...]]:
    """The texts of ``fields`` of every object of a file of JSON lines.  Raises DataError naming file and line."""
    for number, line in enumerate(read_lines(path, errors), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            found = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}, is not JSON: {error}", "a JSON object a line") from None
        if not isinstance(found, dict):
            raise DataError(f"{where}, is {type(found).__name__}, not an object", "a JSON object a line")
        for field in fields:
            if field not in found:
                hint = CHAT_HINT if "messages" in found else suggest(field, map(str, found))
                raise DataError(f"{where}, has no field {field!r}", hint)
            if not isinstance(found[field], str):
                raise DataError(f"{where}: the field {field!r} is {type(found[field]).__name__}, not a text")
        yield tuple(found[field] for field in fields)


def _text(path: Path, how: ReadOptions) -> Iterator[TextPiece]:
    held, opens = "", True
    for block in read_blocks(path, how.errors):
        held += block
        if len(held) > 2 * text_lib.base.MAX_PIECE_CHARS:
            *whole, held = text_lib.base.split_text(held)
            for text in whole:
                yield TextPiece(text, opens, closes=False)
                opens = False
    *whole, held = text_lib.base.split_text(held)
    for text in whole:
        yield TextPiece(text, opens, closes=False)
        opens = False
    yield TextPiece(held, opens)


def _pieces(text: str) -> Iterator[TextPiece]:
    whole = list(text_lib.base.split_text(text))
    for number, part in enumerate(whole):
        yield TextPiece(part, number == 0, number == len(whole) - 1)


def _lines(path: Path, how: ReadOptions) -> Iterator[TextPiece]:
    if bare_suffix(path) in JSON_LINES:
        raise DataError(f"{path} is named like JSON lines", "--format jsonl, or --format text")
    for line in read_lines(path, how.errors):
        if line.strip():
            yield from _pieces(line)


def _jsonl(path: Path, how: ReadOptions) -> Iterator[TextPiece]:
    for (text,) in read_json_fields(path, how.errors, how.field):
        if text.strip():
            yield from _pieces(text)


FORMATS: dict[str, FormatReader] = {"text": _text, "lines": _lines, "jsonl": _jsonl}
