"""``kvad data check``: verification of packing on a real batch, in float64.

1. **No document depends on another one.** All tokens of one document are changed, and every other document's logits
   must stay bit-equal; its own must change, or the check would detect nothing. Of a pair first the source is changed,
   then the target. If ``data.isolate_documents`` is off, later documents of the row may change, earlier ones may not.
2. **Packing changes no gradient.** The gradient of the packed batch equals that of its documents one by one, each at
   the positions that it has in its row; both losses are sums over the same targets (isolated documents only).

The batch consists of the first rows of the run, and of the row with the most documents among the first
``DEFAULT_ROWS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from kvad.errors import format_count
from kvad.model import Transformer
from kvad.text import Tokenizer
from kvad.train import data as data_lib
from kvad.train.data import Batch, Ints, PackedDataset, collate_rows
from kvad.train.objectives import Autocast, CrossEntropyObjective

CollateConfig = data_lib.collate.CollateConfig
PackedRow = data_lib.collate.PackedRow
Segment = data_lib.collate.Segment
DEFAULT_ROWS = 64
TOLERANCE = 1e-12  # relative to the largest gradient
MAX_CHANGED_DOCUMENTS = 3  # number of documents of the fullest row to change


@dataclass(frozen=True)
class PerturbationResult:
    """Effect on logits of changing document ``document`` of the row with the most documents."""

    document: int
    side: str  # "tokens", "source" or "target"
    own_change: float  # max |dlogit| of the document's own targets
    leak: float  # of targets that must not depend on it
    later_change: float  # of later targets that may (documents not isolated)


@dataclass(frozen=True)
class PackingReport:
    """Results of ``check_packing``."""

    rows: int
    documents: int
    isolate: bool
    reset: bool
    packing_stats: data_lib.packed_dataset.PackingStats
    perturbed: tuple[PerturbationResult, ...]
    gradient: float | None  # max |difference| / max |gradient|, None if documents are not isolated
    loss_packed: float
    loss_alone: float | None
    row: tuple[str, ...]  # the row with the most documents, one line each

    @property
    def leaks(self) -> tuple[str, ...]:
        """Descriptions of violated properties; empty if all hold."""
        leaks = []
        for result in self.perturbed:
            if result.leak != 0:  # NaN is not 0
                leaks.append(
                    f"document {result.document}'s {result.side} changes another document's logits by {result.leak:.3g}"
                )
            if not result.own_change > 0:
                leaks.append(f"document {result.document}'s own logits do not change, so this model detects nothing")
        if self.gradient is not None and not self.gradient <= TOLERANCE:
            leaks.append(
                f"packed gradients differ from those of single documents by {self.gradient:.3g} of the largest"
            )
        return tuple(leaks)


def check_packing(model: Transformer, data: PackedDataset, tokenizer: Tokenizer, rows: int = 2) -> PackingReport:
    """Check a batch of ``rows`` rows; ``model`` has any weights, in float64."""
    model.eval()
    shape = replace(data.shape, device="cpu")
    candidates = data.rows(np.arange(max(DEFAULT_ROWS, rows)))
    fullest = max(range(len(candidates)), key=lambda row: len(candidates[row]))
    chosen = [candidates[fullest], *islice((row for n, row in enumerate(candidates) if n != fullest), rows - 1)]
    gradient = alone_loss = None
    packed_loss, packed = _gradient(model, [collate_rows(chosen, shape)])
    if shape.isolate_documents:
        alone_loss, apart = _gradient(model, list(data_lib.collate.split_segments(chosen, shape)))
        gradient = float((packed - apart).abs().max() / apart.abs().max())
    return PackingReport(
        rows=len(chosen),
        documents=sum(map(len, chosen)),
        isolate=shape.isolate_documents,
        reset=shape.reset_positions,
        packing_stats=data.packer.source.packing_stats(),
        perturbed=tuple(_perturb(model, chosen, shape)),
        gradient=gradient,
        loss_packed=packed_loss,
        loss_alone=alone_loss,
        row=tuple(_document_line(part, number, tokenizer) for number, part in enumerate(chosen[0])),
    )


def _gradient(model: Transformer, batches: Sequence[Batch]) -> tuple[float, Tensor]:
    """Return the mean loss per target (nats) and its flat gradient."""
    model.zero_grad(set_to_none=True)
    total = sum(len(batch.targets) for batch in batches)
    objective = CrossEntropyObjective(model, Autocast("fp32", "cpu"))
    summed = sum(objective.accumulate_gradients(batch, total) for batch in batches)
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return summed / total, flat


def _perturb(model: Transformer, rows: Sequence[PackedRow], shape: CollateConfig) -> list[PerturbationResult]:
    row, vocab = rows[0], model.config.vocab_size
    last = len(row) - 1
    before, row_of, owner = _logits(model, rows, shape)
    found = []
    for document in sorted({0, last // 2, last})[:MAX_CHANGED_DOCUMENTS]:
        for side, changed in _changes(row[document], vocab, model):
            others = [*row[:document], changed, *row[document + 1 :]]
            after, _, _ = _logits(model, [others, *rows[1:]], shape)
            moved = (after - before).abs().amax(dim=1)
            own = (row_of == 0) & (owner == document)
            later = (row_of == 0) & (owner > document)
            if shape.isolate_documents:
                later = torch.zeros_like(own)
            elif row[0].encoder_tokens is not None:
                later = (row_of == 0) & ~own  # all targets of the row attend to all of its sources
            if not own.any():
                continue  # a last token without a target
            leak = _max_or_zero(moved[~own & ~later])
            own_change, later_change = _max_or_zero(moved[own]), _max_or_zero(moved[later])
            found.append(PerturbationResult(document, side, own_change, leak, later_change))
    return found


def _changes(part: Segment, vocab: int, model: Transformer) -> list[tuple[str, Segment]]:
    if part.encoder_tokens is None:
        return [("tokens", part._replace(tokens=(part.tokens + 1) % vocab))]
    encoder_input = model.config.encoder_input
    source = (part.encoder_tokens + 1) % (vocab if encoder_input is None else encoder_input.vocab_size or vocab)
    target = part._replace(tokens=(part.tokens + 1) % vocab)
    return [("source", part._replace(encoder_tokens=source)), ("target", target)]


@torch.no_grad()
def _logits(model: Transformer, rows: Sequence[PackedRow], shape: CollateConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [N, V] at the target positions, and the row and the document of each."""
    batch = collate_rows(rows, shape)
    model_input, logits = batch.model_input, CrossEntropyObjective(model, Autocast("fp32", "cpu")).target_logits(batch)
    width = model_input.sub_batches[0].num_new_tokens
    documents = torch.full((len(rows), width), -1)
    for number, row in enumerate(rows):
        owners = torch.repeat_interleave(torch.arange(len(row)), torch.tensor([len(part.tokens) for part in row]))
        documents[number, : len(owners)] = owners
    return logits, model_input.logit_indices // width, documents.view(-1)[model_input.logit_indices]


def _max_or_zero(values: Tensor) -> float:
    return float(values.max()) if len(values) else 0.0


def _document_line(part: Segment, number: int, tokenizer: Tokenizer) -> str:
    """Format one line: the document's index, its token count, its text with the middle left out."""

    def text(ids: Ints) -> str:
        whole = " ".join(tokenizer.decode(ids.tolist(), skip_specials=False).split())
        return whole if len(whole) <= 72 else f"{whole[:44]} ... {whole[-23:]}"

    if part.encoder_tokens is None:
        return f"{number}  {format_count(len(part.tokens), 'token')}: {text(part.tokens)}"
    counts = f"{len(part.encoder_tokens)} + {len(part.tokens)} tokens"
    return f"{number}  {counts}: {text(part.encoder_tokens)}  ->  {text(part.tokens)}"
