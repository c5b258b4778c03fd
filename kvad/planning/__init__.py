"""Memory plans without loading a model: report, what fits, known models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.planning import cache_presets as cache_presets
    from kvad.planning import fit as fit
    from kvad.planning import report as report
    from kvad.planning.known_models import KNOWN_MODELS as KNOWN_MODELS
    from kvad.planning.report import PlanReport as PlanReport
    from kvad.planning.report import build_report as build_report
    from kvad.planning.report import describe_retention as describe_retention
    from kvad.planning.report import layer_names as layer_names
    from kvad.planning.report import plan_target as plan_target
    from kvad.planning.report import read_target as read_target
    from kvad.planning.report import report_to_json as report_to_json
    from kvad.planning.report import with_speculation as with_speculation

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
