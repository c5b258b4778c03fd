"""Rows of several sources in shares: which source a row comes from is drawn by weight, as a function of the seed.

Draws are made in blocks of :data:`BLOCK` rows, each a function of (seed, block); how many rows each source gave before
a block is counted once.  So row n is the k-th of its source, whoever asks, and wherever a run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvad.train.rows import PackedRow, RowSource, row_provenance, seeded_rng
from kvad.train.store import Ints

__all__ = ["BLOCK", "MixtureRows", "source_seed"]

BLOCK = 1024
_DRAWS, _PARTS = 1, 2  # what a seed is taken apart for


class MixtureRows:
    """``weights``: shares of the rows, in any unit."""

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float], seed: int) -> None:
        self._sources, self._seed = sources, seed
        self._upto = np.cumsum(weights) / sum(weights)
        self._before: list[Ints] = [np.zeros(len(sources), np.int64)]  # per block: rows of each source before it

    def rows(self, numbers: Ints) -> list[PackedRow]:
        which, inside = self.assign(numbers)
        found: list[PackedRow] = [()] * len(numbers)
        for source in np.unique(which):
            mine = np.flatnonzero(which == source)
            for at, row in zip(mine.tolist(), self._sources[source].rows(inside[mine]), strict=True):
                found[at] = row
        return found

    def provenance(self, number: int) -> list[int]:
        which, inside = (int(found[0]) for found in self.assign(np.array([number])))
        return row_provenance(self._sources[which], inside)

    def assign(self, numbers: Ints) -> tuple[Ints, Ints]:
        """The source of each row, and its number among that source's rows, [n] each."""
        which, inside = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
        blocks = numbers // BLOCK
        for block in np.unique(blocks).tolist():
            drawn = self._drawn(block)
            before = self._rows_before(block)
            mine = blocks == block
            at = numbers[mine] % BLOCK
            which[mine] = drawn[at]
            earlier = np.array([np.cumsum(drawn == source) for source in range(len(self._sources))])
            inside[mine] = before[drawn[at]] + earlier[drawn[at], at] - 1
        return which, inside

    def _drawn(self, block: int) -> Ints:
        chances = seeded_rng(self._seed, _DRAWS, block).random(BLOCK)
        drawn: Ints = np.searchsorted(self._upto, chances, side="right").clip(max=len(self._upto) - 1)
        return drawn

    def _rows_before(self, block: int) -> Ints:
        while len(self._before) <= block:
            counts = np.bincount(self._drawn(len(self._before) - 1), minlength=len(self._sources))
            self._before.append(self._before[-1] + counts)
        return self._before[block]


def source_seed(seed: int, part: int) -> int:
    """The seed of one source of a mixture, so that no two have the same order."""
    return int(seeded_rng(seed, _PARTS, part).integers(1 << 62))
