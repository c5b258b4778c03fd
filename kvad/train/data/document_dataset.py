"""Documents -> packed Steps: who is trained on what, in an order that integers alone decide.

What the loop asks of any data is :class:`TrainingData`; of documents it is :class:`DocumentData` (of pairs,
``pair_data.py``; of what is read in its order, ``stream.py``).

**Packing** ("split").  A split is a circle of documents, each opened by the separator.  A row is ``context``
consecutive tokens of the circle; its targets are the tokens one further on::

    row        <sep> a1 a2 a3 <sep> b1 b2          target     a1 a2 a3 <sep> b1 b2 b3
    position       0  1  2  3     0  1  2          document    0  0  0     0  1  1  1

So p(first word | separator) is learned, and so is the end of a document: the target of its last token is the separator.
No target crosses into the next document's text: the token after a separator is predicted from the separator alone, as
documents do not see each other (``Step.documents``) and positions restart.  A row that begins inside a document starts
at position 0 there.  Where a split had to cut a document in two, no target reaches over the cut.

"first-fit" and "best-fit" put whole documents into rows (``packing.py``); one longer than a row is cut into windows,
and the target of a window's last token is the token behind it.

**Order.**  Which rows a step takes is a function of (seed, step): nothing to save but the step.  ``epochs``: every
epoch cuts the circle, or the long documents, into rows at a fresh offset and takes them in a fresh order; ``windows``:
every row starts at random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvad.errors import ConfigError, DataError, format_count
from kvad.train.config import RunConfig
from kvad.train.data.collate import (
    Batch,
    CollateConfig,
    Epochs,
    PackedRow,
    PackingStats,
    RowSource,
    Segment,
    collate_rows,
    row_provenance,
    seeded_rng,
)
from kvad.train.data.packing import MixtureRows, PackedLayout, PackingMethod, pack_rows, source_seed, split_windows
from kvad.train.data.token_store import Ints, TokenStore

MANY_DOCUMENTS = 10  # from here on whole documents are held out


class MixtureSource(NamedTuple):
    """A source of a run's texts: those of the store from ``first`` to ``last``, and its share of the rows.

    ``held``: how many of its last ones are for validation only (0: a share is held out).
    """

    first: int
    last: int
    weight: float = 1.0
    num_held_out: int = 0


class TrainingData(Protocol):
    """What the loop asks of data: targets to train on and to judge by, those of a full step, and the Steps."""

    @property
    def train_tokens(self) -> int: ...

    @property
    def validation_tokens(self) -> int: ...

    @property
    def tokens_per_step(self) -> int: ...

    def micro_batches(self, step: int) -> list[Batch]:
        """Of optimizer step ``step`` (from 0): a function of the step alone."""
        ...

    def evaluation(self) -> Iterator[Batch]:
        """The validation split, or as much of it as the configuration asks for."""
        ...

    def summary(self) -> list[str]:
        """What a user should know of it, in lines."""
        ...


class DocumentDataset:
    """Documents, next token by next token.

    ``parts``: the sources of a mixture, whose rows are drawn by weight; none: the store is one.  Raises DataError where
    they are too few for a row of each split, ConfigError for a packing that the order cannot have.
    """

    def __init__(
        self, store: TokenStore, config: RunConfig, parts: Sequence[MixtureSource] = (), vocab: int | None = None
    ) -> None:
        data, train = config.data, config.train
        self._data, self._train, self._store = data, train, store
        self.shape = collate_config(config, vocab=vocab)
        rows = train.batch_size * train.gradient_accumulation_steps
        parts = parts or [MixtureSource(0, store.num_documents)]
        splits, self._sources = list[tuple[TokenSpans, TokenSpans]](), list[PackedRows | BestFitRows]()
        for number, part in enumerate(parts):
            seed = train.seed if len(parts) == 1 else source_seed(train.seed, number)
            splits.append(split_validation(store, data.validation_fraction, seed, (part.first, part.last)))
            self._sources.append(_build_rows(splits[-1][0], config, rows, seed))
        self.validation = TokenSpans(store, np.concatenate([held.spans for _, held in splits]))
        self.training = TokenSpans(store, np.concatenate([rest.spans for rest, _ in splits]))
        weights = [part.weight for part in parts]
        self._rows: RowSource = self._sources[0] if len(parts) == 1 else MixtureRows(self._sources, weights, train.seed)
        self.train_tokens, self.validation_tokens = len(self.training), len(self.validation)
        self.tokens_per_step = rows * data.seq_len

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

    def provenance(self, number: int) -> list[int]:
        return row_provenance(self._rows, number)

    def evaluation(self) -> Iterator[Batch]:
        data, train = self._data, self._train
        for starts, length in evaluation_rows(self.validation, data.seq_len, train.eval_tokens, train.batch_size):
            yield collate_rows(self.validation.segments(starts, length), self.shape)

    def packing_stats(self) -> PackingStats:
        """Of the first epoch of all sources together."""
        uses = [source.use() for source in self._sources]
        return PackingStats(*(sum(each) for each in zip(*uses, strict=True)))

    def summary(self) -> list[str]:
        use = self.packing_stats()
        packing = "split" if self._data.packing == "auto" else self._data.packing
        packed = (
            f"packed by {packing}: {format_count(use.rows, 'row')} of {self._data.seq_len:,} tokens, {use.summary()}"
        )
        return [f"tokens: {self._store.num_tokens:,} in {format_count(self._store.num_documents, 'document')}", packed]


def collate_config(config: RunConfig, pad: int = 0, vocab: int | None = None) -> CollateConfig:
    """How a run's rows become Steps."""
    data = config.data
    return CollateConfig(data.seq_len, pad, data.reset_positions, data.isolate_documents, config.train.device, vocab)


