"""Options that say what stays in a cache and what is done when it is full; and telling, afterwards, what was done.

No torch until a model is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvad.cache.full import OVERFLOW_MODES, LengthLimit, resolve_endless
from kvad.cache.named import POLICY_HELP
from kvad.cache.sizing import CacheConfig
from kvad.cli.common import SIZE, explicit_options
from kvad.errors import UsageError, format_count

if TYPE_CHECKING:
    from kvad.cache.sizing import CacheGroup
    from kvad.llm import LLM

__all__ = [
    "describe_limit",
    "describe_evicted",
    "swap_space_option",
    "parse_policy_options",
    "policy_options",
    "short_policy_options",
]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
FIELDS = ("policy", "endless", "rotate", "on_full", "watermark", "spill_dir", "spill_ram", "park_ram")


def _table(first: str, lines: Mapping[str, str]) -> str:
    """A help text with a line for each name, kept as lines."""
    width = max(map(len, lines))
    return "\n".join([first, "", "\b", *(f"{name:<{width}}  {text}" for name, text in lines.items())])


swap_space_option = click.option(
    "--park-ram", type=SIZE, help="Host memory for rows that give way to others [default: for those that must]."
)
_ENDLESS = click.option("--endless", is_flag=True, help="Rows have no end; without --policy: --on-full sinks.")
_OTHERS = (
    click.option("--policy", metavar="NAME(N,...)", help=_table("What stays of a row [default: full].", POLICY_HELP)),
    click.option("--rotate", metavar="write|read", help="When RoPE turns a key: stored [default], or each time read."),
    click.option(
        "--on-full", metavar="NAME", help=_table("When a row or the pool is full [default: preempt].", OVERFLOW_MODES)
    ),
    click.option("--watermark", type=float, help="Share of the blocks that an admission leaves free [default: 0]."),
    click.option("--spill-dir", metavar="FOLDER", help="Where the others lie [default: the user's cache folder]."),
    click.option(
        "--spill-ram", type=SIZE, help="Host memory for spilled tokens, before any go to disk [default: 1GiB]."
    ),
)


def policy_options(command: CommandT) -> CommandT:
    return _ENDLESS(short_policy_options(command))


def short_policy_options(command: CommandT) -> CommandT:
    """For a command whose rows all end: no --endless."""
    for option in reversed(_OTHERS):
        command = option(command)
    return command


def parse_policy_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What of them was said, as fields of CacheConfig.  ConfigError for a value that no model's cache could have."""
    said = resolve_endless(
        {name: value for name, value in explicit_options(options, FIELDS).items() if value is not False}
    )
    CacheConfig(max_seq_len=1, **said)
    unread = [name for name in ("spill_ram", "spill_dir") if name in said]
    if unread and said.get("on_full") != "spill" and "spilled(" not in said.get("policy", ""):
        flag = f"--{unread[0].replace('_', '-')}"
        raise UsageError(f"{flag}: nothing is spilled", "--on-full spill, or --policy 'spilled(N)', spills")
    return said


# ---------------------------------------------------------------- what was done


def describe_limit(llm: LLM, limit: LengthLimit | None) -> str:
    """Why a text ended, where it was neither the model's doing nor the caller's; "" where it was."""
    config, cache = llm.model.config, llm.engine.cache
    more = "" if config.embedding.position is not None else "; --endless goes on without its oldest tokens"
    if limit == "model":
        return (
            f"ended at the model's limit of {format_count(config.max_seq_len, 'token')}{'' if cache.endless else more}"
        )
    if limit == "cache":
        return f"ended at the cache's limit of {format_count(cache.max_seq_len, 'token')} (--context)"
    return "ended because the cache ran out of blocks" if limit == "pool" else ""


def describe_evicted(llm: LLM, length: int) -> str:
    """What a row of ``length`` tokens has lost by the cache's policy, in words; "" for nothing."""
    from kvad.config import attention_specs

    cache, ledger, own = llm.engine.cache, llm.engine.kv_cache_manager, attention_specs(llm.model.config)
    kept = [
        group
        for group in ledger.token_groups
        if group.eviction_policy or group.demotion_policy or group.spec != own[group.layers[0]]
    ]
    count = max((_lost(group, length) for group in kept), default=0)
    if not count:
        return ""
    what = "stand in for themselves no more" if cache.resolved_policy.tiered else "are out of sight"
    return f"{count:,} of {format_count(length, 'token')} {what}: {cache.policy}"


def _lost(group: CacheGroup, length: int) -> int:
    from kvad.cache.policy import OffloadPolicy, TieredPolicy
    from kvad.step import AttentionPattern

    if isinstance(group.demotion_policy, OffloadPolicy):
        return 0
    if group.eviction_policy is not None:
        return max(
            0, length // group.eviction_policy.interval * group.eviction_policy.interval - group.eviction_policy.budget
        )
    if isinstance(group.demotion_policy, TieredPolicy):
        policy = group.demotion_policy
        moved = length // policy.interval * policy.interval - policy.recent - policy.num_sinks
        return max(0, moved // group.block_size * group.block_size)
    return max(0, AttentionPattern.from_spec(group.spec).first_visible(length) - group.spec.num_sinks)
