"""Options of cache policy, overflow, swap space and prefix cache, and the prefix cache's lines of ``--stats``.

No torch until a model is loaded.
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
from kvad.cli.options import PREFIX_CACHE_OPTIONS, SIZE, ByteSize, Line, explicit_options, format_bytes
from kvad.errors import UsageError, format_count

if TYPE_CHECKING:
    from kvad.cache import CacheGroup
    from kvad.llm import LLM

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
POLICY_OPTIONS = ("policy", "endless", "rope_at", "overflow", "watermark", "offload_dir", "offload_ram", "swap_space")


def _table(first: str, lines: Mapping[str, str]) -> str:
    """Build a help text with one unwrapped line per name."""
    width = max(map(len, lines))
    return "\n".join([first, "", "\b", *(f"{name:<{width}}  {text}" for name, text in lines.items())])


swap_space_option = click.option(
    "--swap-space",
    type=SIZE,
    help="Host memory for preempted sequences [default: only those that cannot be recomputed].",
)
_ENDLESS = click.option(
    "--endless", is_flag=True, help="Let sequences exceed the length limit; without --policy this is --overflow sinks."
)
_OTHERS = (
    click.option(
        "--policy",
        metavar="NAME(N,...)",
        help=_table("Tokens that the cache keeps [default: full]:", cache_lib.policy_parser.POLICY_HELP),
    ),
    click.option(
        "--rope-at",
        metavar="write|read",
        help="Rotate RoPE keys when they are written or each time they are read [default: write].",
    ),
    click.option(
        "--overflow",
        metavar="NAME",
        help=_table(
            "Action at a length limit L or when the pool is full [default: preempt]:", cache_lib.config.OVERFLOW_MODES
        ),
    ),
    click.option(
        "--watermark",
        type=float,
        help="Fraction of the blocks that stays free when a sequence is admitted [default: 0].",
    ),
    click.option(
        "--offload-dir",
        metavar="FOLDER",
        help="Folder for offloaded tokens beyond --offload-ram [default: the user's cache folder].",
    ),
    click.option(
        "--offload-ram",
        type=SIZE,
        help="Host memory for offloaded tokens; the rest is written to disk [default: 1GiB].",
    ),
)


def policy_options(command: CommandT) -> CommandT:
    return _ENDLESS(short_policy_options(command))


def short_policy_options(command: CommandT) -> CommandT:
    """Add the policy options without --endless, for commands whose sequences all end."""
    for option in reversed(_OTHERS):
        command = option(command)
    return command


def parse_policy_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the explicitly given policy options as CacheConfig fields.

    Raises:
        ConfigError: If a value is invalid for every model.
        UsageError: If an offload option is given without offloading.
    """
    fields = cache_lib.config.resolve_endless(
        {name: value for name, value in explicit_options(options, POLICY_OPTIONS).items() if value is not False}
    )
    CacheConfig(max_seq_len=1, **fields)
    unused = [name for name in ("offload_ram", "offload_dir") if name in fields]
    if unused and fields.get("overflow") != "offload" and "offload(" not in fields.get("policy", ""):
        flag = f"--{unused[0].replace('_', '-')}"
        raise UsageError(f"{flag}: nothing is offloaded", "add --overflow offload or --policy 'offload(N)'")
    return fields


# ---------------------------------------------------------------- limits and evictions


def describe_limit(llm: LLM, limit: cache_lib.config.LengthLimit | None) -> str:
    """Describe the limit that ended a text; "" if the model or the caller ended it."""
    config, cache = llm.model.config, llm.engine.cache
    more = "" if config.embedding.position is not None else "; --endless continues without the oldest tokens"
    if limit == "model":
        return (
            f"ended at the model's limit of {format_count(config.max_seq_len, 'token')}{'' if cache.endless else more}"
        )
    if limit == "cache":
        return f"ended at the cache's limit of {format_count(cache.max_seq_len, 'token')} (--max-seq-len)"
    return "ended because the cache ran out of blocks" if limit == "pool" else ""


def describe_evicted(llm: LLM, length: int) -> str:
    """Describe the tokens that the policy evicted from a sequence of ``length`` tokens; "" if none."""
    from kvad.config import attention_specs

    cache, manager, specs = llm.engine.cache, llm.engine.kv_cache_manager, attention_specs(llm.model.config)
    lossy_groups = [
        group
        for group in manager.token_groups
        if group.eviction_policy or group.demotion_policy or group.spec != specs[group.layers[0]]
    ]
    count = max((_num_evicted(group, length) for group in lossy_groups), default=0)
    if not count:
        return ""
    action = "were quantized or summarized" if cache.resolved_policy.tiered else "were evicted"
    return f"{count:,} of {format_count(length, 'token')} {action}: {cache.policy}"


