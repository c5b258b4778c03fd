"""Model tree, attention plots, cache trace and doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.inspection import attention_plot as attention_plot
    from kvad.inspection import checkpoint as checkpoint
    from kvad.inspection import doctor as doctor
    from kvad.inspection import model_tree as model_tree
    from kvad.inspection import plot as plot
    from kvad.inspection.cache_trace import trace_requests as trace_requests
    from kvad.inspection.trace_renderer import trace_to_html as trace_to_html
    from kvad.inspection.trace_renderer import trace_to_text as trace_to_text
    from kvad.inspection.trace_report import TraceReport as TraceReport
    from kvad.inspection.trace_report import trace_to_json as trace_to_json

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
