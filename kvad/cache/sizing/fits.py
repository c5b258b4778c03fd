"""Caches that fit into a given memory, and the memory of this machine: available bytes and bandwidth. No torch.

Sizes that were not given follow from the memory (``fit_plan``): first the pool becomes smaller than its sequences, so
they share blocks and are preempted if it is full; then there are fewer sequences; then a sequence is shorter.

Available is what the machine has, or less if control groups limit the process. Linux: ``MemAvailable`` of
``/proc/meminfo``, and for every memory control group of the process its limit minus its use plus the reclaimable file
cache. Elsewhere the value of ``sysconf``, or None if unknown.
"""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from kvad.cache.config import NUM_SINKS, CacheConfig, resolve_for_model
from kvad.cache.sizing.memory_plan import MemoryPlan, plan_with
from kvad.errors import ConfigError, MemoryPlanError, format_bytes, format_count

MAX_PLANNED_SEQS = 4096  # upper bound of the search
MAX_DEFAULT_SEQS = 256  # running sequences, if their number is not given
DEFAULT_SEQS = 8  # the same, if the free memory is unknown
DEFAULT_SEQ_TOKENS = 1024  # tokens for which a pool has room per sequence, if their number is not given
AUTO_FRACTION = 0.9  # of the free memory; the rest is for the interpreter, torch and other processes
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


class MemoryBudget(NamedTuple):
    """Memory for a model and its cache, and the sizes that the caller can use, if the user gives none."""

    amount: Literal["auto"] | int | float = "auto"  # bytes (int) or a fraction of the free memory; AUTO_FRACTION of it
    max_num_seqs: int = MAX_DEFAULT_SEQS
    max_seq_len: int | None = None  # None: the model's limit

    def resolve(self, free: int | None) -> int | None:
        """Return the bytes, given the free ones; None if unknown.

        Raises:
            ConfigError: If the amount is no size, fraction or "auto".
        """
        amount = self.amount
        if isinstance(amount, int) and not isinstance(amount, bool) and amount > 0:
            return amount
        if amount != "auto" and not (isinstance(amount, float) and 0 < amount <= 1):
            raise ConfigError(f"memory: must be 'auto', bytes or a fraction up to 1.0, got {amount!r}")
        fraction = amount if isinstance(amount, float) else AUTO_FRACTION
        return None if free is None else int(fraction * free)


def fit_plan(plan: MemoryPlan, memory_bytes: int | None, given: Collection[str]) -> MemoryPlan:
    """Reduce sizes that were not given until the plan fits; without room for one sequence it still does not fit.

    Args:
        plan: Plan of the largest sizes of use.
        memory_bytes: Maximum of ``total``; None: unknown.
        given: Fields of the CacheConfig that the user gave. Sequences and their length, or the blocks: nothing changes.
    """
    if memory_bytes is None and "max_num_seqs" not in given:
        return plan_with(plan, replace(plan.cache, max_num_seqs=min(plan.cache.max_num_seqs, DEFAULT_SEQS)))
    is_strict = {"max_num_seqs", "max_seq_len"} <= set(given) or "num_blocks" in given
    if memory_bytes is None or is_strict or plan.total <= memory_bytes:
        return plan
    cache = plan.cache
    min_seqs = cache.max_num_seqs if "max_num_seqs" in given else 1
    length = cache.max_seq_len
    if "max_seq_len" not in given and not _fits(plan, min_seqs, length, memory_bytes):
        # Of a long sequence's memory, a little is left for others to run next to it.
        usual = min(cache.max_num_seqs, DEFAULT_SEQS) if _shares_blocks(plan) else min_seqs
        choices = (_longest(plan, num_seqs, memory_bytes) for num_seqs in (max(usual, min_seqs), min_seqs))
        length = next(filter(None, choices), min(cache.block_size, length))
    num_seqs = min_seqs
    if "max_num_seqs" not in given:
        num_seqs = binary_search_max(cache.max_num_seqs, lambda n: _has_room(plan, n, length, memory_bytes)) or 1
    return _grow_pool(_with_sizes(plan, num_seqs, length), memory_bytes)


def _longest(plan: MemoryPlan, num_seqs: int, memory_bytes: int) -> int:
    """Return the largest length in whole blocks below the planned one that fits, or 0."""
    unit = plan.cache.block_size
    high = (plan.cache.max_seq_len - 1) // unit
    return unit * binary_search_max(high, lambda count: _fits(plan, num_seqs, unit * count, memory_bytes))


def _fits(plan: MemoryPlan, num_seqs: int, max_seq_len: int, memory_bytes: int) -> bool:
    """True if the sequences fit at least one after the other."""
    try:
        return _with_sizes(plan, num_seqs, max_seq_len).total <= memory_bytes
    except ConfigError:  # too short for the policy
        return False


def _has_room(plan: MemoryPlan, num_seqs: int, max_seq_len: int, memory_bytes: int) -> bool:
    """True if the sequences fit with a pool of at least DEFAULT_SEQ_TOKENS for each."""
    if not _fits(plan, num_seqs, max_seq_len, memory_bytes):
        return False
    fitted = _grow_pool(_with_sizes(plan, num_seqs, max_seq_len), memory_bytes)
    return pool_tokens(fitted) >= num_seqs * min(max_seq_len, DEFAULT_SEQ_TOKENS)


def _with_sizes(plan: MemoryPlan, num_seqs: int, max_seq_len: int) -> MemoryPlan:
    """Plan these sequences with the smallest pool: room for one of them if they can share blocks."""
    cache = replace(plan.cache, max_num_seqs=num_seqs, max_seq_len=max_seq_len, num_blocks=None)
    fitted = plan_with(plan, cache)
    if not _shares_blocks(fitted):
        return fitted
    return plan_with(plan, replace(cache, num_blocks=_blocks_per_seq(fitted)))


