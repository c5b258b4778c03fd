"""AdamW (Loshchilov & Hutter 2019) with decay groups, warmup and cosine, and its state by parameter name.

What decays: tensors of two or more dimensions, the embedding tables among them, as in nanoGPT (a tied table is the
head's matrix).  What does not: norms, biases, sink logits, and tables of relative biases, which are positions' logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kvad.errors import CheckpointError
from kvad.train.config import OptimConfig, TrainConfig

__all__ = ["Optimization", "decays", "learning_rate"]

MOMENTS = ("exp_avg", "exp_avg_sq")


def decays(name: str, parameter: Tensor) -> bool:
    return parameter.dim() >= 2 and "relative" not in name.split(".")


def learning_rate(config: OptimConfig, train: TrainConfig, step: int, elapsed: float) -> float:
    """Of optimizer step ``step`` (from 0), ``elapsed`` seconds into training.

    With steps alone this is nanoGPT's schedule: lr (s + 1) / (w + 1) for s < w, then
    min_lr + (lr - min_lr) (1 + cos(pi r)) / 2 with r = (s - w) / (steps - w).
    With minutes, r is the elapsed share of the time if that is further.
    """
    last = train.last_step
    share = elapsed / (60 * train.minutes) if train.minutes is not None else 0.0
    warmup = config.warmup if config.warmup is not None else min(100, math.ceil((last or 1000) / 10))
    if step < warmup and (config.warmup is not None or share < 0.1):
        return config.lr * (step + 1) / (warmup + 1)
    through = (step - warmup) / max(1, last - warmup) if last is not None else 0.0
    ratio = min(1.0, max(0.0, through, share))
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * ratio))


class Optimization:
    """What makes a step of a gradient: ``begin``, then gradients are added, then ``step``."""

    def __init__(self, model: nn.Module, config: OptimConfig, train: TrainConfig) -> None:
        self._model, self._config, self._train = model, config, train
        self.optimizer = _make_optimizer(model, config)
        self._parameters = [parameter for _, parameter in _learned(model)]

    def begin(self, step: int, elapsed: float) -> float:
        """Of optimizer step ``step`` (from 0): no gradient yet; its learning rate."""
        rate = learning_rate(self._config, self._train, step, elapsed)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        return rate

    def norm(self) -> float:
        """Of the gradient; it is at most ``clip`` from then on."""
        return float(nn.utils.clip_grad_norm_(self._parameters, self._config.clip))

    def step(self) -> None:
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """``{"exp_avg.NAME": ..., "exp_avg_sq.NAME": ..., "step.NAME": ...}`` of every parameter that has a state."""
        found: dict[str, Tensor] = {}
        for name, parameter in _learned(self._model):
            for key, value in self.optimizer.state[parameter].items():
                found[f"{key}.{name}"] = value
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The reverse, into memory of its own.  Raises CheckpointError for a state that does not fit the model."""
        for name, parameter in _learned(self._model):
            for key in MOMENTS:
                found = tensors.get(f"{key}.{name}")
                if found is None or found.shape != parameter.shape:
                    shape = "missing" if found is None else f"of shape {list(found.shape)}"
                    raise CheckpointError(f"training state {key}.{name} is {shape}, expected {list(parameter.shape)}")
            state = {key: tensors[f"{key}.{name}"].to(parameter.device, copy=True) for key in MOMENTS}
            self.optimizer.state[parameter] = {"step": tensors[f"step.{name}"].clone(), **state}


def _learned(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What is trained: all parameters, or, beside a frozen model, its adapters'."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Fused where torch has it for the parameters' device (CPU and CUDA)."""
    named = _learned(model)
    groups = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for _, p in named)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
