"""Span corruption (Raffel et al. 2020, sec. 3.1.4): spans of a text are cut out, and the decoder says them.

Of n tokens, round(n density) are cut out in round(cut / mean span) spans whose lengths are drawn, as are those of what
stays between them.  Each span leaves a sentinel of its own; one more sentinel ends the target::

    text      Thank you for inviting me to your party last week
    source    Thank you <extra_id_0> me to your party <extra_id_1> week EOS
    target    <extra_id_0> for inviting <extra_id_1> last <extra_id_2> EOS

A row of the data is as many tokens as make a source of ``context`` (568 for 512, at 0.15 and 3).  Every document of it
is corrupted by itself and stays one: no source, target or attention between them sees another.  What is drawn is a
function of (seed, step, row in the step).  The decoder begins with BOS, or with the padding where there is none, as T5.
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

SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))  # as many as T5 has
PADDING = -1  # the document of what is left over


class SpanTokens(NamedTuple):
    """The tokens that a corrupted text needs beside its own."""

    start: int
    eos: int
    pad: int
    sentinels: tuple[int, ...]


def sentinel_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of <extra_id_0>, <extra_id_1>, ... as far as the tokenizer has them."""
    names, found = tokenizer.special_tokens.names(), list[int]()
    while (name := f"<extra_id_{len(found)}>") in names:
        found.append(names[name])
    return tuple(found)


def span_tokens(tokenizer: Tokenizer, needed: int) -> SpanTokens:
    """Raises DataError for a tokenizer without EOS, without what could begin a target, or with fewer than ``needed``
    sentinels."""
    specials, sentinels = tokenizer.special_tokens, sentinel_ids(tokenizer)
    start = specials.pad if specials.bos is None else specials.bos
    if specials.eos is None or start is None:
        raise DataError("this tokenizer has no EOS, or neither BOS nor padding to begin a target", "train one here")
    if len(sentinels) < needed:
        raise DataError(
            f"this tokenizer has {len(sentinels)} sentinels (<extra_id_0>, ...), and a row of this context needs "
            f"{needed}",
            "a shorter --context, a larger objective.mean_span_length, or a tokenizer trained here",
        )
    return SpanTokens(start, specials.eos, start if specials.pad is None else specials.pad, sentinels)


def span_generation_config(speech: SpanTokens) -> GenerationConfig:
    """What a checkpoint says about generating."""
    return GenerationConfig(
        decoder_start_token_id=speech.start,
        eos_token_ids=(speech.eos,),
        source_eos_token_id=speech.eos,
        pad_token_id=speech.pad,
        sampling={"temperature": 0.0},
    )


# ---------------------------------------------------------------- one text


