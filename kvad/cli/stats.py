"""What a run took and what the cache did meanwhile, as numbers (``--json``) and in words (``--stats``).

Each part of the cache tells of itself in lines: what it is about, and what there is to say.  No torch until a model is
there.

How rows gave way during a run, in words: computed again, swapped to memory or to disk, and what that costs here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvad.cli.cache_options import PrefixCacheUse, prefix_cache_lines, prefix_cache_use
from kvad.cli.options import Line, counter_diff, format_bytes
from kvad.errors import format_count

if TYPE_CHECKING:
    from kvad.cache import CacheGroup
    from kvad.cache.device import OffloadStats
    from kvad.engine import StreamChunk, scheduling
    from kvad.engine.scheduling import RequestMetrics
    from kvad.llm import LLM


def preemption_diff(
    before: scheduling.preemption.PreemptionStats, now: scheduling.preemption.PreemptionStats
) -> scheduling.preemption.PreemptionStats:
    """What has happened between two moments; what is parked, and what copying costs, as they are now."""
    counts = ("recomputed", "recomputed_tokens", "to_ram", "to_disk", "swapped_bytes", "lost")
    parked = ("written", "written_bytes", "read", "read_bytes", "failed")
    seconds = {way: spent - before.seconds.get(way, 0.0) for way, spent in now.seconds.items()}
    parking = counter_diff(before.swap_space, now.swap_space, parked)
    return replace(counter_diff(before, now, counts), seconds=seconds, swap_space=parking)


def preemption_lines(stats: scheduling.preemption.PreemptionStats) -> list[Line]:
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


LIMIT_TEXTS = {
    "max_tokens": "--max-tokens",
    "model": "the model's limit",
    "cache": "the cache's",
    "pool": "a full pool",
}


@dataclass(frozen=True)
class CacheGroupUse:
    """Blocks of one cache group: read by rows now, at the peak, kept for reuse, free, left free by admissions; and
    bytes, columns and scales included.  ``stored``: the format of its keys and values; ``form``: "hot", or what older
    tokens are there: "packed", "summarised", "spilled"."""

    layers: int
    window: int | None
    used: int
    peak: int
    evictable: int
    free: int
    watermark: int
    total: int
    block_bytes: int
    pool_bytes: int
    scale_bytes: int
    stored: str
    description: str = "hot"


@dataclass(frozen=True)
class RunStats:
    """Seconds and milliseconds as named; ``engine_ms`` and ``model_ms`` are per generated token, over all rows.
    ``gave_way``: how rows were preempted, and what that costs here.
    ``ended``: samples, by what ended them: a limit ("max_tokens", "model", "cache", "pool"), or "stop" and the like."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float
    first_token: float
    tokens_per_second: float
    engine_ms: float
    model_ms: float
    steps: int
    cache: tuple[CacheGroupUse, ...]
    prefix_hits: int
    prefix_misses: int
    preemptions: int
    preemptions_by_kind: scheduling.preemption.PreemptionStats
    evictions: int
    finish_limits: Mapping[str, int]
    offload: OffloadStats | None
    prefix_cache: PrefixCacheUse | None


def group_use(llm: LLM) -> tuple[CacheGroupUse, ...]:
    """The cache as it is now, group by group; its peak since the last :class:`Meter` was made."""
    from kvad import cache as cache_lib
    from kvad.cache import group_bytes

    ledger, made = llm.engine.kv_cache_manager, []
    stats = ledger.stats()
    for index, group in enumerate(ledger.groups):
        size = group_bytes(group)
        made.append(
            CacheGroupUse(
                layers=len(group.layers),
                window=group.spec.window,
                used=stats.used[index],
                peak=stats.peak[index],
                evictable=stats.evictable[index],
                free=stats.free[index],
                watermark=stats.watermark[index],
                total=stats.total[index],
                block_bytes=size.total // group.num_blocks,
                pool_bytes=size.total,
                scale_bytes=size.scales,
                stored=cache_lib.quantization.join_format_names(group.key_format, group.value_format),
                description=_form(group),
            )
        )
    return tuple(made)


def _form(group: CacheGroup) -> str:
    if group.lower_level is None:
        return "hot"
    return "spilled" if group.lower_level.is_offloaded else "packed" if group.lower_level.ratio == 1 else "summarised"


def offload_use(llm: LLM) -> OffloadStats | None:
    """Since the engine started; None for a cache that spills nothing."""
    spill = llm.engine.kv_cache.offload_reader
    return None if spill is None else spill.stats()


