"""Whole texts as packed rows: pairs, tagged sentences, labeled texts, conversations.

A row holds several texts (``packing.py``), each a separate document: none attends to another, and positions restart.
The rest of a row is padding: document -1, which no other token attends to and which has no logits. A micro-batch is as
wide as its fullest row. A text with a side longer than a row is left out and counted, never cut.

**Pairs** have two sides, packed together, for an encoder-decoder::

    source    x1 x2 EOS y1 EOS  .       decoder   BOS t1 t2 BOS u1  .       target   t1 t2 EOS u1 EOS  .
    position   0  1   2  0   1  0                   0  1  2   0  1  0
    document   0  0   0  1   1 -1                   0  0  0   1  1 -1

**Examples** have targets in a column of their store::

    labels   a token with a label >= 0 has that target: of tags a word's first token, of labeled texts the first
    mask     where it is 1, the next token is the target:    <u> Hi </u> <a>  Hello </a>
                                                                        used  used          -> Hello, </a>

**Order.** Texts are packed once, in an order given by the seed; every epoch takes the rows in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvad.errors import ConfigError, DataError, format_count
from kvad.train.config import RunConfig
from kvad.train.data.collate import PackedRow, Segment
from kvad.train.data.packed_dataset import MixtureSource, Packer
from kvad.train.data.packing import PackingMethod, pack_whole_texts
from kvad.train.data.row_sources import EpochPlan, LayoutRows, PackingStats, mix_rows, seeded_rng, source_seeds
from kvad.train.data.token_store import Ints, TokenStore


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

    Args:
        texts: Pairs or examples.
        config: The run's configuration.
        parts: Sources of a mixture; none for a single source.

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