def _build_rows(training: TokenSpans, config: RunConfig, rows: int, seed: int) -> PackedRows | BestFitRows:
    data = config.data
    if data.packing in ("auto", "split"):
        return PackedRows(training, RowOrder(data.order, len(training), data.seq_len, rows, seed), data.seq_len)
    if data.order == "windows":
        raise ConfigError(
            f'data.packing: {data.packing} is for whole documents, and order = "windows" draws rows at random',
            'order = "epochs" takes every document once',
        )
    assert data.packing in ("first-fit", "best-fit")
    return BestFitRows(training, data.packing, data.seq_len, rows, seed)


class PackedRows:
    """Rows cut from the circle."""

    def __init__(self, training: TokenSpans, order: RowOrder, context: int) -> None:
        self._split, self._order, self._context = training, order, context

    def rows(self, numbers: Ints) -> list[PackedRow]:
        return self._split.segments(self._order.at(numbers), self._context)

    def provenance(self, number: int) -> list[int]:
        (start,) = self._order.at(np.array([number]))
        return self._split.texts(int(start), self._context)

    def use(self) -> PackingStats:
        rows, tokens = self._order.rows_per_epoch, len(self._split)
        return PackingStats(rows, rows * self._context, rows * self._context, tokens - rows * self._context)


class BestFitRows:
    """Rows of whole documents, and of windows of those that are longer; packed anew in every epoch."""

    def __init__(self, training: TokenSpans, fit: PackingMethod, context: int, num_rows: int, seed: int) -> None:
        self._split, self._fit, self._context, self._seed = training, fit, context, seed
        self._plan = lru_cache(2)(self._make)  # a step spans two epochs at most, but for tiny ones
        self._epochs = Epochs(None, num_rows, lambda epoch: self._plan(epoch).order)

    def rows(self, numbers: Ints) -> list[PackedRow]:
        epochs, rows = self._epochs.epoch_and_row(numbers)
        return [self._row(self._plan(int(epoch)), int(row)) for epoch, row in zip(epochs, rows, strict=True)]

    def provenance(self, number: int) -> list[int]:
        (epoch,), (row,) = self._epochs.epoch_and_row(np.array([number]))
        plan = self._plan(int(epoch))
        pieces = plan.packed.pieces[plan.packed.first[row] : plan.packed.first[row + 1]]
        return [self._split.text_at(int(plan.document[piece])) for piece in pieces]

    def use(self) -> PackingStats:
        packed = self._plan(0).packed
        taken = int(packed.lengths.sum())
        return PackingStats(packed.num_rows, packed.num_rows * self._context, taken, len(self._split) - taken)

    def _row(self, plan: _Plan, row: int) -> PackedRow:
        packed = plan.packed
        span = slice(packed.first[row], packed.first[row + 1])
        pieces, lengths = packed.pieces[span], packed.lengths[span, 0]
        return [
            self._split.part(int(plan.document[piece]), int(plan.begin[piece]), int(plan.begin[piece] + length))
            for piece, length in zip(pieces, lengths, strict=True)
        ]

    def _make(self, epoch: int) -> _Plan:
        random = seeded_rng(self._seed, epoch)
        lengths = self._split.lengths
        document, begin, end = split_windows(
            lengths, self._context, random.integers(1, self._context + 1, len(lengths))
        )
        mixed = random.permutation(len(document))
        document, begin, end = document[mixed], begin[mixed], end[mixed]
        packed = pack_rows((end - begin)[:, None], self._context, self._fit, crop=True)
        return _Plan(packed, document, begin, random.permutation(packed.num_rows))


