"""OpenAI's routes: request bodies, their validation, responses and event streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.server.api import chat as chat
    from kvad.server.api import completions as completions
    from kvad.server.api import errors as errors
    from kvad.server.api import generation as generation
    from kvad.server.api import panel as panel
    from kvad.server.api import plain_routes as plain_routes
    from kvad.server.api import responses as responses
    from kvad.server.api import schema as schema
    from kvad.server.api import text_threads as text_threads
    from kvad.server.api.errors import ApiError as ApiError
    from kvad.server.api.generation import ApiContext as ApiContext
    from kvad.server.api.generation import EventStream as EventStream

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
