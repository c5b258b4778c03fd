"""Options that say what stays in a cache and what is done when it is full; and telling, afterwards, what was done.

No torch until a model is there.

Options that say where blocks live on beyond the pool, and what ``--stats`` tells of it.

No torch until a model is there.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvad import cache as cache_lib
from kvad.cache import CacheConfig
from kvad.cli.options import SIZE, ByteSize, Line, explicit_options, format_bytes
from kvad.errors import UsageError, format_count

if TYPE_CHECKING:
    from kvad.cache import CacheGroup
    from kvad.llm import LLM

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
    click.option(
        "--policy",
        metavar="NAME(N,...)",
        help=_table("What stays of a row [default: full].", cache_lib.policy_parser.POLICY_HELP),
    ),
    click.option("--rotate", metavar="write|read", help="When RoPE turns a key: stored [default], or each time read."),
    click.option(
        "--on-full",
        metavar="NAME",
        help=_table("When a row or the pool is full [default: preempt].", cache_lib.config.OVERFLOW_MODES),
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
    said = cache_lib.config.resolve_endless(
        {name: value for name, value in explicit_options(options, FIELDS).items() if value is not False}
    )
    CacheConfig(max_seq_len=1, **said)
    unread = [name for name in ("spill_ram", "spill_dir") if name in said]
    if unread and said.get("on_full") != "spill" and "spilled(" not in said.get("policy", ""):
        flag = f"--{unread[0].replace('_', '-')}"
        raise UsageError(f"{flag}: nothing is spilled", "--on-full spill, or --policy 'spilled(N)', spills")
    return said


# ---------------------------------------------------------------- what was done


def describe_limit(llm: LLM, limit: cache_lib.config.LengthLimit | None) -> str:
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
    from kvad import cache as cache_lib
    from kvad.model_input import AttentionPattern

    if isinstance(group.demotion_policy, cache_lib.policy.OffloadPolicy):
        return 0
    if group.eviction_policy is not None:
        return max(
            0, length // group.eviction_policy.interval * group.eviction_policy.interval - group.eviction_policy.budget
        )
    if isinstance(group.demotion_policy, cache_lib.policy.TieredPolicy):
        policy = group.demotion_policy
        moved = length // policy.interval * policy.interval - policy.recent - policy.num_sinks
        return max(0, moved // group.block_size * group.block_size)
    return max(0, AttentionPattern.from_spec(group.spec).first_visible(length) - group.spec.num_sinks)


PREFIX_CACHE_SIZE_TYPE = ByteSize("a tier of no bytes holds nothing")
_OPTIONS = (
    click.option("--tier", metavar="FOLDER", type=click.Path(path_type=Path), help="Keeps the prefix cache."),
    click.option("--tier-bytes", type=PREFIX_CACHE_SIZE_TYPE, help="What it may hold [default: 4GiB]."),
    click.option(
        "--tier-ram",
        type=PREFIX_CACHE_SIZE_TYPE,
        help="Host memory for blocks that the pool had to give up [default: none].",
    ),
    click.option("--tier-replacement", metavar="lru|arc", help="Which of its blocks goes first [default: lru]."),
)


def prefix_cache_options(command: CommandT) -> CommandT:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_prefix_cache_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What of them was said, as fields of CacheConfig."""
    asked = explicit_options(options, ("tier", "tier_bytes", "tier_ram", "tier_replacement"))
    return {**asked, "tier": os.fspath(asked["tier"])} if "tier" in asked else asked


# ---------------------------------------------------------------- statistics


@dataclass(frozen=True)
class PrefixCacheUse:
    """Tokens of hits by place, admissions that ended early by reason, bytes copied out of and into the pool, all since
    the model was loaded; and what the tiers hold now.  ``off``: why the folder is no longer written to, or read."""

    pool_tokens: int
    ram_tokens: int
    disk_tokens: int
    misses: Mapping[str, int]
    out_bytes: int
    into_bytes: int
    ram_bytes: int
    ram_blocks: int
    ram_compressed: int
    disk_bytes: int
    disk_blocks: int
    disk_limit: int
    pinned: int
    evictions: int
    failures: int
    late: int
    off: str


def prefix_cache_use(llm: LLM) -> PrefixCacheUse | None:
    """None: the cache has no tiers."""
    tiers, deposits = llm.engine.block_store, llm.engine.kv_cache_manager.prefix_offload
    if tiers is None or deposits is None:
        return None
    stats, tokens = tiers.stats(), deposits.hits.tokens
    misses = Counter(deposits.hits.misses)
    return PrefixCacheUse(
        pool_tokens=llm.engine.kv_cache_manager.stats().hit_tokens - tokens["ram"] - tokens["disk"],
        ram_tokens=tokens["ram"],
        disk_tokens=tokens["disk"],
        misses=dict(misses),
        out_bytes=stats.bytes_out,
        into_bytes=stats.bytes_in,
        ram_bytes=stats.ram.bytes,
        ram_blocks=stats.ram.num_blocks,
        ram_compressed=stats.ram.compressed,
        disk_bytes=stats.disk.bytes,
        disk_blocks=stats.disk.num_blocks,
        disk_limit=stats.disk.limit,
        pinned=stats.disk.pinned,
        evictions=stats.disk.evictions + stats.ram.evictions,
        failures=stats.disk.failures,
        late=stats.num_not_written,
        off=stats.disk.disabled_reason,
    )


def prefix_cache_lines(use: PrefixCacheUse | None) -> list[Line]:
    if use is None:
        return []
    reasons = ", ".join(f"{count} {why}" for why, count in sorted(use.misses.items())) or "none"
    moved = f"{format_bytes(use.out_bytes)} out of the pool, {format_bytes(use.into_bytes)} into it"
    places = f"{use.ram_tokens:,} from RAM, {use.disk_tokens:,} from disk"
    lines = [
        ("hits", f"{format_count(use.pool_tokens, 'token')} from the pool, {places}; misses: {reasons}"),
        ("moved", f"{moved}; {format_count(use.evictions, 'block')} evicted, {use.failures} failed, {use.late} late"),
    ]
    if use.ram_blocks:
        held = f"{use.ram_compressed} packed, {format_bytes(use.ram_bytes)}"
        lines.append(("tier RAM", f"{format_count(use.ram_blocks, 'block')}, {held}"))
    if use.disk_limit:
        held = f"{use.pinned} pinned, {format_bytes(use.disk_bytes)} of {format_bytes(use.disk_limit)}"
        lines.append(("tier disk", f"{format_count(use.disk_blocks, 'block')}, {held}"))
    if use.off:
        lines.append(("tier disk", f"off: {use.off}"))
    return lines
