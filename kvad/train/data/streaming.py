"""Rows in corpus order, read from a token store or encoded while the texts are read.

The corpus is a sequence of *items*: documents (long ones in pieces) or pairs. As many as fill ``data.shuffle_buffer``
rows are packed and their rows shuffled, one *block* at a time; the rest of a split block begins the next one. The only
difference between ``data.order = "sequential"`` and ``"stream"`` is where items come from; the rows are the same.

**Validation** is a share of the items, drawn by index, so that both orders hold out the same ones; an evaluation reads
the first of them, ``eval_tokens`` tokens. **Every epoch** begins with a row whose length is drawn from the seed, so
that cuts differ.

**The position** is four integers (:class:`Cursor`), stored in a run's checkpoints: earlier items are read again, but
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
from kvad.train.data.collate import Batch, PackedRow, PackingStats, RowSource, Segment, collate_rows, seeded_rng
from kvad.train.data.document_dataset import collate_config
from kvad.train.data.packing import MixtureRows, PackingMethod, pack_rows, source_seed, split_windows
from kvad.train.data.pair_dataset import packing_method
from kvad.train.data.token_store import Ints, TokenStore, encode_pieces

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
        if end == len(self.tokens):
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


def stream_texts(
    texts: sources_lib.documents.DocumentCorpus | sources_lib.pairs.PairCorpus, tokenizer: Tokenizer
) -> StreamItems:
    """Return the items of texts encoded on the fly; raises DataError if a text cannot be read."""
    if isinstance(texts, sources_lib.pairs.PairCorpus):
        return lambda index: _pair_items(texts, tokenizer, index)
    separator = tokenizer.special_tokens.separator
    texts.framer(tokenizer)
    assert separator is not None

    def read(index: int) -> Iterator[StreamItem]:
        previous: StreamItem | None = None
        for number, piece in enumerate(encode_pieces(texts, tokenizer, skip=index), index):
            tokens = np.array(piece.ids, np.int64)
            if previous is not None:
                yield previous if previous.closes or not len(tokens) else previous._replace(next_token=int(tokens[0]))
            previous = StreamItem(number, tokens, separator if piece.closes else -1, piece.opens, piece.closes)
        if previous is not None:
            yield previous

    return read


def _pair_items(texts: sources_lib.pairs.PairCorpus, tokenizer: Tokenizer, index: int) -> Iterator[StreamItem]:
    source: Ints | None = None
    for piece in encode_pieces(texts, tokenizer, skip=2 * index):
        ids = np.array(piece.ids, np.int64)
        if source is None:
            source = ids
        else:
            yield StreamItem(index, ids[:-1], int(ids[-1]), encoder_tokens=source)
            index, source = index + 1, None


def stream_store(store: TokenStore, first: int, last: int, *, pairs: bool) -> StreamItems:
    """Return the items of texts ``first`` to ``last`` of a store."""
    offsets = store.offsets[first : last + 1]
    if pairs:

        def read_pairs(index: int) -> Iterator[StreamItem]:
            for pair in range(index, (last - first) // 2):
                begin, middle, end = offsets[2 * pair : 2 * pair + 3].tolist()
                both = store.take(np.arange(begin, end))
                yield StreamItem(pair, both[middle - begin : -1], int(both[-1]), encoder_tokens=both[: middle - begin])

        return read_pairs
    inner = store.document_starts[(store.document_starts > offsets[0]) & (store.document_starts < offsets[-1])]
    edges = np.union1d(offsets, inner)
    opens = np.isin(edges, offsets)
    separator = int(store.take(offsets[:1])[0])

    def read(index: int) -> Iterator[StreamItem]:
        for number in range(index, len(edges) - 1):
            begin, end = int(edges[number]), int(edges[number + 1])
            tokens = store.take(np.arange(begin, end if opens[number + 1] else end + 1))
            tokens, follow = (tokens, separator) if opens[number + 1] else (tokens[:-1], int(tokens[-1]))
            yield StreamItem(number, tokens, follow, bool(opens[number]), bool(opens[number + 1]))

    return read


# ---------------------------------------------------------------- rows


class ShuffleBuffer:
    """Endless rows of the training items, shuffled one block at a time."""

    def __init__(
        self,
        items: StreamItems,
        context: int,
        fit: PackingMethod | None,
        shuffle: int,
        held_out_fraction: float,
        seed: int,
    ) -> None:
        """Read blocks of ``shuffle`` rows; ``fit`` None is packing "split"."""
        self._items, self._context, self._fit, self._seed = items, context, fit, seed
        self._tokens, self._held_out_fraction = shuffle * context, held_out_fraction
        self._known_cursors = [Cursor()]
        self._blocks: Iterator[tuple[Cursor, list[PackedRow]]] = iter(())
        self._at, self._rows = Cursor(row=-1), list[PackedRow]()
        self.packing_stats: PackingStats | None = None
        self.left_out = 0

    def rows(self, numbers: Ints) -> list[PackedRow]:
        return [self._row(int(number)) for number in numbers]

    @property
    def cursor(self) -> Cursor:
        """Start of the block that was read last."""
        return self._at if self._at.row >= 0 else self._known_cursors[-1]

    def seek(self, cursor: Cursor) -> None:
        """Continue from a cursor of an earlier run."""
        self._known_cursors = sorted({Cursor(), cursor})
        self._at, self._rows = Cursor(row=-1), []

    def is_held_out(self, index: int) -> bool:
        """Return True if an item is held out, equally for a store and a stream.

        Uses splitmix64 (Steele et al. 2014) of seed and index.
        """
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
        """Yield held-out or training items.

        If the next piece of a document is in the other split, the item has no next token.
        """
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
        is_over = False
        while not is_over:
            count = sum(len(item.tokens) for item in waiting)
            while count < self._tokens and not is_over:
                item = next(items, None)
                if item is None:
                    is_over = True
                else:
                    waiting.append(item)
                    count += len(item.tokens)
            if not waiting:
                return
            random = seeded_rng(self._seed, _BLOCK, cursor.epoch, cursor.row)
            if self._fit is None:
                rows, left = _rows_from_items(waiting, first, self._context, whole=is_over)
            else:
                rows, left = self._pack_items(waiting, random), []
            if self.packing_stats is None:
                self._measure(rows, waiting, left)
            yield cursor, [rows[at] for at in random.permutation(len(rows))]
            index, offset = (left[0].item_index, left[0].begin) if left else (waiting[-1].item_index + 1, 0)
            cursor = Cursor(cursor.row + len(rows), cursor.epoch, index, offset)
            waiting, first = left, self._context

    def _pack_items(self, items: Sequence[StreamItem], random: np.random.Generator) -> list[PackedRow]:
        """Pack whole items, or windows of longer ones, into rows."""
        lengths = np.array([len(item.tokens) for item in items])
        sources = [item.encoder_tokens for item in items if item.encoder_tokens is not None]
        if sources:
            assert self._fit is not None
            sizes = np.stack((np.array(list(map(len, sources))), lengths), axis=1)
            number, begin, end = np.arange(len(items)), np.zeros_like(lengths), lengths
        else:
            offsets = random.integers(1, self._context + 1, len(items))
            number, begin, end = split_windows(lengths, self._context, offsets)
            sizes = (end - begin)[:, None]
        order = random.permutation(len(number))
        packed = pack_rows(sizes[order], self._context, self._fit or "first-fit", crop=not sources)
        rows: list[PackedRow] = []
        for low, high in pairwise(packed.first.tolist()):
            pieces = order[packed.pieces[low:high]]
            ends = np.minimum(end[pieces], begin[pieces] + packed.lengths[low:high, -1])
            rows.append([items[number[p]].part(int(begin[p]), int(e)) for p, e in zip(pieces, ends, strict=True)])
        return rows

    def _measure(self, rows: Sequence[PackedRow], items: Sequence[StreamItem], left: Sequence[StreamItem]) -> None:
        """Store the packing statistics of the first block."""
        sides = 1 if items[0].encoder_tokens is None else 2

        def tokens(parts: Sequence[StreamItem] | PackedRow) -> int:
            return sum(
                len(part.tokens) + (0 if part.encoder_tokens is None else len(part.encoder_tokens)) for part in parts
            )

        taken = sum(map(tokens, rows))
        cropped = tokens(items) - tokens(left) - taken
        self.packing_stats = PackingStats(len(rows), sides * len(rows) * self._context, taken, cropped)


def _rows_from_items(
    items: Sequence[StreamItem], first: int, context: int, *, whole: bool
) -> tuple[list[PackedRow], list[StreamItem]]:
    """Cut consecutive items into a row of ``first`` tokens and rows of ``context``.

    Args:
        items: The items.
        first: Tokens of the first row.
        context: Tokens of the other rows.
        whole: The last row takes the rest.

    Returns:
        The rows and the remaining items.
    """
    ends = np.cumsum([len(item.tokens) for item in items])
    total = int(ends[-1]) if len(items) else 0
    edges = [0, *range(first, total + 1, context)]
    if whole and edges[-1] < total:
        edges.append(total)
    rows: list[PackedRow] = []
    for low, high in pairwise(edges):
        row, at = list[Segment](), int(np.searchsorted(ends, low, side="right"))
        while low < high:
            item, begins = items[at], int(ends[at]) - len(items[at].tokens)
            part = item.part(low - begins, min(high, int(ends[at])) - begins)
            continues = row and low == begins and not item.opens and items[at - 1].item_index == item.item_index - 1
            if continues:
                row[-1] = Segment(*map(np.concatenate, zip(row[-1][:2], part[:2], strict=True)))
            else:
                row.append(part)
            low, at = begins + len(item.tokens), at + 1
        rows.append(row)
    used, at = edges[-1], int(np.searchsorted(ends, edges[-1], side="right"))
    left = list(items[at:])
    if left and (taken := used - (int(ends[at]) - len(items[at].tokens))):
        left[0] = left[0].after(taken)
    return rows, left


# ---------------------------------------------------------------- dataset


class StreamingDataset:
    """Training data of one or several sources in their order.

    Raises:
        DataError: If a source has no held-out text.
        ConfigError: If the packing is not possible.
    """

    def __init__(
        self,
        sources: Sequence[tuple[StreamItems, float]],
        config: RunConfig,
        pad: int,
        *,
        pairs: bool,
        description: str,
        vocab: int | None = None,
    ) -> None:
        """Build the data; ``sources`` are items and weights, ``description`` the first summary line."""
        data, train = config.data, config.train
        if data.order == "stream" and train.eval_tokens == 0:
            raise ConfigError("train.eval_tokens: must be above 0 for order 'stream', got 0", "Use 65536, the default.")
        self._train, self._description, self.shape = train, description, collate_config(config, pad, vocab)
        fit = packing_method(data) if pairs else None if data.packing in ("auto", "split") else data.packing
        seeds = [train.seed if len(sources) == 1 else source_seed(train.seed, number) for number in range(len(sources))]
        self.sources = [
            ShuffleBuffer(items, data.seq_len, fit, data.shuffle_buffer, data.validation_fraction, seed)  # type: ignore[arg-type]
            for (items, _), seed in zip(sources, seeds, strict=True)
        ]
        self._validation_rows: list[PackedRow] = []
        for source in self.sources:
            if not (held_out := source.evaluation(train.eval_tokens // len(sources))):
                raise DataError(
                    f"too few texts to hold out a fraction of {data.validation_fraction:g} in corpus order",
                    'Use more documents, a larger data.validation_fraction, or data.order = "epochs".',
                )
            self._validation_rows += held_out
        weights = [weight for _, weight in sources]
        self._rows: RowSource = self.sources[0] if len(sources) == 1 else MixtureRows(self.sources, weights, train.seed)
        self._rows.rows(np.arange(1))  # raises if nothing is left to train on
        self.train_tokens = 0  # unknown
        self.validation_tokens = sum(int((part.targets >= 0).sum()) for row in self._validation_rows for part in row)
        self.tokens_per_step = train.batch_size * train.gradient_accumulation_steps * data.seq_len

    def micro_batches(self, step: int) -> list[Batch]:
        train = self._train
        rows = self.rows(
            np.arange(train.batch_size * train.gradient_accumulation_steps)
            + step * train.batch_size * train.gradient_accumulation_steps
        )
        return [
            collate_rows(rows[low : low + train.batch_size], self.shape)
            for low in range(0, len(rows), train.batch_size)
        ]

    def rows(self, numbers: Ints) -> list[PackedRow]:
        """Return rows by number, as segments (``collate.py``)."""
        return self._rows.rows(numbers)

    def evaluation(self) -> Iterator[Batch]:
        batch = self._train.batch_size
        return (
            collate_rows(self._validation_rows[low : low + batch], self.shape)
            for low in range(0, len(self._validation_rows), batch)
        )

    def examples(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Return the first held-out pairs as ids: the encoder's input and the framed target."""
        parts = [part for row in self._validation_rows for part in row][:count]
        return [
            (part.encoder_tokens.tolist(), [*part.tokens.tolist(), int(part.targets[-1])])
            for part in parts
            if part.encoder_tokens is not None
        ]

    def position(self) -> list[list[int]]:
        """Return the cursor of each source, for :meth:`seek` of a resumed run."""
        return [list(source.cursor) for source in self.sources]

    def seek(self, position: Sequence[Sequence[int]]) -> None:
        for source, cursor in zip(self.sources, position, strict=True):
            source.seek(Cursor(*cursor))

    def packing_stats(self) -> PackingStats:
        """Return the packing of the first block, summed over sources."""
        stats = [source.packing_stats for source in self.sources if source.packing_stats is not None]
        return PackingStats(*(sum(values) for values in zip(*stats, strict=True)))

    def summary(self) -> list[str]:
        stats, lines = self.packing_stats(), [self._description]
        if any(source.left_out for source in self.sources):
            lines.append(
                f"left out so far: {format_count(sum(s.left_out for s in self.sources), 'pair')} longer than "
                f"data.seq_len {self.shape.seq_len}"
            )
        return [*lines, f"packed: of the first {format_count(stats.rows, 'row')}, {stats.summary()}"]
