"""What makes a step of a gradient: optimizer, schedule, clipping, loss scale and averages, and their state by name.

AdamW (Loshchilov & Hutter 2019), Adafactor (``adafactor.py``), or Muon (Jordan et al. 2024) for the matrices of layers:
momentum, orthogonalised by 5 steps of Newton-Schulz, with AdamW for everything else (embeddings, head, norms, biases,
tables of positions, stacked experts).  Muon's updates are scaled to the size of AdamW's, by 0.2 sqrt(max(n, m)) (Liu et
al. 2025, sec. 2.2), so one learning rate does for both.

What decays: tensors of two or more dimensions, the embedding tables among them, as in nanoGPT (a tied table is the
head's matrix).  What does not: norms, biases, sink logits, and tables of relative biases, which are positions' logits.
A parameter that needs no gradient is left alone.

The loss scale of fp16 (Micikevicius et al. 2018, sec. 3.2): gradients too small for its exponents are made larger.

The rule is that of ``torch.amp.GradScaler``: begin at 2^16; a gradient that is not finite halves the scale and its step
is left out; 2,000 steps in a row that were taken double it.  Scales are powers of two, so scaling rounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from kvad.errors import CheckpointError, ConfigError
from kvad.train.config import OptimConfig, TrainConfig
from kvad.train.optim.adafactor import Adafactor
from kvad.train.optim.schedules import Schedule
from kvad.train.optim.weight_averaging import WeightAverager

START, PATIENCE = 2.0**16, 2000


class LossScale:
    """``state``: (scale, steps taken since it last changed), all there is to remember."""

    def __init__(self, scale: float = START, patience: int = PATIENCE) -> None:
        self.scale, self.good, self._patience = scale, 0, patience

    def update(self, norm: float) -> bool:
        """Of a step's gradient, its norm: whether the step is to be taken.  Changes the scale for the next one."""
        if not math.isfinite(norm):
            self.scale, self.good = self.scale / 2, 0
            return False
        self.good += 1
        if self.good == self._patience:
            self.scale, self.good = self.scale * 2, 0
        return True

    @property
    def at_minimum(self) -> bool:
        """Whether a gradient that is not finite cannot be the scale's fault any more."""
        return self.scale <= 1.0

    @property
    def state(self) -> tuple[float, float]:
        return self.scale, float(self.good)

    @state.setter
    def state(self, numbers: tuple[float, float]) -> None:
        self.scale, self.good = numbers[0], int(numbers[1])


NamedParameters = list[tuple[str, nn.Parameter]]


def uses_weight_decay(name: str, parameter: Tensor) -> bool:
    return parameter.dim() >= 2 and "relative" not in name.split(".") and not _of_norm(name)


def uses_muon(name: str, parameter: Tensor) -> bool:
    """Whether it is a matrix of a layer."""
    layers = name.startswith(("decoder.layers.", "encoder.layers."))
    return layers and parameter.dim() == 2 and uses_weight_decay(name, parameter)


def _of_norm(name: str) -> bool:
    return any("norm" in part for part in name.split("."))


