"""A piece of a cache in a file: a session, a parked row, a block of a prefix.  Whole, ours and unchanged, or refused.

    magic        8 bytes   KVADKV01
    size         8 bytes   of the header, little-endian
    crc          4 bytes   crc32 of magic, size and header
    header       JSON      {"kind", "identity": {...}, "facts": {...}, "sections": [[name, dtype, shape, bytes, crc32]]}
                           and spaces, so that the sections begin at a multiple of 64
    sections     raw bytes, one behind the other
    end          8 bytes   KVADEND\\n

Every byte is under a checksum, and the file's length is known from its header, so a flipped bit, a cut or a longer file
is seen before anything of it is used.  ``identity`` says what it belongs to (``identity.py``); ``facts`` are the
writer's own, plain JSON.

Written beside its final name, for its owner only, and renamed when whole (``aside.py``); ``durable`` flushes file and
folder, so that when :func:`write_entry` returns, a power cut cannot take it back.  Without it the checksums alone stand
between a power cut and a wrong number: enough for what can be computed again.

Standard library only; no torch.  Never: pickle, a path from a file, an allocation that a header asks for and the file's
own length does not bear out.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from kvad.errors import StorageError
from kvad.storage.filesystem import REAL_FILE_SYSTEM, Buffer, FileSystem
from kvad.storage.temp_paths import temp_path

MAGIC, END = b"KVADKV01", b"KVADEND\n"
_SIZE, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_PREFIX = len(MAGIC) + _SIZE.size + _CRC.size
MAX_HEADER_BYTES = 64 << 20
READ_CHUNK = 1 << 20  # bytes read at a time where only their checksum is wanted
MAX_CACHED_BYTES = 64 << 20  # bytes of the largest file that is read in one go
PAGES = 64 << 10  # bytes from which on memory to read into has pages of its own
ALIGNED = 64  # bytes, a multiple of which stands before the sections: so they can be numbers where they are
WIDTHS = {  # bytes of a number, by its name in torch
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


class Section(NamedTuple):
    """Numbers by name: ``data`` are those of a contiguous array of ``shape``, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer


