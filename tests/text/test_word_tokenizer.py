"""Character and word tokenizers: vocabularies, unknown text, and spacing of decoded words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvad.errors import DataError, TokenizerError
from kvad.text.simple_tokenizers import CharTokenizer, WordTokenizer, _patterns, split_words
from kvad.text.tokenizer import train_tokenizer


def test_char_ids_are_in_code_point_order():
    tokenizer = train_tokenizer("char", ["banana", "cab\n"])
    assert [tokenizer.token_text(token) for token in range(6)] == ["<|endofdoc|>", "<|unk|>", "\\n", "a", "b", "c"]
    assert tokenizer.encode("cab\n") == [5, 3, 4, 2]


def test_char_vocabulary_has_the_most_frequent_characters():
    tokenizer = train_tokenizer("char", ["aaabbbccd"], vocab_size=4)
    assert tokenizer.encode("ab") == [2, 3]
    assert tokenizer.vocab_size == 4
    assert train_tokenizer("char", ["aaabbbccd"], min_freq=2).vocab_size == 5


def test_words_by_frequency_then_text():
    tokenizer = train_tokenizer("word", ["b a b c, The the"], lower=True)
    assert [tokenizer.token_text(token) for token in range(2, 7)] == ["b", "the", ",", "a", "c"]
    assert train_tokenizer("word", ["b a b c, The the"], lower=True, min_freq=2).vocab_size == 4
    assert train_tokenizer("word", ["b a b c"], vocab_size=3).vocab_size == 3


def test_lower_case_is_applied():
    for kind in ("char", "word"):
        tokenizer = train_tokenizer(kind, ["Ab ÉCLAIR"], lower=True)
        assert tokenizer.decode(tokenizer.encode("AB Éclair".replace("AB", "Ab"))) == "ab éclair"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I don't: well-known 3.14, (v1.0)!", "I|don't|:|well-known|3.14|,|(|v1.0|)|!"),
        ("a  b\t\n\r\n c", "a|b|\n|\n|c"),
        ("나는 학생이다.", "나는|학생이다|."),
        ("हिन्दी e\u0301te\u0301", "हिन्दी|e\u0301te\u0301"),  # combining marks belong to their word
        ("x=-1", "x|=|-|1"),
        ("snake_case 'tis", "snake_case|'|tis"),
        ("", ""),
    ],
)
def test_split_words(text, words):
    assert "|".join(split_words(text)) == words


@pytest.mark.parametrize(
    "text",
    [
        'He said: "Don\'t (ever)!"',
        "one\n\ntwo, 3.14 and 2 - 1",
        '"a" \'b\' "c',
        '"open\nnew "line"',
        "a [b {c}] d; e",
        "It costs $5, or 10% more…",
        "「日本」 세계",
    ],
)
def test_usual_spacing_round_trips(text):
    tokenizer = train_tokenizer("word", [text])
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_whitespace_split():
    tokenizer = train_tokenizer("word", ["a,b \n(c)"], split="whitespace")
    assert [tokenizer.token_text(token) for token in (2, 3)] == ["(c)", "a,b"]
    assert tokenizer.decode(tokenizer.encode("a,b\n\n (c)")) == "a,b (c)"
    assert not isinstance(tokenizer, CharTokenizer)


MARKS = st.text(st.sampled_from("ab1 .,'\"-([)]\n\t’‘$é\u0301世세\u200d`"), max_size=30)


@given(text=MARKS | st.text(max_size=30), split=st.sampled_from(["words", "whitespace"]), lower=st.booleans())
def test_decoded_text_encodes_to_the_same_ids(text, split, lower):
    cutter = WordTokenizer([], split=split, lower=lower)
    words = sorted(set(cutter.split_tokens(text)))
    tokenizer = WordTokenizer(words, split=split, lower=lower)
    tokenizer.on_unknown = "error"
    ids = tokenizer.encode(text)
    assert [tokenizer.token_bytes(token).decode() for token in ids] == cutter.split_tokens(text)
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


@given(text=MARKS, seed=st.integers(1, 8))
def test_any_sequence_of_words_round_trips(text, seed):
    """A model says words in any order: they must not melt into others when they are joined."""
    words = [*split_words(text)][::seed]
    tokenizer = WordTokenizer(sorted(set(words)))
    tokenizer.on_unknown = "error"
    ids = [2 + sorted(set(words)).index(word) for word in words]
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_unknown_text_is_reported_once_per_call(capsys):
    tokenizer = train_tokenizer("char", ["abc"])
    assert tokenizer.encode_batch(["axa", "yx", "é"]) == [[2, 1, 2], [1, 1], [1]]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "kvad: 4 characters not in the vocabulary became UNK: 'x' x2, 'y', 'é'\n"
    tokenizer.encode("abc")
    assert capsys.readouterr().err == ""


def test_many_unknown_words(capsys):
    tokenizer = train_tokenizer("word", ["a"])
    tokenizer.encode("b c d e f g a h")
    assert capsys.readouterr().err.endswith("'b', 'c', 'd', 'e', 'f' and 2 more\n")
    tokenizer.encode("b")
    assert capsys.readouterr().err == "kvad: 1 word not in the vocabulary became UNK: 'b'\n"


@pytest.mark.parametrize("kind", ["char", "word"])
def test_unknown_text_can_be_an_error(kind):
    strict = train_tokenizer(kind, ["a b"])
    strict.on_unknown = "error"
    with pytest.raises(TokenizerError, match=r"1 (character|word) not in the vocabulary: 'z'"):
        strict.encode("a z")
    strict.on_unknown = "warn"
    assert strict.special_tokens.unk in strict.encode("a z")
    without = train_tokenizer(kind, ["a b"], specials=[])
    with pytest.raises(TokenizerError, match="has no UNK: 'z'"):
        without.encode("a z")


def test_too_high_min_freq_is_refused():
    with pytest.raises(DataError, match="occurs 3 times"):
        train_tokenizer("word", ["a a b"], min_freq=3)


@given(text=MARKS | st.text())
def test_fast_pattern_equals_the_exact_one(text):
    _, _, full = _patterns()
    assert split_words(text) == full.findall(text)
