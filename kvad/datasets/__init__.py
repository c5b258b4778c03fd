"""Text that every machine has, and synthetic tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.datasets import stdlib_sources as stdlib_sources
    from kvad.datasets import synthetic as synthetic

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
