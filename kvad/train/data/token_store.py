"""Token store: texts as token ids on disk, in memory-mapped shards.

The *stream* of a corpus is all its texts in order, each in the corpus's frame: documents are **opened by the
separator**; of pairs (``sources/pairs.py``), each source is followed by its target::

    <|endofdoc|> a a a <|endofdoc|> b b <|endofdoc|> c c c c
    0            1 2 3 4            5 6 7            8          offsets = 0, 4, 7, 12

A store is a folder: ``tokens-00000.bin`` and so on (uint16, or uint32 for a vocabulary that needs it; little-endian),
``offsets.bin`` (uint64 [documents + 1]) and ``manifest.json`` (counts, hashes of these files, the largest token id, the
tokenizer's fingerprint, the sources with their hashes; ``cuts``: where the later pieces of long documents begin; the
hash of all this). It is written completely or not at all, and reused while sources, tokenizer and settings are the
same and no file differs from its hash (read at 1.4 GB/s before the first step). Invariant: text d is
``tokens[offsets[d] : offsets[d + 1]]``; the first token of a document is the separator.

Columns of an ``kvad.train.sources.examples.ExampleCorpus`` add a value to every token: ``labels.bin`` holds its
label (int32, -1: none), ``mask.bin`` whether it is a target (uint8); value i belongs to token i of the stream, in
whichever shard it is. The manifest names columns and types::

    tokens    5  9  2  7  7  3        labels   0  -1   3   3  -1   1        "columns": {"labels": "int32"}

No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvad import storage
from kvad.errors import DataError
from kvad.text import Tokenizer
from kvad.train import sources as sources_lib
from kvad.train.sources import Corpus

MANIFEST, OFFSETS = "manifest.json", "offsets.bin"
FORMAT = 2  # version of the manifest
TOKENIZER, TEMPLATE = "tokenizer", "template"  # folders of prepared data (setup/prepared.py)
SHARD_TOKENS = 1 << 27
BATCH_CHARS = 1 << 22  # characters of documents encoded together
SCAN_CHUNK = 1 << 20  # tokens scanned together

Ints = npt.NDArray[np.int64]
Progress = sources_lib.documents.Progress
_TextBatch = list[tuple[int, sources_lib.formats.TextPiece]]  # pieces and the indices of their texts


class EncodedPiece(NamedTuple):
    """Framed tokens of a piece of a text."""

    ids: list[int]
    opens: bool  # the piece begins its text
    closes: bool  # the piece ends its text
    columns: Mapping[str, list[int]]  # a value per token for each column


class OutOfVocabulary(NamedTuple):
    """Location of a token id outside the vocabulary."""

    token: int
    text: int  # index of the text
    offset: int  # token index within the text
    shard: str  # file name
    byte: int  # offset in the shard


class TokenStore:
    """Reader of a store, which may be renamed while open; ``fingerprint`` identifies its tokens."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.manifest, self.fingerprint = manifest, str(manifest["fingerprint"])
        dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self._shards = [np.memmap(folder / shard["file"], dtype, "r") for shard in manifest["shards"]]
        columns: Mapping[str, str] = manifest.get("columns", {})
        self._columns = {name: np.memmap(folder / f"{name}.bin", np.dtype(kind), "r") for name, kind in columns.items()}
        self._starts = np.cumsum([0, *(len(shard) for shard in self._shards)])
        self.offsets: Ints = np.fromfile(folder / OFFSETS, "<u8").astype(np.int64)
        self.document_starts: Ints = np.array(manifest.get("cuts", []), np.int64)
        ends_with_tokens = len(self.offsets) > 0 and self.offsets[0] == 0 and self.offsets[-1] == self.num_tokens
        if not ends_with_tokens or np.any(np.diff(self.offsets) < 0):
            raise DataError(
                f"{folder / OFFSETS}: must ascend from 0 to the {self.num_tokens:,} tokens", "Prepare the texts again."
            )

    @staticmethod
    def concat(stores: Sequence[TokenStore]) -> TokenStore:
        """Concatenate stores without copying tokens."""
        if len(stores) == 1:
            return stores[0]
        joined = TokenStore.__new__(TokenStore)
        fingerprints = [store.fingerprint for store in stores]
        joined.fingerprint = combined_fingerprint(fingerprints)
        joined.manifest = {"fingerprint": joined.fingerprint, "joined": fingerprints}
        joined._shards = [shard for store in stores for shard in store._shards]
        joined._starts = np.cumsum([0, *(len(shard) for shard in joined._shards)])
        begins = np.cumsum([0, *(store.num_tokens for store in stores)])
        pairs = list(zip(stores, begins[:-1], strict=True))
        joined.offsets = np.concatenate([*(store.offsets[:-1] + begin for store, begin in pairs), begins[-1:]])
        joined.document_starts = np.concatenate([store.document_starts + begin for store, begin in pairs])
        return joined

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    def find_out_of_vocabulary(self, vocab: int) -> OutOfVocabulary | None:
        """Return the first token id >= ``vocab``, or None; reads all tokens."""
        for number, shard in enumerate(self._shards):
            for low in range(0, len(shard), SCAN_CHUNK):
                tokens = shard[low : low + SCAN_CHUNK]
                if tokens.max() < vocab:
                    continue
                inside = low + int(np.argmax(tokens >= vocab))
                at = int(self._starts[number]) + inside
                text = int(np.searchsorted(self.offsets, at, side="right")) - 1
                byte = inside * shard.dtype.itemsize
                name = self.manifest["shards"][number]["file"]
                return OutOfVocabulary(int(shard[inside]), text, at - int(self.offsets[text]), name, byte)
        return None

    def column(self, name: str, at: Ints) -> Ints:
        """Return the values of column ``name`` at stream positions ``at``, any shape."""
        return self._columns[name][at].astype(np.int64)

    def take(self, at: Ints) -> Ints:
        """Return token ids at stream positions ``at``, any shape."""
        if len(self._shards) == 1:
            return self._shards[0][at].astype(np.int64)
        out = np.empty(at.shape, np.int64)
        which = np.searchsorted(self._starts, at, side="right") - 1
        for shard in np.unique(which):
            out[which == shard] = self._shards[shard][at[which == shard] - self._starts[shard]]
        return out


