"""Streamed text equals ``decode`` for any ids of any tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvad.errors import TokenizerError
from kvad.text.detokenizer import Detokenizer
from kvad.text.tokenizer import train_tokenizer

HARD = ["🙂", "👩‍👩‍👧", "한국어", "각", "e\u0301", "\ufeff", "\ufffd", "\x00", "\r\n", "ð", "\U0010ffff"]


def stream(tokenizer, ids, *, skip_specials=True):
    detokenizer = Detokenizer(tokenizer, skip_specials=skip_specials)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", ["bpe", "byte", "char", "word"])
@given(data=st.data())
def test_any_ids(tokenizers, kind, data):
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    for skip in (True, False):
        assert "".join(stream(tokenizer, ids, skip_specials=skip)) == tokenizer.decode(ids, skip_specials=skip)


@given(raw=st.binary() | st.lists(st.sampled_from([s.encode()[:n] for s in HARD for n in range(1, 9)])).map(b"".join))
def test_any_bytes_against_one_decode(raw):
    """The byte tokenizer's ids are the bytes, so Python's decoder is the reference."""
    tokenizer = train_tokenizer("byte", [])
    assert tokenizer.decode(list(raw)) == "".join(stream(tokenizer, list(raw))) == raw.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", ["bpe", "byte"])
@given(text=st.text() | st.lists(st.sampled_from(HARD)).map("".join))
def test_valid_text_streams_without_replacement_characters(tokenizers, kind, text):
    pushed = stream(tokenizers[kind], tokenizers[kind].encode(text))
    assert "".join(pushed) == text
    assert pushed[-1] == ""
    assert "".join(pushed).count("\ufffd") == text.count("\ufffd")


def test_character_is_emitted_with_its_last_byte():
    tokenizer = train_tokenizer("byte", [])
    assert stream(tokenizer, list("a🙂".encode())) == ["a", "", "", "", "🙂", ""]
    assert stream(tokenizer, list("🙂".encode())[:3]) == ["", "", "", "\ufffd"]  # broken, but only the end proves it
    assert stream(tokenizer, [0xE3, 0x41]) == ["", "\ufffdA", ""]  # proven by the byte that follows
    assert stream(tokenizer, [0xF0, 256, 0x9F, 0x99, 0x82]) == ["", "", "", "", "🙂", ""]  # a skipped special between


def test_flush_resets_the_stream():
    tokenizer = train_tokenizer("word", ['say "a" b'])
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode('say "a"')
    for _ in range(2):
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == 'say "a"'


def test_unknown_id_is_named(tokenizer):
    with pytest.raises(TokenizerError, match=f"token id {tokenizer.vocab_size} "):
        Detokenizer(tokenizer).push(tokenizer.vocab_size)


def test_token_by_token_decoding_is_detected(tokenizers):
    """The naive way, decoding each id alone, fails the tests above."""
    byte, word = tokenizers["byte"], tokenizers["word"]
    ids = byte.encode("🙂")
    assert "".join(byte.decode([token]) for token in ids) != byte.decode(ids)
    ids = word.encode("import self")
    assert "".join(word.decode([token]) for token in ids) != word.decode(ids)
