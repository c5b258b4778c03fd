"""Learning rate schedules: functions of step, time and, for plateau, validation loss.

With s the optimizer step from 0, t = s + 1, w warmup steps, n steps in total, and r = (s - w) / (n - w), the progress
after the warmup (or the elapsed share of the time limit, if that is larger)::

    cosine        min + (lr - min) (1 + cos(pi r)) / 2                        (Loshchilov & Hutter 2017; nanoGPT's form)
    linear        lr + (min - lr) r
    wsd           lr until the last share of the run, in which it falls to min: warmup-stable-decay (Hu et al. 2024);
                  with q from 0 to 1 in it, by 1 - q, or by 1 - sqrt(q) (Haegele et al. 2024)
    inverse-sqrt  lr min(t / w, sqrt(w / t)); with noam_factor, lr is noam_factor / sqrt(width w), which is Vaswani et
                  al. 2017, eq. 3, times the factor: factor width^-0.5 min(t^-0.5, t w^-1.5)
    plateau       lr times a scale that falls when evaluations stop improving (``Plateau``)
    constant      lr
    relative      min(lr, 1 / sqrt(t)) (Shazeer & Stern 2018, Algorithm 5), which Adafactor multiplies by the size of
                  the parameter; there is no warmup

For s < w the rate is lr (s + 1) / (w + 1), except for relative and for inverse-sqrt, whose formula contains the rise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvad.errors import ConfigError
from kvad.train.config import OptimConfig, TrainConfig

MIN_IMPROVEMENT = 1e-4  # relative decrease that counts as an improvement


class Plateau:
    """Scale that falls after more than ``patience`` evaluations without improvement.

    The rule of ``torch.optim.lr_scheduler.ReduceLROnPlateau`` (relative threshold 1e-4), as plain numbers.
    """

    STATE = ("scale", "best", "bad")  # numbers in checkpoints

    def __init__(self, patience: int, decrease: float) -> None:
        self._patience, self._decrease = patience, decrease
        self.scale, self.best, self.bad = 1.0, math.inf, 0

    def observe(self, loss: float) -> None:
        """Add the loss of an evaluation; NaN is no improvement."""
        if loss < self.best * (1 - MIN_IMPROVEMENT):
            self.best, self.bad = loss, 0
            return
        self.bad += 1
        if self.bad > self._patience:
            self.scale, self.bad = self.scale * self._decrease, 0


class Schedule:
    """Learning rate of a run; ``width`` is the model's hidden size, without which noam_factor is a ConfigError."""

    def __init__(self, config: OptimConfig, train: TrainConfig, width: int | None = None) -> None:
        self._config, self._train, self.name = config, train, config.schedule
        warmup = config.warmup_steps
        self._warmup = min(100, math.ceil((train.last_step or 1000) / 10)) if warmup is None else warmup
        self.peak = self._peak(width)
        self.plateau: Plateau | None = None
        if config.plateau_patience is not None and config.plateau_factor is not None:
            self.plateau = Plateau(config.plateau_patience, config.plateau_factor)

    def _peak(self, width: int | None) -> float:
        if self._config.lr is not None:
            return self._config.lr
        assert self._config.noam_factor is not None, "OptimConfig checked it"
        if width is None:
            raise ConfigError(
                "optim.noam_factor: must not be given, the trained module has no hidden size", "Set optim.lr."
            )
        return self._config.noam_factor / math.sqrt(width * self._warmup)

    def lr(self, step: int, elapsed: float) -> float:
        """Return the rate of optimizer step ``step`` (from 0), ``elapsed`` seconds into training."""
        config, train, warmup, lr = self._config, self._train, self._warmup, self.peak
        now = step + 1
        if config.schedule == "relative":
            return min(lr, 1 / math.sqrt(now))
        if config.schedule == "inverse-sqrt":
            return lr * min(now / warmup, math.sqrt(warmup / now))
        share = elapsed / (60 * train.minutes) if train.minutes is not None else 0.0
        if step < warmup and (config.warmup_steps is not None or share < 0.1):
            return lr * now / (warmup + 1)
        if config.schedule == "constant":
            return lr
        assert config.min_lr is not None
        if self.plateau is not None:
            return max(config.min_lr, lr * self.plateau.scale)
        last = train.last_step
        if config.decay_fraction is not None:  # a fraction of the whole run, warmup included
            run_progress = max(step / last if last is not None else 0.0, share)
            fall = min(1.0, max(0.0, (run_progress - (1 - config.decay_fraction)) / config.decay_fraction))
            return lr - (lr - config.min_lr) * (math.sqrt(fall) if config.decay_form == "sqrt" else fall)
        progress = (step - warmup) / max(1, last - warmup) if last is not None else 0.0
        ratio = min(1.0, max(0.0, progress, share))
        if config.schedule == "linear":
            return lr + (config.min_lr - lr) * ratio
        return config.min_lr + (lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * ratio))


def describe_change(before: Schedule, after: Schedule, step: int, elapsed: float) -> str:
    """Describe the learning rate of step ``step`` (from 0) after a change of the run's length."""
    old, new, name = before.lr(step, elapsed), after.lr(step, elapsed), after.name
    if old == new:
        return f"learning rate: {name}, unchanged by the new length"
    return f"learning rate: {name} over the new length: {new:.2e} at step {step + 1:,}, it was {old:.2e}"


def schedule_differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return differences that matter on resume only if evaluations decide the rate (see ``config_differences``)."""
    if stored["optim"]["schedule"] != "plateau":
        return []
    there, here = stored["train"]["eval_interval"], wanted["train"]["eval_interval"]
    return [] if there == here else [f"train.eval_interval: {there} there, {here} here (optim.schedule = 'plateau')"]