class OptimizersContainer:
    """What makes a step of a gradient: ``begin``, then gradients are added, then ``norm`` and ``step``.

    ``width``: the model's, for ``optim.factor``.  ConfigError for what cannot be made for this model.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, train: TrainConfig, width: int | None = None) -> None:
        self._config = config
        self.schedule = Schedule(config, train, width)
        self._named: NamedParameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.optimizers = _make_optimizers(self._named, config)
        self.scale = LossScale() if train.precision == "fp16" else None
        self.averages = WeightAverager(self._named, config) if config.ema_decay or config.average_last else None

    def begin_step(self, step: int, elapsed: float) -> float:
        """Of optimizer step ``step`` (from 0): no gradient yet; its learning rate."""
        rate = self.schedule.lr(step, elapsed)
        for optimizer in self.optimizers:
            matrices = isinstance(optimizer, torch.optim.Muon) and self._config.muon_lr is not None
            for group in optimizer.param_groups:
                group["lr"] = rate * (self._config.muon_lr / self.schedule.peak) if matrices else rate  # type: ignore[operator]
            optimizer.zero_grad(set_to_none=True)
        return rate

    def scaled_total(self, total: int) -> float:
        """What an objective divides its summed loss by, so that the gradient is as large as the loss scale says."""
        return total if self.scale is None else total / self.scale.scale

    def clip_grad_norm(self) -> float:
        """Of the gradient, unscaled; it is at most ``clip`` from then on."""
        parameters = [parameter for _, parameter in self._named]
        if self.scale is not None:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.scale.scale)
        return float(nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm))

    def can_continue(self, norm: float) -> bool:
        """Whether training can go on from a gradient of this norm: not finite, it may be the loss scale's fault."""
        return norm < float("inf") or (self.scale is not None and not self.scale.at_minimum)

    def step(self, norm: float) -> None:
        """Nothing is changed by a gradient whose ``norm`` is not finite, but the loss scale."""
        if self.scale is None or self.scale.update(norm):
            for optimizer in self.optimizers:
                optimizer.step()
        if self.averages is not None:
            self.averages.update()

    def on_evaluation(self, loss: float) -> None:
        """Tell the schedule what an evaluation has found."""
        if self.schedule.plateau is not None:
            self.schedule.plateau.observe(loss)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Within it the model's parameters are what is evaluated and saved: an average, where [optim] asks for one."""
        return nullcontext() if self.averages is None else self.averages.applied()

    # ------------------------------------------------------------ what a checkpoint keeps

    def state_tensors(self) -> dict[str, Tensor]:
        """``{"exp_avg.NAME": ..., "exp_avg_sq.NAME": ..., "step.NAME": ...}`` and the like, as far as there is a state.

        Beside them ``plateau``, ``loss_scale`` (float64), and what :meth:`Averages.tensors` says.
        """
        found: dict[str, Tensor] = {}
        for name, parameter in self._named:
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"{key}.{name}"] = value
        if self.schedule.plateau is not None:
            found["plateau"] = torch.tensor(self.schedule.plateau.state, dtype=torch.float64)
        if self.scale is not None:
            found["loss_scale"] = torch.tensor(self.scale.state, dtype=torch.float64)
        return found if self.averages is None else {**found, **self.averages.state_tensors()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The reverse, into memory of its own.  Raises CheckpointError for a state that does not fit the model.

        A parameter of which nothing is stored has had no gradient yet.
        """
        names = {parameter: name for name, parameter in self._named}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = _read_state(optimizer, names[parameter], parameter, tensors)
                    if state:
                        optimizer.state[parameter] = state
        if self.schedule.plateau is not None:
            scale, best, bad = _numbers(tensors, "plateau", 3)
            self.schedule.plateau.state = scale, best, bad
        if self.scale is not None:
            size, good = _numbers(tensors, "loss_scale", 2)
            self.scale.state = size, good
        if self.averages is not None:
            self.averages.load_state_tensors(tensors)


def _numbers(tensors: Mapping[str, Tensor], name: str, count: int) -> list[float]:
    found = tensors.get(name)
    if found is None or found.shape != (count,):
        raise CheckpointError(f"training state {name} is missing, or no {count} numbers")
    return [float(number) for number in found.tolist()]


def _read_state(
    optimizer: torch.optim.Optimizer, name: str, parameter: Tensor, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """One parameter's, copied; none at all is none yet."""
    shapes = _shapes(optimizer, parameter)
    if not any(f"{key}.{name}" in tensors for key in shapes):
        return {}
    state = {}
    for key, shape in shapes.items():
        found = tensors.get(f"{key}.{name}")
        if found is None or found.shape != shape:
            there = "missing" if found is None else f"of shape {list(found.shape)}"
            raise CheckpointError(f"training state {key}.{name} is {there}, expected {list(shape)}")
        state[key] = found.clone() if key == "step" else found.to(parameter.device, copy=True)
    return state


def _shapes(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, torch.Size]:
    """What an optimizer keeps of a parameter."""
    whole = parameter.shape
    if isinstance(optimizer, torch.optim.AdamW):
        return {"exp_avg": whole, "exp_avg_sq": whole, "step": torch.Size()}
    if isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer": whole}
    assert isinstance(optimizer, Adafactor)
    kept = {"square": whole}
    if parameter.dim() >= 2:
        kept = {"row": whole[:-1], "column": torch.Size((*whole[:-2], whole[-1]))}
    first = {"average": whole} if optimizer.defaults["beta1"] is not None else {}
    return {**kept, **first, "step": torch.Size()}


# ---------------------------------------------------------------- optimizers


def _make_optimizers(named: NamedParameters, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Their learning rates are set at each step's beginning."""
    if config.name == "adafactor":
        assert config.decay_rate and config.clip_threshold and config.scale_parameter is not None
        made: torch.optim.Optimizer = Adafactor(
            _groups(named, config.weight_decay),
            lr=1.0,
            beta1=config.beta1,
            decay_rate=config.decay_rate,
            update_clip=config.clip_threshold,
            scale_by_parameter=config.scale_parameter,
        )
        return [made]
    if config.name == "adamw":
        return [_adamw(named, config)]
    matrices = [parameter for name, parameter in named if uses_muon(name, parameter)]
    if not matrices:
        raise ConfigError("optim.name: muon is for matrices of layers, and there is none to train here", "use adamw")
    assert config.momentum is not None
    muon = torch.optim.Muon(
        matrices, weight_decay=config.weight_decay, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"
    )
    others = [(name, parameter) for name, parameter in named if not uses_muon(name, parameter)]
    return [muon, _adamw(others, config)] if others else [muon]


def _groups(named: NamedParameters, weight_decay: float) -> list[dict[str, object]]:
    """What decays, and what does not; a group without parameters is left out."""
    groups: list[dict[str, object]] = [
        {"params": [p for n, p in named if uses_weight_decay(n, p)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if not uses_weight_decay(n, p)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(named: NamedParameters, config: OptimConfig) -> torch.optim.AdamW:
    """Fused where torch has it for the parameters' device (CPU and CUDA)."""
    assert config.beta1 is not None and config.beta2 is not None and config.eps is not None
    fused = all(p.device.type in ("cpu", "cuda") for _, p in named)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(_groups(named, config.weight_decay), betas=betas, eps=config.eps, fused=fused)
