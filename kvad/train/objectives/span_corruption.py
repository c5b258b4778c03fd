"""Span corruption (Raffel et al. 2020, sec. 3.1.4): predict spans cut from a text.

Of n tokens, round(n noise_density) are cut out in round(cut / mean_span_length) spans; the lengths of the spans and of
the text between them are drawn. Each span leaves its own sentinel; one more sentinel ends the target::

    text      Thank you for inviting me to your party last week
    source    Thank you <extra_id_0> me to your party <extra_id_1> week EOS
    target    <extra_id_0> for inviting <extra_id_1> last <extra_id_2> EOS

A row of the data has as many tokens as make a source of ``seq_len`` (568 for 512, at 0.15 and 3). Every document of it
is corrupted separately and stays one: no source, target or cross-attention depends on another document. The draws are a
function of (seed, step, row in the step). The decoder starts with BOS, or with padding if there is none, as in T5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvad.checkpoint import GenerationConfig
from kvad.errors import ConfigError, DataError
from kvad.model_input import ModelInput, SubBatch
from kvad.text import Tokenizer
from kvad.train import data
from kvad.train.config import ObjectiveConfig
from kvad.train.data import Batch, Ints, TrainingData
from kvad.train.objectives.masked_lm import EVAL_STREAM, TRAIN_STREAM, row_rng

SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))  # as in T5
PADDING = -1  # document id of padding


class SpanTokens(NamedTuple):
    """Special tokens of corrupted texts."""

    start: int  # first decoder input
    eos: int
    pad: int
    sentinels: tuple[int, ...]


def sentinel_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of <extra_id_0>, <extra_id_1>, ... that the tokenizer has."""
    names, ids = tokenizer.special_tokens.names(), list[int]()
    while (name := f"<extra_id_{len(ids)}>") in names:
        ids.append(names[name])
    return tuple(ids)


def span_tokens(tokenizer: Tokenizer, needed: int) -> SpanTokens:
    """Return the special tokens for ``needed`` sentinels.

    Raises:
        DataError: If the tokenizer lacks EOS, a first decoder token, or sentinels.
    """
    specials, sentinels = tokenizer.special_tokens, sentinel_ids(tokenizer)
    start = specials.pad if specials.bos is None else specials.bos
    if specials.eos is None or start is None:
        raise DataError("this tokenizer has no EOS, or neither BOS nor padding to begin a target", "Train a tokenizer.")
    if len(sentinels) < needed:
        raise DataError(
            f"this tokenizer has {len(sentinels)} sentinels (<extra_id_0>, ...), and a row of this length needs "
            f"{needed}",
            "Use a shorter --seq-len, a larger objective.mean_span_length, or train a tokenizer.",
        )
    return SpanTokens(start, specials.eos, start if specials.pad is None else specials.pad, sentinels)


def span_generation_config(tokens: SpanTokens) -> GenerationConfig:
    """Return the generation settings of a run's checkpoints."""
    return GenerationConfig(
        decoder_start_token_id=tokens.start,
        eos_token_ids=(tokens.eos,),
        source_eos_token_id=tokens.eos,
        pad_token_id=tokens.pad,
        sampling={"temperature": 0.0},
    )


# ---------------------------------------------------------------- one text


def span_counts(length: int, density: float, mean_span_length: float) -> tuple[int, int]:
    """Return (tokens cut out, spans) of a text of ``length`` >= 2; gaps have >= 1 token."""
    cut = min(max(round(length * density), 1), length - 1)
    return cut, min(max(round(cut / mean_span_length), 1), cut, length - cut)


def max_raw_length(context: int, options: ObjectiveConfig) -> int:
    """Return the longest text whose source and target both fit into ``context`` tokens.

    Raises:
        ConfigError: If no text fits.
    """
    longest = 0
    for length in range(2, 4 * context):
        cut, spans = span_counts(length, options.noise_density, options.mean_span_length)
        if max(length - cut + spans + 1, cut + spans + 2) <= context:
            longest = length
    if not longest:
        raise ConfigError(f"data.seq_len: must be at least 5 for objective span-corruption, got {context}")
    return longest


