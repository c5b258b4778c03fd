"""Rows in corpus order, read from a token store or encoded while the texts are read.

The corpus is a sequence of *items*: documents (long ones in pieces) or pairs. As many as fill ``data.shuffle_buffer``
rows are packed and their rows shuffled, one *block* at a time; the rest of a split block begins the next one. The only
difference between ``data.order = "sequential"`` and ``"stream"`` is where items come from; the rows are the same.

**Validation** is a share of the items, drawn by index, so that both orders hold out the same ones; an evaluation reads
the first of them, ``eval_tokens`` tokens. **Every epoch** begins with a row whose length is drawn from the seed, so
that cuts differ.

**The position** is four integers (``Cursor``), stored in a run's checkpoints: earlier items are read again, but
not encoded. Without them the same rows are found from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from kvad.errors import ConfigError, DataError, format_count
from kvad.text import Tokenizer
from kvad.train import sources as sources_lib
from kvad.train.config import RunConfig
from kvad.train.data.collate import PackedRow, Segment, cut_row
from kvad.train.data.packed_dataset import Packer, PackingStats, mix_rows, seeded_rng, source_seeds
from kvad.train.data.packers import packing_method
from kvad.train.data.packing import PackingMethod, pack_documents, pack_whole_texts
from kvad.train.data.token_store import Ints, TokenStore, encode_pieces
from kvad.train.sources import Corpus

_HELD, _EPOCH, _BLOCK = 3, 4, 5  # streams of random numbers


class StreamItem(NamedTuple):
    """Tokens [n] of a document, a piece of one, or a pair's target with its source."""

    item_index: int  # in the corpus
    tokens: Ints
    next_token: int  # token after them, -1 for none
    opens: bool = True  # a document begins here
    closes: bool = True  # a document ends here
    encoder_tokens: Ints | None = None  # source of a pair
    begin: int = 0  # number of the item's tokens already used

    def part(self, begin: int, end: int) -> Segment:
        targets = self.tokens[begin + 1 : end + 1]
        if begin < end == len(self.tokens):
            targets = np.append(targets, self.next_token)
        return Segment(self.tokens[begin:end], targets, self.encoder_tokens)

    def before(self, end: int) -> StreamItem:
        return self._replace(tokens=self.tokens[:end], next_token=int(self.tokens[end]), closes=False)

    def after(self, taken: int) -> StreamItem:
        return self._replace(tokens=self.tokens[taken:], opens=False, begin=self.begin + taken)


StreamItems = Callable[[int], Iterator[StreamItem]]  # items from an index on


class Cursor(NamedTuple):
    """Start of a block."""

    row: int = 0  # number of its first row
    epoch: int = 0
    item: int = 0  # index of its first item
    offset: int = 0  # number of that item's tokens already used


# ---------------------------------------------------------------- items

Pieces = Iterator[tuple[Ints, bool, bool]]  # tokens, begins a text, ends a text


def stream_texts(texts: Corpus, tokenizer: Tokenizer) -> StreamItems:
    """Return the items of texts encoded on the fly; raises DataError if a text cannot be read."""

    def pieces(skip: int) -> Pieces:
        for piece in encode_pieces(texts, tokenizer, skip=skip):
            yield np.array(piece.ids, np.int64), piece.opens, piece.closes

    texts.framer(tokenizer)
    is_pairs = isinstance(texts, sources_lib.pairs.PairCorpus)
    return _items(pieces, None if is_pairs else tokenizer.special_tokens.separator)


def stream_store(store: TokenStore, first: int, last: int, *, pairs: bool) -> StreamItems:
    """Return the items of texts ``first`` to ``last`` of a store."""
    offsets, starts = store.offsets[first : last + 1], store.document_starts
    inner = starts[(starts > offsets[0]) & (starts < offsets[-1])]
    edges = np.union1d(offsets, inner) if len(inner) else offsets  # an empty text stays one
    is_text = np.isin(edges, offsets).tolist()

    def pieces(skip: int) -> Pieces:
        for number in range(skip, len(edges) - 1):
            yield store.take(np.arange(edges[number], edges[number + 1])), is_text[number], is_text[number + 1]

    return _items(pieces, None if pairs else int(store.take(offsets[:1])[0]))


