"""Texts as token ids on disk: memory-mapped shards that are made once and read by position.

The *stream* of a corpus is all its texts in order, each in the corpus's frame: of documents, each **opened by the
separator**; of pairs (``pairs.py``), each source and then its target::

    <|endofdoc|> a a a <|endofdoc|> b b <|endofdoc|> c c c c
    0            1 2 3 4            5 6 7            8          offsets = 0, 4, 7, 12

A store is a folder: ``tokens-00000.bin`` and the like (uint16, or uint32 for a vocabulary that needs it;
little-endian), ``offsets.bin`` (uint64 [documents + 1]) and ``manifest.json`` (counts, the hashes of these files, the
largest token id, the tokenizer's fingerprint, the sources with their hashes; ``cuts``: where a document that was read
in pieces goes on).  It appears whole or not at all, and is used again as long as sources, tokenizer and
settings are the same.  A corpus may say more of every token than its id (``columns.py``).  Invariant: text d is
``tokens[offsets[d] : offsets[d + 1]]``; of documents, its first token is the separator.  No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvad import storage
from kvad.text import Tokenizer
from kvad.train import sources as sources_lib

MANIFEST, OFFSETS = "manifest.json", "offsets.bin"
TOKENIZER, TEMPLATE = "tokenizer", "template"  # folders of prepared data (prepared.py)
SHARD_TOKENS = 1 << 27
BATCH_CHARS = 1 << 22  # documents encoded together
SCAN_CHUNK = 1 << 20  # tokens looked at together

Ints = npt.NDArray[np.int64]


class TextSource(Protocol):
    """What a store is made of: a :class:`~kvad.train.sources.documents.DocumentCorpus`, or one of pairs."""

    @property
    def sources(self) -> tuple[sources_lib.documents.CorpusFile, ...]: ...

    def pieces(self) -> Iterator[sources_lib.formats.TextPiece]: ...

    def settings(self) -> dict[str, Any]: ...

    def framer(self, tokenizer: Tokenizer) -> sources_lib.documents.FrameFn: ...


class EncodedPiece(NamedTuple):
    """A piece of a text as tokens, framed; ``number``: of the text, from 0."""

    number: int
    ids: list[int]
    opens: bool
    closes: bool


class OutOfVocabulary(NamedTuple):
    """A token id that no vocabulary of the run has: ``place`` in the text ``text``, both from 0, at ``byte`` of a
    shard."""

    token: int
    text: int
    offset: int
    shard: str
    byte: int


class TokenStore:
    """Reads a store, also one that is renamed meanwhile; ``fingerprint`` says which tokens they are."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.manifest, self.fingerprint = manifest, str(manifest["key"])
        dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self._shards = [np.memmap(folder / shard["file"], dtype, "r") for shard in manifest["shards"]]
        self._columns = sources_lib.columns.ColumnFiles(folder, manifest)
        self._starts = np.cumsum([0, *(len(shard) for shard in self._shards)])
        self.offsets: Ints = np.fromfile(folder / OFFSETS, "<u8").astype(np.int64)
        self.document_starts: Ints = np.array(manifest.get("cuts", []), np.int64)

    @staticmethod
    def concat(stores: Sequence[TokenStore]) -> TokenStore:
        """Several as one, one behind the other, without copying a token."""
        if len(stores) == 1:
            return stores[0]
        made = TokenStore.__new__(TokenStore)
        keys = [store.fingerprint for store in stores]
        made.fingerprint = combined_fingerprint(keys)
        made.manifest = {"key": made.fingerprint, "joined": keys}
        made._shards = [shard for store in stores for shard in store._shards]
        made._starts = np.cumsum([0, *(len(shard) for shard in made._shards)])
        before = np.cumsum([0, *(store.num_tokens for store in stores)])
        moved = [store.offsets[:-1] + first for store, first in zip(stores, before, strict=False)]
        made.offsets = np.concatenate([*moved, before[-1:]])
        made.document_starts = np.concatenate(
            [store.document_starts + first for store, first in zip(stores, before, strict=False)]
        )
        return made

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    def find_out_of_vocabulary(self, vocab: int) -> OutOfVocabulary | None:
        """Where the first token id beyond a vocabulary stands; None where none does.  Reads all tokens."""
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
        """What the column ``name`` says of the tokens at stream positions ``at``, any shape."""
        return self._columns.take(name, at)

    def take(self, at: Ints) -> Ints:
        """Token ids at stream positions ``at``, any shape."""
        if len(self._shards) == 1:
            return self._shards[0][at].astype(np.int64)
        out = np.empty(at.shape, np.int64)
        which = np.searchsorted(self._starts, at, side="right") - 1
        for shard in np.unique(which):
            out[which == shard] = self._shards[shard][at[which == shard] - self._starts[shard]]
        return out


