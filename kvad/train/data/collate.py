"""Collation of packed rows into batches: the one place where packed texts become tensors.

A segment is a document, a part of one, or a pair; a row holds several segments. Two options define their relation:

``reset_positions``: positions restart at 0 in every segment; else they continue through the row.
``isolate_documents``: segments do not attend to each other; else a token attends to everything earlier in the row::

    row  a a a b b .        positions  0 1 2 0 1 0     reset_positions;  0 1 2 3 4 0  else
                            documents  0 0 0 1 1 -1    isolate_documents: the mask compares them
                            order      0 1 2 3 4 -1    reset without isolate: the mask uses the index in the row

The rest of a row is padding: no token attends to it, and it has no logits. In an encoder that is not isolated every
source of a row is visible to every token, and to every target of the row.
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

PADDING = -1  # document id of padding


class Batch(NamedTuple):
    """Model input and targets of a micro-batch."""

    model_input: ModelInput
    targets: Tensor  # [N], of the positions model_input.logit_indices
    sampled_indices: Tensor | None = None  # [M] decoder inputs to replace by the model's samples


class Segment(NamedTuple):
    """Tokens of one document, part of a document, or pair."""

    tokens: Ints  # [n] inputs
    targets: Ints  # [n] next tokens, -1 for none
    encoder_tokens: Ints | None = None  # [m] of a pair


PackedRow = Sequence[Segment]


class RowSource(Protocol):
    """Endless rows by index; the order is a function of the seed."""

    def rows(self, numbers: Ints) -> list[PackedRow]:
        """Return rows ``numbers`` [n], which ascend from step to step."""
        ...


@runtime_checkable
class HasProvenance(Protocol):
    """Data that can name the texts of its rows."""

    def provenance(self, number: int) -> list[int]:
        """Return the corpus indices of the texts in row ``number``; a pair counts as one text."""
        ...


def row_provenance(data: object, number: int) -> list[int]:
    """Return the texts of a row, or [] for data without provenance."""
    return data.provenance(number) if isinstance(data, HasProvenance) else []


@dataclass(frozen=True)
class CollateConfig:
    """Options of :func:`collate_rows`."""

    seq_len: int
    pad: int = 0  # token id of padding
    reset_positions: bool = True
    isolate_documents: bool = True
    device: torch.device | str = "cpu"
    vocab_size: int | None = None  # upper limit of token ids


class PackingStats(NamedTuple):
    """Use of the rows' capacity."""

    rows: int
    capacity: int  # tokens
    num_used: int  # tokens
    num_cropped: int = 0  # tokens lost by cropping

    def summary(self) -> str:
        """Return the shares of used, padding and cropped tokens."""
        lost = self.num_cropped / max(1, self.num_used + self.num_cropped)
        filled = self.num_used / max(1, self.capacity)
        return f"{filled:.1%} filled, {1 - filled:.1%} padding, {lost:.1%} of the tokens cropped"


def collate_rows(rows: Sequence[PackedRow], shape: CollateConfig) -> Batch:
    """Build one batch of the rows, as wide as the fullest of them.

    Raises:
        DataError: If a token id is outside the vocabulary.
    """
    has_source = rows[0][0].encoder_tokens is not None
    model_input = _side([[segment.tokens for segment in row] for row in rows], shape)
    width = model_input.sub_batches[0].num_new_tokens
    targets = np.full((len(rows), width), -1)
    for number, row in enumerate(rows):
        flat = np.concatenate([segment.targets for segment in row])
        targets[number, : len(flat)] = flat
    flat = targets.reshape(-1)
    _check(flat, shape)
    logit_indices = np.flatnonzero(flat >= 0)
    model_input = model_input._replace(logit_indices=torch.from_numpy(logit_indices).to(shape.device))
    if has_source:
        source = _side([[_source(segment) for segment in row] for row in rows], shape)
        if (model_input.document_ids is None) != (source.document_ids is None):  # cross-attention compares both
            model_input, source = _with_document_ids(model_input), _with_document_ids(source)
        model_input = model_input._replace(encoder_input=source)
    return Batch(model_input, torch.from_numpy(flat[logit_indices]).to(shape.device))


