"""Objectives: losses, and the data transforms that belong to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.train.objectives import cross_entropy as cross_entropy
    from kvad.train.objectives import denoising as denoising
    from kvad.train.objectives import expert_balance as expert_balance
    from kvad.train.objectives import summary_distillation as summary_distillation
    from kvad.train.objectives.cross_entropy import Autocast as Autocast
    from kvad.train.objectives.cross_entropy import CrossEntropyObjective as CrossEntropyObjective
    from kvad.train.objectives.cross_entropy import EvalResult as EvalResult
    from kvad.train.objectives.cross_entropy import Objective as Objective
    from kvad.train.objectives.expert_balance import ExpertBalancer as ExpertBalancer
    from kvad.train.objectives.expert_balance import ExpertLoad as ExpertLoad

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
