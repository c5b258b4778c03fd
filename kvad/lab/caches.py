"""Which caches are held beside one another, by name: formats, and policies for a budget.  No torch.

``variants.py`` makes engines of them, ``fit.py`` a table of what would fit, ``asked.py`` what ``kvad verify`` asks.

A budget is counted in *slots*: what a policy keeps of a row, in tokens or what stands for them, at most.  A packed slot
and a summary count as one each, so that what is kept does not depend on how wide a head is; what it takes in bytes is
``cache/sizing.py``'s to say.  ``quest`` keeps everything: its budget is what a query reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from kvad.cache.formats import find_format, parted
from kvad.cache.named import parse_policy
from kvad.cache.policy import Hierarchy

__all__ = ["FORMATS", "HIERARCHIES", "POLICIES", "RATIOS", "Size", "block_for", "budget_of", "packing", "sized_for"]

RATIOS = (0.25, 0.5, 0.75, 0.875)
SINKS = 4
BLOCK = 16
WATCHED = 16  # queries that SnapKV looks at: of a short row its own 32 would be most of the budget
KERNEL = 5  # SnapKV's own
SUMMARY = 8  # tokens of a summary, where a block can be cut so
FORMATS = ("bfloat16", "float16", "fp8-e4m3", "int8", "int4")  # of keys and values; those that the cache knows


class Size(NamedTuple):
    """``kept`` slots stay of a row of ``length`` tokens, in blocks of ``block``; what ranks is cut ``every`` so many
    tokens.  ``watched``, ``kernel``: queries that SnapKV looks at, neighbours that it averages over."""

    length: int
    kept: int
    every: int
    block: int = BLOCK
    watched: int = WATCHED
    kernel: int = KERNEL


def _sinks(size: Size) -> str:
    first = min(SINKS, max(1, size.kept // 4))
    return f"sinks({first}, {max(1, size.kept - first)})"


def _truncate(size: Size) -> str:
    block = "" if size.kept >= size.block else f", block={size.kept}"
    return f"truncate({size.kept}{block})"


def _snapkv(size: Size) -> str:
    kernel = "" if size.kernel == KERNEL else f", kernel={size.kernel}"
    return f"snapkv({size.kept}, every={size.every}, window={min(size.watched, size.every, size.kept)}{kernel})"


def _packed(size: Size) -> str:
    """A quarter as it is, and one block on its way; the rest packed; then gone.

    256 slots in blocks of 8:  56 + 8 as they are, 192 packed
    """
    recent, packed = _split(size.kept - size.block, size.block)
    return f"hierarchy({recent}, packed={packed}, every={size.block})"


def _hierarchy(size: Size) -> str:
    """As ``packed``, with room beside it for summaries of all that is older, where there is so much: one block of them
    at least, and what finds no room is gone.

    512 tokens, 256 slots in blocks of 8:  48 + 8 as they are, 160 packed, 40 summaries (of 304 tokens, and of 16 more)
    """
    ratio = SUMMARY if size.block % SUMMARY == 0 else size.block
    whole = (size.kept - size.block - size.length // ratio) * ratio // (ratio - 1)  # tokens that are not summarised
    recent, packed = _split(whole, size.block)
    summaries = max(1, (size.kept - size.block - recent - packed) // size.block) * size.block
    return f"hierarchy({recent}, packed={packed}, every={size.block}, summaries={summaries}, ratio={ratio})"


def _split(slots: int, block: int) -> tuple[int, int]:
    """So many slots in whole blocks, a quarter and the rest; each has one block at least."""
    blocks = max(2, slots // block)
    recent = max(1, blocks // 4)
    return recent * block, (blocks - recent) * block


# What stands in CacheConfig.policy; all that kvad has by name (cache/named.py), but "full".
POLICIES: dict[str, Callable[[Size], str]] = {
    "window": lambda size: f"window({size.kept})",
    "sinks": _sinks,
    "truncate": _truncate,
    "heavy-hitters": lambda size: f"heavy-hitters({size.kept}, every={size.every})",
    "snapkv": _snapkv,
    "tova": lambda size: f"tova({size.kept}, every={size.every})",
    "norm": lambda size: f"norm({size.kept}, every={size.every})",
    "random": lambda size: f"random({size.kept}, every={size.every})",
    "hierarchy": _hierarchy,
    "quest": lambda size: f"quest({max(size.kept, size.block)})",
}
# Those whose slots lie in levels: they want blocks that are small beside the budget (:func:`block_for`).
HIERARCHIES: dict[str, Callable[[Size], str]] = {"hierarchy": _hierarchy, "packed": _packed}


def budget_of(ratio: float, length: int) -> int:
    """Slots that stay of a row of so many tokens, where the share ``ratio`` is dropped."""
    return max(1, round((1 - ratio) * length))


def sized_for(name: str, ratio: float, length: int, every: int, block: int = BLOCK) -> str:
    """The policy of this name that drops so much; what reads whole blocks rounds down to them (to one at least)."""
    kept = budget_of(ratio, length)
    if name == "quest":
        kept = kept // block * block
    return {**POLICIES, **HIERARCHIES}[name](Size(length, kept, every, block))


def block_for(kept: int) -> int:
    """Slots of a block, for a hierarchy of so many: each of its four parts has one block at least."""
    return next((block for block in (8, 4) if 4 * block <= kept), 2)


def packing(policy: str, stored: str) -> str:
    """The policy where all is stored as ``stored``: a hierarchy packs no wider than that."""
    levels = parse_policy(policy).levels
    if not isinstance(levels, Hierarchy):  # what is spilled stays as it is
        return policy
    keys, values = map(_narrower, (levels.keys, levels.values), parted(stored))
    return policy if (keys, values) == (levels.keys, levels.values) else str(replace(levels, keys=keys, values=values))


def _narrower(*names: str) -> str:
    return min(names, key=lambda name: find_format(name).bits)
