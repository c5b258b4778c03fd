"""Caches to be held beside one another: a name, the share of the cache that is dropped, and what makes it.

A :class:`Variant` turns the length of a row into the fields of a :class:`~kvad.cache.sizing.CacheConfig`; everything
else asks :func:`engine_of`.  ``full`` is the cache as it is; a precision is a variant that drops nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvad.cache.formats import find_format
from kvad.cache.policy import Policy
from kvad.cache.sizing import CacheConfig
from kvad.engine.engine import Engine
from kvad.errors import ConfigError, UsageError, nearest
from kvad.lab.caches import FORMATS, POLICIES, RATIOS, budget_of
from kvad.llm import LLM
from kvad.model.compress import Compressor
from kvad.own import load_own

__all__ = ["POLICIES", "RATIOS", "Variant", "engine_of", "known_variants", "variants_of"]

SUMMARIES, LEARNED = "summaries", "learned"  # of older tokens: their means, or what a compressor makes of them
RATIO = 8  # tokens of a summary, where no compressor says

Fields = Callable[[int, int], Mapping[str, Any]]  # (tokens of a row, between two cuts) -> fields of a CacheConfig


@dataclass(frozen=True)
class Variant:
    """``ratio``: the share of a row's cache that is dropped; ``fields``: what is set, given a row's length and how many
    tokens come between two cuts; ``compressor``: what makes summaries."""

    name: str
    ratio: float
    fields: Fields
    compressor: Compressor | None = None

    def budget(self, length: int) -> int:
        """Tokens that stay of a row of so many."""
        return budget_of(self.ratio, length)

    @property
    def label(self) -> str:
        return self.name if not self.ratio else f"{self.name} {self.ratio:g}"


def known_variants() -> list[str]:
    """``full``, the precisions and the policies that this build's cache knows."""
    formats = [name for name in FORMATS if _accepted({"dtype": name})]
    dropping = [name for name, said in POLICIES.items() if _accepted({"policy": said(64, 16)})]
    return ["full", *formats, *dropping, SUMMARIES]


def variants_of(
    names: Sequence[str], ratios: Sequence[float] = RATIOS, compressor: Compressor | None = None
) -> list[Variant]:
    """``full`` first, whatever is asked for; a policy once per ratio.  UsageError for a name that is none.

    ``compressor``: its summaries are held beside the means, as ``learned``.
    """
    for ratio in ratios:
        if not 0 < ratio < 1:
            raise UsageError(f"ratio {ratio:g}: the share that is dropped lies between 0 and 1")
    known = [*known_variants(), *([LEARNED] if compressor is not None else [])]
    found = [Variant("full", 0.0, fields_of("full"))]
    for name in dict.fromkeys(names):
        if ":" in name:
            found += _own(name, ratios)
        elif name in POLICIES and name in known_variants():
            found += [Variant(name, ratio, fields_of(name, ratio)) for ratio in ratios]
        elif name in (SUMMARIES, LEARNED) and name in known:
            found += [_summarising(name, ratio, compressor) for ratio in ratios]
        elif name != "full":
            found.append(Variant(name, 0.0, fields_of(name)))
    return found


def _own(name: str, ratios: Sequence[float]) -> list[Variant]:
    """A policy (its one argument the budget) or a format of one's own, "package.module:Class"."""
    made = load_own(name, "cache")
    if isinstance(made, type) and issubclass(made, Policy):
        return [Variant(name, ratio, partial(_budgeted, name, ratio)) for ratio in ratios]
    find_format(name, "cache")
    return [Variant(name, 0.0, lambda _length, _every: {"dtype": name})]


def _budgeted(name: str, ratio: float, length: int, _every: int) -> dict[str, Any]:
    return {"policy": f"{name}({budget_of(ratio, length)})"}


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


def summaries(length: int, budget: int, ratio: int) -> dict[str, Any]:
    """A hierarchy of at most ``budget`` slots for a row of ``length`` tokens: as many recent tokens as leave room for
    summaries of all others (one block of them at least; what finds no room is gone).

    1024 tokens, 256 slots, 8 tokens a summary:  136 recent and 8 on their way, 112 summaries (of 896)
    """
    size = ratio  # a block becomes one summary
    recent = max(1, (budget - size - length // ratio) * ratio // (ratio - 1) // size) * size
    most = max(1, (budget - size - recent) // size) * size
    policy = f"hierarchy({recent}, packed=0, every={size}, summaries={most}, ratio={ratio})"
    return {"policy": policy, "block_size": size}


def _summarising(name: str, ratio: float, compressor: Compressor | None) -> Variant:
    tokens = RATIO if compressor is None else compressor.ratio
    given = compressor if name == LEARNED else None
    return Variant(name, ratio, lambda length, _every: summaries(length, budget_of(ratio, length), tokens), given)


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
    return Engine(llm.model, config, tokenizer=None, budget=rows * base["chunk"], compressor=variant.compressor)
