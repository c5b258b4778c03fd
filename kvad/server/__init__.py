"""HTTP server: an asynchronous LLM in a separate process, OpenAI's routes and the web page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.server.async_llm import AsyncLLM as AsyncLLM
    from kvad.server.config import ApiKeys as ApiKeys
    from kvad.server.config import ServerConfig as ServerConfig
    from kvad.server.limits import ServerLimits as ServerLimits
    from kvad.server.run import check_address as check_address
    from kvad.server.run import serve as serve

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
