"""A sequence's cache as a value, its file, and the directory of sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.cache.sessions import directory as directory
    from kvad.cache.sessions import state as state
    from kvad.cache.sessions.state import SequenceState as SequenceState
    from kvad.cache.sessions.state import load_session as load_session
    from kvad.cache.sessions.state import save_session as save_session

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
