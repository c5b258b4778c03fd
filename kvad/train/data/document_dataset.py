"""Documents as packed rows of next-token prediction; the protocol of training data.

The loop requires :class:`TrainingData`; for documents it is :class:`DocumentDataset` (pairs: ``pair_dataset.py``;
sequential data: ``streaming.py``).

**Packing** ("split"). A split is a circle of documents, each opened by the separator. A row is ``seq_len`` consecutive
tokens of the circle; its targets are the following tokens::

    row        <sep> a1 a2 a3 <sep> b1 b2          target     a1 a2 a3 <sep> b1 b2 b3
    position       0  1  2  3     0  1  2          document    0  0  0     0  1  1  1

So p(first word | separator) is learned, and so is the end of a document: the target of its last token is the separator.
No target crosses into the next document's text: the token after a separator is predicted from the separator alone,
because documents do not attend to each other (``ModelInput.document_ids``) and positions restart. A row that begins
inside a document starts at position 0 there. Where a split had to cut a document in two, no target crosses the cut.

"first-fit" and "best-fit" put whole documents into rows (``packing.py``); a longer document is cut into windows, and
the target of a window's last token is the token after it.

**Order.** The rows of a step are a function of (seed, step), so only the step must be saved. ``epochs``: every epoch
cuts the circle, or the long documents, into rows at a new offset and shuffles them; ``windows``: every row starts at
random.
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

MANY_DOCUMENTS = 10  # with this many, whole documents are held out


class MixtureSource(NamedTuple):
    """Texts ``first`` to ``last`` of the store, with their share of the rows."""

    first: int
    last: int
    weight: float = 1.0  # in any unit
    num_held_out: int = 0  # texts at the end for validation only; 0 holds out a fraction


class TrainingData(Protocol):
    """Data as the training loop reads it."""

    @property
    def train_tokens(self) -> int: ...

    @property
    def validation_tokens(self) -> int: ...

    @property
    def tokens_per_step(self) -> int: ...

    def micro_batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of step ``step`` (from 0), a function of the step alone."""
        ...

    def evaluation(self) -> Iterator[Batch]:
        """Yield the validation split, or as much of it as the configuration requests."""
        ...

    def summary(self) -> list[str]:
        """Return lines about the data for the user."""
        ...


