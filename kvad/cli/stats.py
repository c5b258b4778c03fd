"""Statistics of a run and its cache, as numbers (``--json``) and as labeled lines (``--stats``).

No torch until a model is loaded.
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
    """Return the preemptions between two snapshots; swapped bytes and copy costs are those of ``now``."""
    counts = ("recomputed", "recomputed_tokens", "to_ram", "to_disk", "swapped_bytes", "num_lost")
    swap_counts = ("written", "written_bytes", "read", "read_bytes", "failed")
    seconds = {direction: spent - before.seconds.get(direction, 0.0) for direction, spent in now.seconds.items()}
    swap_space = counter_diff(before.swap_space, now.swap_space, swap_counts)
    return replace(counter_diff(before, now, counts), seconds=seconds, swap_space=swap_space)


def preemption_lines(stats: scheduling.preemption.PreemptionStats) -> list[Line]:
    """Format the preemptions; no line if no sequence was preempted."""
    if not (stats.recomputed or stats.to_ram or stats.to_disk):
        return []
    seconds = ", ".join(f"{direction} {1e3 * spent:.1f} ms" for direction, spent in stats.seconds.items())
    swapped = f"{format_bytes(stats.swapped_bytes)} swapped" + (f" ({seconds})" if seconds else "")
    costs = stats.costs
    recomputed = f"{stats.recomputed} recomputed ({format_count(stats.recomputed_tokens, 'token')})"
    copies = ", ".join(f"{costs[f'{name}_ns'] * 1.048576:.2f} ms {name}" for name in ("out", "in", "write", "read"))
    lines = [
        f"{recomputed}, {stats.to_ram} swapped to memory, {stats.to_disk} to disk; {swapped}",
        f"a token costs {costs['token_us']:.1f} us; a MiB {copies}",
    ]
    if stats.num_lost or stats.swap_space.failed:
        lost = format_count(stats.num_lost, "copy", "copies")
        lines.append(
            f"{format_count(stats.swap_space.failed, 'failure')} of the swap files, {lost} lost: "
            f"{stats.swap_space.fault}"
        )
    return [("preempted", line) for line in lines]


LIMIT_TEXTS = {
    "max_tokens": "--max-tokens",
    "model": "the model's limit",
    "cache": "the cache's limit",
    "pool": "a full pool",
}


@dataclass(frozen=True)
class CacheGroupUse:
    """Blocks and bytes of one cache group."""

    layers: int
    window: int | None
    used: int  # blocks that sequences read now
    peak: int  # highest ``used`` since the meter started
    evictable: int  # cached blocks that no sequence reads
    free: int
    watermark: int  # blocks that admission leaves free
    total: int
    block_bytes: int  # metadata and scales included
    pool_bytes: int
    scale_bytes: int
    stored: str  # format of keys and values
    description: str = "hot"  # or the state of a lower level's tokens: "quantized", "summarized", "offloaded"


@dataclass(frozen=True)
class RunStats:
    """Statistics of one run."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float
    first_token: float  # seconds until the first token
    tokens_per_second: float
    engine_ms: float  # per generated token, over all sequences
    model_ms: float  # per generated token, over all sequences
    steps: int
    cache: tuple[CacheGroupUse, ...]
    prefix_hits: int
    prefix_misses: int
    preemptions: int
    preemptions_by_kind: scheduling.preemption.PreemptionStats
    evictions: int
    finish_limits: Mapping[str, int]  # limit ("max_tokens", "model", "cache", "pool") or finish reason -> samples
    offload: OffloadStats | None
    prefix_cache: PrefixCacheUse | None


def group_use(llm: LLM) -> tuple[CacheGroupUse, ...]:
    """Return the current use of each cache group; the peak is since the last :class:`RunMeter` was created."""
    from kvad import cache as cache_lib
    from kvad.cache import group_bytes

    manager, uses = llm.engine.kv_cache_manager, []
    stats = manager.stats()
    for index, group in enumerate(manager.groups):
        size = group_bytes(group)
        uses.append(
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
                description=_describe(group),
            )
        )
    return tuple(uses)


def _describe(group: CacheGroup) -> str:
    if group.lower_level is None:
        return "hot"
    return (
        "offloaded" if group.lower_level.is_offloaded else "quantized" if group.lower_level.ratio == 1 else "summarized"
    )


