"""Rows in the order of the corpus: read from a store, or made of the texts while they are read, without one.

The corpus is a sequence of *units*: documents (those read in pieces: their pieces) or pairs.  As many as fill
``data.shuffle`` rows are packed and their rows mixed, a *block* at a time; what is left of a split block begins the
next one.  Whether units come from a store or from the texts themselves is all the difference between ``data.order =
"sequential"`` and ``"stream"``: the rows are the same.

**Held out** is a share of the units, drawn by number, so that both know them; an evaluation reads the first of them,
``eval_tokens`` tokens.  **Every epoch** begins with a row of a length that the seed draws, so that it cuts elsewhere.

**Where it stands** is four integers (:class:`Cursor`), kept in a run's checkpoints: units before it are read again, but
not encoded.  Without them the same rows are found from the beginning.
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

_HELD, _EPOCH, _BLOCK = 3, 4, 5  # what a seed is taken apart for


class StreamItem(NamedTuple):
    """``tokens`` [n] of a document, of a piece of one, or of a pair's target, whose ``source`` stands beside it.

    ``follow``: the token behind them (-1: none).  ``place``: its number in the corpus.  ``opens``, ``closes``: whether
    a document begins and ends there.  ``begin``: how many of its tokens were taken before these.
    """

    item_index: int
    tokens: Ints
    next_token: int
    opens: bool = True
    closes: bool = True
    encoder_tokens: Ints | None = None
    begin: int = 0

    def part(self, begin: int, end: int) -> Segment:
        targets = self.tokens[begin + 1 : end + 1]
        if end == len(self.tokens):
            targets = np.append(targets, self.next_token)
        return Segment(self.tokens[begin:end], targets, self.encoder_tokens)

    def before(self, end: int) -> StreamItem:
        return self._replace(tokens=self.tokens[:end], next_token=int(self.tokens[end]), closes=False)

    def after(self, taken: int) -> StreamItem:
        return self._replace(tokens=self.tokens[taken:], opens=False, begin=self.begin + taken)


StreamItems = Callable[[int], Iterator[StreamItem]]  # from a place on


class Cursor(NamedTuple):
    """Where a block begins: its first row's number, the epoch, the unit, and how many of its tokens were taken."""

    row: int = 0
    epoch: int = 0
    item: int = 0
    offset: int = 0


# ---------------------------------------------------------------- units


def stream_texts(
    texts: sources_lib.documents.DocumentCorpus | sources_lib.pairs.PairCorpus, tokenizer: Tokenizer
) -> StreamItems:
    """What is read now.  Raises DataError for text that cannot be read, in the middle of it too."""
    if isinstance(texts, sources_lib.pairs.PairCorpus):
        return lambda place: _pair_items(texts, tokenizer, place)
    separator = tokenizer.special_tokens.separator
    texts.framer(tokenizer)
    assert separator is not None

    def read(place: int) -> Iterator[StreamItem]:
        held: StreamItem | None = None
        for number, piece in enumerate(encode_pieces(texts, tokenizer, skip=place), place):
            tokens = np.array(piece.ids, np.int64)
            if held is not None:
                yield held if held.closes or not len(tokens) else held._replace(next_token=int(tokens[0]))
            held = StreamItem(number, tokens, separator if piece.closes else -1, piece.opens, piece.closes)
        if held is not None:
            yield held

    return read


def _pair_items(texts: sources_lib.pairs.PairCorpus, tokenizer: Tokenizer, place: int) -> Iterator[StreamItem]:
    source: Ints | None = None
    for piece in encode_pieces(texts, tokenizer, skip=2 * place):
        ids = np.array(piece.ids, np.int64)
        if source is None:
            source = ids
        else:
            yield StreamItem(place, ids[:-1], int(ids[-1]), encoder_tokens=source)
            place, source = place + 1, None


