"""Cache configurations that ``kvad verify`` tests: layout x format x policy x ``rope_at``.

All combinations are tested. An impossible one is refused by the component that cannot support it
(``unsupported_reason``). The required exactness follows from the policy:

* no policy, or one by position: *exact* compared with the model under the same mask;
* offload: keeps everything, *exact*;
* ranking or summarizing (``first_loss_length``): a function of the sequence alone, exact until its first eviction.

``SIZED`` has one policy of each kind, sized for sequences of a given length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvad import cache as cache_lib
from kvad import config as cfg
from kvad import planning
from kvad.cache import CacheConfig, CacheGroup, build_groups, parse_policy
from kvad.cache.sizing import check_policy
from kvad.config import ModelConfig, attention_specs
from kvad.errors import KvadError, UsageError
from kvad.verify.report import case_name


@dataclass(frozen=True)
class MemoryCase:
    """One cache configuration."""

    layout: str
    dtype: str  # "int8/int4" if keys and values have different formats
    policy: str = "full"
    rotate: str = "write"
    endless: bool = False

    @property
    def name(self) -> str:
        return case_name(self.layout, self.dtype, self.policy, self.rotate, self.endless)

    @property
    def keeps_everything(self) -> bool:
        """True if the policy evicts nothing."""
        return self.policy == "full"

    @property
    def float64_case(self) -> MemoryCase:
        """The same configuration in float64, which tests the structure."""
        return replace(self, dtype="float64")

    @property
    def full_case(self) -> MemoryCase:
        """The same configuration without a policy."""
        return replace(self, policy="full", endless=False)

    @staticmethod
    def product(
        layouts: Sequence[str],
        dtypes: Sequence[str],
        policies: Sequence[str] = ("full",),
        rotates: Sequence[str] = ("write",),
        endless: bool = False,
    ) -> list[MemoryCase]:
        """Build all combinations, those of one policy next to each other."""
        combinations = product(policies, rotates, layouts, dtypes)
        return [MemoryCase(layout, dtype, policy, rotate, endless) for policy, rotate, layout, dtype in combinations]


def unsupported_reason(
    config: ModelConfig, case: MemoryCase, build_config: Callable[[MemoryCase], CacheConfig]
) -> KvadError | None:
    """Return why this configuration, whose CacheConfig ``build_config`` makes, is impossible, or None."""
    try:
        cache = build_config(case)
        build_groups(attention_specs(config), cache)
        check_policy(config, cache)
    except KvadError as error:
        return error
    if case.rotate == "read" and not uses_rope(config):
        return UsageError("no layer of this model rotates its keys", "as with rotate=write")
    return None


def uses_rope(config: ModelConfig) -> bool:
    return any(isinstance(kind.attention.position, cfg.RopeConfig) for kind in config.stack.layer_types.values())


def first_loss_length(groups: Sequence[CacheGroup]) -> int | None:
    """Return the length at which a sequence first loses data, or None if no policy ranks, summarizes or selects."""
    losing = [
        group.eviction_policy or group.demotion_policy
        for group in groups
        if not isinstance(group.demotion_policy, cache_lib.policy.OffloadPolicy)
    ]
    trigger_lengths = [policy.next_trigger_length(0) for policy in losing if policy is not None]
    read_budgets = [
        (group.sparse_read_policy.budget, group.block_size) for group in groups if group.sparse_read_policy is not None
    ]
    return min([*trigger_lengths, *(-(-budget // size) * size for budget, size in read_budgets)], default=None)


# ---------------------------------------------------------------- one policy of each kind


def _tiered(size: planning.cache_presets.PolicySize) -> str:
    """Build a tiered policy: every level holds some tokens, and some tokens are dropped."""
    retained = -(-size.num_retained // (2 * size.block)) * size.block  # rounded up to whole blocks
    if size.block % 2:
        return f"tiered({retained}, interval={2 * size.block})"
    return f"tiered({retained}, quantized={retained}, interval={2 * size.block}, summaries={retained}, ratio=2)"


# Each policy by its name. All but the tiered one are sized as in planning/cache_presets.py.
SIZED: dict[str, Callable[[planning.cache_presets.PolicySize], str]] = {
    "full": lambda _size: "full",
    **planning.cache_presets.POLICY_BUILDERS,
    "tiered": _tiered,
    "offload": lambda size: f"offload({-(-size.num_retained // size.block) * size.block}, interval={2 * size.block})",
}


def sized_policy(name: str, longest: int, block_size: int) -> str:
    """Write out a policy that retains a quarter of ``longest`` tokens and evicts twice."""
    retained = max(1, longest // 4)
    size = planning.cache_presets.PolicySize(
        longest,
        retained,
        interval=max(1, retained // 2),
        block=block_size,
        observed_queries=max(1, retained // 4),
        kernel=3,
    )
    return SIZED[name](size)


def parse_policies(values: Sequence[str], longest: int, block_size: int) -> tuple[str, ...]:
    """Parse the values of ``--policy``: "all", bare names, or policies in full, without duplicates.

    Raises:
        ConfigError: If a value is not a policy.
    """
    policies: dict[str, None] = {}
    for name in values:
        for policy in cache_lib.policy_parser.POLICIES if name == "all" else (name,):
            text = sized_policy(policy, longest, block_size) if policy in SIZED else policy
            policies[text if str(parse_policy(text)) != "full" else "full"] = None
    return tuple(policies) or ("full",)
