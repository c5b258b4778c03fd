"""Cross entropy over packed batches, in float32 at least, a slice of positions at a time.

``accumulate_gradients`` adds the gradient of ``sum of losses / total``: with ``total`` = the targets of *all*
micro-batches of an optimizer step, accumulation weighs all tokens equally, however uneven the micro-batches are. The
logits of a slice are computed, used and freed, forwards and backwards, so no [T, V] tensor of a whole step exists.

The data determines the targets and their positions (``logit_indices`` and ``targets``), so next tokens, hidden tokens
and tags are treated alike. With label smoothing e (Szegedy et al. 2016, sec. 7; Vaswani et al. 2017, sec. 5.4) a target
is a mixture of itself and of all C classes::

    loss = -(1 - e) log p(target) - e / C  sum over c of log p(c)

Evaluations do not smooth, so that the validation loss is the logarithm of a perplexity.
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

LOGIT_BUDGET = 1 << 22  # elements of [positions, C] computed at a time, except in ops/cross_entropy.py


class EvalResult(NamedTuple):
    """Result on a validation split."""

    loss: float  # mean per target (nats)
    targets: int
    num_correct: int | None = None  # targets that were the most likely class, None if not counted

    @property
    def accuracy(self) -> float | None:
        return None if self.num_correct is None else self.num_correct / max(self.targets, 1)


class Objective(Protocol):
    """Loss that the training loop minimizes."""

    def accumulate_gradients(self, batch: Batch, total: float) -> float:
        """Add the gradient of this batch's summed loss / ``total``; return the summed loss.

        ``total`` is the number of targets of the step, divided by the loss scale of fp16.
        """
        ...

    def evaluate_loss(self, batches: Iterable[Batch]) -> EvalResult:
        """Return the loss over batches, without gradients."""
        ...


class CrossEntropyObjective:
    """Cross entropy of the data's targets, without a cache."""

    def __init__(self, model: Transformer, autocast: Autocast, smoothing: float = 0.0) -> None:
        self._model, self._no_cache, self._autocast = model, NoCache(model.config), autocast
        self._smoothing = smoothing

    def accumulate_gradients(self, batch: Batch, total: float) -> float:
        return accumulate_gradients(self._model, batch, self._no_cache, total, self._autocast, self._smoothing)

    def evaluate_loss(self, batches: Iterable[Batch]) -> EvalResult:
        return evaluate(self._model, batches, self._no_cache, self._autocast)


class Autocast:
    """``precision`` as a context manager: bf16 or fp16 products, or nothing (``dtype`` None)."""

    def __init__(self, precision: str, device: str) -> None:
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self._kind = torch.device(device).type

    def __call__(self) -> AbstractContextManager[object]:
        return nullcontext() if self.dtype is None else torch.autocast(self._kind, dtype=self.dtype)


def resolve_precision(precision: str, device: str) -> str:
    """Resolve ``auto``: bf16 if the machine multiplies it faster, else fp32.

    On a CPU that means AMX, or AVX512-BF16 on other CPUs than Intel's. Measured on one Zen 4 core, tokens/s fp32 ->
    bf16: 1.2 M parameters 6,061 -> 9,334; 5.3 M 1,932 -> 2,982; 27 M 465 -> 761; the 0.7 M character model gains
    nothing. Without native support bf16 is slower than fp32, and so it is on a Xeon with AVX512-BF16 and no AMX: a
    product of 1024^3 at 74 GFLOP/s instead of 119, one thread.
    """
    if precision != "auto":
        return precision
    if torch.device(device).type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    native = torch.cpu.get_capabilities()
    is_intel = str(native.get("cpu_name", "")).startswith("Intel")
    return "bf16" if native.get("amx_bf16") or (native.get("avx512_bf16") and not is_intel) else "fp32"


