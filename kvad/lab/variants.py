"""Caches to be held beside one another: a name, the share of the cache that is dropped, and what makes it.

A :class:`Variant` turns the length of a row into the fields of a :class:`~kvad.cache.sizing.CacheConfig`; everything
else asks :func:`engine_of`.  ``full`` is the cache as it is; a precision is a variant that drops nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from kvad.cache.formats import find_format
from kvad.cache.policy import Policy
from kvad.cache.sizing import DTYPE_BYTES, CacheConfig
from kvad.engine.engine import Engine
from kvad.errors import UsageError, nearest
from kvad.llm import LLM
from kvad.own import load_own

__all__ = ["POLICIES", "RATIOS", "Variant", "engine_of", "known_variants", "variants_of"]

RATIOS = (0.25, 0.5, 0.75, 0.875)
SINKS = 4

# What stands in CacheConfig.policy for a budget of n tokens.
POLICIES: dict[str, Callable[[int], str]] = {
    "window": lambda n: f"window({n})",
    "sinks": lambda n: f"sinks({SINKS},{max(1, n - SINKS)})",
    "truncate": lambda n: f"truncate({n})",
    "heavy-hitters": lambda n: f"heavy-hitters({n})",
    "snapkv": lambda n: f"snapkv({n})",
    "tova": lambda n: f"tova({n})",
    "norm": lambda n: f"norm({n})",
    "random": lambda n: f"random({n})",
}


@dataclass(frozen=True)
class Variant:
    """``ratio``: the share of a row's cache that is dropped; ``fields``: what is set for a row of ``length`` tokens."""

    name: str
    ratio: float
    fields: Callable[[int], Mapping[str, Any]]

    def budget(self, length: int) -> int:
        """Tokens that stay of a row of so many."""
        return budget_of(self.ratio, length)

    @property
    def label(self) -> str:
        return self.name if not self.ratio else f"{self.name} {self.ratio:g}"


def budget_of(ratio: float, length: int) -> int:
    return max(1, round((1 - ratio) * length))


def known_variants() -> list[str]:
    """Names that this build can make: ``full``, precisions, and policies where the cache has them."""
    policies = list(POLICIES) if "policy" in {field.name for field in fields(CacheConfig)} else []
    return ["full", *DTYPE_BYTES, *policies]


def variants_of(names: Sequence[str], ratios: Sequence[float] = RATIOS) -> list[Variant]:
    """``full`` first, whatever is asked for; a policy once per ratio.  UsageError for a name that is none."""
    for ratio in ratios:
        if not 0 < ratio < 1:
            raise UsageError(f"ratio {ratio:g}: the share that is dropped lies between 0 and 1")
    known = known_variants()
    found = [Variant("full", 0.0, lambda _length: {})]
    for name in dict.fromkeys(names):
        if ":" in name:
            found += _own(name, ratios)
            continue
        if name not in known:
            raise UsageError(f"unknown cache {name!r}", nearest(name, known))
        if name in DTYPE_BYTES:
            found.append(Variant(name, 0.0, partial(_stored, name)))
        elif name != "full":
            found += [_dropping(name, ratio) for ratio in ratios]
    return found


def _own(name: str, ratios: Sequence[float]) -> list[Variant]:
    """A policy (its one argument the budget) or a format of one's own, "package.module:Class"."""
    made = load_own(name, "cache")
    if isinstance(made, type) and issubclass(made, Policy):
        return [Variant(name, ratio, partial(_budgeted, name, ratio)) for ratio in ratios]
    find_format(name, "cache")
    return [Variant(name, 0.0, partial(_stored, name))]


def _budgeted(name: str, ratio: float, length: int) -> dict[str, Any]:
    return {"policy": f"{name}({budget_of(ratio, length)})"}


def _stored(dtype: str, _length: int) -> dict[str, Any]:
    return {"dtype": dtype}


def _dropping(name: str, ratio: float) -> Variant:
    return Variant(name, ratio, lambda length: {"policy": POLICIES[name](budget_of(ratio, length))})


def engine_of(llm: LLM, variant: Variant, length: int, *, rows: int, capacity: int, chunk: int) -> Engine:
    """An engine of its own for rows of ``length`` tokens, with ``llm``'s model and the variant's cache.

    ``capacity``: what a row may reach.  No prefix is shared: every row's cache is its own.
    """
    base: dict[str, Any] = {
        "dtype": llm.cache.dtype,
        "block_size": llm.cache.block_size,
        "rows": rows,
        "capacity": capacity,
        "chunk": min(chunk, capacity),
        "prefix": False,
    }
    made = {**base, **variant.fields(length)}
    for name in made:
        if name not in {field.name for field in fields(CacheConfig)}:
            raise UsageError(f"{variant.label}: this build's cache has no {name}", "kvad bench cache-quality --help")
    return Engine(llm.model, CacheConfig(**made), tokenizer=None, budget=rows * base["chunk"])