def split_segments(batch: Batch) -> Iterator[Batch]:
    """Yield every segment of an isolated batch as a batch: same tokens, positions and targets.

    Segments without a target are skipped.
    """
    model_input, source = batch.model_input, batch.model_input.encoder_input
    stride = max(len(model_input.token_ids), 0 if source is None else len(source.token_ids))
    owners, source_owners = (
        segment_ids(model_input, stride)[0],
        None if source is None else segment_ids(source, stride)[0],
    )
    has_target = torch.zeros(len(model_input.token_ids), dtype=torch.bool)
    has_target[model_input.logit_indices.cpu()] = True
    target_index = torch.zeros(len(model_input.token_ids), dtype=torch.int64)
    target_index[model_input.logit_indices.cpu()] = torch.arange(len(model_input.logit_indices))
    for owner in owners[owners >= 0].unique().tolist():
        at = (owners == owner).nonzero().view(-1)
        targets = batch.targets.cpu()[target_index[at[has_target[at]]]]
        if not len(targets):
            continue
        single = _take_tokens(model_input, at)._replace(
            logit_indices=has_target[at].nonzero().view(-1).to(model_input.token_ids.device), encoder_input=None
        )
        if source is not None and source_owners is not None:
            single = single._replace(encoder_input=_take_tokens(source, (source_owners == owner).nonzero().view(-1)))
        yield Batch(single, targets.to(batch.targets.device))


def segment_ids(model_input: ModelInput, stride: int | None = None) -> tuple[Tensor, int]:
    """Return the segment of each token of an isolated batch.

    Returns:
        [T] segment ids, unique over rows, -1 for padding; and the range of ids per row.
    """
    sub_batch = model_input.sub_batches[0]
    stride = len(model_input.token_ids) if stride is None else stride
    row = torch.arange(sub_batch.num_seqs).repeat_interleave(sub_batch.num_new_tokens) * stride
    if model_input.document_ids is None:
        return row, stride
    documents = model_input.document_ids.cpu()
    return (row + documents).masked_fill(documents < 0, -1), stride


def select_rows(batch: Batch, rows: Tensor) -> Batch:
    """Return a batch with ``rows`` [n] of its rows, in that order; one sub-batch per side."""
    model_input = batch.model_input
    target_index = torch.full((len(model_input.token_ids),), -1)
    target_index[model_input.logit_indices.cpu()] = torch.arange(len(model_input.logit_indices))
    selected = target_index.view(-1, model_input.sub_batches[0].num_new_tokens)[rows].view(-1)
    at = (selected >= 0).nonzero().view(-1)
    chosen = _select_input_rows(model_input, rows)._replace(logit_indices=at.to(model_input.token_ids.device))
    source = None if model_input.encoder_input is None else _select_input_rows(model_input.encoder_input, rows)
    return Batch(chosen._replace(encoder_input=source), batch.targets[selected[at].to(batch.targets.device)])