def accumulate_gradients(
    model: Transformer, batch: Batch, cache: CacheProtocol, total: float, autocast: Autocast, smoothing: float = 0.0
) -> float:
    """Add the gradient of this batch's summed loss / ``total``; returns the summed loss (nats)."""
    with autocast():
        read = _head_inputs(model, model(batch.model_input, cache), batch.model_input)
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
    """Compute the gradient of a plain matrix head without a graph of its logits."""
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
    model: Transformer, batches: Iterable[Batch], cache: CacheProtocol, autocast: Autocast
) -> tuple[float, int]:
    """Return the mean loss per target (nats) and the number of targets."""
    result = evaluate(model, batches, cache, autocast)
    return result.loss, result.targets


@torch.no_grad()
def evaluate(model: Transformer, batches: Iterable[Batch], cache: CacheProtocol, autocast: Autocast) -> EvalResult:
    """Return loss and accuracy over all targets of the batches."""
    summed, count, num_correct = 0.0, 0, 0
    for batch in batches:
        with autocast():
            read = _head_inputs(model, model(batch.model_input, cache), batch.model_input)
        for logits, targets in _target_logit_chunks(model, read, batch, autocast):
            summed += F.cross_entropy(logits, targets, reduction="sum").item()
            num_correct += int((logits.argmax(dim=-1) == targets).sum())
        count += len(batch.targets)
    return EvalResult(summed / max(count, 1), count, num_correct)


def logit_chunks(model: Transformer, hidden: Tensor, at: Tensor, autocast: Autocast) -> Iterator[Tensor]:
    """Yield logits [n, C] in float32 at least, of LOGIT_BUDGET elements at a time.

    Args:
        model: The model.
        hidden: [T, E].
        at: [N] positions; for a head that classifies whole texts, their first tokens, ascending.
        autocast: Precision.
    """
    head = model.config.head
    size = max(
        1, LOGIT_BUDGET // (len(head.labels) if isinstance(head, ClassificationHeadConfig) else model.config.vocab_size)
    )
    for indices in at.split(size):
        with autocast():
            logits = model.logits(hidden, indices)
        yield logits.to(torch.promote_types(logits.dtype, torch.float32))


def target_logits(model: Transformer, batch: Batch, cache: CacheProtocol) -> Tensor:
    """Return the logits [N, C] at the batch's target positions."""
    read = _head_inputs(model, model(batch.model_input, cache), batch.model_input)
    return torch.cat([logits for logits, _ in _target_logit_chunks(model, read, batch, Autocast("fp32", "cpu"))])


def _target_logit_chunks(
    model: Transformer, read: Tensor, batch: Batch, autocast: Autocast
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and targets, a slice at a time."""
    low = 0
    for logits in logit_chunks(model, read, batch.model_input.logit_indices, autocast):
        yield logits, batch.targets[low : low + len(logits)]
        low += len(logits)


def _head_inputs(model: Transformer, hidden: Tensor, model_input: ModelInput) -> Tensor:
    """Return the inputs of the head [T, E].

    These are the hidden states, or for a head that pools by mean, each text's mean at its first token.
    """
    head = model.config.head
    if not (isinstance(head, ClassificationHeadConfig) and head.level == "row" and head.pool == "mean"):
        return hidden
    owner = (
        torch.searchsorted(model_input.logit_indices, torch.arange(len(hidden), device=hidden.device), right=True) - 1
    )
    inside = (
        torch.ones_like(owner, dtype=torch.bool) if model_input.document_ids is None else model_input.document_ids >= 0
    )
    wide = hidden[inside].to(torch.promote_types(hidden.dtype, torch.float32))
    shape = (len(model_input.logit_indices), hidden.shape[1])
    summed = torch.zeros(shape, dtype=wide.dtype, device=wide.device).index_add(0, owner[inside], wide)
    means = summed / torch.bincount(owner[inside], minlength=shape[0]).unsqueeze(1)
    return torch.zeros_like(hidden).index_copy(0, model_input.logit_indices, means.to(hidden.dtype))
