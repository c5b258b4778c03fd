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

from kvad.cli.common import Line, Size, format_bytes, given
from kvad.errors import counted

if TYPE_CHECKING:
    from kvad.llm import LLM

__all__ = ["TierUse", "tier_lines", "tier_options", "tier_use", "tiers_asked"]

Command = TypeVar("Command", bound=Callable[..., Any])
TIER_SIZE = Size("a tier of no bytes holds nothing")
_OPTIONS = (
    click.option("--tier", metavar="FOLDER", type=click.Path(path_type=Path), help="Keeps the prefix cache."),
    click.option("--tier-bytes", type=TIER_SIZE, help="What it may hold [default: 4GiB]."),
    click.option(
        "--tier-ram", type=TIER_SIZE, help="Host memory for blocks that the pool had to give up [default: none]."
    ),
    click.option("--tier-replacement", metavar="lru|arc", help="Which of its blocks goes first [default: lru]."),
)


def tier_options(command: Command) -> Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def tiers_asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """What of them was said, as fields of CacheConfig."""
    asked = given(options, ("tier", "tier_bytes", "tier_ram", "tier_replacement"))
    return {**asked, "tier": os.fspath(asked["tier"])} if "tier" in asked else asked


# ---------------------------------------------------------------- statistics


@dataclass(frozen=True)
class TierUse:
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
    ram_packed: int
    disk_bytes: int
    disk_blocks: int
    disk_limit: int
    pinned: int
    evictions: int
    failures: int
    late: int
    off: str


def tier_use(llm: LLM) -> TierUse | None:
    """None: the cache has no tiers."""
    tiers, deposits = llm.engine.tiers, llm.engine.ledger.deposits
    if tiers is None or deposits is None:
        return None
    stats, tokens = tiers.stats(), deposits.hits.tokens
    misses = Counter(deposits.hits.misses)
    return TierUse(
        pool_tokens=llm.engine.ledger.stats().hit_tokens - tokens["ram"] - tokens["disk"],
        ram_tokens=tokens["ram"],
        disk_tokens=tokens["disk"],
        misses=dict(misses),
        out_bytes=stats.out,
        into_bytes=stats.into,
        ram_bytes=stats.ram.bytes,
        ram_blocks=stats.ram.entries,
        ram_packed=stats.ram.packed,
        disk_bytes=stats.disk.bytes,
        disk_blocks=stats.disk.entries,
        disk_limit=stats.disk.limit,
        pinned=stats.disk.pinned,
        evictions=stats.disk.evictions + stats.ram.evictions,
        failures=stats.disk.failures,
        late=stats.late,
        off=stats.disk.off,
    )


def tier_lines(use: TierUse | None) -> list[Line]:
    if use is None:
        return []
    reasons = ", ".join(f"{count} {why}" for why, count in sorted(use.misses.items())) or "none"
    moved = f"{format_bytes(use.out_bytes)} out of the pool, {format_bytes(use.into_bytes)} into it"
    places = f"{use.ram_tokens:,} from RAM, {use.disk_tokens:,} from disk"
    lines = [
        ("hits", f"{counted(use.pool_tokens, 'token')} from the pool, {places}; misses: {reasons}"),
        ("moved", f"{moved}; {counted(use.evictions, 'block')} evicted, {use.failures} failed, {use.late} late"),
    ]
    if use.ram_blocks:
        held = f"{use.ram_packed} packed, {format_bytes(use.ram_bytes)}"
        lines.append(("tier RAM", f"{counted(use.ram_blocks, 'block')}, {held}"))
    if use.disk_limit:
        held = f"{use.pinned} pinned, {format_bytes(use.disk_bytes)} of {format_bytes(use.disk_limit)}"
        lines.append(("tier disk", f"{counted(use.disk_blocks, 'block')}, {held}"))
    if use.off:
        lines.append(("tier disk", f"off: {use.off}"))
    return lines
