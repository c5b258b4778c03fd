"""Documents -> packed Steps: who is trained on what, in an order that integers alone decide.

What the loop asks of any data is :class:`TrainingData`; of documents it is :class:`DocumentData` (of pairs,
``pair_data.py``).

**Packing.**  A split is a circle of documents, each opened by the separator.  A row is ``context`` consecutive tokens
of the circle; its targets are the tokens one further on::

    row        <sep> a1 a2 a3 <sep> b1 b2          target     a1 a2 a3 <sep> b1 b2 b3
    position       0  1  2  3     0  1  2          document    0  0  0     0  1  1  1

So p(first word | separator) is learned, and so is the end of a document: the target of its last token is the separator.
No target crosses into the next document's text: the token after a separator is predicted from the separator alone, as
documents do not see each other (``Step.documents``) and positions restart.  A row that begins inside a document starts
at position 0 there.  Where a split had to cut a document in two, no target reaches over the cut.

**Order.**  Which rows a step takes is a function of (seed, step): nothing to save but the step.  ``epochs``: every
epoch cuts the circle into rows at a fresh offset and takes them in a fresh order; ``windows``: every row starts at
random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvad.errors import DataError, counted
from kvad.step import Lane, Step
from kvad.train.config import RunConfig
from kvad.train.store import Ints, TokenStore

__all__ = [
    "Batch",
    "DocumentData",
    "Epochs",
    "Order",
    "Split",
    "TrainingData",
    "batch_of",
    "evaluation_rows",
    "generator",
    "split",
]

MANY_DOCUMENTS = 10  # from here on whole documents are held out


class Batch(NamedTuple):
    """``step.wanted`` [N] are the positions that have a target; ``targets`` [N].

    ``mixed`` [M]: places of a decoder's input that are to hold what the model itself says there (``sampling.py``).
    """

    step: Step
    targets: Tensor
    mixed: Tensor | None = None


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

    def told(self) -> list[str]:
        """What a user should know of it, in lines."""
        ...


class DocumentData:
    """Documents, next token by next token.  Raises DataError where they are too few for a row of each split."""

    def __init__(self, store: TokenStore, config: RunConfig) -> None:
        data, train = config.data, config.train
        self._data, self._train = data, train
        self.training, self.validation = split(store, data.validation, train.seed)
        rows = train.batch * train.accumulate
        self._order = Order(data.order, len(self.training), data.context, rows, train.seed)
        self.train_tokens, self.validation_tokens = len(self.training), len(self.validation)
        self.tokens_per_step = rows * data.context
        self._store = store

    def micro_batches(self, step: int) -> list[Batch]:
        starts = self._order.starts(step).reshape(self._train.accumulate, self._train.batch)
        return [batch_of(self.training, rows, self._data.context, self._train.device) for rows in starts]

    def evaluation(self) -> Iterator[Batch]:
        data, train = self._data, self._train
        for starts, length in evaluation_rows(self.validation, data.context, train.eval_tokens, train.batch):
            yield batch_of(self.validation, starts, length, train.device)

    def told(self) -> list[str]:
        return [f"tokens: {self._store.num_tokens:,} in {counted(self._store.num_documents, 'document')}"]


class Split:
    """Documents, or parts of them, as one circular stream of tokens.

    ``spans`` [n, 2]: first and last + 1 in the store, each within one document.
    """

    def __init__(self, store: TokenStore, spans: Ints) -> None:
        self.store, self._begin = store, spans[:, 0]
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


def batch_of(rows: Split, starts: Ints, length: int, device: torch.device | str = "cpu") -> Batch:
    """The rows that begin at ``starts``, as one Step; without ``documents`` where no row has a boundary."""
    tokens, positions, documents, targets = (torch.from_numpy(a.reshape(-1)) for a in rows.rows(starts, length))
    wanted = (targets >= 0).nonzero().view(-1)
    step = Step(
        tokens=tokens.to(device),
        positions=positions.to(device),
        lanes=(Lane(len(starts), length, length),),
        wanted=wanted.to(device),
        documents=documents.to(device) if bool(documents.any()) else None,
        limits=torch.full_like(tokens, length).to(device),
    )
    return Batch(step, targets[wanted].to(device))


class Epochs:
    """Which rows a step takes, where every epoch takes each of ``per_epoch`` rows once; a step may span epochs.

    ``order(epoch)``: the rows of an epoch, in its order.
    """

    def __init__(self, per_epoch: int, num_rows: int, order: Callable[[int], Ints]) -> None:
        """``num_rows``: rows of one optimizer step."""
        self._per_epoch, self._num_rows, self._order = per_epoch, num_rows, order
        self._epoch, self._kept = -1, np.empty(0, np.int64)

    def rows(self, step: int) -> Ints:
        """Of optimizer step ``step`` (from 0), [num_rows]."""
        numbers = np.arange(step * self._num_rows, (step + 1) * self._num_rows)
        epochs = numbers // self._per_epoch
        rows = np.empty(self._num_rows, np.int64)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            rows[mine] = self._of_epoch(int(epoch))[numbers[mine] % self._per_epoch]
        return rows

    def _of_epoch(self, epoch: int) -> Ints:
        if epoch != self._epoch:
            self._epoch, self._kept = epoch, self._order(epoch)
        return self._kept


class Order:
    """Where the rows of a step begin."""

    def __init__(self, kind: str, num_tokens: int, context: int, num_rows: int, seed: int) -> None:
        """``num_rows``: rows of one optimizer step.  Raises DataError if the split is shorter than one row."""
        if num_tokens < context + 1:
            raise DataError(
                f"the corpus is too short: {counted(num_tokens, 'token')} to train on, and a row of {context:,} needs "
                f"{context + 1:,}",
                "use more text or a smaller --context",
            )
        self._kind, self._num_tokens, self._context = kind, num_tokens, context
        self._num_rows, self._seed = num_rows, seed
        self.rows_per_epoch = num_tokens // context
        self._epochs = Epochs(self.rows_per_epoch, num_rows, self._of_epoch)

    def starts(self, step: int) -> Ints:
        """Where the rows of optimizer step ``step`` (from 0) begin, [num_rows]."""
        if self._kind == "windows":
            return generator(self._seed, step).integers(0, self._num_tokens - self._context, self._num_rows)
        return self._epochs.rows(step)

    def _of_epoch(self, epoch: int) -> Ints:
        random = generator(self._seed, epoch)
        offset = random.integers(0, self._num_tokens)
        starts: Ints = (offset + random.permutation(self.rows_per_epoch) * self._context) % self._num_tokens
        return starts


def generator(seed: int, number: int) -> np.random.Generator:
    """Random numbers that are a function of the run's seed and one more integer."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number])))


