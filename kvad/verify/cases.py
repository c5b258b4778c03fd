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

from kvad import cache as cache_lib
from kvad import planning
from kvad.cache import CacheConfig, CacheGroup, build_groups, parse_policy
from kvad.cache.sizing import check_policy
from kvad.config import ModelConfig, RopeConfig, attention_specs
from kvad.errors import KvadError, UsageError
from kvad.verify.report import case_name


@dataclass(frozen=True)
class MemoryCase:
    """A memory by what it is made of; ``dtype``: its formats, "int8/int4" where keys and values differ."""

    layout: str
    dtype: str
    policy: str = "full"
    rotate: str = "write"
    endless: bool = False

    @property
    def name(self) -> str:
        return case_name(self.layout, self.dtype, self.policy, self.rotate, self.endless)

    @property
    def keeps_everything(self) -> bool:
        """Whether it keeps everything."""
        return self.policy == "full"

    @property
    def float64_case(self) -> MemoryCase:
        """The same memory in float64, which judges the structure."""
        return replace(self, dtype="float64")

    @property
    def full_case(self) -> MemoryCase:
        """The same memory, if it kept everything."""
        return replace(self, policy="full", endless=False)

    @staticmethod
    def product(
        layouts: Sequence[str],
        dtypes: Sequence[str],
        policies: Sequence[str] = ("full",),
        rotates: Sequence[str] = ("write",),
        endless: bool = False,
    ) -> list[MemoryCase]:
        """All of them, a policy's together."""
        every = product(policies, rotates, layouts, dtypes)
        return [MemoryCase(layout, dtype, policy, rotate, endless) for policy, rotate, layout, dtype in every]


def unsupported_reason(
    config: ModelConfig, asked: MemoryCase, cache: Callable[[MemoryCase], CacheConfig]
) -> KvadError | None:
    """Why this memory cannot be; None where it can.  ``cache``: how it is made."""
    try:
        made = cache(asked)
        build_groups(attention_specs(config), made)
        check_policy(config, made)
    except KvadError as error:
        return error
    if asked.rotate == "read" and not uses_rope(config):
        return UsageError("no layer of this model rotates its keys", "as with rotate=write")
    return None


def uses_rope(config: ModelConfig) -> bool:
    return any(isinstance(kind.attention.position, RopeConfig) for kind in config.stack.layer_types.values())


def first_loss_length(placed: Sequence[CacheGroup]) -> int | None:
    """The length at which a row first loses something; None where no policy ranks, summarises or chooses."""
    losing = [
        group.eviction_policy or group.demotion_policy
        for group in placed
        if not isinstance(group.demotion_policy, cache_lib.policy.OffloadPolicy)
    ]
    cuts = [policy.next_trigger_length(0) for policy in losing if policy is not None]
    read = [
        (group.sparse_read_policy.budget, group.block_size) for group in placed if group.sparse_read_policy is not None
    ]
    return min([*cuts, *(-(-budget // size) * size for budget, size in read)], default=None)


# ---------------------------------------------------------------- one of each kind


def _descending(size: planning.cache_presets.PolicySize) -> str:
    """Not for a budget: every level holds something of these rows, and something is gone."""
    kept = -(-size.num_retained // (2 * size.block)) * size.block  # in whole blocks
    if size.block % 2:
        return f"hierarchy({kept}, every={2 * size.block})"
    return f"hierarchy({kept}, packed={kept}, every={2 * size.block}, summaries={kept}, ratio=2)"


# Each policy by its name; all but the hierarchy as they are priced (lab/caches.py).
SIZED: dict[str, Callable[[planning.cache_presets.PolicySize], str]] = {
    "full": lambda _size: "full",
    **planning.cache_presets.POLICY_BUILDERS,
    "hierarchy": _descending,
    "spilled": lambda size: f"spilled({-(-size.num_retained // size.block) * size.block}, every={2 * size.block})",
}


def sized_policy(name: str, longest: int, block_size: int) -> str:
    """A policy by its bare name, for rows of ``longest`` tokens: a quarter of them stays; what ranks cuts twice in as
    many tokens."""
    kept = max(1, longest // 4)
    size = planning.cache_presets.PolicySize(
        longest, kept, interval=max(1, kept // 2), block=block_size, observed_queries=max(1, kept // 4), kernel=3
    )
    return SIZED[name](size)


def parse_policies(said: Sequence[str], longest: int, block_size: int) -> tuple[str, ...]:
    """What ``--policy`` says, each once: "all", bare names, or policies in full.  ConfigError for what is none."""
    found: dict[str, None] = {}
    for name in said:
        for each in cache_lib.policy_parser.POLICIES if name == "all" else (name,):
            text = sized_policy(each, longest, block_size) if each in SIZED else each
            found[text if str(parse_policy(text)) != "full" else "full"] = None
    return tuple(found) or ("full",)
