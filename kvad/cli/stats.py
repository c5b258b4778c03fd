"""Statistics of a run and its cache, as numbers (``--json``) and as labeled lines (``--stats``)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvad import cache as cache_lib
from kvad import storage
from kvad.cache import group_bytes
from kvad.config import attention_specs
from kvad.errors import format_bytes, format_count

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from kvad.cache import CacheGroup, offload
    from kvad.cache.offload import OffloadStats
    from kvad.engine import StreamChunk, scheduling
    from kvad.engine.scheduling import RequestMetrics
    from kvad.llm import LLM

    PreemptionStats = scheduling.preemption.PreemptionStats

StatsT = TypeVar("StatsT", bound="DataclassInstance")
Line = tuple[str, str]  # label, text


def _difference(before: StatsT, now: StatsT, names: Iterable[str]) -> StatsT:
    """Return ``now`` with the named counters reduced by their values in ``before``."""
    return replace(now, **{name: getattr(now, name) - getattr(before, name) for name in names})


def _preemption_difference(before: PreemptionStats, now: PreemptionStats) -> PreemptionStats:
    """Return the preemptions between two snapshots; swapped bytes and copy costs are those of ``now``."""
    counts = ("recomputed", "recomputed_tokens", "to_ram", "to_disk", "swapped_bytes", "num_lost")
    swap_counts = ("written", "written_bytes", "read", "read_bytes", "failed")
    seconds = {direction: spent - before.seconds.get(direction, 0.0) for direction, spent in now.seconds.items()}
    swap_space = _difference(before.swap_space, now.swap_space, swap_counts)
    return replace(_difference(before, now, counts), seconds=seconds, swap_space=swap_space)


def _preemption_lines(stats: PreemptionStats) -> list[Line]:
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
        failed, lost = format_count(stats.swap_space.failed, "failure"), format_count(stats.num_lost, "copy", "copies")
        lines.append(f"{failed} of the swap files, {lost} lost: {stats.swap_space.fault}")
    return [("preempted", line) for line in lines]


LIMIT_TEXTS = {
    "max_tokens": "--max-tokens", "model": "the model's limit", "cache": "the cache's limit", "pool": "a full pool",
}  # fmt: skip


@dataclass(frozen=True)
class CacheGroupUse:
    """Policy, blocks and bytes of one cache group."""

    layers: int
    policy: str
    evicted_per_head: int  # tokens that the policy evicted from each KV head, over the sequences of the run
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
    draft_tokens: int  # speculative decoding
    accepted_tokens: int
    draft_ms: float  # per generated token
    cache: tuple[CacheGroupUse, ...]
    prefix_hits: int
    prefix_misses: int
    preemptions: int
    preemptions_by_kind: PreemptionStats
    prefix_blocks_evicted: int  # cached blocks without a sequence that were overwritten
    finish_limits: Mapping[str, int]  # limit ("max_tokens", "model", "cache", "pool") or finish reason -> samples
    offload: OffloadStats | None
    prefix_cache: PrefixCacheUse | None
    unused_prefix_dir: Path | None  # default folder with pinned prefixes of the model, if no folder is used


def group_use(llm: LLM, lengths: Sequence[int] = ()) -> tuple[CacheGroupUse, ...]:
    """Return the current use of each cache group; the peak is since the last ``RunMeter`` was created.

    ``lengths`` are those of the sequences whose evicted tokens are counted.
    """
    manager, uses, lossy = llm.engine.kv_cache_manager, [], _lossy_groups(llm)
    policy = llm.engine.cache.resolved_policy
    stats = manager.stats()
    counts = ("used", "peak", "evictable", "free", "watermark", "total")
    for index, group in enumerate(manager.groups):
        size, lower = group_bytes(group), group.lower_level
        description = "hot"
        if lower is not None:
            description = "offloaded" if lower.is_offloaded else "quantized" if lower.ratio == 1 else "summarized"
        uses.append(
            CacheGroupUse(
                layers=len(group.layers),
                policy=str(policy.for_layer(group.layers[0])),
                evicted_per_head=sum(_num_evicted(group, length) for length in lengths)
                if group in lossy and not group.demotion_policy
                else 0,
                window=group.spec.window,
                **{name: getattr(stats, name)[index] for name in counts},
                block_bytes=size.total // group.num_blocks,
                pool_bytes=size.total,
                scale_bytes=size.scales,
                stored=group.format_name,
                description=description,
            )
        )
    return tuple(uses)


class RunMeter:
    """Counter of one run: create it before the first request, pass every chunk to ``add``, read ``stats``."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._times, self._cache_before = replace(llm.engine.times), llm.engine.kv_cache_manager.stats()
        self._preemption_before = llm.engine.preemption.stats()
        llm.engine.kv_cache_manager.reset_peak()
        self._offload_before = self._offload_stats()
        self.metrics: dict[int, RequestMetrics] = {}
        self._finish_limits: Counter[str] = Counter()
        self._tokens: Counter[tuple[int, int]] = Counter()  # by request and sample
        self._start, self._first = time.perf_counter(), 0.0

    def add(self, chunk: StreamChunk) -> None:
        if chunk.request not in self.metrics:
            self.metrics[chunk.request] = self._llm.engine.metrics(chunk.request)
        if chunk.token_id is not None:
            self._tokens[chunk.request, chunk.sample_index] += 1
            self._first = self._first or time.perf_counter()
        if chunk.finish_reason is not None:
            self._finish_limits[chunk.limit or chunk.finish_reason] += 1

    def stats(self) -> RunStats:
        end, times, cache = time.perf_counter(), self._llm.engine.times, self._llm.engine.kv_cache_manager.stats()
        first = self._first or end
        model, total = times.model - self._times.model, times.total - self._times.total
        draft = times.draft - self._times.draft
        usages, offload, num_tokens = self.metrics.values(), self._offload_stats(), self._tokens.total()
        samples = self._tokens.items()
        lengths = [self.metrics[request].num_prompt_tokens + count for (request, _), count in samples]
        if offload is not None and self._offload_before is not None:
            offload = _difference(self._offload_before, offload, ("written", "from_ram", "from_disk", "failed"))
        return RunStats(
            prompt_tokens=sum(usage.num_prompt_tokens for usage in usages),
            cached_tokens=sum(usage.num_cached_tokens for usage in usages),
            completion_tokens=num_tokens,
            seconds=end - self._start,
            first_token=first - self._start,
            tokens_per_second=(num_tokens - 1) / (end - first) if num_tokens > 1 else 0.0,
            engine_ms=1e3 * (total - model - draft) / max(1, num_tokens),
            model_ms=1e3 * model / max(1, num_tokens),
            steps=times.steps - self._times.steps,
            draft_tokens=sum(usage.num_draft_tokens for usage in usages),
            accepted_tokens=sum(usage.num_accepted_tokens for usage in usages),
            draft_ms=1e3 * draft / max(1, num_tokens),
            cache=group_use(self._llm, lengths),
            prefix_hits=cache.hits - self._cache_before.hits,
            prefix_misses=cache.misses - self._cache_before.misses,
            preemptions=sum(usage.num_preemptions for usage in usages),
            preemptions_by_kind=_preemption_difference(self._preemption_before, self._llm.engine.preemption.stats()),
            prefix_blocks_evicted=sum(cache.evictions) - sum(self._cache_before.evictions),
            finish_limits=dict(self._finish_limits),
            offload=offload,
            prefix_cache=prefix_cache_use(self._llm),
            unused_prefix_dir=_unused_prefix_dir(self._llm),
        )

    def _offload_stats(self) -> OffloadStats | None:
        reader = self._llm.engine.kv_cache.offload_reader
        return None if reader is None else reader.stats()