def split(store: TokenStore, validation: float, seed: int) -> tuple[Split, Split]:
    """Training and validation.  With MANY_DOCUMENTS whole documents are drawn until their share is reached; with
    fewer, or where no draw comes near it, the stream is cut at the place.

    Raises DataError where nothing is left for one of them.
    """
    spans = np.stack((store.offsets[:-1], store.offsets[1:]), axis=1)
    wanted = store.num_tokens * validation
    held = _draw(spans[:, 1] - spans[:, 0], wanted, seed) if len(spans) >= MANY_DOCUMENTS else None
    if held is not None:
        return Split(store, spans[~held]), Split(store, spans[held])
    cut = store.num_tokens - int(wanted)
    if not 1 < cut < store.num_tokens - 1:
        raise DataError(
            f"the corpus is too short: {counted(store.num_tokens, 'token')} cannot be split into training and "
            "validation",
            "use more text",
        )
    before = np.minimum(spans, cut)
    after = np.maximum(spans, cut)
    return Split(store, before[before[:, 0] < before[:, 1]]), Split(store, after[after[:, 0] < after[:, 1]])


def _draw(lengths: Ints, wanted: float, seed: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
    held, left = np.zeros(len(lengths), bool), wanted
    for document in np.random.Generator(np.random.PCG64(seed)).permutation(len(lengths)):
        if lengths[document] <= left:
            held[document] = True
            left -= lengths[document]
    return held if left < wanted / 2 else None


def evaluation_rows(rows: Split, context: int, tokens: int, batch: int) -> Iterator[tuple[Ints, int]]:
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
