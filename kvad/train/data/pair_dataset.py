"""Pairs -> packed Steps with sources: an encoder-decoder learns every target token from its source and those before it.

**Packing.**  A row holds several pairs on both sides (``packing.py``); each is a document of its own, so that neither
the encoder, nor the decoder, nor its attention to the source sees another pair, and positions restart::

    source    x1 x2 EOS y1 EOS  .       decoder   BOS t1 t2 BOS u1  .       target   t1 t2 EOS u1 EOS  .
    position   0  1   2  0   1  0                   0  1  2   0  1  0
    document   0  0   0  1   1 -1                   0  0  0   1  1 -1

What is left over is padding: document -1, which nobody else sees and whose logits nobody wants.  A micro-batch is as
wide as its fullest row.  ``data.packing`` is first-fit or best-fit (``packing.py``): a pair is never cut.

**Order.**  Pairs are packed once, in an order that the seed decides; every epoch takes the rows in an order of its own.
So there are as many rows in every epoch, and which of them a step takes is a function of (seed, step).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from kvad.errors import ConfigError, DataError, format_count
from kvad.train.config import DataConfig, RunConfig
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
from kvad.train.data.document_dataset import MixtureSource, collate_config
from kvad.train.data.packing import MixtureRows, PackingMethod, pack_rows, source_seed
from kvad.train.data.token_store import Ints, TokenStore


def packing_method(data: DataConfig) -> PackingMethod:
    """How pairs are packed.  ConfigError for a way that would cut them."""
    if data.packing == "split":
        raise ConfigError("data.packing: split cuts documents where a row ends, and a pair is never cut", "first-fit")
    return "first-fit" if data.packing == "auto" else data.packing


class PairRows:
    """Pairs of a store, packed into rows of ``context`` and ``context`` tokens; ``pad`` fills what is left over."""

    def __init__(
        self,
        store: TokenStore,
        pairs: Ints,
        context: int,
        pad: int,
        *,
        fit: PackingMethod = "first-fit",
        shape: CollateConfig | None = None,
    ) -> None:
        self._store, self._context = store, context
        self._shape = CollateConfig(context, pad) if shape is None else shape
        begin, middle, end = (store.offsets[2 * pairs + i] for i in (0, 1, 2))
        sizes = np.stack((middle - begin, end - middle - 1), axis=1)
        packed = pack_rows(sizes, context, fit, crop=False)
        self._pairs, self._first = pairs[packed.pieces], packed.first
        self.num_sources, self.num_targets = (int(side.sum()) for side in sizes.T)

    def __len__(self) -> int:
        return len(self._first) - 1

    @property
    def utilization(self) -> tuple[float, float]:
        """Shares of the places for source and for target tokens that are taken."""
        places = len(self) * self._context
        return self.num_sources / places, self.num_targets / places

    def batch(self, rows: Ints, device: torch.device | str | None = None) -> Batch:
        """The given rows as one Step."""
        shape = self._shape if device is None else replace(self._shape, device=device)
        return collate_rows(self.segments(rows), shape)

    def segments(self, rows: Ints) -> list[PackedRow]:
        """The pairs of the given rows."""
        return [[self._segment(int(pair)) for pair in self._pairs[self._first[r] : self._first[r + 1]]] for r in rows]

    def pair_indices(self, row: int) -> list[int]:
        """By their place in the store."""
        found: list[int] = self._pairs[self._first[row] : self._first[row + 1]].tolist()
        return found

    def _segment(self, pair: int) -> Segment:
        begin, middle, end = self._store.offsets[2 * pair : 2 * pair + 3].tolist()
        both = self._store.take(np.arange(begin, end))
        target = both[middle - begin :]
        return Segment(target[:-1], target[1:], both[: middle - begin])


class _Epochs:
    """The rows of one source, every one once per epoch."""

    def __init__(self, pairs: PairRows, num_rows: int, seed: int) -> None:
        self._pairs, count = pairs, len(pairs)
        self._epochs = Epochs(count, num_rows, lambda epoch: seeded_rng(seed, 1 + epoch).permutation(count))

    def rows(self, numbers: Ints) -> list[PackedRow]:
        return self._pairs.segments(self._epochs.epoch_and_row(numbers)[1])

    def texts_of(self, number: int) -> list[int]:
        return self._pairs.pair_indices(int(self._epochs.epoch_and_row(np.array([number]))[1][0]))


class PairDataset:
    """The last share of the pairs, or the last ``held``, for validation, the rest to train on.

    A pair with a side longer than the context is left out, never cut.  Raises DataError where nothing is left,
    ConfigError for a configuration that documents alone can have.
    """

    def __init__(
        self,
        store: TokenStore,
        config: RunConfig,
        held: int,
        pad: int,
        parts: Sequence[MixtureSource] = (),
        vocab: int | None = None,
    ) -> None:
        """``parts``: the sources of a mixture, in pairs of the store; ``vocab``: what no token id may reach."""
        data, train = config.data, config.train
        if data.order != "epochs":
            raise ConfigError(f"data.order: {data.order} is for documents", "pairs are taken in epochs")
        self._train, self._store, self._context = train, store, data.seq_len
        self.shape, fit, num_rows = (
            collate_config(config, pad, vocab),
            packing_method(data),
            train.batch_size * train.gradient_accumulation_steps,
        )
        self._fits = self._fitting(store, data.seq_len)
        parts = parts or [MixtureSource(0, store.num_documents // 2, num_held_out=held)]
        seeds = [train.seed if len(parts) == 1 else source_seed(train.seed, number) for number in range(len(parts))]
        chosen = [self._choose(part, data, seed) for part, seed in zip(parts, seeds, strict=True)]

        def packed(pairs: Ints) -> PairRows:
            return PairRows(store, pairs, data.seq_len, pad, fit=fit, shape=self.shape)

        self._held = np.concatenate([found["validation"] for found in chosen])
        self.sources = [packed(found["training"]) for found in chosen]
        self.training, self.validation = self.sources[0], packed(self._held)
        orders = [_Epochs(rows, num_rows, seed) for rows, seed in zip(self.sources, seeds, strict=True)]
        weights = [part.weight for part in parts]
        self._rows: RowSource = orders[0] if len(parts) == 1 else MixtureRows(orders, weights, train.seed)
        shares = np.array(weights) / sum(weights) if len(parts) > 1 else np.ones(1)
        targets = np.array([rows.num_targets / len(rows) for rows in self.sources])
        self.train_tokens = sum(rows.num_targets for rows in self.sources)
        self.validation_tokens = self.validation.num_targets
        self.tokens_per_step = round(num_rows * float(shares @ targets))

    def _choose(self, part: MixtureSource, data: DataConfig, seed: int) -> dict[str, Ints]:
        """The pairs of one source that are trained on, in the order they are packed, and those held out."""
        count = part.last - part.first
        cut = count - (part.num_held_out or max(1, int(count * data.validation_fraction)))
        fits = self._fits[part.first : part.last]
        shuffled = seeded_rng(seed, 0).permutation(cut)
        chosen = {"training": shuffled[fits[shuffled]], "validation": cut + np.flatnonzero(fits[cut:])}
        for name, pairs in chosen.items():
            if not len(pairs):
                raise DataError(
                    f"no pair is left for {name}: {format_count(cut if name == 'training' else count - cut, 'pair')}, of "
                    f"which none fits a context of {data.seq_len}",
                    "use more pairs or a larger --context",
                )
        return {name: part.first + pairs for name, pairs in chosen.items()}

    def _fitting(self, store: TokenStore, context: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        lengths = np.diff(store.offsets)
        longest = np.maximum(lengths[0::2], lengths[1::2] - 1)
        fits: np.ndarray[tuple[int], np.dtype[np.bool_]] = longest <= context
        self._left_out, self._longest = int((~fits).sum()), int(longest.max())
        return fits

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
        """All rows, or as many, evenly spread, as have ``eval_tokens`` targets."""
        tokens, count = self._train.eval_tokens, len(self.validation)
        rows = np.arange(count)
        if 0 < tokens < self.validation_tokens:
            chosen = max(1, count * tokens // self.validation_tokens)
            rows = np.arange(chosen) * count // chosen
        for low in range(0, len(rows), self._train.batch_size):
            yield self.validation.batch(rows[low : low + self._train.batch_size])

    def examples(self, count: int) -> list[tuple[list[int], list[int]]]:
        """The first held-out pairs as ids: a source as the encoder reads it, a target as it stands in the store."""
        found = []
        for pair in self._held[:count]:
            begin, middle, end = (int(self._store.offsets[2 * pair + i]) for i in (0, 1, 2))
            source, target = (self._store.take(np.arange(*span)).tolist() for span in ((begin, middle), (middle, end)))
            found.append((source, target))
        return found

    def packing_stats(self) -> PackingStats:
        """Of both sides of all training rows."""
        rows = sum(map(len, self.sources))
        taken = sum(source.num_sources + source.num_targets for source in self.sources)
        return PackingStats(rows, 2 * rows * self._context, taken)

    def summary(self) -> list[str]:
        store, rows = self._store, sum(map(len, self.sources))
        places = rows * self._context
        lines = [f"tokens: {store.num_tokens:,} in {format_count(store.num_documents // 2, 'pair')}"]
        if self._left_out:
            lines.append(
                f"left out: {format_count(self._left_out, 'pair')} longer than the context of {self._context} "
                f"(the longest has a side of {format_count(self._longest, 'token')})"
            )
        sources, targets = (
            sum(getattr(each, name) for each in self.sources) / places for name in ("num_sources", "num_targets")
        )
        lines.append(
            f"packed: {format_count(rows, 'row')} of {self._context} + {self._context} tokens, "
            f"{sources:.1%} of the sources' places and {targets:.1%} of the targets' taken"
        )
        return lines
