"""Memory plans without loading a model: report, what fits, known models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.planning import cache_presets as cache_presets
    from kvad.planning import fit as fit
    from kvad.planning import group_summary as group_summary
    from kvad.planning import report as report
    from kvad.planning.bandwidth import measure_bandwidth as measure_bandwidth
    from kvad.planning.known_models import KNOWN_MODELS as KNOWN_MODELS
    from kvad.planning.report import PlanReport as PlanReport
    from kvad.planning.report import build_report as build_report
    from kvad.planning.report import plan_target as plan_target
    from kvad.planning.report import read_target as read_target
    from kvad.planning.report import report_to_json as report_to_json

__all__ = [
    "KNOWN_MODELS",
    "PlanReport",
    "build_report",
    "cache_presets",
    "fit",
    "group_summary",
    "measure_bandwidth",
    "plan_target",
    "read_target",
    "report",
    "report_to_json",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "KNOWN_MODELS": "known_models",
        "PlanReport": "report",
        "build_report": "report",
        "measure_bandwidth": "bandwidth",
        "plan_target": "report",
        "read_target": "report",
        "report_to_json": "report",
    },
    ("cache_presets", "fit", "group_summary", "report"),
)
