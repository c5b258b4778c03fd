"""Caches that fit into a given memory: the largest sizes of a plan, and an error with what would fit. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from kvad.cache.config import NUM_SINKS, CacheConfig, resolve_for_model
from kvad.cache.sizing.memory_plan import MemoryPlan, plan_with
from kvad.errors import ConfigError, MemoryPlanError, format_count

MAX_PLANNED_SEQS = 4096  # upper bound of the search


class MemoryFit(NamedTuple):
    """``num_seqs`` sequences of ``max_seq_len`` tokens; the whole plan takes ``bytes``."""

    num_seqs: int
    max_seq_len: int
    bytes: int


def require_memory(plan: MemoryPlan, available: int | None) -> None:
    """Raise MemoryPlanError, with what would fit, if the plan exceeds ``available`` bytes (None: unknown, no limit)."""
    if available is None or plan.total <= available:
        return
    sources = f" and encoder inputs of {plan.cache.max_source_len:,}" if plan.config.encoder_input is not None else ""
    parts = plan.weights + plan.summarizer, plan.pool + plan.offload.host_bytes, plan.scratch + plan.activations
    weights, cache, work = map(_format_bytes, parts)
    block_store = plan.cache.prefix_cache_host_bytes
    stored = f", block store {_format_bytes(block_store)}" if block_store else ""
    num_seqs = format_count(plan.cache.max_num_seqs, "sequence")
    verb = "needs" if plan.cache.max_num_seqs == 1 else "need"
    message = (
        f"{num_seqs} of {plan.cache.max_seq_len:,} tokens{sources} {verb} "
        f"{_format_bytes(plan.total)} (weights {weights}, cache {cache}, work {work}{stored}) "
        f"and {_format_bytes(available)} is available"
    )
    raise MemoryPlanError(message, _advice(plan, available))


def _advice(plan: MemoryPlan, available: int) -> str:
    fits = find_fits(plan, available)
    if not fits:
        if plan.cache.prefix_cache_host_bytes > available:
            return "Use a smaller --prefix-cache-ram."
        min_bytes = plan.total - plan.pool - plan.scratch
        hint = f"no sequence fits: without a cache {_format_bytes(min_bytes)} are needed; use a smaller model or dtype"
        return "; or ".join([hint, *_smaller_options(plan, available)])
    same_length = [fit for fit in fits if fit.max_seq_len == plan.cache.max_seq_len][-1:]
    same_num_seqs = [fit for fit in fits if fit.num_seqs <= plan.cache.max_num_seqs][-1:]
    options = sorted({(fit.num_seqs, fit.max_seq_len) for fit in (*same_length, *same_num_seqs, fits[0])})
    shown = (f"{format_count(num_seqs, 'sequence')} of {max_len:,} tokens" for num_seqs, max_len in options)
    return f"what would fit: {', or '.join([*shown, *_smaller_options(plan, available)])}"


def _smaller_options(plan: MemoryPlan, available: int) -> list[str]:
    """Return the first cache format and the policy with which the requested cache would fit."""
    cache, options = plan.cache, []
    for name in ("bfloat16", "int8", "int4"):
        total = _fits_with(plan, replace(cache, dtype=name, key_dtype=None, value_dtype=None), available)
        if total is not None and available < plan.total:
            options.append(f"all of it as {name} ({_format_bytes(total)})")
            break
    quarter = cache.max_seq_len // 4
    if cache.policy == "full" and quarter >= 64:
        sinks = f"sinks({NUM_SINKS}, {quarter - NUM_SINKS})"
        total = _fits_with(plan, replace(cache, policy=sinks, num_blocks=None), available)
        if total is not None:
            options.append(f"all of it under {sinks} ({_format_bytes(total)})")
    return options


def _fits_with(plan: MemoryPlan, cache: CacheConfig, available: int) -> int | None:
    """Return the total bytes with another cache if the model supports it and it fits, else None."""
    try:
        total = total_bytes_with(plan, cache)
    except ConfigError:
        return None
    return total if total <= available else None


def find_fits(plan: MemoryPlan, memory_bytes: int) -> tuple[MemoryFit, ...]:
    """Return the largest numbers of sequences and lengths whose whole plan fits.

    For 1, 2, 4, ... sequences, the maximum length in whole blocks, up to the model's limit; and for the planned length,
    the maximum number of sequences. Empty if one sequence of one block does not fit.
    """
    limit = max(plan.config.max_seq_len, plan.cache.max_seq_len)
    unit = min(plan.cache.block_size, limit)

    def total(num_seqs: int, max_seq_len: int) -> int:
        cache = replace(plan.cache, max_num_seqs=num_seqs, max_seq_len=max_seq_len, num_blocks=None)
        return total_bytes_with(plan, cache)

    def longest(num_seqs: int) -> int:
        if total(num_seqs, limit) <= memory_bytes:
            return limit
        return unit * binary_search_max(limit // unit, lambda units: total(num_seqs, unit * units) <= memory_bytes)

    fits: set[tuple[int, int]] = set()
    num_seqs = 1
    while num_seqs <= MAX_PLANNED_SEQS and (max_seq_len := longest(num_seqs)):
        fits.add((num_seqs, max_seq_len))
        num_seqs *= 2
    planned_len = plan.cache.max_seq_len
    max_num_seqs = binary_search_max(MAX_PLANNED_SEQS, lambda count: total(count, planned_len) <= memory_bytes)
    if max_num_seqs:
        fits.add((max_num_seqs, planned_len))
    return tuple(MemoryFit(*sizes, total(*sizes)) for sizes in sorted(fits))


def total_bytes_with(plan: MemoryPlan, cache: CacheConfig) -> int:
    """Return the total bytes of the same model with another cache.

    Raises:
        ConfigError: If the model does not support the cache.
    """
    try:
        resolve_for_model(plan.config, cache)
    except ConfigError:  # Sequences that are too short to continue, or as long as the model's limit, end.
        cache = replace(cache, overflow="preempt")
    return plan_with(plan, cache).total


def binary_search_max(high: int, holds: Callable[[int], bool]) -> int:
    """Return the largest n in 1..high with ``holds(n)``, or 0.

    ``holds`` must be true up to a point and false after it.
    """
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