def stats_lines(stats: RunStats) -> list[str]:
    prompt, tokens = format_count(stats.prompt_tokens, "token"), format_count(stats.completion_tokens, "token")
    blocks = format_count(stats.prefix_blocks_evicted, "prefix block")
    ended = ", ".join(f"{count} by {LIMIT_TEXTS.get(limit, limit)}" for limit, count in stats.finish_limits.items())
    lines = [
        ("prompt", f"{prompt}, {stats.cached_tokens} of them from the prefix cache"),
        ("generated", f"{tokens} in {stats.seconds:.3f} s, {format_count(stats.steps, 'step')}"),
        ("speed", f"{stats.tokens_per_second:.1f} tokens/s, the first token after {1e3 * stats.first_token:.1f} ms"),
        ("per token", f"{stats.model_ms:.2f} ms in the model, {stats.engine_ms:.3f} ms in the engine"),
        *_speculation_lines(stats),
        *(("cache", cache_line(use)) for use in stats.cache),
        *_offload_lines(stats.offload),
        ("prefix", f"{format_count(stats.prefix_hits, 'hit')}, {format_count(stats.prefix_misses, 'miss', 'misses')}"),
        *prefix_cache_lines(stats.prefix_cache),
        *(
            ("prefix", f"pinned prefixes: --prefix-cache-dir {folder}")
            for folder in [stats.unused_prefix_dir]
            if folder
        ),
        ("pressure", f"{format_count(stats.preemptions, 'preemption')}, {blocks} evicted"),
        *_preemption_lines(stats.preemptions_by_kind),
        ("ended", ended or "nothing"),
    ]
    return [f"{label:<11} {line}" for label, line in lines]


