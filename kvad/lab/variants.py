"""Caches to be held beside one another: a name, the share of the cache that is dropped, and what makes it.

A :class:`Variant` turns the length of a row into the fields of a :class:`~kvad.cache.sizing.CacheConfig`; everything
else asks :func:`engine_of`.  ``full`` is the cache as it is; a precision is a variant that drops nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvad.cache.sizing import CacheConfig
from kvad.engine.engine import Engine
from kvad.errors import ConfigError, UsageError, nearest
from kvad.llm import LLM

__all__ = ["POLICIES", "RATIOS", "Variant", "engine_of", "known_variants", "variants_of"]

RATIOS = (0.25, 0.5, 0.75, 0.875)
SINKS = 4
BLOCK = 16  # tokens that truncate drops at once
WATCHED = 16  # queries that SnapKV looks at: of a short row its own 32 would be most of the budget
FORMATS = ("bfloat16", "float16", "fp8-e4m3", "int8", "int4")  # of keys and values; those that the cache knows

Fields = Callable[
    [int, int], Mapping[str, Any]
]  # (tokens of a row, tokens between two cuts) -> fields of a CacheConfig

# What stands in CacheConfig.policy for a budget of n tokens, where a policy that ranks cuts every so many.
POLICIES: dict[str, Callable[[int, int], str]] = {
    "window": lambda n, every: f"window({n})",
    "sinks": lambda n, every: f"sinks({SINKS}, {max(1, n - SINKS)})",
    "truncate": lambda n, every: f"truncate({n}, block={min(BLOCK, n)})",
    "heavy-hitters": lambda n, every: f"heavy-hitters({n}, every={every})",
    "snapkv": lambda n, every: f"snapkv({n}, every={every}, window={min(WATCHED, every, n)})",
    "tova": lambda n, every: f"tova({n}, every={every})",
    "norm": lambda n, every: f"norm({n}, every={every})",
    "random": lambda n, every: f"random({n}, every={every})",
}


@dataclass(frozen=True)
class Variant:
    """``ratio``: the share of a row's cache that is dropped; ``fields``: what is set, given a row's length and
    how many tokens come between two cuts."""

    name: str
    ratio: float
    fields: Fields

    def budget(self, length: int) -> int:
        """Tokens that stay of a row of so many."""
        return budget_of(self.ratio, length)

    @property
    def label(self) -> str:
        return self.name if not self.ratio else f"{self.name} {self.ratio:g}"


def budget_of(ratio: float, length: int) -> int:
    return max(1, round((1 - ratio) * length))


def known_variants() -> list[str]:
    """``full``, the precisions and the policies that this build's cache knows."""
    formats = [name for name in FORMATS if _accepted({"dtype": name})]
    return ["full", *formats, *(name for name, said in POLICIES.items() if _accepted({"policy": said(64, 16)}))]


def variants_of(names: Sequence[str], ratios: Sequence[float] = RATIOS) -> list[Variant]:
    """``full`` first, whatever is asked for; a policy once per ratio.  UsageError for a name that is none."""
    for ratio in ratios:
        if not 0 < ratio < 1:
            raise UsageError(f"ratio {ratio:g}: the share that is dropped lies between 0 and 1")
    found = [Variant("full", 0.0, fields_of("full"))]
    for name in dict.fromkeys(names):
        if name in POLICIES and name in known_variants():
            found += [Variant(name, ratio, fields_of(name, ratio)) for ratio in ratios]
        elif name != "full":
            found.append(Variant(name, 0.0, fields_of(name)))
    return found


def fields_of(name: str, ratio: float = 0.0) -> Fields:
    """What makes the cache of this name.  UsageError for a name that is none, or that this build's cache lacks."""
    if name == "full":
        return lambda _length, _every: {}
    if name in POLICIES and name in known_variants():
        return partial(_dropping, name, ratio)
    if not _accepted({"dtype": name}):
        raise UsageError(f"unknown cache {name!r}", nearest(name, known_variants()))
    return lambda _length, _every: {"dtype": name}


def _dropping(name: str, ratio: float, length: int, every: int) -> dict[str, Any]:
    return {"policy": POLICIES[name](budget_of(ratio, length), every)}


def _accepted(fields: Mapping[str, Any]) -> bool:
    try:
        CacheConfig(capacity=1, **fields)
    except (ConfigError, TypeError):  # a value, or a field, that this build's cache does not know
        return False
    return True


def engine_of(
    llm: LLM, variant: Variant, length: int, *, rows: int, capacity: int, chunk: int, every: int | None = None
) -> Engine:
    """An engine of its own for rows of ``length`` tokens, with ``llm``'s model and the variant's cache.

    ``capacity``: what a row may reach.  ``every``: a policy that ranks cuts so often (default: after each chunk).  No
    prefix is shared: every row's cache is its own.
    """
    base: dict[str, Any] = {
        "dtype": llm.cache.dtype,
        "block_size": llm.cache.block_size,
        "rows": rows,
        "capacity": capacity,
        "chunk": min(chunk, capacity),
        "prefix": False,
    }
    made = {**base, **variant.fields(length, base["chunk"] if every is None else every)}
    try:
        config = CacheConfig(**made)
    except TypeError as error:
        raise UsageError(f"{variant.label}: this build's cache cannot: {error}") from None
    return Engine(llm.model, config, tokenizer=None, budget=rows * base["chunk"])