class _Plan(NamedTuple):
    """An epoch: piece i is of ``document[i]`` from ``begin[i]`` on; ``order``: its rows in the order they are taken."""

    packed: PackedLayout
    document: Ints
    begin: Ints
    order: Ints


class TokenSpans:
    """Documents, or parts of them, as one circular stream of tokens.

    ``spans`` [n, 2]: first and last + 1 in the store, each within one document.
    """

    def __init__(self, store: TokenStore, spans: Ints) -> None:
        self.store, self.spans, self._begin = store, spans, spans[:, 0]
        self.lengths: Ints = spans[:, 1] - spans[:, 0]
        self._starts: Ints = np.concatenate(([0], np.cumsum(spans[:, 1] - spans[:, 0])))
        self._opened = np.isin(spans[:, 0], store.offsets)
        self._ended = np.isin(spans[:, 1], store.offsets)
        self.num_documents = len(spans)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, starts: Ints, length: int) -> tuple[Ints, Ints, Ints, Ints]:
        """tokens, positions, documents and targets, each [rows, length]; target -1 = none.

        The document number counts within the row, from 0.
        """
        at = (starts[:, None] + np.arange(length + 1)) % len(self)
        span = np.searchsorted(self._starts, at, side="right") - 1
        tokens = self.store.take(self._begin[span] + at - self._starts[span])
        first = at == self._starts[span]
        crossing = first[:, 1:] & ~(self._ended[span[:, :-1]] & self._opened[span[:, 1:]])
        targets = np.where(crossing, -1, tokens[:, 1:])
        first = first[:, :-1]
        column = np.arange(length)
        begun = np.maximum.accumulate(np.where(first, column, 0), axis=1)
        documents = np.cumsum(first & (column > 0), axis=1)
        return tokens[:, :-1], column - begun, documents, targets

    def segments(self, starts: Ints, length: int) -> list[PackedRow]:
        """The same rows as segments: cut where a document begins."""
        tokens, _, documents, targets = self.rows(starts, length)
        found: list[PackedRow] = []
        for row in range(len(starts)):
            cuts = [0, *(np.flatnonzero(np.diff(documents[row])) + 1).tolist(), length]
            spans = (slice(*pair) for pair in pairwise(cuts))
            found.append([Segment(tokens[row, span], targets[row, span]) for span in spans])
        return found

    def texts(self, start: int, length: int) -> list[int]:
        """The documents of the store that a row reads, in its order."""
        at = (start + np.arange(length)) % len(self)
        spans = np.searchsorted(self._starts, at, side="right") - 1
        return list(dict.fromkeys(self.text_at(int(span)) for span in spans))

    def text_at(self, span: int) -> int:
        """The document of the store that a span is, or is a part of."""
        return int(np.searchsorted(self.store.offsets, self._begin[span], side="right")) - 1

    def part(self, document: int, begin: int, end: int) -> Segment:
        """Tokens ``begin`` to ``end`` of a document; the target of the last one is what stands behind it."""
        low, high = self.spans[document]
        tokens = self.store.take(np.arange(low + begin, min(low + end + 1, high)))
        if low + end < high:
            return Segment(tokens[:-1], tokens[1:])
        follow = self._separator if self._ended[document] else -1
        return Segment(tokens, np.append(tokens[1:], follow))

    @cached_property
    def _separator(self) -> int:
        return int(self.store.take(self.store.offsets[:1])[0])


def build_batch(rows: TokenSpans, starts: Ints, length: int, device: torch.device | str = "cpu") -> Batch:
    """The rows that begin at ``starts``, as one Step; without ``documents`` where no row has a boundary."""
    return collate_rows(rows.segments(starts, length), CollateConfig(length, device=device))