def _shares_blocks(plan: MemoryPlan) -> bool:
    """True if a group grows with its sequences, so that ``num_blocks`` may limit it."""
    if plan.cache.layout != "paged" or not plan.groups:
        return False
    try:
        return plan_with(plan, replace(plan.cache, num_blocks=1)).pool < plan.pool
    except ConfigError:
        return False


def _blocks_per_seq(plan: MemoryPlan) -> int:
    groups = [each.group for each in plan.groups if not each.group.spec.is_cross_attention]
    return max(group.max_blocks_per_seq for group in groups if not group.is_offloaded)


def _grow_pool(plan: MemoryPlan, memory_bytes: int) -> MemoryPlan:
    """Return the plan with the largest pool that fits, up to that of all sequences at full length."""
    cache = plan.cache
    if cache.num_blocks is None or plan.total > memory_bytes:
        return plan
    block_bytes = plan_with(plan, replace(cache, num_blocks=cache.num_blocks + 1)).total - plan.total
    num_blocks = cache.num_blocks + (memory_bytes - plan.total) // block_bytes
    if num_blocks >= cache.max_num_seqs * _blocks_per_seq(plan):
        return plan_with(plan, replace(cache, num_blocks=None))
    return plan_with(plan, replace(cache, num_blocks=num_blocks))


def pool_tokens(plan: MemoryPlan) -> int:
    """Return the tokens that all sequences together can have."""
    cache = plan.cache
    if cache.num_blocks is None:
        return cache.max_num_seqs * cache.max_seq_len
    per_seq = cache.max_seq_len / _blocks_per_seq(plan)  # more than a block if the policy keeps only a part
    return int(cache.num_blocks * per_seq)


def describe_room(plan: MemoryPlan) -> str:
    """Describe what fits, such as ``room for 8 sequences of 4,096 tokens; 32,768 for one``."""
    num_seqs, longest = plan.cache.max_num_seqs, plan.cache.max_seq_len
    each = min(longest, max(1, pool_tokens(plan) // num_seqs))
    noun = "text" if plan.config.decoder is None else "sequence"
    room = f"room for {format_count(num_seqs, noun)} of {format_count(each, 'token')}"
    return room if each == longest else f"{room}; {longest:,} for one"


def require_memory(plan: MemoryPlan, available: int | None, limit: str = "is available") -> None:
    """Raise MemoryPlanError, with what would fit, if the plan exceeds ``available`` bytes (None: unknown, no limit).

    ``limit`` names the limit in the message.
    """
    if available is None or plan.total <= available:
        return
    sources = f" and encoder inputs of {plan.cache.max_source_len:,}" if plan.config.encoder_input is not None else ""
    model = plan.weights + plan.adapters + plan.summarizer
    parts = model, plan.pool + plan.offload.host_bytes, plan.scratch + plan.activations
    weights, cache, work = map(format_bytes, parts)
    block_store = plan.cache.prefix_cache_host_bytes
    stored = f", block store {format_bytes(block_store)}" if block_store else ""
    num_seqs = format_count(plan.cache.max_num_seqs, "sequence")
    verb = "needs" if plan.cache.max_num_seqs == 1 else "need"
    message = (
        f"{num_seqs} of {plan.cache.max_seq_len:,} tokens{sources} {verb} "
        f"{format_bytes(plan.total)} (weights {weights}, cache {cache}, work {work}{stored}) "
        f"and {format_bytes(available)} {limit}"
    )
    raise MemoryPlanError(message, _advice(plan, available))


def _advice(plan: MemoryPlan, available: int) -> str:
    fits = find_fits(plan, available)
    if not fits:
        if plan.cache.prefix_cache_host_bytes > available:
            return "Use a smaller --prefix-cache-ram."
        min_bytes = plan.total - plan.pool - plan.scratch
        hint = f"no sequence fits: without a cache {format_bytes(min_bytes)} are needed; use a smaller model or dtype"
        return "; or ".join([hint, *_smaller_options(plan, available)])
    same_length = [fit for fit in fits if fit.max_seq_len == plan.cache.max_seq_len][-1:]
    same_num_seqs = [fit for fit in fits if fit.num_seqs <= plan.cache.max_num_seqs][-1:]
    options = sorted({(fit.num_seqs, fit.max_seq_len) for fit in (*same_length, *same_num_seqs, fits[0])})
    shown = (
        f"{format_count(num_seqs, 'sequence')} of {max_len:,} tokens "
        f"(--max-num-seqs {num_seqs} --max-seq-len {max_len})"
        for num_seqs, max_len in options
    )
    return f"what would fit: {', or '.join([*shown, *_smaller_options(plan, available)])}"


def _smaller_options(plan: MemoryPlan, available: int) -> list[str]:
    """Return the first cache format and the policy with which the requested cache would fit."""
    cache, options = plan.cache, []
    for name in ("bfloat16", "int8", "int4"):
        total = _fits_with(plan, replace(cache, dtype=name, key_dtype=None, value_dtype=None), available)
        if total is not None and available < plan.total:
            options.append(f"all of it as {name} ({format_bytes(total)})")
            break
    quarter = cache.max_seq_len // 4
    if cache.policy == "full" and quarter >= 64:
        sinks = f"sinks({NUM_SINKS}, {quarter - NUM_SINKS})"
        total = _fits_with(plan, replace(cache, policy=sinks, num_blocks=None), available)
        if total is not None:
            options.append(f"all of it under {sinks} ({format_bytes(total)})")
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
