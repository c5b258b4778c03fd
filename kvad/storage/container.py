r"""Checksummed container files: sessions, swapped sequences, blocks and pinned prefixes.

    magic        8 bytes   KVADKV02
    size         8 bytes   of the header, little-endian
    crc          4 bytes   crc32 of magic, size and header
    header       JSON      {"kind", "fingerprint": {...}, "metadata": {...},
                            "sections": [[name, dtype, shape, bytes, crc32]]},
                           padded with spaces, so that the sections begin at a multiple of 64
    sections     raw bytes, concatenated
    end          8 bytes   KVADEND\n

Every byte is covered by a checksum, and the header gives the file's length, so a flipped bit, a truncated or a longer
file is detected before any of it is used. ``fingerprint`` identifies the model and the cache (``CacheFingerprint``);
``metadata`` is plain JSON of the writer.

A file is written under a temporary name, readable by its owner only, and renamed when complete (``temp_paths.py``).
With ``durable``, file and folder are flushed, so that a power cut after ``write_container`` cannot undo it.
Without it, only the checksums protect against a power cut: enough for data that can be recomputed.

Standard library only; no torch. Never: pickle, a path taken from a file, an allocation that a header requests and the
file's length does not justify.
"""

from __future__ import annotations

import errno
import json
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from kvad.errors import StorageError
from kvad.storage import strict_json
from kvad.storage.filesystem import REAL_FILE_SYSTEM, Buffer, FileSystem
from kvad.storage.temp_paths import temp_path

