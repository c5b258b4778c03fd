"""Scheduler: choose the sequences of the next step and their numbers of tokens.

Integers only: no torch.

The encoder's input (of an encoder-decoder, or an encoder's own text) is encoded whole in a separate step before the
rest of its sequence; waiting inputs are encoded together.

:meth:`Scheduler.schedule` gives every decoding sequence its token, then continues prompts in chunks, then admits
waiting sequences first come, first served, all within ``max_num_batched_tokens`` and ``max_num_seqs``; its output has
blocks allocated. :meth:`Scheduler.update_from_output` takes the results and returns events. One step may be in flight.

Invariants: the oldest sequence advances or ends, so every request ends; the tokens of a sequence do not depend on its
neighbors; a sequence is in exactly one of *waiting* (no index, no blocks), *running* (an index) and *done*.

The beams of a search are sequences that advance together: each waits until all have candidates, then some are forked
(blocks are shared and copied on write) and some are freed. They are preempted together.

When a pool is full, the youngest running sequence is preempted: its blocks are freed (published ones may survive), it
waits at its old place in the queue and is recomputed; or it is swapped out and later swapped in unchanged
(``preemption.py``), while others run. A sequence with overflow mode "stop" ends instead if it is the one that cannot
grow; one with "reject" is never preempted, because its blocks were reserved on arrival (``limits.py``).
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvad import cache
from kvad.cache.manager import BlockAllocation, CacheStats, KVCacheManager, SwappedSequence
from kvad.engine.scheduling.admission import AdmissionQueue
from kvad.engine.scheduling.batching import BatchItem, SubBatchBuilder, group_by_source
from kvad.engine.scheduling.beam_search import BeamSearch
from kvad.engine.scheduling.limits import BlockReservations, LengthLimits
from kvad.engine.scheduling.preemption import PreemptionManager
from kvad.engine.scheduling.request import FinishReason, SamplingParams, SequenceEvent, SequenceOutput, TokenLogprob
from kvad.engine.scheduling.sequence import (
    DONE,
    IDLE,
    RUNNING,
    WAITING,
    EncoderBatch,
    FinishedState,
    Request,
    RequestMetrics,
    ScheduledSequence,
    SchedulerOutput,
    TokenSequence,
)
from kvad.errors import ConfigError, RequestError
from kvad.model_input import BlockOps, SubBatch

MAX_RECOVERIES = 2  # recomputations of a sequence whose offloaded tokens were lost; then it ends with an error
MAX_FINISHED_METRICS = 4096  # metrics of ended requests that stay available
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SchedulerStats:
    """Counts of sequences, preemptions, steps and tokens."""

    running: int
    waiting: int
    preemptions: int
    steps: int
    tokens: int  # computed tokens, recomputed ones included


class Scheduler:
    """Schedules the sequences of one KVCacheManager.

    Args:
        kv_cache_manager: Host bookkeeping of the cache; owned by the scheduler.
        max_num_seqs: Sequences that run at the same time.
        max_num_batched_tokens: New tokens per step.
        prefill_chunk_size: New tokens of one sequence per step.
        limit: Longest sequence in tokens, or the limits with their overflow modes.
        clock: Time in seconds, for request metrics.
        preemption: How sequences are preempted (None: without a swap space).
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_chunk_size: int,
        limit: int | LengthLimits,
        clock: Callable[[], float] = time.monotonic,
        preemption: PreemptionManager | None = None,
    ) -> None:
        limits = limit if isinstance(limit, LengthLimits) else LengthLimits(limit)
        if max_num_seqs < 1 or prefill_chunk_size < 1 or limits.max_len < 1:
            raise ConfigError(
                "max_num_seqs, prefill_chunk_size and max_len: must be at least 1, "
                f"got {max_num_seqs}, {prefill_chunk_size} and {limits.max_len}"
            )
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: must be at least max_num_seqs ({max_num_seqs}), got {max_num_batched_tokens}"
            )
        self.kv_cache_manager = kv_cache_manager
        self.preemption = PreemptionManager(kv_cache_manager) if preemption is None else preemption
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefill_chunk_size = prefill_chunk_size
        self.limits = limits
        self._reservations = BlockReservations(kv_cache_manager.groups, kv_cache_manager.watermark_blocks)
        self._clock = clock
        self._admission = AdmissionQueue(kv_cache_manager, max_num_seqs)
        self._running, self._waiting = self._admission.running, self._admission.waiting  # oldest first, both
        self._free_indices = self._admission.free_indices
        self._requests: dict[int, Request] = {}
        self._ended: dict[int, RequestMetrics] = {}
        self._in_flight: SchedulerOutput | None = None
        self._pending_events: list[SequenceEvent] = []
        self._finished_states: list[FinishedState] = []
        self._arrivals = self._preemptions = self._steps = self._tokens = 0
        self._num_frees_when_blocked = -1  # at the last failed admission; retried when blocks are freed
        self._sub_batch_builder = SubBatchBuilder(kv_cache_manager.groups)

    # ------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: int,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        prefix_root: bytes = b"",
        *,
        stop_tokens: frozenset[int] = frozenset(),
        encoder_tokens: Sequence[int] | None = None,
        encoder_output: str = "head",
        swapped: SwappedSequence | None = None,
        keep_state: bool = False,
    ) -> RequestMetrics:
        """Queue a request and return its metrics, which are updated until it ends.

        Args:
            request_id: Unused number of the request.
            prompt: Token ids; the start of the target of an encoder-decoder; empty to request the encoder's output.
            sampling_params: Sampling options; ``max_tokens=None`` means the lowest limit of model, cache and pool.
            prefix_root: Start of the block hash chain.
            stop_tokens: Token ids that end a sample, in addition to those of ``sampling_params``.
            encoder_tokens: Input of the encoder.
            encoder_output: Encoder's result: "head", or hidden states pooled by "mean" or "first".
            swapped: Cached first tokens of the only sequence (``KVCacheManager.import_sequence``). Ownership passes to
                the scheduler.
            keep_state: Return the final state with :meth:`pop_finished_states`.

        Raises:
            RequestError: If the prompt is empty or too long, the pool could never hold the tokens, the overflow mode is
                not available, or "reject" rejects the request.
        """
        assert request_id not in self._requests, f"request {request_id} is already running"
        encoder_only = encoder_tokens is not None and not prompt
        self._check_encoder_tokens(encoder_tokens, encoder_only)
        overflow = self.limits.overflow if encoder_only else self.limits.overflow_mode(sampling_params)
        limit, limited_by = (
            (0, None)
            if encoder_only
            else self.limits.resolve(len(prompt), sampling_params, self.kv_cache_manager.capacity)
        )
        metrics = RequestMetrics(len(prompt) if encoder_tokens is None else len(encoder_tokens), self._clock())
        stop_ids = stop_tokens | frozenset(sampling_params.stop_token_ids)
        encoder_token_ids = None if encoder_tokens is None else tuple(encoder_tokens)
        request = Request(
            request_id,
            self._arrivals,
            sampling_params,
            prefix_root,
            stop_ids,
            metrics,
            encoder_token_ids,
            encoder_output,
        )
        self._arrivals += 1
        if sampling_params.num_beams > 1 and not encoder_only:
            self._check_beams(sampling_params, limit)
            if limit > len(prompt):  # otherwise no token is generated
                request.beams = BeamSearch(sampling_params, len(prompt), limit, stop_ids)
        if overflow == "reject" and not encoder_only:
            request.reserved_blocks = self._reservations.reserve(
                max(sampling_params.n, sampling_params.num_beams), max(len(prompt), limit - 1)
            )
        request.keep_state = keep_state
        self._requests[request_id] = request
        for sample in range(sampling_params.n if request.beams is None else sampling_params.num_beams):
            seq = TokenSequence(request, sample, list(prompt), limit, limited_by or "model", overflow)
            seq.swapped = swapped
            request.sequences.append(seq)
            if request.beams is not None and sample:
                seq.state = IDLE
            else:
                self._waiting.append(seq)
        request.live_beams = request.sequences[:1]
        return metrics

    def _check_beams(self, sampling_params: SamplingParams, limit: int) -> None:
        """Raise RequestError if a beam search is impossible with this cache."""
        if self.kv_cache_manager.lossy:
            raise RequestError(
                "num_beams: beams share cached tokens, but under this policy each sequence keeps its own selection",
                "Use a policy by position (full, window, sinks, block-window), or sample.",
            )
        if sampling_params.num_beams > self._admission.max_num_seqs:
            raise RequestError(
                f"num_beams: must be at most max_num_seqs ({self._admission.max_num_seqs}), "
                f"got {sampling_params.num_beams}",
                "Request fewer beams.",
            )
        if not self.kv_cache_manager.has_capacity(sampling_params.num_beams, limit):
            raise RequestError(
                f"the cache has no room for {sampling_params.num_beams} beams of {limit} tokens",
                "Request fewer beams or tokens, or give the cache more blocks.",
            )

    def _check_encoder_tokens(self, encoder_tokens: Sequence[int] | None, encoder_only: bool) -> None:
        """Compare the encoder input with the cache; the engine checks the encoder's own limit."""
        if encoder_tokens is None:
            return
        if not encoder_tokens:
            raise RequestError("encoder input: must have at least 1 token, got 0")
        max_source_len = self.kv_cache_manager.max_source_len
        if not encoder_only and len(encoder_tokens) > max_source_len:
            raise RequestError(
                f"encoder input: must have at most {max_source_len} tokens, got {len(encoder_tokens)}", "Shorten it."
            )

    def abort_request(self, request_id: int) -> list[SequenceEvent]:
        """End every sample of a request, also while a step is in flight; ended requests are ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.beams is not None:
            return self._end_beams(request, "abort")
        seqs = [seq for seq in request.sequences if seq.state != DONE] if request is not None else []
        return [self._end(seq, "abort") for seq in seqs]

    def finish_sequence(self, request_id: int, sample: int, reason: FinishReason = "stop") -> list[SequenceEvent]:
        """End one sample, for example at a stop string; ended samples are ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.beams is not None:
            return self._end_beams(request, reason)
        seqs = [seq for seq in request.sequences if seq.sample_index == sample and seq.state != DONE] if request else []
        return [self._end(seq, reason) for seq in seqs]

    def preempt(self, request_id: int) -> bool:
        """Preempt a request's running sequences between two steps (``kvad verify``, tests).

        Returns:
            False if none of them is running.
        """
        assert self._in_flight is None, "a step is in flight: call update_from_output first"
        running = [seq for seq in self.sequences(request_id) if seq.state == RUNNING and seq.beam_candidates is None]
        for seq in running:
            if seq.state == RUNNING:  # the beams of a request are preempted together
                self._preempt(seq)
        return bool(running)

    @property
    def idle(self) -> bool:
        """True if there is no request and no pending event."""
        return not self._requests and not self._pending_events

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self._running), len(self._waiting), self._preemptions, self._steps, self._tokens)

    def metrics(self, request_id: int) -> RequestMetrics:
        """Return the metrics of an active or recently ended request; KeyError for others."""
        request = self._requests.get(request_id)
        return request.metrics if request is not None else self._ended[request_id]

    def num_cached_tokens(self, request_id: int) -> int:
        """Return the number of prompt tokens that a prefix hit covered."""
        return self.metrics(request_id).num_cached_tokens

    def sequences(self, request_id: int) -> tuple[TokenSequence, ...]:
        request = self._requests.get(request_id)
        return tuple(request.sequences) if request is not None else ()

    # ------------------------------------------------------------ scheduling

    def schedule(self) -> SchedulerOutput | None:
        """Build the next step, with blocks allocated.

        Returns:
            None if nothing can run, or all waiting sequences wait for the block store. Otherwise call
            :meth:`update_from_output` before the next call.
        """
        assert self._in_flight is None, "a step is in flight: call update_from_output first"
        can_admit = True
        self._poll_swaps()
        while True:
            if can_admit and self._waiting:
                self._admit_with_encoder_input()
            encoder_step = self._schedule_encoder()
            if encoder_step is not None:
                return encoder_step
            items, num_tokens_left = self._continue_running()
            new_items = self._admit(num_tokens_left) if can_admit and num_tokens_left > 0 and self._waiting else []
            allocation = self._allocate(items, new_items)
            if allocation is not None:
                return self._build_output(*allocation)
            if self._running:
                self._preempt_or_stop(items)
                # Alone and without shared blocks, a sequence fits, so retry at once. The same holds for waiting beams.
                can_admit = not items or not self._running
            elif not self._waiting or any(seq.prefetch is not None and seq.prefetch.in_flight for seq in self._waiting):
                return None
            elif self.preemption.pending:  # nothing else can run
                self.preemption.wait()
                self._poll_swaps()

    def _poll_swaps(self) -> None:
        """Process finished swap I/O and prefetch the next admissible sequence."""
        if self.preemption.poll():
            self._num_frees_when_blocked = -1
            for seq, error in self.preemption.failed(self._waiting):
                self._end(seq, "error", error, emit=True)
        if self.preemption.has_swapped and self._waiting:
            seq = next((seq for seq in self._waiting if self._admission.is_ready(seq)), self._waiting[0])
            self.preemption.prefetch(seq)

    def _continue_running(self) -> tuple[list[BatchItem], int]:
        """Return the running sequences' next tokens (decoding first) and the tokens left."""
        items: list[BatchItem] = []
        prefilling: list[TokenSequence] = []
        num_tokens_left = self._max_num_batched_tokens
        for seq in self._running:
            assert seq.encoder_ready, "the encoder input is computed first"
            if seq.beam_candidates is not None:
                continue  # this beam waits for the other beams
            if seq.num_computed_tokens + 1 == len(seq.token_ids):
                items.append((self._sub_batch_builder.sort_key(seq, 1), seq, 1))
                num_tokens_left -= 1
            else:
                prefilling.append(seq)
        for seq in prefilling:
            if num_tokens_left <= 0:
                break
            num_new_tokens = self._num_new_tokens(seq, num_tokens_left)
            items.append((self._sub_batch_builder.sort_key(seq, num_new_tokens), seq, num_new_tokens))
            num_tokens_left -= num_new_tokens
        return items, num_tokens_left

    def _admit(self, num_tokens_left: int) -> list[BatchItem]:
        """Admit waiting sequences while indices, tokens and blocks last; they are not running yet."""
        new_items: list[BatchItem] = []
        if (
            self._running
            and self._num_frees_when_blocked == self.kv_cache_manager.num_frees
            and self._waiting[0].request.beams is None
        ):
            return new_items
        index = 0
        while index < len(self._waiting) and self._free_indices and num_tokens_left > 0:
            seq = self._waiting[index]
            if seq.request.encoder_tokens is not None or not self._admission.is_admissible(seq):
                index += 1
                continue
            if not self._admission.try_admit(seq, self.preemption, [other for _, other, _ in new_items]):
                self._num_frees_when_blocked = self.kv_cache_manager.num_frees
                break
            del self._waiting[index]
            num_new_tokens = self._num_new_tokens(seq, num_tokens_left)
            new_items.append((self._sub_batch_builder.sort_key(seq, num_new_tokens), seq, num_new_tokens))
            num_tokens_left -= num_new_tokens
        return new_items

    def _num_new_tokens(self, seq: TokenSequence, num_tokens_left: int) -> int:
        """Return the tokens of a sequence in this step: a chunk that ends where the policy evicts."""
        return min(
            len(seq.token_ids) - seq.num_computed_tokens,
            self._prefill_chunk_size,
            num_tokens_left,
            self.kv_cache_manager.tokens_until_eviction(seq.seq_index),
        )

    def _admit_with_encoder_input(self) -> None:
        """Admit waiting sequences with encoder input; uncached inputs are encoded next."""
        if (
            self._running
            and self._num_frees_when_blocked == self.kv_cache_manager.num_frees
            and self._waiting[0].request.beams is None
        ):
            return
        index, now = 0, self._clock()
        while index < len(self._waiting) and self._free_indices:
            seq = self._waiting[index]
            if seq.request.encoder_tokens is None or not self._admission.is_admissible(seq):
                index += 1
                continue
            if not self._admission.try_admit(seq, self.preemption):
                self._num_frees_when_blocked = self.kv_cache_manager.num_frees
                return
            del self._waiting[index]
            self._admission.start(seq, now)

    def _schedule_encoder(self) -> SchedulerOutput | None:
        """Build an encoder step for uncached inputs within the token limit, or return None."""
        unencoded = [seq for seq in self._running if not seq.encoder_ready]
        if not unencoded:
            return None
        unencoded = [
            seq for seq in unencoded if bool(seq.token_ids) == bool(unencoded[0].token_ids)
        ]  # either all are cached, or all are returned
        chosen: list[tuple[int, int, TokenSequence]] = []
        num_tokens_left = self._max_num_batched_tokens
        for seq in unencoded:
            length = len(seq.request.encoder_tokens or ())
            if chosen and length > num_tokens_left:
                break
            chosen.append((length, seq.seq_index, seq))
            num_tokens_left -= length
        chosen.sort(key=lambda entry: entry[:2])
        seqs = tuple(seq for _, _, seq in chosen)
        lengths = [length for length, _, _ in chosen]
        sub_batches = tuple(SubBatch(lengths.count(n), n, n) for n in sorted(set(lengths)))
        seq_indices = [seq.seq_index for seq in seqs if seq.token_ids]
        assert len(seq_indices) in (0, len(seqs)), "encoder outputs are either returned or read by a decoder"
        allocation = self.kv_cache_manager.allocate_encoder_slots(seq_indices) if seq_indices else None
        self._steps += 1
        self._tokens += sum(lengths)
        no_allocation = BlockAllocation(BlockOps((), ()), (), ())
        self._in_flight = SchedulerOutput((), (), no_allocation, EncoderBatch(seqs, sub_batches, allocation))
        return self._in_flight

    def _allocate(
        self, items: list[BatchItem], new_items: list[BatchItem]
    ) -> tuple[list[BatchItem], BlockAllocation] | None:
        """Allocate slots for all ``items`` and as many ``new_items`` as fit; others keep waiting."""
        while items or new_items:
            all_items = items + new_items
            all_items.sort(key=_request_order if self.kv_cache_manager.max_source_len else None)
            allocation = self.kv_cache_manager.allocate_slots(
                [(seq.seq_index, seq.num_computed_tokens, num_new_tokens) for _, seq, num_new_tokens in all_items]
            )
            if allocation is not None:
                return all_items, allocation
            if not new_items:
                return None
            seq = new_items.pop()[1]
            self._admission.release(seq)
            if all(beam.seq_index < 0 for beam in seq.request.sequences if beam.state != IDLE):
                self._admission.release_idle_beams(seq.request)
            self._num_frees_when_blocked = self.kv_cache_manager.num_frees
            if not items and not new_items and not self._running:
                error = f"the cache has no room for {len(seq.token_ids)} tokens of one sequence"
                self._end(seq, "length", error, limit="pool", emit=True)
            else:
                self._admission.enqueue(seq)
        return None

    def _preempt_or_stop(self, items: Sequence[BatchItem]) -> None:
        """Preempt the youngest sequence that may be preempted.

        A sequence in mode "stop" ends only if it is one that cannot grow, or if one with reserved blocks cannot grow.
        """
        growing = {
            id(seq)
            for _, seq, num_new_tokens in items
            if seq.overflow != "preempt" and self.kv_cache_manager.needs_blocks(seq.seq_index, num_new_tokens)
        }
        candidates = [seq for seq in reversed(self._running) if seq.overflow != "reject"]
        assert candidates, "sequences with reserved blocks have none"
        seq = next((seq for seq in candidates if not _stops_when_full(seq) or id(seq) in growing), candidates[0])
        if _stops_when_full(seq):
            self._stop_when_full(seq)
        else:
            self._log("a sequence is preempted", seq)
            self._preempt(seq)

    def _stop_when_full(self, seq: TokenSequence) -> None:
        """End a sequence with its tokens so far, or a search with its best hypotheses."""
        self._log("a sequence is ended", seq)
        if seq.request.beams is not None:
            self._pending_events.extend(self._end_beams(seq.request, limit="pool"))
        else:
            self._end(seq, "length", limit="pool", emit=True)

    def _log(self, message: str, seq: TokenSequence, stats: CacheStats | None = None) -> None:
        """Log pool usage; ``stats`` are those of the moment when the pool was full."""
        if LOG.isEnabledFor(logging.INFO):
            stats = self.kv_cache_manager.stats() if stats is None else stats
            LOG.info(
                "the pool is full: %s (request %d, sample %d); blocks used %s, peak %s, watermark %s, of %s",
                message, seq.request_id, seq.sample_index, stats.used, stats.peak, stats.watermark, stats.total,
            )  # fmt: skip

    def _preempt(self, seq: TokenSequence) -> None:
        seqs = [seq] if seq.request.beams is None else [beam for beam in seq.request.sequences if beam.state == RUNNING]
        for other in seqs:
            self._running.remove(other)
            stats = self.kv_cache_manager.stats() if LOG.isEnabledFor(logging.INFO) else None
            self._log(f"a sequence is preempted, {self.preemption.preempt(other)}", other, stats)
            self._admission.release(other, is_freed=other.swapped is not None)
            other.state, other.beam_candidates = WAITING, None
            self._admission.enqueue(other)
        self._admission.release_idle_beams(seq.request)
        seq.request.metrics.num_preemptions += 1
        self._preemptions += 1
        self._num_frees_when_blocked = self.kv_cache_manager.num_frees

    def _build_output(self, items: list[BatchItem], allocation: BlockAllocation) -> SchedulerOutput:
        scheduled = []
        now: float | None = None
        for _, seq, num_new_tokens in items:
            if seq.swapped is not None:
                self.preemption.on_restored(seq)
            seq.prefetch = None
            if seq.state == WAITING:
                now = self._clock() if now is None else now
                self._admission.start(seq, now)
            scheduled.append(self._scheduled_sequence(seq, num_new_tokens))
            self._tokens += num_new_tokens
        self._steps += 1
        sub_batches = self._sub_batch_builder.build(items, allocation)
        cross_sub_batches = group_by_source(items, sub_batches) if self.kv_cache_manager.max_source_len else None
        self._in_flight = SchedulerOutput(
            tuple(scheduled), sub_batches, allocation, cross_sub_batches=cross_sub_batches
        )
        return self._in_flight

    def _scheduled_sequence(self, seq: TokenSequence, num_new_tokens: int) -> ScheduledSequence:
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_new_tokens
        is_sampled = end == len(seq.token_ids) and end < seq.max_len
        # The last token scores the next one, if any: finite logits there validate the span (see update_from_output).
        stop = num_new_tokens if is_sampled or end < len(seq.token_ids) else num_new_tokens - 1
        first_offset = stop - 1
        if seq.wants_prompt_logprobs and seq.num_scored_tokens < seq.num_prompt_tokens - 1:
            first_offset = min(first_offset, max(seq.num_scored_tokens - start, 0))
        return ScheduledSequence(seq, start, num_new_tokens, range(max(first_offset, 0), stop), is_sampled)

    # ------------------------------------------------------------ results

    def update_from_output(self, output: SchedulerOutput, results: Sequence[SequenceOutput]) -> list[SequenceEvent]:
        """Apply one result per scheduled sequence, in order; results of ended samples are dropped."""
        assert output is self._in_flight, "this output is not in flight"
        if output.encoder_batch is not None:
            return self._update_from_encoder(output.encoder_batch, results)
        assert len(results) == len(output.scheduled), f"{len(results)} results for {len(output.scheduled)} spans"
        self._in_flight = None
        events = self.pop_events()
        commit = self.kv_cache_manager.commit
        for (seq, start, count, logit_offsets, is_sampled), result in zip(output.scheduled, results, strict=True):
            if seq.state != RUNNING:  # it ended, or was preempted with a beam that is recomputed
                continue
            if result.error is not None:
                events.extend(self._recover(seq, result.error) if result.retry else self._fail(seq, result.error))
                continue
            seq.num_computed_tokens = end = start + count
            tokens = seq.token_ids
            commit(seq.seq_index, tokens[start:end], start + logit_offsets.stop)
            if seq.wants_prompt_logprobs:
                self._record_prompt_logprobs(seq, end, result)
            if is_sampled and seq.request.beams is not None:
                seq.beam_candidates = result.candidates
                events.extend(self._advance(seq.request, seq.request.beams))
            elif is_sampled:
                events.append(self._append_sampled(seq, result))
            elif end >= seq.max_len:  # no token was requested
                events.append(
                    self._end(seq, "length", limit=seq.limited_by)._replace(prompt_logprobs=_pop_prompt_logprobs(seq))
                )
        return events

    def _update_from_encoder(
        self, encoder_batch: EncoderBatch, results: Sequence[SequenceOutput]
    ) -> list[SequenceEvent]:
        assert len(results) == len(encoder_batch.sequences), (
            f"{len(results)} results for {len(encoder_batch.sequences)} encoder inputs"
        )
        self._in_flight = None
        events = self.pop_events()
        for seq, result in zip(encoder_batch.sequences, results, strict=True):
            if seq.state == DONE:
                continue
            if result.error is not None:
                events.extend(self._fail(seq, result.error))
            elif not seq.token_ids:
                events.append(self._end(seq, "stop")._replace(output=result.output))
            else:
                seq.encoder_ready = True
                self.kv_cache_manager.commit_encoder_blocks(seq.seq_index)
        return events

    def pop_finished_states(self) -> list[FinishedState]:
        """Return the states of ended requests with ``keep_state``; valid until the next step."""
        states, self._finished_states = self._finished_states, []
        return states

    def pop_events(self) -> list[SequenceEvent]:
        """Return events from outside a step; :meth:`update_from_output` returns them too."""
        events, self._pending_events = self._pending_events, []
        return events

    def _record_prompt_logprobs(self, seq: TokenSequence, end: int, result: SequenceOutput) -> None:
        stop = _prompt_end(seq, end)
        if stop > seq.num_scored_tokens:
            assert len(result.prompt_logprobs) == stop - seq.num_scored_tokens, (
                f"{len(result.prompt_logprobs)} scores for {stop - seq.num_scored_tokens} tokens"
            )
            seq.prompt_logprobs.extend(result.prompt_logprobs)
            seq.num_scored_tokens = stop

    def _append_sampled(self, seq: TokenSequence, result: SequenceOutput) -> SequenceEvent:
        token = result.token_id
        assert token is not None, "a sampled span must return a token"
        metrics = seq.request.metrics
        if metrics.first_token is None:
            metrics.first_token = self._clock()
        metrics.num_completion_tokens += 1
        prompt = _pop_prompt_logprobs(seq) if seq.prompt_logprobs else ()
        seq.token_ids.append(token)
        if token in seq.stop_tokens and seq.num_generated_tokens > seq.sampling_params.min_tokens:
            return self._end(seq, "stop")._replace(token_id=token, logprob=result.logprob, prompt_logprobs=prompt)
        if len(seq.token_ids) >= seq.max_len:
            end = self._end(seq, "length", limit=seq.limited_by)
            return end._replace(token_id=token, logprob=result.logprob, prompt_logprobs=prompt)
        return SequenceEvent(seq.request_id, seq.sample_index, token, result.logprob, prompt)

    def _recover(self, seq: TokenSequence, reason: str) -> list[SequenceEvent]:
        """Preempt a sequence whose offloaded tokens cannot be read; it is recomputed."""
        seq.num_recoveries += 1
        if seq.num_recoveries > MAX_RECOVERIES:
            return self._fail(seq, f"the offloaded tokens of request {seq.request_id} cannot be read: {reason}")
        LOG.warning("request %d, sample %d is recomputed: %s", seq.request_id, seq.sample_index, reason)
        self._preempt(seq)
        return []

    def _fail(self, seq: TokenSequence, error: str) -> list[SequenceEvent]:
        if seq.request.beams is not None:
            return self._end_beams(seq.request, "error", error)
        return [self._end(seq, "error", error)]

    # ------------------------------------------------------------ beams

    def _advance(self, request: Request, beams: BeamSearch) -> list[SequenceEvent]:
        """Once all beams have candidates, fork beams with several children and free those with none."""
        if any(seq.beam_candidates is None for seq in request.live_beams):
            return []
        live, sequences = request.live_beams, [seq.token_ids for seq in request.live_beams]
        if request.metrics.first_token is None:
            request.metrics.first_token = self._clock()
        children = beams.advance(sequences, [seq.beam_candidates or () for seq in live])
        if not children:
            return self._end_beams(request)
        first_child: dict[int, int] = {}  # parent -> its first child, which continues at its index
        for rank, child in enumerate(children):
            first_child.setdefault(child.parent, rank)
        for index, seq in enumerate(live):
            seq.beam_candidates = None
            if index not in first_child:
                self._running.remove(seq)
                self.kv_cache_manager.free(seq.seq_index)
                seq.state = IDLE
        idle_beams = [seq for seq in request.sequences if seq.state == IDLE]
        request.live_beams = [
            live[child.parent]
            if first_child[child.parent] == rank
            else self._admission.fork(live[child.parent], idle_beams.pop(0))
            for rank, child in enumerate(children)
        ]
        for seq, child in zip(request.live_beams, children, strict=True):
            seq.token_ids.append(child.token)
        return []

    def _end_beams(
        self,
        request: Request,
        reason: FinishReason | None = None,
        error: str | None = None,
        limit: cache.config.LengthLimit | None = None,
    ) -> list[SequenceEvent]:
        """End a search and return its best hypotheses; with ``reason``, return only the ends.

        Args:
            request: The request of the search.
            reason: Finish reason without results ("abort", "error").
            error: Message for "error".
            limit: Limit that ended the live beams, if not their own.
        """
        assert request.beams is not None
        limit = limit or request.sequences[0].limited_by
        best = request.beams.best_hypotheses([seq.token_ids for seq in request.live_beams]) if reason is None else []
        if reason is None and len(best) < request.sampling_params.n:
            best, reason, error = [], "error", "the beams have no allowed continuation"
        for seq in request.sequences:
            if seq.state == IDLE:
                if seq.seq_index >= 0:
                    heapq.heappush(self._free_indices, seq.seq_index)
                seq.state = DONE
        for seq in [seq for seq in request.sequences if seq.state != DONE]:
            self._end(seq, reason or "stop", error)
        events: list[SequenceEvent] = []
        request.metrics.num_completion_tokens = sum(len(hypothesis.tokens) for hypothesis in best)
        for index, hypothesis in enumerate(best):
            events.extend(SequenceEvent(request.id, index, token) for token in hypothesis.tokens[:-1])
            last = hypothesis.tokens[-1] if hypothesis.tokens else None
            limited_by = limit if hypothesis.finish == "length" else None
            events.append(
                SequenceEvent(
                    request.id,
                    index,
                    last,
                    finish_reason=hypothesis.finish,
                    cumulative_logprob=hypothesis.score,
                    limit=limited_by,
                )
            )
        if not best:
            ends = range(request.sampling_params.n)
            events = [SequenceEvent(request.id, index, finish_reason=reason or "error", error=error) for index in ends]
        return events

    def _end(
        self,
        seq: TokenSequence,
        reason: FinishReason,
        error: str | None = None,
        *,
        limit: cache.config.LengthLimit | None = None,
        emit: bool = False,
    ) -> SequenceEvent:
        if seq.state == RUNNING:
            layout = (
                self.kv_cache_manager.export_layout(seq.seq_index)
                if seq.request.keep_state and reason in ("stop", "length")
                else None
            )
            if layout is not None and layout.length:
                self._finished_states.append(
                    FinishedState(seq.request_id, tuple(seq.token_ids[: layout.length]), layout)
                )
            self._running.remove(seq)
            self._admission.release(seq, publish=reason != "error")
        elif seq in self._waiting:
            self._waiting.remove(seq)
            self._num_frees_when_blocked = -1
        self.preemption.forget(seq)
        seq.prefetch = None  # late loads write to an unreferenced buffer
        seq.state = DONE
        request = seq.request
        if all(sibling.state == DONE for sibling in request.sequences):
            request.metrics.finished = self._clock()
            if request.reserved_blocks is not None:
                self._reservations.release(request.reserved_blocks)
            del self._requests[request.id]
            self._ended[request.id] = request.metrics
            if len(self._ended) > MAX_FINISHED_METRICS:
                del self._ended[next(iter(self._ended))]
        event = SequenceEvent(seq.request_id, seq.sample_index, finish_reason=reason, error=error, limit=limit)
        if emit:
            self._pending_events.append(event)
        return event

    def check(self) -> None:
        """Assert that every sequence is in one place, and the invariants of indices and blocks."""
        self._admission.check([seq for request in self._requests.values() for seq in request.sequences])
        self.kv_cache_manager.check()


def _stops_when_full(seq: TokenSequence) -> bool:
    """True if the sequence ends when the pool is full; without output it can wait."""
    return seq.overflow == "stop" and seq.num_generated_tokens > 0


def _request_order(item: BatchItem) -> tuple[int, tuple[int, int]]:
    """Sort within sub-batches by request, so sequences with one encoder input are adjacent."""
    return item[0] >> 16, item[1].priority


def _prompt_end(seq: TokenSequence, end: int) -> int:
    """Return the end of positions that score a prompt token; the last one scores none."""
    return min(end, seq.num_prompt_tokens - 1)


def _pop_prompt_logprobs(seq: TokenSequence) -> tuple[TokenLogprob, ...]:
    scores, seq.prompt_logprobs = tuple(seq.prompt_logprobs), []
    return scores
