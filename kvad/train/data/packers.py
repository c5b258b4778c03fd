"""Packers: documents, and whole texts, as packed rows.

**Documents**, for next-token prediction. With packing "split", a split is a circle of documents, each opened by the
separator. A row is ``seq_len`` consecutive tokens of the circle; its targets are the following tokens::

    row        <sep> a1 a2 a3 <sep> b1 b2          target     a1 a2 a3 <sep> b1 b2 b3
    position       0  1  2  3     0  1  2          document    0  0  0     0  1  1  1

So p(first word | separator) is learned, and so is the end of a document: the target of its last token is the separator.
No target crosses into the next document's text: the token after a separator is predicted from the separator alone,
because documents do not attend to each other (``ModelInput.document_ids``) and positions restart. A row that begins
inside a document starts at position 0 there. Where a split had to cut a document in two, no target crosses the cut.

"first-fit" and "best-fit" put whole documents into rows (``packing.py``); a longer document is cut into windows, and
the target of a window's last token is the token after it.

**Whole texts**: pairs, tagged sentences, labeled texts, conversations. A row holds several (``packing.py``), each a
separate document. A text with a side longer than a row is left out and counted, never cut. Texts are packed once, in an
order given by the seed; every epoch takes the rows in another order.

**Pairs** have two sides, packed together, for an encoder-decoder::

    source    x1 x2 EOS y1 EOS  .       decoder   BOS t1 t2 BOS u1  .       target   t1 t2 EOS u1 EOS  .
    position   0  1   2  0   1  0                   0  1  2   0  1  0
    document   0  0   0  1   1 -1                   0  0  0   1  1 -1

**Examples** have targets in a column of their store::

    labels   a token with a label >= 0 has that target: of tags a word's first token, of labeled texts the first
    mask     where it is 1, the next token is the target:    <u> Hi </u> <a>  Hello </a>
                                                                        used  used          -> Hello, </a>
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from kvad.errors import ConfigError, DataError, format_count
from kvad.train.config import RunConfig
from kvad.train.data.collate import PackedRow, Segment, cut_row
from kvad.train.data.packed_dataset import (
    EpochPlan,
    Epochs,
    LayoutRows,
    MixtureSource,
    Packer,
    PackingStats,
    mix_rows,
    seeded_rng,
    source_seeds,
)
from kvad.train.data.packing import PackingMethod, pack_documents, pack_whole_texts
from kvad.train.data.token_store import Ints, TokenStore

MANY_DOCUMENTS = 10  # with this many, whole documents are held out


class DocumentPacker(Packer):
    """Documents for next-token prediction; rows of several ``parts`` are drawn by weight.

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
    """Rows cut from the circle of documents, ``num_rows`` per step; raises DataError if it is shorter than a row."""

    def __init__(self, training: TokenSpans, context: int, num_rows: int, seed: int, *, windows: bool) -> None:
        if len(training) < context + 1:
            raise DataError(
                f"the corpus is too short: {format_count(len(training), 'token')} to train on, and a row of "
                f"{context:,} needs {context + 1:,}",
                "Use more text or a smaller --seq-len.",
            )
        self._split, self._context, self._num_rows, self._seed = training, context, num_rows, seed
        self._rows_per_epoch = len(training) // context
        # A step of windows is an epoch of num_rows rows.
        order = (num_rows, self._window_starts) if windows else (self._rows_per_epoch, self._epoch_starts)
        self._epochs = Epochs(*order)

    def rows(self, numbers: Ints) -> list[PackedRow]:
        return self._split.segments(self.starts(numbers), self._context)

    def provenance(self, number: int) -> list[int]:
        return self._split.texts(int(self.starts(np.array([number]))[0]), self._context)

    def packing_stats(self) -> PackingStats:
        capacity = self._rows_per_epoch * self._context
        return PackingStats(self._rows_per_epoch, capacity, capacity, len(self._split) - capacity)

    def starts(self, numbers: Ints) -> Ints:
        """Return the first tokens of rows ``numbers`` [n]."""
        return self._epochs.epoch_and_row(numbers)[1]

    def _window_starts(self, step: int) -> Ints:
        return seeded_rng(self._seed, step).integers(0, len(self._split) - self._context, self._num_rows)

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
    """Parts of documents, tokens ``spans[i, 0]`` to ``spans[i, 1]`` of the store, as one circular stream."""

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
        cuts = [np.flatnonzero(row) + 1 for row in begins[:, 1:length]]
        return [cut_row(*row) for row in zip(tokens[:, :length], targets, cuts, strict=True)]

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
    the stream is cut at that share; DataError if a split would be empty.
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


