"""``kvad data check``: what packing promises, proved on a real batch, in float64.

1. **Nobody sees a neighbour.**  All tokens of one document are changed, and every other document's logits must stay
   what they were, to the last bit; its own must move, or the check would see nothing.  Of a pair first the source is
   changed, then the target.  Where ``data.isolate`` is off, later documents of the row may move, and earlier ones not.
2. **Packing changes no gradient.**  The gradient of the packed batch is that of its documents one by one, each at the
   positions that it has in its row; both losses are sums over the same targets (isolated data only).

The batch is made of the first rows of the run, and of the row with the most documents among the first :data:`LOOK`.
Of objectives that ask other things than the next token (hidden tokens, spans, tags, labels, what an assistant says) it
is the Steps themselves that are looked at: a document is what the mask takes for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from kvad.errors import format_count
from kvad.model import NoCache, Transformer
from kvad.model_input import ModelInput
from kvad.text import Tokenizer
from kvad.train import data as data_lib
from kvad.train import objectives
from kvad.train.data import Batch, Ints, PairDataset, TrainingData, collate_rows
from kvad.train.objectives import Autocast

DEFAULT_ROWS = 64  # rows
TOLERANCE = 1e-12  # of the largest gradient
MAX_CHANGED_DOCUMENTS = 3  # documents of the fullest row that are changed in turn

CheckableData = data_lib.document_dataset.DocumentDataset | PairDataset | data_lib.streaming.StreamingDataset


@dataclass(frozen=True)
class PerturbationResult:
    """Document ``document`` of the fullest row was changed: max |dlogit| of its own targets, of all others that must
    not see it, and of the ``later`` ones that may (not isolated)."""

    document: int
    side: str  # "tokens", "source" or "target"
    own_change: float
    leak: float
    later_change: float


@dataclass(frozen=True)
class PackingReport:
    """``gradient``: max |difference| / max |gradient|, None where documents are not isolated; ``row``: the fullest one,
    a line per document; ``use``: None where the data says it otherwise."""

    rows: int
    documents: int
    isolate: bool
    reset: bool
    packing_stats: data_lib.collate.PackingStats | None
    perturbed: tuple[PerturbationResult, ...]
    gradient: float | None
    loss_packed: float
    loss_alone: float | None
    row: tuple[str, ...]

    @property
    def leaks(self) -> tuple[str, ...]:
        """What does not hold, in words; empty: all of it does."""
        found = []
        for each in self.perturbed:
            if each.leak != 0:  # NaN is not 0
                found.append(f"document {each.document}'s {each.side} moves another one's logits by {each.leak:.3g}")
            if not each.own_change > 0:
                found.append(f"document {each.document}'s own logits do not move: nothing can be seen by this model")
        if self.gradient is not None and not self.gradient <= TOLERANCE:
            found.append(f"packed gradients differ from those of documents alone by {self.gradient:.3g} of the largest")
        return tuple(found)


def check_packing(
    model: Transformer, data: CheckableData | TrainingData, tokenizer: Tokenizer, rows: int = 2
) -> PackingReport:
    """``model``: weights of any kind, in float64; ``rows``: how many make the batch.

    Other data than of next tokens and pairs must isolate its documents, and make micro-batches of enough rows."""
    model.eval()
    if not isinstance(data, CheckableData):
        return _check_batch(model, data.micro_batches(0)[0], tokenizer, rows)
    shape = replace(data.shape, device="cpu")
    looked = data.rows(np.arange(max(DEFAULT_ROWS, rows)))
    fullest = max(range(len(looked)), key=lambda row: len(looked[row]))
    chosen = [looked[fullest], *islice((row for n, row in enumerate(looked) if n != fullest), rows - 1)]
    batch = collate_rows(chosen, shape)
    gradient = alone_loss = None
    packed_loss, packed = _gradient(model, [batch])
    if shape.isolate:
        alone_loss, apart = _gradient(model, list(data_lib.collate.split_segments(batch)))
        gradient = float((packed - apart).abs().max() / apart.abs().max())
    return PackingReport(
        rows=len(chosen),
        documents=sum(map(len, chosen)),
        isolate=shape.isolate,
        reset=shape.reset,
        packing_stats=data.packing_stats(),
        perturbed=tuple(_perturb(model, chosen, shape)),
        gradient=gradient,
        loss_packed=packed_loss,
        loss_alone=alone_loss,
        row=tuple(_document_line(part, number, tokenizer) for number, part in enumerate(chosen[0])),
    )


def _check_batch(model: Transformer, batch: Batch, tokenizer: Tokenizer, rows: int) -> PackingReport:
    """Of a Step as it stands: its documents are those that its mask keeps apart."""
    owner, most = data_lib.collate.segment_ids(batch.model_input)
    per_row = owner.view(batch.model_input.sub_batches[0].num_seqs, -1)
    fullest = int(per_row.amax(1).sub(torch.arange(len(per_row)) * most).argmax())
    chosen = [fullest, *islice((row for row in range(len(per_row)) if row != fullest), rows - 1)]
    batch = data_lib.collate.select_rows(batch, torch.tensor(chosen))
    owner, most = data_lib.collate.segment_ids(batch.model_input)
    theirs = (
        None
        if batch.model_input.encoder_input is None
        else data_lib.collate.segment_ids(batch.model_input.encoder_input, most)[0]
    )
    before, last = _target_logits(model, batch), int(owner[: batch.model_input.sub_batches[0].num_new_tokens].max())
    found, shown = [], list[str]()
    for document in range(last + 1):
        mine = owner == document
        source = None if theirs is None else (theirs == document)
        held = (
            None
            if source is None or batch.model_input.encoder_input is None
            else batch.model_input.encoder_input.token_ids[source].numpy()
        )
        shown.append(
            _document_line(
                data_lib.collate.Segment(batch.model_input.token_ids[mine].numpy(), np.empty(0, np.int64), held),
                document,
                tokenizer,
            )
        )
        if document not in (0, last // 2, last):
            continue
        for side, changed in _sides(batch.model_input, mine, source, model):
            moved = (_target_logits(model, batch._replace(model_input=changed)) - before).abs().amax(dim=1)
            own = mine[batch.model_input.logit_indices]
            if own.any():
                found.append(
                    PerturbationResult(document, side, _max_or_zero(moved[own]), _max_or_zero(moved[~own]), 0.0)
                )
    apart = list(data_lib.collate.split_segments(batch))
    (packed_loss, packed), (alone_loss, single) = _gradient(model, [batch]), _gradient(model, apart)
    return PackingReport(
        rows=len(chosen),
        documents=len(owner[owner >= 0].unique()),
        isolate=True,
        reset=True,
        packing_stats=None,
        perturbed=tuple(found),
        gradient=float((packed - single).abs().max() / single.abs().max()),
        loss_packed=packed_loss,
        loss_alone=alone_loss,
        row=tuple(shown),
    )


def _sides(step: ModelInput, mine: Tensor, theirs: Tensor | None, model: Transformer) -> list[tuple[str, ModelInput]]:
    """The step with another token in every place of a document: its source, then its own."""
    config = model.config
    own = step._replace(token_ids=torch.where(mine, (step.token_ids + 1) % config.vocab_size, step.token_ids))
    if step.encoder_input is None or theirs is None:
        return [("tokens", own)]
    vocab = config.vocab_size if config.encoder_input is None else config.encoder_input.vocab_size or config.vocab_size
    read = step.encoder_input._replace(
        token_ids=torch.where(theirs, (step.encoder_input.token_ids + 1) % vocab, step.encoder_input.token_ids)
    )
    return [("source", step._replace(encoder_input=read)), ("target", own)]


@torch.no_grad()
def _target_logits(model: Transformer, batch: Batch) -> Tensor:
    return objectives.cross_entropy.target_logits(model, batch, NoCache(model.config))


def _gradient(model: Transformer, batches: Sequence[Batch]) -> tuple[float, Tensor]:
    """Mean loss per target (nats), and the gradient of it, flat."""
    model.zero_grad(set_to_none=True)
    total = sum(len(batch.targets) for batch in batches)
    memory, exact = NoCache(model.config), Autocast("fp32", "cpu")
    summed = sum(objectives.cross_entropy.accumulate_gradients(model, batch, memory, total, exact) for batch in batches)
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return summed / total, flat


def _perturb(
    model: Transformer, rows: Sequence[data_lib.collate.PackedRow], shape: data_lib.collate.CollateConfig
) -> list[PerturbationResult]:
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
            if shape.isolate:
                later = torch.zeros_like(own)
            elif row[0].encoder_tokens is not None:
                later = (row_of == 0) & ~own  # all sources of the row are read by all of its targets
            if not own.any():
                continue  # a last token that nothing follows
            rest = ~own & ~later
            found.append(
                PerturbationResult(
                    document, side, _max_or_zero(moved[own]), _max_or_zero(moved[rest]), _max_or_zero(moved[later])
                )
            )
    return found


def _changes(
    part: data_lib.collate.Segment, vocab: int, model: Transformer
) -> list[tuple[str, data_lib.collate.Segment]]:
    if part.encoder_tokens is None:
        return [("tokens", part._replace(tokens=(part.tokens + 1) % vocab))]
    source = (part.encoder_tokens + 1) % (
        vocab if model.config.encoder_input is None else model.config.encoder_input.vocab_size or vocab
    )
    target = part._replace(tokens=(part.tokens + 1) % vocab)
    return [("source", part._replace(encoder_tokens=source)), ("target", target)]


@torch.no_grad()
def _logits(
    model: Transformer, rows: Sequence[data_lib.collate.PackedRow], shape: data_lib.collate.CollateConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """[N, V] of the wanted places, and of each its row and its document there."""
    step = collate_rows(rows, shape).model_input
    logits = model.logits(model(step, NoCache(model.config)), step.logit_indices)
    width = step.sub_batches[0].num_new_tokens
    documents = torch.full((len(rows), width), -1)
    for number, row in enumerate(rows):
        owners = torch.repeat_interleave(torch.arange(len(row)), torch.tensor([len(part.tokens) for part in row]))
        documents[number, : len(owners)] = owners
    return logits, step.logit_indices // width, documents.view(-1)[step.logit_indices]


def _max_or_zero(values: Tensor) -> float:
    return float(values.max()) if len(values) else 0.0


def _document_line(part: data_lib.collate.Segment, number: int, tokenizer: Tokenizer) -> str:
    """One line: the document's number, its tokens, its text with the middle left out."""

    def text(ids: Ints) -> str:
        whole = " ".join(tokenizer.decode(ids.tolist(), skip_specials=False).split())
        return whole if len(whole) <= 72 else f"{whole[:44]} ... {whole[-23:]}"

    if part.encoder_tokens is None:
        return f"{number}  {format_count(len(part.tokens), 'token')}: {text(part.tokens)}"
    return f"{number}  {len(part.encoder_tokens)} + {len(part.tokens)} tokens: {text(part.encoder_tokens)}  ->  {text(part.tokens)}"
