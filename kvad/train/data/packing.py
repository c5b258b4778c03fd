"""Packing of pieces into rows by length. No torch.

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

``OPEN_ROWS`` pieces are packed at a time, so that a corpus of millions takes seconds, and a row's documents come
from anywhere in it if the pieces do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from kvad.train.data.token_store import Ints

OPEN_ROWS = 4096
PackingMethod = Literal["first-fit", "best-fit"]


class PackedLayout(NamedTuple):
    """Row r holds ``pieces[first[r] : first[r + 1]]`` in this order."""

    first: Ints
    pieces: Ints
    lengths: Ints  # [n, sides] tokens of each piece


class RowLayout(NamedTuple):
    """Row r holds pieces ``first[r]`` to ``first[r + 1]``; piece i is tokens ``begin[i]`` to ``end[i]`` of a text."""

    first: Ints
    text: Ints
    begin: Ints
    end: Ints

    @property
    def num_rows(self) -> int:
        return len(self.first) - 1

    def pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        """Yield (text, begin, end) of the pieces of a row."""
        span = slice(self.first[row], self.first[row + 1])
        return zip(self.text[span].tolist(), self.begin[span].tolist(), self.end[span].tolist(), strict=True)


def pack_whole_texts(texts: Ints, lengths: Ints, context: int, fit: PackingMethod) -> RowLayout:
    """Pack ``texts`` [n] of ``lengths`` [n, sides]; none is cut."""
    packed = pack_rows(lengths, context, fit, crop=False)
    return RowLayout(packed.first, texts[packed.pieces], np.zeros_like(packed.pieces), packed.lengths[:, -1])


def pack_documents(lengths: Ints, context: int, fit: PackingMethod, random: np.random.Generator) -> RowLayout:
    """Pack documents of ``lengths`` [n] in random order; longer ones are split at random offsets."""
    document, begin, end = split_windows(lengths, context, random.integers(1, context + 1, len(lengths)))
    order = random.permutation(len(document))
    packed = pack_rows((end - begin)[order][:, None], context, fit, crop=True)
    pieces = order[packed.pieces]
    return RowLayout(packed.first, document[pieces], begin[pieces], begin[pieces] + packed.lengths[:, 0])


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


def _fit(lengths: Ints, context: int, fit: PackingMethod) -> list[list[tuple[int, int]]]:
    """Place longest pieces first, into the first row with room or the fullest one."""
    room = np.full((lengths.shape[1], len(lengths)), context)
    rows: list[list[tuple[int, int]]] = []
    for piece in np.argsort(-lengths.max(axis=1), kind="stable").tolist():  # by longest side, ties by index
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
    # (length, -piece): ties take the earlier piece first
    left = sorted((length, -piece) for piece, length in enumerate(lengths.tolist()))
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