def open_store(
    folder: Path,
    corpus: TextSource,
    tokenizer: Tokenizer,
    *,
    accept: Callable[[TokenStore], object] = lambda store: None,
    progress: sources_lib.documents.Progress = lambda chars, tokens: None,
) -> tuple[TokenStore, bool]:
    """The corpus as tokens in ``folder``, and whether it was there already.

    ``accept`` looks at the tokens before they appear as ``folder``; where it raises, nothing of them is left.  Raises
    DataError for text that cannot be read, SaveError if the disk refuses (an old store is then whole).
    """
    key = store_fingerprint(corpus, tokenizer)
    if (manifest := _usable_manifest(folder, key)) is not None:
        store = TokenStore(folder, manifest)
        accept(store)
        return store, True
    corpus.framer(tokenizer)  # refuses a tokenizer that cannot frame them, before anything is made
    with storage.atomic.new_folder(folder) as new:
        store = TokenStore(new, write_store(new, corpus, tokenizer, progress=progress))
        accept(store)
    return store, False


def is_prepared(path: Path) -> bool:
    """Whether a path is a folder that ``kvad data prepare`` made, of any version."""
    return "prepared" in _read_manifest(path)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Its manifest; empty where it has none that can be read."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_store(
    folder: Path,
    corpus: TextSource,
    tokenizer: Tokenizer,
    more: dict[str, Any] | None = None,
    *,
    progress: sources_lib.documents.Progress,
) -> dict[str, Any]:
    """Write the corpus as tokens into an empty folder; -> its manifest, with ``more`` in it."""
    columns = dict(corpus.columns) if isinstance(corpus, sources_lib.columns.HasColumns) else {}
    if isinstance(corpus, sources_lib.columns.HasColumns):
        texts = enumerate(sources_lib.columns.write_columns(folder, columns, corpus.encoded(tokenizer, progress)))
        pieces: Iterator[EncodedPiece] = (EncodedPiece(number, ids, True, True) for number, ids in texts)
    else:
        pieces = encode_pieces(corpus, tokenizer, progress)
    vocab = max(each.vocab_size for each in (tokenizer, tokenizer.source_tokenizer) if each is not None)
    counts = _write(folder, pieces, _dtype(vocab))
    if columns:
        digests = {f"{name}.bin": _digest(folder / f"{name}.bin") for name in columns}
        more = {"columns": columns, "column_hashes": digests, **(more or {})}
    more = more or {}
    manifest = {
        "format": 1,
        "key": store_fingerprint(corpus, tokenizer),
        **_settings(corpus, tokenizer),
        **more,
        **counts,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def find_corrupt_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of a store's files that are not what its manifest says; reads all of them."""
    wanted = {shard["file"]: shard["sha256"] for shard in manifest["shards"]} | {OFFSETS: manifest["offsets"]}
    wanted |= manifest.get("column_hashes", {})
    found = []
    for name, digest in wanted.items():
        try:
            whole = _digest(folder / name) == digest
        except OSError:
            whole = False
        if not whole:
            found.append(name)
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def store_fingerprint(corpus: TextSource, tokenizer: Tokenizer) -> str:
    """sha256 (hex) of all that decides the tokens: the store's ``fingerprint``, known before it is made."""
    return hashlib.sha256(json.dumps(_settings(corpus, tokenizer), sort_keys=True).encode()).hexdigest()


def combined_fingerprint(keys: Sequence[str]) -> str:
    """The fingerprint of several stores as one."""
    return keys[0] if len(keys) == 1 else hashlib.sha256(json.dumps(list(keys)).encode()).hexdigest()


def find_changed_sources(folder: Path, corpus: TextSource) -> list[str]:
    """Names of files that were changed, added or removed since the store in ``folder`` was made."""
    try:
        before = {s["name"]: s["sha256"] for s in json.loads((folder / MANIFEST).read_bytes())["sources"]}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    now = {source.name: source.sha256 for source in corpus.sources}
    return [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]


def _settings(corpus: TextSource, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"tokenizer": tokenizer.fingerprint(), **corpus.settings()}


def _dtype(vocab: int) -> str:
    return "uint16" if vocab <= 1 << 16 else "uint32"


def is_store(folder: Path) -> bool:
    """Whether kvad made it, of whatever texts."""
    return {"key", "shards"} <= _read_manifest(folder).keys()


def _usable_manifest(folder: Path, key: str) -> dict[str, Any] | None:
    """The manifest of a whole store of exactly these tokens; None asks for a new one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["key"] != key:
            return None
        size = np.dtype(manifest["dtype"]).itemsize
        whole = all((folder / s["file"]).stat().st_size == s["tokens"] * size for s in manifest["shards"])
        whole = whole and sources_lib.columns.check_column_files(folder, manifest)
        whole = whole and (folder / OFFSETS).stat().st_size == 8 * (manifest["documents"] + 1)
        return dict(manifest) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def encode_pieces(
    corpus: TextSource,
    tokenizer: Tokenizer,
    progress: sources_lib.documents.Progress = lambda chars, tokens: None,
    skip: int = 0,
) -> Iterator[EncodedPiece]:
    """Every piece's ids, framed, but for the first ``skip`` pieces, which are read and not encoded.

    Pieces are encoded many at a time, on all cores where the tokenizer has several, while the next ones are read.
    """
    frame = corpus.framer(tokenizer)
    chars = tokens = 0
    with ThreadPoolExecutor(1) as pool:
        running: tuple[list[tuple[int, sources_lib.formats.TextPiece]], Future[list[list[int]]]] | None = None
        for batch in chain(_batches(corpus.pieces(), skip), (None,)):
            begun = None
            if batch is not None:
                begun = batch, pool.submit(_encode, tokenizer, batch)
            if running is not None:
                pieces, rows = running[0], running[1].result()
                chars += sum(len(piece.text) for _, piece in pieces)
                tokens += sum(map(len, rows))
                progress(chars, tokens)
                for (number, piece), ids in zip(pieces, rows, strict=True):
                    framed = frame(number, ids) if piece.opens else ids
                    yield EncodedPiece(number, framed, piece.opens, piece.closes)
            running = begun


def _encode(tokenizer: Tokenizer, batch: Sequence[tuple[int, sources_lib.formats.TextPiece]]) -> list[list[int]]:
    """The ids of pieces; of pairs, whose sources may be read with another vocabulary, each side by its own."""
    if tokenizer.source_tokenizer is None:
        return tokenizer.encode_batch([piece.text for _, piece in batch])
    sides = {0: tokenizer.source_tokenizer, 1: tokenizer}
    each = {side: iter(words.encode_batch(_side(batch, side))) for side, words in sides.items()}
    return [next(each[number % 2]) for number, _ in batch]


def _side(batch: Sequence[tuple[int, sources_lib.formats.TextPiece]], side: int) -> list[str]:
    return [piece.text for number, piece in batch if number % 2 == side]


def _batches(
    pieces: Iterator[sources_lib.formats.TextPiece], skip: int
) -> Iterator[list[tuple[int, sources_lib.formats.TextPiece]]]:
    """Pieces with the numbers of their texts, about BATCH_CHARS characters at a time."""
    waiting, chars, number = list[tuple[int, sources_lib.formats.TextPiece]](), 0, -1
    for place, piece in enumerate(pieces):
        number += piece.opens
        if place < skip:
            continue
        waiting.append((number, piece))
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield waiting
            waiting, chars = [], 0
    if waiting:
        yield waiting


class _Shards:
    """Writes tokens into shards of at most SHARD_TOKENS (but a piece is never cut), and hashes them on the way."""

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


def _write(folder: Path, pieces: Iterable[EncodedPiece], dtype: str) -> dict[str, Any]:
    """The shards and the offsets; -> what the manifest says of them."""
    offsets, cuts, count = [0], list[int](), 0
    shards = _Shards(folder, dtype)
    try:
        for piece in pieces:
            if not piece.opens:
                cuts.append(count)
            shards.add(piece.ids)
            count += len(piece.ids)
            if piece.closes:
                offsets.append(count)
    finally:
        shards.close()
    content = np.asarray(offsets, "<u8").tobytes()
    (folder / OFFSETS).write_bytes(content)
    return {
        "dtype": dtype,
        "tokens": count,
        "documents": len(offsets) - 1,
        "largest": shards.largest,
        "shards": shards.written,
        "offsets": hashlib.sha256(content).hexdigest(),
        "cuts": cuts,
    }
