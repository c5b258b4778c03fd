"""Evaluation of training objectives on texts: masked tokens, corrupted spans, assistant turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from kvad import text as text_lib
from kvad.errors import DataError
from kvad.model import NoCache, Transformer, whole_sequences
from kvad.text import Tokenizer
from kvad.train import data, objectives, sources
from kvad.train.config import ObjectiveConfig
from kvad.train.data import Batch, Ints, collate_rows
from kvad.train.objectives import Autocast, CrossEntropyObjective, EvalResult
from kvad.train.sources import ChatCorpus

SEED = 0
BATCH_ROWS = 16  # rows that are computed together


def evaluate_objective(
    model: Transformer, rows: Iterable[Batch], tick: Callable[[int], None] = lambda rows: None
) -> EvalResult:
    """Compute loss and accuracy over all targets; DataError if there are none."""

    def batches() -> Iterator[Batch]:
        done = 0
        for batch in rows:
            yield batch
            done += batch.model_input.sub_batches[0].num_seqs
            tick(done)

    found = CrossEntropyObjective(model, Autocast("fp32", "cpu")).evaluate_loss(batches())
    if not found.targets:
        raise DataError("these texts have no targets: they are too short")
    return found


class WeightsComparison(NamedTuple):
    """Loss of a model and of the same model with other weights, in nats per token."""

    loss_before: float
    loss_after: float
    divergence: float  # mean KL(before || after) of the next token
    tokens: int


@torch.inference_mode()
def compare_weights(
    before: Transformer,
    changed: Sequence[Transformer],
    windows: Iterable[Ints],
    tick: Callable[[int], None] = lambda tokens: None,
) -> list[WeightsComparison]:
    """Compare decoders with the one before they were changed, on windows of tokens; DataError if there are none."""
    losses, divergences, count = [0.0] * (1 + len(changed)), [0.0] * len(changed), 0
    no_cache = NoCache(before.config)
    for window in windows:
        ids = torch.from_numpy(window)
        model_input = whole_sequences([window.tolist()], ids.device)
        indices = model_input.logit_indices[:-1]
        scores = [
            model.logits(model(model_input, no_cache), indices).double().log_softmax(-1) for model in (before, *changed)
        ]
        for index, each in enumerate(scores):
            losses[index] -= float(each.gather(1, ids[1:, None]).sum())
        for index, each in enumerate(scores[1:]):
            divergences[index] += float((scores[0].exp() * (scores[0] - each)).sum())
        count += len(ids) - 1
        tick(count)
    if not count:
        raise DataError("these texts have no targets: they are too short")
    return [
        WeightsComparison(losses[0] / count, loss / count, divergence / count, count)
        for loss, divergence in zip(losses[1:], divergences, strict=True)
    ]


def text_windows(tokenizer: Tokenizer, texts: Iterable[str], length: int) -> Iterator[Ints]:
    """Yield the tokens of texts in windows of at most ``length``, without those that have no second token."""
    return (row for row in _rows(tokenizer, texts, length, framed=False) if len(row) > 1)


def masked_batches(tokenizer: Tokenizer, texts: Iterable[str], window: int, density: float) -> Iterator[Batch]:
    """Build masked-LM batches: encoded texts, divided into rows; DataError without a mask token."""
    shape = data.collate.CollateConfig(window, tokenizer.special_tokens.pad or 0)
    masking = objectives.denoising.TokenMasking(tokenizer, density)
    return _collated(_transformed(_rows(tokenizer, texts, window, framed=True), masking), shape)


def span_batches(tokenizer: Tokenizer, texts: Iterable[str], window: int, options: ObjectiveConfig) -> Iterator[Batch]:
    """Build span-corruption batches, inputs and targets of at most ``window`` tokens; DataError without sentinels."""
    raw = objectives.denoising.max_raw_length(window, options)
    corruption = objectives.denoising.SpanCorruption(tokenizer, options, raw)
    shape = data.collate.CollateConfig(window, corruption.special_tokens.pad, keep_document_ids=True)
    return _collated(_transformed(_rows(tokenizer, texts, raw, framed=False), corruption), shape)


def chat_batches(
    tokenizer: Tokenizer, folder: Path, paths: Sequence[Path], window: int, errors: str
) -> tuple[Iterator[Batch], list[int]]:
    """Build batches whose targets are the assistant's tokens; DataError naming file and line.

    Also returns [conversations, those longer than ``window``], which grow while the batches are read. ``folder`` holds
    the model's chat template; without one it is ChatML, as in training.
    """
    templates = text_lib.chat_template.ChatTemplate
    template = templates.load(folder) or templates(sources.chat.chatml(tokenizer))
    files = tuple(sources.pairs.source_info(path) for path in paths)
    corpus = ChatCorpus(sources=files, errors=errors, template=template)
    counts = [0, 0]

    def rows() -> Iterator[data.collate.Segment]:
        for ids, columns in corpus.encoded(tokenizer):
            counts[0] += 1
            counts[1] += len(ids) > window
            if len(ids) <= window:
                tokens, mask_column = np.array(ids, np.int64), np.array(columns["mask"], np.int64)
                yield data.collate.Segment(tokens, np.append(np.where(mask_column[1:] > 0, tokens[1:], -1), -1))

    return _collated(rows(), data.collate.CollateConfig(window, tokenizer.special_tokens.pad or 0)), counts


def _rows(tokenizer: Tokenizer, texts: Iterable[str], length: int, *, framed: bool) -> Iterator[Ints]:
    for text in texts:
        ids = tokenizer.encode(text)
        ids = tokenizer.add_special_tokens(ids) if framed else ids
        for low in range(0, len(ids), length):
            yield np.array(ids[low : low + length], np.int64)


def _transformed(rows: Iterator[Ints], transform: data.packed_dataset.RowTransform) -> Iterator[data.collate.Segment]:
    for number, ids in enumerate(rows):
        random = data.packed_dataset.row_rng(SEED, data.packed_dataset.EVAL_STREAM, number)
        (segment,) = transform([data.collate.Segment(ids, ids)], random, None)
        if (segment.targets >= 0).any():
            yield segment


def _collated(rows: Iterator[data.collate.Segment], shape: data.collate.CollateConfig) -> Iterator[Batch]:
    while some := list(islice(rows, BATCH_ROWS)):
        yield collate_rows([[row] for row in some], shape)
