"""Training data of a run: packed rows as batches.

A ``Packer`` puts texts into rows: documents (``document_packer.py``), whole pairs and examples
(``text_packer.py``), or texts in corpus order (``streaming.py``). A ``RowTransform`` derives inputs and targets
from a row (``objectives/``); without one, targets are those of the packer. The batches of a step are a function of
(seed, step), so only the step must be saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvad.train.config import RunConfig
from kvad.train.data.collate import Batch, CollateConfig, PackedRow, collate_rows
from kvad.train.data.row_sources import EVAL_STREAM, TRAIN_STREAM, PackingStats, RowSource, row_rng
from kvad.train.data.token_store import Ints


class MixtureSource(NamedTuple):
    """Texts ``first`` to ``last`` of the store, with their share of the rows; a pair counts as one text."""

    first: int
    last: int
    weight: float = 1.0  # in any unit
    num_held_out: int = 0  # texts at the end for validation only; 0 holds out a fraction


class Packer(ABC):
    """Texts of a run as packed rows."""

    source: RowSource  # training rows
    train_tokens: int  # targets of an epoch; 0 if unknown
    validation_tokens: int
    tokens_per_step: int

    @abstractmethod
    def evaluation_rows(self, num_tokens: int, batch_size: int) -> Iterator[list[PackedRow]]:
        """Yield batches of validation rows, with about ``num_tokens`` targets (0: all), evenly spread."""

    def examples(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Return the first held-out pairs as ids: the encoder's input and the framed target; [] without pairs."""
        return []

    @abstractmethod
    def summary(self) -> list[str]:
        """Return lines about the data for the user."""


class RowTransform(ABC):
    """Derives inputs and targets of a row; draws depend on the row's number in the run or the evaluation only."""

    @abstractmethod
    def __call__(self, row: PackedRow, random: np.random.Generator, step: int | None) -> PackedRow:
        """Return the row as the model reads it in optimizer step ``step``, or in an evaluation (None)."""

    def tokens_per_step(self, num_packed: int) -> int:
        """Return the targets of a step whose rows have ``num_packed`` tokens."""
        return num_packed

    def summary(self) -> list[str]:
        """Return lines about the transform for the user."""
        return []


class PackedDataset:
    """Batches of packed rows.

    Args:
        packer: Packs the texts.
        config: The run's configuration.
        transform: Derives inputs and targets of a row.
        shape: Collation of the rows; by default that of ``config``.
    """

    def __init__(
        self,
        packer: Packer,
        config: RunConfig,
        transform: RowTransform | None = None,
        shape: CollateConfig | None = None,
    ) -> None:
        self.packer, self.transform, self._train = packer, transform, config.train
        self.shape = shape or CollateConfig.of_run(config)
        self._step_rows = config.train.batch_size * config.train.gradient_accumulation_steps
        self.train_tokens, self.validation_tokens = packer.train_tokens, packer.validation_tokens
        self.read_per_step = self.tokens_per_step = packer.tokens_per_step
        if transform is not None:
            self.tokens_per_step = transform.tokens_per_step(packer.tokens_per_step)

    def rows(self, numbers: Ints) -> list[PackedRow]:
        """Return training rows by number."""
        rows = self.packer.source.rows(numbers)
        if self.transform is None:
            return rows
        return [
            self.transform(row, row_rng(self._train.seed, TRAIN_STREAM, number), number // self._step_rows)
            for row, number in zip(rows, numbers.tolist(), strict=True)
        ]

    def micro_batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of optimizer step ``step`` (from 0), a function of the step alone."""
        rows, size = self.rows(np.arange(self._step_rows) + step * self._step_rows), self._train.batch_size
        return [collate_rows(rows[low : low + size], self.shape) for low in range(0, len(rows), size)]

    def first_rows(self, count: int) -> Batch:
        """Return the first rows of the run as one batch."""
        return collate_rows(self.rows(np.arange(count)), self.shape)

    def evaluation(self) -> Iterator[Batch]:
        """Yield the validation split, or as much of it as ``train.eval_tokens`` requests."""
        number = 0
        for rows in self.packer.evaluation_rows(self._train.eval_tokens, self._train.batch_size):
            if self.transform is not None:
                randoms = [row_rng(self._train.seed, EVAL_STREAM, number + index) for index in range(len(rows))]
                rows = [self.transform(row, random, None) for row, random in zip(rows, randoms, strict=True)]
            number += len(rows)
            yield collate_rows(rows, self.shape)

    def provenance(self, number: int) -> list[int]:
        """Return the corpus indices of the texts in row ``number``, [] if unknown; a pair counts as one text."""
        return self.packer.source.provenance(number)

    def packing_stats(self) -> PackingStats:
        """Return the packing of the first epoch or block."""
        return self.packer.source.packing_stats()

    def summary(self) -> list[str]:
        """Return lines about the data for the user."""
        return self.packer.summary() + ([] if self.transform is None else self.transform.summary())
