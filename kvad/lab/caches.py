"""Which caches are held beside one another, by name: formats, and policies for a budget.  No torch.

``variants.py`` makes engines of them, ``fit.py`` a table of what would fit.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["FORMATS", "POLICIES", "RATIOS", "budget_of"]

RATIOS = (0.25, 0.5, 0.75, 0.875)
SINKS = 4
BLOCK = 16  # tokens that truncate drops at once
WATCHED = 16  # queries that SnapKV looks at: of a short row its own 32 would be most of the budget
FORMATS = ("bfloat16", "float16", "fp8-e4m3", "int8", "int4")  # of keys and values; those that the cache knows

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


def budget_of(ratio: float, length: int) -> int:
    """Tokens that stay of a row of so many, where the share ``ratio`` is dropped."""
    return max(1, round((1 - ratio) * length))