class SectionInfo(NamedTuple):
    """Where a section lies in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    crc: int
    offset: int


class Header(NamedTuple):
    """What a file says of itself, checked; ``nbytes``: of the whole file."""

    kind: str
    fingerprint: Mapping[str, str]
    metadata: Mapping[str, Any]
    sections: Mapping[str, SectionInfo]
    nbytes: int


def write_container(
    path: Path,
    kind: str,
    identity: Mapping[str, str],
    facts: Mapping[str, Any],
    sections: Sequence[Section],
    *,
    durable: bool,
    disk: FileSystem = REAL_FILE_SYSTEM,
) -> int:
    """Write ``path``, or leave what was there; returns the bytes of the file.  OSError as the disk says it."""
    sizes = [memoryview(each.data).nbytes for each in sections]
    told = [
        [each.name, each.dtype, list(each.shape), size, crc32(each.data)]
        for each, size in zip(sections, sizes, strict=True)
    ]
    assert len({each.name for each in sections}) == len(sections), "two sections of one name"
    header = json.dumps({"kind": kind, "identity": dict(identity), "facts": dict(facts), "sections": told}).encode()
    header += b" " * (-(_PREFIX + len(header)) % ALIGNED)
    assert len(header) <= MAX_HEADER_BYTES, f"a header of {len(header)} bytes"
    start = MAGIC + _SIZE.pack(len(header))
    temporary = temp_path(path, "tmp")
    file = disk.create(temporary)
    try:
        try:
            disk.write(file, start + _CRC.pack(crc32(header, crc32(start))) + header)
            for each in sections:
                disk.write(file, each.data)
            disk.write(file, END)
            if durable:
                disk.sync(file)
        finally:
            disk.close(file)
        disk.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            disk.remove(temporary)
        raise
    if durable:
        disk.sync_dir(path.parent)
    return _PREFIX + len(header) + sum(sizes) + len(END)


class ContainerFile:
    """An open file, its header read.  A section is checked as it is read: nothing that is wrong is ever returned.

    ``whole``: all of it is read at once (up to WHOLE bytes), and sections are views of that.
    """

    def __init__(self, path: Path, file: int, disk: FileSystem, *, whole: bool = False) -> None:
        self.path, self._file, self._disk = path, file, disk
        self._size = disk.size(file)
        self._held: memoryview | None = None
        if whole and self._size <= MAX_CACHED_BYTES:
            held = _room(self._size)
            self._held = held[: disk.read(file, held, 0)]
        self.header = self._header()

    def read(self, name: str, into: Buffer | None = None) -> memoryview:
        """The bytes of a section, in ``into`` (of that size) where given.  EntryError: it was damaged."""
        section = self.header.sections.get(name)
        if section is None:
            raise StorageError(f"{self.path}: it has no {name}", reason="alien")
        if into is None and self._held is not None:
            target = self._held[section.offset : section.offset + section.nbytes]
        else:
            target = _room(section.nbytes) if into is None else memoryview(into).cast("B")
            assert len(target) == section.nbytes, f"{len(target)} bytes for the {section.nbytes} of {name}"
            target = target[: self._disk.read(self._file, target, section.offset)]
        if len(target) != section.nbytes:
            raise self._torn(f"{name} was cut")
        if crc32(target) != section.crc:
            raise self._torn(f"{name} is not what was written")
        return target

    def check(self) -> None:
        """Read all of it, in pieces.  EntryError: something was damaged."""
        piece = memoryview(bytearray(READ_CHUNK))
        for section in self.header.sections.values():
            crc, at = 0, 0
            while at < section.nbytes:
                part = piece[: min(READ_CHUNK, section.nbytes - at)]
                if self._disk.read(self._file, part, section.offset + at) != len(part):
                    raise self._torn(f"{section.name} was cut")
                crc, at = crc32(part, crc), at + len(part)
            if crc != section.crc:
                raise self._torn(f"{section.name} is not what was written")

    def _header(self) -> Header:
        size = self._size
        begun = self._bytes(0, min(size, len(MAGIC)))
        if not MAGIC.startswith(begun):  # however short: what is not ours is not torn
            ours = begun[: len(MAGIC) - 2] == MAGIC[:-2]
            what = "it was written by another version of kvad" if ours else "it is not a file of kvad's cache"
            raise StorageError(f"{self.path}: {what}", "it is left as it is", reason="alien")
        start = self._bytes(0, _PREFIX)
        (length,) = _SIZE.unpack(start[len(MAGIC) : len(MAGIC) + _SIZE.size])
        if length > min(MAX_HEADER_BYTES, size - _PREFIX - len(END)):
            raise self._torn("its header is cut")
        raw = self._bytes(_PREFIX, length)
        if _CRC.unpack(start[-_CRC.size :])[0] != crc32(raw, crc32(start[: -_CRC.size])):
            raise self._torn("its header is not what was written")
        header = _parsed(raw, _PREFIX + length)
        if header is None:
            raise StorageError(
                f"{self.path}: its header is none of this version's", "it is left as it is", reason="alien"
            )
        if header.nbytes != size:
            raise self._torn(f"{size:,} bytes, its header says {header.nbytes:,}")
        if self._bytes(size - len(END), len(END)) != END:
            raise self._torn("its end is not what was written")
        return header

    def _bytes(self, offset: int, count: int) -> bytes:
        if self._held is not None:
            found = bytes(self._held[offset : offset + count])
        else:
            target = bytearray(count)
            found = bytes(target[: self._disk.read(self._file, target, offset)])
        if len(found) != count:
            raise self._torn("it was cut")
        return found

    def _torn(self, what: str) -> StorageError:
        return StorageError(f"{self.path}: {what}: the file is damaged", "nothing of it is used", reason="torn")


@contextmanager
def open_container(path: Path, disk: FileSystem = REAL_FILE_SYSTEM, *, whole: bool = False) -> Iterator[ContainerFile]:
    """An open file (``whole``: see :class:`Entry`).

    EntryError for a file that is missing, damaged or not ours; OSError as the disk says it, with the file's name."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        raise StorageError(f"{path} does not exist", reason="missing") from None
    try:
        yield ContainerFile(path, file, disk, whole=whole)
    except OSError as error:
        error.filename = error.filename or str(path)  # reading knows a number, no name
        raise
    finally:
        disk.close(file)


def read_header(path: Path, disk: FileSystem = REAL_FILE_SYSTEM) -> Header:
    """What a file says of itself; its sections are not read."""
    with open_container(path, disk) as entry:
        return entry.header


def _room(nbytes: int) -> memoryview:
    """New memory to read into.  Pages of its own where it is large: the system hands them over while it reads, and no
    other thread waits for that, as all do while a bytearray is filled with zeros."""
    if nbytes < PAGES:
        return memoryview(bytearray(nbytes))
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _parsed(raw: bytes, offset: int) -> Header | None:
    """None: not as this version writes it."""
    try:
        content = json.loads(raw)
        kind, identity, facts, sections = (content[key] for key in ("kind", "identity", "facts", "sections"))
        if not (isinstance(kind, str) and isinstance(identity, dict) and isinstance(facts, dict)):
            return None
        if any(type(value) is not str for value in identity.values()):
            return None
        stored: dict[str, SectionInfo] = {}
        for name, dtype, shape, nbytes, crc in sections:
            numbers = WIDTHS[dtype]
            for count in shape:
                if type(count) is not int or count < 0:
                    return None
                numbers *= count
            if not isinstance(name, str) or name in stored or type(crc) is not int or numbers != nbytes:
                return None
            stored[name] = SectionInfo(name, dtype, tuple(shape), nbytes, crc, offset)
            offset += nbytes
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return Header(kind, identity, facts, stored, offset + len(END))
