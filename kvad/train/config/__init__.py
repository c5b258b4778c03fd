"""Run files (TOML) as frozen dataclasses, and model presets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.train.config import run as run
    from kvad.train.config import toml as toml
    from kvad.train.config.optim import OptimConfig as OptimConfig
    from kvad.train.config.run import CallbacksConfig as CallbacksConfig
    from kvad.train.config.run import DataConfig as DataConfig
    from kvad.train.config.run import ObjectiveConfig as ObjectiveConfig
    from kvad.train.config.run import RunConfig as RunConfig
    from kvad.train.config.run import SummarizerConfig as SummarizerConfig
    from kvad.train.config.run import TokenizerConfig as TokenizerConfig
    from kvad.train.config.run import TrainConfig as TrainConfig
    from kvad.train.config.run import apply_overrides as apply_overrides
    from kvad.train.config.run import read_toml as read_toml

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