def offload_use(llm: LLM) -> OffloadStats | None:
    """Return the token offload since the engine started; None if the cache offloads nothing."""
    reader = llm.engine.kv_cache.offload_reader
    return None if reader is None else reader.stats()


class RunMeter:
    """Counter of one run: create it before the first request, pass every chunk to :meth:`add`, read :meth:`stats`."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._times, self._cache_before = replace(llm.engine.times), llm.engine.kv_cache_manager.stats()
        self._preemption_before = llm.engine.preemption.stats()
        llm.engine.kv_cache_manager.reset_peak()
        self._offload_before = offload_use(llm)
        self._metrics: dict[int, RequestMetrics] = {}
        self._finish_limits: Counter[str] = Counter()
        self._tokens = 0
        self._start, self._first = time.perf_counter(), 0.0

    def add(self, chunk: StreamChunk) -> None:
        if chunk.request not in self._metrics:
            self._metrics[chunk.request] = self._llm.engine.metrics(chunk.request)
        if chunk.token_id is not None:
            self._tokens += 1
            self._first = self._first or time.perf_counter()
        if chunk.finish_reason is not None:
            self._finish_limits[chunk.limit or chunk.finish_reason] += 1

    def usage(self, request: int) -> RequestMetrics:
        return self._metrics[request]

    def stats(self) -> RunStats:
        end, times, cache = time.perf_counter(), self._llm.engine.times, self._llm.engine.kv_cache_manager.stats()
        first = self._first or end
        model, total = times.model - self._times.model, times.total - self._times.total
        usages = self._metrics.values()
        return RunStats(
            prompt_tokens=sum(usage.num_prompt_tokens for usage in usages),
            cached_tokens=sum(usage.num_cached_tokens for usage in usages),
            completion_tokens=self._tokens,
            seconds=end - self._start,
            first_token=first - self._start,
            tokens_per_second=(self._tokens - 1) / (end - first) if self._tokens > 1 else 0.0,
            engine_ms=1e3 * (total - model) / max(1, self._tokens),
            model_ms=1e3 * model / max(1, self._tokens),
            steps=times.steps - self._times.steps,
            cache=group_use(self._llm),
            prefix_hits=cache.hits - self._cache_before.hits,
            prefix_misses=cache.misses - self._cache_before.misses,
            preemptions=sum(usage.num_preemptions for usage in usages),
            preemptions_by_kind=preemption_diff(self._preemption_before, self._llm.engine.preemption.stats()),
            evictions=sum(cache.evictions) - sum(self._cache_before.evictions),
            finish_limits=dict(self._finish_limits),
            offload=_offload_since(self._offload_before, offload_use(self._llm)),
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
    ended = ", ".join(f"{count} by {LIMIT_TEXTS.get(limit, limit)}" for limit, count in stats.finish_limits.items())
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
    return [f"{label:<11} {line}" for label, line in lines]


def cache_lines(groups: Sequence[CacheGroupUse]) -> list[Line]:
    """Format one line per cache group."""
    return [("cache", _cache_line(use)) for use in groups]


def _cache_line(use: CacheGroupUse) -> str:
    scales = f", {format_bytes(use.scale_bytes)} of it scales" if use.scale_bytes else ""
    tokens = "all tokens" if use.window is None else f"window of {use.window}"
    if use.description != "hot":
        tokens = f"older tokens, {use.description}"
    return (
        f"{format_count(use.layers, 'layer')}, {tokens}: "
        f"{use.used} of {format_count(use.total, 'block')} in use, {use.evictable} cached for reuse, {use.free} free "
        f"(watermark {use.watermark}); "
        f"peak {use.peak} = {format_bytes(use.peak * use.block_bytes)} of {format_bytes(use.pool_bytes)} "
        f"in {use.stored}{scales}"
    )


def offload_lines(stats: OffloadStats | None) -> list[Line]:
    if stats is None:
        return []
    from_disk = "" if stats.folder is None else f", {format_bytes(stats.from_disk)} from disk"
    files = "" if stats.folder is None else f"; {format_bytes(stats.disk_bytes)} of files in {stats.folder}"
    failed = f"; {format_count(stats.failed, 'operation')} on disk failed" if stats.failed else ""
    read = f"{format_bytes(stats.from_ram)} read from memory{from_disk}"
    return [("offloaded", f"{format_bytes(stats.written)} written, {read}{files}{failed}")]
