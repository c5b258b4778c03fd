"""Pairs as packed rows for an encoder-decoder.

**Packing.** A row holds several pairs on both sides (``packing.py``); each is a separate document, so neither encoder,
decoder nor cross-attention attends to another pair, and positions restart::

    source    x1 x2 EOS y1 EOS  .       decoder   BOS t1 t2 BOS u1  .       target   t1 t2 EOS u1 EOS  .
    position   0  1   2  0   1  0                   0  1  2   0  1  0
    document   0  0   0  1   1 -1                   0  0  0   1  1 -1

The rest of a row is padding: document -1, which no other token attends to and which has no logits. A micro-batch is as
wide as its fullest row. ``data.packing`` is first-fit or best-fit (``packing.py``): a pair is never cut.

**Order.** Pairs are packed once, in an order given by the seed; every epoch takes the rows in another order. So all
epochs have the same number of rows, and the rows of a step are a function of (seed, step).
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
    """Return the packing method of pairs; raise ConfigError for one that would cut them."""
    if data.packing == "split":
        raise ConfigError("data.packing: must be first-fit or best-fit for pairs, got 'split'", "Use first-fit.")
    return "first-fit" if data.packing == "auto" else data.packing


class PairRows:
    """Pairs of a store in rows of ``context`` tokens on each side, padded with ``pad``."""

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
        """Filled shares of the source side and of the target side."""
        capacity = len(self) * self._context
        return self.num_sources / capacity, self.num_targets / capacity

    def batch(self, rows: Ints, device: torch.device | str | None = None) -> Batch:
        """Return the given rows as one batch."""
        shape = self._shape if device is None else replace(self._shape, device=device)
        return collate_rows(self.segments(rows), shape)

    def segments(self, rows: Ints) -> list[PackedRow]:
        """Return the pairs of the given rows."""
        return [[self._segment(int(pair)) for pair in self._pairs[self._first[r] : self._first[r + 1]]] for r in rows]

    def pair_indices(self, row: int) -> list[int]:
        """Return the store indices of a row's pairs."""
        pairs: list[int] = self._pairs[self._first[row] : self._first[row + 1]].tolist()
        return pairs

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

    def provenance(self, number: int) -> list[int]:
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
        """Build the data; ``parts`` are mixture sources, ``vocab`` is the limit of token ids."""
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

        self._held_out = np.concatenate([splits["validation"] for splits in chosen])
        self.sources = [packed(splits["training"]) for splits in chosen]
        self.training, self.validation = self.sources[0], packed(self._held_out)
        orders = [_Epochs(rows, num_rows, seed) for rows, seed in zip(self.sources, seeds, strict=True)]
        weights = [part.weight for part in parts]
        self._rows: RowSource = orders[0] if len(parts) == 1 else MixtureRows(orders, weights, train.seed)
        shares = np.array(weights) / sum(weights) if len(parts) > 1 else np.ones(1)
        targets = np.array([rows.num_targets / len(rows) for rows in self.sources])
        self.train_tokens = sum(rows.num_targets for rows in self.sources)
        self.validation_tokens = self.validation.num_targets
        self.tokens_per_step = round(num_rows * float(shares @ targets))

    def _choose(self, part: MixtureSource, data: DataConfig, seed: int) -> dict[str, Ints]:
        """Split one source's pairs into training, in packing order, and validation."""
        count = part.last - part.first
        cut = count - (part.num_held_out or max(1, int(count * data.validation_fraction)))
        fits = self._fits[part.first : part.last]
        shuffled = seeded_rng(seed, 0).permutation(cut)
        chosen = {"training": shuffled[fits[shuffled]], "validation": cut + np.flatnonzero(fits[cut:])}
        for name, pairs in chosen.items():
            if not len(pairs):
                raise DataError(
                    f"no pair is left for {name}: none of "
                    f"{format_count(cut if name == 'training' else count - cut, 'pair')} "
                    f"fits data.seq_len {data.seq_len}",
                    "Use more pairs or a larger --seq-len.",
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
        """Return rows by number, as segments (``collate.py``)."""
        return self._rows.rows(numbers)

    def provenance(self, number: int) -> list[int]:
        return row_provenance(self._rows, number)

    def evaluation(self) -> Iterator[Batch]:
        """Yield all validation rows, or evenly spread ones with ``eval_tokens`` targets."""
        tokens, count = self._train.eval_tokens, len(self.validation)
        rows = np.arange(count)
        if 0 < tokens < self.validation_tokens:
            chosen = max(1, count * tokens // self.validation_tokens)
            rows = np.arange(chosen) * count // chosen
        for low in range(0, len(rows), self._train.batch_size):
            yield self.validation.batch(rows[low : low + self._train.batch_size])

    def examples(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Return the first held-out pairs as ids: the encoder's input and the stored target."""
        examples = []
        for pair in self._held_out[:count]:
            begin, middle, end = (int(self._store.offsets[2 * pair + i]) for i in (0, 1, 2))
            source, target = (self._store.take(np.arange(*span)).tolist() for span in ((begin, middle), (middle, end)))
            examples.append((source, target))
        return examples

    def packing_stats(self) -> PackingStats:
        """Return the use of both sides of all training rows."""
        rows = sum(map(len, self.sources))
        taken = sum(source.num_sources + source.num_targets for source in self.sources)
        return PackingStats(rows, 2 * rows * self._context, taken)

    def summary(self) -> list[str]:
        store, rows = self._store, sum(map(len, self.sources))
        capacity = rows * self._context
        lines = [f"tokens: {store.num_tokens:,} in {format_count(store.num_documents // 2, 'pair')}"]
        if self._left_out:
            lines.append(
                f"left out: {format_count(self._left_out, 'pair')} longer than data.seq_len {self._context} "
                f"(the longest side has {format_count(self._longest, 'token')})"
            )
        sources, targets = (
            sum(getattr(part, name) for part in self.sources) / capacity for name in ("num_sources", "num_targets")
        )
        lines.append(
            f"packed: {format_count(rows, 'row')} of {self._context} + {self._context} tokens, "
            f"{sources:.1%} of the sources and {targets:.1%} of the targets filled"
        )
        return lines
