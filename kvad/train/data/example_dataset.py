"""Whole texts, packed: sentences with tags, texts with a label, conversations of which some tokens are learned.

A row holds several texts (``packing.py``), each a document of its own: none sees another, and positions restart; what
is left over is padding, document -1, which nobody sees and nobody asks. What is asked of a text is in a column of its
store::

    labels   a token with a label >= 0 is asked for it: of a tagging file a word's first, of a labelled text the first
    mask     the next token is asked for, where it has a 1:    <u> Hi </u> <a>  Hello </a>
                                                                           asks  asks          -> Hello, </a>

A text longer than a row is left out and counted, never cut.  Rows are packed once, in an order that the seed decides,
and every epoch takes them in an order of its own: which of them a step takes is a function of (seed, step).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kvad.errors import ConfigError, DataError, format_count
from kvad.model_input import ModelInput, SubBatch
from kvad.train.config import RunConfig
from kvad.train.data.collate import Batch, Epochs, seeded_rng
from kvad.train.data.packing import pack_rows
from kvad.train.data.token_store import Ints, TokenStore

PADDING = -1  # the document of what is left over


class ExampleRows:
    """Texts of a store packed into rows of ``context`` tokens.  ``column``: what is asked of them."""

    def __init__(self, store: TokenStore, texts: Ints, context: int, pad: int, column: str) -> None:
        self._store, self._context, self._pad, self._column = store, context, pad, column
        lengths = store.offsets[texts + 1] - store.offsets[texts]
        packed = pack_rows(lengths[:, None], context, "first-fit", crop=False)
        self._texts, self._first = texts[packed.pieces], packed.first
        self.num_tokens = int(lengths.sum())
        self.num_targets = sum(self._asked(text)[0].size for text in texts.tolist())

    def __len__(self) -> int:
        return len(self._first) - 1

    @property
    def utilization(self) -> float:
        """Share of the rows' places that are taken."""
        return self.num_tokens / (len(self) * self._context)

    def example_indices(self, row: int) -> list[int]:
        """By their place in the store."""
        found: list[int] = self._texts[self._first[row] : self._first[row + 1]].tolist()
        return found

    def _asked(self, text: int) -> tuple[Ints, Ints]:
        """Of one text: the places (from its start) that are asked, and what is to be answered."""
        at = np.arange(self._store.offsets[text], self._store.offsets[text + 1])
        values = self._store.column(self._column, at)
        if self._column == "labels":
            places: Ints = np.flatnonzero(values >= 0)
            return places, values[places]
        places = np.flatnonzero(values[1:])
        return places, self._store.take(at[places + 1])

    def batch(self, rows: Ints, device: torch.device | str = "cpu") -> Batch:
        """The given rows as one Step, as wide as the fullest of them; what is asked stands in the rows' order."""
        packed = [self._texts[self._first[row] : self._first[row + 1]].tolist() for row in rows]
        spans = self._store.offsets
        width = max(1, *(sum(int(spans[t + 1] - spans[t]) for t in texts) for texts in packed))
        tokens = np.full((len(packed), width), self._pad)
        positions, documents = np.zeros_like(tokens), np.full_like(tokens, PADDING)
        wanted, targets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for row, texts in enumerate(packed):
            low = 0
            for number, text in enumerate(texts):
                at = np.arange(spans[text], spans[text + 1])
                here = slice(low, low + len(at))
                tokens[row, here], positions[row, here] = self._store.take(at), np.arange(len(at))
                documents[row, here] = number
                places, answers = self._asked(text)
                wanted.append(row * width + low + places)
                targets.append(answers)
                low += len(at)
        flat = [torch.from_numpy(values.reshape(-1)).to(device) for values in (tokens, positions, documents)]
        step = ModelInput(
            token_ids=flat[0],
            positions=flat[1],
            sub_batches=(SubBatch(len(packed), width, width),),
            logit_indices=torch.from_numpy(np.concatenate(wanted)).to(device),
            document_ids=flat[2],
            max_seq_lens=torch.full_like(flat[0], self._context),
        )
        return Batch(step, torch.from_numpy(np.concatenate(targets)).to(device))


