"""The command line: one file per family of commands.  It wires the floors below and decides nothing itself.

No module of this package imports torch when it is imported: the heavy imports stand inside the commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.cli import main as main

__all__ = ["main"]

__getattr__, __dir__ = lazy_names(__name__, {}, ("main",))