class RowOrder:
    """Where the rows of a step begin."""

    def __init__(self, kind: str, num_tokens: int, context: int, num_rows: int, seed: int) -> None:
        """``num_rows``: rows of one optimizer step.  Raises DataError if the split is shorter than one row."""
        if num_tokens < context + 1:
            raise DataError(
                f"the corpus is too short: {format_count(num_tokens, 'token')} to train on, and a row of {context:,} needs "
                f"{context + 1:,}",
                "use more text or a smaller --context",
            )
        self._kind, self._num_tokens, self._context = kind, num_tokens, context
        self._num_rows, self._seed = num_rows, seed
        self.rows_per_epoch = num_tokens // context
        self._epochs = Epochs(self.rows_per_epoch, num_rows, self._of_epoch)

    def starts(self, step: int) -> Ints:
        """Where the rows of optimizer step ``step`` (from 0) begin, [num_rows]."""
        return self.at(np.arange(step * self._num_rows, (step + 1) * self._num_rows))

    def at(self, numbers: Ints) -> Ints:
        """Where rows ``numbers`` [n] begin."""
        if self._kind != "windows":
            return self._epochs.epoch_and_row(numbers)[1]
        steps, inside = numbers // self._num_rows, numbers % self._num_rows
        starts = np.empty(len(numbers), np.int64)
        for step in np.unique(steps):
            drawn = seeded_rng(self._seed, int(step)).integers(0, self._num_tokens - self._context, self._num_rows)
            starts[steps == step] = drawn[inside[steps == step]]
        return starts

    def _of_epoch(self, epoch: int) -> Ints:
        random = seeded_rng(self._seed, epoch)
        offset = random.integers(0, self._num_tokens)
        starts: Ints = (offset + random.permutation(self.rows_per_epoch) * self._context) % self._num_tokens
        return starts


def split_validation(
    store: TokenStore, validation: float, seed: int, documents: tuple[int, int] | None = None
) -> tuple[TokenSpans, TokenSpans]:
    """Training and validation, of the store or of its ``documents`` from the first to the last.

    With MANY_DOCUMENTS whole documents are drawn until their share is reached; with fewer, or where no draw comes near
    it, the stream is cut at the place.  Raises DataError where nothing is left for one of them.
    """
    first, last = documents or (0, store.num_documents)
    begin, end = int(store.offsets[first]), int(store.offsets[last])
    spans = np.stack((store.offsets[first:last], store.offsets[first + 1 : last + 1]), axis=1)
    wanted = (end - begin) * validation
    held = _draw(spans[:, 1] - spans[:, 0], wanted, seed) if len(spans) >= MANY_DOCUMENTS else None
    if held is not None:
        return TokenSpans(store, spans[~held]), TokenSpans(store, spans[held])
    cut = end - int(wanted)
    if not begin + 1 < cut < end - 1:
        raise DataError(
            f"the corpus is too short: {format_count(end - begin, 'token')} cannot be split into training and validation",
            "use more text",
        )
    before = np.minimum(spans, cut)
    after = np.maximum(spans, cut)
    return TokenSpans(store, before[before[:, 0] < before[:, 1]]), TokenSpans(store, after[after[:, 0] < after[:, 1]])


def _draw(lengths: Ints, wanted: float, seed: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
    held, left = np.zeros(len(lengths), bool), wanted
    for document in np.random.Generator(np.random.PCG64(seed)).permutation(len(lengths)):
        if lengths[document] <= left:
            held[document] = True
            left -= lengths[document]
    return held if left < wanted / 2 else None


def evaluation_rows(rows: TokenSpans, context: int, tokens: int, batch: int) -> Iterator[tuple[Ints, int]]:
    """(starts, length) of batches that cover a split once, or ``tokens`` of it, evenly spread (0 = all).

    Rows do not overlap; a last, shorter one takes what is left.
    """
    length = min(context, len(rows) - 1)
    starts = np.arange(0, len(rows) - length, length)
    if 0 < tokens < len(starts) * length:
        chosen = max(1, tokens // length)
        starts = starts[np.arange(chosen) * len(starts) // chosen]
    for low in range(0, len(starts), batch):
        yield starts[low : low + batch], length
    rest = (len(rows) - 1) % length
    if rest and (tokens == 0 or tokens >= len(rows) - 1):
        yield np.array([len(rows) - 1 - rest]), rest
