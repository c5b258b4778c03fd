"""Masked language modeling (Devlin et al. 2018, sec. 3.1): predict hidden tokens.

Of a row's non-special tokens, the share ``noise_density`` (0.15), rounded and at least one, is drawn; only these are in
the loss. Each drawn token independently becomes the mask (80%), a random token (10%), or stays (10%)::

    row      [CLS] my dog is hairy [SEP]        drawn: hairy
    80%      [CLS] my dog is [MASK] [SEP]       10%  ... is apple [SEP]        10%  ... is hairy [SEP]

The draws are a function of (seed, step, row in the step), independent of the micro-batches, and equal at every
evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kvad.errors import DataError
from kvad.text import Tokenizer
from kvad.train import data
from kvad.train.data import Batch, Ints, TrainingData

TRAIN_STREAM, EVAL_STREAM = 1, 2  # streams of random numbers; never 0, because SeedSequence pads with zeros
MASKED, RANDOM = 0.8, 0.9  # below the first: the mask; below the second: a random token


def row_rng(seed: int, stream: int, number: int) -> np.random.Generator:
    """Return the random numbers of row ``number`` in a stream."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number, stream])))


def require_mask_token(tokenizer: Tokenizer, key: str = "kind = masked-lm") -> int:
    """Return the mask token; raise DataError, naming the key of [objective], if there is none."""
    if tokenizer.special_tokens.mask is None:
        raise DataError(
            f"this tokenizer has no mask token, and objective.{key} needs one",
            "Train a tokenizer, or list mask in tokenizer.special_tokens.",
        )
    return tokenizer.special_tokens.mask


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


class InputMaskingDataset:
    """Dataset whose training inputs are masked with probability ``share``.

    Word dropout (Iyyer et al. 2015, sec. 3.3): a small corpus cannot be memorized if it differs in every epoch.
    Targets, special tokens and evaluations stay unchanged.

    Raises:
        DataError: If the tokenizer has no mask.
    """

    def __init__(self, texts: TrainingData, tokenizer: Tokenizer, share: float, seed: int, step_rows: int) -> None:
        """Wrap ``texts``; ``step_rows`` are the rows of an optimizer step."""
        self._texts, self._share, self._seed, self._step_rows = texts, share, seed, step_rows
        self._mask = require_mask_token(tokenizer, "input_mask_ratio")
        self._special = torch.tensor(sorted(set(tokenizer.special_tokens.names().values())))
        self.train_tokens, self.validation_tokens = texts.train_tokens, texts.validation_tokens
        self.tokens_per_step = texts.tokens_per_step

    def micro_batches(self, step: int) -> list[Batch]:
        number, batches = step * self._step_rows, []
        for batch in self._texts.micro_batches(step):
            (sub_batch,) = batch.model_input.sub_batches
            tokens = batch.model_input.token_ids
            chance = [
                row_rng(self._seed, TRAIN_STREAM, number + row).random(sub_batch.num_new_tokens)
                for row in range(sub_batch.num_seqs)
            ]
            chosen = torch.from_numpy(np.concatenate(chance) < self._share).to(tokens.device)
            chosen &= ~torch.isin(tokens, self._special.to(tokens.device))
            batches.append(
                batch._replace(model_input=batch.model_input._replace(token_ids=tokens.masked_fill(chosen, self._mask)))
            )
            number += sub_batch.num_seqs
        return batches

    def evaluation(self) -> Iterator[Batch]:
        return self._texts.evaluation()

    def provenance(self, number: int) -> list[int]:
        return data.collate.row_provenance(self._texts, number)

    def summary(self) -> list[str]:
        return [
            *self._texts.summary(),
            f"hidden: {self._share:.0%} of the input tokens in training, drawn again at each step",
        ]


class MaskedLMDataset:
    """Rows of documents with hidden tokens; raises DataError if the tokenizer has no mask."""

    def __init__(self, rows: TrainingData, tokenizer: Tokenizer, density: float, seed: int, step_rows: int) -> None:
        """Wrap ``rows``, next-token batches; ``step_rows`` are the rows of an optimizer step."""
        self._rows, self._density, self._seed, self._step_rows = rows, density, seed, step_rows
        self._mask = require_mask_token(tokenizer)
        self._special = np.array(sorted(set(tokenizer.special_tokens.names().values())), np.int64)
        self._choices: Ints = np.setdiff1d(np.arange(tokenizer.vocab_size), self._special)
        self.train_tokens, self.validation_tokens = rows.train_tokens, rows.validation_tokens
        self.tokens_per_step = round(density * rows.tokens_per_step)
        self.read_per_step = rows.tokens_per_step

    def micro_batches(self, step: int) -> list[Batch]:
        number, batches = step * self._step_rows, []
        for batch in self._rows.micro_batches(step):
            batches.append(self._mask_batch(batch, TRAIN_STREAM, number))
            number += sum(sub_batch.num_seqs for sub_batch in batch.model_input.sub_batches)
        return batches

    def evaluation(self) -> Iterator[Batch]:
        number = 0
        for batch in self._rows.evaluation():
            yield self._mask_batch(batch, EVAL_STREAM, number)
            number += sum(sub_batch.num_seqs for sub_batch in batch.model_input.sub_batches)

    def provenance(self, number: int) -> list[int]:
        return data.collate.row_provenance(self._rows, number)

    def summary(self) -> list[str]:
        return [
            *self._rows.summary(),
            f"masked: {self._density:.0%} of the tokens of a row are hidden, drawn again at each step",
        ]

    def _mask_batch(self, batch: Batch, stream: int, first: int) -> Batch:
        model_input = batch.model_input
        (sub_batch,) = model_input.sub_batches
        tokens = model_input.token_ids.cpu().numpy().reshape(sub_batch.num_seqs, sub_batch.num_new_tokens)
        is_hidable = ~np.isin(tokens, self._special)
        owner = (
            model_input.causal_order if model_input.document_ids is None else model_input.document_ids
        )  # -1: padding
        if owner is not None:
            is_hidable &= (owner >= 0).cpu().numpy().reshape(is_hidable.shape)
        rows, logit_indices = [], []
        for row in range(sub_batch.num_seqs):
            random = row_rng(self._seed, stream, first + row)
            inputs, drawn = mask_row(
                tokens[row], np.flatnonzero(is_hidable[row]), self._choices, self._mask, self._density, random
            )
            rows.append(inputs)
            logit_indices.append(row * sub_batch.num_new_tokens + drawn)
        device = model_input.token_ids.device
        at = torch.from_numpy(np.concatenate(logit_indices)).to(device)
        hidden = model_input._replace(token_ids=torch.from_numpy(np.concatenate(rows)).to(device), logit_indices=at)
        return Batch(hidden, model_input.token_ids[at])