def _items(pieces: Callable[[int], Pieces], separator: int | None) -> StreamItems:
    """Return pairs, or with a separator documents, of the pieces from an index on."""
    if separator is None:
        return lambda index: _pair_items(pieces(2 * index), index)
    return lambda index: _document_items(pieces(index), index, separator)


def _document_items(pieces: Pieces, index: int, separator: int) -> Iterator[StreamItem]:
    previous: StreamItem | None = None
    for number, (tokens, opens, closes) in enumerate(pieces, index):
        if previous is not None:
            yield previous if previous.closes or not len(tokens) else previous._replace(next_token=int(tokens[0]))
        previous = StreamItem(number, tokens, separator if closes else -1, opens, closes)
    if previous is not None:
        yield previous


def _pair_items(pieces: Pieces, index: int) -> Iterator[StreamItem]:
    for number, (source, _, _) in enumerate(pieces, index):
        target, _, _ = next(pieces)
        yield StreamItem(number, target[:-1], int(target[-1]), encoder_tokens=source)


# ---------------------------------------------------------------- rows


class ShuffleBuffer:
    """Endless rows of the training items, shuffled one block at a time."""

    def __init__(
        self, items: StreamItems, context: int, fit: PackingMethod | None, shuffle: int, held_out: float, seed: int
    ) -> None:
        """Read blocks of ``shuffle`` rows; ``held_out``: share of the items, ``fit`` None: packing "split"."""
        self._items, self._context, self._fit, self._seed = items, context, fit, seed
        self._tokens, self._held_out_fraction = shuffle * context, held_out
        self._known_cursors = [Cursor()]
        self._blocks: Iterator[tuple[Cursor, list[PackedRow]]] = iter(())
        self._at, self._rows = Cursor(row=-1), list[PackedRow]()
        self._stats: PackingStats | None = None  # of the first block
        self.left_out = 0

    def rows(self, numbers: Ints) -> list[PackedRow]:
        return [self._row(number) for number in numbers.tolist()]

    def provenance(self, number: int) -> list[int]:
        return []  # unknown without reading the corpus again

    def packing_stats(self) -> PackingStats:
        return self._stats or PackingStats(0, 0, 0)

    @property
    def cursor(self) -> Cursor:
        """Start of the block that was read last."""
        return self._at if self._at.row >= 0 else self._known_cursors[-1]

    def seek(self, cursor: Cursor) -> None:
        """Continue from a cursor of an earlier run."""
        self._known_cursors = sorted({Cursor(), cursor})
        self._at, self._rows = Cursor(row=-1), []

    def is_held_out(self, index: int) -> bool:
        """Return True if an item is held out, by splitmix64 (Steele et al. 2014) of seed and index."""
        mask = (1 << 64) - 1
        x = (self._seed * 0xD1342543DE82EF95 + (index + 1) * 0x9E3779B97F4A7C15 + _HELD) & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return (x ^ (x >> 31)) / 2**64 < self._held_out_fraction

    def evaluation(self, tokens: int) -> list[PackedRow]:
        """Return the first held-out items, of ``tokens`` tokens together (0: all), packed."""
        items, count = list[StreamItem](), 0
        for item in self._split_items(0, held_out=True):
            if item.encoder_tokens is None and 0 < tokens - count < len(item.tokens):
                item = item.before(tokens - count)
            items.append(item)
            count += len(item.tokens)
            if 0 < tokens <= count:
                break
        if items and items[0].encoder_tokens is not None:
            return self._pack_items(items, seeded_rng(self._seed, _BLOCK))
        return _rows_from_items(items, self._context, self._context, whole=True)[0]

    def _row(self, number: int) -> PackedRow:
        if self._at.row > number or self._at.row < 0:
            self._blocks = self._read(max(cursor for cursor in self._known_cursors if cursor.row <= number))
            self._at, self._rows = next(self._blocks)
        while number >= self._at.row + len(self._rows):
            self._at, self._rows = next(self._blocks)
        return self._rows[number - self._at.row]

    def _split_items(self, index: int, *, held_out: bool) -> Iterator[StreamItem]:
        """Yield held-out or training items, without a next token if that is in the other split."""
        for item in self._items(index):
            if self.is_held_out(item.item_index) != held_out or not len(item.tokens):
                continue
            if item.encoder_tokens is not None and max(len(item.tokens), len(item.encoder_tokens)) > self._context:
                self.left_out += not held_out
                continue
            cut = not item.closes and self.is_held_out(item.item_index + 1) != held_out
            yield item._replace(next_token=-1) if cut else item

    def _read(self, cursor: Cursor) -> Iterator[tuple[Cursor, list[PackedRow]]]:
        """Yield blocks from a cursor on, epoch after epoch."""
        while True:
            end = cursor
            for begin, rows in self._epoch(cursor):
                yield begin, rows
                end = begin._replace(row=begin.row + len(rows))
            if end.row == cursor.row and cursor.item == 0:
                raise DataError("no text is left to train on", "Use more text, or a smaller data.validation_fraction.")
            cursor = Cursor(end.row, cursor.epoch + 1)

    def _epoch(self, cursor: Cursor) -> Iterator[tuple[Cursor, list[PackedRow]]]:
        """Yield (cursor, rows) of every block up to the end of the epoch."""
        first, waiting = self._context, list[StreamItem]()
        items = self._split_items(cursor.item, held_out=False)
        if cursor.item == cursor.offset == 0:
            first = int(seeded_rng(self._seed, _EPOCH, cursor.epoch).integers(1, self._context + 1))
        if cursor.offset:
            waiting = [item.after(cursor.offset) for item in islice(items, 1)]
        while True:
            count = sum(len(item.tokens) for item in waiting)
            while count < self._tokens and (item := next(items, None)) is not None:
                waiting.append(item)
                count += len(item.tokens)
            is_over = count < self._tokens
            if not waiting:
                return
            random = seeded_rng(self._seed, _BLOCK, cursor.epoch, cursor.row)
            if self._fit is None:
                rows, left = _rows_from_items(waiting, first, self._context, whole=is_over)
            else:
                rows, left = self._pack_items(waiting, random), []
            self._stats = self._stats or self._measure(rows, waiting, left)
            yield cursor, [rows[at] for at in random.permutation(len(rows))]
            index, offset = (left[0].item_index, left[0].begin) if left else (waiting[-1].item_index + 1, 0)
            cursor = Cursor(cursor.row + len(rows), cursor.epoch, index, offset)
            waiting, first = left, self._context
            if is_over:
                return

    def _pack_items(self, items: Sequence[StreamItem], random: np.random.Generator) -> list[PackedRow]:
        """Pack whole items, or windows of longer ones, into rows."""
        assert self._fit is not None
        lengths = np.array([len(item.tokens) for item in items])
        sources = [len(item.encoder_tokens) for item in items if item.encoder_tokens is not None]
        if sources:
            order, sizes = random.permutation(len(items)), np.stack((np.array(sources), lengths), axis=1)
            layout = pack_whole_texts(order, sizes[order], self._context, self._fit)
        else:
            layout = pack_documents(lengths, self._context, self._fit, random)
        return [[items[item].part(*span) for item, *span in layout.pieces(row)] for row in range(layout.num_rows)]

    def _measure(self, rows: list[PackedRow], items: list[StreamItem], left: list[StreamItem]) -> PackingStats:
        num_used = sum(map(_num_tokens, rows))
        num_cropped = _num_tokens(items) - _num_tokens(left) - num_used
        sides = 1 if items[0].encoder_tokens is None else 2
        return PackingStats(len(rows), sides * len(rows) * self._context, num_used, num_cropped)


