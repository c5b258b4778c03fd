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
from kvad.model_input import ModelInput, SubBatch
from kvad.train.data.token_store import Ints

PADDING = -1  # the document of what is left over


class Batch(NamedTuple):
    """``step.wanted`` [N] are the positions that have a target; ``targets`` [N].

    ``mixed`` [M]: places of a decoder's input that are to hold what the model itself says there (``sampling.py``).
    """

    model_input: ModelInput
    targets: Tensor
    sampled_indices: Tensor | None = None


class Segment(NamedTuple):
    """``tokens`` [n] are read and ``targets`` [n] are to be said next (-1: none); of a pair, ``source`` [m]."""

    tokens: Ints
    targets: Ints
    encoder_tokens: Ints | None = None


PackedRow = Sequence[Segment]


class RowSource(Protocol):
    """Rows without an end, by number: which one is which is a function of the seed."""

    def rows(self, numbers: Ints) -> list[PackedRow]:
        """Rows ``numbers`` [n], ascending from step to step."""
        ...


@runtime_checkable
class HasProvenance(Protocol):
    """Data that can say what its rows are made of."""

    def provenance(self, number: int) -> list[int]:
        """The texts of row ``number`` of a run, by their place in the corpus; a pair is one."""
        ...


def row_provenance(data: object, number: int) -> list[int]:
    """[] of what is not :class:`Traced`."""
    return data.provenance(number) if isinstance(data, HasProvenance) else []


@dataclass(frozen=True)
class CollateConfig:
    """How rows become Steps.  ``pad``: the token of what is left over; ``vocab``: what no token id may reach."""

    context: int
    pad: int = 0
    reset: bool = True
    isolate: bool = True
    device: torch.device | str = "cpu"
    vocab: int | None = None


class PackingStats(NamedTuple):
    """What packing made of the tokens: ``places`` of the rows, how many are ``taken``, tokens ``cropped`` (lost)."""

    rows: int
    capacity: int
    num_used: int
    num_cropped: int = 0

    def summary(self) -> str:
        lost = self.num_cropped / max(1, self.num_used + self.num_cropped)
        filled = self.num_used / max(1, self.capacity)
        return f"{filled:.1%} of the places taken, {1 - filled:.1%} padding, {lost:.1%} of the tokens cropped"


def collate_rows(rows: Sequence[PackedRow], shape: CollateConfig) -> Batch:
    """One Step of the rows, as wide as the fullest of them.  DataError for a token id beyond the vocabulary."""
    has_source = rows[0][0].encoder_tokens is not None
    step = _side([[segment.tokens for segment in row] for row in rows], shape)
    width = step.sub_batches[0].num_new_tokens
    targets = np.full((len(rows), width), -1)
    for number, row in enumerate(rows):
        flat = np.concatenate([segment.targets for segment in row])
        targets[number, : len(flat)] = flat
    flat = targets.reshape(-1)
    _check(flat, shape)
    wanted = np.flatnonzero(flat >= 0)
    step = step._replace(logit_indices=torch.from_numpy(wanted).to(shape.device))
    if has_source:
        source = _side([[_source(segment) for segment in row] for row in rows], shape)
        if (step.document_ids is None) != (source.document_ids is None):  # cross-attention compares both
            step, source = _numbered(step), _numbered(source)
        step = step._replace(encoder_input=source)
    return Batch(step, torch.from_numpy(flat[wanted]).to(shape.device))


def split_segments(batch: Batch) -> Iterator[Batch]:
    """Every segment of an isolated batch as a batch of its own: same tokens, positions and targets, nobody beside it.

    One without a target is left out.
    """
    step, source = batch.model_input, batch.model_input.encoder_input
    most = max(len(step.token_ids), 0 if source is None else len(source.token_ids))
    own, there = segment_ids(step, most)[0], None if source is None else segment_ids(source, most)[0]
    wanted = torch.zeros(len(step.token_ids), dtype=torch.bool)
    wanted[step.logit_indices.cpu()] = True
    place = torch.zeros(len(step.token_ids), dtype=torch.int64)
    place[step.logit_indices.cpu()] = torch.arange(len(step.logit_indices))
    for owner in own[own >= 0].unique().tolist():
        at = (own == owner).nonzero().view(-1)
        targets = batch.targets.cpu()[place[at[wanted[at]]]]
        if not len(targets):
            continue
        single = _taken(step, at)._replace(
            logit_indices=wanted[at].nonzero().view(-1).to(step.token_ids.device), encoder_input=None
        )
        if source is not None and there is not None:
            single = single._replace(encoder_input=_taken(source, (there == owner).nonzero().view(-1)))
        yield Batch(single, targets.to(batch.targets.device))


