"""Engine, clients, outputs, sessions and forward traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.engine import client as client
    from kvad.engine import encoder_tasks as encoder_tasks
    from kvad.engine import loading as loading
    from kvad.engine import options as options
    from kvad.engine import output as output
    from kvad.engine import requests as requests
    from kvad.engine import submission as submission
    from kvad.engine.attention_page import AttentionMap as AttentionMap
    from kvad.engine.attention_page import attention_to_html as attention_to_html
    from kvad.engine.engine import Engine as Engine
    from kvad.engine.engine import StepTimes as StepTimes
    from kvad.engine.engine import pin_prefix as pin_prefix
    from kvad.engine.options import EngineConfig as EngineConfig
    from kvad.engine.output import Completion as Completion
    from kvad.engine.requests import PromptEncoder as PromptEncoder
    from kvad.engine.scheduling import StreamChunk as StreamChunk
    from kvad.engine.session import Session as Session
    from kvad.engine.trace import ForwardTrace as ForwardTrace
    from kvad.engine.trace import trace_forward as trace_forward

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