def open_store(
    folder: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    accept: Callable[[TokenStore], object] = lambda store: None,
    progress: Progress = lambda chars, tokens: None,
) -> tuple[TokenStore, bool]:
    """Open the corpus's tokens in ``folder``, writing them first if needed; return True if they existed already.

    ``accept`` checks the store before it appears as ``folder``; if it raises, nothing is left.

    Raises:
        DataError: If texts cannot be read.
        SaveError: If the disk refuses; an old store stays complete.
    """
    manifest = read_manifest(folder)
    if manifest.get("fingerprint") == store_fingerprint(corpus, tokenizer) and _is_whole(folder, manifest):
        store = TokenStore(folder, manifest)
        accept(store)
        return store, True
    corpus.framer(tokenizer)  # refuses a tokenizer that cannot frame them, before anything is joined
    with storage.atomic.new_folder(folder) as new:
        store = TokenStore(new, write_store(new, corpus, tokenizer, progress=progress))
        accept(store)
    return store, False


def _is_whole(folder: Path, manifest: dict[str, Any]) -> bool:
    """Return True if all files of a store are those that its manifest describes; reads all of them."""
    with suppress(KeyError, TypeError):  # of a damaged manifest
        return not any(find_incomplete_files(folder, manifest)) and not find_corrupt_files(folder, hashes(manifest))
    return False


def is_prepared(path: Path) -> bool:
    """Return True for a folder written by ``kvad data prepare`` of any version, also if its manifest is damaged."""
    manifest = read_manifest(path)
    return "prepared" in manifest or (not manifest and has_tokens(path))


def has_tokens(path: Path) -> bool:
    """Return True for a folder with files of tokens, which is never read as text."""
    names = os.listdir(path) if path.is_dir() else []
    return any(map(sources_lib.documents.TOKEN_FILE.fullmatch, names))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the folder's manifest, or {} if it has none that can be read, or one that differs from its checksum."""
    try:
        manifest = storage.strict_json.loads(storage.filesystem.read_bytes(folder / MANIFEST))
    except (OSError, ValueError):
        return {}
    is_valid = isinstance(manifest, dict) and manifest.get("checksum", checksum := _checksum(manifest)) == checksum
    return manifest if is_valid else {}


