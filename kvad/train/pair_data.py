"""Pairs -> packed Steps with sources: an encoder-decoder learns every target token from its source and those before it.

**Packing.**  A row holds several pairs on both sides (``packing.py``); each is a document of its own, so that neither
the encoder, nor the decoder, nor its attention to the source sees another pair, and positions restart::

    source    x1 x2 EOS y1 EOS  .       decoder   BOS t1 t2 BOS u1  .       target   t1 t2 EOS u1 EOS  .
    position   0  1   2  0   1  0                   0  1  2   0  1  0
    document   0  0   0  1   1 -1                   0  0  0   1  1 -1

What is left over is padding: document -1, which nobody else sees and whose logits nobody wants.  A micro-batch is as
wide as its fullest row.

**Order.**  Pairs are packed once, in an order that the seed decides; every epoch takes the rows in an order of its own.
So there are as many rows in every epoch, and which of them a step takes is a function of (seed, step).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvad.errors import ConfigError, DataError, counted
from kvad.step import Lane, Step
from kvad.train.config import RunConfig
from kvad.train.data import Batch, Epochs, generator
from kvad.train.packing import first_fit
from kvad.train.store import Ints, TokenStore

__all__ = ["PairData", "PairRows"]

PADDING = -1  # the document of what is left over


class _Side(NamedTuple):
    """Of one side of a micro-batch: flat [rows * width] tensors."""

    tokens: Tensor
    positions: Tensor
    documents: Tensor
    width: int


class PairRows:
    """Pairs of a store, packed into rows of ``context`` and ``context`` tokens; ``pad`` fills what is left over."""

    def __init__(self, store: TokenStore, pairs: Ints, context: int, pad: int) -> None:
        self._store, self._context, self._pad = store, context, pad
        begin, middle, end = (store.offsets[2 * pairs + i] for i in (0, 1, 2))
        rows = first_fit(middle - begin, end - middle - 1, context)
        self._pairs = pairs[np.argsort(rows, kind="stable")]
        self._first: Ints = np.concatenate(([0], np.cumsum(np.bincount(rows))))
        self.num_sources, self.num_targets = int((middle - begin).sum()), int((end - middle - 1).sum())

    def __len__(self) -> int:
        return len(self._first) - 1

    @property
    def utilisation(self) -> tuple[float, float]:
        """Shares of the places for source and for target tokens that are taken."""
        places = len(self) * self._context
        return self.num_sources / places, self.num_targets / places

    def batch(self, rows: Ints, device: torch.device | str = "cpu") -> Batch:
        """The given rows as one Step."""
        pairs = np.concatenate([self._pairs[self._first[row] : self._first[row + 1]] for row in rows])
        sizes = self._first[rows + 1] - self._first[rows]
        row_of = np.repeat(np.arange(len(rows)), sizes)
        number = np.arange(len(pairs)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        begin, middle, end = (self._store.offsets[2 * pairs + i] for i in (0, 1, 2))
        source, _, _ = self._side(row_of, number, begin, middle - begin, len(rows))
        target, wanted, at = self._side(row_of, number, middle, end - middle - 1, len(rows))
        step = self._step(source, target, wanted, len(rows), device)
        return Batch(step, torch.from_numpy(self._store.take(at + 1)).to(device))

    def _step(self, source: _Side, target: _Side, wanted: Ints, rows: int, device: torch.device | str) -> Step:
        def step(side: _Side, wanted: Tensor) -> Step:
            return Step(
                tokens=side.tokens.to(device),
                positions=side.positions.to(device),
                lanes=(Lane(rows, side.width, side.width),),
                wanted=wanted.to(device),
                documents=side.documents.to(device),
                limits=torch.full_like(side.tokens, self._context).to(device),
            )

        nothing = torch.empty(0, dtype=torch.int64)
        return step(target, torch.from_numpy(wanted))._replace(source=step(source, nothing))

    def _side(self, row_of: Ints, number: Ints, begin: Ints, length: Ints, rows: int) -> tuple[_Side, Ints, Ints]:
        """The tokens ``begin .. begin + length`` of each pair, side by side in its row; beside it, the flat places that
        were taken, and where in the store the token of each stands."""
        before = np.cumsum(length) - length  # in all rows
        row_begins = np.zeros(rows, np.int64)
        row_begins[row_of[number == 0]] = before[number == 0]
        width = int(np.bincount(row_of, length, rows).max())
        owner = np.repeat(np.arange(len(length)), length)
        position = np.arange(int(length.sum())) - before[owner]
        places = row_of[owner] * width + (before - row_begins[row_of])[owner] + position
        tokens = np.full(rows * width, self._pad)
        positions, documents = np.zeros(rows * width, np.int64), np.full(rows * width, PADDING)
        at = begin[owner] + position
        tokens[places], positions[places], documents[places] = self._store.take(at), position, number[owner]
        tensors = [torch.from_numpy(values) for values in (tokens, positions, documents)]
        return _Side(tensors[0], tensors[1], tensors[2], width), places, at


class PairData:
    """The last share of the pairs, or the last ``held``, for validation, the rest to train on.

    A pair with a side longer than the context is left out, never cut.  Raises DataError where nothing is left,
    ConfigError for a configuration that documents alone can have.
    """

    def __init__(self, store: TokenStore, config: RunConfig, held: int, pad: int) -> None:
        data, train = config.data, config.train
        if data.order != "epochs":
            raise ConfigError(f"data.order: {data.order} is for documents", "pairs are taken in epochs")
        self._train = train
        count = store.num_documents // 2
        cut = count - (held or max(1, int(count * data.validation)))
        fits = self._fitting(store, data.context)
        shuffled = generator(train.seed, 0).permutation(cut)
        chosen = {"training": shuffled[fits[shuffled]], "validation": cut + np.flatnonzero(fits[cut:])}
        for name, pairs in chosen.items():
            if not len(pairs):
                raise DataError(
                    f"no pair is left for {name}: {counted(cut if name == 'training' else count - cut, 'pair')}, of "
                    f"which none fits a context of {data.context}",
                    "use more pairs or a larger --context",
                )
        self.training, self.validation = (PairRows(store, p, data.context, pad) for p in chosen.values())
        self._held = chosen["validation"]
        self._store, self._context = store, data.context
        rows = train.batch * train.accumulate
        self._epochs = Epochs(
            len(self.training), rows, lambda epoch: generator(train.seed, 1 + epoch).permutation(len(self.training))
        )
        self.train_tokens, self.validation_tokens = self.training.num_targets, self.validation.num_targets
        self.tokens_per_step = round(rows * self.train_tokens / len(self.training))

    def _fitting(self, store: TokenStore, context: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        lengths = np.diff(store.offsets)
        longest = np.maximum(lengths[0::2], lengths[1::2] - 1)
        fits: np.ndarray[tuple[int], np.dtype[np.bool_]] = longest <= context
        self._left_out, self._longest = int((~fits).sum()), int(longest.max())
        return fits

    def micro_batches(self, step: int) -> list[Batch]:
        rows = self._epochs.rows(step).reshape(self._train.accumulate, self._train.batch)
        return [self.training.batch(some, self._train.device) for some in rows]

    def evaluation(self) -> Iterator[Batch]:
        """All rows, or as many, evenly spread, as have ``eval_tokens`` targets."""
        tokens, count = self._train.eval_tokens, len(self.validation)
        rows = np.arange(count)
        if 0 < tokens < self.validation_tokens:
            chosen = max(1, count * tokens // self.validation_tokens)
            rows = np.arange(chosen) * count // chosen
        for low in range(0, len(rows), self._train.batch):
            yield self.validation.batch(rows[low : low + self._train.batch], self._train.device)

    def examples(self, count: int) -> list[tuple[list[int], list[int]]]:
        """The first held-out pairs as ids: a source as the encoder reads it, a target as it stands in the store."""
        found = []
        for pair in self._held[:count]:
            begin, middle, end = (int(self._store.offsets[2 * pair + i]) for i in (0, 1, 2))
            source, target = (self._store.take(np.arange(*span)).tolist() for span in ((begin, middle), (middle, end)))
            found.append((source, target))
        return found

    def told(self) -> list[str]:
        store, (sources, targets) = self._store, self.training.utilisation
        lines = [f"tokens: {store.num_tokens:,} in {counted(store.num_documents // 2, 'pair')}"]
        if self._left_out:
            lines.append(
                f"left out: {counted(self._left_out, 'pair')} longer than the context of {self._context} "
                f"(the longest has a side of {counted(self._longest, 'token')})"
            )
        lines.append(
            f"packed: {counted(len(self.training), 'row')} of {self._context} + {self._context} tokens, "
            f"{sources:.1%} of the sources' places and {targets:.1%} of the targets' taken"
        )
        return lines
