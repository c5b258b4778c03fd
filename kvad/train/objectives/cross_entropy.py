"""Cross entropy over packed Steps, in float32 at least, a slice of positions at a time.

``backward`` adds the gradient of ``sum of losses / total``: with ``total`` = the targets of *all* micro-batches of an
optimizer step, accumulation weighs every token alike, however ragged the micro-batches are.  The logits of a slice are
made, used and dropped, forwards and backwards, so no [T, V] tensor of a whole long step exists.

What is asked, and where, is the data's: ``step.wanted`` and ``targets``.  So tokens that come next, tokens that were
hidden, and tags differ in nothing here.  With label smoothing e (Szegedy et al. 2016, sec. 7; Vaswani et al. 2017, sec.
5.4) a target is the mixture of itself and of all C answers alike, of which it is one::

    loss = -(1 - e) log p(target) - e / C  sum over c of log p(c)

A run is judged without smoothing, so that its validation loss is the logarithm of a perplexity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad import model as model_lib
from kvad import ops
from kvad.config import ClassificationHeadConfig
from kvad.model import NoCache, Transformer
from kvad.model_input import CacheProtocol, ModelInput
from kvad.train.data import Batch

LOGIT_BUDGET = 1 << 22  # elements of [positions, C] made at a time, but where ops/entropy.py learns


class EvalResult(NamedTuple):
    """Of a validation split: mean loss per target (nats), how many targets there were, and of how many the likeliest
    answer was right (None: nobody asked)."""

    loss: float
    targets: int
    num_correct: int | None = None

    @property
    def accuracy(self) -> float | None:
        return None if self.num_correct is None else self.num_correct / max(self.targets, 1)


class Objective(Protocol):
    """By what the loop trains."""

    def accumulate_gradients(self, batch: Batch, total: float) -> float:
        """Add the gradient of this batch's summed loss / ``total`` targets (fewer, by the loss scale of fp16); returns
        the summed loss."""
        ...

    def evaluate_loss(self, batches: Iterable[Batch]) -> EvalResult:
        """What the model makes of them, without a gradient."""
        ...


class CrossEntropyObjective:
    """Cross entropy of what the data asks, without a cache: of documents' next tokens, of targets that are read after
    their sources, of hidden tokens, of tags."""

    def __init__(self, model: Transformer, autocast: Autocast, smoothing: float = 0.0) -> None:
        self._model, self._memory, self._autocast = model, NoCache(model.config), autocast
        self._smoothing = smoothing

    def accumulate_gradients(self, batch: Batch, total: float) -> float:
        return accumulate_gradients(self._model, batch, self._memory, total, self._autocast, self._smoothing)

    def evaluate_loss(self, batches: Iterable[Batch]) -> EvalResult:
        return evaluate(self._model, batches, self._memory, self._autocast)


class Autocast:
    """``precision`` as a context: bf16 or fp16 products and fp32 everything else, or nothing (``dtype`` None)."""

    def __init__(self, precision: str, device: str) -> None:
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self._kind = torch.device(device).type

    def __call__(self) -> AbstractContextManager[object]:
        return nullcontext() if self.dtype is None else torch.autocast(self._kind, dtype=self.dtype)


def resolve_precision(precision: str, device: str) -> str:
    """``auto`` -> bf16 where the machine multiplies it faster (CPU: AMX, or AVX512-BF16 not of Intel), else fp32.

    Measured on one Zen 4 core, tokens/s fp32 -> bf16: 1.2 M parameters 6,061 -> 9,334; 5.3 M 1,932 -> 2,982;
    27 M 465 -> 761; the 0.7 M character model gains nothing.  Without native support bf16 is slower than fp32, and
    so it is on a Xeon with AVX512-BF16 and no AMX: a product of 1024^3 at 74 GFLOP/s instead of 119, one thread.
    """
    if precision != "auto":
        return precision
    if torch.device(device).type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    native = torch.cpu.get_capabilities()
    slow = str(native.get("cpu_name", "")).startswith("Intel")
    return "bf16" if native.get("amx_bf16") or (native.get("avx512_bf16") and not slow) else "fp32"


def accumulate_gradients(
    model: Transformer, batch: Batch, memory: CacheProtocol, total: float, autocast: Autocast, smoothing: float = 0.0
) -> float:
    """Add the gradient of this batch's summed loss / ``total``; returns the summed loss (nats)."""
    with autocast():
        read = _read(model, model(batch.model_input, memory), batch.model_input)
    leaf = read.detach().requires_grad_()
    head = model.head
    if isinstance(head, model_lib.heads.LanguageHead) and head.spec.logit_softcap is None:
        summed = _fused_backward(model, head, leaf, batch, total, autocast, smoothing)
    else:
        summed = 0.0
        for logits, targets in _target_logit_chunks(model, leaf, batch, autocast):
            loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
            (loss / total).backward()
            summed += loss.item()
    if leaf.grad is not None:
        read.backward(leaf.grad)
    return summed