def segment_ids(step: ModelInput, most: int | None = None) -> tuple[Tensor, int]:
    """([T] which segment of an isolated batch a token belongs to, ``most`` to a row; -1 for padding, that ``most``)."""
    lane = step.sub_batches[0]
    most = len(step.token_ids) if most is None else most
    row = torch.arange(lane.num_seqs).repeat_interleave(lane.num_new_tokens) * most
    if step.document_ids is None:
        return row, most
    documents = step.document_ids.cpu()
    return (row + documents).masked_fill(documents < 0, -1), most


def select_rows(batch: Batch, rows: Tensor) -> Batch:
    """The batch with ``rows`` [n] of its rows alone, in that order; of one lane on each side."""
    step = batch.model_input
    wanted = torch.full((len(step.token_ids),), -1)
    wanted[step.logit_indices.cpu()] = torch.arange(len(step.logit_indices))
    kept = wanted.view(-1, step.sub_batches[0].num_new_tokens)[rows].view(-1)
    at = (kept >= 0).nonzero().view(-1)
    chosen = _select_input_rows(step, rows)._replace(logit_indices=at.to(step.token_ids.device))
    source = None if step.encoder_input is None else _select_input_rows(step.encoder_input, rows)
    return Batch(chosen._replace(encoder_input=source), batch.targets[kept[at].to(batch.targets.device)])


def _select_input_rows(step: ModelInput, rows: Tensor) -> ModelInput:
    width = step.sub_batches[0].num_new_tokens

    def take(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.view(-1, width)[rows.to(x.device)].view(-1)

    tokens, positions = take(step.token_ids), take(step.positions)
    assert tokens is not None and positions is not None
    return step._replace(
        token_ids=tokens,
        positions=positions,
        document_ids=take(step.document_ids),
        causal_order=take(step.causal_order),
        max_seq_lens=take(step.max_seq_lens),
        sub_batches=(SubBatch(len(rows), width, width),),
    )


def _taken(step: ModelInput, at: Tensor) -> ModelInput:
    def take(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[at.to(x.device)]

    tokens, positions = take(step.token_ids), take(step.positions)
    assert tokens is not None and positions is not None
    nothing = step.logit_indices[:0]
    return ModelInput(
        tokens, positions, (SubBatch(1, len(at), len(at)),), nothing, max_seq_lens=take(step.max_seq_lens)
    )


def _source(segment: Segment) -> Ints:
    assert segment.encoder_tokens is not None, "all segments are pairs, or none is"
    return segment.encoder_tokens


def _side(rows: Sequence[Sequence[Ints]], shape: CollateConfig) -> ModelInput:
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

    step = ModelInput(
        token_ids=tensor(tokens),
        positions=tensor(positions),
        sub_batches=(SubBatch(len(rows), width, width),),
        logit_indices=tensor(np.empty(0, np.int64)),
        max_seq_lens=torch.full((tokens.size,), shape.context, device=shape.device),
    )
    if not documents.any():  # one segment in every row, and no padding
        return step
    if shape.isolate:
        return step._replace(document_ids=tensor(documents))
    return step._replace(causal_order=tensor(np.where(documents < 0, -1, place)))


def _numbered(step: ModelInput) -> ModelInput:
    return step if step.document_ids is not None else step._replace(document_ids=torch.zeros_like(step.token_ids))


def _check(tokens: Ints, shape: CollateConfig) -> None:
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
        return self.epoch_and_row(np.arange(step * self._num_rows, (step + 1) * self._num_rows))[1]

    def epoch_and_row(self, numbers: Ints) -> tuple[Ints, Ints]:
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


def seeded_rng(seed: int, *numbers: int) -> np.random.Generator:
    """Random numbers that are a function of the run's seed and other integers."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *numbers])))
