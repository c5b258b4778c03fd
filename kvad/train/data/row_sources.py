"""Rows by number: random numbers, epochs, rows of packed texts, and mixtures of sources.

Row n is a function of (seed, n), independent of the access order and of where a run resumes. ``MixtureRows`` draws
each row's source by weight, in blocks of ``BLOCK`` rows, each a function of (seed, block); the number of rows of
each source before a block is counted once. So row n is the k-th row of its source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from kvad.train.data.collate import PackedRow, Segment
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
    """Maps row numbers to rows if every epoch uses each of its rows once.

    Args:
        per_epoch: Rows per epoch, None if it varies; then epochs are counted from the first one on.
        order: Returns the rows of an epoch in their order.
    """

    def __init__(self, per_epoch: int | None, order: Callable[[int], Ints]) -> None:
        self._per_epoch, self._order = per_epoch, lru_cache(1)(order)
        self._begins = [0]  # first row number of each epoch

    def epoch_and_row(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return epochs and rows, [n] each, of ``numbers`` [n]."""
        epochs, inside = self._split(numbers)
        rows = np.empty(len(numbers), np.int64)
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
        which, inside = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
        blocks = numbers // BLOCK
        for block in np.unique(blocks).tolist():
            drawn = self._draw_sources(block)
            before = self._rows_before(block)
            in_block = blocks == block
            at = numbers[in_block] % BLOCK
            which[in_block] = drawn[at]
            earlier = np.array([np.cumsum(drawn == source) for source in range(len(self._sources))])
            inside[in_block] = before[drawn[at]] + earlier[drawn[at], at] - 1
        return which, inside

    def _draw_sources(self, block: int) -> Ints:
        chances = seeded_rng(self._seed, _DRAWS, block).random(BLOCK)
        drawn: Ints = np.searchsorted(self._cumulative_weights, chances, side="right")
        return drawn.clip(max=len(self._sources) - 1)

    def _rows_before(self, block: int) -> Ints:
        while len(self._before) <= block:
            counts = np.bincount(self._draw_sources(len(self._before) - 1), minlength=len(self._sources))
            self._before.append(self._before[-1] + counts)
        return self._before[block]


def mix_rows(sources: Sequence[RowSource], weights: Sequence[float], seed: int) -> RowSource:
    """Return the only source, or the mixture of several."""
    return sources[0] if len(sources) == 1 else MixtureRows(sources, weights, seed)