def stream_store(store: TokenStore, first: int, last: int, *, pairs: bool) -> StreamItems:
    """Those of texts ``first`` to ``last`` of a store."""
    offsets = store.offsets[first : last + 1]
    if pairs:

        def read_pairs(place: int) -> Iterator[StreamItem]:
            for pair in range(place, (last - first) // 2):
                begin, middle, end = offsets[2 * pair : 2 * pair + 3].tolist()
                both = store.take(np.arange(begin, end))
                yield StreamItem(pair, both[middle - begin : -1], int(both[-1]), encoder_tokens=both[: middle - begin])

        return read_pairs
    inner = store.document_starts[(store.document_starts > offsets[0]) & (store.document_starts < offsets[-1])]
    edges = np.union1d(offsets, inner)
    opens = np.isin(edges, offsets)
    separator = int(store.take(offsets[:1])[0])

    def read(place: int) -> Iterator[StreamItem]:
        for number in range(place, len(edges) - 1):
            begin, end = int(edges[number]), int(edges[number + 1])
            tokens = store.take(np.arange(begin, end if opens[number + 1] else end + 1))
            tokens, follow = (tokens, separator) if opens[number + 1] else (tokens[:-1], int(tokens[-1]))
            yield StreamItem(number, tokens, follow, bool(opens[number]), bool(opens[number + 1]))

    return read


# ---------------------------------------------------------------- rows


class ShuffleBuffer:
    """Rows of the units that are not held out, a block at a time, without an end."""

    def __init__(
        self,
        units: StreamItems,
        context: int,
        fit: PackingMethod | None,
        shuffle: int,
        held_out_fraction: float,
        seed: int,
    ) -> None:
        """``fit``: None is split; ``held``: the share held out."""
        self._units, self._context, self._fit, self._seed = units, context, fit, seed
        self._tokens, self._share = shuffle * context, held_out_fraction
        self._known = [Cursor()]
        self._blocks: Iterator[tuple[Cursor, list[PackedRow]]] = iter(())
        self._at, self._rows = Cursor(row=-1), list[PackedRow]()
        self.use: PackingStats | None = None
        self.left_out = 0

    def rows(self, numbers: Ints) -> list[PackedRow]:
        return [self._row(int(number)) for number in numbers]

    @property
    def cursor(self) -> Cursor:
        """Where the block begins that was read last."""
        return self._at if self._at.row >= 0 else self._known[-1]

    def seek(self, cursor: Cursor) -> None:
        """A place that is known from before."""
        self._known = sorted({Cursor(), cursor})
        self._at, self._rows = Cursor(row=-1), []

    def is_held_out(self, place: int) -> bool:
        """splitmix64 (Steele et al. 2014) of the seed and the place: the same for a store and a stream."""
        mask = (1 << 64) - 1
        x = (self._seed * 0xD1342543DE82EF95 + (place + 1) * 0x9E3779B97F4A7C15 + _HELD) & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return (x ^ (x >> 31)) / 2**64 < self._share

    def evaluation(self, tokens: int) -> list[PackedRow]:
        """The first units held out, of ``tokens`` tokens together (0: all), packed."""
        units, count = list[StreamItem](), 0
        for unit in self._chosen(0, held=True):
            if unit.encoder_tokens is None and 0 < tokens - count < len(unit.tokens):
                unit = unit.before(tokens - count)
            units.append(unit)
            count += len(unit.tokens)
            if 0 < tokens <= count:
                break
        if units and units[0].encoder_tokens is not None:
            return self._fitted(units, seeded_rng(self._seed, _BLOCK))
        return _rows_from_items(units, self._context, self._context, whole=True)[0]

    def _row(self, number: int) -> PackedRow:
        if self._at.row > number or self._at.row < 0:
            self._blocks = self._read(max(cursor for cursor in self._known if cursor.row <= number))
            self._at, self._rows = next(self._blocks)
        while number >= self._at.row + len(self._rows):
            self._at, self._rows = next(self._blocks)
        return self._rows[number - self._at.row]

    def _chosen(self, place: int, *, held: bool) -> Iterator[StreamItem]:
        """Units held out, or the others; where a document goes on in one of the other side, nothing follows."""
        for unit in self._units(place):
            if self.is_held_out(unit.item_index) != held or not len(unit.tokens):
                continue
            if unit.encoder_tokens is not None and max(len(unit.tokens), len(unit.encoder_tokens)) > self._context:
                self.left_out += not held
                continue
            cut = not unit.closes and self.is_held_out(unit.item_index + 1) != held
            yield unit._replace(next_token=-1) if cut else unit

    def _read(self, cursor: Cursor) -> Iterator[tuple[Cursor, list[PackedRow]]]:
        """Blocks from a cursor on, epoch after epoch."""
        while True:
            end = cursor
            for begin, rows in self._epoch(cursor):
                yield begin, rows
                end = begin._replace(row=begin.row + len(rows))
            if end.row == cursor.row and cursor.item == 0:
                raise DataError("no text is left to train on", "use more text, or hold out a smaller share")
            cursor = Cursor(end.row, cursor.epoch + 1)

    def _epoch(self, cursor: Cursor) -> Iterator[tuple[Cursor, list[PackedRow]]]:
        """(where it begins, its rows) of every block to the end of the epoch."""
        first, waiting = self._context, list[StreamItem]()
        units = self._chosen(cursor.item, held=False)
        if cursor.item == cursor.offset == 0:
            first = int(seeded_rng(self._seed, _EPOCH, cursor.epoch).integers(1, self._context + 1))
        if cursor.offset:
            waiting = [unit.after(cursor.offset) for unit in islice(units, 1)]
        ended = False
        while not ended:
            count = sum(len(unit.tokens) for unit in waiting)
            while count < self._tokens and not ended:
                unit = next(units, None)
                if unit is None:
                    ended = True
                else:
                    waiting.append(unit)
                    count += len(unit.tokens)
            if not waiting:
                return
            random = seeded_rng(self._seed, _BLOCK, cursor.epoch, cursor.row)
            if self._fit is None:
                rows, left = _rows_from_items(waiting, first, self._context, whole=ended)
            else:
                rows, left = self._fitted(waiting, random), []
            if self.use is None:
                self._measure(rows, waiting, left)
            yield cursor, [rows[at] for at in random.permutation(len(rows))]
            place, offset = (left[0].item_index, left[0].begin) if left else (waiting[-1].item_index + 1, 0)
            cursor = Cursor(cursor.row + len(rows), cursor.epoch, place, offset)
            waiting, first = left, self._context

    def _fitted(self, units: Sequence[StreamItem], random: np.random.Generator) -> list[PackedRow]:
        """Whole units, or windows of longer ones, side by side."""
        lengths = np.array([len(unit.tokens) for unit in units])
        sources = [unit.encoder_tokens for unit in units if unit.encoder_tokens is not None]
        if sources:
            assert self._fit is not None
            sizes = np.stack((np.array(list(map(len, sources))), lengths), axis=1)
            number, begin, end = np.arange(len(units)), np.zeros_like(lengths), lengths
        else:
            offsets = random.integers(1, self._context + 1, len(units))
            number, begin, end = split_windows(lengths, self._context, offsets)
            sizes = (end - begin)[:, None]
        mixed = random.permutation(len(number))
        packed = pack_rows(sizes[mixed], self._context, self._fit or "first-fit", crop=not sources)
        rows: list[PackedRow] = []
        for low, high in pairwise(packed.first.tolist()):
            pieces = mixed[packed.pieces[low:high]]
            ends = np.minimum(end[pieces], begin[pieces] + packed.lengths[low:high, -1])
            rows.append([units[number[p]].part(int(begin[p]), int(e)) for p, e in zip(pieces, ends, strict=True)])
        return rows

    def _measure(self, rows: Sequence[PackedRow], units: Sequence[StreamItem], left: Sequence[StreamItem]) -> None:
        """Of the first block."""
        sides = 1 if units[0].encoder_tokens is None else 2

        def tokens(found: Sequence[StreamItem] | PackedRow) -> int:
            return sum(
                len(one.tokens) + (0 if one.encoder_tokens is None else len(one.encoder_tokens)) for one in found
            )

        taken = sum(map(tokens, rows))
        cropped = tokens(units) - tokens(left) - taken
        self.use = PackingStats(len(rows), sides * len(rows) * self._context, taken, cropped)


def _rows_from_items(
    units: Sequence[StreamItem], first: int, context: int, *, whole: bool
) -> tuple[list[PackedRow], list[StreamItem]]:
    """Units one behind the other, cut into a row of ``first`` tokens and rows of ``context``; what is left of them.

    ``whole``: the last row takes what is left.
    """
    ends = np.cumsum([len(unit.tokens) for unit in units])
    total = int(ends[-1]) if len(units) else 0
    edges = [0, *range(first, total + 1, context)]
    if whole and edges[-1] < total:
        edges.append(total)
    rows: list[PackedRow] = []
    for low, high in pairwise(edges):
        row, at = list[Segment](), int(np.searchsorted(ends, low, side="right"))
        while low < high:
            unit, begins = units[at], int(ends[at]) - len(units[at].tokens)
            part = unit.part(low - begins, min(high, int(ends[at])) - begins)
            goes_on = row and low == begins and not unit.opens and units[at - 1].item_index == unit.item_index - 1
            if goes_on:
                row[-1] = Segment(*map(np.concatenate, zip(row[-1][:2], part[:2], strict=True)))
            else:
                row.append(part)
            low, at = begins + len(unit.tokens), at + 1
        rows.append(row)
    used, at = edges[-1], int(np.searchsorted(ends, edges[-1], side="right"))
    left = list(units[at:])
    if left and (taken := used - (int(ends[at]) - len(units[at].tokens))):
        left[0] = left[0].after(taken)
    return rows, left


# ---------------------------------------------------------------- a run's data


class StreamingDataset:
    """What the loop asks of data (``data.TrainingData``), of one or several sources in their order.

    Raises DataError where a source has no text held out, ConfigError for a packing that cannot be.
    """

    def __init__(
        self,
        sources: Sequence[tuple[StreamItems, float]],
        config: RunConfig,
        pad: int,
        *,
        pairs: bool,
        what: str,
        vocab: int | None = None,
    ) -> None:
        """``sources``: units and weights; ``what``: the first line told."""
        data, train = config.data, config.train
        if data.order == "stream" and train.eval_tokens == 0:
            raise ConfigError("train.eval_tokens: 0 is all of what is held out, which a stream does not know", "65536")
        self._train, self._what, self.shape = train, what, collate_config(config, pad, vocab)
        fit = packing_method(data) if pairs else None if data.packing in ("auto", "split") else data.packing
        seeds = [train.seed if len(sources) == 1 else source_seed(train.seed, number) for number in range(len(sources))]
        self.sources = [
            ShuffleBuffer(units, data.seq_len, fit, data.shuffle_buffer, data.validation_fraction, seed)  # type: ignore[arg-type]
            for (units, _), seed in zip(sources, seeds, strict=True)
        ]
        self._held: list[PackedRow] = []
        for source in self.sources:
            if not (held := source.evaluation(train.eval_tokens // len(sources))):
                raise DataError(
                    f"too few texts to hold out a share of {data.validation_fraction:g} of them in their order",
                    'use more documents or a larger data.validation_fraction, or data.order = "epochs"',
                )
            self._held += held
        weights = [weight for _, weight in sources]
        self._rows: RowSource = self.sources[0] if len(sources) == 1 else MixtureRows(self.sources, weights, train.seed)
        self._rows.rows(np.arange(1))  # refuses what holds nothing to train on
        self.train_tokens = 0  # nobody has counted them
        self.validation_tokens = sum(int((part.targets >= 0).sum()) for row in self._held for part in row)
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
        """Rows by number, as segments (``rows.py``)."""
        return self._rows.rows(numbers)

    def evaluation(self) -> Iterator[Batch]:
        batch = self._train.batch_size
        return (collate_rows(self._held[low : low + batch], self.shape) for low in range(0, len(self._held), batch))

    def examples(self, count: int) -> list[tuple[list[int], list[int]]]:
        """The first held-out pairs as ids: a source as the encoder reads it, a target with its frame."""
        parts = [part for row in self._held for part in row][:count]
        return [
            (part.encoder_tokens.tolist(), [*part.tokens.tolist(), int(part.targets[-1])])
            for part in parts
            if part.encoder_tokens is not None
        ]

    def position(self) -> list[list[int]]:
        """Where each source stands: what :meth:`seek` takes in a run that goes on."""
        return [list(source.cursor) for source in self.sources]

    def seek(self, position: Sequence[Sequence[int]]) -> None:
        for source, cursor in zip(self.sources, position, strict=True):
            source.seek(Cursor(*cursor))

    def packing_stats(self) -> PackingStats:
        """Of the first block of each source."""
        uses = [source.use for source in self.sources if source.use is not None]
        return PackingStats(*(sum(each) for each in zip(*uses, strict=True)))

    def summary(self) -> list[str]:
        use, lines = self.packing_stats(), [self._what]
        if any(source.left_out for source in self.sources):
            lines.append(
                f"left out so far: {format_count(sum(s.left_out for s in self.sources), 'pair')} longer than the context "
                f"of {self.shape.context}"
            )
        return [*lines, f"packed: of the first {format_count(use.rows, 'row')}, {use.summary()}"]
