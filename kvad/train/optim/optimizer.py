"""Optimizer step: optimizers, schedule, clipping, loss scale, averages, state by name.

AdamW (Loshchilov & Hutter 2019), Adafactor (``adafactor.py``), or Muon (Jordan et al. 2024) for the matrices of layers:
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
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from kvad.errors import ConfigError
from kvad.train.config import OptimConfig, TrainConfig
from kvad.train.optim.adafactor import Adafactor, state_shapes
from kvad.train.optim.schedules import Plateau, Schedule
from kvad.train.optim.weight_averaging import WeightAverager, checked_tensor

INITIAL_SCALE, PATIENCE = 2.0**16, 2000


class LossScale:
    """Loss scale of fp16; ``state`` is (scale, steps since it last changed)."""

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

    @property
    def state(self) -> tuple[float, ...]:
        return self.scale, float(self.good)

    @state.setter
    def state(self, numbers: tuple[float, ...]) -> None:
        self.scale, self.good = numbers[0], int(numbers[1])


NamedParameters = list[tuple[str, nn.Parameter]]


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

    # ------------------------------------------------------------ state

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
            tensors[name] = torch.tensor(counter.state, dtype=torch.float64)
        return tensors if self.averages is None else {**tensors, **self.averages.state_tensors()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load copies of the state; raise CheckpointError if it does not fit the model.

        A parameter without stored state had no gradient yet.
        """
        names = {parameter: name for name, parameter in self._named}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = _read_state(optimizer, names[parameter], parameter, tensors)
                    if state:
                        optimizer.state[parameter] = state
        for name, counter in self._counters.items():
            counter.state = tuple(checked_tensor(tensors, name, (len(counter.state),)).tolist())
        if self.averages is not None:
            self.averages.load_state_tensors(tensors)


def _read_state(
    optimizer: torch.optim.Optimizer, name: str, parameter: Tensor, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a copy of one parameter's state; {} if nothing is stored."""
    shapes = _shapes(optimizer, parameter)
    if not any(f"{key}.{name}" in tensors for key in shapes):
        return {}
    state = {key: checked_tensor(tensors, f"{key}.{name}", shape) for key, shape in shapes.items()}
    return {
        key: value.clone() if key == "step" else value.to(parameter.device, copy=True) for key, value in state.items()
    }


def _shapes(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, torch.Size]:
    """Return the shapes of an optimizer's state of a parameter."""
    shape = parameter.shape
    if isinstance(optimizer, torch.optim.AdamW):
        return {"exp_avg": shape, "exp_avg_sq": shape, "step": torch.Size()}
    if isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer": shape}
    assert isinstance(optimizer, Adafactor)
    return {**state_shapes(shape, averaged=optimizer.defaults["beta1"] is not None), "step": torch.Size()}


# ---------------------------------------------------------------- optimizers


def _make_optimizers(named: NamedParameters, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Build the optimizers; their learning rates are set at the start of each step."""
    if config.name == "adafactor":
        assert config.decay_rate and config.clip_threshold and config.scale_parameter is not None
        adafactor: torch.optim.Optimizer = Adafactor(
            _groups(named, config.weight_decay),
            lr=1.0,
            beta1=config.beta1,
            decay_rate=config.decay_rate,
            update_clip=config.clip_threshold,
            scale_by_parameter=config.scale_parameter,
        )
        return [adafactor]
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