MAGIC, END = b"KVADKV02", b"KVADEND\n"
_SIZE, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_PREFIX = len(MAGIC) + _SIZE.size + _CRC.size
MAX_HEADER_BYTES = 64 << 20
READ_CHUNK = 1 << 20  # bytes read at a time if only the checksum is needed
MAX_CACHED_BYTES = 64 << 20  # size of the largest file that is read at once
PAGES = 64 << 10  # size in bytes from which a read buffer gets separate pages
HUGE_PAGE = 2 << 20  # bytes
ALIGNED = 64  # The sections begin at a multiple of this, so that they can be used as numbers in place.
WIDTHS = {  # bytes of a number, by the name of its torch dtype
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


FORMAT_VERSION = "2"  # of CacheFingerprint


@dataclass(frozen=True)
class CacheFingerprint:
    """Identity of stored keys and values: named parts that must be equal before use.

        model       all weights and the architecture
        adapter     adapter merged into the weights, and the one that requests choose; absent without one
        tokenizer   and template: how text became token ids ("" if ids were given)
        keys        values, policy, rotate, endless, summaries: cache formats and policy
        computed    dtype of the computation, and whether it is batch-invariant
        regime      rotary regime, which depends on the sequence's length (dynamic, longrope)
        salt        of the tenant: stored blocks are found only by requests with the same salt
        version     of this list

    Block size, layout and devices are not included: stored blocks move between those.
    """

    parts: Mapping[str, str]

    def __init__(self, **parts: str) -> None:
        object.__setattr__(self, "parts", {"version": FORMAT_VERSION, **dict(sorted(parts.items()))})

    def differences(self, other: Mapping[str, str]) -> Iterator[str]:
        """Yield the parts that differ: "model", or "policy: full here, window(64) there"."""
        for name in dict.fromkeys([*self.parts, *other]):
            here, there = self.parts.get(name, ""), other.get(name, "")
            if here != there:
                plain = len(here) + len(there) <= 80 and name not in ("model", "tokenizer", "template", "salt")
                yield f"{name}: {here or 'none'} here, {there or 'none'} there" if plain else name

    def digest(self) -> bytes:
        """Return a 16-byte hash of all parts."""
        hasher = blake2b(digest_size=16)
        for name, value in sorted(self.parts.items()):
            for text in (name, value):
                hasher.update(len(text.encode()).to_bytes(8, "little") + text.encode())
        return hasher.digest()


class Section(NamedTuple):
    """A named array: ``data`` is its contiguous, little-endian content."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer


class SectionInfo(NamedTuple):
    """Position and checksum of a section in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    crc: int
    offset: int


class Header(NamedTuple):
    """The verified header of a container; ``nbytes`` is the size of the file."""

    kind: str
    fingerprint: Mapping[str, str]
    metadata: Mapping[str, Any]
    sections: Mapping[str, SectionInfo]
    nbytes: int


def write_container(
    path: Path,
    kind: str,
    fingerprint: Mapping[str, str],
    metadata: Mapping[str, Any],
    sections: Sequence[Section],
    *,
    durable: bool,
    check_replace: Callable[[], None] | None = None,
    fs: FileSystem = REAL_FILE_SYSTEM,
) -> int:
    """Write a container atomically and return its size in bytes; on failure (OSError) the previous file stays.

    ``kind`` is "session", for example; the sections have unique names. ``check_replace`` is called before the file is
    replaced, while the folder is locked, and may raise to keep the previous file.
    """
    infos = [[name, dtype, list(shape), memoryview(data).nbytes, crc32(data)] for name, dtype, shape, data in sections]
    assert len({section.name for section in sections}) == len(sections), "duplicate section name"
    header = _encode_header({"kind": kind, "fingerprint": fingerprint, "metadata": metadata, "sections": infos})
    temporary = temp_path(path, "tmp")
    file = fs.create(temporary)
    try:
        try:
            fs.write(file, header)
            for section in sections:
                fs.write(file, section.data)
            fs.write(file, END)
            if durable:
                fs.sync(file)
        finally:
            fs.close(file)
        with fs.locked_folder(path.parent) if check_replace is not None else nullcontext():
            if check_replace is not None:
                check_replace()
            fs.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            fs.remove(temporary)
        raise
    if durable:
        fs.sync_dir(path.parent)
    return len(header) + sum(memoryview(section.data).nbytes for section in sections) + len(END)


def _encode_header(content: Mapping[str, Any], nbytes: int = 0) -> bytes:
    """Return all that precedes the sections, padded to ``nbytes`` at least."""
    text = json.dumps({name: dict(x) if isinstance(x, Mapping) else x for name, x in content.items()}).encode()
    text += b" " * max(nbytes - _PREFIX - len(text), -(_PREFIX + len(text)) % ALIGNED)
    assert len(text) <= MAX_HEADER_BYTES, f"a header of {len(text)} bytes"
    start = MAGIC + _SIZE.pack(len(text))
    return start + _CRC.pack(crc32(text, crc32(start))) + text


class ContainerWriter:
    """Writes a container of bytes section by section, when their sizes are not known before.

    The header is written last, into ``header_bytes`` that are reserved for it. ``close`` removes a file that was not
    committed. Sections are padded to multiples of ALIGNED, and the last one to the end of the file.

    The file grows by whole huge pages: then Linux caches it in huge pages, and a process that maps it has one page
    fault and one entry in its page tables per 2 MiB instead of 4 KiB.

    Raises:
        OSError: If an operation of the disk fails. The previous file is then unchanged.
    """

    def __init__(self, path: Path, header_bytes: int, fs: FileSystem = REAL_FILE_SYSTEM) -> None:
        self.path, self.file, self._fs = path, -1, fs
        self._temporary = temp_path(path, "tmp")
        self._start = self.end = header_bytes + -header_bytes % ALIGNED
        self._infos: list[list[Any]] = []
        self._size = 0  # of the file
        self.file = fs.create(self._temporary)

    def write(self, name: str, data: Buffer) -> int:
        """Append a section and return its position in the file."""
        content, offset = memoryview(data).cast("B"), self.end
        padding = bytes(-len(content) % ALIGNED)
        while self._size < offset:
            self._grow(memoryview(b""))
        inside = self._size - offset
        self._fs.write_at(self.file, content[:inside], offset)
        if len(content) > inside:
            self._grow(content[inside:])
        nbytes = len(content) + len(padding)
        self._infos.append([name, "uint8", [nbytes], nbytes, crc32(padding, crc32(content))])
        self.end += nbytes
        return offset

    def _grow(self, content: memoryview) -> None:
        """Append bytes, then zeros up to a whole number of huge pages, at least one."""
        whole = len(content) // HUGE_PAGE * HUGE_PAGE
        self._fs.write_at(self.file, content[:whole], self._size)
        if whole < max(1, len(content)):
            rest = bytes(content[whole:])
            self._fs.write_at(self.file, rest + bytes(HUGE_PAGE - len(rest)), self._size + whole)
            whole += HUGE_PAGE
        self._size += whole

    def commit(self, kind: str, fingerprint: Mapping[str, str]) -> None:
        """Write the header and give the file its name; power cuts are detected by checksums only."""
        if self._infos:
            while self._size < self.end + len(END):
                self._grow(memoryview(b""))
            name, dtype, _, nbytes, crc = self._infos.pop()  # the last section ends with the file
            unused = self._size - self.end - len(END)
            self._infos.append([name, dtype, [nbytes + unused], nbytes + unused, crc32(bytes(unused), crc)])
            self.end += unused
        content = {"kind": kind, "fingerprint": fingerprint, "metadata": {}, "sections": self._infos}
        header = _encode_header(content, self._start)
        assert len(header) == self._start, f"a header of {len(header)} bytes, {self._start} are reserved"
        self._fs.write_at(self.file, END, self.end)
        self._fs.write_at(self.file, header, 0)
        self._fs.replace(self._temporary, self.path)

    def close(self) -> None:
        """Close the file; one that was not committed is removed."""
        with suppress(OSError):
            self._fs.remove(self._temporary)
        with suppress(OSError):
            self._fs.close(self.file)


class ContainerFile:
    """An open container with a verified header. Each section is verified when it is read.

    ``whole`` reads a file of up to MAX_CACHED_BYTES at once; sections are then views of it.
    """

    def __init__(self, path: Path, file: int, fs: FileSystem, *, whole: bool = False) -> None:
        self.path, self._file, self._fs = path, file, fs
        self._size = fs.size(file)
        self._content: memoryview | None = None
        if whole and self._size <= MAX_CACHED_BYTES:
            buffer = _allocate(self._size)
            self._content = buffer[: fs.read(file, buffer, 0)]
        self.header = self._header()

    def read(self, name: str, into: Buffer | None = None) -> memoryview:
        """Return the bytes of a section; ``into`` is a buffer of its size to read into.

        Raises:
            StorageError: If the section is missing or damaged.
        """
        section = self.header.sections.get(name)
        if section is None:
            raise StorageError(f"{self.path}: section {name} is missing", reason="foreign")
        if into is None and self._content is not None:
            target = self._content[section.offset : section.offset + section.nbytes]
        else:
            target = _allocate(section.nbytes) if into is None else memoryview(into).cast("B")
            assert len(target) == section.nbytes, f"{name}: buffer of {len(target)} bytes, section of {section.nbytes}"
            target = target[: self._fs.read(self._file, target, section.offset)]
        if len(target) != section.nbytes:
            raise self._damaged(f"section {name} is truncated")
        if crc32(target) != section.crc:
            raise self._damaged(f"section {name} has a wrong checksum")
        return target

    def map(self) -> mmap.mmap:
        """Map the file, which must not be truncated while it is in use; sections are not verified."""
        return self._fs.map(self._file, 0, self._size)

    def check(self) -> None:
        """Read and verify the whole file in chunks; StorageError if any section is damaged."""
        for section in self.header.sections.values():
            crc = 0
            for at in range(0, section.nbytes, READ_CHUNK):
                crc = crc32(self._bytes(section.offset + at, min(READ_CHUNK, section.nbytes - at)), crc)
            if crc != section.crc:
                raise self._damaged(f"section {section.name} has a wrong checksum")

    def _header(self) -> Header:
        size = self._size
        magic = self._bytes(0, min(size, len(MAGIC)))
        if not MAGIC.startswith(magic):  # A short foreign file is foreign, not damaged.
            problem, hint = f"{self.path}: not a cache file of kvad", "The file is left unchanged."
            if magic[: len(MAGIC) - 2] == MAGIC[:-2]:
                problem, hint = f"{self.path}: written by another version of kvad", rewrite_hint(self.path)
            raise StorageError(problem, hint, reason="foreign")
        start = self._bytes(0, _PREFIX)
        (length,) = _SIZE.unpack(start[len(MAGIC) : len(MAGIC) + _SIZE.size])
        if length > min(MAX_HEADER_BYTES, size - _PREFIX - len(END)):
            raise self._damaged("the header is truncated")
        raw = self._bytes(_PREFIX, length)
        if _CRC.unpack(start[-_CRC.size :])[0] != crc32(raw, crc32(start[: -_CRC.size])):
            raise self._damaged("the header has a wrong checksum")
        header = _parse_header(raw, _PREFIX + length)
        if header is None:
            raise StorageError(f"{self.path}: the header has another format", rewrite_hint(self.path), reason="foreign")
        if header.nbytes != size:
            raise self._damaged(f"the size is {size:,} bytes, expected {header.nbytes:,}")
        if self._bytes(size - len(END), len(END)) != END:
            raise self._damaged("the end marker is wrong")
        return header

    def _bytes(self, offset: int, count: int) -> bytes:
        if self._content is not None:
            content = bytes(self._content[offset : offset + count])
        else:
            target = bytearray(count)
            content = bytes(target[: self._fs.read(self._file, target, offset)])
        if len(content) != count:
            raise self._damaged("the file is truncated")
        return content

    def _damaged(self, problem: str) -> StorageError:
        return StorageError(f"{self.path}: {problem}: the file is damaged", "None of it is used.", reason="damaged")


@contextmanager
def open_container(path: Path, fs: FileSystem = REAL_FILE_SYSTEM, *, whole: bool = False) -> Iterator[ContainerFile]:
    """Open a container (``whole``: see ``ContainerFile``).

    Raises:
        StorageError: If the file is missing, damaged, not a regular file or not a container of this version.
        OSError: If the disk fails; the error has the file's name.
    """
    try:
        file = fs.open(path)
    except FileNotFoundError:
        raise StorageError(f"{path} does not exist", reason="missing") from None
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.EINVAL):  # not a regular file
            raise StorageError(f"{path}: {error.strerror}", "It is left unchanged.", reason="foreign") from None
        raise
    try:
        yield ContainerFile(path, file, fs, whole=whole)
    except OSError as error:
        error.filename = error.filename or str(path)  # Reads fail without a file name.
        raise
    finally:
        fs.close(file)


