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

from kvad import cache
from kvad.cache import parse_policy

RATIOS = (0.25, 0.5, 0.75, 0.875)
SINKS = 4
DEFAULT_BLOCK_SIZE = 16
OBSERVED_QUERIES = 16  # queries that SnapKV looks at: of a short row its own 32 would be most of the budget
KERNEL = 5  # SnapKV's own
SUMMARY_RATIO = 8  # tokens of a summary, where a block can be cut so
CACHE_FORMATS = ("bfloat16", "float16", "fp8-e4m3", "int8", "int4")  # of keys and values; those that the cache knows


class PolicySize(NamedTuple):
    """``kept`` slots stay of a row of ``length`` tokens, in blocks of ``block``; what ranks is cut ``every`` so many
    tokens.  ``watched``, ``kernel``: queries that SnapKV looks at, neighbours that it averages over."""

    length: int
    num_retained: int
    interval: int
    block: int = DEFAULT_BLOCK_SIZE
    observed_queries: int = OBSERVED_QUERIES
    kernel: int = KERNEL


def _sinks(size: PolicySize) -> str:
    first = min(SINKS, max(1, size.num_retained // 4))
    return f"sinks({first}, {max(1, size.num_retained - first)})"


def _truncate(size: PolicySize) -> str:
    block = "" if size.num_retained >= size.block else f", block={size.num_retained}"
    return f"truncate({size.num_retained}{block})"


def _snapkv(size: PolicySize) -> str:
    kernel = "" if size.kernel == KERNEL else f", kernel={size.kernel}"
    return f"snapkv({size.num_retained}, every={size.interval}, window={min(size.observed_queries, size.interval, size.num_retained)}{kernel})"


def _quantized_policy(size: PolicySize) -> str:
    """A quarter as it is, and one block on its way; the rest packed; then gone.

    256 slots in blocks of 8:  56 + 8 as they are, 192 packed
    """
    recent, packed = _split(size.num_retained - size.block, size.block)
    return f"hierarchy({recent}, packed={packed}, every={size.block})"


def _hierarchy(size: PolicySize) -> str:
    """As ``packed``, with room beside it for summaries of all that is older, where there is so much: one block of them
    at least, and what finds no room is gone.

    512 tokens, 256 slots in blocks of 8:  48 + 8 as they are, 160 packed, 40 summaries (of 304 tokens, and of 16 more)
    """
    ratio = SUMMARY_RATIO if size.block % SUMMARY_RATIO == 0 else size.block
    whole = (
        (size.num_retained - size.block - size.length // ratio) * ratio // (ratio - 1)
    )  # tokens that are not summarised
    recent, packed = _split(whole, size.block)
    summaries = max(1, (size.num_retained - size.block - recent - packed) // size.block) * size.block
    return f"hierarchy({recent}, packed={packed}, every={size.block}, summaries={summaries}, ratio={ratio})"


def _split(slots: int, block: int) -> tuple[int, int]:
    """So many slots in whole blocks, a quarter and the rest; each has one block at least."""
    blocks = max(2, slots // block)
    recent = max(1, blocks // 4)
    return recent * block, (blocks - recent) * block


# What stands in CacheConfig.policy; all that kvad has by name (cache/named.py), but "full".
POLICY_BUILDERS: dict[str, Callable[[PolicySize], str]] = {
    "window": lambda size: f"window({size.num_retained})",
    "sinks": _sinks,
    "truncate": _truncate,
    "heavy-hitters": lambda size: f"heavy-hitters({size.num_retained}, every={size.interval})",
    "snapkv": _snapkv,
    "tova": lambda size: f"tova({size.num_retained}, every={size.interval})",
    "norm": lambda size: f"norm({size.num_retained}, every={size.interval})",
    "random": lambda size: f"random({size.num_retained}, every={size.interval})",
    "hierarchy": _hierarchy,
    "quest": lambda size: f"quest({max(size.num_retained, size.block)})",
}
# Those whose slots lie in levels: they want blocks that are small beside the budget (:func:`block_for`).
TIERED_POLICIES: dict[str, Callable[[PolicySize], str]] = {"hierarchy": _hierarchy, "packed": _quantized_policy}


def slots_to_keep(ratio: float, length: int) -> int:
    """Slots that stay of a row of so many tokens, where the share ``ratio`` is dropped."""
    return max(1, round((1 - ratio) * length))


def policy_for_ratio(name: str, ratio: float, length: int, every: int, block: int = DEFAULT_BLOCK_SIZE) -> str:
    """The policy of this name that drops so much; what reads whole blocks rounds down to them (to one at least)."""
    kept = slots_to_keep(ratio, length)
    if name == "quest":
        kept = kept // block * block
    return {**POLICY_BUILDERS, **TIERED_POLICIES}[name](PolicySize(length, kept, every, block))


def hierarchy_block_size(kept: int) -> int:
    """Slots of a block, for a hierarchy of so many: each of its four parts has one block at least."""
    return next((block for block in (8, 4) if 4 * block <= kept), 2)


def policy_for_format(policy: str, stored: str) -> str:
    """The policy where all is stored as ``stored``: a hierarchy packs no wider than that."""
    levels = parse_policy(policy).tiered
    if not isinstance(levels, cache.policy.TieredPolicy):  # what is spilled stays as it is
        return policy
    keys, values = map(
        _narrower, (levels.key_format, levels.value_format), cache.quantization.split_format_name(stored)
    )
    return (
        policy
        if (keys, values) == (levels.key_format, levels.value_format)
        else str(replace(levels, key_format=keys, value_format=values))
    )


def _narrower(*names: str) -> str:
    return min(names, key=lambda name: cache.quantization.get_format(name).bits)
