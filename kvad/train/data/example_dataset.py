"""Examples as packed rows: tagged sentences, labeled texts, conversations.

A row holds several texts (``packing.py``), each a separate document: none attends to another, and positions restart;
the rest is padding, document -1, without attention and targets. The targets of a text come from a column of its store::

    labels   a token with a label >= 0 has that target: of tags a word's first token, of labeled texts the first
    mask     where it is 1, the next token is the target:    <u> Hi </u> <a>  Hello </a>
                                                                        used  used          -> Hello, </a>

A text longer than a row is left out and counted, never cut. Rows are packed once, in an order given by the seed, and
every epoch takes them in another order: the rows of a step are a function of (seed, step).
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

PADDING = -1  # document id of padding


class ExampleRows:
    """Texts of a store packed into rows of ``context`` tokens; ``column`` holds their targets."""

    def __init__(self, store: TokenStore, texts: Ints, context: int, pad: int, column: str) -> None:
        self._store, self._context, self._pad, self._column = store, context, pad, column
        lengths = store.offsets[texts + 1] - store.offsets[texts]
        packed = pack_rows(lengths[:, None], context, "first-fit", crop=False)
        self._texts, self._first = texts[packed.pieces], packed.first
        self.num_tokens = int(lengths.sum())
        self.num_targets = sum(self._targets(text)[0].size for text in texts.tolist())

    def __len__(self) -> int:
        return len(self._first) - 1

    @property
    def utilization(self) -> float:
        """Filled share of the rows."""
        return self.num_tokens / (len(self) * self._context)

    def provenance(self, row: int) -> list[int]:
        """Return the store indices of a row's texts."""
        texts: list[int] = self._texts[self._first[row] : self._first[row + 1]].tolist()
        return texts

    def _targets(self, text: int) -> tuple[Ints, Ints]:
        """Return the token indices with targets within one text, and the targets."""
        at = np.arange(self._store.offsets[text], self._store.offsets[text + 1])
        values = self._store.column(self._column, at)
        if self._column == "labels":
            indices: Ints = np.flatnonzero(values >= 0)
            return indices, values[indices]
        indices = np.flatnonzero(values[1:])
        return indices, self._store.take(at[indices + 1])

    def batch(self, rows: Ints, device: torch.device | str = "cpu") -> Batch:
        """Return the given rows as one batch, as wide as the fullest of them."""
        packed = [self._texts[self._first[row] : self._first[row + 1]].tolist() for row in rows]
        spans = self._store.offsets
        width = max(1, *(sum(int(spans[t + 1] - spans[t]) for t in texts) for texts in packed))
        tokens = np.full((len(packed), width), self._pad)
        positions, documents = np.zeros_like(tokens), np.full_like(tokens, PADDING)
        logit_indices, targets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for row, texts in enumerate(packed):
            low = 0
            for number, text in enumerate(texts):
                at = np.arange(spans[text], spans[text + 1])
                span = slice(low, low + len(at))
                tokens[row, span], positions[row, span] = self._store.take(at), np.arange(len(at))
                documents[row, span] = number
                indices, values = self._targets(text)
                logit_indices.append(row * width + low + indices)
                targets.append(values)
                low += len(at)
        flat = [torch.from_numpy(values.reshape(-1)).to(device) for values in (tokens, positions, documents)]
        model_input = ModelInput(
            token_ids=flat[0],
            positions=flat[1],
            sub_batches=(SubBatch(len(packed), width, width),),
            logit_indices=torch.from_numpy(np.concatenate(logit_indices)).to(device),
            document_ids=flat[2],
            max_seq_lens=torch.full_like(flat[0], self._context),
        )
        return Batch(model_input, torch.from_numpy(np.concatenate(targets)).to(device))


class ExampleDataset:
    """Examples packed into rows; the last ``num_held_out`` texts are for validation.

    Raises:
        DataError: If a split is empty.
        ConfigError: If the configuration is for documents only.
    """

    def __init__(self, store: TokenStore, config: RunConfig, num_held_out: int, pad: int, noun: str) -> None:
        data, train = config.data, config.train
        if data.order != "epochs":
            raise ConfigError(f"data.order: {data.order} is for documents", f"Use 'epochs' for {noun}s.")
        (column,) = store.manifest["columns"]
        self._train, self._store, self._noun, self._context = train, store, noun, data.seq_len
        lengths = np.diff(store.offsets)
        fits = lengths <= data.seq_len
        cut = len(lengths) - num_held_out
        self._left_out, self._longest = int((~fits).sum()), int(lengths.max())
        shuffled = seeded_rng(train.seed, 0).permutation(cut)
        chosen = {"training": shuffled[fits[shuffled]], "validation": cut + np.flatnonzero(fits[cut:])}
        for name, texts in chosen.items():
            if not len(texts):
                count = cut if name == "training" else num_held_out
                raise DataError(
                    f"no {noun} is left for {name}: none of {format_count(count, noun)} fits data.seq_len "
                    f"{data.seq_len}",
                    f"Use more {noun}s or a larger --seq-len.",
                )
        self.training, self.validation = (ExampleRows(store, t, data.seq_len, pad, column) for t in chosen.values())
        rows = train.batch_size * train.gradient_accumulation_steps
        self._epochs = Epochs(
            len(self.training), rows, lambda epoch: seeded_rng(train.seed, 1 + epoch).permutation(len(self.training))
        )
        self.train_tokens, self.validation_tokens = self.training.num_targets, self.validation.num_targets
        self.tokens_per_step = round(rows * self.train_tokens / len(self.training))

    def turn_end(self) -> int | None:
        """Return the last token of all target spans; None if it varies or for labels."""
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
        return [self.training.batch(micro_batch, self._train.device) for micro_batch in rows]

    def provenance(self, number: int) -> list[int]:
        return self.training.provenance(int(self._epochs.epoch_and_row(np.array([number]))[1][0]))

    def evaluation(self) -> Iterator[Batch]:
        """Yield all validation rows, or evenly spread ones with ``eval_tokens`` targets."""
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
                f"left out: {format_count(self._left_out, self._noun)} longer than data.seq_len {self._context} "
                f"(the longest has {format_count(self._longest, 'token')})"
            )
        lines.append(
            f"packed: {format_count(count, 'row')} of {self._context} tokens, {self.training.utilization:.1%} "
            f"filled, {format_count(self.train_tokens, 'target')} to train on and "
            f"{self.validation_tokens:,} for validation"
        )
        return lines
