"""A sequence's cache as a value, its file, and the directory of sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.cache.sessions import directory as directory
    from kvad.cache.sessions import state as state
    from kvad.cache.sessions.file import load_session as load_session
    from kvad.cache.sessions.file import save_session as save_session
    from kvad.cache.sessions.state import SequenceState as SequenceState

__all__ = ["SequenceState", "directory", "load_session", "save_session", "state"]

__getattr__, __dir__ = lazy_names(
    __name__, {"SequenceState": "state", "load_session": "file", "save_session": "file"}, ("directory", "state")
)
