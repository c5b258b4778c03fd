"""Evaluation: perplexity, pairs, labels, BLEU, comparison of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.evaluation import compare_runs as compare_runs
    from kvad.evaluation import metrics as metrics
    from kvad.evaluation import objectives as objectives
    from kvad.evaluation import text as text
    from kvad.evaluation.training_callbacks import build_callbacks as build_callbacks

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
