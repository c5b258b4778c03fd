"""Span corruption: lengths, sources and targets, special tokens."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvad.errors import ConfigError, DataError
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config.run import ObjectiveConfig
from kvad.train.data.collate import CollateConfig, Segment, collate_rows
from kvad.train.data.packed_dataset import row_rng
from kvad.train.objectives.denoising import (
    SENTINELS,
    SpanCorruption,
    SpanTokens,
    corrupt_spans,
    max_raw_length,
    pair_segment,
    span_counts,
    span_tokens,
)

FIRST = 10_000
SPEECH = SpanTokens(start=1, eos=2, pad=1, sentinels=tuple(range(FIRST, FIRST + 301)))
USUAL = ObjectiveConfig("span-corruption")


def restored(source, target):
    """Restore the text: every sentinel of the source is replaced by its span in the target."""
    assert source[-1] == target[-1] == SPEECH.eos
    spans, last = {}, None
    for token in target[:-1]:
        if token >= FIRST:
            last, spans[token] = token, []
        else:
            spans[last].append(token)
    assert list(spans) == list(SPEECH.sentinels[: len(spans)]) and spans.pop(last) == [], "a last sentinel, of nothing"
    return [token for each in source[:-1] for token in (spans.pop(each) if each in spans else [each])], spans


@given(length=st.integers(2, 300), density=st.floats(0.05, 0.6), mean=st.floats(1.0, 10.0), seed=st.integers(0, 1000))
def test_source_and_target_restore_the_text(length, density, mean, seed):
    options = ObjectiveConfig("span-corruption", noise_density=density, mean_span_length=mean)
    text = np.random.default_rng(seed).integers(5, 500, length).tolist()
    cut, spans = span_counts(length, density, mean)
    source, target = corrupt_spans(text, options, SPEECH, row_rng(seed, 1, length))
    again, left = restored(source, target)
    assert again == text and not left
    assert len(source) == length - cut + spans + 1 and len(target) == cut + spans + 2
    assert source[0] < FIRST, "something stays before the first span"
    inside = [token for token in source if token >= FIRST]
    assert all(b - a == 1 for a, b in itertools.pairwise(inside)) and len(inside) == spans


def test_lengths_equal_those_of_t5():
    """568 tokens become 512, of which 85 are cut out in 28 spans; their target of 114 (compute_t5_input_and_target_
    lengths of google-research/text-to-text-transfer-transformer) has no last sentinel, the paper's and ours has."""
    assert max_raw_length(512, USUAL) == 568
    assert span_counts(568, 0.15, 3.0) == (85, 28)
    source, target = corrupt_spans(list(range(5, 573)), USUAL, SPEECH, row_rng(0, 1, 0))
    assert (len(source), len(target)) == (512, 114 + 1)


def test_docstring_example():
    row = [pair_segment([5, 6, FIRST, 7, 2], [FIRST, 8, FIRST + 1, 2], 1), pair_segment([9, 2], [FIRST, 2], 1)]
    batch = collate_rows([row], CollateConfig(16, SPEECH.pad))
    step = batch.model_input
    assert step.encoder_input.token_ids.tolist() == [5, 6, FIRST, 7, 2, 9, 2]
    assert step.encoder_input.document_ids.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert step.token_ids.tolist() == [1, FIRST, 8, FIRST + 1, 1, FIRST], "shifted right, each behind its start"
    assert step.positions.tolist() == [0, 1, 2, 3, 0, 1] and step.document_ids.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.targets.tolist() == [FIRST, 8, FIRST + 1, 2, FIRST, 2] and step.logit_indices.tolist() == list(
        range(6)
    )


def test_every_document_of_a_row_is_corrupted_separately():
    tokenizer = train_tokenizer("byte", [], specials=("eos", "pad", *SENTINELS))
    corruption = SpanCorruption(tokenizer, USUAL, 30)
    texts = [np.arange(10, 30), np.array([7]), np.arange(40, 50)]
    pairs = corruption([Segment(text, text) for text in texts], row_rng(0, 1, 0), 0)
    assert len(pairs) == 2, "a document of one token is left out"
    for text, pair in zip([texts[0], texts[2]], pairs, strict=True):
        plain = [token for side in (pair.encoder_tokens, pair.tokens) for token in side.tolist() if token < 256]
        assert sorted(plain) == text.tolist()
        assert (
            pair.tokens[0] == corruption.special_tokens.start and pair.tokens[1:].tolist() == pair.targets[:-1].tolist()
        )
    (empty,) = corruption([Segment(texts[1], texts[1])], row_rng(0, 1, 0), 0)
    batch = collate_rows([[empty]], CollateConfig(16, keep_document_ids=True))
    assert not len(batch.targets) and batch.model_input.encoder_input.document_ids.tolist() == [-1]


def test_noise_density_and_span_length():
    cut = [span_counts(length, 0.15, 3.0) for length in range(100, 600)]
    assert sum(c for c, _ in cut) / sum(range(100, 600)) == pytest.approx(0.15, abs=0.002)
    assert sum(c for c, _ in cut) / sum(s for _, s in cut) == pytest.approx(3.0, abs=0.05)


def test_missing_special_tokens_are_refused():
    full = train_tokenizer("byte", [], specials=("eos", "pad", *SENTINELS))
    assert span_tokens(full, 29).sentinels[:2] == (
        full.special_tokens.names()["<extra_id_0>"],
        full.special_tokens.names()["<extra_id_1>"],
    )
    assert span_tokens(full, 29).start == full.special_tokens.pad, "as T5's targets begin"
    with pytest.raises(DataError, match=r"100 sentinels .* needs 101"):
        span_tokens(full, 101)
    with pytest.raises(DataError, match="no EOS"):
        span_tokens(train_tokenizer("byte", [], specials=SENTINELS), 1)
    with pytest.raises(ConfigError, match=r"must be at least 5 .*, got 3"):
        max_raw_length(3, USUAL)
