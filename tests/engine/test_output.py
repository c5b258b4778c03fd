"""The test for stop strings at the end of a beam equals the one of its whole text, for tokenizers of every kind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from kvad.engine.output import OutputTextStream, ends_with_stop_string
from kvad.engine.scheduling import SamplingParams
from kvad.text import HFTokenizer, Tokenizer
from kvad.text.tokenizer import load_tokenizer, train_tokenizer
from tests.support.tokenizer_zoo import SENTENCES, library, spm_folder

KINDS = ("byte", "char", "word", "byte_level", "byte_fallback", "wordpiece", "unigram", "Llama", "T5")


def tokenizer_of(kind: str, folder: Path) -> Tokenizer:
    if kind in ("byte", "char", "word"):
        return train_tokenizer(kind, [] if kind == "byte" else SENTENCES[:5], specials=["eos", "unk"])
    return (
        load_tokenizer(spm_folder(folder, kind)) if kind[0].isupper() else HFTokenizer(Backend.from_str(library(kind)))
    )


def end_by_hand(tokenizer: Tokenizer, params: SamplingParams, tokens: list[int]) -> bool:
    stream = OutputTextStream(tokenizer, params)
    return any(stream.push(token)[1] for token in tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_text_shows_its_stop_string(kind: str, tmp_path: Path) -> None:
    """Texts of any tokens, few tokens, spaces at their start and broken characters; stop strings are parts of them."""
    tokenizer, rng, num_ends = tokenizer_of(kind, tmp_path), random.Random(0), [0, 0]
    blank = [token for token in range(tokenizer.vocab_size) if not tokenizer.token_bytes(token).strip()]
    for number in range(120):
        few = rng.sample(range(tokenizer.vocab_size), rng.choice((2, 5, tokenizer.vocab_size)))
        tokens = rng.choices(blank, k=rng.randrange(4)) if blank else []
        tokens += rng.choices(few, k=40)
        text = tokenizer.decode(tokens)
        parts = [text[start : start + rng.randint(1, 5)] for start in rng.choices(range(len(text) + 1), k=3)]
        stops = tuple(filter(None, ("\ufffd" if number % 4 == 0 else "", *parts[: rng.randint(1, 3)]))) or ("a",)
        params = SamplingParams(num_beams=2, stop=stops, min_tokens=rng.choice((0, 0, 0, 1, 25)))
        for length in range(1, len(tokens) + 1):
            expected = end_by_hand(tokenizer, params, tokens[:length])
            assert ends_with_stop_string(tokenizer, params, tokens[:length]) == expected, (stops, tokens[:length])
            num_ends[expected] += 1
            if expected:
                break
    assert min(num_ends) > 50


def test_the_end_of_a_text_begins_with_a_character_and_behind_dropped_spaces(tmp_path: Path) -> None:
    byte, t5 = tokenizer_of("byte", tmp_path), tokenizer_of("T5", tmp_path)
    (space,) = (token for token in range(t5.vocab_size) if t5.token_bytes(token) == b" ")
    for tokenizer, tokens, stop in ((byte, [*"é".encode()] * 9, "\ufffd"), (t5, [space] * 12, " ")):
        params = SamplingParams(num_beams=2, stop=(stop,))
        for length in range(1, len(tokens) + 1):
            assert not end_by_hand(tokenizer, params, tokens[:length])
            assert not ends_with_stop_string(tokenizer, params, tokens[:length])


def test_only_the_end_of_a_long_text_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, calls = train_tokenizer("byte", [], specials=[]), list[int]()
    token_bytes = tokenizer.token_bytes

    def counted(token: int) -> bytes:
        calls.append(token)
        return token_bytes(token)

    monkeypatch.setattr(tokenizer, "token_bytes", counted)
    params, text = SamplingParams(num_beams=2, stop=("END",)), b"word " * 800
    assert not ends_with_stop_string(tokenizer, params, list(text))
    assert ends_with_stop_string(tokenizer, params, [*text, *b"END"]) and len(calls) < 80
