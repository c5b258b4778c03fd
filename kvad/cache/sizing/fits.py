"""Caches that fit into a given memory, and the memory of this machine: available bytes and bandwidth. No torch.

Available is what the machine has, or less if control groups limit the process. Linux: ``MemAvailable`` of
``/proc/meminfo``, and for every memory control group of the process its limit minus its use plus the reclaimable file
cache. Elsewhere the value of ``sysconf``, or None if unknown.
"""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kvad.cache.config import NUM_SINKS, CacheConfig, resolve_for_model
from kvad.cache.sizing.memory_plan import MemoryPlan, plan_with
from kvad.errors import ConfigError, MemoryPlanError, format_count

MAX_PLANNED_SEQS = 4096  # upper bound of the search
BANDWIDTH_BYTES = 256 << 20  # read to measure the bandwidth; larger than any processor cache
NUM_COLUMNS = 4096
# (controllers in /proc/self/cgroup, mount, limit, used, droppable in memory.stat): version 2, version 1
_GROUPS = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


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
    return bisect.bisect_left(range(1, high + 1), True, key=lambda n: not holds(n))


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be allocated without swapping or an out-of-memory kill; None if unknown.

    ``root`` contains ``proc`` and ``sys``; tests pass another one.
    """
    meminfo = [line.split() for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    limits = [*(int(kibibytes) * 1024 for _, kibibytes, *_ in meminfo), *_control_groups(root)]
    if limits:
        return max(0, min(limits))
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        with suppress(ValueError, OSError, AttributeError):
            pages = os.sysconf(name)
            if pages > 0:
                return pages * os.sysconf("SC_PAGE_SIZE")
    return None


def _control_groups(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for names, mount, limit, used, droppable in _GROUPS:
            if names in controllers.split(","):
                folder = root / mount
                yield from _left(folder, limit, used, droppable)
                for part in Path(path.lstrip("/")).parts:  # The limits of all parent groups apply.
                    folder = folder / part
                    yield from _left(folder, limit, used, droppable)


def _left(folder: Path, limit: str, used: str, droppable: str) -> Iterator[int]:
    with suppress(ValueError, IndexError):  # "max" means no limit; no lines, no such file.
        max_bytes, used_bytes = int(_lines(folder / limit)[0]), int(_lines(folder / used)[0])
        cache = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[:1] == [droppable]]
        yield max_bytes - used_bytes + sum(cache)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def measure_bandwidth(seconds: float = 0.3) -> float:
    """Measure bytes per second, the best of several matrix-vector products: the bound of a decode step.

    Each reads ``BANDWIDTH_BYTES``, or a tenth of the available bytes if that is less, with numpy's number of threads.
    """
    import numpy as np

    available = available_bytes()
    size = BANDWIDTH_BYTES if available is None else min(BANDWIDTH_BYTES, available // 10)
    matrix = np.ones((max(1, size // (4 * NUM_COLUMNS)), NUM_COLUMNS), dtype=np.float32)
    vector = np.ones(NUM_COLUMNS, dtype=np.float32)
    best, first_start = float("inf"), time.perf_counter()
    while time.perf_counter() - first_start < seconds:
        start = time.perf_counter()
        matrix @ vector
        best = min(best, time.perf_counter() - start)
    return float(matrix.nbytes / best)
