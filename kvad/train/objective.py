"""Next-token cross entropy over packed Steps, in float32 at least, a slice of positions at a time.

``backward`` adds the gradient of ``sum of losses / total``: with ``total`` = the targets of *all* micro-batches of an
optimizer step, accumulation weighs every token alike, however ragged the micro-batches are.  The logits of a slice are
made, used and dropped, forwards and backwards, so no [T, V] tensor of a whole long step exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.model.fresh import Fresh
from kvad.model.transformer import Transformer
from kvad.step import Memory
from kvad.train.data import Batch

__all__ = ["Autocast", "NextToken", "Objective", "backward", "loss_of", "resolve_precision"]

LOGIT_BUDGET = 1 << 22  # elements of [positions, V] made at a time


class Objective(Protocol):
    """By what the loop trains."""

    def backward(self, batch: Batch, total: float) -> float:
        """Add the gradient of this batch's summed loss / ``total`` targets (fewer, by the loss scale of fp16); returns
        the summed loss."""
        ...

    def loss_of(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Mean loss per target, and how many targets there were."""
        ...


class NextToken:
    """Next-token cross entropy, without a cache: of documents, or of targets that are read after their sources."""

    def __init__(self, model: Transformer, autocast: Autocast) -> None:
        self._model, self._memory, self._autocast = model, Fresh(model.config), autocast

    def backward(self, batch: Batch, total: float) -> float:
        return backward(self._model, batch, self._memory, total, self._autocast)

    def loss_of(self, batches: Iterable[Batch]) -> tuple[float, int]:
        return loss_of(self._model, batches, self._memory, self._autocast)


class Autocast:
    """``precision`` as a context: bf16 or fp16 products and fp32 everything else, or nothing."""

    def __init__(self, precision: str, device: str) -> None:
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self._kind = torch.device(device).type

    def __call__(self) -> AbstractContextManager[object]:
        return nullcontext() if self._dtype is None else torch.autocast(self._kind, dtype=self._dtype)


def resolve_precision(precision: str, device: str) -> str:
    """``auto`` -> bf16 where the machine multiplies bf16 natively (CPU: AVX512-BF16 or AMX), else fp32.

    Measured on one Zen 4 core, tokens/s fp32 -> bf16: 1.2 M parameters 6,061 -> 9,334; 5.3 M 1,932 -> 2,982;
    27 M 465 -> 761; the 0.7 M character model gains nothing.  Without native support bf16 is slower than fp32.
    """
    if precision != "auto":
        return precision
    if torch.device(device).type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    native = torch.cpu.get_capabilities()
    return "bf16" if native.get("avx512_bf16") or native.get("amx_bf16") else "fp32"


def backward(model: Transformer, batch: Batch, memory: Memory, total: float, autocast: Autocast) -> float:
    """Add the gradient of this batch's summed loss / ``total``; returns the summed loss (nats)."""
    with autocast():
        hidden = model(batch.step, memory)
    leaf = hidden.detach().requires_grad_()
    summed = 0.0
    for loss in _slices(model, leaf, batch, autocast):
        (loss / total).backward()
        summed += loss.item()
    hidden.backward(leaf.grad)
    return summed


@torch.no_grad()
def loss_of(model: Transformer, batches: Iterable[Batch], memory: Memory, autocast: Autocast) -> tuple[float, int]:
    """Mean loss per target (nats), and how many targets there were."""
    summed, count = 0.0, 0
    for batch in batches:
        with autocast():
            hidden = model(batch.step, memory)
        summed += sum(loss.item() for loss in _slices(model, hidden, batch, autocast))
        count += len(batch.targets)
    return summed / max(count, 1), count


def _slices(model: Transformer, hidden: Tensor, batch: Batch, autocast: Autocast) -> Iterator[Tensor]:
    """Summed losses of as many positions at a time as LOGIT_BUDGET allows."""
    size = max(1, LOGIT_BUDGET // model.config.vocab)
    for at, targets in zip(batch.step.wanted.split(size), batch.targets.split(size), strict=True):
        with autocast():
            logits = model.logits(hidden, at)
        yield F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum")
