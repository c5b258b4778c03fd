"""Lazy loading of the names that a package offers (its door)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def lazy_names(
    package: str, names: Mapping[str, str], submodules: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Build the ``__getattr__`` and ``__dir__`` of a package that imports its names on first use.

    Args:
        package: The package's own name, ``__name__``.
        names: The file in the package that defines each public name.
        submodules: Files offered as namespaces, such as ``ops.rotary``.

    Returns:
        The two module-level functions (PEP 562).
    """

    def load(name: str) -> object:
        if name in names:
            value: object = getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        elif name in submodules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names, *submodules})

    return load, listed
