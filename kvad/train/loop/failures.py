"""Failing runs: detection of divergence, and location of non-finite values.

A run *diverges* if loss or gradient norm are far above past values for many steps. With averages over about the last
twenty steps, with weights 0.95 ** age (normalized, as if no steps came before the first), L of the loss, D of the
distance of each step's loss from L, G of the logarithm of the gradient norm before clipping, it is diverging if

    L > min(L) + max(0.2 min(L), 3 D, 0.1 nats)    or    L > 2 min'(L) + 0.1 nats    or    G > min'(G) + log 100

holds after each of 50 steps in a row; min is over all steps so far, min' over those from the twentieth on. A noisy loss
has a large D; a loss that blew up is noisy too, but is twice what it was. One outlier raises D as much as L, and a
step's loss counts as at most 4 L. The warning is returned once per run.

A router *collapses* if at most half of its experts get 90% of its tokens in each of 20 steps in a row. The warning is
returned once per layer and run.

*Non-finite values* are located by repeating the failed step, bit for bit, with hooks on every module. The first of
these that applies is reported:

1. a parameter that is already non-finite because of an earlier update
2. the first module, over micro-batches and then in the order of completion, whose output is not finite
3. the loss, if all outputs are finite
4. the first parameter, in the order of the backward pass, whose gradient is not finite

Healthy runs pay only for a copy of the random number state at each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from kvad.train.data import Batch
from kvad.train.objectives import ExpertLoad, Objective

DECAY, PATIENCE, WARMUP_STEPS = 0.95, 50, 20
RELATIVE_MARGIN, SPREADS, MIN_MARGIN, DOUBLING, MAX_RATIO = 0.2, 3.0, 0.1, 2.0, 4.0
GROWTH_FACTOR = math.log(100)


@dataclass
class DivergenceDetector:
    """Tracks losses and gradient norms of all steps; its fields are plain numbers, stored in every checkpoint."""

    weight: float = 0.0  # sum of the averages' weights
    loss: float = 0.0  # average, as the next two
    spread: float = 0.0
    norm: float = 0.0  # logarithm
    lowest: float = 0.0  # average loss, at step lowest_at
    lowest_at: float = 0.0
    lowest_norm: float = 0.0
    lowest_norm_at: float = 0.0
    lowest_late: float = 0.0  # the lowest from the WARMUP_STEPS step on
    high: float = 0  # steps in a row of a high loss
    high_norm: float = 0
    has_warned: float = 0

    def update(self, step: int, loss: float, norm: float, lr: float) -> str | None:
        """Add a step with a finite loss; return a warning once if the run diverges."""
        self._add(step, loss, norm)
        margin = max(RELATIVE_MARGIN * self.lowest, SPREADS * self.spread, MIN_MARGIN)
        doubled = step > WARMUP_STEPS and self.loss > DOUBLING * self.lowest_late + MIN_MARGIN
        self.high = self.high + 1 if doubled or self.loss > self.lowest + margin else 0
        is_high_norm = step > WARMUP_STEPS and self.norm > self.lowest_norm + GROWTH_FACTOR
        self.high_norm = self.high_norm + 1 if is_high_norm else 0
        if self.has_warned or max(self.high, self.high_norm) < PATIENCE:
            return None
        self.has_warned = 1
        if self.high >= PATIENCE:
            now, least, at = f"loss of {self.loss:.3f}", f"{self.lowest:.3f}", int(self.lowest_at)
        else:
            now, least = f"gradient norm of {math.exp(self.norm):.2g}", f"{math.exp(self.lowest_norm):.2g}"
            at = int(self.lowest_norm_at)
        return (
            f"it diverges: a {now} on average by step {step:,}, {least} at step {at:,}; "
            f"a lower optim.lr (now {lr:.1e}) or a longer optim.warmup_steps may help"
        )

    def _add(self, step: int, loss: float, norm: float) -> None:
        """Add a step to the averages and the lowest ones."""
        first = self.weight == 0
        self.weight = DECAY * self.weight + 1
        share = 1 / self.weight
        loss = loss if first else min(loss, MAX_RATIO * self.loss)
        self.spread += 0.0 if first else share * (abs(loss - self.loss) - self.spread)
        self.loss += share * (loss - self.loss)
        if 0 < norm < math.inf:  # an fp16 loss scale may still be adapting
            self.norm += share * (math.log(norm) - self.norm)
        if first or self.loss < self.lowest:
            self.lowest, self.lowest_at = self.loss, step
        if step <= WARMUP_STEPS or self.loss < self.lowest_late:
            self.lowest_late = self.loss
        if step <= WARMUP_STEPS or self.norm < self.lowest_norm:
            self.lowest_norm, self.lowest_norm_at = self.norm, step


COLLAPSE_PATIENCE, WARNED = 20, -1


def collapse_warnings(steps: dict[str, int], loads: Sequence[ExpertLoad]) -> list[str]:
    """Add the loads of a step to ``steps``, and return the warnings about routers that collapsed.

    Args:
        steps: By layer, the steps in a row in which few experts got most tokens, WARNED after the warning; changed.
        loads: The loads of one optimizer step.
    """
    warnings = []
    for load in loads:
        num_experts, count = len(load.counts), steps.get(load.layer, 0)
        if count == WARNED:
            continue
        steps[load.layer] = count + 1 if 2 * load.num_busy <= num_experts and num_experts > 1 else 0
        if steps[load.layer] == COLLAPSE_PATIENCE:
            steps[load.layer] = WARNED
            warnings.append(
                f"the router of {load.layer} collapses: {load.num_busy} of {num_experts} experts got 90% of its "
                "tokens; objective.router_aux_loss_coef, or router_bias_update_rate with a selection bias, spreads them"
            )
    return warnings


class NonFiniteReport(NamedTuple):
    """Location of the first non-finite value."""

    tensor_name: str
    batch: int | None = None  # index of the micro-batch, None if before any
    row: int | None = None  # index of the row within it, None if unknown


def locate_nonfinite(
    model: nn.Module, objective: Objective, batches: Sequence[Batch], scaled: float
) -> NonFiniteReport | None:
    """Repeat a step, overwriting gradients, and report the first non-finite value, None if all are finite."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return NonFiniteReport(f"the parameter {name}, since an earlier step")
    for number, batch in enumerate(batches):
        model.zero_grad(set_to_none=True)
        with _watch_modules(model) as seen:
            loss = objective.accumulate_gradients(batch, scaled)
        if seen.output is not None:
            return NonFiniteReport(f"the output of {seen.output}", number, _row_index(batch, seen))
        if not math.isfinite(loss):
            return NonFiniteReport("the loss, although all outputs are finite", number)
        if seen.gradient is not None:
            return NonFiniteReport(f"the gradient of {seen.gradient}, although the loss is finite", number)
    return None


