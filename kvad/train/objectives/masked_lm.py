"""Masked language modeling (Devlin et al. 2018, sec. 3.1): predict hidden tokens.

Of a row's non-special tokens, the share ``noise_density`` (0.15), rounded and at least one, is drawn; only these are in
the loss. Each drawn token independently becomes the mask (80%), a random token (10%), or stays (10%)::

    row      [CLS] my dog is hairy [SEP]        drawn: hairy
    80%      [CLS] my dog is [MASK] [SEP]       10%  ... is apple [SEP]        10%  ... is hairy [SEP]

The draws are a function of (seed, step, row in the step), independent of the micro-batches, and equal at every
evaluation.
"""

from __future__ import annotations

import numpy as np

from kvad.errors import DataError
from kvad.text import Tokenizer
from kvad.train import data
from kvad.train.data import Ints

MASKED, RANDOM = 0.8, 0.9  # below the first: the mask; below the second: a random token


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
    """Hide tokens of a row.

    Args:
        tokens: [L] the row.
        hidable: Indices that may be drawn.
        choices: Tokens that may replace one at random.
        mask: The mask token.
        density: Share of ``hidable`` to draw.
        random: Random numbers of the row.

    Returns:
        The row as the model reads it [L], and the drawn indices [n], ascending.
    """
    if not len(hidable):
        return tokens, hidable
    count = min(len(hidable), max(1, round(density * len(hidable))))
    drawn = np.sort(random.permutation(hidable)[:count])
    fate, others = random.random(count), choices[random.integers(0, len(choices), count)]
    inputs = tokens.copy()
    inputs[drawn] = np.where(fate < MASKED, mask, np.where(fate < RANDOM, others, tokens[drawn]))
    return inputs, drawn


class TokenMasking(data.packed_dataset.RowTransform):
    """Transform for masked language modeling; raises DataError if the tokenizer has no mask."""

    def __init__(self, tokenizer: Tokenizer, density: float) -> None:
        self._mask, self._density = require_mask_token(tokenizer), density
        self._special = _special_ids(tokenizer)
        self._choices: Ints = np.setdiff1d(np.arange(tokenizer.vocab_size), self._special)

    def __call__(
        self, row: data.collate.PackedRow, random: np.random.Generator, step: int | None
    ) -> data.collate.PackedRow:
        tokens = np.concatenate([segment.tokens for segment in row])
        hidable = np.flatnonzero(~np.isin(tokens, self._special))
        inputs, drawn = mask_row(tokens, hidable, self._choices, self._mask, self._density, random)
        targets = np.full(len(tokens), -1)
        targets[drawn] = tokens[drawn]
        return data.collate.cut_row(inputs, targets, np.cumsum([len(segment.tokens) for segment in row])[:-1])

    def tokens_per_step(self, num_packed: int) -> int:
        return round(self._density * num_packed)

    def summary(self) -> list[str]:
        return [f"masked: {self._density:.0%} of the tokens of a row are hidden, drawn again at each step"]


class InputMasking(data.packed_dataset.RowTransform):
    """Transform that masks inputs with probability ``share`` in training; targets and special tokens stay.

    Word dropout (Iyyer et al. 2015, sec. 3.3): a small corpus cannot be memorized if it differs in every epoch.

    Raises:
        DataError: If the tokenizer has no mask.
    """

    def __init__(self, tokenizer: Tokenizer, share: float) -> None:
        self._mask, self._share = require_mask_token(tokenizer, "input_mask_ratio"), share
        self._special = _special_ids(tokenizer)

    def __call__(
        self, row: data.collate.PackedRow, random: np.random.Generator, step: int | None
    ) -> data.collate.PackedRow:
        return row if step is None else [self._masked(segment, random) for segment in row]

    def _masked(self, segment: data.collate.Segment, random: np.random.Generator) -> data.collate.Segment:
        tokens = segment.tokens
        is_hidden = (random.random(len(tokens)) < self._share) & ~np.isin(tokens, self._special)
        return segment._replace(tokens=np.where(is_hidden, self._mask, tokens))

    def summary(self) -> list[str]:
        return [f"hidden: {self._share:.0%} of the input tokens in training, drawn again at each step"]