class ExampleDataset:
    """The last ``held`` texts for validation, the rest to train on; ``noun``: what a text is called.

    Raises DataError where nothing is left, ConfigError for a configuration that documents alone can have.
    """

    def __init__(self, store: TokenStore, config: RunConfig, held: int, pad: int, noun: str) -> None:
        data, train = config.data, config.train
        if data.order != "epochs":
            raise ConfigError(f"data.order: {data.order} is for documents", f"{noun}s are taken in epochs")
        (column,) = store.manifest["columns"]
        self._train, self._store, self._noun, self._context = train, store, noun, data.seq_len
        lengths = np.diff(store.offsets)
        fits = lengths <= data.seq_len
        cut = len(lengths) - held
        self._left_out, self._longest = int((~fits).sum()), int(lengths.max())
        shuffled = seeded_rng(train.seed, 0).permutation(cut)
        chosen = {"training": shuffled[fits[shuffled]], "validation": cut + np.flatnonzero(fits[cut:])}
        for name, texts in chosen.items():
            if not len(texts):
                count = cut if name == "training" else held
                raise DataError(
                    f"no {noun} is left for {name}: {format_count(count, noun)}, none of which fits a context of "
                    f"{data.seq_len}",
                    f"use more {noun}s or a larger --context",
                )
        self.training, self.validation = (ExampleRows(store, t, data.seq_len, pad, column) for t in chosen.values())
        rows = train.batch_size * train.gradient_accumulation_steps
        self._epochs = Epochs(
            len(self.training), rows, lambda epoch: seeded_rng(train.seed, 1 + epoch).permutation(len(self.training))
        )
        self.train_tokens, self.validation_tokens = self.training.num_targets, self.validation.num_targets
        self.tokens_per_step = round(rows * self.train_tokens / len(self.training))

    def turn_end(self) -> int | None:
        """The token with which every run of learned tokens ends; None where they end in several, or are labels."""
        store = self._store
        if "mask" not in store.manifest["columns"]:
            return None
        at = np.arange(store.num_tokens)
        learned = store.column("mask", at).astype(bool)
        last = np.append(~learned[1:], True)
        last[store.offsets[1:] - 1] = True
        ends = np.unique(store.take(at[learned & last]))
        return int(ends[0]) if len(ends) == 1 else None

    def micro_batches(self, step: int) -> list[Batch]:
        rows = self._epochs.rows(step).reshape(self._train.gradient_accumulation_steps, self._train.batch_size)
        return [self.training.batch(some, self._train.device) for some in rows]

    def provenance(self, number: int) -> list[int]:
        return self.training.example_indices(int(self._epochs.epoch_and_row(np.array([number]))[1][0]))

    def evaluation(self) -> Iterator[Batch]:
        """All rows, or as many, evenly spread, as have ``eval_tokens`` targets."""
        tokens, count = self._train.eval_tokens, len(self.validation)
        rows = np.arange(count)
        if 0 < tokens < self.validation_tokens:
            chosen = max(1, count * tokens // self.validation_tokens)
            rows = np.arange(chosen) * count // chosen
        for low in range(0, len(rows), self._train.batch_size):
            yield self.validation.batch(rows[low : low + self._train.batch_size], self._train.device)

    def summary(self) -> list[str]:
        store, count = self._store, len(self.training)
        lines = [f"tokens: {store.num_tokens:,} in {format_count(store.num_documents, self._noun)}"]
        if self._left_out:
            lines.append(
                f"left out: {format_count(self._left_out, self._noun)} longer than the context of {self._context} "
                f"(the longest has {format_count(self._longest, 'token')})"
            )
        lines.append(
            f"packed: {format_count(count, 'row')} of {self._context} tokens, {self.training.utilization:.1%} of the places "
            f"taken, {format_count(self.train_tokens, 'target')} to train on and {self.validation_tokens:,} to judge by"
        )
        return lines