def _fused_backward(
    model: Transformer,
    head: model_lib.heads.LanguageHead,
    leaf: Tensor,
    batch: Batch,
    total: float,
    autocast: Autocast,
    smoothing: float,
) -> float:
    """The same of a head that is a product with a matrix: without a graph of its logits (``ops/entropy.py``)."""
    with autocast():
        read = head.pre_logits(leaf.index_select(0, batch.model_input.logit_indices))
    weight = model.token_embedding if head.weight is None else head.weight
    summed, gradient = ops.cross_entropy.cross_entropy_backward(
        read.detach(),
        weight,
        head.bias,
        batch.targets,
        total,
        scale=head.spec.logit_scale,
        smoothing=smoothing,
        dtype=autocast.dtype,
    )
    read.backward(gradient)
    return summed


def evaluate_loss(
    model: Transformer, batches: Iterable[Batch], memory: CacheProtocol, autocast: Autocast
) -> tuple[float, int]:
    """Mean loss per target (nats), and how many targets there were."""
    found = evaluate(model, batches, memory, autocast)
    return found.loss, found.targets


@torch.no_grad()
def evaluate(model: Transformer, batches: Iterable[Batch], memory: CacheProtocol, autocast: Autocast) -> EvalResult:
    """Loss and accuracy over all targets of the batches."""
    summed, count, right = 0.0, 0, 0
    for batch in batches:
        with autocast():
            read = _read(model, model(batch.model_input, memory), batch.model_input)
        for logits, targets in _target_logit_chunks(model, read, batch, autocast):
            summed += F.cross_entropy(logits, targets, reduction="sum").item()
            right += int((logits.argmax(dim=-1) == targets).sum())
        count += len(batch.targets)
    return EvalResult(summed / max(count, 1), count, right)


def logit_chunks(model: Transformer, hidden: Tensor, at: Tensor, autocast: Autocast) -> Iterator[Tensor]:
    """hidden [T, E], at [N] -> logits [n, C] in float32 at least, of as many positions at a time as LOGIT_BUDGET
    allows.  Of a head that answers for whole texts, ``at`` are their first tokens, in ascending order."""
    head = model.config.head
    size = max(
        1, LOGIT_BUDGET // (len(head.labels) if isinstance(head, ClassificationHeadConfig) else model.config.vocab_size)
    )
    for some in at.split(size):
        with autocast():
            logits = model.logits(hidden, some)
        yield logits.to(torch.promote_types(logits.dtype, torch.float32))


def target_logits(model: Transformer, batch: Batch, memory: CacheProtocol) -> Tensor:
    """[N, C]: what the model says where the batch asks, one row per target."""
    read = _read(model, model(batch.model_input, memory), batch.model_input)
    return torch.cat([logits for logits, _ in _target_logit_chunks(model, read, batch, Autocast("fp32", "cpu"))])


def _target_logit_chunks(
    model: Transformer, read: Tensor, batch: Batch, autocast: Autocast
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and targets, a slice at a time."""
    low = 0
    for logits in logit_chunks(model, read, batch.model_input.logit_indices, autocast):
        yield logits, batch.targets[low : low + len(logits)]
        low += len(logits)


def _read(model: Transformer, hidden: Tensor, step: ModelInput) -> Tensor:
    """What the head reads [T, E]: the hidden states; of a head that answers for a whole text by the mean of its hidden
    states, that mean at the text's first token."""
    head = model.config.head
    if not (isinstance(head, ClassificationHeadConfig) and head.level == "row" and head.pool == "mean"):
        return hidden
    owner = torch.searchsorted(step.logit_indices, torch.arange(len(hidden), device=hidden.device), right=True) - 1
    inside = torch.ones_like(owner, dtype=torch.bool) if step.document_ids is None else step.document_ids >= 0
    wide = hidden[inside].to(torch.promote_types(hidden.dtype, torch.float32))
    shape = (len(step.logit_indices), hidden.shape[1])
    summed = torch.zeros(shape, dtype=wide.dtype, device=wide.device).index_add(0, owner[inside], wide)
    means = summed / torch.bincount(owner[inside], minlength=shape[0]).unsqueeze(1)
    return torch.zeros_like(hidden).index_copy(0, step.logit_indices, means.to(hidden.dtype))
