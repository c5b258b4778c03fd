"""Adafactor (Shazeer & Stern 2018, Algorithms 4 and 5): factored second moments.

For a matrix X with gradient G at its step t, with beta = 1 - t^-decay_rate and means over one dimension::

    R <- beta R + (1 - beta) mean over columns of (G^2 + 1e-30)        C likewise, over rows
    U <- G / sqrt(R C^T / mean(R))                                     for a vector: G / sqrt(V)
    U <- U / max(1, rms(U) / update_clip)
    X <- X - a U,  a = lr max(1e-3, rms(X))                            without scale_by_parameter: a = lr

So n + m numbers represent n x m moments. ``beta1`` adds a moving average of a U, as in T5's code. Weight decay first
subtracts ``a weight_decay X``. A tensor with more dimensions is factored over its last two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

SQUARE_EPS, MIN_SCALE = 1e-30, 1e-3  # eps1 and eps2 of the paper


class Adafactor(torch.optim.Optimizer):
    """Adafactor as a torch optimizer; ``lr`` is that of the parameter group.

    State of a parameter [.., n, m]: ``step`` [], ``row`` [.., n], ``column`` [.., m]; for a vector ``square`` instead
    of both; with ``beta1`` also ``average`` of the parameter's shape.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        beta1: float | None = None,
        decay_rate: float = 0.8,
        update_clip: float = 1.0,
        scale_by_parameter: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "beta1": beta1, "decay_rate": decay_rate, "update_clip": update_clip}
        super().__init__(params, {**defaults, "scale_by_parameter": scale_by_parameter, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "the training loop computes the gradients"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, parameter.grad, group)

    def _update_parameter(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for key, shape in state_shapes(grad.shape, averaged=group["beta1"] is not None).items():
                state[key] = grad.new_zeros(shape)
        state["step"] += 1
        beta = 1 - state["step"].item() ** -group["decay_rate"]
        update = _scaled_update(state, grad, beta)
        update.div_((_rms(update) / group["update_clip"]).clamp_(min=1.0))
        rate = group["lr"]
        if group["scale_by_parameter"]:
            rate *= max(MIN_SCALE, _rms(parameter).item())
        update.mul_(rate)
        if group["beta1"] is not None:
            update = state["average"].lerp_(update, 1 - group["beta1"])
        if group["weight_decay"]:
            parameter.mul_(1 - group["weight_decay"] * rate)
        parameter.sub_(update)


def state_shapes(shape: torch.Size, *, averaged: bool) -> dict[str, torch.Size]:
    """Return the shapes of the state of a parameter, except ``step``; ``averaged``: beta1 is given."""
    shapes = {"square": shape}
    if len(shape) >= 2:
        shapes = {"row": shape[:-1], "column": torch.Size((*shape[:-2], shape[-1]))}
    return {**shapes, "average": shape} if averaged else shapes


def _scaled_update(state: dict[str, Tensor], grad: Tensor, beta: float) -> Tensor:
    """Update the second moment and divide the gradient by its root."""
    square = grad.square().add_(SQUARE_EPS)
    if "square" in state:
        return state["square"].lerp_(square, 1 - beta).rsqrt().mul_(grad)
    row = state["row"].lerp_(square.mean(dim=-1), 1 - beta)
    column = state["column"].lerp_(square.mean(dim=-2), 1 - beta)
    row = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
    update: Tensor = row * column.rsqrt().unsqueeze(-2) * grad
    return update


def _rms(x: Tensor) -> Tensor:
    norm: Tensor = x.norm()
    return norm / math.sqrt(x.numel())
