"""Custom classes, named ``"package.module:Class"`` in a configuration."""

from __future__ import annotations

import importlib
from typing import Any

from kvad.errors import ConfigError


def load_plugin(name: str, where: str) -> Any:
    """Import the object called ``name``; ``where`` is the configuration key, for errors."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{where}: must name a class, got {name!r}", "write it as package.module:Class")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(f"{where}: cannot import {module!r}: {error}", "check PYTHONPATH") from error
    except AttributeError:
        raise ConfigError(f"{where}: {module!r} has no {attribute!r}") from None
