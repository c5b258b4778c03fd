"""[optim] of a run file: optimizer, schedule, clipping and averages.

Every optimizer and schedule has its own keys. A key that is left out gets the default of the chosen one, so a stored
run names the numbers that it used; a key without meaning for the chosen one is refused by name. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from kvad import config as cfg
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

    lr: cfg.PositiveFloat | None = None
    min_lr: cfg.NonNegativeFloat | None = None
    warmup_steps: cfg.NonNegativeInt | None = None  # None: a tenth of the run, at most 100 steps
    beta1: cfg.Fraction | None = None
    beta2: cfg.Fraction | None = None
    eps: cfg.PositiveFloat | None = None
    weight_decay: cfg.NonNegativeFloat = 0.1  # of matrices and embeddings (`optim/optimizer.py`)
    max_grad_norm: cfg.PositiveFloat = 1.0
    name: Literal["adamw", "adafactor", "muon"] = "adamw"
    schedule: Literal["cosine", "linear", "wsd", "inverse-sqrt", "plateau", "constant", "relative"] = "cosine"
    momentum: cfg.Fraction | None = None  # muon
    muon_lr: cfg.PositiveFloat | None = None  # highest rate of muon's matrices; None: lr
    decay_rate: cfg.PositiveFloat | None = None  # adafactor (`optim/optimizer.py`)
    clip_threshold: cfg.PositiveFloat | None = None  # adafactor
    scale_parameter: bool | None = None  # adafactor
    # wsd: last share of the run, in which the rate falls
    decay_fraction: Annotated[float, cfg.Range(0, 1, above=True)] | None = None
    decay_form: Literal["linear", "sqrt"] | None = None  # wsd
    # inverse-sqrt: lr = noam_factor / sqrt(hidden_size * warmup_steps)
    noam_factor: cfg.PositiveFloat | None = None
    plateau_patience: cfg.NonNegativeInt | None = None  # plateau: evaluations without improvement
    plateau_factor: cfg.OpenFraction | None = None  # plateau: the rate is multiplied by it
    ema_decay: cfg.Fraction = 0.0  # decay of a moving average of the weights; 0: none
    average_last: cfg.NonNegativeInt = 0  # number of averaged copies of the weights; 0: none
    average_interval: cfg.PositiveInt | None = None  # steps between these copies

    def __post_init__(self) -> None:
        _fill_defaults(self, "name", OPTIMIZERS)
        _fill_defaults(self, "schedule", SCHEDULES)
        if self.schedule == "inverse-sqrt" and self.lr is None and self.noam_factor is None:
            object.__setattr__(self, "lr", 1e-3)
        cfg.check_fields(self, "optim")
        _check_combinations(self)


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


def _check_combinations(config: OptimConfig) -> None:
    """Raise ConfigError for values that contradict each other."""
    if config.schedule == "inverse-sqrt":
        if config.lr is not None and config.noam_factor is not None:
            raise ConfigError("optim.noam_factor: must not be given together with optim.lr", "Keep one.")
        if config.warmup_steps == 0:
            raise ConfigError("optim.warmup_steps: must be at least 1, got 0")
    if config.schedule == "relative" and config.name != "adafactor":
        raise ConfigError(f"optim.schedule: 'relative' requires optim.name 'adafactor', got {config.name!r}")
    if config.min_lr is not None:
        assert config.lr is not None, "every schedule with min_lr has lr"
        if config.min_lr > config.lr:
            raise ConfigError(f"optim.min_lr: must be at most lr {config.lr}, got {config.min_lr}")
    if config.muon_lr is not None and config.lr is None:
        raise ConfigError("optim.muon_lr: must not be given with optim.noam_factor, which replaces optim.lr")
    if config.ema_decay and config.average_last:
        raise ConfigError("optim.average_last: must not be given together with optim.ema_decay", "Keep one.")
    if config.average_last and config.average_interval is None:
        raise ConfigError(
            "optim.average_interval: must be given with optim.average_last",
            f"It is the number of steps between the {config.average_last} averaged copies.",
        )
    if config.average_interval is not None and not config.average_last:
        raise ConfigError("optim.average_interval: has no meaning without optim.average_last", "Give both.")