def _speculation_lines(stats: RunStats) -> list[Line]:
    if not stats.draft_tokens:
        return []
    drafts, rate = format_count(stats.draft_tokens, "draft"), stats.accepted_tokens / stats.draft_tokens
    accepted = f"{stats.accepted_tokens:,} of {drafts} accepted ({rate:.0%})"
    return [("speculation", f"{accepted}, {stats.draft_ms:.3f} ms per token to draft")]


def cache_line(use: CacheGroupUse) -> str:
    scales = f", {format_bytes(use.scale_bytes)} of it scales" if use.scale_bytes else ""
    tokens = "all tokens" if use.policy == "full" else f"{format_count(use.evicted_per_head, 'token')} evicted per head"
    if use.policy == "full" and use.window is not None:
        tokens = f"the model's window of {use.window}"
    if use.description != "hot":
        tokens = f"older tokens, {use.description}"
    return (
        f"{format_count(use.layers, 'layer')}, policy {use.policy}, {tokens}: "
        f"{use.used} of {format_count(use.total, 'block')} in use, {use.evictable} cached for reuse, {use.free} free "
        f"(watermark {use.watermark}); "
        f"peak {use.peak} = {format_bytes(use.peak * use.block_bytes)} of {format_bytes(use.pool_bytes)} "
        f"in {use.stored}{scales}"
    )


def _offload_lines(stats: OffloadStats | None) -> list[Line]:
    if stats is None:
        return []
    from_disk = "" if stats.folder is None else f", {format_bytes(stats.from_disk)} from disk"
    files = "" if stats.folder is None else f"; {format_bytes(stats.disk_bytes)} of files in {stats.folder}"
    failed = f"; {format_count(stats.failed, 'operation')} on disk failed" if stats.failed else ""
    read = f"{format_bytes(stats.from_ram)} read from memory{from_disk}"
    return [("offloaded", f"{format_bytes(stats.written)} written, {read}{files}{failed}")]


# ---------------------------------------------------------------- limits and evictions


def describe_limit(llm: LLM, limit: cache_lib.config.LengthLimit | None) -> str:
    """Describe the limit that ended a text; "" if the model or the caller ended it."""
    config, cache = llm.model.config, llm.engine.cache
    more = "" if config.embedding.position is not None else "; --endless continues without the oldest tokens"
    if limit == "model":
        length = format_count(config.max_seq_len, "token")
        return f"ended at the model's limit of {length}{'' if cache.endless else more}"
    if limit == "cache":
        return f"ended at the cache's limit of {format_count(cache.max_seq_len, 'token')} (--max-seq-len)"
    return "ended because the cache ran out of blocks" if limit == "pool" else ""


def describe_evicted(llm: LLM, length: int) -> str:
    """Describe the tokens that the policy evicted from a sequence of ``length`` tokens; "" if none."""
    cache = llm.engine.cache
    count = max((_num_evicted(group, length) for group in _lossy_groups(llm)), default=0)
    if not count:
        return ""
    action = (
        "were quantized or summarized"
        if isinstance(cache.resolved_policy.stateful, cache_lib.policy.DemotionPolicy)
        else "were evicted"
    )
    return f"{count:,} of {format_count(length, 'token')} {action}: {cache.policy}"


def _lossy_groups(llm: LLM) -> list[CacheGroup]:
    """Return the groups whose policy removes tokens."""
    manager, specs = llm.engine.kv_cache_manager, attention_specs(llm.model.config)
    return [
        group
        for group in manager.token_groups
        if group.eviction_policy or group.demotion_policy or group.spec != specs[group.layers[0]]
    ]


