"""Averages of a run's weights, used for evaluations and checkpoints if [optim] requests one.

``ema_decay``: a moving average (Polyak & Juditsky 1992), after t steps::

    A_t = (1 - d) sum over i <= t of d^(t - i) W_i / (1 - d^t)

of the weights W_i after each step; the divisor corrects for the start at zero (Kingma & Ba 2015, sec. 3), so the
initial random weights have no share in it. ``average_last``: the mean of the last k copies of the weights, one every
``average_interval`` steps (Vaswani et al. 2017, sec. 6.1, average the last 5 checkpoints).
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
    """Average of ``parameters``, updated after every step."""

    def __init__(self, parameters: NamedTensors, config: OptimConfig) -> None:
        self._parameters, self._decay = parameters, config.ema_decay
        self._max_copies, self._interval = config.average_last, config.average_interval or 0
        self._steps = 0
        self._copies: list[list[Tensor]] = []  # with ema_decay: one, the average itself

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after a step."""
        self._steps += 1
        current = [parameter for _, parameter in self._parameters]
        if self._decay and not self._copies:
            self._copies = [[tensor.detach().clone() for tensor in current]]
        elif self._decay:
            share = (1 - self._decay) / (1 - self._decay**self._steps)
            for average, tensor in zip(self._copies[0], current, strict=True):
                average.lerp_(tensor.detach(), share)
        elif self._steps % self._interval == 0:
            self._copies = [
                *self._copies[max(0, len(self._copies) + 1 - self._max_copies) :],
                [tensor.detach().clone() for tensor in current],
            ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the parameters by the average within the block; afterwards they are unchanged.

        Only pointers change, so the trained weights are restored bit for bit. Before the first average nothing is
        replaced.
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
        if len(self._copies) < 2:
            return self._copies[0] if self._copies else []
        with torch.no_grad():
            return [torch.stack(copies).mean(dim=0) for copies in zip(*self._copies, strict=True)]

    def state_tensors(self) -> dict[str, Tensor]:
        """Return weights ("raw.NAME"), copies ("kept.I.NAME") and step count ("averaged")."""
        tensors = {"averaged": torch.tensor(self._steps, dtype=torch.int64)}
        for at, (name, parameter) in enumerate(self._parameters):
            tensors[f"raw.{name}"] = parameter.detach()
            tensors |= {f"kept.{number}.{name}": copy[at] for number, copy in enumerate(self._copies)}
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state; the parameters become the trained weights.

        Raises:
            CheckpointError: If the state does not fit the parameters.
        """
        self._steps = int(checked_tensor(tensors, "averaged", ()).item())
        for name, parameter in self._parameters:
            parameter.copy_(checked_tensor(tensors, f"raw.{name}", parameter.shape))
        count = sum(name.startswith("kept.") for name in tensors) // max(1, len(self._parameters))
        self._copies = [
            [
                checked_tensor(tensors, f"kept.{number}.{name}", p.shape).to(p.device, copy=True)
                for name, p in self._parameters
            ]
            for number in range(count)
        ]


def checked_tensor(tensors: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
    """Return a tensor of the training state; raise CheckpointError if it is missing or has another shape."""
    tensor = tensors.get(name)
    if tensor is None or tuple(tensor.shape) != tuple(shape):
        problem = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
        raise CheckpointError(f"training state {name} is {problem}, expected {list(shape)}")
    return tensor
