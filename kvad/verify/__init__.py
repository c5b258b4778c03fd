"""Comparison of cached with uncached results: replay, fault injection, diagnosis."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvad._lazy import CallablePackage, lazy_names

if TYPE_CHECKING:
    from kvad.verify import hf_caches as hf_caches
    from kvad.verify import reference_model as reference_model
    from kvad.verify import references as references
    from kvad.verify import replay as replay
    from kvad.verify import report as report
    from kvad.verify import scenario as scenario
    from kvad.verify.run import verify as verify
    from kvad.verify.scenario import ScenarioOptions as ScenarioOptions
    from kvad.verify.scenario import build_prompts as build_prompts
    from kvad.verify.scenario import default_sizes as default_sizes
    from kvad.verify.scenario import parse_policies as parse_policies
    from kvad.verify.scenario import require_verify_memory as require_verify_memory

sys.modules[__name__].__class__ = CallablePackage  # kvad.verify(...)
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