def _num_evicted(group: CacheGroup, length: int) -> int:
    """Return how many tokens of a sequence are evicted or demoted.

    Policies act before a step: the last one added one token, and the token that it sampled was not computed.
    """
    policy, demotion = group.eviction_policy, group.demotion_policy
    computed = max(0, length - 2)
    if isinstance(demotion, cache_lib.policy.OffloadPolicy):
        return 0
    if policy is not None:
        return max(0, computed // policy.interval * policy.interval - policy.budget)
    if isinstance(demotion, cache_lib.policy.TieredPolicy):
        num_demoted = computed // demotion.interval * demotion.interval - demotion.recent - demotion.num_sinks
        return max(0, num_demoted // group.block_size * group.block_size)
    return max(0, group.spec.pattern.first_visible(length) - group.spec.num_sinks)


# ---------------------------------------------------------------- prefix cache


@dataclass(frozen=True)
class PrefixCacheUse:
    """Use of the prefix cache since the model was loaded, and its contents now."""

    pool_tokens: int  # tokens found in the pool
    ram_tokens: int  # tokens loaded from RAM
    disk_tokens: int  # tokens loaded from disk
    misses: Mapping[str, int]  # reason -> lookups that ended early for it
    store: offload.block_store.BlockStoreStats
    mismatches: tuple[str, ...] = ()  # pinned prefixes of another model or cache, and the parts that differ


def prefix_cache_use(llm: LLM) -> PrefixCacheUse | None:
    """Return the use of the prefix cache; None if blocks are stored in the pool only."""
    block_store, prefix_offload = llm.engine.block_store, llm.engine.kv_cache_manager.prefix_offload
    if block_store is None or prefix_offload is None:
        return None
    hits, hit_tokens = prefix_offload.hits, llm.engine.kv_cache_manager.stats().hit_tokens
    ram, disk = hits.tokens["ram"], hits.tokens["disk"]
    misses, mismatches = dict(Counter(hits.misses)), tuple(_pin_mismatches(llm)) if hits.misses else ()
    return PrefixCacheUse(hit_tokens - ram - disk, ram, disk, misses, block_store.stats(), mismatches)


def _pin_mismatches(llm: LLM) -> Iterator[str]:
    """Yield a line for each pinned prefix in the folder that this model and cache cannot use."""
    block_store, current = llm.engine.block_store, llm.engine.cache_fingerprint("").parts
    if block_store is None or not block_store.on_disk:
        return
    for pin in cache_lib.offload.pinned.read_pinned_prefixes(block_store.folder):
        parts = [name for name, value in current.items() if pin.fingerprint.get(name) != value]
        hashed = ("model", "tokenizer", "adapter")
        different = [
            f"another {name}" if name in hashed else f"{name} {pin.fingerprint.get(name)}, here {current[name]}"
            for name in parts
        ]
        if different:
            yield f"{pin.name} was stored with {'; '.join(different)}: not used"


def _unused_prefix_dir(llm: LLM) -> Path | None:
    """Return the default folder of ``kvad prefix add`` if it has a prefix of this model, and no folder is used."""
    folder = storage.filesystem.user_cache_dir("prefix-cache")
    if (llm.engine.block_store is not None and llm.engine.block_store.on_disk) or not folder.is_dir():
        return None
    model = llm.engine.cache_fingerprint("").parts["model"]
    pins = cache_lib.offload.pinned.read_pinned_prefixes(folder)
    return folder if any(pin.fingerprint.get("model") == model for pin in pins) else None


def prefix_cache_lines(use: PrefixCacheUse | None) -> list[Line]:
    if use is None:
        return []
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(use.misses.items())) or "none"
    ram, disk = use.store.ram, use.store.disk
    copied = f"{format_bytes(use.store.bytes_out)} out of the pool, {format_bytes(use.store.bytes_in)} into it"
    evicted = format_count(ram.evictions + disk.evictions, "block")
    places = f"{use.ram_tokens:,} from RAM, {use.disk_tokens:,} from disk"
    lines = [
        ("hits", f"{format_count(use.pool_tokens, 'token')} from the pool, {places}; misses: {reasons}"),
        ("copied", f"{copied}; {evicted} evicted, {disk.failures} failed, {use.store.num_not_written} late"),
    ]
    if ram.num_blocks:
        contents = f"{ram.compressed} compressed, {format_bytes(ram.bytes)}"
        lines.append(("prefix RAM", f"{format_count(ram.num_blocks, 'block')}, {contents}"))
    if disk.limit:
        contents = f"{disk.pinned} pinned, {format_bytes(disk.bytes)} of {format_bytes(disk.limit)}"
        lines.append(("prefix disk", f"{format_count(disk.num_blocks, 'block')}, {contents}"))
    lines += [("prefix disk", line) for line in use.mismatches]
    if disk.disabled_reason:
        lines.append(("prefix disk", f"off: {disk.disabled_reason}"))
    return lines