def _select_input_rows(model_input: ModelInput, rows: Tensor) -> ModelInput:
    width = model_input.sub_batches[0].num_new_tokens

    def take(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.view(-1, width)[rows.to(x.device)].view(-1)

    tokens, positions = take(model_input.token_ids), take(model_input.positions)
    assert tokens is not None and positions is not None
    return model_input._replace(
        token_ids=tokens,
        positions=positions,
        document_ids=take(model_input.document_ids),
        causal_order=take(model_input.causal_order),
        max_seq_lens=take(model_input.max_seq_lens),
        sub_batches=(SubBatch(len(rows), width, width),),
    )


def _take_tokens(model_input: ModelInput, at: Tensor) -> ModelInput:
    def take(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[at.to(x.device)]

    tokens, positions = take(model_input.token_ids), take(model_input.positions)
    assert tokens is not None and positions is not None
    nothing = model_input.logit_indices[:0]
    return ModelInput(
        tokens, positions, (SubBatch(1, len(at), len(at)),), nothing, max_seq_lens=take(model_input.max_seq_lens)
    )


def _source(segment: Segment) -> Ints:
    assert segment.encoder_tokens is not None, "either all segments are pairs or none is"
    return segment.encoder_tokens


def _side(rows: Sequence[Sequence[Ints]], shape: CollateConfig) -> ModelInput:
    """Build the model input of one side from rows of segments, without logit indices."""
    width = max(sum(map(len, row)) for row in rows)
    indices = np.arange(width)
    tokens, positions = np.full((len(rows), width), shape.pad), np.zeros((len(rows), width), np.int64)
    documents = np.full((len(rows), width), PADDING)
    for number, row in enumerate(rows):
        low = 0
        for document, piece in enumerate(row):
            high = low + len(piece)
            tokens[number, low:high] = piece
            positions[number, low:high] = indices[: high - low] if shape.reset_positions else indices[low:high]
            documents[number, low:high] = document
            low = high
    _check(tokens, shape)

    def tensor(values: Ints) -> Tensor:
        return torch.from_numpy(values.reshape(-1)).to(shape.device)

    model_input = ModelInput(
        token_ids=tensor(tokens),
        positions=tensor(positions),
        sub_batches=(SubBatch(len(rows), width, width),),
        logit_indices=tensor(np.empty(0, np.int64)),
        max_seq_lens=torch.full((tokens.size,), shape.seq_len, device=shape.device),
    )
    if not documents.any():  # one segment in every row, and no padding
        return model_input
    if shape.isolate_documents:
        return model_input._replace(document_ids=tensor(documents))
    return model_input._replace(causal_order=tensor(np.where(documents < 0, -1, indices)))


def _with_document_ids(model_input: ModelInput) -> ModelInput:
    return (
        model_input
        if model_input.document_ids is not None
        else model_input._replace(document_ids=torch.zeros_like(model_input.token_ids))
    )


def _check(tokens: Ints, shape: CollateConfig) -> None:
    if shape.vocab_size is not None and tokens.size and int(tokens.max()) >= shape.vocab_size:
        raise DataError(
            f"token id {int(tokens.max()):,} is outside the model's vocabulary of {shape.vocab_size:,}",
            "Another tokenizer made these tokens, or they are damaged. Prepare them again.",
        )


# ---------------------------------------------------------------- order


class Epochs:
    """Maps row numbers to rows if every epoch uses each of its rows once.

    Args:
        per_epoch: Rows per epoch, None if it varies; then epochs are counted from the first one on.
        num_rows: Rows of one optimizer step.
        order: Returns the rows of an epoch in their order.
    """

    def __init__(self, per_epoch: int | None, num_rows: int, order: Callable[[int], Ints]) -> None:
        self._per_epoch, self._num_rows, self._order = per_epoch, num_rows, order
        self._begins = [0]  # first row number of each epoch
        self._epoch, self._epoch_rows = -1, np.empty(0, np.int64)

    def rows(self, step: int) -> Ints:
        """Return the rows of optimizer step ``step`` (from 0), [num_rows]; a step may span epochs."""
        return self.epoch_and_row(np.arange(step * self._num_rows, (step + 1) * self._num_rows))[1]

    def epoch_and_row(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return epochs and rows, [n] each, of ``numbers`` [n]."""
        epochs, inside = self._split(numbers)
        rows = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            rows[in_epoch] = self._epoch_order(int(epoch))[inside[in_epoch]]
        return epochs, rows

    def _split(self, numbers: Ints) -> tuple[Ints, Ints]:
        if self._per_epoch is not None:
            return numbers // self._per_epoch, numbers % self._per_epoch
        while len(numbers) and self._begins[-1] <= int(numbers.max()):
            self._begins.append(self._begins[-1] + len(self._epoch_order(len(self._begins) - 1)))
        epochs: Ints = np.searchsorted(np.array(self._begins), numbers, side="right") - 1
        return epochs, numbers - np.array(self._begins)[epochs]

    def _epoch_order(self, epoch: int) -> Ints:
        if epoch != self._epoch:
            self._epoch, self._epoch_rows = epoch, self._order(epoch)
        return self._epoch_rows


def seeded_rng(seed: int, *numbers: int) -> np.random.Generator:
    """Return random numbers that are a function of the run's seed and other integers."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *numbers])))