def _checksum(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 (hex) of everything else in a manifest."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_store(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, more: dict[str, Any] | None = None, *, progress: Progress
) -> dict[str, Any]:
    """Write the corpus as tokens into an empty folder; return its manifest, with ``more`` added."""
    more, pieces = dict(more or {}), encode_pieces(corpus, tokenizer, progress)
    if isinstance(corpus, sources_lib.examples.ExampleCorpus):
        more["columns"] = dict(corpus.columns)
        pieces = (EncodedPiece(ids, True, True, values) for ids, values in corpus.encoded(tokenizer, progress))
    vocab = max(part.vocab_size for part in (tokenizer, tokenizer.source_tokenizer) if part is not None)
    dtype = "uint16" if vocab <= 1 << 16 else "uint32"
    counts = _write(folder, pieces, dtype, more.get("columns", {}))
    tokenizer_files = [path for name in (TOKENIZER, TEMPLATE) for path in (folder / name).rglob("*") if path.is_file()]
    more["files"] = {path.relative_to(folder).as_posix(): _digest(path) for path in sorted(tokenizer_files)}
    if "columns" in more:
        more["column_hashes"] = {f"{name}.bin": _digest(folder / f"{name}.bin") for name in more["columns"]}
    identity = {"format": FORMAT, "fingerprint": store_fingerprint(corpus, tokenizer)}
    manifest = {**identity, **_settings(corpus, tokenizer), **more, **counts}
    manifest["checksum"] = _checksum(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def find_incomplete_files(folder: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[Path, int, int]]:
    """Yield files of another size than the manifest's, with size in bytes (-1: missing) and expected size.

    Raises:
        KeyError, TypeError: If the manifest is damaged.
    """
    token_size = np.dtype(manifest["dtype"]).itemsize
    expected = {shard["file"]: shard["tokens"] * token_size for shard in manifest["shards"]}
    columns = manifest.get("columns", {}).items()
    expected |= {f"{name}.bin": np.dtype(kind).itemsize * manifest["tokens"] for name, kind in columns}
    expected[OFFSETS] = 8 * (manifest["documents"] + 1)
    for name, size in expected.items():
        path = folder / name
        size_on_disk = path.stat().st_size if path.is_file() else -1
        if size_on_disk != size:
            yield path, size_on_disk, size


def hashes(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the sha256 (hex) of every file of a store, by name."""
    expected = {shard["file"]: shard["sha256"] for shard in manifest["shards"]} | {OFFSETS: manifest["offsets"]}
    return {**expected, **manifest.get("column_hashes", {}), **manifest.get("files", {})}


def find_corrupt_files(folder: Path, expected: Mapping[str, str]) -> list[str]:
    """Return names of files whose sha256 is not the expected one; reads all of them."""
    return [name for name, digest in expected.items() if not _has_digest(folder / name, digest)]


def _digest(path: Path) -> str:
    with storage.filesystem.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _has_digest(path: Path, digest: str) -> bool:
    try:
        return _digest(path) == digest
    except OSError:
        return False


def store_fingerprint(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """Return the sha256 (hex) of everything that determines the tokens."""
    return hashlib.sha256(json.dumps(_settings(corpus, tokenizer), sort_keys=True).encode()).hexdigest()


def combined_fingerprint(fingerprints: Sequence[str]) -> str:
    """Return the fingerprint of several stores as one."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256(json.dumps(list(fingerprints)).encode()).hexdigest()


def find_changed_sources(folder: Path, corpus: Corpus) -> list[str]:
    """Return names of files changed, added or removed since the store was written."""
    try:
        before = {source["name"]: source["sha256"] for source in read_manifest(folder)["sources"]}
    except (KeyError, TypeError):
        return []
    now = {source.name: source.sha256 for source in corpus.sources}
    return [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]


def _settings(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"tokenizer": tokenizer.fingerprint(), **corpus.settings()}


def is_store(folder: Path) -> bool:
    """Return True for a token store of any corpus."""
    return {"fingerprint", "shards"} <= read_manifest(folder).keys()


def encode_pieces(
    corpus: Corpus, tokenizer: Tokenizer, progress: Progress = lambda chars, tokens: None, skip: int = 0
) -> Iterator[EncodedPiece]:
    """Yield every piece's framed ids, except the first ``skip`` pieces, which are not encoded.

    Pieces are encoded in batches, on all cores if the tokenizer supports it, while the next ones are read.
    """
    frame = corpus.framer(tokenizer)
    chars = tokens = 0
    pool = ThreadPoolExecutor(1)
    try:
        running: tuple[_TextBatch, Future[list[list[int]]]] | None = None
        for batch in chain(_batches(corpus.pieces(), skip), (None,)):
            started = None if batch is None else (batch, pool.submit(_encode, tokenizer, batch))
            if running is not None:
                pieces, encoded = running[0], running[1].result()
                chars += sum(len(piece.text) for _, piece in pieces)
                tokens += sum(map(len, encoded))
                progress(chars, tokens)
                for (number, piece), ids in zip(pieces, encoded, strict=True):
                    yield EncodedPiece(frame(number, ids) if piece.opens else ids, piece.opens, piece.closes, {})
            running = started
    finally:
        # No wait for the thread: a garbage collection may close an unread generator inside Thread.start, where a join
        # waits forever.
        pool.shutdown(wait=False, cancel_futures=True)


def _encode(tokenizer: Tokenizer, batch: _TextBatch) -> list[list[int]]:
    """Encode pieces; the sides of pairs may have different vocabularies."""
    if tokenizer.source_tokenizer is None:
        return tokenizer.encode_batch([piece.text for _, piece in batch])
    encoded = [
        iter(encoder.encode_batch([piece.text for number, piece in batch if number % 2 == side]))
        for side, encoder in enumerate((tokenizer.source_tokenizer, tokenizer))
    ]
    return [next(encoded[number % 2]) for number, _ in batch]


def _batches(pieces: Iterator[sources_lib.formats.TextPiece], skip: int) -> Iterator[_TextBatch]:
    """Yield pieces with the indices of their texts, about BATCH_CHARS characters at a time."""
    waiting, chars, number = _TextBatch(), 0, -1
    for index, piece in enumerate(pieces):
        number += piece.opens
        if index < skip:
            continue
        waiting.append((number, piece))
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield waiting
            waiting, chars = _TextBatch(), 0
    if waiting:
        yield waiting


class _Shards:
    """Writes tokens into shards of at most SHARD_TOKENS (a piece is never cut) and hashes them."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder, self._dtype = folder, np.dtype(dtype).newbyteorder("<")
        self._file: Any = None
        self.written: list[dict[str, Any]] = []
        self.largest = -1

    def add(self, ids: list[int]) -> None:
        if self._file is None or self.written[-1]["tokens"] + len(ids) > SHARD_TOKENS:
            self.close()
            self.written.append({"file": f"tokens-{len(self.written):05d}.bin", "tokens": 0})
            self._file, self._digest = (self._folder / self.written[-1]["file"]).open("wb"), hashlib.sha256()
        values = np.array(ids, np.int64)
        self.largest = max(self.largest, int(values.max(initial=-1)))
        content = values.astype(self._dtype).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self.written[-1]["tokens"] += len(ids)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self.written[-1]["sha256"] = self._digest.hexdigest()
            self._file = None


def _write(folder: Path, pieces: Iterable[EncodedPiece], dtype: str, columns: Mapping[str, str]) -> dict[str, Any]:
    """Write shards, columns and offsets; return their manifest entries."""
    offsets, cuts, count = [0], list[int](), 0
    with ExitStack() as stack:
        shards = stack.enter_context(closing(_Shards(folder, dtype)))
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in columns}
        for piece in pieces:
            if not piece.opens:
                cuts.append(count)
            shards.add(piece.ids)
            for name, kind in columns.items():
                assert len(piece.columns[name]) == len(piece.ids), f"a value of {name} for every token"
                files[name].write(np.asarray(piece.columns[name], np.dtype(kind).newbyteorder("<")).tobytes())
            count += len(piece.ids)
            if piece.closes:
                offsets.append(count)
    content = np.asarray(offsets, "<u8").tobytes()
    (folder / OFFSETS).write_bytes(content)
    counts = {"dtype": dtype, "tokens": count, "documents": len(offsets) - 1, "largest": shards.largest}
    return {**counts, "shards": shards.written, "offsets": hashlib.sha256(content).hexdigest(), "cuts": cuts}
