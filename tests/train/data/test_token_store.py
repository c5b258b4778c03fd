"""Token store: shards, reuse, and rewriting after a change."""

import os
import threading

import numpy as np
import pytest

from kvad.errors import DataError, SaveError
from kvad.text.tokenizer import train_tokenizer
from kvad.train.data import token_store
from kvad.train.data.token_store import find_changed_sources, open_store, store_fingerprint
from kvad.train.sources.documents import open_corpus

BYTE = train_tokenizer("byte", [])
SEPARATOR = BYTE.special_tokens.separator


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in {"a": "first", "b": "2", "c": "third one"}.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def stream(store):
    return store.take(np.arange(store.num_tokens)).tolist()


EXPECTED = [SEPARATOR, *b"first", SEPARATOR, *b"2", SEPARATOR, *b"third one"]


@pytest.mark.parametrize("shard_tokens", [1 << 27, 12, 1])
def test_every_document_is_opened_by_the_separator(texts, tmp_path, monkeypatch, shard_tokens):
    monkeypatch.setattr(token_store, "SHARD_TOKENS", shard_tokens)
    store, found = open_store(tmp_path / "data", open_corpus([texts]), BYTE)
    assert not found and stream(store) == EXPECTED
    assert store.offsets.tolist() == [0, 6, 8, 18]
    assert len(store.manifest["shards"]) == {1 << 27: 1, 12: 2, 1: 3}[shard_tokens]
    assert store.take(np.array([[17, 0], [6, 7]])).tolist() == [[ord("e"), SEPARATOR], [SEPARATOR, ord("2")]]


def test_batches_of_documents_do_not_change_the_tokens(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(token_store, "BATCH_CHARS", 1)
    assert stream(open_store(tmp_path / "data", open_corpus([texts]), BYTE)[0]) == EXPECTED


def test_closing_an_unread_stream_does_not_wait_for_its_thread(texts, monkeypatch):
    """A garbage collection may close it inside Thread.start, where waiting for a thread never ends."""
    monkeypatch.setattr(token_store, "BATCH_CHARS", 1)
    encode = token_store._encode
    started, release, finished = threading.Event(), threading.Event(), threading.Event()

    def encode_later(tokenizer, batch):
        if batch[0][0] > 0:
            started.set()
            release.wait(5)
            finished.set()
        return encode(tokenizer, batch)

    monkeypatch.setattr(token_store, "_encode", encode_later)
    pieces = token_store.encode_pieces(open_corpus([texts]), BYTE)
    next(pieces)
    assert started.wait(20)
    pieces.close()
    assert not finished.is_set()
    release.set()


def test_store_is_reused_until_something_changes(texts, tmp_path):
    folder = tmp_path / "data"
    corpus = open_corpus([texts])
    first, _ = open_store(folder, corpus, BYTE)
    again, found = open_store(folder, open_corpus([texts]), BYTE)
    assert found and again.fingerprint == first.fingerprint == store_fingerprint(corpus, BYTE)
    (texts / "b.txt").write_text("3")
    assert find_changed_sources(folder, open_corpus([texts])) == ["texts/b.txt"]
    other, found = open_store(folder, open_corpus([texts]), BYTE)
    assert not found and stream(other)[7] == ord("3") and other.fingerprint != first.fingerprint
    char = train_tokenizer("char", ["first 2 3 third one"])
    assert not open_store(folder, open_corpus([texts]), char)[1]


def test_accept_receives_the_store(texts, tmp_path):
    """It receives the same store, before and after the folder is renamed."""
    accepted = []
    for known in (False, True):
        store, found = open_store(tmp_path / "data", open_corpus([texts]), BYTE, accept=accepted.append)
        assert found is known and store is accepted[-1] and stream(store) == EXPECTED
    assert len(accepted) == 2


@pytest.mark.parametrize("name", ["tokens-00000.bin", "offsets.bin", "manifest.json"])
def test_damaged_store_is_rewritten(texts, tmp_path, name):
    open_store(tmp_path / "data", open_corpus([texts]), BYTE)
    os.truncate(tmp_path / "data" / name, 3)
    store, found = open_store(tmp_path / "data", open_corpus([texts]), BYTE)
    assert not found and stream(store) == EXPECTED


def test_full_disk_keeps_the_old_store(texts, tmp_path, monkeypatch):
    open_store(tmp_path / "data", open_corpus([texts]), BYTE)
    (texts / "b.txt").write_text("3")

    def refuse(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(SaveError, match="No space left"):
        open_store(tmp_path / "data", open_corpus([texts]), BYTE)
    monkeypatch.undo()
    (texts / "b.txt").write_text("2")
    store, found = open_store(tmp_path / "data", open_corpus([texts]), BYTE)
    assert found and stream(store) == EXPECTED


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_wide_vocabularies_take_four_bytes(texts, tmp_path, monkeypatch, vocab_size, dtype):
    monkeypatch.setattr(BYTE, "vocab_size", vocab_size)
    store, _ = open_store(tmp_path / "data", open_corpus([texts]), BYTE)
    assert store.manifest["dtype"] == dtype and stream(store) == EXPECTED


def test_a_tokenizer_without_a_separator_is_refused(texts, tmp_path):
    class Mute:
        vocab_size = 256
        special_tokens = type(BYTE.special_tokens)()

        def fingerprint(self):
            return "mute"

    with pytest.raises(DataError, match="no token that opens a document"):
        open_store(tmp_path / "data", open_corpus([texts]), Mute())


@pytest.mark.parametrize("name", ["tokens-00000.bin", "offsets.bin", "manifest.json"])
def test_a_damaged_store_is_written_again(texts, tmp_path, name):
    folder, corpus = tmp_path / "data", open_corpus([texts])
    open_store(folder, corpus, BYTE)
    assert open_store(folder, corpus, BYTE)[1]
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:8] + bytes([content[8] ^ 1]) + content[9:])
    store, found = open_store(folder, corpus, BYTE)
    assert not found and stream(store) == EXPECTED and open_store(folder, corpus, BYTE)[1]
