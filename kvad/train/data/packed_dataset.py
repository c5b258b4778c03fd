"""Training data of a run: numbered rows of packed texts as batches.

A ``Packer`` puts texts into rows: documents, whole pairs and examples (``packers.py``), or texts in corpus order
(``streaming.py``). A ``RowTransform`` derives inputs and targets from a row (``objectives/``); without one, targets are
those of the packer. Row n is a function of (seed, n), independent of the access order, so the batches of a step are a
function of (seed, step), and only the step must be saved.

``MixtureRows`` draws each row's source by weight, in blocks of ``BLOCK`` rows, each a function of (seed, block); the
number of rows of each source before a block is counted once. So row n is the k-th row of its source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from kvad.train.config import RunConfig
from kvad.train.data.collate import Batch, CollateConfig, PackedRow, Segment, collate_rows
from kvad.train.data.packing import RowLayout
from kvad.train.data.token_store import Ints

BLOCK = 1024
_DRAWS, _PARTS = 1, 2  # streams of random numbers of a mixture
TRAIN_STREAM, EVAL_STREAM = 1, 2  # streams of ``row_rng``; never 0, because SeedSequence pads with zeros


def seeded_rng(seed: int, *numbers: int) -> np.random.Generator:
    """Return random numbers that are a function of the run's seed and other integers."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *numbers])))


def row_rng(seed: int, stream: int, number: int) -> np.random.Generator:
    """Return the random numbers of row ``number`` in a stream."""
    return seeded_rng(seed, number, stream)


def source_seeds(seed: int, count: int) -> list[int]:
    """Return a seed for each source of a run, so that no two sources of a mixture have the same order."""
    if count == 1:
        return [seed]
    return [int(seeded_rng(seed, _PARTS, number).integers(1 << 62)) for number in range(count)]


class PackingStats(NamedTuple):
    """Use of the rows' capacity."""

    rows: int
    capacity: int  # tokens
    num_used: int  # tokens
    num_cropped: int = 0  # tokens lost by cropping

    def summary(self) -> str:
        """Return the shares of used, padding and cropped tokens."""
        lost = self.num_cropped / max(1, self.num_used + self.num_cropped)
        filled = self.num_used / max(1, self.capacity)
        return f"{filled:.1%} filled, {1 - filled:.1%} padding, {lost:.1%} of the tokens cropped"


class RowSource(Protocol):
    """Endless rows by index; the order is a function of the seed."""

    def rows(self, numbers: Ints) -> list[PackedRow]:
        """Return rows ``numbers`` [n], which ascend from step to step."""
        ...

    def provenance(self, number: int) -> list[int]:
        """Return the corpus indices of the texts in row ``number``, [] if unknown; a pair counts as one text."""
        ...

    def packing_stats(self) -> PackingStats:
        """Return the packing of the first epoch or block."""
        ...