def corrupt_spans(
    ids: Sequence[int], options: ObjectiveConfig, tokens: SpanTokens, random: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Return (source, target), both ended by EOS."""
    cut, spans = span_counts(len(ids), options.noise_density, options.mean_span_length)
    gaps, span_lengths = _parts(len(ids) - cut, spans, random), _parts(cut, spans, random)
    source, target, at = list[int](), list[int](), 0
    for sentinel, gap, length in zip(tokens.sentinels, gaps, span_lengths, strict=False):
        source += [*ids[at : at + gap], sentinel]
        target += [sentinel, *ids[at + gap : at + gap + length]]
        at += gap + length
    return [*source, tokens.eos], [*target, tokens.sentinels[spans], tokens.eos]


def _parts(total: int, count: int, random: np.random.Generator) -> list[int]:
    """Draw ``total`` as a sum of ``count`` lengths of at least one, all sums equally likely."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False)) + 1
    lengths: list[int] = np.diff(np.concatenate(([0], cuts, [total]))).tolist()
    return lengths


# ---------------------------------------------------------------- rows of them


def build_pair_batch(
    rows: Sequence[Sequence[tuple[list[int], list[int]]]], tokens: SpanTokens, limit: int, device: torch.device | str
) -> Batch:
    """Return rows of (source, target) as one batch, each pair a document, targets shifted right."""
    sources, targets = [[s for s, _ in row] for row in rows], [[t for _, t in row] for row in rows]
    shifted = [[[tokens.start, *t[:-1]] for t in row] for row in targets]
    model_input, used = _side(shifted, tokens.pad, limit, device)
    source, _ = _side(sources, tokens.pad, limit, device)
    target_ids = torch.tensor([token for row in targets for text in row for token in text], dtype=torch.int64)
    logit_indices = torch.from_numpy(used).to(device)
    return Batch(model_input._replace(logit_indices=logit_indices, encoder_input=source), target_ids.to(device))


def _side(
    rows: Sequence[Sequence[Sequence[int]]], pad: int, limit: int, device: torch.device | str
) -> tuple[ModelInput, Ints]:
    """Return one side of the rows and the flat indices that are not padding."""
    width = max(1, *(sum(map(len, row)) for row in rows))
    tokens = np.full((len(rows), width), pad)
    positions, documents = np.zeros_like(tokens), np.full_like(tokens, PADDING)
    for number, row in enumerate(rows):
        low = 0
        for document, text in enumerate(row):
            span = slice(low, low + len(text))
            tokens[number, span], positions[number, span], documents[number, span] = text, range(len(text)), document
            low += len(text)
    flat = [torch.from_numpy(values.reshape(-1)).to(device) for values in (tokens, positions, documents)]
    model_input = ModelInput(
        token_ids=flat[0],
        positions=flat[1],
        sub_batches=(SubBatch(len(rows), width, width),),
        logit_indices=torch.empty(0, dtype=torch.int64, device=device),
        document_ids=flat[2],
        max_seq_lens=torch.full_like(flat[0], limit),
    )
    used: Ints = np.flatnonzero(documents >= 0)
    return model_input, used


class SpanCorruptionDataset:
    """Rows of documents with spans cut out."""

    def __init__(
        self,
        rows: TrainingData,
        tokenizer: Tokenizer,
        options: ObjectiveConfig,
        *,
        context: int,
        raw: int,
        seed: int,
        step_rows: int,
    ) -> None:
        """Wrap next-token batches with ``raw`` tokens per row; ``step_rows`` are the rows of a step.

        Raises:
            DataError: If the tokenizer lacks special tokens.
        """
        _, spans = span_counts(raw, options.noise_density, options.mean_span_length)
        self.special_tokens = span_tokens(tokenizer, spans + 1)
        self._rows, self._options, self._seed = rows, options, seed
        self._context, self._raw, self._step_rows = context, raw, step_rows
        self.train_tokens, self.validation_tokens = rows.train_tokens, rows.validation_tokens
        cut, spans = span_counts(raw, options.noise_density, options.mean_span_length)
        self.tokens_per_step = step_rows * (cut + spans + 2)
        self.read_per_step = rows.tokens_per_step

    def micro_batches(self, step: int) -> list[Batch]:
        number, batches = step * self._step_rows, []
        for batch in self._rows.micro_batches(step):
            batches.append(self._corrupt_batch(batch, TRAIN_STREAM, number))
            number += sum(sub_batch.num_seqs for sub_batch in batch.model_input.sub_batches)
        return batches

    def evaluation(self) -> Iterator[Batch]:
        number = 0
        for batch in self._rows.evaluation():
            yield self._corrupt_batch(batch, EVAL_STREAM, number)
            number += sum(sub_batch.num_seqs for sub_batch in batch.model_input.sub_batches)

    def provenance(self, number: int) -> list[int]:
        return data.collate.row_provenance(self._rows, number)

    def summary(self) -> list[str]:
        cut, spans = span_counts(self._raw, self._options.noise_density, self._options.mean_span_length)
        corrupt = f"corrupted: {cut} of {self._raw} tokens are cut out in {spans} spans"
        return [
            *self._rows.summary(),
            f"{corrupt}: sources of {self._raw - cut + spans + 1}, targets of {cut + spans + 2}",
        ]

    def _corrupt_batch(self, batch: Batch, stream: int, first: int) -> Batch:
        (sub_batch,) = batch.model_input.sub_batches
        tokens = batch.model_input.token_ids.view(sub_batch.num_seqs, sub_batch.num_new_tokens).tolist()
        documents = batch.model_input.document_ids
        owners = (
            [[0] * sub_batch.num_new_tokens] * sub_batch.num_seqs
            if documents is None
            else documents.view(sub_batch.num_seqs, sub_batch.num_new_tokens).tolist()
        )
        rows = []
        for number, (row, owner) in enumerate(zip(tokens, owners, strict=True)):
            random = row_rng(self._seed, stream, first + number)
            texts = [text for text in _documents(row, owner) if len(text) > 1]  # a single token cannot lose a span
            rows.append([corrupt_spans(text, self._options, self.special_tokens, random) for text in texts])
        return build_pair_batch(rows, self.special_tokens, self._context, batch.model_input.token_ids.device)


def _documents(tokens: list[int], owners: list[int]) -> Iterator[list[int]]:
    """Yield the tokens of each document of a row, without padding."""
    low = 0
    for index in range(1, len(tokens) + 1):
        if index == len(tokens) or owners[index] != owners[low]:
            if owners[low] >= 0:
                yield tokens[low:index]
            low = index