def span_counts(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """(tokens that are cut out, spans) of a text of ``length`` >= 2 tokens; something always stays before each span."""
    cut = min(max(round(length * density), 1), length - 1)
    return cut, min(max(round(cut / mean_span), 1), cut, length - cut)


def max_raw_length(context: int, options: ObjectiveConfig) -> int:
    """The longest text whose source and target both have at most ``context`` tokens.  ConfigError where none has."""
    longest = 0
    for length in range(2, 4 * context):
        cut, spans = span_counts(length, options.noise_density, options.mean_span_length)
        if max(length - cut + spans + 1, cut + spans + 2) <= context:
            longest = length
    if not longest:
        raise ConfigError(f"data.seq_len: {context} tokens are too few for objective spans", "at least 5")
    return longest


def corrupt_spans(
    ids: Sequence[int], options: ObjectiveConfig, speech: SpanTokens, random: np.random.Generator
) -> tuple[list[int], list[int]]:
    """(source, target), both ended by EOS."""
    cut, spans = span_counts(len(ids), options.noise_density, options.mean_span_length)
    stay, gone = _parts(len(ids) - cut, spans, random), _parts(cut, spans, random)
    source, target, at = list[int](), list[int](), 0
    for sentinel, kept, lost in zip(speech.sentinels, stay, gone, strict=False):
        source += [*ids[at : at + kept], sentinel]
        target += [sentinel, *ids[at + kept : at + kept + lost]]
        at += kept + lost
    return [*source, speech.eos], [*target, speech.sentinels[spans], speech.eos]


def _parts(total: int, count: int, random: np.random.Generator) -> list[int]:
    """``total`` as a sum of ``count`` lengths of at least one, every way being as likely."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False)) + 1
    lengths: list[int] = np.diff(np.concatenate(([0], cuts, [total]))).tolist()
    return lengths


# ---------------------------------------------------------------- rows of them


def build_pair_batch(
    rows: Sequence[Sequence[tuple[list[int], list[int]]]], speech: SpanTokens, limit: int, device: torch.device | str
) -> Batch:
    """Rows of (source, target) as one Step: each pair a document of its own, the target shifted right."""
    sources, targets = [[s for s, _ in row] for row in rows], [[t for _, t in row] for row in rows]
    shifted = [[[speech.start, *t[:-1]] for t in row] for row in targets]
    step, taken = _side(shifted, speech.pad, limit, device)
    source, _ = _side(sources, speech.pad, limit, device)
    said = torch.tensor([token for row in targets for text in row for token in text], dtype=torch.int64)
    wanted = torch.from_numpy(taken).to(device)
    return Batch(step._replace(logit_indices=wanted, encoder_input=source), said.to(device))


def _side(
    rows: Sequence[Sequence[Sequence[int]]], pad: int, limit: int, device: torch.device | str
) -> tuple[ModelInput, Ints]:
    """One side of the rows, side by side, and the flat places that are taken."""
    width = max(1, *(sum(map(len, row)) for row in rows))
    tokens = np.full((len(rows), width), pad)
    positions, documents = np.zeros_like(tokens), np.full_like(tokens, PADDING)
    for number, row in enumerate(rows):
        low = 0
        for document, text in enumerate(row):
            here = slice(low, low + len(text))
            tokens[number, here], positions[number, here], documents[number, here] = text, range(len(text)), document
            low += len(text)
    flat = [torch.from_numpy(values.reshape(-1)).to(device) for values in (tokens, positions, documents)]
    step = ModelInput(
        token_ids=flat[0],
        positions=flat[1],
        sub_batches=(SubBatch(len(rows), width, width),),
        logit_indices=torch.empty(0, dtype=torch.int64, device=device),
        document_ids=flat[2],
        max_seq_lens=torch.full_like(flat[0], limit),
    )
    taken: Ints = np.flatnonzero(documents >= 0)
    return step, taken


class SpanCorruptionDataset:
    """Rows of documents with spans cut out of them."""

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
        """``rows``: ``raw`` tokens of documents in each, as next-token batches; ``step_rows``: rows of a step.

        Raises DataError for a tokenizer that lacks what a corrupted text needs.
        """
        _, spans = span_counts(raw, options.noise_density, options.mean_span_length)
        self.speech = span_tokens(tokenizer, spans + 1)
        self._rows, self._options, self._seed = rows, options, seed
        self._context, self._raw, self._step_rows = context, raw, step_rows
        self.train_tokens, self.validation_tokens = rows.train_tokens, rows.validation_tokens
        cut, spans = span_counts(raw, options.noise_density, options.mean_span_length)
        self.tokens_per_step = step_rows * (cut + spans + 2)
        self.read_per_step = rows.tokens_per_step

    def micro_batches(self, step: int) -> list[Batch]:
        number, batches = step * self._step_rows, []
        for batch in self._rows.micro_batches(step):
            batches.append(self._corrupted(batch, TRAIN_STREAM, number))
            number += sum(lane.num_seqs for lane in batch.model_input.sub_batches)
        return batches

    def evaluation(self) -> Iterator[Batch]:
        number = 0
        for batch in self._rows.evaluation():
            yield self._corrupted(batch, EVAL_STREAM, number)
            number += sum(lane.num_seqs for lane in batch.model_input.sub_batches)

    def provenance(self, number: int) -> list[int]:
        return data.collate.row_provenance(self._rows, number)

    def summary(self) -> list[str]:
        cut, spans = span_counts(self._raw, self._options.noise_density, self._options.mean_span_length)
        corrupt = f"corrupted: of {self._raw} tokens {cut} are cut out in {spans} spans"
        return [
            *self._rows.summary(),
            f"{corrupt}: sources of {self._raw - cut + spans + 1}, targets of {cut + spans + 2}",
        ]

    def _corrupted(self, batch: Batch, stream: int, first: int) -> Batch:
        (lane,) = batch.model_input.sub_batches
        tokens = batch.model_input.token_ids.view(lane.num_seqs, lane.num_new_tokens).tolist()
        documents = batch.model_input.document_ids
        owners = (
            [[0] * lane.num_new_tokens] * lane.num_seqs
            if documents is None
            else documents.view(lane.num_seqs, lane.num_new_tokens).tolist()
        )
        rows = []
        for number, (row, owner) in enumerate(zip(tokens, owners, strict=True)):
            random = row_rng(self._seed, stream, first + number)
            texts = [text for text in _documents(row, owner) if len(text) > 1]  # one token alone cannot lose a span
            rows.append([corrupt_spans(text, self._options, self.speech, random) for text in texts])
        return build_pair_batch(rows, self.speech, self._context, batch.model_input.token_ids.device)


def _documents(tokens: list[int], owners: list[int]) -> Iterator[list[int]]:
    """The pieces of a row that belong to one document each, padding left out."""
    low = 0
    for place in range(1, len(tokens) + 1):
        if place == len(tokens) or owners[place] != owners[low]:
            if owners[low] >= 0:
                yield tokens[low:place]
            low = place
