"""Location of non-finite values by repeating the failed step with hooks on every module.

The step is repeated bit for bit. The first of these that applies is reported:

1. a parameter that is already non-finite because of an earlier update
2. the first module, over micro-batches and then in the order of completion, whose output is not finite
3. the loss, if all outputs are finite
4. the first parameter, in the order of the backward pass, whose gradient is not finite

Healthy runs pay only for a copy of the random number state at each step.
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
    """Copy of the random number state of the CPU and, if ``device`` is a GPU, of that GPU."""

    def __init__(self, device: str) -> None:
        self._device = device if torch.device(device).type == "cuda" else None
        self._state = torch.get_rng_state()
        self._device_state = None if self._device is None else torch.cuda.get_rng_state(self._device)

    def restore(self) -> None:
        torch.set_rng_state(self._state)
        if self._device is not None and self._device_state is not None:
            torch.cuda.set_rng_state(self._device_state, self._device)


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
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    hooks += [parameter.register_post_accumulate_grad_hook(at_gradient(name)) for name, parameter in trained]
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
