"""Byte-level BPE: training, and long texts and batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from kvad.text import hf_tokenizer
from kvad.text.base import split_text
from kvad.text.hf_tokenizer import HFTokenizer, byte_alphabet
from kvad.text.tokenizer import train_tokenizer


def test_bpe_ids_are_fewer_than_bytes(tokenizers, documents):
    text = documents[0]
    assert len(tokenizers["bpe"].encode(text)) < 0.6 * len(text.encode())


def test_vocab_size_is_reached_or_the_pairs_run_out(documents):
    assert train_tokenizer("bpe", documents, vocab_size=400).vocab_size == 400
    few = train_tokenizer("bpe", ["abcabc"], vocab_size=4096)
    assert 257 < few.vocab_size < 265
    assert train_tokenizer("bpe", ["abcabc"], min_freq=3).vocab_size == 257


def test_byte_alphabet_equals_the_library():
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    for value in range(0x80):
        ((token, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(value))
        assert byte_alphabet()[token] == value


def test_transformers_reads_the_saved_file(tokenizers, documents, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizers["bpe"]
    tokenizer.save(tmp_path)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in documents[-3:]:
        ids = reference.encode(text)
        assert ids == tokenizer.encode(text, specials=True)
        assert reference.decode(ids, clean_up_tokenization_spaces=False) == tokenizer.decode(ids)


# ---------------------------------------------------------------- long texts


SCRAPS = [*"aBé世. 1\n\t\x1c\x85\u3000\u200b", "\n\n", "  ", "'s", "\r\n"]


@pytest.mark.parametrize("kind", ["bpe", "word"])
@given(text=st.lists(st.sampled_from(SCRAPS)).map("".join) | st.text())
def test_splitting_changes_no_id(tokenizers, kind, text):
    pieces = list(split_text(text, limit=1))
    assert "".join(pieces) == text
    batch = tokenizers[kind].encode_batch(pieces)
    assert [token for ids in batch for token in ids] == tokenizers[kind].encode(text)


def test_splits_inside_words_change_ids(tokenizers, documents):
    ids = tokenizers["bpe"].encode(documents[0])
    pieces = [documents[0][at : at + 1000] for at in range(0, len(documents[0]), 1000)]
    assert [token for row in tokenizers["bpe"].encode_batch(pieces) for token in row] != ids


@pytest.mark.parametrize("limit", [10, 5000])
def test_batches_keep_their_order(tokenizers, documents, monkeypatch, limit):
    expected = [tokenizers["bpe"].encode(text) for text in documents]
    sizes = []
    encode = HFTokenizer._encode_pieces

    def watched(self, backend, waiting, unknown):
        sizes.append(sum(len(piece) for _, piece in waiting))
        encode(self, backend, waiting, unknown)

    monkeypatch.setattr(HFTokenizer, "_encode_pieces", watched)
    monkeypatch.setattr(hf_tokenizer, "BATCH_CHARS", 4 * limit)
    monkeypatch.setattr(hf_tokenizer, "split_text", lambda text: split_text(text, limit))
    assert tokenizers["bpe"].encode_batch(documents) == expected
    assert len(sizes) > 10 and max(sizes) <= 5 * limit + 200
