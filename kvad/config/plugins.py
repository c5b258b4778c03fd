"""Registry of plugins: custom classes that the user names, never a file.

A configuration, a checkpoint or a session selects a plugin by its name. The name is looked up among those that this
process registered (``kvad.register``, ``--plugin``) and the entry points of installed packages; any other name is
refused, and nothing is imported.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Container
from importlib.metadata import entry_points
from typing import Any

from kvad.errors import ConfigError

ENTRY_POINTS = "kvad.plugins"  # group in the metadata of an installed package
_NAME = re.compile(r"[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

_registered: dict[str, object] = {}  # name -> the plugin, or "package.module:Class" until its first use


def register(name: str, plugin: object = None) -> None:
    """Let configurations and files select a custom class, format, policy or family by name.

    Args:
        name: The name in configurations and files, or the ``model_type`` of a family.
        plugin: The class or ``Family``, or ``"package.module:Class"``, which is imported at its first use. By default
            ``name``, which then has that form.

    Raises:
        ConfigError: If the name or the text of the plugin has another form.
    """
    plugin = name if plugin is None else plugin
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"plugin: {name!r} is not a name", "write kerple=package.module:Kerple")
    if isinstance(plugin, str) and not _TARGET.fullmatch(plugin):
        raise ConfigError(f"plugin {name}: must name a class, got {plugin!r}", "write it as package.module:Class")
    _registered[name] = plugin


def is_plugin(name: object, builtins: Container[str]) -> bool:
    """Return True if a name selects a plugin: a registered one, or none of ``builtins``. Imports nothing."""
    if not isinstance(name, str):
        return False
    return name in _registered or (name not in builtins and (":" in name or name in _entry_points()))


@functools.cache
def _entry_points() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}


def load_plugin(name: str, where: str, base: type | None = None) -> Any:
    """Return the plugin with this name.

    Args:
        name: A registered name.
        where: The configuration key that has it, for errors.
        base: The class that the plugin must be a subclass of.

    Raises:
        ConfigError: If the name is not registered (nothing is imported), its module has no such class, or the class is
            of another kind.
    """
    plugin = _import(name, where)
    if base is not None and not (isinstance(plugin, type) and issubclass(plugin, base)):
        raise ConfigError(f"{where}: the plugin {name!r} is not a subclass of {base.__module__}.{base.__name__}")
    return plugin


def _import(name: str, where: str) -> Any:
    if name not in _registered:
        if name not in _entry_points():
            target = name if _TARGET.fullmatch(str(name)) else f"{name}=package.module:Class"
            hint = f"if you trust its code, register it: --plugin {target}, or kvad.register(...) in Python"
            raise ConfigError(f"{where}: {name!r} is not a registered plugin", hint)
        register(name, _entry_points()[name])
    plugin = _registered[name]
    if not isinstance(plugin, str):
        return plugin
    module, _, attribute = plugin.partition(":")
    try:
        _registered[name] = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(f"{where}: cannot import {module!r}: {error}", "check PYTHONPATH") from error
    except AttributeError:
        raise ConfigError(f"{where}: {module!r} has no {attribute!r}") from None
    return _registered[name]
