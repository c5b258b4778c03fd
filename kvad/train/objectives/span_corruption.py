"""Span corruption (Raffel et al. 2020, sec. 3.1.4): predict spans cut from a text.

Of n tokens, round(n noise_density) are cut out in round(cut / mean_span_length) spans; the lengths of the spans and of
the text between them are drawn. Each span leaves its own sentinel; one more sentinel ends the target::

    text      Thank you for inviting me to your party last week
    source    Thank you <extra_id_0> me to your party <extra_id_1> week EOS
    target    <extra_id_0> for inviting <extra_id_1> last <extra_id_2> EOS

A row of the data has as many tokens as make a source of ``seq_len`` (568 for 512, at 0.15 and 3). Every document of it
is corrupted separately and stays one: no source, target or cross-attention depends on another document. The draws are a
function of (seed, step, row in the step). The decoder starts with BOS, or with padding if there is none, as in T5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvad.checkpoint import GenerationConfig
from kvad.errors import ConfigError, DataError
from kvad.text import Tokenizer
from kvad.train import data
from kvad.train.config import ObjectiveConfig

SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))  # as in T5


class SpanTokens(NamedTuple):
    """Special tokens of corrupted texts."""

    start: int  # first decoder input
    eos: int
    pad: int
    sentinels: tuple[int, ...]


def sentinel_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of <extra_id_0>, <extra_id_1>, ... that the tokenizer has."""
    names, ids = tokenizer.special_tokens.names(), list[int]()
    while (name := f"<extra_id_{len(ids)}>") in names:
        ids.append(names[name])
    return tuple(ids)


def span_tokens(tokenizer: Tokenizer, needed: int) -> SpanTokens:
    """Return the special tokens for ``needed`` sentinels.

    Raises:
        DataError: If the tokenizer lacks EOS, a first decoder token, or sentinels.
    """
    specials, sentinels = tokenizer.special_tokens, sentinel_ids(tokenizer)
    start = specials.pad if specials.bos is None else specials.bos
    if specials.eos is None or start is None:
        raise DataError("this tokenizer has no EOS, or neither BOS nor padding to begin a target", "Train a tokenizer.")
    if len(sentinels) < needed:
        raise DataError(
            f"this tokenizer has {len(sentinels)} sentinels (<extra_id_0>, ...), and a row of this length needs "
            f"{needed}",
            "Use a shorter --seq-len, a larger objective.mean_span_length, or train a tokenizer.",
        )
    return SpanTokens(start, specials.eos, start if specials.pad is None else specials.pad, sentinels)


def span_generation_config(tokens: SpanTokens) -> GenerationConfig:
    """Return the generation settings of a run's checkpoints."""
    return GenerationConfig(
        decoder_start_token_id=tokens.start,
        eos_token_ids=(tokens.eos,),
        source_eos_token_id=tokens.eos,
        pad_token_id=tokens.pad,
        sampling={"temperature": 0.0},
    )


# ---------------------------------------------------------------- one text


def span_counts(length: int, density: float, mean_span_length: float) -> tuple[int, int]:
    """Return (tokens cut out, spans) of a text of ``length`` >= 2; gaps have >= 1 token."""
    cut = min(max(round(length * density), 1), length - 1)
    return cut, min(max(round(cut / mean_span_length), 1), cut, length - cut)


def max_raw_length(context: int, options: ObjectiveConfig) -> int:
    """Return the longest text whose source and target both fit into ``context`` tokens.

    Raises:
        ConfigError: If no text fits.
    """
    longest = 0
    for length in range(2, 4 * context):
        cut, spans = span_counts(length, options.noise_density, options.mean_span_length)
        if max(length - cut + spans + 1, cut + spans + 2) <= context:
            longest = length
    if not longest:
        raise ConfigError(f"data.seq_len: must be at least 5 for objective span-corruption, got {context}")
    return longest


def corrupt_spans(
    ids: Sequence[int], options: ObjectiveConfig, tokens: SpanTokens, random: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Return (source, target), both ended by EOS."""
    cut, spans = span_counts(len(ids), options.noise_density, options.mean_span_length)
    gaps, span_lengths = _parts(len(ids) - cut, spans, random), _parts(cut, spans, random)
    source, target, at = list[int](), list[int](), 0
    for sentinel, gap, length in zip(tokens.sentinels, gaps, span_lengths, strict=False):
        source += [*ids[at : at + gap], sentinel]
        target += [sentinel, *ids[at + gap : at + gap + length]]
        at += gap + length
    return [*source, tokens.eos], [*target, tokens.sentinels[spans], tokens.eos]


def _parts(total: int, count: int, random: np.random.Generator) -> list[int]:
    """Draw ``total`` as a sum of ``count`` lengths of at least one, all sums equally likely."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False)) + 1
    lengths: list[int] = np.diff(np.concatenate(([0], cuts, [total]))).tolist()
    return lengths


class SpanCorruption(data.packed_dataset.RowTransform):
    """Transform that cuts spans out of every document of a row; source and target become a pair.

    Args:
        tokenizer: Has the special tokens.
        options: Share and length of the spans.
        raw: Tokens of a row before spans are cut out.

    Raises:
        DataError: If the tokenizer lacks special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, options: ObjectiveConfig, raw: int) -> None:
        self._options, self._raw = options, raw
        self._cut, self._spans = span_counts(raw, options.noise_density, options.mean_span_length)
        self.special_tokens = span_tokens(tokenizer, self._spans + 1)

    def __call__(
        self, row: data.collate.PackedRow, random: np.random.Generator, step: int | None
    ) -> data.collate.PackedRow:
        pairs = [
            corrupt_spans(segment.tokens.tolist(), self._options, self.special_tokens, random)
            for segment in row
            if len(segment.tokens) > 1  # a single token cannot lose a span
        ]
        return [pair_segment(*pair, self.special_tokens.start) for pair in pairs] or [pair_segment([], [], 0)]

    def tokens_per_step(self, num_packed: int) -> int:
        return num_packed // self._raw * (self._cut + self._spans + 2)

    def summary(self) -> list[str]:
        corrupt = f"corrupted: {self._cut} of {self._raw} tokens are cut out in {self._spans} spans"
        source, target = self._raw - self._cut + self._spans + 1, self._cut + self._spans + 2
        return [f"{corrupt}: sources of {source}, targets of {target}"]


def pair_segment(source: list[int], target: list[int], start: int) -> data.collate.Segment:
    """Return a pair whose decoder reads the target shifted right, after ``start``."""
    targets = np.array(target, np.int64)
    inputs = np.array([start, *target][: len(target)], np.int64)
    return data.collate.Segment(inputs, targets, np.array(source, np.int64))
