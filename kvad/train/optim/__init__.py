"""Optimizers, learning rate schedules, weight averaging."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.train.optim import schedules as schedules
    from kvad.train.optim.optimizer import OptimizersContainer as OptimizersContainer

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
