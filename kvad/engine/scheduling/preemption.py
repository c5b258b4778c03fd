"""Preemption: swap a sequence's blocks out and in, or free them and recompute its tokens.

A sequence under a lossy policy is always swapped, because its cache content cannot be recomputed. An exact sequence is
swapped if the swap space has room and copying is expected to be faster than recomputing the tokens that no prefix
cache entry retains; before it is restored, the remaining copy is compared once more with what is cached by then. The
choice never changes the output.

With bounded swap space, lossy sequences run together only if all of them, except those that fit into the pool at
their maximum length, could be swapped out. So preemption always succeeds, and the oldest sequence can run alone.

The cost model holds seconds per computed token and per copied byte ("out", "in": between pool and host; "write",
"read": between host and disk). The engine reports every prompt step and every copy; recent measurements weigh most. An
initial estimate is used before the first copy, and gains weight each time a copy is too expensive
(``SwapCostModel.decay``), so one slow moment does not count forever.

Integers and measured seconds only; no torch.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

from kvad.cache import group_bytes, offload
from kvad.cache.manager import CacheStats, KVCacheManager, SwappedSequence, max_blocks
from kvad.cache.offload import SwapSpace
from kvad.engine.scheduling.batching import BatchItem
from kvad.engine.scheduling.sequence import TokenSequence

CopyDirection = Literal["out", "in", "write", "read"]
INITIAL_SECONDS_PER_BYTE: Mapping[CopyDirection, float] = {"out": 5e-10, "in": 5e-10, "write": 2e-9, "read": 1e-9}
GUESS_WEIGHT_BYTES = 1 << 20  # bytes; weight of the initial estimate
SMOOTHING = 0.75  # weight of older measurements when a new one is added
DECAY_FACTOR = 0.9  # weight of measured copies after copying was too expensive
LOG = logging.getLogger(__name__)


class _Rate(NamedTuple):
    """Recent seconds for a number of units."""

    num_units: float = 0.0
    seconds: float = 0.0


class SwapCostModel:
    """Measured costs of computing and copying."""

    def __init__(self) -> None:
        self._rates: dict[CopyDirection | Literal["compute"], _Rate] = defaultdict(_Rate)

    def record(self, kind: CopyDirection | Literal["compute"], num_units: int, seconds: float) -> None:
        """Record a copy of N bytes, or a step that computed N prompt tokens."""
        if num_units > 0 and seconds >= 0:
            rate = self._rates[kind]
            self._rates[kind] = _Rate(SMOOTHING * rate.num_units + num_units, SMOOTHING * rate.seconds + seconds)

    @property
    def seconds_per_token(self) -> float:
        """Seconds per token; 0 before the first prompt."""
        rate = self._rates["compute"]
        return rate.seconds / rate.num_units if rate.num_units else 0.0

    def seconds_per_byte(self, direction: CopyDirection) -> float:
        """Return seconds per byte, measured and estimated."""
        rate, guess_seconds = self._rates[direction], GUESS_WEIGHT_BYTES * INITIAL_SECONDS_PER_BYTE[direction]
        return (rate.seconds + guess_seconds) / (rate.num_units + GUESS_WEIGHT_BYTES)

    def swap_seconds(self, nbytes: int, *, disk: bool = False, back: bool = False) -> float:
        """Return the seconds to copy a sequence out and in (``back``: only in)."""
        directions: tuple[CopyDirection, ...] = ("read", "in") if disk else ("in",)
        if not back:
            directions += ("out", "write") if disk else ("out",)
        return nbytes * sum(self.seconds_per_byte(direction) for direction in directions)

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        """True if copying is faster than recomputing ``tokens`` tokens."""
        return self.swap_seconds(nbytes, disk=disk, back=back) < tokens * self.seconds_per_token

    def decay(self) -> None:
        """Reduce the weight of measured copies after copying was too expensive."""
        for direction in get_args(CopyDirection):
            rate = self._rates[direction]
            self._rates[direction] = _Rate(DECAY_FACTOR * rate.num_units, DECAY_FACTOR * rate.seconds)

    def measured(self) -> dict[str, float]:
        """Return current microseconds per token and nanoseconds per byte and direction."""
        bytes_ns = {f"{direction}_ns": 1e9 * self.seconds_per_byte(direction) for direction in get_args(CopyDirection)}
        return {"token_us": 1e6 * self.seconds_per_token, **bytes_ns}


@dataclass
class PreemptionStats:
    """Preempted sequences by action, with tokens, bytes and seconds."""

    recomputed: int = 0  # sequences
    recomputed_tokens: int = 0
    to_ram: int = 0  # sequences
    to_disk: int = 0  # sequences
    swapped_bytes: int = 0
    num_lost: int = 0  # swapped sequences whose copy was lost
    # Copies by direction and place: "to ram", "to disk", "from ram", "from disk".
    copied_blocks: Counter[str] = field(default_factory=Counter)
    copied_bytes: Counter[str] = field(default_factory=Counter)
    seconds: dict[CopyDirection, float] = field(default_factory=dict)  # of copying
    swap_space: offload.swap_space.SwapSpaceStats = field(default_factory=offload.swap_space.SwapSpaceStats)
    costs: dict[str, float] = field(default_factory=dict)  # see SwapCostModel.measured


class PreemptionRecord(NamedTuple):
    """Outcome for a preempted sequence.

    ``action``: its copy went "out" or came "back", its tokens are recomputed ("again"), or its copy is "lost" or
    "dropped" (enough is cached by now).
    """

    action: Literal["out", "back", "again", "lost", "dropped"]
    location: offload.swap_space.SwapLocation | None = None  # None: host memory beyond its limit, or imported
    nbytes: int = 0
    reason: str = ""


class PreemptionManager:
    """Chooses between swapping and recomputing for the sequences of one scheduler.

    Args:
        kv_cache_manager: Bookkeeping of the cache.
        costs: Cost model (None: a new one).
        swap_space: Storage of swapped blocks. None: lossy sequences are copied without a limit, exact ones recomputed.
        block_bytes: Bytes of a block in each group (None: computed from the groups).
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        costs: SwapCostModel | None = None,
        swap_space: SwapSpace | None = None,
        block_bytes: Sequence[int] | None = None,
    ) -> None:
        self._kv_cache_manager, self.swap_space = kv_cache_manager, swap_space
        self.costs = SwapCostModel() if costs is None else costs
        self._groups = [group for group in kv_cache_manager.groups if not group.spec.is_cross_attention]
        if block_bytes is None:
            block_bytes = [group_bytes(group).total // group.num_blocks for group in self._groups]
        self._block_bytes = block_bytes[: len(self._groups)]
        self._stats = PreemptionStats()
        # Called for every sequence that is preempted or restored.
        self.preemption_hook: Callable[[TokenSequence, PreemptionRecord], None] | None = None
        # Called with the key of a copy in RAM that returns next.
        self.prefetch_copy: Callable[[int], None] = lambda _: None
        if swap_space is not None:
            swap_space.on_copied = self.on_copied

    def on_copied(self, direction: CopyDirection, nbytes: int, seconds: float) -> None:
        self._stats.seconds[direction] = self._stats.seconds.get(direction, 0.0) + seconds
        self.costs.record(direction, nbytes, seconds)

    def preempt(self, seq: TokenSequence) -> None:
        """Swap a running sequence out, or let it be recomputed (``swapped`` None)."""
        stats = self._kv_cache_manager.stats()
        if seq.swapped is not None or self._should_swap(seq):
            action = self._swap_out(seq)
        else:
            self._stats.recomputed += 1
            self._stats.recomputed_tokens += seq.num_computed_tokens
            self._notify(seq, PreemptionRecord("again"))
            action = f"its {seq.num_computed_tokens} tokens will be recomputed"
        log_full_pool(f"a sequence is preempted, {action}", seq, stats)

    def _swap_out(self, seq: TokenSequence) -> str:
        is_new, nbytes, required = seq.swapped is None, self.nbytes(seq), self._kv_cache_manager.lossy
        location: offload.swap_space.SwapLocation | None = "ram"
        if self.swap_space is not None:
            location = self.swap_space.location_for(nbytes, required=required)
        seq.swapped = self._kv_cache_manager.swap_out(seq.seq_index)
        if not is_new:
            return "its host copy is unchanged"
        if self.swap_space is not None:
            self.swap_space.store(seq.swapped.key, nbytes, seq.priority, required=required)
        self._stats.swapped_bytes += nbytes
        self._count_copy(f"to {location or 'ram'}", seq.swapped, nbytes)
        self._notify(seq, PreemptionRecord("out", location, nbytes))
        self._stats.to_ram += location != "disk"
        self._stats.to_disk += location == "disk"
        return f"{nbytes:,} bytes are swapped to {location or 'host memory beyond its limit: there is no other room'}"

    def _should_swap(self, seq: TokenSequence) -> bool:
        if not seq.num_computed_tokens or (seq.swapped is None and self._kv_cache_manager.is_loading(seq.seq_index)):
            return False  # nothing to copy yet
        if self._kv_cache_manager.lossy:
            return True
        if self.swap_space is None or seq.request.beams is not None:  # a copy of each beam would repeat shared blocks
            return False
        if self._kv_cache_manager.uses_offload:  # most of this sequence is outside the pool already
            return False
        nbytes = self.nbytes(seq)
        location = self.swap_space.location_for(nbytes)
        tokens = seq.num_computed_tokens - self._kv_cache_manager.retained_prefix_length(seq.seq_index)
        if location is not None and self.costs.swap_is_cheaper(nbytes, tokens, disk=location == "disk"):
            return True
        if location is not None:
            self.costs.decay()
        return False

    def nbytes(self, seq: TokenSequence) -> int:
        """Return the bytes of a running sequence's blocks, without encoder blocks."""
        num_blocks = self._kv_cache_manager.num_blocks(seq.seq_index)
        return sum(count * size for count, size in zip(num_blocks, self._block_bytes, strict=True))

    def poll(self) -> bool:
        """Process finished I/O; True if waiting sequences may be affected."""
        return self.swap_space is not None and self.swap_space.poll(
            self._kv_cache_manager.pending_swap_outs, self._kv_cache_manager.pending_swap_ins
        )

    def prefetch(self, seq: TokenSequence) -> None:
        """Start loading the copy of the sequence that is admitted next."""
        if self.swap_space is None or seq.swapped is None:
            return
        state = self.swap_space.record(seq.swapped.key).state
        if state in ("in-ram", "writing"):
            self.prefetch_copy(seq.swapped.key)
        if state != "on-disk":
            return
        if self._is_cached_by_now(seq):
            self.forget(seq)
            self._notify(seq, PreemptionRecord("dropped"))
        else:
            self.swap_space.prefetch(seq.swapped.key)

    def ready(self, seq: TokenSequence) -> bool:
        """True if a swapped sequence can be restored now, or (``swapped`` now None) recomputed."""
        if self.swap_space is None or seq.swapped is None:
            return True
        self.prefetch(seq)
        return seq.swapped is None or self.swap_space.record(seq.swapped.key).state in ("pending", "in-ram", "writing")

    def _is_cached_by_now(self, seq: TokenSequence) -> bool:
        """True if recomputing from the prefix cache is cheaper than reading the copy."""
        if self._kv_cache_manager.lossy or seq.swapped is None:
            return False
        num_cached = self._kv_cache_manager.cached_prefix_length(seq.token_ids, seq.prefix_root)
        nbytes = 0 if self.swap_space is None else self.swap_space.record(seq.swapped.key).nbytes
        num_left = max(0, seq.swapped.length - num_cached)
        return num_cached > 0 and not self.costs.swap_is_cheaper(nbytes, num_left, disk=True, back=True)

    def on_restored(self, seq: TokenSequence) -> None:
        """Release the copy; its swap-in operations are part of the step."""
        if self.swap_space is not None and seq.swapped is not None:
            record = self.swap_space.record(seq.swapped.key)
            self._notify(seq, PreemptionRecord("back", record.origin, record.nbytes))
            if record.origin is not None:  # otherwise it was imported
                self._count_copy(f"from {record.origin}", seq.swapped, record.nbytes)
            self.swap_space.pop(seq.swapped.key)
        seq.swapped = None

    def _count_copy(self, direction: str, swapped: SwappedSequence, nbytes: int) -> None:
        self._stats.copied_blocks[direction] += swapped.num_blocks
        self._stats.copied_bytes[direction] += nbytes

    def forget(self, seq: TokenSequence) -> None:
        if seq.swapped is not None:
            self._kv_cache_manager.drop_swapped(seq.swapped)
            if self.swap_space is not None:
                self.swap_space.drop(seq.swapped.key)
            seq.swapped = None

    def failed(self, seqs: Sequence[TokenSequence]) -> list[tuple[TokenSequence, str]]:
        """Return lossy sequences whose copy was lost, with reasons; exact ones are recomputed."""
        failed_seqs = []
        for seq in seqs:
            record = None if self.swap_space is None or seq.swapped is None else self.swap_space.record(seq.swapped.key)
            if record is None or record.state != "lost":
                continue
            reason = record.fault
            self._stats.num_lost += 1
            self.forget(seq)
            self._notify(seq, PreemptionRecord("lost", reason=reason))
            if self._kv_cache_manager.lossy:
                error = f"the swapped blocks of this sequence are lost and cannot be recomputed: {reason}"
                failed_seqs.append((seq, error))
            else:
                LOG.info("request %d, sample %d is recomputed: %s", seq.request_id, seq.sample_index, reason)
                self._stats.recomputed += 1
        return failed_seqs

    def _notify(self, seq: TokenSequence, swapped: PreemptionRecord) -> None:
        if self.preemption_hook is not None:
            self.preemption_hook(seq, swapped)

    @property
    def has_swapped(self) -> bool:
        """True if the swap space holds a sequence."""
        return self.swap_space is not None and len(self.swap_space) > 0

    @property
    def pending(self) -> bool:
        return self.swap_space is not None and self.swap_space.pending

    def wait(self) -> None:
        """Wait for one read or write, because nothing else can run."""
        assert self.swap_space is not None
        self.swap_space.wait(self._kv_cache_manager.pending_swap_ins)

    def can_always_swap(self, seq: TokenSequence, others: Sequence[TokenSequence]) -> bool:
        """True if all preemptible sequences could be swapped at their longest, including ``seq``."""
        if not self._kv_cache_manager.lossy or self.swap_space is None or self.swap_space.ram is None:
            return True
        seqs = sorted([*others, seq], key=lambda other: (other.overflow not in ("reject", "stop"), other.priority))
        num_left = [group.num_usable_blocks for group in self._groups]
        fits, num_swap_bytes = True, 0
        for index, other in enumerate(seqs):
            max_len = max(len(other.token_ids), other.max_len - 1)
            num_needed = [max_blocks(group, self._kv_cache_manager.groups, max_len) for group in self._groups]
            num_left = [available - count for available, count in zip(num_left, num_needed, strict=True)]
            fits = fits and all(available >= 0 for available in num_left)
            if not fits and (index or other.overflow in ("reject", "stop")):
                num_swap_bytes += sum(count * size for count, size in zip(num_needed, self._block_bytes, strict=True))
        own_bytes = 0 if seq.swapped is None else self.swap_space.record(seq.swapped.key).nbytes
        return self.swap_space.has_room(max(0, num_swap_bytes - own_bytes))

    def stats(self) -> PreemptionStats:
        swap_space = offload.swap_space.SwapSpaceStats() if self.swap_space is None else self.swap_space.stats()
        seconds, costs = dict(self._stats.seconds), self.costs.measured()
        return replace(self._stats, seconds=seconds, swap_space=swap_space, costs=costs)

    def close(self) -> None:
        if self.swap_space is not None:
            self.swap_space.close()


def choose_victim(
    running: Sequence[TokenSequence], items: Sequence[BatchItem], kv_cache_manager: KVCacheManager
) -> TokenSequence | None:
    """Return the youngest sequence that may be preempted when the pool is full; None if all have reserved blocks.

    A sequence in mode "stop" is chosen, to end, only if it cannot grow, or if one with reserved blocks cannot grow.
    """
    growing = {
        id(seq)
        for _, seq, num_new_tokens in items
        if seq.overflow != "preempt" and kv_cache_manager.needs_blocks(seq.seq_index, num_new_tokens)
    }
    candidates = [seq for seq in reversed(running) if seq.overflow != "reject"]
    growing_or_preempted = (seq for seq in candidates if not stops_when_full(seq) or id(seq) in growing)
    return next(growing_or_preempted, candidates[0] if candidates else None)


def stops_when_full(seq: TokenSequence) -> bool:
    """True if the sequence ends when the pool is full; without output it can wait."""
    return seq.overflow == "stop" and seq.num_generated_tokens > 0


def log_full_pool(message: str, seq: TokenSequence, stats: CacheStats) -> None:
    """Log pool usage; ``stats`` are those of the moment when the pool was full."""
    LOG.info(
        "the pool is full: %s (request %d, sample %d); blocks used %s, peak %s, watermark %s, of %s",
        message, seq.request_id, seq.sample_index, stats.used, stats.peak, stats.watermark, stats.total,
    )  # fmt: skip