def _num_tokens(parts: Sequence[StreamItem] | PackedRow) -> int:
    return sum(len(part.tokens) + (0 if part.encoder_tokens is None else len(part.encoder_tokens)) for part in parts)


def _rows_from_items(
    items: Sequence[StreamItem], first: int, context: int, *, whole: bool
) -> tuple[list[PackedRow], list[StreamItem]]:
    """Cut items into a row of ``first`` tokens and rows of ``context``; return the rows and the remaining items.

    ``whole``: a last row takes the rest.
    """
    if not items:
        return [], []
    ends = np.cumsum([0, *(len(item.tokens) for item in items)])
    edges = [0, *range(first, int(ends[-1]) + 1, context)]
    if whole and edges[-1] < ends[-1]:
        edges.append(int(ends[-1]))
    tokens = np.concatenate([item.tokens for item in items])
    targets = np.concatenate([item.part(0, len(item.tokens)).targets for item in items])
    continues = [not item.opens and item.item_index == before.item_index + 1 for before, item in pairwise(items)]
    begins = ends[1:-1][~np.array(continues, bool)]  # of segments
    rows: list[PackedRow] = []
    for low, high in pairwise(edges):
        cuts = begins[np.searchsorted(begins, low, side="right") : np.searchsorted(begins, high)] - low
        rows.append(cut_row(tokens[low:high], targets[low:high], cuts))
    at = int(np.searchsorted(ends, edges[-1], side="right")) - 1
    left = list(items[at:])
    if left and (taken := edges[-1] - int(ends[at])):
        left[0] = left[0].after(taken)
    return rows, left


