"""[optim] of a run file: optimizer, schedule, clipping and averages.

Every optimizer and schedule has its own keys. A key that is left out gets the default of the chosen one, so a stored
run names the numbers that it used; a key without meaning for the chosen one is refused by name. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from kvad.errors import ConfigError

Default = float | str | None
# Keys of each choice and their defaults (None is a meaningful value).
OPTIMIZERS: Mapping[str, Mapping[str, Default]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    "adafactor": {"beta1": None, "decay_rate": 0.8, "clip_threshold": 1.0, "scale_parameter": True},
    "muon": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "momentum": 0.95, "muon_lr": None},
}
SCHEDULES: Mapping[str, Mapping[str, Default]] = {
    "cosine": {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": None},
    "linear": {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": None},
    "wsd": {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": None, "decay_fraction": 0.2, "decay_form": "sqrt"},
    "inverse-sqrt": {"lr": None, "noam_factor": None, "warmup_steps": None},
    "plateau": {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": None, "plateau_patience": 3, "plateau_factor": 0.5},
    "constant": {"lr": 1e-3, "warmup_steps": None},
    "relative": {"lr": 1e-2},
}


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer, schedule and averages of a run.

    The rate rises to ``lr`` over ``warmup_steps`` and falls to ``min_lr`` by the schedule (``optim/schedules.py``);
    with ``train.minutes`` it follows the elapsed share of the time.
    """

    lr: float | None = None
    min_lr: float | None = None
    warmup_steps: int | None = None  # None: a tenth of the run, at most 100 steps
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float = 0.1  # of matrices and embeddings (`optim/optimizer.py`)
    max_grad_norm: float = 1.0
    name: Literal["adamw", "adafactor", "muon"] = "adamw"
    schedule: Literal["cosine", "linear", "wsd", "inverse-sqrt", "plateau", "constant", "relative"] = "cosine"
    momentum: float | None = None  # muon
    muon_lr: float | None = None  # highest rate of muon's matrices; None: lr
    decay_rate: float | None = None  # adafactor (`optim/adafactor.py`)
    clip_threshold: float | None = None  # adafactor
    scale_parameter: bool | None = None  # adafactor
    decay_fraction: float | None = None  # wsd: last share of the run, in which the rate falls
    decay_form: Literal["linear", "sqrt"] | None = None  # wsd
    noam_factor: float | None = None  # inverse-sqrt: lr = noam_factor / sqrt(hidden_size * warmup_steps)
    plateau_patience: int | None = None  # plateau: evaluations without improvement
    plateau_factor: float | None = None  # plateau: the rate is multiplied by it
    ema_decay: float = 0.0  # decay of a moving average of the weights; 0: none
    average_last: int = 0  # number of averaged copies of the weights; 0: none
    average_interval: int | None = None  # steps between these copies

    def __post_init__(self) -> None:
        _fill_defaults(self, "name", OPTIMIZERS)
        _fill_defaults(self, "schedule", SCHEDULES)
        _check_rates(self)
        _check_optimizer(self)
        _check_averages(self)


def _fill_defaults(config: OptimConfig, choice: str, tables: Mapping[str, Mapping[str, Default]]) -> None:
    """Set the defaults of the chosen optimizer or schedule; raise ConfigError for other keys."""
    chosen = getattr(config, choice)
    own = tables.get(chosen)
    if own is None:
        raise ConfigError(f"optim.{choice}: must be one of {', '.join(map(repr, tables))}, got {chosen!r}")
    for key in sorted({key for table in tables.values() for key in table}):
        if key not in own and getattr(config, key) is not None:
            choices = ", ".join(repr(name) for name, table in tables.items() if key in table)
            raise ConfigError(f"optim.{key}: has no meaning with optim.{choice} = {chosen!r}", f"It is for {choices}.")
        if key in own and getattr(config, key) is None:
            object.__setattr__(config, key, own[key])  # frozen afterwards


def _check_rates(config: OptimConfig) -> None:
    if config.schedule == "inverse-sqrt":
        if config.lr is not None and config.noam_factor is not None:
            raise ConfigError("optim.noam_factor: must not be given together with optim.lr", "Keep one.")
        if config.lr is None and config.noam_factor is None:
            object.__setattr__(config, "lr", 1e-3)
        require(
            config.warmup_steps is None or config.warmup_steps >= 1,
            "optim.warmup_steps",
            config.warmup_steps,
            "at least 1",
        )
    if config.schedule == "relative" and config.name != "adafactor":
        raise ConfigError(f"optim.schedule: 'relative' requires optim.name 'adafactor', got {config.name!r}")
    for name in ("lr", "noam_factor"):
        value = getattr(config, name)
        require(value is None or value > 0, f"optim.{name}", value, "above 0")
    require(
        config.warmup_steps is None or config.warmup_steps >= 0, "optim.warmup_steps", config.warmup_steps, "at least 0"
    )
    if config.min_lr is not None:
        assert config.lr is not None, "every schedule with min_lr has lr"
        require(config.min_lr >= 0, "optim.min_lr", config.min_lr, "at least 0")
        require(config.min_lr <= config.lr, "optim.min_lr", config.min_lr, f"at most lr {config.lr}")
    share, patience, decrease = config.decay_fraction, config.plateau_patience, config.plateau_factor
    require(share is None or 0 < share <= 1, "optim.decay_fraction", share, "above 0, and at most 1")
    require(patience is None or patience >= 0, "optim.plateau_patience", patience, "at least 0")
    require(decrease is None or 0 < decrease < 1, "optim.plateau_factor", decrease, "between 0 and 1")


def _check_optimizer(config: OptimConfig) -> None:
    for name in ("eps", "max_grad_norm", "clip_threshold", "muon_lr", "decay_rate"):
        value = getattr(config, name)
        require(value is None or value > 0, f"optim.{name}", value, "above 0")
    require(config.weight_decay >= 0, "optim.weight_decay", config.weight_decay, "at least 0")
    for name in ("beta1", "beta2", "momentum"):
        value = getattr(config, name)
        require(value is None or 0 <= value < 1, f"optim.{name}", value, "in [0, 1)")
    if config.muon_lr is not None and config.lr is None:
        raise ConfigError("optim.muon_lr: must not be given with optim.noam_factor, which replaces optim.lr")


def _check_averages(config: OptimConfig) -> None:
    require(0 <= config.ema_decay < 1, "optim.ema_decay", config.ema_decay, "in [0, 1)")
    require(config.average_last >= 0, "optim.average_last", config.average_last, "at least 0")
    if config.ema_decay and config.average_last:
        raise ConfigError("optim.average_last: must not be given together with optim.ema_decay", "Keep one.")
    if config.average_last and config.average_interval is None:
        raise ConfigError(
            "optim.average_interval: must be given with optim.average_last",
            f"It is the number of steps between the {config.average_last} averaged copies.",
        )
    if config.average_interval is not None:
        if not config.average_last:
            raise ConfigError("optim.average_interval: has no meaning without optim.average_last", "Give both.")
        require(config.average_interval >= 1, "optim.average_interval", config.average_interval, "at least 1")


def require(is_valid: bool, key: str, value: object, constraint: str) -> None:
    """Raise ConfigError unless ``is_valid``."""
    if not is_valid:
        raise ConfigError(f"{key}: must be {constraint}, got {value}")


assert {f.name for f in fields(OptimConfig)} >= {
    key for t in (OPTIMIZERS, SCHEDULES) for own in t.values() for key in own
}
