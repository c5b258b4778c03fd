"""Classes of one's own, by name: ``"package.module:Class"`` in a config stands for a class that the user brings."""

from __future__ import annotations

import importlib
from typing import Any

from kvad.errors import ConfigError


def load_plugin(name: str, where: str) -> Any:
    """What ``name`` says.  ConfigError names ``where`` it was asked for, and what is not there."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{where}: {name!r} names no class", "write it as package.module:Class")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(f"{where}: cannot import {module!r}: {error}", "is it on PYTHONPATH?") from error
    except AttributeError:
        raise ConfigError(f"{where}: {module!r} has no {attribute!r}") from None