# ---------------------------------------------------------------- dataset


class StreamPacker(Packer):
    """Texts of one or several sources in their order; raises DataError if a source has no held-out text."""

    train_tokens = 0  # unknown

    def __init__(
        self, sources: Sequence[tuple[StreamItems, float]], config: RunConfig, *, pairs: bool, description: str
    ) -> None:
        """Read the held-out rows; ``sources`` are items and weights, ``description`` the first summary line."""
        data, train = config.data, config.train
        if data.order == "stream" and train.eval_tokens == 0:
            raise ConfigError("train.eval_tokens: must be above 0 for order 'stream', got 0", "Use 65536, the default.")
        self._description, self._context = description, data.seq_len
        fit: PackingMethod | None = packing_method(config, "pair") if pairs else None
        if not pairs and data.packing in ("first-fit", "best-fit"):
            fit = data.packing
        self.sources = [
            ShuffleBuffer(items, data.seq_len, fit, data.shuffle_buffer, data.validation_fraction, seed)
            for (items, _), seed in zip(sources, source_seeds(train.seed, len(sources)), strict=True)
        ]
        self._validation_rows: list[PackedRow] = []
        for source in self.sources:
            if not (held_out := source.evaluation(train.eval_tokens // len(sources))):
                raise DataError(
                    f"too few texts to hold out a fraction of {data.validation_fraction:g} in corpus order",
                    'Use more documents, a larger data.validation_fraction, or data.order = "epochs".',
                )
            self._validation_rows += held_out
        self.source = mix_rows(self.sources, [weight for _, weight in sources], train.seed)
        self.source.rows(np.arange(1))  # raises if nothing is left to train on
        self.validation_tokens = sum(int((part.targets >= 0).sum()) for row in self._validation_rows for part in row)
        self.tokens_per_step = train.batch_size * train.gradient_accumulation_steps * data.seq_len

    def evaluation_rows(self, num_tokens: int, batch_size: int) -> Iterator[list[PackedRow]]:
        rows = self._validation_rows
        return (rows[low : low + batch_size] for low in range(0, len(rows), batch_size))

    def examples(self, count: int) -> list[tuple[list[int], list[int]]]:
        parts = [part for row in self._validation_rows for part in row][:count]
        return [
            (part.encoder_tokens.tolist(), [*part.tokens.tolist(), int(part.targets[-1])])
            for part in parts
            if part.encoder_tokens is not None
        ]

    def position(self) -> list[list[int]]:
        """Return the cursor of each source, for ``seek`` of a resumed run."""
        return [list(source.cursor) for source in self.sources]

    def seek(self, position: Sequence[Sequence[int]]) -> None:
        for source, cursor in zip(self.sources, position, strict=True):
            source.seek(Cursor(*cursor))

    def summary(self) -> list[str]:
        stats, lines = self.source.packing_stats(), [self._description]
        if num_left_out := sum(source.left_out for source in self.sources):
            lines.append(
                f"left out so far: {format_count(num_left_out, 'pair')} longer than data.seq_len {self._context}"
            )
        return [*lines, f"packed: of the first {format_count(stats.rows, 'row')}, {stats.summary()}"]
