"""Masked language modelling (Devlin et al. 2018, sec. 3.1): say the tokens that were hidden, seeing both sides.

Of the tokens of a row that are not special, the share ``density`` (0.15), rounded and at least one, is drawn; only
these are in the loss.  Each of them becomes, independently, the mask (80%), a token at random (10%), or stays (10%)::

    row      [CLS] my dog is hairy [SEP]        drawn: hairy
    80%      [CLS] my dog is [MASK] [SEP]       10%  ... is apple [SEP]        10%  ... is hairy [SEP]

What is drawn is a function of (seed, step, row in the step), however a step is cut into micro-batches, and at every
evaluation it is the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kvad.errors import DataError
from kvad.text import Tokenizer
from kvad.train import data
from kvad.train.data import Batch, Ints, TrainingData

TRAIN_STREAM, EVAL_STREAM = 1, 2  # streams of random numbers: never 0, for SeedSequence pads with zeros
MASKED, RANDOM = 0.8, 0.9  # below the first: the mask; below the second: a token at random


def row_rng(seed: int, stream: int, number: int) -> np.random.Generator:
    """Random numbers of row ``number`` of all rows that are ever drawn in a stream."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number, stream])))


def require_mask_token(tokenizer: Tokenizer, wanted: str = "kind = masked") -> int:
    """Raises DataError, naming the key of [objective] that is ``wanted``, for a tokenizer that has no mask."""
    if tokenizer.special_tokens.mask is None:
        raise DataError(
            f"this tokenizer has no mask token, and objective.{wanted} needs one",
            "train one here, or list mask in tokenizer.special_tokens",
        )
    return tokenizer.special_tokens.mask


def mask_row(
    tokens: Ints, hidable: Ints, choices: Ints, mask: int, density: float, random: np.random.Generator
) -> tuple[Ints, Ints]:
    """tokens [L]: (the row as the model reads it [L], the drawn places [n], ascending).

    ``hidable``: the places that may be drawn; ``choices``: tokens to replace one at random.
    """
    if not len(hidable):
        return tokens, hidable
    count = min(len(hidable), max(1, round(density * len(hidable))))
    drawn = np.sort(random.permutation(hidable)[:count])
    fate, others = random.random(count), choices[random.integers(0, len(choices), count)]
    read = tokens.copy()
    read[drawn] = np.where(fate < MASKED, mask, np.where(fate < RANDOM, others, tokens[drawn]))
    return read, drawn


class InputMaskingDataset:
    """Texts of which every token may be read as the mask in training, each with the chance ``share``; what is asked of
    them stays, and nothing is hidden in an evaluation.

    Word dropout (Iyyer et al. 2015, sec. 3.3): a small corpus cannot be learned by heart where it reads otherwise in
    every epoch.  Special tokens stay.  Raises DataError for a tokenizer without a mask.
    """

    def __init__(self, texts: TrainingData, tokenizer: Tokenizer, share: float, seed: int, step_rows: int) -> None:
        """``step_rows``: rows of an optimizer step."""
        self._texts, self._share, self._seed, self._step_rows = texts, share, seed, step_rows
        self._mask = require_mask_token(tokenizer, "hide")
        self._special = torch.tensor(sorted(set(tokenizer.special_tokens.names().values())))
        self.train_tokens, self.validation_tokens = texts.train_tokens, texts.validation_tokens
        self.tokens_per_step = texts.tokens_per_step

    def micro_batches(self, step: int) -> list[Batch]:
        number, batches = step * self._step_rows, []
        for batch in self._texts.micro_batches(step):
            (lane,) = batch.model_input.sub_batches
            tokens = batch.model_input.token_ids
            chance = [
                row_rng(self._seed, TRAIN_STREAM, number + row).random(lane.num_new_tokens)
                for row in range(lane.num_seqs)
            ]
            chosen = torch.from_numpy(np.concatenate(chance) < self._share).to(tokens.device)
            chosen &= ~torch.isin(tokens, self._special.to(tokens.device))
            batches.append(
                batch._replace(model_input=batch.model_input._replace(token_ids=tokens.masked_fill(chosen, self._mask)))
            )
            number += lane.num_seqs
        return batches

    def evaluation(self) -> Iterator[Batch]:
        return self._texts.evaluation()

    def provenance(self, number: int) -> list[int]:
        return data.collate.row_provenance(self._texts, number)

    def summary(self) -> list[str]:
        return [*self._texts.summary(), f"hidden: {self._share:.0%} of the tokens in training, drawn anew each time"]


class MaskedLMDataset:
    """Rows of documents with some tokens hidden.  Raises DataError for a tokenizer without a mask."""

    def __init__(self, rows: TrainingData, tokenizer: Tokenizer, density: float, seed: int, step_rows: int) -> None:
        """``rows``: what is read, as next-token batches; ``step_rows``: rows of an optimizer step."""
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
            batches.append(self._hidden(batch, TRAIN_STREAM, number))
            number += sum(lane.num_seqs for lane in batch.model_input.sub_batches)
        return batches

    def evaluation(self) -> Iterator[Batch]:
        number = 0
        for batch in self._rows.evaluation():
            yield self._hidden(batch, EVAL_STREAM, number)
            number += sum(lane.num_seqs for lane in batch.model_input.sub_batches)

    def provenance(self, number: int) -> list[int]:
        return data.collate.row_provenance(self._rows, number)

    def summary(self) -> list[str]:
        return [
            *self._rows.summary(),
            f"masked: {self._density:.0%} of the tokens of a row are hidden, drawn anew each time",
        ]

    def _hidden(self, batch: Batch, stream: int, first: int) -> Batch:
        step = batch.model_input
        (lane,) = step.sub_batches
        tokens = step.token_ids.cpu().numpy().reshape(lane.num_seqs, lane.num_new_tokens)
        may = ~np.isin(tokens, self._special)
        owner = step.causal_order if step.document_ids is None else step.document_ids  # -1: padding, isolated or not
        if owner is not None:
            may &= (owner >= 0).cpu().numpy().reshape(may.shape)
        rows, wanted = [], []
        for row in range(lane.num_seqs):
            random = row_rng(self._seed, stream, first + row)
            read, drawn = mask_row(
                tokens[row], np.flatnonzero(may[row]), self._choices, self._mask, self._density, random
            )
            rows.append(read)
            wanted.append(row * lane.num_new_tokens + drawn)
        device = step.token_ids.device
        at = torch.from_numpy(np.concatenate(wanted)).to(device)
        hidden = step._replace(token_ids=torch.from_numpy(np.concatenate(rows)).to(device), logit_indices=at)
        return Batch(hidden, step.token_ids[at])
