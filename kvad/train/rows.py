"""Rows of segments -> Steps: the one place where packed texts become tensors.

A segment is a document, a part of one, or a pair; a row holds several, side by side.  Two switches say what that means:

``reset``: positions restart at 0 in every segment; else they run on through the row.
``isolate``: segments do not see each other; else everything earlier in the row is seen, as the model reads it::

    row  a a a b b .        positions  0 1 2 0 1 0     reset;  0 1 2 3 4 0  else
                            documents  0 0 0 1 1 -1    isolate: the mask compares them
                            order      0 1 2 3 4 -1    reset, not isolate: the mask reads the place in the row

What is left over is padding: nobody sees it, and its logits are not wanted.  Of an encoder that is not isolated every
source in a row is seen by every token, and by every target in the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from kvad.errors import DataError
from kvad.step import Lane, Step
from kvad.train.store import Ints

__all__ = ["Batch", "Epochs", "Row", "RowSource", "Segment", "Shape", "Traced", "Use"]
__all__ += ["alone", "collate", "generator", "owners", "picked", "texts_of"]

PADDING = -1  # the document of what is left over


class Batch(NamedTuple):
    """``step.wanted`` [N] are the positions that have a target; ``targets`` [N].

    ``mixed`` [M]: places of a decoder's input that are to hold what the model itself says there (``sampling.py``).
    """

    step: Step
    targets: Tensor
    mixed: Tensor | None = None


class Segment(NamedTuple):
    """``tokens`` [n] are read and ``targets`` [n] are to be said next (-1: none); of a pair, ``source`` [m]."""

    tokens: Ints
    targets: Ints
    source: Ints | None = None


Row = Sequence[Segment]


class RowSource(Protocol):
    """Rows without an end, by number: which one is which is a function of the seed."""

    def rows(self, numbers: Ints) -> list[Row]:
        """Rows ``numbers`` [n], ascending from step to step."""
        ...


@runtime_checkable
class Traced(Protocol):
    """Data that can say what its rows are made of."""

    def texts_of(self, number: int) -> list[int]:
        """The texts of row ``number`` of a run, by their place in the corpus; a pair is one."""
        ...


def texts_of(data: object, number: int) -> list[int]:
    """[] of what is not :class:`Traced`."""
    return data.texts_of(number) if isinstance(data, Traced) else []


@dataclass(frozen=True)
class Shape:
    """How rows become Steps.  ``pad``: the token of what is left over; ``vocab``: what no token id may reach."""

    context: int
    pad: int = 0
    reset: bool = True
    isolate: bool = True
    device: torch.device | str = "cpu"
    vocab: int | None = None


class Use(NamedTuple):
    """What packing made of the tokens: ``places`` of the rows, how many are ``taken``, tokens ``cropped`` (lost)."""

    rows: int
    places: int
    taken: int
    cropped: int = 0

    def told(self) -> str:
        lost = self.cropped / max(1, self.taken + self.cropped)
        filled = self.taken / max(1, self.places)
        return f"{filled:.1%} of the places taken, {1 - filled:.1%} padding, {lost:.1%} of the tokens cropped"


def collate(rows: Sequence[Row], shape: Shape) -> Batch:
    """One Step of the rows, as wide as the fullest of them.  DataError for a token id beyond the vocabulary."""
    has_source = rows[0][0].source is not None
    step = _side([[segment.tokens for segment in row] for row in rows], shape)
    width = step.lanes[0].new
    targets = np.full((len(rows), width), -1)
    for number, row in enumerate(rows):
        flat = np.concatenate([segment.targets for segment in row])
        targets[number, : len(flat)] = flat
    flat = targets.reshape(-1)
    _check(flat, shape)
    wanted = np.flatnonzero(flat >= 0)
    step = step._replace(wanted=torch.from_numpy(wanted).to(shape.device))
    if has_source:
        source = _side([[_source(segment) for segment in row] for row in rows], shape)
        if (step.documents is None) != (source.documents is None):  # cross-attention compares both
            step, source = _numbered(step), _numbered(source)
        step = step._replace(source=source)
    return Batch(step, torch.from_numpy(flat[wanted]).to(shape.device))


def alone(batch: Batch) -> Iterator[Batch]:
    """Every segment of an isolated batch as a batch of its own: same tokens, positions and targets, nobody beside it.

    One without a target is left out.
    """
    step, source = batch.step, batch.step.source
    most = max(len(step.tokens), 0 if source is None else len(source.tokens))
    own, there = owners(step, most)[0], None if source is None else owners(source, most)[0]
    wanted = torch.zeros(len(step.tokens), dtype=torch.bool)
    wanted[step.wanted.cpu()] = True
    place = torch.zeros(len(step.tokens), dtype=torch.int64)
    place[step.wanted.cpu()] = torch.arange(len(step.wanted))
    for owner in own[own >= 0].unique().tolist():
        at = (own == owner).nonzero().view(-1)
        targets = batch.targets.cpu()[place[at[wanted[at]]]]
        if not len(targets):
            continue
        single = _taken(step, at)._replace(wanted=wanted[at].nonzero().view(-1).to(step.tokens.device), source=None)
        if source is not None and there is not None:
            single = single._replace(source=_taken(source, (there == owner).nonzero().view(-1)))
        yield Batch(single, targets.to(batch.targets.device))


def owners(step: Step, most: int | None = None) -> tuple[Tensor, int]:
    """([T] which segment of an isolated batch a token belongs to, ``most`` to a row; -1 for padding, that ``most``)."""
    lane = step.lanes[0]
    most = len(step.tokens) if most is None else most
    row = torch.arange(lane.rows).repeat_interleave(lane.new) * most
    if step.documents is None:
        return row, most
    documents = step.documents.cpu()
    return (row + documents).masked_fill(documents < 0, -1), most


def picked(batch: Batch, rows: Tensor) -> Batch:
    """The batch with ``rows`` [n] of its rows alone, in that order; of one lane on each side."""
    step = batch.step
    wanted = torch.full((len(step.tokens),), -1)
    wanted[step.wanted.cpu()] = torch.arange(len(step.wanted))
    kept = wanted.view(-1, step.lanes[0].new)[rows].view(-1)
    at = (kept >= 0).nonzero().view(-1)
    chosen = _rows_of(step, rows)._replace(wanted=at.to(step.tokens.device))
    source = None if step.source is None else _rows_of(step.source, rows)
    return Batch(chosen._replace(source=source), batch.targets[kept[at].to(batch.targets.device)])


def _rows_of(step: Step, rows: Tensor) -> Step:
    width = step.lanes[0].new

    def take(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.view(-1, width)[rows.to(x.device)].view(-1)

    tokens, positions = take(step.tokens), take(step.positions)
    assert tokens is not None and positions is not None
    return step._replace(
        tokens=tokens,
        positions=positions,
        documents=take(step.documents),
        order=take(step.order),
        limits=take(step.limits),
        lanes=(Lane(len(rows), width, width),),
    )


def _taken(step: Step, at: Tensor) -> Step:
    def take(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[at.to(x.device)]

    tokens, positions = take(step.tokens), take(step.positions)
    assert tokens is not None and positions is not None
    nothing = step.wanted[:0]
    return Step(tokens, positions, (Lane(1, len(at), len(at)),), nothing, limits=take(step.limits))


def _source(segment: Segment) -> Ints:
    assert segment.source is not None, "all segments are pairs, or none is"
    return segment.source


def _side(rows: Sequence[Sequence[Ints]], shape: Shape) -> Step:
    """The tokens of one side, rows of segments; nothing is wanted yet."""
    width = max(sum(map(len, row)) for row in rows)
    place = np.arange(width)
    tokens, positions = np.full((len(rows), width), shape.pad), np.zeros((len(rows), width), np.int64)
    documents = np.full((len(rows), width), PADDING)
    for number, row in enumerate(rows):
        low = 0
        for document, piece in enumerate(row):
            high = low + len(piece)
            tokens[number, low:high] = piece
            positions[number, low:high] = place[: high - low] if shape.reset else place[low:high]
            documents[number, low:high] = document
            low = high
    _check(tokens, shape)

    def tensor(values: Ints) -> Tensor:
        return torch.from_numpy(values.reshape(-1)).to(shape.device)

    step = Step(
        tokens=tensor(tokens),
        positions=tensor(positions),
        lanes=(Lane(len(rows), width, width),),
        wanted=tensor(np.empty(0, np.int64)),
        limits=torch.full((tokens.size,), shape.context, device=shape.device),
    )
    if not documents.any():  # one segment in every row, and no padding
        return step
    if shape.isolate:
        return step._replace(documents=tensor(documents))
    return step._replace(order=tensor(np.where(documents < 0, -1, place)))


def _numbered(step: Step) -> Step:
    return step if step.documents is not None else step._replace(documents=torch.zeros_like(step.tokens))


def _check(tokens: Ints, shape: Shape) -> None:
    if shape.vocab is not None and tokens.size and int(tokens.max()) >= shape.vocab:
        raise DataError(
            f"token id {int(tokens.max()):,} is beyond the model's vocabulary of {shape.vocab:,}",
            "these tokens were made by another tokenizer, or are damaged: prepare them again",
        )


# ---------------------------------------------------------------- order


class Epochs:
    """Which rows a number stands for, where every epoch takes each of its rows once.

    ``order(epoch)``: the rows of an epoch, in its order; ``per_epoch``: how many, where it is always the same number.
    Else epochs are counted from the first one on, once.
    """

    def __init__(self, per_epoch: int | None, num_rows: int, order: Callable[[int], Ints]) -> None:
        """``num_rows``: rows of one optimizer step."""
        self._per_epoch, self._num_rows, self._order = per_epoch, num_rows, order
        self._begins = [0]  # the first number of each epoch
        self._epoch, self._kept = -1, np.empty(0, np.int64)

    def rows(self, step: int) -> Ints:
        """Of optimizer step ``step`` (from 0), [num_rows]; a step may span epochs."""
        return self.at(np.arange(step * self._num_rows, (step + 1) * self._num_rows))[1]

    def at(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Epochs and rows, [n] each, of ``numbers`` [n]."""
        epochs, inside = self._split(numbers)
        rows = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            rows[mine] = self._of_epoch(int(epoch))[inside[mine]]
        return epochs, rows

    def _split(self, numbers: Ints) -> tuple[Ints, Ints]:
        if self._per_epoch is not None:
            return numbers // self._per_epoch, numbers % self._per_epoch
        while len(numbers) and self._begins[-1] <= int(numbers.max()):
            self._begins.append(self._begins[-1] + len(self._of_epoch(len(self._begins) - 1)))
        epochs: Ints = np.searchsorted(np.array(self._begins), numbers, side="right") - 1
        return epochs, numbers - np.array(self._begins)[epochs]

    def _of_epoch(self, epoch: int) -> Ints:
        if epoch != self._epoch:
            self._epoch, self._kept = epoch, self._order(epoch)
        return self._kept


def generator(seed: int, *numbers: int) -> np.random.Generator:
    """Random numbers that are a function of the run's seed and other integers."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *numbers])))