class Epochs:
    """Maps row numbers to values that are made for a whole epoch, or for a block of ``per_epoch`` rows, at a time.

    Args:
        per_epoch: Rows per epoch, None if it varies; then epochs are counted from the first one on.
        order: Returns the values of an epoch's rows in their order.
    """

    def __init__(self, per_epoch: int | None, order: Callable[[int], Ints]) -> None:
        self._per_epoch, self._order = per_epoch, lru_cache(1)(order)
        self._begins = [0]  # first row number of each epoch

    def epoch_and_row(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return epochs and rows, [n] each, of ``numbers`` [n]."""
        epochs, inside = self._split(numbers)
        rows = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            rows[in_epoch] = self._order(int(epoch))[inside[in_epoch]]
        return epochs, rows

    def _split(self, numbers: Ints) -> tuple[Ints, Ints]:
        if self._per_epoch is not None:
            return numbers // self._per_epoch, numbers % self._per_epoch
        while len(numbers) and self._begins[-1] <= int(numbers.max()):
            self._begins.append(self._begins[-1] + len(self._order(len(self._begins) - 1)))
        epochs: Ints = np.searchsorted(np.array(self._begins), numbers, side="right") - 1
        return epochs, numbers - np.array(self._begins)[epochs]


class EpochPlan(NamedTuple):
    """Packed rows of an epoch and the order in which they are used."""

    layout: RowLayout
    order: Ints


class LayoutRows:
    """Rows of packed texts, each used once per epoch.

    Args:
        plan: Returns the plan of an epoch.
        segment: Returns tokens begin to end of a text.
        per_epoch: Rows per epoch, None if it varies.
    """

    def __init__(
        self, plan: Callable[[int], EpochPlan], segment: Callable[[int, int, int], Segment], per_epoch: int | None
    ) -> None:
        self.plan, self._segment = lru_cache(2)(plan), segment  # a step rarely spans more than two epochs
        self._epochs = Epochs(per_epoch, lambda epoch: self.plan(epoch).order)

    def rows(self, numbers: Ints) -> list[PackedRow]:
        epochs, rows = self._epochs.epoch_and_row(numbers)
        return [self.row(self.plan(epoch).layout, row) for epoch, row in zip(epochs.tolist(), rows, strict=True)]

    def row(self, layout: RowLayout, row: int) -> PackedRow:
        return [self._segment(*piece) for piece in layout.pieces(row)]

    def provenance(self, number: int) -> list[int]:
        (epoch,), (row,) = self._epochs.epoch_and_row(np.array([number]))
        return [text for text, _, _ in self.plan(int(epoch)).layout.pieces(row)]


class MixtureRows:
    """Rows drawn from several sources; ``weights`` are shares in any unit."""

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float], seed: int) -> None:
        self._sources, self._seed = sources, seed
        self._cumulative_weights = np.cumsum(weights) / sum(weights)
        self._before: list[Ints] = [np.zeros(len(sources), np.int64)]  # number of rows of each source before each block
        self._which, self._inside = Epochs(BLOCK, self._draw_sources), Epochs(BLOCK, self._rows_of_sources)

    def rows(self, numbers: Ints) -> list[PackedRow]:
        which, inside = self.assign(numbers)
        rows: list[PackedRow] = [()] * len(numbers)
        for source in np.unique(which):
            of_source = np.flatnonzero(which == source)
            for at, row in zip(of_source.tolist(), self._sources[source].rows(inside[of_source]), strict=True):
                rows[at] = row
        return rows

    def provenance(self, number: int) -> list[int]:
        (which,), (inside,) = self.assign(np.array([number]))
        return self._sources[int(which)].provenance(int(inside))

    def packing_stats(self) -> PackingStats:
        """Return the sums over all sources."""
        stats = [source.packing_stats() for source in self._sources]
        return PackingStats(*(sum(values) for values in zip(*stats, strict=True)))

    def assign(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return the source of each row and its index among that source's rows, [n] each."""
        return self._which.epoch_and_row(numbers)[1], self._inside.epoch_and_row(numbers)[1]

    def _draw_sources(self, block: int) -> Ints:
        chances = seeded_rng(self._seed, _DRAWS, block).random(BLOCK)
        drawn: Ints = np.searchsorted(self._cumulative_weights, chances, side="right")
        return drawn.clip(max=len(self._sources) - 1)

    def _rows_of_sources(self, block: int) -> Ints:
        """Return the index of each row of a block among its source's rows, [BLOCK]."""
        while len(self._before) <= block:
            counts = np.bincount(self._draw_sources(len(self._before) - 1), minlength=len(self._sources))
            self._before.append(self._before[-1] + counts)
        drawn = self._draw_sources(block)
        in_block = np.cumsum(drawn[:, None] == np.arange(len(self._sources)), axis=0)  # [BLOCK, sources]
        rows: Ints = self._before[block][drawn] + in_block[np.arange(BLOCK), drawn] - 1
        return rows


def mix_rows(sources: Sequence[RowSource], weights: Sequence[float], seed: int) -> RowSource:
    """Return the only source, or the mixture of several."""
    return sources[0] if len(sources) == 1 else MixtureRows(sources, weights, seed)


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
    """Batches of packed rows; ``shape``, their collation, is by default that of ``config``."""

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

    def summary(self) -> list[str]:
        """Return lines about the data for the user."""
        return self.packer.summary() + ([] if self.transform is None else self.transform.summary())
