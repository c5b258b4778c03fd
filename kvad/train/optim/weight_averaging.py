"""Averages of a run's weights, which are what is evaluated and saved where [optim] asks for one.

``ema``: a moving average (Polyak & Juditsky 1992), after t steps::

    A_t = (1 - d) sum over i <= t of d^(t - i) W_i / (1 - d^t)

of the weights W_i after each step; the divisor makes up for a beginning from nothing (Kingma & Ba 2015, sec. 3), so the
random numbers that a model begins with are no part of it.  ``average``: the mean of the last k weights that were kept,
one every so many steps (Vaswani et al. 2017, sec. 6.1, average the last 5 checkpoints).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kvad.errors import CheckpointError
from kvad.train.config import OptimConfig

NamedTensors = Sequence[tuple[str, nn.Parameter]]


class WeightAverager:
    """Of ``parameters``: told after every step, and asked for the average."""

    def __init__(self, parameters: NamedTensors, config: OptimConfig) -> None:
        self._parameters, self._decay = parameters, config.ema_decay
        self._most, self._every = config.average_last, config.average_interval or 0
        self._steps = 0
        self._kept: list[list[Tensor]] = []  # of ema: one, the average itself

    @torch.no_grad()
    def update(self) -> None:
        """After a step."""
        self._steps += 1
        now = [parameter for _, parameter in self._parameters]
        if self._decay and not self._kept:
            self._kept = [[one.detach().clone() for one in now]]
        elif self._decay:
            share = (1 - self._decay) / (1 - self._decay**self._steps)
            for average, one in zip(self._kept[0], now, strict=True):
                average.lerp_(one.detach(), share)
        elif self._steps % self._every == 0:
            self._kept = [
                *self._kept[max(0, len(self._kept) + 1 - self._most) :],
                [one.detach().clone() for one in now],
            ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the parameters are the average (before there is one, themselves); behind it, what they were.

        Pointers change, no number does: what was trained comes back to the bit.
        """
        raw = [parameter.data for _, parameter in self._parameters]
        try:
            for (_, parameter), average in zip(self._parameters, self._mean(), strict=False):
                parameter.data = average
            yield
        finally:
            for (_, parameter), data in zip(self._parameters, raw, strict=True):
                parameter.data = data

    def _mean(self) -> list[Tensor]:
        if len(self._kept) < 2:
            return self._kept[0] if self._kept else []
        with torch.no_grad():
            return [torch.stack(each).mean(dim=0) for each in zip(*self._kept, strict=True)]

    def state_tensors(self) -> dict[str, Tensor]:
        """``{"raw.NAME": the weights that are trained, "kept.I.NAME": ..., "averaged": steps so far}``."""
        found = {"averaged": torch.tensor(self._steps, dtype=torch.int64)}
        for at, (name, parameter) in enumerate(self._parameters):
            found[f"raw.{name}"] = parameter.detach()
            found |= {f"kept.{number}.{name}": one[at] for number, one in enumerate(self._kept)}
        return found

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The reverse: the parameters become what is trained.  CheckpointError for a state that does not fit them."""
        self._steps = int(_checked_tensor(tensors, "averaged", ()).item())
        for name, parameter in self._parameters:
            parameter.copy_(_checked_tensor(tensors, f"raw.{name}", parameter.shape))
        count = sum(name.startswith("kept.") for name in tensors) // max(1, len(self._parameters))
        self._kept = [
            [
                _checked_tensor(tensors, f"kept.{number}.{name}", p.shape).to(p.device, copy=True)
                for name, p in self._parameters
            ]
            for number in range(count)
        ]


def _checked_tensor(tensors: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
    found = tensors.get(name)
    if found is None or tuple(found.shape) != tuple(shape):
        there = "missing" if found is None else f"of shape {list(found.shape)}"
        raise CheckpointError(f"training state {name} is {there}, expected {list(shape)}")
    return found