def _num_evicted(group: CacheGroup, length: int) -> int:
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
        num_demoted = length // policy.interval * policy.interval - policy.recent - policy.num_sinks
        return max(0, num_demoted // group.block_size * group.block_size)
    return max(0, AttentionPattern.from_spec(group.spec).first_visible(length) - group.spec.num_sinks)


PREFIX_CACHE_SIZE_TYPE = ByteSize("must be at least 1 byte")
_OPTIONS = (
    click.option(
        "--prefix-cache-dir",
        metavar="FOLDER",
        type=click.Path(path_type=Path),
        help="Folder of the prefix cache [default: pool only].",
    ),
    click.option(
        "--prefix-cache-size", type=PREFIX_CACHE_SIZE_TYPE, help="Maximum size of that folder [default: 4GiB]."
    ),
    click.option(
        "--prefix-cache-ram",
        type=PREFIX_CACHE_SIZE_TYPE,
        help="Host memory for blocks that the pool evicted [default: none].",
    ),
    click.option(
        "--prefix-cache-eviction", metavar="lru|arc", help="Order in which its blocks are evicted [default: lru]."
    ),
)


def prefix_cache_options(command: CommandT) -> CommandT:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_prefix_cache_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the explicitly given prefix cache options as CacheConfig fields."""
    fields = explicit_options(options, PREFIX_CACHE_OPTIONS)
    if "prefix_cache_dir" in fields:
        fields["prefix_cache_dir"] = os.fspath(fields["prefix_cache_dir"])
    return fields


# ---------------------------------------------------------------- statistics


@dataclass(frozen=True)
class PrefixCacheUse:
    """Use of the prefix cache since the model was loaded, and its contents now."""

    pool_tokens: int  # tokens found in the pool
    ram_tokens: int  # tokens loaded from RAM
    disk_tokens: int  # tokens loaded from disk
    misses: Mapping[str, int]  # reason -> lookups that ended early for it
    out_bytes: int  # copied out of the pool
    into_bytes: int  # copied into the pool
    ram_bytes: int  # stored in RAM now
    ram_blocks: int
    ram_compressed: int  # of these, compressed blocks
    disk_bytes: int  # stored on disk now
    disk_blocks: int
    disk_limit: int  # bytes
    pinned: int  # blocks of pinned prefixes
    evictions: int  # blocks evicted from RAM and disk
    failures: int  # failed disk operations
    late: int  # blocks that were not written because the queue was full
    off: str  # reason why the folder is no longer used, or ""


def prefix_cache_use(llm: LLM) -> PrefixCacheUse | None:
    """Return the use of the prefix cache; None if blocks are stored in the pool only."""
    block_store, prefix_offload = llm.engine.block_store, llm.engine.kv_cache_manager.prefix_offload
    if block_store is None or prefix_offload is None:
        return None
    stats, tokens = block_store.stats(), prefix_offload.hits.tokens
    misses = Counter(prefix_offload.hits.misses)
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
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(use.misses.items())) or "none"
    copied = f"{format_bytes(use.out_bytes)} out of the pool, {format_bytes(use.into_bytes)} into it"
    places = f"{use.ram_tokens:,} from RAM, {use.disk_tokens:,} from disk"
    lines = [
        ("hits", f"{format_count(use.pool_tokens, 'token')} from the pool, {places}; misses: {reasons}"),
        ("copied", f"{copied}; {format_count(use.evictions, 'block')} evicted, {use.failures} failed, {use.late} late"),
    ]
    if use.ram_blocks:
        contents = f"{use.ram_compressed} compressed, {format_bytes(use.ram_bytes)}"
        lines.append(("prefix RAM", f"{format_count(use.ram_blocks, 'block')}, {contents}"))
    if use.disk_limit:
        contents = f"{use.pinned} pinned, {format_bytes(use.disk_bytes)} of {format_bytes(use.disk_limit)}"
        lines.append(("prefix disk", f"{format_count(use.disk_blocks, 'block')}, {contents}"))
    if use.off:
        lines.append(("prefix disk", f"off: {use.off}"))
    return lines
