"""What training poses, posed again: hidden tokens, cut spans, an assistant's turns, of texts that a model is judged by.

The losses and accuracies of ``kvad eval`` where the answer is no next token of a plain text.  Each text stands by
itself, in rows of at most ``window`` tokens; nothing is packed.  What is hidden or cut out is drawn as at an evaluation
of training (``train/masking.py``, ``train/spans.py``), from seed :data:`SEED` and the row's number: the same texts and
the same ``window`` give the same questions every time, whatever the model.  A token weighs the same wherever it stands.
"""

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
BATCH_ROWS = 16  # rows that are read side by side


def evaluate_objective(
    model: Transformer, rows: Iterable[Batch], tick: Callable[[int], None] = lambda rows: None
) -> EvalResult:
    """Loss and accuracy over all that is asked.  DataError where nothing is."""

    def told() -> Iterator[Batch]:
        done = 0
        for batch in rows:
            yield batch
            done += batch.model_input.sub_batches[0].num_seqs
            tick(done)

    found = evaluate(model, told(), NoCache(model.config), Autocast("fp32", "cpu"))
    if not found.targets:
        raise DataError("nothing is asked of these texts: they are too short")
    return found


def masked_batches(tokenizer: Tokenizer, texts: Iterable[str], window: int, density: float) -> Iterator[Batch]:
    """Masked language modelling: texts in the tokenizer's frame, cut into rows.  DataError without a mask token."""
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
    asked = (each for each in rows if (each.targets >= 0).any())
    return _collated(asked, data.collate.CollateConfig(window, pad))


def span_batches(tokenizer: Tokenizer, texts: Iterable[str], window: int, options: ObjectiveConfig) -> Iterator[Batch]:
    """Span corruption: pieces of texts whose sources and targets have at most ``window`` tokens.  DataError for a
    tokenizer that lacks what a corrupted text needs."""
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
    """(the assistant's tokens, asked behind all that stands before them; [conversations, those longer than ``window``],
    which grow while the first is read).

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
                tokens, said = np.array(ids, np.int64), np.array(columns["mask"], np.int64)
                yield data.collate.Segment(tokens, np.append(np.where(said[1:] > 0, tokens[1:], -1), -1))

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
