"""Optimizer step: optimizers, schedule, clipping, loss scale, averages, state by name.

AdamW (Loshchilov & Hutter 2019), Adafactor, or Muon (Jordan et al. 2024) for the matrices of layers:
momentum, orthogonalized by 5 steps of Newton-Schulz, with AdamW for everything else (embeddings, head, norms, biases,
position tables, stacked experts). Muon's updates are scaled to the size of AdamW's, by 0.2 sqrt(max(n, m)) (Liu et al.
2025, sec. 2.2), so one learning rate serves both.

Weight decay applies to tensors of two or more dimensions, embedding tables included, as in nanoGPT (a tied table is the
head's matrix). It does not apply to norms, biases, sink logits, and tables of relative biases, which are logits of
positions. Parameters without gradients are ignored.

The loss scale of fp16 (Micikevicius et al. 2018, sec. 3.2) enlarges gradients that are too small for its exponents. The
rule is that of ``torch.amp.GradScaler``: start at 2^16; a gradient that is not finite halves the scale and its step is
skipped; 2,000 steps in a row double it. Scales are powers of two, so scaling does not round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from kvad.errors import CheckpointError, ConfigError
from kvad.train.config import OptimConfig, TrainConfig
from kvad.train.optim.schedules import Plateau, Schedule

INITIAL_SCALE, PATIENCE = 2.0**16, 2000
NamedParameters = Sequence[tuple[str, nn.Parameter]]


class LossScale:
    """Loss scale of fp16; ``good`` is the number of steps since it last changed."""

    STATE = ("scale", "good")  # numbers in checkpoints

    def __init__(self, scale: float = INITIAL_SCALE, patience: int = PATIENCE) -> None:
        self.scale, self.good, self._patience = scale, 0, patience

    def update(self, norm: float) -> bool:
        """Return True if a step with this gradient norm is taken; adjust the scale."""
        if not math.isfinite(norm):
            self.scale, self.good = self.scale / 2, 0
            return False
        self.good += 1
        if self.good == self._patience:
            self.scale, self.good = self.scale * 2, 0
        return True


def uses_weight_decay(name: str, parameter: Tensor) -> bool:
    is_excluded = any("norm" in part or part == "relative_bias" for part in name.split("."))
    return parameter.dim() >= 2 and not is_excluded


def uses_muon(name: str, parameter: Tensor) -> bool:
    """Return True for a matrix of a layer."""
    layers = name.startswith(("decoder.layers.", "encoder.layers."))
    return layers and parameter.dim() == 2 and uses_weight_decay(name, parameter)


class OptimizersContainer:
    """Turns gradients into a step: ``begin_step``, gradients, ``clip_grad_norm``, ``step``.

    ``width`` is the model's hidden size, for ``optim.noam_factor``. Raises ConfigError if the optimizer does not fit
    the model.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, train: TrainConfig, width: int | None = None) -> None:
        self._config = config
        self.schedule = Schedule(config, train, width)
        self._named: NamedParameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.optimizers = _make_optimizers(self._named, config)
        self.scale = LossScale() if train.precision == "fp16" else None
        self.averages = WeightAverager(self._named, config) if config.ema_decay or config.average_last else None

    def begin_step(self, step: int, elapsed: float) -> float:
        """Clear gradients for optimizer step ``step`` (from 0) and return its learning rate."""
        rate = self.schedule.lr(step, elapsed)
        for optimizer in self.optimizers:
            matrices = isinstance(optimizer, torch.optim.Muon) and self._config.muon_lr is not None
            for group in optimizer.param_groups:
                group["lr"] = rate * (self._config.muon_lr / self.schedule.peak) if matrices else rate  # type: ignore[operator]
            optimizer.zero_grad(set_to_none=True)
        return rate

    def scaled_total(self, total: int) -> float:
        """Return the divisor of the summed loss, so that gradients are enlarged by the loss scale."""
        return total if self.scale is None else total / self.scale.scale

    def clip_grad_norm(self) -> float:
        """Unscale the gradient, clip it to optim.max_grad_norm, and return its norm before clipping."""
        for _, parameter in self._named:
            if self.scale is not None and parameter.grad is not None:
                parameter.grad.div_(self.scale.scale)
        parameters = [parameter for _, parameter in self._named]
        return float(nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm))

    def can_continue(self, norm: float) -> bool:
        """Return True if training can continue: the norm is finite or a loss scale above 1 may be the cause."""
        return norm < float("inf") or (self.scale is not None and self.scale.scale > 1.0)

    def step(self, norm: float) -> None:
        """Update the parameters; if ``norm`` is not finite, only the loss scale changes."""
        if self.scale is None or self.scale.update(norm):
            for optimizer in self.optimizers:
                optimizer.step()
        if self.averages is not None:
            self.averages.update()

    def on_evaluation(self, loss: float) -> None:
        """Pass the loss of an evaluation to the schedule."""
        if self.schedule.plateau is not None:
            self.schedule.plateau.observe(loss)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are those to evaluate and save."""
        return nullcontext() if self.averages is None else self.averages.applied()

    @property
    def _counters(self) -> dict[str, Plateau | LossScale]:
        """State that is not of a parameter, by its name in checkpoints."""
        counters = {"plateau": self.schedule.plateau, "loss_scale": self.scale}
        return {name: counter for name, counter in counters.items() if counter is not None}

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state of all parameters as "exp_avg.NAME", "step.NAME" and so on.

        Also ``plateau`` and ``loss_scale`` (float64), and the tensors of ``WeightAverager.state_tensors``.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._named:
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"{key}.{name}"] = value
        for name, counter in self._counters.items():
            tensors[name] = torch.tensor([getattr(counter, key) for key in counter.STATE], dtype=torch.float64)
        return tensors if self.averages is None else {**tensors, **self.averages.state_tensors()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load copies of the state, CheckpointError if it does not fit; a parameter without one had no gradient yet."""
        names = {parameter: name for name, parameter in self._named}
        for optimizer in self.optimizers:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                name, shapes = names[parameter], _state_shapes(optimizer, parameter.shape)
                if any(f"{key}.{name}" in tensors for key in shapes):
                    for key, shape in shapes.items():
                        value = checked_tensor(tensors, f"{key}.{name}", shape)
                        device = "cpu" if key == "step" else parameter.device
                        optimizer.state[parameter][key] = value.to(device, copy=True)
        for name, counter in self._counters.items():
            numbers = checked_tensor(tensors, name, (len(counter.STATE),)).tolist()
            vars(counter).update(zip(counter.STATE, numbers, strict=True))
        if self.averages is not None:
            self.averages.load_state_tensors(tensors)


