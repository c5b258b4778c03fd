"""How a row gives way: its blocks copied out and in again, or given back and its tokens computed again.

What a lossy row keeps is a matter of what it saw, so it is always copied (parked).  An exact row is copied where the
parking has room and that is expected to take less time than computing again what no other row keeps; when it comes back
the way in is weighed once more against what is known by then.  Which it was is never seen in what a row says.

Where parking is bounded, lossy rows are seated side by side only as far as all but those that fit into the pool at
their longest could be parked: so one that must give way always can, and the oldest goes on alone if need be.

Integers, and costs as they are told; no torch.

What giving way costs on this machine: seconds per token computed, seconds per byte copied, as they were measured.

A row that gives way is computed again, or its bytes are copied out and in ("out", "in": between the pool and the host;
"write", "read": between the host and the disk).  The engine tells every prompt step and every copy; averages weigh the
latest most.  Until something was copied a guess stands in, as it does more and more for a way that was found too dear
again and again (:meth:`Costs.fade`): one slow moment is not believed for ever.

Plain numbers; no torch, and no clock but the one given.  Nothing that a row says depends on what is answered here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from kvad.cache import group_bytes, offload
from kvad.cache.manager import KVCacheManager, max_blocks
from kvad.cache.offload import SwapSpace
from kvad.engine.scheduling.sequence import TokenSequence

CopyDirection = Literal["out", "in", "write", "read"]
INITIAL_SECONDS_PER_BYTE: Mapping[CopyDirection, float] = {
    "out": 5e-10,
    "in": 5e-10,
    "write": 2e-9,
    "read": 1e-9,
}  # seconds per byte
GUESS_WEIGHT_BYTES = 1 << 20  # bytes that a guess weighs as much as
SMOOTHING = 0.75  # of what was known, when something new is measured
DECAY_FACTOR = 0.9  # of what was measured, when a way was too dear


class _Rate(NamedTuple):
    """Seconds for so many units, of late."""

    units: float = 0.0
    seconds: float = 0.0

    def later(self, units: float, seconds: float) -> _Rate:
        return _Rate(SMOOTHING * self.units + units, SMOOTHING * self.seconds + seconds)


class SwapCostModel:
    """``clock``: seconds, for whoever measures."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._seconds_per_token = _Rate()
        self._bytes: dict[CopyDirection, _Rate] = {way: _Rate() for way in get_args(CopyDirection)}

    def record_compute(self, tokens: int, seconds: float) -> None:
        """A step that read prompts computed so many tokens."""
        if tokens > 0 and seconds >= 0:
            self._seconds_per_token = self._seconds_per_token.later(tokens, seconds)

    def record_copy(self, way: CopyDirection, nbytes: int, seconds: float) -> None:
        if nbytes > 0 and seconds >= 0:
            self._bytes[way] = self._bytes[way].later(nbytes, seconds)

    @property
    def seconds_per_token(self) -> float:
        """Seconds per token; 0 while no prompt has been read."""
        return self._seconds_per_token.seconds / self._seconds_per_token.units if self._seconds_per_token.units else 0.0

    def seconds_per_byte(self, way: CopyDirection) -> float:
        """Seconds per byte, measured and guessed."""
        rate = self._bytes[way]
        return (rate.seconds + GUESS_WEIGHT_BYTES * INITIAL_SECONDS_PER_BYTE[way]) / (rate.units + GUESS_WEIGHT_BYTES)

    def swap_seconds(self, nbytes: int, *, disk: bool = False, back: bool = False) -> float:
        """Seconds to copy a row out and in, by way of the disk where said; ``back``: of the way in alone."""
        ways: tuple[CopyDirection, ...] = ("read", "in") if disk else ("in",)
        if not back:
            ways += ("out", "write") if disk else ("out",)
        return nbytes * sum(self.seconds_per_byte(way) for way in ways)

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        """Than computing so many tokens again."""
        return self.swap_seconds(nbytes, disk=disk, back=back) < tokens * self.seconds_per_token

    def decay(self) -> None:
        """Copying was found too dear: what was measured of it counts a little less from now on."""
        self._bytes = {
            way: _Rate(DECAY_FACTOR * rate.units, DECAY_FACTOR * rate.seconds) for way, rate in self._bytes.items()
        }

    def measured(self) -> dict[str, float]:
        """Microseconds per token, nanoseconds per byte each way, as they are believed now."""
        return {
            "token_us": 1e6 * self.seconds_per_token,
            **{f"{way}_ns": 1e9 * self.seconds_per_byte(way) for way in self._bytes},
        }


LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreemptionStats:
    """Rows that gave way, by what was done, and tokens and bytes of them; those that were parked and are lost.
    ``seconds``: of copying, by way; ``costs``: microseconds per token, nanoseconds per byte (``Costs.measured``)."""

    recomputed: int = 0
    recomputed_tokens: int = 0
    to_ram: int = 0
    to_disk: int = 0
    swapped_bytes: int = 0
    num_lost: int = 0
    seconds: dict[CopyDirection, float] = field(default_factory=dict)
    swap_space: offload.swap_space.SwapSpaceStats = field(default_factory=offload.swap_space.SwapSpaceStats)
    costs: dict[str, float] = field(default_factory=dict)