class PairTexts:
    """Pairs of a store; ``sizes`` [n, 2] are tokens of source and target."""

    noun, longest = "pair", "the longest side"

    def __init__(self, store: TokenStore) -> None:
        self.store = store
        begin, middle, end = store.offsets[:-1:2], store.offsets[1::2], store.offsets[2::2]
        self.sizes: Ints = np.stack((middle - begin, end - middle - 1), axis=1)

    def ids(self, pair: int) -> tuple[Ints, Ints]:
        """Return the encoder's input and the framed target."""
        begin, middle, end = self.store.offsets[2 * pair : 2 * pair + 3].tolist()
        both = self.store.take(np.arange(begin, end))
        return both[: middle - begin], both[middle - begin :]

    def segment(self, pair: int) -> Segment:
        source, target = self.ids(pair)
        return Segment(target[:-1], target[1:], source)

    def num_targets(self, pairs: Ints) -> int:
        return int(self.sizes[pairs, 1].sum())


class ExampleTexts:
    """Texts of a store whose column holds their targets; ``sizes`` [n, 1] are tokens."""

    longest = "the longest"

    def __init__(self, store: TokenStore, noun: str) -> None:
        self.store, self.noun = store, noun
        (self._column,) = store.manifest["columns"]
        self.sizes: Ints = np.diff(store.offsets)[:, None]

    def segment(self, text: int) -> Segment:
        at = np.arange(self.store.offsets[text], self.store.offsets[text + 1])
        tokens, values = self.store.take(at), self.store.column(self._column, at)
        if self._column == "labels":
            return Segment(tokens, values)
        return Segment(tokens, np.append(np.where(values[1:], tokens[1:], -1), -1))

    def num_targets(self, texts: Ints) -> int:
        return sum(int((self.segment(text).targets >= 0).sum()) for text in texts.tolist())

    def turn_end(self) -> int | None:
        """Return the last token of all target spans; None if it varies or for labels."""
        store = self.store
        if self._column != "mask":
            return None
        at = np.arange(store.num_tokens)
        learned = store.column("mask", at).astype(bool)
        last = np.append(~learned[1:], True)
        last[store.offsets[1:] - 1] = True
        ends = np.unique(store.take(at[learned & last]))
        return int(ends[0]) if len(ends) == 1 else None


class WholeTextRows(LayoutRows):
    """The ``chosen`` texts in rows of ``context`` tokens on each side, packed once."""

    def __init__(
        self, texts: PairTexts | ExampleTexts, chosen: Ints, context: int, fit: PackingMethod, seed: int = 0
    ) -> None:
        sizes = texts.sizes[chosen]
        self.layout = pack_whole_texts(chosen, sizes, context, fit)
        count = self.layout.num_rows
        super().__init__(
            lambda epoch: EpochPlan(self.layout, seeded_rng(seed, 1 + epoch).permutation(count)),
            lambda text, begin, end: texts.segment(text),
            per_epoch=count,
        )
        self.num_tokens: Ints = sizes.sum(axis=0)  # on each side
        self.num_targets, self._capacity = texts.num_targets(chosen), sizes.shape[1] * count * context

    def __len__(self) -> int:
        return self.layout.num_rows

    def in_order(self, rows: Ints) -> list[PackedRow]:
        """Return rows by their index in the layout."""
        return [self.row(self.layout, row) for row in rows]

    def packing_stats(self) -> PackingStats:
        return PackingStats(len(self), self._capacity, int(self.num_tokens.sum()))


