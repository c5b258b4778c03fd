"""Packing of pieces into rows by length, and mixtures of row sources. No torch.

A piece has a length on each side (one for documents, two for pairs: source and target), at most ``context``; a row
holds ``context`` tokens on each side.

**first-fit** (first-fit-decreasing, Johnson 1973): the longest piece first, into the first row that has room for it::

    context 8     lengths 3 5 4 2 6      rows   6 2 | 5 3 | 4         nothing is cut, the rest is padding

**best-fit**: a row repeatedly takes the longest piece that still fits. If none does, a document is cropped
(best-fit-crop, nanochat): the shortest one fills the room, and its rest is lost::

    context 8     lengths 3 5 4 2 6      rows   6 2 | 5 3 | 4         (nothing left to crop: the last row is padded)
    context 8     lengths 7 7 7          rows   7 + 1 of a 7 | 7      six tokens are lost, one is padding

A pair is never cropped, because a truncated target is another text: the longest pair first, into the row with the least
room that still holds it.

:data:`OPEN_ROWS` pieces are packed at a time, so that a corpus of millions takes seconds, and a row's documents come
from anywhere in it if the pieces do.

:class:`MixtureRows` draws each row's source by weight. Draws are made in blocks of :data:`BLOCK` rows, each a function
of (seed, block); the number of rows of each source before a block is counted once. So row n is the k-th row of its
source, independent of the access order and of where a run resumes.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from kvad.train.data.collate import PackedRow, RowSource, row_provenance, seeded_rng
from kvad.train.data.token_store import Ints

OPEN_ROWS = 4096
PackingMethod = Literal["first-fit", "best-fit"]


class PackedLayout(NamedTuple):
    """Row r holds ``pieces[first[r] : first[r + 1]]`` in this order."""

    first: Ints
    pieces: Ints
    lengths: Ints  # [n, sides] tokens of each piece

    @property
    def num_rows(self) -> int:
        return len(self.first) - 1


def pack_rows(lengths: Ints, context: int, fit: PackingMethod, *, crop: bool) -> PackedLayout:
    """Pack pieces of ``lengths`` [n, sides]; ``crop``: best-fit may cut a piece's end."""
    assert not lengths.size or int(lengths.max()) <= context, "callers cut or leave out longer pieces"
    rows: list[list[tuple[int, int]]] = []  # (piece, number of tokens used or -1 for all)
    for low in range(0, len(lengths), OPEN_ROWS):
        pool = lengths[low : low + OPEN_ROWS]
        cropped = crop and fit == "best-fit"
        packed = _best_fit_crop(pool[:, 0], context) if cropped else _fit(pool, context, fit)
        rows += [[(low + piece, tokens) for piece, tokens in row] for row in packed]
    flat = [item for row in rows for item in row]
    first = np.cumsum([0, *map(len, rows)])
    pieces, limits = (np.array([item[i] for item in flat], np.int64) for i in (0, 1))
    taken = lengths[pieces] if len(pieces) else np.empty((0, lengths.shape[1]), np.int64)
    return PackedLayout(first, pieces, np.where(limits[:, None] < 0, taken, limits[:, None]))


def split_windows(lengths: Ints, context: int, offsets: Ints) -> tuple[Ints, Ints, Ints]:
    """Split documents of ``lengths`` [n] into pieces of at most ``context`` tokens.

    Longer documents are cut at ``offsets`` [n] (1 .. context) and then every ``context`` tokens::

        context 4, length 10, offset 3:  0..3  3..7  7..10

    Returns:
        (document, begin, end) of each piece.
    """
    long = lengths > context
    first = np.where(long, offsets, lengths)
    count = 1 + -(-(lengths - first) // context)
    document = np.repeat(np.arange(len(lengths)), count)
    number = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    begin = np.where(number == 0, 0, first[document] + (number - 1) * context)
    end = np.minimum(first[document] + number * context, lengths[document])
    return document, begin, end


def _decreasing(lengths: Ints) -> Ints:
    """Return the pieces by longest side, ties by index."""
    order: Ints = np.argsort(-lengths.max(axis=1), kind="stable")
    return order


def _fit(lengths: Ints, context: int, fit: PackingMethod) -> list[list[tuple[int, int]]]:
    """Place longest pieces first, into the first row with room or the fullest one."""
    room = np.full((lengths.shape[1], len(lengths)), context)
    rows: list[list[tuple[int, int]]] = []
    for piece in _decreasing(lengths).tolist():
        opened = room[:, : len(rows)]
        fits = opened[0] >= lengths[piece, 0]
        for side in range(1, len(opened)):
            fits &= opened[side] >= lengths[piece, side]
        row = int(fits.argmax()) if fit == "first-fit" and rows else 0
        if fit == "best-fit" and rows:
            row = int(np.where(fits, opened.sum(axis=0), len(opened) * context + 1).argmin())
        if not rows or not fits[row]:
            row = len(rows)
            rows.append([])
        rows[row].append((piece, -1))
        room[:, row] -= lengths[piece]
    return rows


def _best_fit_crop(lengths: Ints, context: int) -> list[list[tuple[int, int]]]:
    left: list[tuple[int, int]] = []  # (length, -piece): ties take the earlier piece first
    for piece, length in enumerate(lengths.tolist()):
        insort(left, (length, -piece))
    rows: list[list[tuple[int, int]]] = []
    while left:
        room, row = context, list[tuple[int, int]]()
        while room and left:
            at = bisect_right(left, (room, 1)) - 1
            length, piece = left.pop(max(at, 0))
            row.append((-piece, -1 if at >= 0 else room))
            room -= min(length, room)
        rows.append(row)
    return rows


BLOCK = 1024
_DRAWS, _PARTS = 1, 2  # streams of random numbers


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
        which, inside = (int(values[0]) for values in self.assign(np.array([number])))
        return row_provenance(self._sources[which], inside)

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
        drawn: Ints = np.searchsorted(self._cumulative_weights, chances, side="right").clip(
            max=len(self._cumulative_weights) - 1
        )
        return drawn

    def _rows_before(self, block: int) -> Ints:
        while len(self._before) <= block:
            counts = np.bincount(self._draw_sources(len(self._before) - 1), minlength=len(self._sources))
            self._before.append(self._before[-1] + counts)
        return self._before[block]


def source_seed(seed: int, part: int) -> int:
    """Return the seed of one source of a mixture, so that no two sources have the same order."""
    return int(seeded_rng(seed, _PARTS, part).integers(1 << 62))
