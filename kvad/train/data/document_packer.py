"""Documents as packed rows of next-token prediction.

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

**Order.** ``epochs``: every epoch cuts the circle, or the long documents, into rows at a new offset and shuffles them;
``windows``: every row starts at random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from kvad.errors import ConfigError, DataError, format_count
from kvad.train.config import RunConfig
from kvad.train.data.collate import PackedRow, Segment, cut_row
from kvad.train.data.packed_dataset import MixtureSource, Packer
from kvad.train.data.packing import PackingMethod, pack_documents
from kvad.train.data.row_sources import EpochPlan, Epochs, LayoutRows, PackingStats, mix_rows, seeded_rng, source_seeds
from kvad.train.data.token_store import Ints, TokenStore

MANY_DOCUMENTS = 10  # with this many, whole documents are held out


class DocumentPacker(Packer):
    """Documents for next-token prediction.

    Args:
        store: The run's tokens.
        config: The run's configuration.
        parts: Sources of a mixture, whose rows are drawn by weight; none for a single source.

    Raises:
        DataError: If a split is shorter than one row.
        ConfigError: If the order does not support the packing.
    """

    def __init__(self, store: TokenStore, config: RunConfig, parts: Sequence[MixtureSource] = ()) -> None:
        data, train = config.data, config.train
        self._data, self._store = data, store
        num_rows = train.batch_size * train.gradient_accumulation_steps
        parts = parts or [MixtureSource(0, store.num_documents)]
        training, held_out = list[Ints](), list[Ints]()
        self.sources = list[SplitRows | WholeDocumentRows]()
        for part, seed in zip(parts, source_seeds(train.seed, len(parts)), strict=True):
            splits = split_validation(store, data.validation_fraction, seed, (part.first, part.last))
            training.append(splits[0].spans)
            held_out.append(splits[1].spans)
            self.sources.append(_training_rows(splits[0], config, num_rows, seed))
        self.training = TokenSpans(store, np.concatenate(training))
        self.validation = TokenSpans(store, np.concatenate(held_out))
        self.source = mix_rows(self.sources, [part.weight for part in parts], train.seed)
        self.train_tokens, self.validation_tokens = len(self.training), len(self.validation)
        self.tokens_per_step = num_rows * data.seq_len

    def evaluation_rows(self, num_tokens: int, batch_size: int) -> Iterator[list[PackedRow]]:
        for starts, length in evaluation_rows(self.validation, self._data.seq_len, num_tokens, batch_size):
            yield self.validation.segments(starts, length)

    def summary(self) -> list[str]:
        stats = self.source.packing_stats()
        packing = "split" if self._data.packing == "auto" else self._data.packing
        rows = format_count(stats.rows, "row")
        packed = f"packed by {packing}: {rows} of {self._data.seq_len:,} tokens, {stats.summary()}"
        return [f"tokens: {self._store.num_tokens:,} in {format_count(self._store.num_documents, 'document')}", packed]


def _training_rows(training: TokenSpans, config: RunConfig, num_rows: int, seed: int) -> SplitRows | WholeDocumentRows:
    data = config.data
    if data.packing in ("auto", "split"):
        return SplitRows(training, data.seq_len, num_rows, seed, windows=data.order == "windows")
    if data.order == "windows":
        raise ConfigError(
            f'data.packing: {data.packing} packs whole documents, but order = "windows" draws rows at random',
            'Use order = "epochs".',
        )
    assert data.packing in ("first-fit", "best-fit")
    return WholeDocumentRows(training, data.seq_len, data.packing, seed)


class SplitRows:
    """Rows cut from the circle of documents; ``num_rows`` are those of a step.

    Raises:
        DataError: If the documents are shorter than one row.
    """

    def __init__(self, training: TokenSpans, context: int, num_rows: int, seed: int, *, windows: bool) -> None:
        if len(training) < context + 1:
            raise DataError(
                f"the corpus is too short: {format_count(len(training), 'token')} to train on, and a row of "
                f"{context:,} needs {context + 1:,}",
                "Use more text or a smaller --seq-len.",
            )
        self._split, self._context, self._num_rows = training, context, num_rows
        self._seed, self._windows = seed, windows
        self._rows_per_epoch = len(training) // context
        self._epochs = Epochs(self._rows_per_epoch, self._epoch_starts)

    def rows(self, numbers: Ints) -> list[PackedRow]:
        return self._split.segments(self.starts(numbers), self._context)

    def provenance(self, number: int) -> list[int]:
        return self._split.texts(int(self.starts(np.array([number]))[0]), self._context)

    def packing_stats(self) -> PackingStats:
        capacity = self._rows_per_epoch * self._context
        return PackingStats(self._rows_per_epoch, capacity, capacity, len(self._split) - capacity)

    def starts(self, numbers: Ints) -> Ints:
        """Return the first tokens of rows ``numbers`` [n]."""
        if not self._windows:
            return self._epochs.epoch_and_row(numbers)[1]
        steps, inside = numbers // self._num_rows, numbers % self._num_rows
        starts = np.empty(len(numbers), np.int64)
        for step in np.unique(steps).tolist():
            drawn = seeded_rng(self._seed, step).integers(0, len(self._split) - self._context, self._num_rows)
            starts[steps == step] = drawn[inside[steps == step]]
        return starts

    def _epoch_starts(self, epoch: int) -> Ints:
        random = seeded_rng(self._seed, epoch)
        offset = random.integers(0, len(self._split))
        starts: Ints = (offset + random.permutation(self._rows_per_epoch) * self._context) % len(self._split)
        return starts


class WholeDocumentRows(LayoutRows):
    """Rows of whole documents and of windows of longer ones, packed again in every epoch."""

    def __init__(self, training: TokenSpans, context: int, fit: PackingMethod, seed: int) -> None:
        def plan(epoch: int) -> EpochPlan:
            random = seeded_rng(seed, epoch)
            layout = pack_documents(training.lengths, context, fit, random)
            return EpochPlan(layout, random.permutation(layout.num_rows))

        super().__init__(plan, training.part, per_epoch=None)
        self._split, self._context = training, context

    def provenance(self, number: int) -> list[int]:
        return [self._split.text_at(span) for span in super().provenance(number)]

    def packing_stats(self) -> PackingStats:
        layout = self.plan(0).layout
        num_used = int((layout.end - layout.begin).sum())
        return PackingStats(layout.num_rows, layout.num_rows * self._context, num_used, len(self._split) - num_used)


class TokenSpans:
    """Documents, or parts of them, as one circular stream of tokens.

    ``spans`` [n, 2] holds first and last + 1 in the store, each within one document.
    """

    def __init__(self, store: TokenStore, spans: Ints) -> None:
        self.store, self.spans, self._begin = store, spans, spans[:, 0]
        self.lengths: Ints = spans[:, 1] - spans[:, 0]
        self._starts: Ints = np.concatenate(([0], np.cumsum(self.lengths)))
        self._opened = np.isin(spans[:, 0], store.offsets)
        self._ended = np.isin(spans[:, 1], store.offsets)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def segments(self, starts: Ints, length: int) -> list[PackedRow]:
        """Return the rows of ``length`` tokens from ``starts`` [n] on, cut where documents begin."""
        at = (starts[:, None] + np.arange(length + 1)) % len(self)
        span = np.searchsorted(self._starts, at, side="right") - 1
        tokens = self.store.take(self._begin[span] + at - self._starts[span])
        begins = at == self._starts[span]
        crossing = begins[:, 1:] & ~(self._ended[span[:, :-1]] & self._opened[span[:, 1:]])
        targets = np.where(crossing, -1, tokens[:, 1:])
        return [
            cut_row(tokens[row, :length], targets[row], np.flatnonzero(begins[row, 1:length]) + 1)
            for row in range(len(starts))
        ]

    def texts(self, start: int, length: int) -> list[int]:
        """Return the store's documents that a row reads, in order."""
        at = (start + np.arange(length)) % len(self)
        spans = np.searchsorted(self._starts, at, side="right") - 1
        return list(dict.fromkeys(map(self.text_at, spans.tolist())))

    def text_at(self, span: int) -> int:
        """Return the store's document that contains a span."""
        return int(np.searchsorted(self.store.offsets, self._begin[span], side="right")) - 1

    def part(self, span: int, begin: int, end: int) -> Segment:
        """Return tokens ``begin`` to ``end`` of a span; the last target is the token after them."""
        low, high = self.spans[span]
        tokens = self.store.take(np.arange(low + begin, min(low + end + 1, high)))
        if low + end < high:
            return Segment(tokens[:-1], tokens[1:])
        next_token = self._separator if self._ended[span] else -1
        return Segment(tokens, np.append(tokens[1:], next_token))

    @cached_property
    def _separator(self) -> int:
        return int(self.store.take(self.store.offsets[:1])[0])


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
