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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvad.errors import DataError
from kvad.model_input import ModelInput, SubBatch
from kvad.train.config import RunConfig
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
    targets: Ints  # [n] targets, usually the next tokens; -1 for none
    encoder_tokens: Ints | None = None  # [m] of a pair
    is_sampled: npt.NDArray[np.bool_] | None = None  # [n] inputs to replace by the model's samples


PackedRow = Sequence[Segment]


def cut_row(tokens: Ints, targets: Ints, cuts: Ints) -> PackedRow:
    """Return a row of tokens [n] and targets [n] as segments that begin at 0 and at ``cuts``."""
    return [Segment(*part) for part in zip(np.split(tokens, cuts), np.split(targets, cuts), strict=True)]


@dataclass(frozen=True)
class CollateConfig:
    """Options of ``collate_rows``."""

    seq_len: int
    pad: int = 0  # token id of padding
    reset_positions: bool = True
    isolate_documents: bool = True
    device: torch.device | str = "cpu"
    vocab_size: int | None = None  # upper limit of token ids
    keep_document_ids: bool = False  # also if every row is one segment, which needs no mask

    @staticmethod
    def of_run(
        config: RunConfig, pad: int = 0, vocab: int | None = None, *, keep_document_ids: bool = False
    ) -> CollateConfig:
        """Return the options of a run."""
        data, device = config.data, config.train.device
        return CollateConfig(
            data.seq_len, pad, data.reset_positions, data.isolate_documents, device, vocab, keep_document_ids
        )


def collate_rows(rows: Sequence[PackedRow], shape: CollateConfig) -> Batch:
    """Build one batch, as wide as the fullest row; raise DataError if a token id is outside the vocabulary."""
    model_input = _side([[segment.tokens for segment in row] for row in rows], shape)
    targets = _padded([[segment.targets for segment in row] for row in rows], -1)
    _check(targets, shape)
    logit_indices = np.flatnonzero(targets >= 0)
    model_input = model_input._replace(logit_indices=torch.from_numpy(logit_indices).to(shape.device))
    if rows[0][0].encoder_tokens is not None:
        source = _side([[_required(segment.encoder_tokens) for segment in row] for row in rows], shape)
        if (model_input.document_ids is None) != (source.document_ids is None):  # cross-attention compares both
            model_input, source = _with_document_ids(model_input), _with_document_ids(source)
        model_input = model_input._replace(encoder_input=source)
    batch = Batch(model_input, torch.from_numpy(targets.reshape(-1)[logit_indices]).to(shape.device))
    if rows[0][0].is_sampled is None:
        return batch
    is_sampled = _padded([[_required(segment.is_sampled) for segment in row] for row in rows], fill=False)
    return batch._replace(sampled_indices=torch.from_numpy(np.flatnonzero(is_sampled)).to(shape.device))


def split_segments(rows: Sequence[PackedRow], shape: CollateConfig) -> Iterator[Batch]:
    """Yield every segment of isolated rows that has a target as a batch: same tokens, positions and targets."""
    for row in rows:
        low = source_low = 0
        for segment in row:
            if (segment.targets >= 0).any():
                batch = collate_rows([[segment]], shape)
                yield batch if shape.reset_positions else _shifted(batch, low, source_low)
            low += len(segment.tokens)
            source_low += 0 if segment.encoder_tokens is None else len(segment.encoder_tokens)


def _shifted(batch: Batch, low: int, source_low: int) -> Batch:
    """Return the batch with positions that start at ``low``, and ``source_low`` in the encoder."""
    model_input, source = batch.model_input, batch.model_input.encoder_input
    if source is not None:
        source = source._replace(positions=source.positions + source_low)
    return batch._replace(model_input=model_input._replace(positions=model_input.positions + low, encoder_input=source))


def _required(values: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    assert values is not None, "all segments of a batch have the same fields"
    return values


def _padded(rows: Sequence[Sequence[npt.NDArray[Any]]], fill: int) -> npt.NDArray[Any]:
    """Return rows of pieces as one array [rows, width], at least one wide."""
    width = max(1, *(sum(map(len, row)) for row in rows))
    padded = np.full((len(rows), width), fill)
    for number, row in enumerate(rows):
        flat = np.concatenate(row)
        padded[number, : len(flat)] = flat
    return padded


def _side(rows: Sequence[Sequence[Ints]], shape: CollateConfig) -> ModelInput:
    """Build the model input of one side from rows of segments, without logit indices."""
    tokens = _padded(rows, shape.pad)
    _check(tokens, shape)
    documents = _padded([[np.full(len(piece), n) for n, piece in enumerate(row)] for row in rows], PADDING)
    indices = np.arange(tokens.shape[1])
    if shape.reset_positions:
        positions = _padded([[indices[: len(piece)] for piece in row] for row in rows], 0)
    else:
        positions = np.where(documents < 0, 0, indices)

    def tensor(values: Ints) -> Tensor:
        return torch.from_numpy(values.reshape(-1)).to(shape.device)

    model_input = ModelInput(
        token_ids=tensor(tokens),
        positions=tensor(positions),
        sub_batches=(SubBatch(len(rows), tokens.shape[1], tokens.shape[1]),),
        logit_indices=tensor(np.empty(0, np.int64)),
        seq_lens=torch.full((tokens.size,), shape.seq_len, device=shape.device),
    )
    if not shape.keep_document_ids and not documents.any():  # one segment in every row, and no padding
        return model_input
    if shape.isolate_documents:
        return model_input._replace(document_ids=tensor(documents))
    return model_input._replace(causal_order=tensor(np.where(documents < 0, -1, indices)))


def _with_document_ids(model_input: ModelInput) -> ModelInput:
    if model_input.document_ids is not None:
        return model_input
    return model_input._replace(document_ids=torch.zeros_like(model_input.token_ids))


def _check(tokens: Ints, shape: CollateConfig) -> None:
    if shape.vocab_size is not None and int(tokens.max()) >= shape.vocab_size:
        raise DataError(
            f"token id {int(tokens.max()):,} is outside the model's vocabulary of {shape.vocab_size:,}",
            "Another tokenizer made these tokens, or they are damaged. Prepare them again.",
        )
