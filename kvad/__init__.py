"""Train, run and serve Transformers, with a KV cache that is verified against the uncached model.

The public names::

    from kvad import LLM
    with LLM.load("runs/demo") as llm:
        print(llm.generate("def __init__(self", max_tokens=64, temperature=0).text)

``kvad.train``, ``kvad.plan`` and ``kvad.verify`` run the commands of the same names and return their reports.
``import kvad`` imports no torch: each name is loaded at its first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvad.api import plan, train, verify
    from kvad.config import register
    from kvad.errors import KvadError
    from kvad.llm import LLM
    from kvad.server import AsyncLLM

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "KvadError", "__version__", "plan", "register", "train", "verify"]

_HOMES = {
    "LLM": "kvad.llm",
    "AsyncLLM": "kvad.server",
    "KvadError": "kvad.errors",
    "register": "kvad.config",
    "plan": "kvad.api",
}
_CALLABLE_PACKAGES = ("train", "verify")


def __getattr__(name: str) -> object:
    if name in _CALLABLE_PACKAGES:
        return importlib.import_module(f"kvad.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvad' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("KVAD_LOG"):
    from kvad._log import show_log

    show_log()
