"""Which memories ``kvad verify`` holds against a judge: layout x format x policy x way of rotating.

The product is taken whole; what cannot be is not left out in silence but refused by the part that cannot do it, in its
own words (:func:`refusal`).  What a memory promises follows from its policy:

* none, or one that goes by position: *exact* beside the model whose layers see what the policy lets them see;
* one that spills keeps everything: *exact*, too;
* one that ranks or summarises (:func:`first_cut`): each row is a function of itself, and exact until it is first cut.

:data:`SIZED` has one of each kind, for rows of so many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvad.cache.named import POLICIES, parse_policy
from kvad.cache.planning import check_policy
from kvad.cache.policy import Spilled
from kvad.cache.sizing import CacheConfig, Group, groups
from kvad.config import ModelConfig, Rope, mixers
from kvad.errors import KvadError, UsageError
from kvad.lab.caches import POLICIES as PRICED
from kvad.lab.caches import Size
from kvad.lab.findings import memory_name

__all__ = ["SIZED", "Asked", "first_cut", "named_policies", "refusal", "rotates", "sized"]


@dataclass(frozen=True)
class Asked:
    """A memory by what it is made of; ``dtype``: its formats, "int8/int4" where keys and values differ."""

    layout: str
    dtype: str
    policy: str = "full"
    rotate: str = "write"
    endless: bool = False

    @property
    def name(self) -> str:
        return memory_name(self.layout, self.dtype, self.policy, self.rotate, self.endless)

    @property
    def keeps(self) -> bool:
        """Whether it keeps everything."""
        return self.policy == "full"

    @property
    def twin(self) -> Asked:
        """The same memory in float64, which judges the structure."""
        return replace(self, dtype="float64")

    @property
    def whole(self) -> Asked:
        """The same memory, if it kept everything."""
        return replace(self, policy="full", endless=False)

    @staticmethod
    def product(
        layouts: Sequence[str],
        dtypes: Sequence[str],
        policies: Sequence[str] = ("full",),
        rotates: Sequence[str] = ("write",),
        endless: bool = False,
    ) -> list[Asked]:
        """All of them, a policy's together."""
        every = product(policies, rotates, layouts, dtypes)
        return [Asked(layout, dtype, policy, rotate, endless) for policy, rotate, layout, dtype in every]


def refusal(config: ModelConfig, asked: Asked, cache: Callable[[Asked], CacheConfig]) -> KvadError | None:
    """Why this memory cannot be; None where it can.  ``cache``: how it is made."""
    try:
        made = cache(asked)
        groups(mixers(config), made)
        check_policy(config, made)
    except KvadError as error:
        return error
    if asked.rotate == "read" and not rotates(config):
        return UsageError("no layer of this model rotates its keys", "as with rotate=write")
    return None


def rotates(config: ModelConfig) -> bool:
    return any(isinstance(kind.mixer.position, Rope) for kind in config.stack.kinds.values())


def first_cut(placed: Sequence[Group]) -> int | None:
    """The length at which a row first loses something; None where no policy ranks, summarises or chooses."""
    losing = [group.scored or group.levels for group in placed if not isinstance(group.levels, Spilled)]
    cuts = [policy.cut_after(0) for policy in losing if policy is not None]
    read = [(group.chooses.budget, group.block_size) for group in placed if group.chooses is not None]
    return min([*cuts, *(-(-budget // size) * size for budget, size in read)], default=None)


# ---------------------------------------------------------------- one of each kind


def _descending(size: Size) -> str:
    """Not for a budget: every level holds something of these rows, and something is gone."""
    kept = -(-size.kept // (2 * size.block)) * size.block  # in whole blocks
    if size.block % 2:
        return f"hierarchy({kept}, every={2 * size.block})"
    return f"hierarchy({kept}, packed={kept}, every={2 * size.block}, summaries={kept}, ratio=2)"


# Each policy by its name; all but the hierarchy as they are priced (lab/caches.py).
SIZED: dict[str, Callable[[Size], str]] = {
    "full": lambda _size: "full",
    **PRICED,
    "hierarchy": _descending,
    "spilled": lambda size: f"spilled({-(-size.kept // size.block) * size.block}, every={2 * size.block})",
}


def sized(name: str, longest: int, block_size: int) -> str:
    """A policy by its bare name, for rows of ``longest`` tokens: a quarter of them stays; what ranks cuts twice in as
    many tokens."""
    kept = max(1, longest // 4)
    size = Size(longest, kept, every=max(1, kept // 2), block=block_size, watched=max(1, kept // 4), kernel=3)
    return SIZED[name](size)


def named_policies(said: Sequence[str], longest: int, block_size: int) -> tuple[str, ...]:
    """What ``--policy`` says, each once: "all", bare names, or policies in full.  ConfigError for what is none."""
    found: dict[str, None] = {}
    for name in said:
        for each in POLICIES if name == "all" else (name,):
            text = sized(each, longest, block_size) if each in SIZED else each
            found[text if str(parse_policy(text)) != "full" else "full"] = None
    return tuple(found) or ("full",)
