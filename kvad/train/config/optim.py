"""[optim] of a run file: how a gradient becomes a step.

Every optimizer and every schedule has keys of its own.  One that is left out gets the default of what was chosen, so
that a stored run says the number that it ran with; one that means nothing to what was chosen is refused by name.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from kvad.errors import ConfigError

Default = float | str | None
# Keys that only some know, and what they are where they are left out (None: it stays open, and means something).
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
    """``name``: ``adamw``, ``adafactor`` or ``muon``.  ``schedule``: the learning rate's path (``schedules.py``).

    The rate rises over ``warmup`` steps (None: a tenth of the run, 100 steps at most) to ``lr``, and falls to
    ``min_lr`` as the schedule says; with ``train.minutes`` it follows the elapsed share of the time.  ``weight_decay``
    applies to matrices and embeddings (``optim.py``); ``clip``: the largest norm of a step's gradient.

    Of AdamW, and of what Muon leaves to it: ``beta1``, ``beta2``, ``eps``.  Of Muon: ``momentum``, and ``matrix_lr``
    (None: as ``lr``), the highest rate of the matrices.  Of Adafactor (``adafactor.py``): ``beta1`` (None: no first
    moment), ``decay_rate``, ``update_clip``, ``scale_by_parameter``.

    Of ``wsd``: ``decay_share`` of the run, at its end, in which the rate falls by ``decay_form``.  Of
    ``inverse-sqrt``: ``factor``, from which the highest rate follows in the place of ``lr``: factor / sqrt(width *
    warmup).  Of ``plateau``: after more than ``patience`` evaluations without a better loss, the rate is multiplied by
    ``decrease``.

    Averages of the weights, which are then what is evaluated and saved (``averaging.py``): ``ema`` (0: none), the decay
    of a moving average; ``average`` (0: none), how many of the weights kept every ``average_every`` steps.
    """

    lr: float | None = None
    min_lr: float | None = None
    warmup_steps: int | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    name: Literal["adamw", "adafactor", "muon"] = "adamw"
    schedule: Literal["cosine", "linear", "wsd", "inverse-sqrt", "plateau", "constant", "relative"] = "cosine"
    momentum: float | None = None
    muon_lr: float | None = None
    decay_rate: float | None = None
    clip_threshold: float | None = None
    scale_parameter: bool | None = None
    decay_fraction: float | None = None
    decay_form: Literal["linear", "sqrt"] | None = None
    noam_factor: float | None = None
    plateau_patience: int | None = None
    plateau_factor: float | None = None
    ema_decay: float = 0.0
    average_last: int = 0
    average_interval: int | None = None

    def __post_init__(self) -> None:
        _fill_defaults(self, "name", OPTIMIZERS)
        _fill_defaults(self, "schedule", SCHEDULES)
        _check_rates(self)
        _check_optimizer(self)
        _check_averages(self)


def _fill_defaults(config: OptimConfig, choice: str, tables: Mapping[str, Mapping[str, Default]]) -> None:
    """Defaults of the table that was chosen; ConfigError for a key that only others have."""
    chosen = getattr(config, choice)
    own = tables.get(chosen)
    if own is None:
        raise ConfigError(f"optim.{choice}: {chosen!r} is not one of {', '.join(map(repr, tables))}")
    for key in sorted({key for table in tables.values() for key in table}):
        if key not in own and getattr(config, key) is not None:
            knows = ", ".join(repr(name) for name, table in tables.items() if key in table)
            raise ConfigError(f"optim.{key}: means nothing with optim.{choice} = {chosen!r}", f"it is for {knows}")
        if key in own and getattr(config, key) is None:
            object.__setattr__(config, key, own[key])  # frozen from here on


def _check_rates(config: OptimConfig) -> None:
    if config.schedule == "inverse-sqrt":
        if config.lr is not None and config.noam_factor is not None:
            raise ConfigError(
                "optim.noam_factor: the highest rate follows from it, and optim.lr is given too", "keep one"
            )
        if config.lr is None and config.noam_factor is None:
            object.__setattr__(config, "lr", 1e-3)
        require(
            config.warmup_steps is None or config.warmup_steps >= 1,
            "optim.warmup_steps",
            config.warmup_steps,
            "1 or more: it is a divisor",
        )
    if config.schedule == "relative" and config.name != "adafactor":
        raise ConfigError(f"optim.schedule: 'relative' is Adafactor's, and optim.name is {config.name!r}")
    for name in ("lr", "noam_factor"):
        value = getattr(config, name)
        require(value is None or value > 0, f"optim.{name}", value, "above 0")
    require(
        config.warmup_steps is None or config.warmup_steps >= 0, "optim.warmup_steps", config.warmup_steps, "0 or more"
    )
    if config.min_lr is not None:
        assert config.lr is not None, "every schedule with a last rate has a first"
        require(config.min_lr >= 0, "optim.min_lr", config.min_lr, "0 or more")
        require(config.min_lr <= config.lr, "optim.min_lr", config.min_lr, f"at most lr {config.lr}")
    share, patience, decrease = config.decay_fraction, config.plateau_patience, config.plateau_factor
    require(share is None or 0 < share <= 1, "optim.decay_fraction", share, "above 0, and at most 1")
    require(patience is None or patience >= 0, "optim.plateau_patience", patience, "0 or more")
    require(decrease is None or 0 < decrease < 1, "optim.plateau_factor", decrease, "between 0 and 1")


def _check_optimizer(config: OptimConfig) -> None:
    for name in ("eps", "max_grad_norm", "clip_threshold", "muon_lr", "decay_rate"):
        value = getattr(config, name)
        require(value is None or value > 0, f"optim.{name}", value, "above 0")
    require(config.weight_decay >= 0, "optim.weight_decay", config.weight_decay, "0 or more")
    for name in ("beta1", "beta2", "momentum"):
        value = getattr(config, name)
        require(value is None or 0 <= value < 1, f"optim.{name}", value, "in [0, 1)")
    if config.muon_lr is not None and config.lr is None:
        raise ConfigError("optim.muon_lr: with optim.noam_factor there is no optim.lr that it could stand beside")


def _check_averages(config: OptimConfig) -> None:
    require(0 <= config.ema_decay < 1, "optim.ema_decay", config.ema_decay, "in [0, 1)")
    require(config.average_last >= 0, "optim.average_last", config.average_last, "0 or more")
    if config.ema_decay and config.average_last:
        raise ConfigError("optim.average_last: with optim.ema_decay there would be two averages", "keep one")
    if config.average_last and config.average_interval is None:
        raise ConfigError(
            "optim.average_interval is missing",
            f"how many steps lie between the {config.average_last} weights averaged",
        )
    if config.average_interval is not None:
        if not config.average_last:
            raise ConfigError(
                "optim.average_interval: means nothing without optim.average_last", "how many are averaged"
            )
        require(config.average_interval >= 1, "optim.average_interval", config.average_interval, "at least 1")


def require(holds: bool, where: str, value: object, must: str) -> None:
    """ConfigError where it does not hold."""
    if not holds:
        raise ConfigError(f"{where}: must be {must}, found {value}")


assert {f.name for f in fields(OptimConfig)} >= {
    key for t in (OPTIMIZERS, SCHEDULES) for own in t.values() for key in own
}