class DocumentDataset:
    """Documents for next-token prediction.

    Args:
        store: The run's tokens.
        config: The run's configuration.
        parts: Sources of a mixture, whose rows are drawn by weight; none for a single source.
        vocab: Upper limit of token ids.

    Raises:
        DataError: If a split is shorter than one row.
        ConfigError: If the order does not support the packing.
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
        self.validation = TokenSpans(store, np.concatenate([validation.spans for _, validation in splits]))
        self.training = TokenSpans(store, np.concatenate([training.spans for training, _ in splits]))
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
        """Return rows by number, as segments (``collate.py``)."""
        return self._rows.rows(numbers)

    def provenance(self, number: int) -> list[int]:
        return row_provenance(self._rows, number)

    def evaluation(self) -> Iterator[Batch]:
        data, train = self._data, self._train
        for starts, length in evaluation_rows(self.validation, data.seq_len, train.eval_tokens, train.batch_size):
            yield collate_rows(self.validation.segments(starts, length), self.shape)

    def packing_stats(self) -> PackingStats:
        """Return the packing of the first epoch, summed over sources."""
        stats = [source.packing_stats() for source in self._sources]
        return PackingStats(*(sum(values) for values in zip(*stats, strict=True)))

    def summary(self) -> list[str]:
        stats = self.packing_stats()
        packing = "split" if self._data.packing == "auto" else self._data.packing
        rows = format_count(stats.rows, "row")
        packed = f"packed by {packing}: {rows} of {self._data.seq_len:,} tokens, {stats.summary()}"
        return [f"tokens: {self._store.num_tokens:,} in {format_count(self._store.num_documents, 'document')}", packed]


def collate_config(config: RunConfig, pad: int = 0, vocab: int | None = None) -> CollateConfig:
    """Return the collate options of a run."""
    data = config.data
    return CollateConfig(data.seq_len, pad, data.reset_positions, data.isolate_documents, config.train.device, vocab)


def _build_rows(training: TokenSpans, config: RunConfig, rows: int, seed: int) -> PackedRows | BestFitRows:
    data = config.data
    if data.packing in ("auto", "split"):
        return PackedRows(training, RowOrder(data.order, len(training), data.seq_len, rows, seed), data.seq_len)
    if data.order == "windows":
        raise ConfigError(
            f'data.packing: {data.packing} packs whole documents, but order = "windows" draws rows at random',
            'Use order = "epochs".',
        )
    assert data.packing in ("first-fit", "best-fit")
    return BestFitRows(training, data.packing, data.seq_len, rows, seed)


class PackedRows:
    """Rows cut from the circle of documents."""

    def __init__(self, training: TokenSpans, order: RowOrder, context: int) -> None:
        self._split, self._order, self._context = training, order, context

    def rows(self, numbers: Ints) -> list[PackedRow]:
        return self._split.segments(self._order.at(numbers), self._context)

    def provenance(self, number: int) -> list[int]:
        (start,) = self._order.at(np.array([number]))
        return self._split.texts(int(start), self._context)

    def packing_stats(self) -> PackingStats:
        rows, tokens = self._order.rows_per_epoch, len(self._split)
        return PackingStats(rows, rows * self._context, rows * self._context, tokens - rows * self._context)


class BestFitRows:
    """Rows of whole documents and of windows of longer ones, packed again in every epoch."""

    def __init__(self, training: TokenSpans, fit: PackingMethod, context: int, num_rows: int, seed: int) -> None:
        self._split, self._fit, self._context, self._seed = training, fit, context, seed
        self._plan = lru_cache(2)(self._build_plan)  # a step rarely spans more than two epochs
        self._epochs = Epochs(None, num_rows, lambda epoch: self._plan(epoch).order)

    def rows(self, numbers: Ints) -> list[PackedRow]:
        epochs, rows = self._epochs.epoch_and_row(numbers)
        return [self._row(self._plan(int(epoch)), int(row)) for epoch, row in zip(epochs, rows, strict=True)]

    def provenance(self, number: int) -> list[int]:
        (epoch,), (row,) = self._epochs.epoch_and_row(np.array([number]))
        plan = self._plan(int(epoch))
        pieces = plan.packed.pieces[plan.packed.first[row] : plan.packed.first[row + 1]]
        return [self._split.text_at(int(plan.document[piece])) for piece in pieces]

    def packing_stats(self) -> PackingStats:
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

    def _build_plan(self, epoch: int) -> _Plan:
        random = seeded_rng(self._seed, epoch)
        lengths = self._split.lengths
        document, begin, end = split_windows(
            lengths, self._context, random.integers(1, self._context + 1, len(lengths))
        )
        order = random.permutation(len(document))
        document, begin, end = document[order], begin[order], end[order]
        packed = pack_rows((end - begin)[:, None], self._context, self._fit, crop=True)
        return _Plan(packed, document, begin, random.permutation(packed.num_rows))


class _Plan(NamedTuple):
    """Packed epoch: piece i is ``document[i]`` from ``begin[i]`` on; ``order`` of its rows."""

    packed: PackedLayout
    document: Ints
    begin: Ints
    order: Ints


class TokenSpans:
    """Documents, or parts of them, as one circular stream of tokens.

    ``spans`` [n, 2] holds first and last + 1 in the store, each within one document.
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
        """Return tokens, positions, documents and targets, each [rows, length]; target -1 is none.

        Document ids count within the row, from 0.
        """
        at = (starts[:, None] + np.arange(length + 1)) % len(self)
        span = np.searchsorted(self._starts, at, side="right") - 1
        tokens = self.store.take(self._begin[span] + at - self._starts[span])
        first = at == self._starts[span]
        crossing = first[:, 1:] & ~(self._ended[span[:, :-1]] & self._opened[span[:, 1:]])
        targets = np.where(crossing, -1, tokens[:, 1:])
        first = first[:, :-1]
        column = np.arange(length)
        segment_start = np.maximum.accumulate(np.where(first, column, 0), axis=1)
        documents = np.cumsum(first & (column > 0), axis=1)
        return tokens[:, :-1], column - segment_start, documents, targets

    def segments(self, starts: Ints, length: int) -> list[PackedRow]:
        """Return the same rows as segments, cut where documents begin."""
        tokens, _, documents, targets = self.rows(starts, length)
        packed: list[PackedRow] = []
        for row in range(len(starts)):
            cuts = [0, *(np.flatnonzero(np.diff(documents[row])) + 1).tolist(), length]
            spans = (slice(*pair) for pair in pairwise(cuts))
            packed.append([Segment(tokens[row, span], targets[row, span]) for span in spans])
        return packed

    def texts(self, start: int, length: int) -> list[int]:
        """Return the store's documents that a row reads, in order."""
        at = (start + np.arange(length)) % len(self)
        spans = np.searchsorted(self._starts, at, side="right") - 1
        return list(dict.fromkeys(self.text_at(int(span)) for span in spans))

    def text_at(self, span: int) -> int:
        """Return the store's document that contains a span."""
        return int(np.searchsorted(self.store.offsets, self._begin[span], side="right")) - 1

    def part(self, document: int, begin: int, end: int) -> Segment:
        """Return tokens ``begin`` to ``end`` of a document; the last target is the token after them."""
        low, high = self.spans[document]
        tokens = self.store.take(np.arange(low + begin, min(low + end + 1, high)))
        if low + end < high:
            return Segment(tokens[:-1], tokens[1:])
        next_token = self._separator if self._ended[document] else -1
        return Segment(tokens, np.append(tokens[1:], next_token))

    @cached_property
    def _separator(self) -> int:
        return int(self.store.take(self.store.offsets[:1])[0])


