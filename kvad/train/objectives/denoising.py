"""Denoising objectives: the transforms of masked language modeling and span corruption.

Masked language modeling (Devlin et al. 2018, sec. 3.1) predicts hidden tokens. Of a row's non-special tokens, the share
``noise_density`` (0.15), rounded and at least one, is drawn; only these are in the loss. Each drawn token independently
becomes the mask (80%), a random token (10%), or stays (10%)::

    row      [CLS] my dog is hairy [SEP]        drawn: hairy
    80%      [CLS] my dog is [MASK] [SEP]       10%  ... is apple [SEP]        10%  ... is hairy [SEP]

Span corruption (Raffel et al. 2020, sec. 3.1.4) predicts spans cut from a text. Of n tokens, round(n noise_density) are
cut out in round(cut / mean_span_length) spans; the lengths of the spans and of the text between them are drawn. Each
span leaves its own sentinel; one more sentinel ends the target::

    text      Thank you for inviting me to your party last week
    source    Thank you <extra_id_0> me to your party <extra_id_1> week EOS
    target    <extra_id_0> for inviting <extra_id_1> last <extra_id_2> EOS

A row of the data has as many tokens as make a source of ``seq_len`` (568 for 512, at 0.15 and 3). Every document of it
is corrupted separately and stays one: no source, target or cross-attention depends on another document. The decoder
starts with BOS, or with padding if there is none, as in T5.

All draws are a function of (seed, step, row in the step), independent of the micro-batches, and equal at every
evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvad.checkpoint import GenerationConfig
from kvad.errors import ConfigError, DataError
from kvad.text import Tokenizer
from kvad.train import data as data_lib
from kvad.train.config import ObjectiveConfig
from kvad.train.data import Ints

PackedRow = data_lib.collate.PackedRow
Segment = data_lib.collate.Segment
MASKED, RANDOM = 0.8, 0.9  # below the first: the mask; below the second: a random token
SENTINELS: tuple[str, ...] = tuple(f"<extra_id_{number}>" for number in range(100))  # as in T5


def require_mask_token(tokenizer: Tokenizer, key: str = "kind = masked-lm") -> int:
    """Return the mask token; raise DataError, naming the key of [objective], if there is none."""
    if tokenizer.special_tokens.mask is None:
        raise DataError(
            f"this tokenizer has no mask token, and objective.{key} needs one",
            "Train a tokenizer, or list mask in tokenizer.special_tokens.",
        )
    return tokenizer.special_tokens.mask


def _special_ids(tokenizer: Tokenizer) -> Ints:
    return np.array(sorted(set(tokenizer.special_tokens.names().values())), np.int64)


def mask_row(
    tokens: Ints, hidable: Ints, choices: Ints, mask: int, density: float, random: np.random.Generator
) -> tuple[Ints, Ints]:
    """Hide the share ``density`` of the indices ``hidable`` of a row [L], by ``mask`` or one of the tokens ``choices``.

    Returns the row as the model reads it [L], and the drawn indices [n], ascending.
    """
    if not len(hidable):
        return tokens, hidable
    count = min(len(hidable), max(1, round(density * len(hidable))))
    drawn = np.sort(random.permutation(hidable)[:count])
    fate, others = random.random(count), choices[random.integers(0, len(choices), count)]
    inputs = tokens.copy()
    inputs[drawn] = np.where(fate < MASKED, mask, np.where(fate < RANDOM, others, tokens[drawn]))
    return inputs, drawn


class TokenMasking(data_lib.packed_dataset.RowTransform):
    """Transform for masked language modeling; raises DataError if the tokenizer has no mask."""

    def __init__(self, tokenizer: Tokenizer, density: float) -> None:
        self._mask, self._density = require_mask_token(tokenizer), density
        self._special = _special_ids(tokenizer)
        self._choices: Ints = np.setdiff1d(np.arange(tokenizer.vocab_size), self._special)

    def __call__(self, row: PackedRow, random: np.random.Generator, step: int | None) -> PackedRow:
        tokens = np.concatenate([segment.tokens for segment in row])
        hidable = np.flatnonzero(~np.isin(tokens, self._special))
        inputs, drawn = mask_row(tokens, hidable, self._choices, self._mask, self._density, random)
        targets = np.full(len(tokens), -1)
        targets[drawn] = tokens[drawn]
        return data_lib.collate.cut_row(inputs, targets, np.cumsum([len(segment.tokens) for segment in row])[:-1])

    def tokens_per_step(self, num_packed: int) -> int:
        return round(self._density * num_packed)

    def summary(self) -> list[str]:
        return [f"masked: {self._density:.0%} of the tokens of a row are hidden, drawn again at each step"]


class InputMasking(data_lib.packed_dataset.RowTransform):
    """Transform that masks inputs with probability ``share`` in training; targets and special tokens stay.

    Word dropout (Iyyer et al. 2015, sec. 3.3): a small corpus cannot be memorized if it differs in every epoch. Raises
    DataError if the tokenizer has no mask.
    """

    def __init__(self, tokenizer: Tokenizer, share: float) -> None:
        self._mask, self._share = require_mask_token(tokenizer, "input_mask_ratio"), share
        self._special = _special_ids(tokenizer)

    def __call__(self, row: PackedRow, random: np.random.Generator, step: int | None) -> PackedRow:
        return row if step is None else [self._masked(segment, random) for segment in row]

    def _masked(self, segment: Segment, random: np.random.Generator) -> Segment:
        tokens = segment.tokens
        is_hidden = (random.random(len(tokens)) < self._share) & ~np.isin(tokens, self._special)
        return segment._replace(tokens=np.where(is_hidden, self._mask, tokens))

    def summary(self) -> list[str]:
        return [f"hidden: {self._share:.0%} of the input tokens in training, drawn again at each step"]


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
    """Return the special tokens; DataError without EOS, a first decoder token, or ``needed`` sentinels."""
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


def span_counts(length: int, density: float, mean_span_length: float) -> tuple[int, int]:
    """Return (tokens cut out, spans) of a text of ``length`` >= 2; gaps have >= 1 token."""
    cut = min(max(round(length * density), 1), length - 1)
    return cut, min(max(round(cut / mean_span_length), 1), cut, length - cut)


def max_raw_length(context: int, options: ObjectiveConfig) -> int:
    """Return the longest text whose source and target both fit into ``context`` tokens; ConfigError if none does."""
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


class SpanCorruption(data_lib.packed_dataset.RowTransform):
    """Transform that cuts spans out of every document of a row; source and target become a pair.

    ``raw``: tokens of a row before spans are cut out. DataError if the tokenizer lacks special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, options: ObjectiveConfig, raw: int) -> None:
        self._options, self._raw = options, raw
        self._cut, self._spans = span_counts(raw, options.noise_density, options.mean_span_length)
        self.special_tokens = span_tokens(tokenizer, self._spans + 1)

    def __call__(self, row: PackedRow, random: np.random.Generator, step: int | None) -> PackedRow:
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


def pair_segment(source: list[int], target: list[int], start: int) -> Segment:
    """Return a pair whose decoder reads the target shifted right, after ``start``."""
    targets = np.array(target, np.int64)
    inputs = np.array([start, *target][: len(target)], np.int64)
    return Segment(inputs, targets, np.array(source, np.int64))