class WholeTextPacker(Packer):
    """Whole texts; the last share of each source, or its held-out texts, are for validation.

    Raises:
        DataError: If a split is empty.
        ConfigError: If the configuration is for documents only.
    """

    def __init__(self, texts: PairTexts | ExampleTexts, config: RunConfig, parts: Sequence[MixtureSource] = ()) -> None:
        data, train = config.data, config.train
        if data.order != "epochs":
            raise ConfigError(f"data.order: {data.order} is for documents", f"Use 'epochs' for {texts.noun}s.")
        self._texts, self._context, fit = texts, data.seq_len, packing_method(config, texts.noun)
        self._fits = texts.sizes.max(axis=1) <= data.seq_len
        parts = parts or [MixtureSource(0, len(texts.sizes))]
        weights, seeds = [part.weight for part in parts], source_seeds(train.seed, len(parts))
        self.sources, held_out = list[WholeTextRows](), list[Ints]()
        for part, seed in zip(parts, seeds, strict=True):
            training, validation = self._split(part, data.validation_fraction, seed)
            self.sources.append(WholeTextRows(texts, training, data.seq_len, fit, seed))
            held_out.append(validation)
        self._held_out = np.concatenate(held_out)
        self.validation = WholeTextRows(texts, self._held_out, data.seq_len, fit)
        self.source = mix_rows(self.sources, weights, train.seed)
        self.train_tokens = sum(rows.num_targets for rows in self.sources)
        self.validation_tokens = self.validation.num_targets
        targets_per_row = np.array([rows.num_targets / len(rows) for rows in self.sources])
        num_rows = train.batch_size * train.gradient_accumulation_steps
        self.tokens_per_step = round(num_rows * float(np.array(weights) / sum(weights) @ targets_per_row))

    def _split(self, part: MixtureSource, fraction: float, seed: int) -> tuple[Ints, Ints]:
        """Return the source's texts to train on, in packing order, and those held out."""
        noun, count = self._texts.noun, part.last - part.first
        cut = count - (part.num_held_out or max(1, int(count * fraction)))
        fits = self._fits[part.first : part.last]
        shuffled = seeded_rng(seed, 0).permutation(cut)
        training, held_out = shuffled[fits[shuffled]], cut + np.flatnonzero(fits[cut:])
        for name, texts, total in (("training", training, cut), ("validation", held_out, count - cut)):
            if not len(texts):
                raise DataError(
                    f"no {noun} is left for {name}: none of {format_count(total, noun)} fits data.seq_len "
                    f"{self._context}",
                    f"Use more {noun}s or a larger --seq-len.",
                )
        return part.first + training, part.first + held_out

    def evaluation_rows(self, num_tokens: int, batch_size: int) -> Iterator[list[PackedRow]]:
        count = len(self.validation)
        rows = np.arange(count)
        if 0 < num_tokens < self.validation_tokens:
            chosen = max(1, count * num_tokens // self.validation_tokens)
            rows = np.arange(chosen) * count // chosen
        for low in range(0, len(rows), batch_size):
            yield self.validation.in_order(rows[low : low + batch_size])

    def examples(self, count: int) -> list[tuple[list[int], list[int]]]:
        texts = self._texts
        if not isinstance(texts, PairTexts):
            return []
        pairs = [texts.ids(pair) for pair in self._held_out[:count].tolist()]
        return [(source.tolist(), target.tolist()) for source, target in pairs]

    def turn_end(self) -> int | None:
        """Return the token that ends every target span of conversations, if there is one."""
        return self._texts.turn_end() if isinstance(self._texts, ExampleTexts) else None

    def summary(self) -> list[str]:
        texts, context, num_rows = self._texts, self._context, sum(map(len, self.sources))
        lines = [f"tokens: {texts.store.num_tokens:,} in {format_count(len(texts.sizes), texts.noun)}"]
        if num_left_out := int((~self._fits).sum()):
            lines.append(
                f"left out: {format_count(num_left_out, texts.noun)} longer than data.seq_len {context} "
                f"({texts.longest} has {format_count(int(texts.sizes.max()), 'token')})"
            )
        filled = np.sum([rows.num_tokens for rows in self.sources], axis=0) / (num_rows * context)
        packed = f"packed: {format_count(num_rows, 'row')} of {context}"
        if isinstance(texts, PairTexts):
            packed += f" + {context} tokens, {filled[0]:.1%} of the sources and {filled[1]:.1%} of the targets filled"
        else:
            packed += (
                f" tokens, {filled[0]:.1%} filled, {format_count(self.train_tokens, 'target')} to train on and "
                f"{self.validation_tokens:,} for validation"
            )
        return [*lines, packed]


def packing_method(config: RunConfig, noun: str) -> PackingMethod:
    """Return the packing method of whole texts; raise ConfigError for one that would cut them."""
    packing = config.data.packing
    if packing == "split":
        raise ConfigError(f"data.packing: must be first-fit or best-fit for {noun}s, got 'split'", "Use first-fit.")
    return "first-fit" if packing == "auto" else packing