def read_header(path: Path, fs: FileSystem = REAL_FILE_SYSTEM) -> Header:
    """Return the verified header of a container without reading its sections."""
    with open_container(path, fs) as container:
        return container.header


def rewrite_hint(path: Path) -> str:
    """Return how to write a file of another format version again."""
    commands = {
        ".session": "Write it again with kvad session save.",
        ".prefix": "Write it again with kvad prefix add.",
        ".kv": "kvad recomputes and writes the block again; delete the file.",
    }
    return f"{commands.get(path.suffix, 'The command that wrote it writes it again.')} The file is left unchanged."


def _allocate(nbytes: int) -> memoryview:
    """Allocate a read buffer; a large one gets separate pages.

    The system maps such pages while it reads, and no other thread waits for that. Filling a bytearray with zeros would
    block all threads.
    """
    if nbytes < PAGES:
        return memoryview(bytearray(nbytes))
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _parse_header(raw: bytes, offset: int) -> Header | None:
    """Parse a header, or return None if it has another format."""
    try:
        content = strict_json.loads(raw)
        kind, fingerprint, metadata = content["kind"], content["fingerprint"], content["metadata"]
        if not (isinstance(kind, str) and isinstance(fingerprint, dict) and isinstance(metadata, dict)):
            return None
        if any(type(value) is not str for value in fingerprint.values()):
            return None
        stored: dict[str, SectionInfo] = {}
        for name, dtype, shape, nbytes, crc in content["sections"]:
            expected_bytes = WIDTHS[dtype]
            for count in shape:
                if type(count) is not int or count < 0:
                    return None
                expected_bytes *= count
            if not isinstance(name, str) or name in stored or type(crc) is not int or expected_bytes != nbytes:
                return None
            stored[name] = SectionInfo(name, dtype, tuple(shape), nbytes, crc, offset)
            offset += nbytes
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return Header(kind, fingerprint, metadata, stored, offset + len(END))