class _FirstNonFinite:
    """First module and gradient with non-finite values."""

    output: str | None = None
    gradient: str | None = None
    at = 0  # first non-finite row of the output
    size = 0  # number of rows of the output


@contextmanager
def _watch_modules(model: nn.Module) -> Iterator[_FirstNonFinite]:
    seen = _FirstNonFinite()

    def check_output(name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            is_float = isinstance(tensor, Tensor) and tensor.is_floating_point()
            if seen.output is None and is_float and not tensor.isfinite().all():
                seen.output, seen.size = name, len(tensor)
                seen.at = int((~tensor.isfinite()).flatten(1).any(1).nonzero()[0])

    def check_gradient(name: str, parameter: Tensor) -> None:
        if seen.gradient is None and parameter.grad is not None and not parameter.grad.isfinite().all():
            seen.gradient = name

    hooks = [m.register_forward_hook(partial(check_output, name)) for name, m in model.named_modules() if name]
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    hooks += [p.register_post_accumulate_grad_hook(partial(check_gradient, name)) for name, p in trained]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _row_index(batch: Batch, seen: _FirstNonFinite) -> int | None:
    """Return the row of the non-finite output, which is [T, ...] over decoder or encoder tokens."""
    for step in (batch.model_input, batch.model_input.encoder_input):
        if step is not None and len(step.token_ids) == seen.size:
            return seen.at // step.sub_batches[0].num_new_tokens
    return None