class PreemptionRecord(NamedTuple):
    """What became of a row that gave way: its copy went "out" or came "back", its tokens are computed "again", or its
    copy is "lost" or "dropped" (enough of it is known by now).  ``place``: to or from where; None: to host memory
    beyond its bound, or back from elsewhere (``Ledger.adopt``)."""

    action: Literal["out", "back", "again", "lost", "dropped"]
    location: offload.swap_space.SwapLocation | None = None
    nbytes: int = 0
    reason: str = ""


class PreemptionManager:
    """Decides for the rows of one scheduler.  ``parking`` None: lossy rows are copied without a bound and kept by the
    device alone, exact ones are always computed again.  ``block_bytes``: of each group, as the memory says."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        costs: SwapCostModel | None = None,
        swap_space: SwapSpace | None = None,
        block_bytes: Sequence[int] | None = None,
    ) -> None:
        self._kv_cache_manager, self.costs, self.swap_space = (
            kv_cache_manager,
            SwapCostModel() if costs is None else costs,
            swap_space,
        )
        self._groups = kv_cache_manager.groups[
            : len(kv_cache_manager.token_groups) + len(kv_cache_manager.lower_groups)
        ]
        if block_bytes is None:
            block_bytes = [group_bytes(group).total // group.num_blocks for group in self._groups]
        self._block_bytes = block_bytes[: len(self._groups)]
        self._recomputed = self._tokens = self._ram = self._disk = self._bytes = self._failed = 0
        self._seconds: dict[CopyDirection, float] = {}
        self.witness: Callable[[TokenSequence, PreemptionRecord], None] | None = None  # hears what becomes of every row
        if swap_space is not None:
            swap_space.on_copied = self.on_copied

    def on_copied(self, way: CopyDirection, nbytes: int, seconds: float) -> None:
        """So many bytes were copied."""
        self._seconds[way] = self._seconds.get(way, 0.0) + seconds
        self.costs.record_copy(way, nbytes, seconds)

    # ------------------------------------------------------------ a row gives way

    def preempt(self, row: TokenSequence) -> str:
        """Park a seated row, or leave it to be computed again (``row.parked`` None); says which, and why."""
        if row.swapped is None and not self._parks(row):
            self._recomputed += 1
            self._tokens += row.num_computed_tokens
            self._tell(row, PreemptionRecord("again"))
            return f"its {row.num_computed_tokens} tokens are to be computed again"
        anew, nbytes = row.swapped is None, self.nbytes(row)
        where = (
            "ram"
            if self.swap_space is None
            else self.swap_space.location_for(nbytes, needed=self._kv_cache_manager.lossy)
        )
        row.swapped = self._kv_cache_manager.swap_out(row.seq_index)
        if not anew:
            return "its copy was not touched yet"
        if self.swap_space is not None:
            self.swap_space.store(row.swapped.key, nbytes, row.priority, needed=self._kv_cache_manager.lossy)
        self._bytes += nbytes
        self._tell(row, PreemptionRecord("out", where, nbytes))
        self._ram, self._disk = self._ram + (where != "disk"), self._disk + (where == "disk")
        return f"{nbytes:,} bytes are swapped to {where or 'host memory, beyond its bound: nothing else has room'}"

    def _parks(self, row: TokenSequence) -> bool:
        if not row.num_computed_tokens or (row.swapped is None and self._kv_cache_manager.is_loading(row.seq_index)):
            return False  # there is nothing to copy yet
        if self._kv_cache_manager.lossy:
            return True
        if self.swap_space is None or row.request.beams is not None:  # beams share what would be copied for each
            return False
        if self._kv_cache_manager.uses_offload:  # most of such a row lies outside the pool already
            return False
        nbytes = self.nbytes(row)
        where = self.swap_space.location_for(nbytes)
        tokens = row.num_computed_tokens - self._kv_cache_manager.retained_prefix_length(row.seq_index)
        if where is not None and self.costs.swap_is_cheaper(nbytes, tokens, disk=where == "disk"):
            return True
        if where is not None:
            self.costs.decay()
        return False

    def nbytes(self, row: TokenSequence) -> int:
        """What a seated row's blocks hold, sources apart."""
        held = self._kv_cache_manager.num_blocks(row.seq_index)
        return sum(count * size for count, size in zip(held, self._block_bytes, strict=True))

    # ------------------------------------------------------------ and comes back

    def poll(self) -> bool:
        """See what the parking has done.  True: rows that wait may find something changed."""
        return self.swap_space is not None and self.swap_space.poll(
            self._kv_cache_manager.pending_swap_outs, self._kv_cache_manager.pending_swap_ins
        )

    def prefetch(self, row: TokenSequence) -> None:
        """The row is the next that could be seated: have its copy in memory by then."""
        if self.swap_space is not None and row.swapped is not None and self.swap_space.state(row.swapped.key) == "away":
            if self._known_by_now(row):
                self.forget(row)
                self._tell(row, PreemptionRecord("dropped"))
            else:
                self.swap_space.prefetch(row.swapped.key)

    def ready(self, row: TokenSequence) -> bool:
        """Can a parked row be woken (or, ``row.parked`` None by now, be computed again)?"""
        if self.swap_space is None or row.swapped is None:
            return True
        self.prefetch(row)
        return row.swapped is None or self.swap_space.state(row.swapped.key) in ("coming", "here", "leaving")

    def _known_by_now(self, row: TokenSequence) -> bool:
        """Has enough of an exact row become known that computing the rest is cheaper than reading its copy?"""
        if self._kv_cache_manager.lossy or row.swapped is None:
            return False
        known = self._kv_cache_manager.cached_prefix_length(row.token_ids, row.request.prefix_root)
        nbytes = 0 if self.swap_space is None else self.swap_space.nbytes(row.swapped.key)
        left = max(0, row.swapped.length - known)
        return known > 0 and not self.costs.swap_is_cheaper(nbytes, left, disk=True, back=True)

    def on_restored(self, row: TokenSequence) -> None:
        """The moves that wake the row are told."""
        if self.swap_space is not None and row.swapped is not None:
            key = row.swapped.key
            self._tell(row, PreemptionRecord("back", self.swap_space.read_from(key), self.swap_space.nbytes(key)))
            self.swap_space.pop(key)
        row.swapped = None

    def forget(self, row: TokenSequence) -> None:
        """The row's copy is wanted no more."""
        if row.swapped is not None:
            self._kv_cache_manager.drop_swapped(row.swapped)
            if self.swap_space is not None:
                self.swap_space.drop(row.swapped.key)
            row.swapped = None

    def failed(self, rows: Sequence[TokenSequence]) -> list[tuple[TokenSequence, str]]:
        """Which of the rows that wait have lost their copy, and why.  Exact ones have forgotten it already, and will be
        computed again; the others cannot go on."""
        ended = []
        for row in rows:
            if self.swap_space is None or row.swapped is None or self.swap_space.state(row.swapped.key) != "lost":
                continue
            why = self.swap_space.failure(row.swapped.key)
            self._failed += 1
            self.forget(row)
            self._tell(row, PreemptionRecord("lost", reason=why))
            if self._kv_cache_manager.lossy:
                ended.append((row, f"what the cache had kept of this row is lost, and cannot be computed again: {why}"))
            else:
                LOG.info("request %d, sample %d: it is computed again: %s", row.request_id, row.sample_index, why)
                self._recomputed += 1
        return ended

    def _tell(self, row: TokenSequence, swapped: PreemptionRecord) -> None:
        if self.witness is not None:
            self.witness(row, swapped)

    @property
    def has_swapped(self) -> bool:
        """Whether a parking holds a row."""
        return self.swap_space is not None and len(self.swap_space) > 0

    @property
    def pending(self) -> bool:
        return self.swap_space is not None and self.swap_space.pending

    def wait(self) -> None:
        """For one read or write that is under way: there is nothing else to do."""
        assert self.swap_space is not None
        self.swap_space.wait(self._kv_cache_manager.pending_swap_ins)

    # ------------------------------------------------------------ room

    def can_always_swap(self, row: TokenSequence, others: Sequence[TokenSequence]) -> bool:
        """Could every row that may have to give way be parked at its longest, if ``row`` were seated too?"""
        if not self._kv_cache_manager.lossy or self.swap_space is None or not self.swap_space.bounded:
            return True
        rows = sorted([*others, row], key=lambda each: (each.overflow not in ("refuse", "stop"), each.priority))
        left = [group.num_usable_blocks for group in self._groups]
        fits, parked = True, 0
        for number, each in enumerate(rows):
            need = [max_blocks(group, self._kv_cache_manager.groups, _max_len(each)) for group in self._groups]
            left = [have - count for have, count in zip(left, need, strict=True)]
            fits = fits and all(have >= 0 for have in left)
            if not fits and (number or each.overflow in ("refuse", "stop")):
                parked += sum(count * size for count, size in zip(need, self._block_bytes, strict=True))
        back = 0 if row.swapped is None else self.swap_space.nbytes(row.swapped.key)
        return self.swap_space.has_room(max(0, parked - back))

    def stats(self) -> PreemptionStats:
        parking = offload.swap_space.SwapSpaceStats() if self.swap_space is None else self.swap_space.stats()
        return PreemptionStats(
            self._recomputed, self._tokens, self._ram, self._disk, self._bytes, self._failed, dict(self._seconds),
            parking, self.costs.measured(),
        )  # fmt: skip

    def close(self) -> None:
        if self.swap_space is not None:
            self.swap_space.close()


def _max_len(row: TokenSequence) -> int:
    return max(len(row.token_ids), row.max_len - 1)
