"""Admission: assign indices to waiting sequences with their cached tokens, and release them.

Invariants: a sequence is *waiting* (no index, no blocks), *running* (an index), or neither (it has ended, or is a beam
without tokens, with or without a reserved index); the lowest free index is assigned first; both lists are in order of
arrival.
"""

from __future__ import annotations

import heapq
import logging
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from kvad.cache.manager import KVCacheManager
from kvad.engine.scheduling.beam_search import BeamCandidate
from kvad.engine.scheduling.preemption import PreemptionManager
from kvad.engine.scheduling.sequence import DONE, IDLE, RUNNING, WAITING, Request, TokenSequence

_priority = attrgetter("priority")
LOG = logging.getLogger(__name__)
MAX_PREFETCHES = 2  # sequences that load from the block store at once, besides the oldest (their bytes are in RAM)


class AdmissionQueue:
    """Waiting and running sequences; ``free_indices`` is a heap."""

    def __init__(self, kv_cache_manager: KVCacheManager, preemption: PreemptionManager, max_num_seqs: int) -> None:
        self._kv_cache_manager, self.preemption, self.max_num_seqs = kv_cache_manager, preemption, max_num_seqs
        self.free_indices = list(range(max_num_seqs))
        self.running: list[TokenSequence] = []
        self.waiting: list[TokenSequence] = []
        self._num_frees_when_blocked = -1  # at the last failed admission; retried when blocks are freed

    def admit(self, *, with_encoder_input: bool, request_id: int | None = None) -> Iterator[TokenSequence]:
        """Yield waiting sequences (of ``request_id`` only, if given) as they are admitted, until one does not fit.

        They are not running before ``start``, which the caller may call at once.
        """
        if not self.free_indices or (self.running and self.is_blocked and self.waiting[0].request.beams is None):
            return
        new_seqs: list[TokenSequence] = []
        oldest: TokenSequence | None = None  # of those that may be admitted
        for seq in list(self.waiting):
            if not self.free_indices:
                return
            has_encoder_input = seq.request.encoder_input is not None
            if request_id not in (None, seq.request_id) or has_encoder_input != with_encoder_input:
                continue
            if not self.is_ready(seq):
                continue
            oldest = seq if oldest is None else oldest
            if not self._is_prefetched(seq, is_oldest=seq is oldest):
                continue
            if not self.try_admit(seq, new_seqs):
                self.block()
                return
            self.waiting.remove(seq)
            yield seq
            if seq.state == WAITING:
                new_seqs.append(seq)

    @property
    def is_blocked(self) -> bool:
        """True if there is no index, or no block was freed since a sequence did not fit."""
        return not self.free_indices or self._num_frees_when_blocked == self._kv_cache_manager.num_frees

    def block(self) -> None:
        """Admit nothing to a running batch until blocks are freed."""
        self._num_frees_when_blocked = self._kv_cache_manager.num_frees

    def requeue(
        self, seq: TokenSequence, before: Callable[[TokenSequence], None] = lambda _: None, *, publish: bool = True
    ) -> None:
        """Let a running sequence, with its beams, wait at its old place; ``before`` may swap the blocks of each out."""
        seqs = [seq] if seq.request.beams is None else [beam for beam in seq.request.sequences if beam.state == RUNNING]
        for other in seqs:
            self.running.remove(other)
            before(other)
            self.release(other, publish=publish, is_freed=other.swapped is not None)
            other.state, other.beam_candidates = WAITING, None
            self.enqueue(other)
        self.release_idle_beams(seq.request)
        self.unblock()

    def unblock(self) -> None:
        self._num_frees_when_blocked = -1

    def enqueue(self, seq: TokenSequence) -> None:
        insort(self.waiting, seq, key=_priority)

    def is_ready(self, seq: TokenSequence) -> bool:
        """True unless sample 0 must first compute the prompt that samples 1 .. n-1 share."""
        first = seq.request.sequences[0]
        if seq is first or first.state in (DONE, IDLE):
            return True
        return first.state == RUNNING and first.num_computed_tokens >= seq.num_prompt_tokens

    def _is_prefetched(self, seq: TokenSequence, *, is_oldest: bool) -> bool:
        """True if the sequence's blocks from the block store are in RAM.

        Called when a sequence might be admitted. Few sequences load at once, and only these wait; a sequence that needs
        nothing from the store passes them. The oldest is never delayed by others.
        """
        if self._kv_cache_manager.prefix_offload is None or seq.swapped is not None or not seq.token_ids:
            return True
        if seq.prefetch is None:
            seq.prefetch = self._kv_cache_manager.prefetch(seq.token_ids, seq.prefix_root, _max_hit_tokens(seq))
        if seq.prefetch.ready():
            return True
        others = sum(other.prefetch is not None and bool(other.prefetch.handles) for other in self.waiting)
        if seq.prefetch.started or (others >= MAX_PREFETCHES and not is_oldest):
            return False
        seq.prefetch.start()
        return seq.prefetch.ready()

    def try_admit(self, seq: TokenSequence, new_seqs: Sequence[TokenSequence]) -> bool:
        """Assign an index and the cached tokens to a sequence.

        Returns:
            False, without changes, if its tokens do not fit next to the running and ``new_seqs`` ones.
        """
        # These beams get an index together with the first admitted one, to be forked later.
        idle_beams = [beam for beam in seq.request.sequences if beam.state == IDLE and beam.seq_index < 0]
        others = [*self.running, *new_seqs]
        if len(self.free_indices) <= len(idle_beams) or not self.preemption.ready(seq):
            return False
        if others and not self.preemption.can_always_swap(seq, others):
            return False
        seq_index = seq.seq_index = self.free_indices[0]
        if seq.swapped is not None and not self._kv_cache_manager.swap_in(seq_index, seq.swapped, seq.request_id):
            seq.seq_index = -1
            return False
        length = seq.swapped.length if seq.swapped is not None else self._fork_prompt(seq, seq_index)
        if length is None:
            length = self._kv_cache_manager.add_sequence(
                seq_index, seq.token_ids, seq.prefix_root, _max_hit_tokens(seq), seq.prefetch, seq.request_id
            )
            assert length is not None, f"index {seq_index} is in use"
        if not seq.encoder_ready and not self._attach_encoder_input(seq, seq_index, seq.request.encoder_tokens):
            self.release(seq, has_index=False)
            return False
        seq.num_computed_tokens = length
        # Other sequences still need blocks for the tokens they were admitted with. Without a watermark, admission
        # ignores that, because they may preempt this one.
        pending_needs: list[tuple[int, int]] = []
        if any(self._kv_cache_manager.watermark_blocks):
            pending_needs = [(other.seq_index, len(other.token_ids)) for other in others]
        # The beams of a search advance together: without other requests, they need no free blocks beside theirs.
        is_search_alone = seq.request.beams is not None and all(other.request is seq.request for other in others)
        has_room = not others or is_search_alone
        if not (has_room or self._kv_cache_manager.can_allocate(seq_index, len(seq.token_ids), pending_needs)):
            self.release(seq, has_index=False)
            return False
        heapq.heappop(self.free_indices)
        if seq.request.metrics.admitted is None:
            self._record_lookup(seq)
        for beam in idle_beams:
            beam.seq_index = heapq.heappop(self.free_indices)
        return True

    def _record_lookup(self, seq: TokenSequence) -> None:
        """Set in the metrics of a request's first admission where its cached tokens were, and why there are no more."""
        metrics = seq.request.metrics
        metrics.is_resumed = seq.swapped is not None
        if seq.request.encoder_input is not None:
            metrics.is_source_cached = seq.encoder_ready
        if not metrics.is_resumed:
            lookup = self._kv_cache_manager.history.lookup
            metrics.num_ram_tokens, metrics.num_disk_tokens = lookup.num_ram_tokens, lookup.num_disk_tokens
            metrics.miss_reason, metrics.miss_cause = lookup.reason, lookup.cause

    def start(self, seq: TokenSequence, now: float) -> None:
        seq.state = RUNNING
        insort(self.running, seq, key=_priority)
        metrics = seq.request.metrics
        LOG.debug(
            "request %d, sample %d is %s: %d of %d tokens are cached",
            seq.request_id,
            seq.sample_index,
            "admitted" if not metrics.num_preemptions else "resumed",
            seq.num_computed_tokens,
            len(seq.token_ids),
        )
        if metrics.admitted is None:
            metrics.admitted = now
            metrics.num_cached_tokens = seq.num_computed_tokens

    def _fork_prompt(self, seq: TokenSequence, seq_index: int) -> int | None:
        """Fork a new sample from a sibling, up to the prompt's last token (needed for logits)."""
        length = seq.num_prompt_tokens - 1
        if seq.sample_index == 0 or seq.num_generated_tokens or length == 0:
            return None
        for sibling in seq.request.sequences:
            has_prompt = sibling.state == RUNNING and sibling.num_computed_tokens >= seq.num_prompt_tokens
            if has_prompt and sibling.rope_regime == seq.rope_regime:
                if not self._kv_cache_manager.fork(sibling.seq_index, seq_index, length):
                    return None
                seq.encoder_ready = True
                return length
        return None

    def _attach_encoder_input(self, seq: TokenSequence, seq_index: int, encoder_tokens: tuple[int, ...]) -> bool:
        """Attach encoder input: a sibling's, a cached one, or free blocks; False if none are free."""
        if not seq.token_ids:
            return True  # an encoder-only request caches nothing
        for sibling in seq.request.sequences:
            if sibling is not seq and sibling.state == RUNNING and sibling.encoder_ready:
                self._kv_cache_manager.share_encoder_blocks(sibling.seq_index, seq_index)
                seq.encoder_ready = True
                return True
        is_cached = self._kv_cache_manager.attach_encoder_input(seq_index, encoder_tokens, seq.request.prefix_root)
        if is_cached is False and seq.swapped is not None and seq.swapped.has_encoder_blocks:
            self._kv_cache_manager.restore_encoder_blocks(seq_index)
            is_cached = True
        seq.encoder_ready = is_cached is True
        return is_cached is not None

    def continue_beams(self, request: Request, children: Sequence[BeamCandidate]) -> None:
        """Fork beams with several children and free those with none; append the children's tokens.

        A beam's first child continues at its index; others continue in idle beams.
        """
        live, first_child = request.live_beams, dict[int, int]()
        for rank, child in enumerate(children):
            first_child.setdefault(child.parent, rank)
        for index, seq in enumerate(live):
            seq.beam_candidates = None
            if index not in first_child:
                self.running.remove(seq)
                self._kv_cache_manager.free(seq.seq_index)
                seq.state = IDLE
        idle_beams = [seq for seq in request.sequences if seq.state == IDLE]
        request.live_beams = []
        for rank, child in enumerate(children):
            parent = live[child.parent]
            is_first = first_child[child.parent] == rank
            request.live_beams.append(parent if is_first else self._fork(parent, idle_beams.pop(0)))
        for seq, child in zip(request.live_beams, children, strict=True):
            seq.token_ids.append(child.token)

    def _fork(self, seq: TokenSequence, beam: TokenSequence) -> TokenSequence:
        """Let the idle beam ``beam`` continue with the tokens of ``seq``."""
        forked = self._kv_cache_manager.fork(seq.seq_index, beam.seq_index, seq.num_computed_tokens)
        assert forked, "a sequence can always be forked at its end"
        beam.token_ids, beam.num_computed_tokens = list(seq.token_ids), seq.num_computed_tokens
        beam.read_bucket, beam.encoder_ready, beam.state = seq.read_bucket, True, RUNNING
        beam.rope_regime = seq.rope_regime
        insort(self.running, beam, key=_priority)
        return beam

    def release(
        self, seq: TokenSequence, *, has_index: bool = True, publish: bool = True, is_freed: bool = False
    ) -> None:
        """Free the sequence's blocks unless ``is_freed``, and its index if ``has_index``."""
        if not is_freed:
            self._kv_cache_manager.free(seq.seq_index, publish)
        if has_index:
            heapq.heappush(self.free_indices, seq.seq_index)
        seq.seq_index, seq.num_computed_tokens, seq.read_bucket, seq.draft_token_ids = -1, 0, 0, ()
        seq.encoder_ready = seq.request.encoder_input is None

    def release_idle_beams(self, request: Request) -> None:
        """Release the indices reserved for beams without tokens."""
        for beam in request.sequences:
            if beam.state == IDLE and beam.seq_index >= 0:
                heapq.heappush(self.free_indices, beam.seq_index)
                beam.seq_index = -1

    def check(self, seqs: Sequence[TokenSequence]) -> None:
        """Assert that each of ``seqs`` (all sequences) is in one place and that the indices add up."""
        idle_beams = [seq.seq_index for seq in seqs if seq.state == IDLE and seq.seq_index >= 0]
        assert len(self.running) + len(idle_beams) + len(self.free_indices) == self.max_num_seqs, "indices leak"
        indices = sorted([seq.seq_index for seq in self.running] + idle_beams + self.free_indices)
        assert indices == list(range(self.max_num_seqs)), "an index is used twice"
        for seq_list, state in ((self.running, RUNNING), (self.waiting, WAITING)):
            assert all(seq.state == state for seq in seq_list), f"a sequence in the {state} list is not {state}"
            assert [_priority(seq) for seq in seq_list] == sorted({_priority(seq) for seq in seq_list}), (
                f"{state}: out of order"
            )
        active = [seq for seq in seqs if seq.state not in (DONE, IDLE)]
        assert len(active) == len(self.running) + len(self.waiting), "a sequence is lost"
        for seq in self.running:
            assert seq.num_computed_tokens == self._kv_cache_manager.seq_len(seq.seq_index), (
                "the sequence and the manager disagree on its length"
            )
            is_exempt = not seq.token_ids or seq.beam_candidates is not None
            assert is_exempt or seq.num_computed_tokens < len(seq.token_ids) <= seq.max_len, (
                "a sequence without tokens to compute is running"
            )


def _max_hit_tokens(seq: TokenSequence) -> int | None:
    """Return the longest allowed prefix hit if outputs of the prompt's tokens are requested."""
    if seq.request.pooling not in (None, "last"):
        return 0
    needs_scores = seq.wants_prompt_logprobs and seq.num_scored_tokens < seq.num_prompt_tokens - 1
    return seq.num_scored_tokens if needs_scores else None