def build_batch(rows: TokenSpans, starts: Ints, length: int, device: torch.device | str = "cpu") -> Batch:
    """Return the rows that begin at ``starts`` as one batch.

    It has no ``document_ids`` if no row has a boundary.
    """
    return collate_rows(rows.segments(starts, length), CollateConfig(length, device=device))


class RowOrder:
    """Start positions of the rows of a step."""

    def __init__(self, kind: str, num_tokens: int, context: int, num_rows: int, seed: int) -> None:
        """Raise DataError if the split is shorter than one row; ``num_rows`` are the rows of a step."""
        if num_tokens < context + 1:
            raise DataError(
                f"the corpus is too short: {format_count(num_tokens, 'token')} to train on, and a row of {context:,} "
                f"needs {context + 1:,}",
                "Use more text or a smaller --seq-len.",
            )
        self._kind, self._num_tokens, self._context = kind, num_tokens, context
        self._num_rows, self._seed = num_rows, seed
        self.rows_per_epoch = num_tokens // context
        self._epochs = Epochs(self.rows_per_epoch, num_rows, self._epoch_starts)

    def starts(self, step: int) -> Ints:
        """Return the starts of the rows of optimizer step ``step`` (from 0), [num_rows]."""
        return self.at(np.arange(step * self._num_rows, (step + 1) * self._num_rows))

    def at(self, numbers: Ints) -> Ints:
        """Return the starts of rows ``numbers`` [n]."""
        if self._kind != "windows":
            return self._epochs.epoch_and_row(numbers)[1]
        steps, inside = numbers // self._num_rows, numbers % self._num_rows
        starts = np.empty(len(numbers), np.int64)
        for step in np.unique(steps):
            drawn = seeded_rng(self._seed, int(step)).integers(0, self._num_tokens - self._context, self._num_rows)
            starts[steps == step] = drawn[inside[steps == step]]
        return starts

    def _epoch_starts(self, epoch: int) -> Ints:
        random = seeded_rng(self._seed, epoch)
        offset = random.integers(0, self._num_tokens)
        starts: Ints = (offset + random.permutation(self.rows_per_epoch) * self._context) % self._num_tokens
        return starts


def split_validation(
    store: TokenStore, validation: float, seed: int, documents: tuple[int, int] | None = None
) -> tuple[TokenSpans, TokenSpans]:
    """Split the store, or its ``documents`` from first to last, into training and validation.

    With MANY_DOCUMENTS whole documents are drawn until their share is reached; with fewer, or if no draw comes near it,
    the stream is cut at that share.

    Raises:
        DataError: If a split would be empty.
    """
    first, last = documents or (0, store.num_documents)
    begin, end = int(store.offsets[first]), int(store.offsets[last])
    spans = np.stack((store.offsets[first:last], store.offsets[first + 1 : last + 1]), axis=1)
    num_tokens = (end - begin) * validation
    held_out = _draw(spans[:, 1] - spans[:, 0], num_tokens, seed) if len(spans) >= MANY_DOCUMENTS else None
    if held_out is not None:
        return TokenSpans(store, spans[~held_out]), TokenSpans(store, spans[held_out])
    cut = end - int(num_tokens)
    if not begin + 1 < cut < end - 1:
        raise DataError(
            f"the corpus is too short: {format_count(end - begin, 'token')} "
            "cannot be split into training and validation",
            "Use more text.",
        )
    before = np.minimum(spans, cut)
    after = np.maximum(spans, cut)
    return TokenSpans(store, before[before[:, 0] < before[:, 1]]), TokenSpans(store, after[after[:, 0] < after[:, 1]])


def _draw(lengths: Ints, num_tokens: float, seed: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
    held_out, left = np.zeros(len(lengths), bool), num_tokens
    for document in np.random.Generator(np.random.PCG64(seed)).permutation(len(lengths)):
        if lengths[document] <= left:
            held_out[document] = True
            left -= lengths[document]
    return held_out if left < num_tokens / 2 else None


def evaluation_rows(rows: TokenSpans, context: int, tokens: int, batch: int) -> Iterator[tuple[Ints, int]]:
    """Yield (starts, length) of batches covering a split once, or ``tokens`` of it (0 = all).

    Rows do not overlap and are evenly spread; a last, shorter one takes the rest.
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
