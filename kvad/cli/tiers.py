"""Options that say where blocks live on beyond the pool, and what ``--stats`` tells of it.

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

from kvad.cli.common import ByteSize, Line, explicit_options, format_bytes
from kvad.errors import format_count

if TYPE_CHECKING:
    from kvad.llm import LLM

__all__ = [
    "PrefixCacheUse",
    "prefix_cache_lines",
    "prefix_cache_options",
    "prefix_cache_use",
    "parse_prefix_cache_options",
]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
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
