"""How rows gave way during a run, in words: computed again, swapped to memory or to disk, and what that costs here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvad.cli.common import Line, counter_diff, format_bytes
from kvad.errors import format_count

if TYPE_CHECKING:
    from kvad.engine.swaps import PreemptionStats

__all__ = ["preemption_diff", "preemption_lines"]


def preemption_diff(before: PreemptionStats, now: PreemptionStats) -> PreemptionStats:
    """What has happened between two moments; what is parked, and what copying costs, as they are now."""
    counts = ("recomputed", "recomputed_tokens", "to_ram", "to_disk", "swapped_bytes", "lost")
    parked = ("written", "written_bytes", "read", "read_bytes", "failed")
    seconds = {way: spent - before.seconds.get(way, 0.0) for way, spent in now.seconds.items()}
    parking = counter_diff(before.swap_space, now.swap_space, parked)
    return replace(counter_diff(before, now, counts), seconds=seconds, swap_space=parking)


def preemption_lines(stats: PreemptionStats) -> list[Line]:
    """None where no row gave way."""
    if not (stats.recomputed or stats.to_ram or stats.to_disk):
        return []
    seconds = ", ".join(f"{way} {1e3 * spent:.1f} ms" for way, spent in stats.seconds.items())
    swapped = f"{format_bytes(stats.swapped_bytes)} swapped" + (f" ({seconds})" if seconds else "")
    costs = stats.costs
    again = f"{stats.recomputed} computed again ({format_count(stats.recomputed_tokens, 'token')})"
    ways = ", ".join(f"{costs[f'{way}_ns'] * 1.048576:.2f} ms {way}" for way in ("out", "in", "write", "read"))
    lines = [
        f"{again}, {stats.to_ram} swapped to memory, {stats.to_disk} to disk; {swapped}",
        f"a token costs {costs['token_us']:.1f} us; a MiB {ways}",
    ]
    if stats.num_lost or stats.swap_space.failed:
        lost = format_count(stats.num_lost, "copy", "copies")
        lines.append(
            f"{format_count(stats.swap_space.failed, 'failure')} of the disk, {lost} lost: {stats.swap_space.fault}"
        )
    return [("preempted", line) for line in lines]