def _state_shapes(optimizer: torch.optim.Optimizer, shape: torch.Size) -> dict[str, torch.Size]:
    """Return the shapes of an optimizer's state of a parameter of ``shape``."""
    if isinstance(optimizer, torch.optim.AdamW):
        return {"exp_avg": shape, "exp_avg_sq": shape, "step": torch.Size()}
    if isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer": shape}
    assert isinstance(optimizer, Adafactor)
    return {**adafactor_shapes(shape, averaged=optimizer.defaults["beta1"] is not None), "step": torch.Size()}


# ---------------------------------------------------------------- optimizers


def _make_optimizers(named: NamedParameters, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Build the optimizers; their learning rates are set at the start of each step."""
    if config.name == "adafactor":
        assert config.decay_rate and config.clip_threshold and config.scale_parameter is not None
        groups, scaled = _groups(named, config.weight_decay), config.scale_parameter
        options = {"decay_rate": config.decay_rate, "update_clip": config.clip_threshold}
        return [Adafactor(groups, lr=1.0, beta1=config.beta1, scale_by_parameter=scaled, **options)]
    if config.name == "adamw":
        return [_adamw(named, config)]
    matrices = [parameter for name, parameter in named if uses_muon(name, parameter)]
    if not matrices:
        raise ConfigError("optim.name: 'muon' needs trained matrices of layers, and there are none", "Use adamw.")
    assert config.momentum is not None
    muon = torch.optim.Muon(
        matrices, weight_decay=config.weight_decay, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"
    )
    others = [(name, parameter) for name, parameter in named if not uses_muon(name, parameter)]
    return [muon, _adamw(others, config)] if others else [muon]


def _groups(named: NamedParameters, weight_decay: float) -> list[dict[str, object]]:
    """Return the parameter groups with and without weight decay, without empty ones."""
    groups = list[dict[str, object]]()
    for decays, decay in ((True, weight_decay), (False, 0.0)):
        if parameters := [p for name, p in named if uses_weight_decay(name, p) == decays]:
            groups.append({"params": parameters, "weight_decay": decay})
    return groups


def _adamw(named: NamedParameters, config: OptimConfig) -> torch.optim.AdamW:
    """Build AdamW, fused if torch supports it on the parameters' device (CPU and CUDA)."""
    assert config.beta1 is not None and config.beta2 is not None and config.eps is not None
    fused = all(p.device.type in ("cpu", "cuda") for _, p in named)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(_groups(named, config.weight_decay), betas=betas, eps=config.eps, fused=fused)


# ---------------------------------------------------------------- Adafactor

SQUARE_EPS, MIN_SCALE = 1e-30, 1e-3  # eps1 and eps2 of the paper


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer & Stern 2018, Algorithms 4 and 5): factored second moments, n + m numbers for n x m.

    For a matrix X with gradient G at its step t, with beta = 1 - t^-decay_rate and means over one dimension::

        R <- beta R + (1 - beta) mean over columns of (G^2 + 1e-30)        C likewise, over rows
        U <- G / sqrt(R C^T / mean(R))                                     for a vector: G / sqrt(V)
        U <- U / max(1, rms(U) / update_clip)
        X <- X - a U,  a = lr max(1e-3, rms(X))                            without scale_by_parameter: a = lr

    ``beta1`` adds a moving average of a U, as in T5's code. Weight decay first subtracts ``a weight_decay X``. A tensor
    with more dimensions is factored over its last two. State of a parameter [.., n, m]: ``step`` [], ``row`` [.., n],
    ``column`` [.., m]; for a vector ``square`` instead of both; with ``beta1`` also ``average`` of its shape.
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
            for key, shape in adafactor_shapes(grad.shape, averaged=group["beta1"] is not None).items():
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


def adafactor_shapes(shape: torch.Size, *, averaged: bool) -> dict[str, torch.Size]:
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


# ---------------------------------------------------------------- weight averaging


class WeightAverager:
    """Average of ``parameters``, updated after every step, for evaluations and checkpoints.

    ``ema_decay`` d: a moving average (Polyak & Juditsky 1992), after t steps::

        A_t = (1 - d) sum over i <= t of d^(t - i) W_i / (1 - d^t)

    of the weights W_i after each step; the divisor corrects for the start at zero (Kingma & Ba 2015, sec. 3), so the
    initial random weights have no share in it. ``average_last``: the mean of the last k copies of the weights, one
    every ``average_interval`` steps (Vaswani et al. 2017, sec. 6.1, average the last 5 checkpoints).
    """

    def __init__(self, parameters: NamedParameters, config: OptimConfig) -> None:
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
        """Replace the parameters by the average, if any, within the block; only pointers change, so no bit is lost."""
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
        """Load the state, CheckpointError if it does not fit; the parameters become the trained weights."""
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
