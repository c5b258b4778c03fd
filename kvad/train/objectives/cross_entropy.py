"""Cross entropy over packed batches, in float32 at least, a slice of positions at a time.

``accumulate_gradients`` adds the gradient of ``sum of losses / total``: with ``total`` = the targets of *all*
micro-batches of an optimizer step, accumulation weighs all tokens equally, however uneven the micro-batches are. The
logits of a slice are computed, used and freed, forwards and backwards, so no [T, V] tensor of a whole step exists.

The data determines the targets and their positions (``logit_indices`` and ``targets``), so next tokens, hidden tokens
and tags are treated alike. With label smoothing e (Szegedy et al. 2016, sec. 7; Vaswani et al. 2017, sec. 5.4) a target
is a mixture of itself and of all C classes::

    loss = -(1 - e) log p(target) - e / C  sum over c of log p(c)

Evaluations do not smooth, so that the validation loss is the logarithm of a perplexity.

**Scheduled sampling** (Bengio et al. 2015) in two passes (Mihaylova & Martins 2019). With teacher forcing a decoder
reads only correct tokens and never its own mistakes. Here a share of its inputs are its own predictions: a first pass,
without gradient, reads the correct tokens; at drawn positions the input becomes the most likely token of the position
before; the second pass learns from that. Targets stay unchanged::

    right tokens    BOS  t1  t2  t3         predictions       u1  u2  u3  u4
    drawn            .    .   x   .         decoder input     BOS t1  u2  t3        targets   t1 t2 t3 EOS

So a step costs one more forward pass. The share rises from 0 to ``objective.scheduled_sampling`` over the first n
steps; with r = min(1, step / n)::

    linear       r                        exponential  1 - 0.01^r            sigmoid  1 / (1 + exp(-10 (r - 1/2)))

Positions are drawn by (seed, step, row in the step). The first token of a target is never replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvad import config as cfg
from kvad import model as model_lib
from kvad import ops
from kvad.errors import ConfigError
from kvad.model import NoCache, Transformer
from kvad.model_input import CacheProtocol, ModelInput
from kvad.train import data as data_lib
from kvad.train.config import ObjectiveConfig, RunConfig
from kvad.train.data import Batch
from kvad.train.objectives.expert_balance import ExpertBalancer

PackedRow = data_lib.collate.PackedRow
Routing = model_lib.layers.Routing
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


class Autocast:
    """``precision`` as a context manager: bf16 or fp16 products, or nothing (``dtype`` None)."""

    def __init__(self, precision: str, device: str) -> None:
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self._kind = torch.device(device).type

    def __call__(self) -> AbstractContextManager[object]:
        return nullcontext() if self.dtype is None else torch.autocast(self._kind, dtype=self.dtype)


class CrossEntropyObjective:
    """Cross entropy of the data's targets.

    Args:
        smoothing: Share of all classes in each target.
        cache: Replaces NoCache.
        experts: Adds the losses of the model's routers, and counts the loads.
    """

    def __init__(
        self,
        model: Transformer,
        autocast: Autocast,
        smoothing: float = 0.0,
        cache: CacheProtocol | None = None,
        experts: ExpertBalancer | None = None,
    ) -> None:
        self._model, self._autocast, self._smoothing = model, autocast, smoothing
        self._cache, self.experts = cache or NoCache(model.config), experts

    def accumulate_gradients(self, batch: Batch, total: float) -> float:
        routings: list[Routing] | None = None if self.experts is None else []
        read = self._head_inputs(batch, routings)
        leaf, head = read.detach().requires_grad_(), self._model.head
        if isinstance(head, model_lib.heads.LanguageHead) and head.spec.logit_softcap is None:
            summed = self._fused_backward(head, leaf, batch, total)
        else:
            summed = 0.0
            for logits, targets in self._target_logits(leaf, batch):
                loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self._smoothing)
                (loss / total).backward()
                summed += loss.item()
        balancing = None
        if self.experts is not None and routings is not None:
            balancing = self.experts.loss(routings, batch.model_input) * (len(batch.targets) / total)
        if leaf.grad is not None:
            outputs, gradients = [read], [leaf.grad]
            if balancing is not None and balancing.requires_grad:  # in one pass, as checkpointed layers require
                outputs, gradients = [read, balancing], [leaf.grad, torch.ones_like(balancing)]
            torch.autograd.backward(outputs, gradients)
        return summed

    def _fused_backward(self, head: model_lib.heads.LanguageHead, leaf: Tensor, batch: Batch, total: float) -> float:
        """Compute the gradient of a plain matrix head without a graph of its logits."""
        with self._autocast():
            read = head.pre_logits(leaf.index_select(0, batch.model_input.logit_indices))
        summed, gradient = ops.cross_entropy.cross_entropy_backward(
            read.detach(),
            self._model.token_embedding if head.weight is None else head.weight,
            head.bias,
            batch.targets,
            total,
            scale=head.spec.logit_scale,
            smoothing=self._smoothing,
            dtype=self._autocast.dtype,
        )
        read.backward(gradient)
        return summed

    @torch.no_grad()
    def evaluate_loss(self, batches: Iterable[Batch]) -> EvalResult:
        """Return loss and accuracy over all targets of the batches."""
        summed, count, num_correct = 0.0, 0, 0
        for batch in batches:
            for logits, targets in self._target_logits(self._head_inputs(batch), batch):
                summed += F.cross_entropy(logits, targets, reduction="sum").item()
                num_correct += int((logits.argmax(dim=-1) == targets).sum())
            count += len(batch.targets)
        return EvalResult(summed / max(count, 1), count, num_correct)

    def target_logits(self, batch: Batch) -> Tensor:
        """Return the logits [N, C] at the batch's target positions."""
        return torch.cat([logits for logits, _ in self._target_logits(self._head_inputs(batch), batch)])

    def logit_chunks(self, hidden: Tensor, at: Tensor) -> Iterator[Tensor]:
        """Yield logits [n, C] of hidden [T, E], LOGIT_BUDGET elements at a time, in float32 at least.

        ``at``: [N] positions; for a head that classifies whole texts, their first tokens, ascending.
        """
        head, vocab_size = self._model.config.head, self._model.config.vocab_size
        classes = len(head.labels) if isinstance(head, cfg.ClassificationHeadConfig) else vocab_size
        for indices in at.split(max(1, LOGIT_BUDGET // classes)):
            with self._autocast():
                logits = self._model.logits(hidden, indices)
            yield logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _target_logits(self, read: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits and targets, a slice at a time."""
        low = 0
        for logits in self.logit_chunks(read, batch.model_input.logit_indices):
            yield logits, batch.targets[low : low + len(logits)]
            low += len(logits)

    def _head_inputs(self, batch: Batch, routings: list[Routing] | None = None) -> Tensor:
        """Return the head's inputs [T, E]: hidden states, or (pooling by mean) each text's mean at its first token."""
        with self._autocast():
            hidden: Tensor = self._model(batch.model_input, self._cache, routings)
            head = self._model.config.head
            if isinstance(head, cfg.ClassificationHeadConfig) and head.level == "row" and head.pool == "mean":
                return _text_means(hidden, batch.model_input)
        return hidden


def _text_means(hidden: Tensor, model_input: ModelInput) -> Tensor:
    """Return zeros [T, E] with the mean of each text's hidden states at its first token."""
    starts, indices = model_input.logit_indices, torch.arange(len(hidden), device=hidden.device)
    owner = torch.searchsorted(starts, indices, right=True) - 1
    inside = (indices if model_input.document_ids is None else model_input.document_ids) >= 0
    wide = hidden[inside].to(torch.promote_types(hidden.dtype, torch.float32))
    summed = torch.zeros((len(starts), hidden.shape[1]), dtype=wide.dtype, device=wide.device)
    summed = summed.index_add(0, owner[inside], wide)
    means = summed / torch.bincount(owner[inside], minlength=len(starts)).unsqueeze(1)
    return torch.zeros_like(hidden).index_copy(0, starts, means.to(hidden.dtype))


def sampling_rate(options: ObjectiveConfig, steps: int, step: int) -> float:
    """Return the share of decoder inputs to sample in optimizer step ``step`` (from 0)."""
    progress = min(1.0, step / steps)
    rise = {
        "linear": progress,
        "exponential": 1 - math.pow(0.01, progress),
        "sigmoid": 1 / (1 + math.exp(-10 * (progress - 0.5))),
    }[options.scheduled_sampling_schedule]
    return options.scheduled_sampling * rise


class ScheduledSampling(data_lib.packed_dataset.RowTransform):
    """Draws decoder positions in training; ConfigError if pairs are not isolated or the number of steps is unknown."""

    def __init__(self, config: RunConfig) -> None:
        if not (config.data.reset_positions and config.data.isolate_documents):
            name = "isolate_documents" if config.data.reset_positions else "reset_positions"
            raise ConfigError(f"data.{name}: must be true with objective.scheduled_sampling", "Leave it out.")
        steps = config.objective.scheduled_sampling_steps or config.train.last_step
        if steps is None:
            raise ConfigError(
                "objective.scheduled_sampling_steps: must be given for a run that only the clock ends",
                "Give the number of steps in which the share rises.",
            )
        self._options, self._steps = config.objective, steps

    def __call__(self, row: PackedRow, random: np.random.Generator, step: int | None) -> PackedRow:
        if step is None:
            return row
        share, drawn = sampling_rate(self._options, self._steps, step), list[data_lib.collate.Segment]()
        for segment in row:
            is_sampled = random.random(len(segment.tokens)) < share
            is_sampled[0] = False  # nothing precedes the first token
            drawn.append(segment._replace(is_sampled=is_sampled))
        return drawn


class ScheduledSamplingObjective(CrossEntropyObjective):
    """Cross entropy of targets whose decoder reads some of its own predictions; evaluations use teacher forcing."""

    def accumulate_gradients(self, batch: Batch, total: float) -> float:
        return super().accumulate_gradients(self._with_samples(batch), total)

    @torch.no_grad()
    def _with_samples(self, batch: Batch) -> Batch:
        """Return the batch with the model's own tokens at the drawn positions."""
        if batch.sampled_indices is None or not len(batch.sampled_indices):
            return batch
        with self._autocast():
            hidden = self._model(batch.model_input, self._cache)
        before = self.logit_chunks(hidden, batch.sampled_indices - 1)
        tokens = batch.model_input.token_ids.clone()
        tokens[batch.sampled_indices] = torch.cat([logits.argmax(dim=-1) for logits in before])
        return batch._replace(model_input=batch.model_input._replace(token_ids=tokens), sampled_indices=None)


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
