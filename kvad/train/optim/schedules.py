"""The learning rate's path: a function of the step, of the elapsed time, and, of a plateau, of the validation loss.

With s the optimizer step from 0, t = s + 1, w steps of warmup, n steps in all, and r = (s - w) / (n - w), how far the
run is behind the warmup (where the clock ends it, the elapsed share of the time if that is further)::

    cosine        min + (lr - min) (1 + cos(pi r)) / 2                        (Loshchilov & Hutter 2017; nanoGPT's form)
    linear        lr + (min - lr) r
    wsd           lr until the last share of the run, in which it falls to min: warmup-stable-decay (Hu et al. 2024);
                  with q from 0 to 1 in it, by 1 - q, or by 1 - sqrt(q) (Haegele et al. 2024)
    inverse-sqrt  lr min(t / w, sqrt(w / t)); with a factor, lr is factor / sqrt(width w), which is Vaswani et al. 2017,
                  eq. 3, times the factor: factor width^-0.5 min(t^-0.5, t w^-1.5)
    plateau       lr times a scale that falls when evaluations no longer find a better loss (:class:`Plateau`)
    constant      lr
    relative      min(lr, 1 / sqrt(t)) (Shazeer & Stern 2018, Algorithm 5), which Adafactor multiplies by the size of
                  the parameter; there is no warmup

For s < w the rate is lr (s + 1) / (w + 1), but for the last and for inverse-sqrt, whose rise is in its formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvad.errors import ConfigError
from kvad.train.config import OptimConfig, TrainConfig

MIN_IMPROVEMENT = 1e-4  # a loss is better where it is lower by more than this share of the best


class Plateau:
    """A scale, multiplied by ``decrease`` after more than ``patience`` evaluations in a row without a better loss.

    The rule of ``torch.optim.lr_scheduler.ReduceLROnPlateau`` (relative threshold 1e-4), as plain numbers: ``state`` is
    all there is to it.
    """

    def __init__(self, patience: int, decrease: float) -> None:
        self._patience, self._decrease = patience, decrease
        self.scale, self.best, self.bad = 1.0, math.inf, 0

    def observe(self, loss: float) -> None:
        """After an evaluation; a loss that is no number is no better one."""
        if loss < self.best * (1 - MIN_IMPROVEMENT):
            self.best, self.bad = loss, 0
            return
        self.bad += 1
        if self.bad > self._patience:
            self.scale, self.bad = self.scale * self._decrease, 0

    @property
    def state(self) -> tuple[float, float, float]:
        return self.scale, self.best, float(self.bad)

    @state.setter
    def state(self, numbers: tuple[float, float, float]) -> None:
        self.scale, self.best, self.bad = numbers[0], numbers[1], int(numbers[2])


class Schedule:
    """``width``: the model's, for a highest rate that is said by ``factor``.  ConfigError where it has none."""

    def __init__(self, config: OptimConfig, train: TrainConfig, width: int | None = None) -> None:
        self._config, self._train = config, train
        self._warmup = _warmup(config, train)
        self.peak = self._peak(width)
        self.plateau: Plateau | None = None
        if config.plateau_patience is not None and config.plateau_factor is not None:
            self.plateau = Plateau(config.plateau_patience, config.plateau_factor)

    def _peak(self, width: int | None) -> float:
        if self._config.lr is not None:
            return self._config.lr
        assert self._config.noam_factor is not None, "OptimConfig has looked"
        if width is None:
            raise ConfigError(
                "optim.noam_factor: what is trained has no width that the rate could follow from", "set lr"
            )
        return self._config.noam_factor / math.sqrt(width * self._warmup)

    def lr(self, step: int, elapsed: float) -> float:
        """Of optimizer step ``step`` (from 0), ``elapsed`` seconds into training."""
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
        if config.decay_fraction is not None:  # the share is of the whole run, warmup and all
            done = max(step / last if last is not None else 0.0, share)
            fall = min(1.0, max(0.0, (done - (1 - config.decay_fraction)) / config.decay_fraction))
            return lr - (lr - config.min_lr) * (math.sqrt(fall) if config.decay_form == "sqrt" else fall)
        through = (step - warmup) / max(1, last - warmup) if last is not None else 0.0
        ratio = min(1.0, max(0.0, through, share))
        if config.schedule == "linear":
            return lr + (config.min_lr - lr) * ratio
        return config.min_lr + (lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * ratio))


def _warmup(config: OptimConfig, train: TrainConfig) -> int:
    if config.warmup_steps is not None:
        return config.warmup_steps
    return min(100, math.ceil((train.last_step or 1000) / 10))


def learning_rate(
    config: OptimConfig, train: TrainConfig, step: int, elapsed: float, width: int | None = None
) -> float:
    """Of optimizer step ``step`` (from 0), ``elapsed`` seconds into training; a plateau's before any evaluation."""
    return Schedule(config, train, width).lr(step, elapsed)


def schedule_differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What may change on resume, but not where evaluations decide the rate: as ``config.differences`` says it."""
    if stored["optim"]["schedule"] != "plateau":
        return []
    there, here = stored["train"]["eval_every"], wanted["train"]["eval_every"]
    return [] if there == here else [f"train.eval_interval: {there} there, {here} here (optim.schedule = 'plateau')"]
