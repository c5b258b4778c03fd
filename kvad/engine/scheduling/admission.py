"""Who has a seat and who waits for one: rows come with what the cache has of them, and leave with it or without.

Invariants: a row is in exactly one of *waiting* (no seat, no blocks), *running* (a seat) and neither (it has ended, or
is a beam that has no history, with a seat that is kept for it or without); the lowest free seat is taken first; both
lists stand in the order in which rows came.  Never: a decision about whose turn it is.  Integers only, no torch.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence

from kvad.cache.manager import KVCacheManager
from kvad.engine.scheduling.preemption import PreemptionManager
from kvad.engine.scheduling.sequence import DONE, IDLE, RUNNING, WAITING, Request, TokenSequence

MAX_PREFETCHES = (
    2  # rows whose blocks are brought from the tiers at once, and the oldest: their bytes are in host memory
)


class AdmissionQueue:
    """Of ``num_seats`` rows at once; ``free``: seats that nobody has, a heap."""

    def __init__(self, kv_cache_manager: KVCacheManager, max_num_seqs: int) -> None:
        self._kv_cache_manager, self.max_num_seqs = kv_cache_manager, max_num_seqs
        self.free_indices = list(range(max_num_seqs))
        self.running: list[TokenSequence] = []
        self.waiting: list[TokenSequence] = []

    # ------------------------------------------------------------ a row comes

    def enqueue(self, row: TokenSequence) -> None:
        """The row waits, at its place in the order."""
        insort(self.waiting, row, key=_order)

    def is_admissible(self, row: TokenSequence) -> bool:
        """Could a waiting row go on if it had a seat?"""
        return self.is_ready(row) and self._fetched(row)

    def is_ready(self, row: TokenSequence) -> bool:
        """Samples 1 .. n-1 wait until sample 0 has computed the prompt that they share."""
        first = row.request.sequences[0]
        if row is first or first.state in (DONE, IDLE):
            return True
        return first.state == RUNNING and first.num_computed_tokens >= row.num_prompt_tokens

    def _fetched(self, row: TokenSequence) -> bool:
        """Is all here that the tiers have of this row?  It is asked when a row might be admitted; few are brought at
        once, and only they wait: who needs nothing from there goes past them."""
        if self._kv_cache_manager.prefix_offload is None or row.swapped is not None or not row.token_ids:
            return True
        if row.prefetch is None:
            row.prefetch = self._kv_cache_manager.prefetch(row.token_ids, row.request.prefix_root, _max_hit_tokens(row))
        if row.prefetch.ready():
            return True
        others = sum(other.prefetch is not None and bool(other.prefetch.tickets) for other in self.waiting)
        if row.prefetch.started or (
            others >= MAX_PREFETCHES and row is not self.waiting[0]
        ):  # the oldest waits for nobody
            return False
        row.prefetch.start()
        return row.prefetch.ready()

    def try_admit(self, row: TokenSequence, swaps: PreemptionManager, fresh: Sequence[TokenSequence] = ()) -> bool:
        """Give a row a seat and what the cache knows of it; False, and no change, if its tokens have no room now,
        beside those that run and ``fresh`` ones that are about to."""
        idle, others = self._idle_beams(row), [*self.running, *fresh]
        if len(self.free_indices) <= len(idle) or not swaps.ready(row):
            return False
        if others and not swaps.can_always_swap(row, others):
            return False
        seat = row.seq_index = self.free_indices[0]
        if row.swapped is not None and not self._kv_cache_manager.swap_in(seat, row.swapped):
            row.seq_index = -1
            return False
        length = row.swapped.length if row.swapped is not None else self._share(row, seat)
        if length is None:
            length = self._kv_cache_manager.add_sequence(
                seat, row.token_ids, row.request.prefix_root, _max_hit_tokens(row), row.prefetch
            )
            assert length is not None, f"seat {seat} is taken"
        if (
            row.request.encoder_tokens is not None
            and not row.encoder_ready
            and not self._attach(row, seat, row.request.encoder_tokens)
        ):
            self.release(row, seated=False)
            return False
        row.num_computed_tokens = length
        # Others have still to take blocks for what they were admitted with.  An admission looks past that, as long as
        # no watermark has to be kept: they may preempt it.
        claims = (
            [(each.seq_index, len(each.token_ids)) for each in others]
            if any(self._kv_cache_manager.watermark_blocks)
            else []
        )
        if others and not self._kv_cache_manager.can_allocate(seat, len(row.token_ids), claims):
            self.release(row, seated=False)
            return False
        heapq.heappop(self.free_indices)
        for beam in idle:
            beam.seq_index = heapq.heappop(self.free_indices)
        return True

    def start(self, row: TokenSequence, now: float) -> None:
        """The row, which has taken its seat, runs from ``now`` on."""
        row.state = RUNNING
        insort(self.running, row, key=_order)
        usage = row.request.metrics
        if usage.admitted is None:
            usage.admitted = now
            usage.num_cached_tokens = row.num_computed_tokens

    def _share(self, row: TokenSequence, seat: int) -> int | None:
        """Fork a new sample from a sibling that has the prompt: all of it but the last token, which gives logits."""
        length = row.num_prompt_tokens - 1
        if row.sample_index == 0 or row.num_generated_tokens or length == 0:
            return None
        for sibling in row.request.sequences:
            if sibling.state == RUNNING and sibling.num_computed_tokens >= row.num_prompt_tokens:
                if not self._kv_cache_manager.fork(sibling.seq_index, seat, length):
                    return None
                row.encoder_ready = True
                return length
        return None

    def _attach(self, row: TokenSequence, seat: int, source: tuple[int, ...]) -> bool:
        """Hold the row's source: a sibling's, a known one, or room for it; False: there is no room now."""
        if not row.token_ids:
            return True  # nothing is kept
        for sibling in row.request.sequences:
            if sibling is not row and sibling.state == RUNNING and sibling.encoder_ready:
                self._kv_cache_manager.share_encoder_blocks(sibling.seq_index, seat)
                row.encoder_ready = True
                return True
        known = self._kv_cache_manager.attach_encoder_input(seat, source, row.request.prefix_root)
        if known is False and row.swapped is not None and row.swapped.has_encoder_blocks:
            self._kv_cache_manager.restore_encoder_blocks(seat)
            known = True
        row.encoder_ready = known is True
        return known is not None

    def _idle_beams(self, row: TokenSequence) -> list[TokenSequence]:
        """Beams that take a seat with this row, the first of its search to be seated: they will be forked into it."""
        rows = row.request.sequences if row.request.beams is not None else []
        return [beam for beam in rows if beam.state == IDLE and beam.seq_index < 0]

    def fork(self, row: TokenSequence, twin: TokenSequence) -> TokenSequence:
        """The beam ``twin``, which is idle, goes on from where ``row`` stands."""
        forked = self._kv_cache_manager.fork(row.seq_index, twin.seq_index, row.num_computed_tokens)
        assert forked, "the end of a row can be forked"
        twin.token_ids, twin.num_computed_tokens, twin.read_bucket = (
            list(row.token_ids),
            row.num_computed_tokens,
            row.read_bucket,
        )
        twin.encoder_ready, twin.state = True, RUNNING
        insort(self.running, twin, key=_order)
        return twin

    # ------------------------------------------------------------ and leaves

    def release(self, row: TokenSequence, *, seated: bool = True, publish: bool = True, released: bool = False) -> None:
        """The row gives its blocks back (``released``: it has) and its seat (``seated``: it had taken it)."""
        if not released:
            self._kv_cache_manager.free(row.seq_index, publish)
        if seated:
            heapq.heappush(self.free_indices, row.seq_index)
        row.seq_index, row.num_computed_tokens, row.read_bucket = -1, 0, 0
        row.encoder_ready = row.request.encoder_tokens is None

    def release_idle_beams(self, request: Request) -> None:
        """Beams without a history give up the seats that are kept for them."""
        for beam in request.sequences:
            if beam.state == IDLE and beam.seq_index >= 0:
                heapq.heappush(self.free_indices, beam.seq_index)
                beam.seq_index = -1

    def check(self, rows: Sequence[TokenSequence]) -> None:
        """Assert that every one of ``rows``, all that there are, is in one place, and that seats add up."""
        beams = [row for row in rows if row.state == IDLE]
        idle = [row.seq_index for row in beams if row.seq_index >= 0]
        assert len(self.running) + len(idle) + len(self.free_indices) == self.max_num_seqs, "seats leak"
        seats = sorted([row.seq_index for row in self.running] + idle + self.free_indices)
        assert seats == list(range(self.max_num_seqs)), "a seat is taken twice"
        for listed, state in ((self.running, RUNNING), (self.waiting, WAITING)):
            assert all(row.state == state for row in listed), f"a row in the {state} list is not {state}"
            assert [_order(row) for row in listed] == sorted({_order(row) for row in listed}), f"{state}: out of order"
        alive = [row for row in rows if row.state not in (DONE, IDLE)]
        assert len(alive) == len(self.running) + len(self.waiting), "a row is lost"
        for row in self.running:
            assert row.num_computed_tokens == self._kv_cache_manager.seq_len(row.seq_index), (
                "the row and the ledger disagree on its length"
            )
            answered = (row.request.encoder_tokens is not None and not row.token_ids) or row.beam_candidates is not None
            assert answered or row.num_computed_tokens < len(row.token_ids) <= row.max_len, (
                "a row with nothing to compute is running"
            )


def _max_hit_tokens(row: TokenSequence) -> int | None:
    """Tokens that a hit of this row may cover, where prompt log-probabilities are wanted."""
    return (
        row.num_scored_tokens
        if row.wants_prompt_logprobs and row.num_scored_tokens < row.num_prompt_tokens - 1
        else None
    )


def _order(row: TokenSequence) -> tuple[int, int]:
    return row.priority
