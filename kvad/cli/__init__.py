"""The command line: one file per family of commands. It calls the layers below and contains no logic of its own.

No module of this package imports torch when it is imported; commands import it when they run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.cli import main as main

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
