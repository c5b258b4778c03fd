"""Evaluation of training objectives on texts: masked tokens, corrupted spans, assistant turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from kvad import text as text_lib
from kvad.errors import DataError
from kvad.model import NoCache, Transformer
from kvad.text import Tokenizer
from kvad.train import data, objectives, sources
from kvad.train.config import ObjectiveConfig
from kvad.train.data import Batch, Ints, collate_rows
from kvad.train.objectives import Autocast, EvalResult, evaluate
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

    found = evaluate(model, batches(), NoCache(model.config), Autocast("fp32", "cpu"))
    if not found.targets:
        raise DataError("these texts have no targets: they are too short")
    return found


def masked_batches(tokenizer: Tokenizer, texts: Iterable[str], window: int, density: float) -> Iterator[Batch]:
    """Build masked-LM batches: encoded texts, divided into rows; DataError without a mask token."""
    mask, pad = objectives.masked_lm.require_mask_token(tokenizer), tokenizer.special_tokens.pad or 0
    special = np.array(sorted(set(tokenizer.special_tokens.names().values())), np.int64)
    choices: Ints = np.setdiff1d(np.arange(tokenizer.vocab_size), special)

    def row(number: int, ids: Ints) -> data.collate.Segment:
        free: Ints = np.flatnonzero(~np.isin(ids, special))
        read, drawn = objectives.masked_lm.mask_row(
            ids,
            free,
            choices,
            mask,
            density,
            objectives.masked_lm.row_rng(SEED, objectives.masked_lm.EVAL_STREAM, number),
        )
        targets = np.full(len(ids), -1)
        targets[drawn] = ids[drawn]
        return data.collate.Segment(read, targets)

    rows = (row(number, ids) for number, ids in enumerate(_rows(tokenizer, texts, window, framed=True)))
    rows_with_targets = (each for each in rows if (each.targets >= 0).any())
    return _collated(rows_with_targets, data.collate.CollateConfig(window, pad))


def span_batches(tokenizer: Tokenizer, texts: Iterable[str], window: int, options: ObjectiveConfig) -> Iterator[Batch]:
    """Build span-corruption batches whose inputs and targets have at most ``window`` tokens.

    Raises:
        DataError: If the tokenizer lacks sentinels.
    """
    raw = objectives.span_corruption.max_raw_length(window, options)
    speech = objectives.span_corruption.span_tokens(
        tokenizer, objectives.span_corruption.span_counts(raw, options.noise_density, options.mean_span_length)[1] + 1
    )
    rows = (
        objectives.span_corruption.corrupt_spans(
            ids.tolist(), options, speech, objectives.masked_lm.row_rng(SEED, objectives.masked_lm.EVAL_STREAM, number)
        )
        for number, ids in enumerate(_rows(tokenizer, texts, raw, framed=False))
        if len(ids) > 1
    )
    while some := list(islice(rows, BATCH_ROWS)):
        yield objectives.span_corruption.build_pair_batch([[pair] for pair in some], speech, window, "cpu")


def chat_batches(
    tokenizer: Tokenizer, folder: Path, paths: Sequence[Path], window: int, errors: str
) -> tuple[Iterator[Batch], list[int]]:
    """Build batches whose targets are the assistant's tokens, and counters.

    The counters [conversations, those longer than ``window``] grow while the batches are read.

    ``folder``: of the model's chat template; without one it is ChatML, as in training.  DataError naming file and line.
    """
    template = text_lib.chat_template.ChatTemplate.load(folder) or text_lib.chat_template.ChatTemplate(
        sources.chat.chatml(tokenizer)
    )
    corpus = ChatCorpus(
        sources.examples.ExampleSplit(tuple(sources.pairs.source_info(path) for path in paths), 0, 0, 0),
        errors,
        template,
    )
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


def _collated(rows: Iterator[data.collate.Segment], shape: data.collate.CollateConfig) -> Iterator[Batch]:
    while some := list(islice(rows, BATCH_ROWS)):
        yield collate_rows([[row] for row in some], shape)
