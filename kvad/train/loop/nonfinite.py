"""Where a step ceased to be finite: it is done again, to the bit, with a look at what every module gives back.

Asked in this order, the first answer is told:

1. a parameter that is not finite already: an earlier update made it so
2. of the micro-batches in their order, the first module, in the order in which they end, whose output is not finite
3. the loss, of outputs that all are
4. the first parameter, in the order of the backward pass, whose gradient is not finite

Nothing of it costs anything while a run is well, but a copy of the state of the random numbers at each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvad.train.data import Batch
from kvad.train.objectives import Objective


class RandomState:
    """The random numbers of the CPU, and of ``device`` where that is a GPU, as they stand."""

    def __init__(self, device: str) -> None:
        self._device = device if torch.device(device).type == "cuda" else None
        self._state = torch.get_rng_state()
        self._there = None if self._device is None else torch.cuda.get_rng_state(self._device)

    def restore(self) -> None:
        torch.set_rng_state(self._state)
        if self._device is not None and self._there is not None:
            torch.cuda.set_rng_state(self._there, self._device)


class NonFiniteReport(NamedTuple):
    """``what`` is not finite; ``batch``: in which of the micro-batches, from 0 (None: before any); ``row`` of it, from
    0, where a row can be told."""

    tensor_name: str
    batch: int | None = None
    row: int | None = None


def locate_nonfinite(
    model: nn.Module, objective: Objective, batches: Sequence[Batch], scaled: float
) -> NonFiniteReport | None:
    """None where everything is finite this time.  Gradients are left as they fall; no parameter is changed."""
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
            return NonFiniteReport("the loss, of outputs that all are", number)
        if seen.gradient is not None:
            return NonFiniteReport(f"the gradient of {seen.gradient}, in a backward pass of a finite loss", number)
    return None


class _FirstNonFinite:
    """``output``: the module; ``at``: the first index of its output that is not finite, of ``size``."""

    output: str | None = None
    gradient: str | None = None
    at = size = 0


@contextmanager
def _watch_modules(model: nn.Module) -> Iterator[_FirstNonFinite]:
    seen = _FirstNonFinite()

    def at_output(name: str) -> Callable[..., None]:
        def look(_module: nn.Module, _inputs: object, output: object) -> None:
            if seen.output is not None:
                return
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
                    seen.output, seen.size = name, len(tensor)
                    seen.at = int((~tensor.isfinite()).flatten(1).any(1).nonzero()[0])

        return look

    def at_gradient(name: str) -> Callable[[Tensor], None]:
        def look(parameter: Tensor) -> None:
            if seen.gradient is None and parameter.grad is not None and not parameter.grad.isfinite().all():
                seen.gradient = name

        return look

    hooks = [m.register_forward_hook(at_output(name)) for name, m in model.named_modules() if name]
    hooks += [
        p.register_post_accumulate_grad_hook(at_gradient(name))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _row_index(batch: Batch, seen: _FirstNonFinite) -> int | None:
    """Outputs are flat: [T, ...] of the tokens, or of the source's."""
    for step in (batch.model_input, batch.model_input.encoder_input):
        if step is not None and len(step.token_ids) == seen.size:
            return seen.at // step.sub_batches[0].num_new_tokens
    return None
