"""Texts as token ids on disk: memory-mapped shards that are made once and read by position.

The *stream* of a corpus is all its texts in order, each in the corpus's frame: of documents, each **opened by the
separator**; of pairs (``pairs.py``), each source and then its target::

    <|endofdoc|> a a a <|endofdoc|> b b <|endofdoc|> c c c c
    0            1 2 3 4            5 6 7            8          offsets = 0, 4, 7, 12

A store is a folder: ``tokens-00000.bin`` and the like (uint16, or uint32 for a vocabulary that needs it;
little-endian), ``offsets.bin`` (uint64 [documents + 1]) and ``manifest.json`` (counts, the tokenizer's fingerprint, the
sources with their hashes).  It appears whole or not at all, and is used again as long as sources, tokenizer and
settings are the same.  A corpus may say more of every token than its id (``columns.py``).  Invariant: text d is
``tokens[offsets[d] : offsets[d + 1]]``; of documents, its first token is the separator.  No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvad.checkpoint.atomic import new_folder
from kvad.text.base import Tokenizer
from kvad.train.columns import Columned, ColumnFiles, column_files, write_columns
from kvad.train.corpus import Framer, Source

__all__ = ["Texts", "TokenStore", "changed_sources", "open_store", "store_key"]

MANIFEST, OFFSETS = "manifest.json", "offsets.bin"
SHARD_TOKENS = 1 << 27
BATCH_CHARS = 1 << 22  # documents encoded together

Ints = npt.NDArray[np.int64]


class Texts(Protocol):
    """What a store is made of: a :class:`~kvad.train.corpus.Corpus`, or one of pairs."""

    @property
    def sources(self) -> tuple[Source, ...]: ...

    def texts(self) -> Iterator[str]: ...

    def settings(self) -> dict[str, Any]: ...

    def framer(self, tokenizer: Tokenizer) -> Framer: ...


class TokenStore:
    """Reads a store, also one that is renamed meanwhile; ``fingerprint`` says which tokens they are."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.manifest, self.fingerprint = manifest, str(manifest["key"])
        dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self._shards = [np.memmap(folder / shard["file"], dtype, "r") for shard in manifest["shards"]]
        self._columns = ColumnFiles(folder, manifest)
        self._starts = np.cumsum([0, *(len(shard) for shard in self._shards)])
        self.offsets: Ints = np.fromfile(folder / OFFSETS, "<u8").astype(np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

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
    corpus: Texts,
    tokenizer: Tokenizer,
    *,
    accept: Callable[[TokenStore], object] = lambda store: None,
) -> tuple[TokenStore, bool]:
    """The corpus as tokens in ``folder``, and whether it was there already.

    ``accept`` looks at the tokens before they appear as ``folder``; where it raises, nothing of them is left.  Raises
    DataError for text that cannot be read, SaveError if the disk refuses (an old store is then whole).
    """
    settings, key = _settings(corpus, tokenizer), store_key(corpus, tokenizer)
    if (manifest := _usable(folder, key)) is not None:
        store = TokenStore(folder, manifest)
        accept(store)
        return store, True
    columns = dict(corpus.columns) if isinstance(corpus, Columned) else {}
    frame = corpus.framer(tokenizer)
    with new_folder(folder) as new:
        if isinstance(corpus, Columned):
            documents = write_columns(new, columns, corpus.encoded(tokenizer))
        else:
            documents = _encoded(corpus, tokenizer, frame)
        vocab = max(each.vocab_size for each in (tokenizer, tokenizer.source) if each is not None)
        counts = _write(new, documents, _dtype(vocab))
        said = {"columns": columns} if columns else {}
        manifest = {"format": 1, "key": key, **counts, **said, **settings}
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        store = TokenStore(new, manifest)
        accept(store)
    return store, False


def store_key(corpus: Texts, tokenizer: Tokenizer) -> str:
    """sha256 (hex) of all that decides the tokens: the store's ``fingerprint``, known before it is made."""
    return hashlib.sha256(json.dumps(_settings(corpus, tokenizer), sort_keys=True).encode()).hexdigest()


def changed_sources(folder: Path, corpus: Texts) -> list[str]:
    """Names of files that were changed, added or removed since the store in ``folder`` was made."""
    try:
        before = {s["name"]: s["sha256"] for s in json.loads((folder / MANIFEST).read_bytes())["sources"]}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    now = {source.name: source.sha256 for source in corpus.sources}
    return [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]


def _settings(corpus: Texts, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"tokenizer": tokenizer.fingerprint(), **corpus.settings()}


def _dtype(vocab: int) -> str:
    return "uint16" if vocab <= 1 << 16 else "uint32"


def _usable(folder: Path, key: str) -> dict[str, Any] | None:
    """The manifest of a whole store of exactly these tokens; None asks for a new one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["key"] != key:
            return None
        size = np.dtype(manifest["dtype"]).itemsize
        whole = all((folder / s["file"]).stat().st_size == s["tokens"] * size for s in manifest["shards"])
        whole = whole and column_files(folder, manifest)
        whole = whole and (folder / OFFSETS).stat().st_size == 8 * (manifest["documents"] + 1)
        return dict(manifest) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _encoded(corpus: Texts, tokenizer: Tokenizer, frame: Framer) -> Iterator[list[int]]:
    """Every text's ids in its frame; texts are encoded many at a time."""
    done, waiting, num_chars = 0, list[str](), 0
    for text in corpus.texts():
        waiting.append(text)
        num_chars += len(text)
        if num_chars >= BATCH_CHARS:
            yield from _framed(tokenizer, waiting, frame, done)
            done, waiting, num_chars = done + len(waiting), [], 0
    yield from _framed(tokenizer, waiting, frame, done)


def _framed(tokenizer: Tokenizer, texts: list[str], frame: Framer, first: int) -> Iterator[list[int]]:
    if tokenizer.source is None:
        encoded = tokenizer.encode_batch(texts)
    else:  # pairs, whose sources are read with another vocabulary
        sides = {True: tokenizer.source, False: tokenizer}
        each = {even: iter(sides[even].encode_batch(_side(texts, first, even))) for even in sides}
        encoded = [next(each[number % 2 == 0]) for number in range(first, first + len(texts))]
    for number, ids in enumerate(encoded, first):
        yield frame(number, ids)


def _side(texts: list[str], first: int, even: bool) -> list[str]:
    return [text for number, text in enumerate(texts, first) if (number % 2 == 0) == even]


def _write(folder: Path, documents: Iterable[list[int]], dtype: str) -> dict[str, Any]:
    """Shards of at most SHARD_TOKENS tokens (but a document is never cut), and the offsets."""
    offsets, shards = [0], list[dict[str, Any]]()
    file = None
    try:
        for ids in documents:
            if file is None or shards[-1]["tokens"] + len(ids) > SHARD_TOKENS:
                if file is not None:
                    file.close()
                shards.append({"file": f"tokens-{len(shards):05d}.bin", "tokens": 0})
                file = (folder / shards[-1]["file"]).open("wb")
            file.write(np.asarray(ids, np.dtype(dtype).newbyteorder("<")).tobytes())
            shards[-1]["tokens"] += len(ids)
            offsets.append(offsets[-1] + len(ids))
    finally:
        if file is not None:
            file.close()
    (folder / OFFSETS).write_bytes(np.asarray(offsets, "<u8").tobytes())
    return {"dtype": dtype, "tokens": offsets[-1], "documents": len(offsets) - 1, "shards": shards}
