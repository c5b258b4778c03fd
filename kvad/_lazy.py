"""Lazy loading of the names that a package offers (its door).

A door imports its names under ``if TYPE_CHECKING``, one per line, for type checkers and readers. At run time the same
lines are read, and a name is imported at its first use::

    if TYPE_CHECKING:
        from kvad.ops import rotary as rotary                    a file, offered as a namespace
        from kvad.parallel.mesh import Mesh as Mesh              a name of a file

    __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

_IMPORT = re.compile(r"^    from (\S+) import (\w+) as \2$", re.MULTILINE)


class CallablePackage(ModuleType):
    """A package that is also a function: ``kvad.train(...)`` calls ``kvad.api.train``."""

    def __call__(self, *arguments: object, **settings: object) -> object:
        return self._function()(*arguments, **settings)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())

    def _function(self) -> Callable[..., object]:
        function: Callable[..., object] = getattr(importlib.import_module("kvad.api"), self.__name__.partition(".")[2])
        return function


def lazy_names(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Build ``__getattr__``, ``__dir__`` (PEP 562) and ``__all__`` of a door, from its name and its file."""
    modules = {name: module for module, name in _IMPORT.findall(Path(file).read_text("utf-8"))}

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        value: object = importlib.import_module(f"{package}.{name}" if module == package else module)
        if module != package:
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return load, listed, sorted(modules)