class RunMeter:
    """Counts one run: make it before the first request, show it every piece, ask it at the end."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._times, self._ledger = replace(llm.engine.times), llm.engine.kv_cache_manager.stats()
        self._swaps = llm.engine.preemption.stats()
        llm.engine.kv_cache_manager.reset_peak()
        self._before = offload_use(llm)
        self._usages: dict[int, RequestMetrics] = {}
        self._ended: Counter[str] = Counter()
        self._tokens = 0
        self._began, self._first = time.perf_counter(), 0.0

    def add(self, piece: StreamChunk) -> None:
        if piece.request not in self._usages:
            self._usages[piece.request] = self._llm.engine.metrics(piece.request)
        if piece.token_id is not None:
            self._tokens += 1
            self._first = self._first or time.perf_counter()
        if piece.finish_reason is not None:
            self._ended[piece.limit or piece.finish_reason] += 1

    def usage(self, request: int) -> RequestMetrics:
        return self._usages[request]

    def stats(self) -> RunStats:
        end, times, ledger = time.perf_counter(), self._llm.engine.times, self._llm.engine.kv_cache_manager.stats()
        first = self._first or end
        model, total = times.model - self._times.model, times.total - self._times.total
        usages = self._usages.values()
        return RunStats(
            prompt_tokens=sum(usage.num_prompt_tokens for usage in usages),
            cached_tokens=sum(usage.num_cached_tokens for usage in usages),
            completion_tokens=self._tokens,
            seconds=end - self._began,
            first_token=first - self._began,
            tokens_per_second=(self._tokens - 1) / (end - first) if self._tokens > 1 else 0.0,
            engine_ms=1e3 * (total - model) / max(1, self._tokens),
            model_ms=1e3 * model / max(1, self._tokens),
            steps=times.steps - self._times.steps,
            cache=group_use(self._llm),
            prefix_hits=ledger.hits - self._ledger.hits,
            prefix_misses=ledger.misses - self._ledger.misses,
            preemptions=sum(usage.num_preemptions for usage in usages),
            preemptions_by_kind=preemption_diff(self._swaps, self._llm.engine.preemption.stats()),
            evictions=sum(ledger.evictions) - sum(self._ledger.evictions),
            finish_limits=dict(self._ended),
            offload=_offload_since(self._before, offload_use(self._llm)),
            prefix_cache=prefix_cache_use(self._llm),
        )


def _offload_since(before: OffloadStats | None, now: OffloadStats | None) -> OffloadStats | None:
    return (
        None
        if now is None or before is None
        else counter_diff(before, now, ("written", "from_ram", "from_disk", "failed"))
    )


def stats_lines(stats: RunStats) -> list[str]:
    tokens = format_count(stats.completion_tokens, "token")
    ended = ", ".join(f"{count} by {LIMIT_TEXTS.get(by, by)}" for by, count in stats.finish_limits.items())
    lines = [
        (
            "prompt",
            f"{format_count(stats.prompt_tokens, 'token')}, {stats.cached_tokens} of them from the prefix cache",
        ),
        ("generated", f"{tokens} in {stats.seconds:.3f} s, {format_count(stats.steps, 'step')}"),
        ("speed", f"{stats.tokens_per_second:.1f} tokens/s, the first token after {1e3 * stats.first_token:.1f} ms"),
        ("per token", f"{stats.model_ms:.2f} ms in the model, {stats.engine_ms:.3f} ms in the engine"),
        *cache_lines(stats.cache),
        *offload_lines(stats.offload),
        ("prefix", f"{format_count(stats.prefix_hits, 'hit')}, {format_count(stats.prefix_misses, 'miss', 'misses')}"),
        *prefix_cache_lines(stats.prefix_cache),
        ("pressure", f"{format_count(stats.preemptions, 'preemption')}, {format_count(stats.evictions, 'eviction')}"),
        *preemption_lines(stats.preemptions_by_kind),
        ("ended", ended or "nothing"),
    ]
    return [f"{what:<10} {line}" for what, line in lines]


def cache_lines(groups: Sequence[CacheGroupUse]) -> list[Line]:
    """One line per group of layers."""
    return [("cache", _cache_line(use)) for use in groups]


def _cache_line(use: CacheGroupUse) -> str:
    scales = f", {format_bytes(use.scale_bytes)} of it scales" if use.scale_bytes else ""
    what = "all tokens" if use.window is None else f"window of {use.window}"
    return (
        f"{format_count(use.layers, 'layer')}, {what if use.description == 'hot' else f'older tokens, {use.description}'}: "
        f"{use.used} of {format_count(use.total, 'block')} in use, {use.evictable} kept for reuse, {use.free} free "
        f"(watermark {use.watermark}); "
        f"peak {use.peak} = {format_bytes(use.peak * use.block_bytes)} of {format_bytes(use.pool_bytes)} "
        f"in {use.stored}{scales}"
    )


def offload_lines(spill: OffloadStats | None) -> list[Line]:
    if spill is None:
        return []
    where = "" if spill.folder is None else f", {format_bytes(spill.from_disk)} from disk"
    files = "" if spill.folder is None else f"; {format_bytes(spill.disk_bytes)} of files in {spill.folder}"
    failed = f"; {format_count(spill.failed, 'operation')} on the disk failed" if spill.failed else ""
    read = f"{format_bytes(spill.from_ram)} read from memory{where}"
    return [("spilled", f"{format_bytes(spill.written)} written, {read}{files}{failed}")]
