"""Scheduler: choose the sequences of the next step and their numbers of tokens. Integers only: no torch.

``Scheduler.schedule`` gives every decoding sequence its token, then continues prompts in chunks, then admits
waiting sequences first come, first served, all within ``max_num_batched_tokens`` and ``max_num_seqs``; its output has
blocks allocated. ``Scheduler.update_from_output`` takes the results and returns chunks. One step may be in flight, and
``schedule_next`` builds the one that follows if each of its sequences decodes the token that is being computed.
With a drafter, ``propose_drafts`` precedes a step, and ``append_accepted`` follows it (``speculation.py``).
The encoder's input is encoded whole in a separate step before the rest of its sequence, together with others.

Invariants: the oldest sequence advances or ends, so every request ends; the tokens of a sequence do not depend on its
neighbors; a sequence is in exactly one of *waiting* (no index, no blocks), *running* (an index) and *done*.

The beams of a search are sequences that advance and are preempted together. When a pool is full, the youngest running
sequence is preempted (``preemption.py``) and waits at its old place in the queue. One with overflow mode "reject" is
never preempted, because its blocks were reserved on arrival (``limits.py``).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvad import cache
from kvad.cache.manager import BlockAllocation, KVCacheManager, SwappedSequence
from kvad.engine.scheduling.admission import AdmissionQueue
from kvad.engine.scheduling.batching import BatchBuilder, BatchItem, next_encoder_batch, schedule_span
from kvad.engine.scheduling.beam_search import BeamSearch, DiverseBeamSearch, hypothesis_chunks
from kvad.engine.scheduling.limits import BlockReservations, LengthLimits, check_beams, check_encoder_input, check_sizes
from kvad.engine.scheduling.preemption import PreemptionManager, choose_victim, log_full_pool, stops_when_full
from kvad.engine.scheduling.request import (
    NO_ALLOWED_BEAM,
    EncoderInput,
    FinishReason,
    SamplingParams,
    SequenceOutput,
    StreamChunk,
)
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
    SchedulerStats,
    TokenSequence,
)
from kvad.engine.scheduling.speculation import Drafter
from kvad.engine.scheduling.step_costs import PromptBudget, StepCosts
from kvad.engine.scheduling.structured_output import Grammar
from kvad.model_input import BlockOps

if TYPE_CHECKING:
    from kvad.config import Pooling

MAX_RECOVERIES = 2  # recomputations of a sequence whose offloaded tokens were lost; then it ends with an error
MAX_IDLE_ROUNDS = 1000  # in which nothing is admitted, though nothing runs; a failure instead of an endless loop
MAX_FINISHED_METRICS = 4096  # metrics of ended requests that stay available
LOG = logging.getLogger(__name__)


class Scheduler:
    """Schedules the sequences of one KVCacheManager, which it owns.

    Args:
        kv_cache_manager: Host bookkeeping of the cache.
        max_num_seqs: Sequences that run at the same time.
        max_num_batched_tokens: New tokens per step.
        prefill_chunk_size: New tokens of one sequence per step.
        limit: Longest sequence in tokens, or the limits with their overflow modes.
        step_costs: Limits the prompt tokens of a step in which sequences decode.
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
        step_costs: StepCosts | None = None,
    ) -> None:
        limits = limit if isinstance(limit, LengthLimits) else LengthLimits(limit)
        check_sizes(max_num_seqs, max_num_batched_tokens, prefill_chunk_size, limits.max_len)
        self.kv_cache_manager, self.limits = kv_cache_manager, limits
        self.preemption = PreemptionManager(kv_cache_manager) if preemption is None else preemption
        self._batch_builder = BatchBuilder(kv_cache_manager, max_num_batched_tokens, prefill_chunk_size, step_costs)
        self._reservations = BlockReservations(kv_cache_manager.groups, kv_cache_manager.watermark_blocks)
        self._clock = clock
        self._admission = AdmissionQueue(kv_cache_manager, self.preemption, max_num_seqs)
        self._running, self._waiting = self._admission.running, self._admission.waiting  # oldest first, both
        self._requests: dict[int, Request] = {}
        self._ended: dict[int, RequestMetrics] = {}
        self._in_flight: SchedulerOutput | None = None
        self._next: SchedulerOutput | None = None  # follows the step in flight
        self._pending_chunks: list[StreamChunk] = []  # of sequences that ended outside a step
        self._finished_states: list[FinishedState] = []
        self._alone: deque[list[TokenSequence]] = deque()  # each request's of a failed step, recomputed in turn
        self.drafter: Drafter | None = None
        self._accepted: list[tuple[TokenSequence, tuple[SequenceOutput, ...]]] = []  # not appended yet
        self._arrivals = self._preemptions = self._steps = self._tokens = 0
        self._draft_tokens = self._accepted_tokens = 0

    def add_request(
        self,
        request_id: int,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        prefix_root: bytes = b"",
        *,
        stop_tokens: frozenset[int] = frozenset(),
        encoder_input: EncoderInput | None = None,
        swapped: SwappedSequence | None = None,
        keep_state: bool = False,
        draw_salt: int = 0,
        adapter: int = 0,
        has_stop_string: Callable[[Sequence[int]], bool] | None = None,
        grammar: Grammar | None = None,
        pooling: Pooling | None = None,
    ) -> RequestMetrics:
        """Queue a request and return its metrics, which are updated until it ends.

        Args:
            prompt: Token ids; the start of the target of an encoder-decoder; empty to request the encoder's output.
            sampling_params: ``max_tokens=None`` means the lowest limit of model, cache and pool.
            prefix_root: Start of the block hash chain.
            stop_tokens: Token ids that end a sample, in addition to those of ``sampling_params``.
            swapped: Cached first tokens of the only sequence (``KVCacheManager.import_sequence``). Ownership passes to
                the scheduler.
            keep_state: Return the final state with ``pop_finished_states``.
            draw_salt: Requests with the same seed and tokens draw other numbers if it differs.
            adapter: Number of the adapter that computes it (``model/lora.py``); 0: the base.
            has_stop_string: Returns True if generated tokens end with a stop string; for a beam search.
            grammar: The compiled structured output.
            pooling: Return the pooled hidden states of the prompt (``SequenceOutput.output``); no token is sampled.

        Raises:
            RequestError: If the prompt is empty or too long, the pool could never hold the tokens, or the overflow mode
                is not available or rejects the request.
        """
        assert request_id not in self._requests, f"request {request_id} is already running"
        encoder_only = encoder_input is not None and not prompt
        overflow, limit, limited_by = self.limits.overflow, 0, None
        if encoder_input is not None:
            check_encoder_input(encoder_input.tokens, None if encoder_only else self.kv_cache_manager.max_source_len)
        if not encoder_only:
            overflow = self.limits.overflow_mode(sampling_params)
            limit, limited_by = self.limits.resolve(len(prompt), sampling_params, self.kv_cache_manager.capacity)
        request = Request(
            request_id,
            self._arrivals,
            sampling_params.with_seed(),
            prefix_root,
            stop_tokens | frozenset(sampling_params.stop_token_ids),
            RequestMetrics(len(prompt) if encoder_input is None else len(encoder_input.tokens), self._clock()),
            encoder_input,
            keep_state,
            draw_salt,
            grammar,
            adapter,
            pooling,
        )
        self._arrivals += 1
        if sampling_params.num_beams > 1 and not encoder_only:
            check_beams(sampling_params, limit, self.kv_cache_manager, self._admission.max_num_seqs)
            if limit > len(prompt):  # otherwise no token is generated
                stop_tokens = request.stop_tokens
                search = BeamSearch if sampling_params.num_beam_groups == 1 else DiverseBeamSearch
                request.beams = search(sampling_params, len(prompt), limit, stop_tokens, has_stop_string)
        if overflow == "reject" and not encoder_only:
            num_seqs = max(sampling_params.n, sampling_params.num_beams)
            request.reserved_blocks = self._reservations.reserve(num_seqs, max(len(prompt), limit - 1))
        for sample in range(sampling_params.n if request.beams is None else sampling_params.num_beams):
            seq = TokenSequence(request, sample, list(prompt), limit, limited_by or "model", overflow, swapped=swapped)
            seq.rope_regime = self.limits.rope_regime(len(prompt))
            seq.state = IDLE if request.beams is not None and sample else WAITING
            request.sequences.append(seq)
        self._requests[request_id], request.live_beams = request, request.sequences[:1]
        self._waiting.extend(seq for seq in request.sequences if seq.state == WAITING)
        return request.metrics

    def abort_request(self, request_id: int) -> list[StreamChunk]:
        """End every sample of a request, also while a step is in flight; ended requests are ignored."""
        return self.finish_sequence(request_id, None, "abort")

    def finish_sequence(self, request_id: int, sample: int | None, reason: FinishReason = "stop") -> list[StreamChunk]:
        """End one sample (None: all), for example at a stop string; ended samples are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        if request.beams is not None:
            return self._end_beams(request, reason)
        seqs = [seq for seq in request.sequences if sample in (None, seq.sample_index) and seq.state != DONE]
        return [self._end(seq, reason) for seq in seqs]

    def preempt(self, request_id: int) -> bool:
        """Preempt a request's running sequences between two steps; return False if none of them is running."""
        assert self._in_flight is None, "a step is in flight: call update_from_output first"
        running = [seq for seq in self.sequences(request_id) if seq.state == RUNNING and seq.beam_candidates is None]
        for seq in running:
            if seq.state == RUNNING:  # the beams of a request are preempted together
                self._preempt(seq)
        return bool(running)

    @property
    def idle(self) -> bool:
        """True if there is no request and no pending chunk."""
        return not self._requests and not self._pending_chunks

    def stats(self) -> SchedulerStats:
        counts = self._preemptions, self._steps, self._tokens, self._draft_tokens, self._accepted_tokens
        return SchedulerStats(len(self._running), len(self._waiting), *counts)

    @property
    def active_sequences(self) -> tuple[TokenSequence, ...]:
        """Running sequences, then waiting ones, oldest first."""
        return (*self._running, *self._waiting)

    def metrics(self, request_id: int) -> RequestMetrics:
        """Return the metrics of an active or recently ended request; KeyError for others."""
        request = self._requests.get(request_id)
        return request.metrics if request is not None else self._ended[request_id]

    def recent_metrics(self, num_requests: int) -> list[tuple[int, RequestMetrics]]:
        """Return (request, metrics) of the requests that were admitted last, the newest first."""
        ended = list(islice(reversed(self._ended.items()), num_requests))
        active = [(request.id, request.metrics) for request in self._requests.values()]
        admitted = [item for item in (*active, *ended) if item[1].admitted is not None]
        return sorted(admitted, key=lambda item: item[1].admitted or 0.0, reverse=True)[:num_requests]

    def sequences(self, request_id: int) -> tuple[TokenSequence, ...]:
        request = self._requests.get(request_id)
        return tuple(request.sequences) if request is not None else ()

    def propose_drafts(self) -> None:
        """Let the drafter propose tokens for the sequences that decode in the next step."""
        if self.drafter is None:
            return
        seqs = [
            seq
            for seq in self._running
            if seq.num_computed_tokens + 1 == len(seq.token_ids) and seq.encoder_ready and seq.request.beams is None
        ]
        limits = [
            max(0, min(limit, self.limits.rope_regime_room(len(seq.token_ids))))
            for seq, limit in zip(seqs, self._batch_builder.max_drafts(seqs), strict=True)
        ]
        for seq, limit, drafts in zip(seqs, limits, self.drafter.propose(seqs, limits), strict=True):
            seq.draft_token_ids = tuple(drafts[:limit])

    def schedule(self) -> SchedulerOutput | None:
        """Build the next step, with blocks allocated, or return None if nothing can run or all wait for blocks to load.

        Call ``update_from_output`` before the next one.
        """
        assert self._in_flight is None, "a step is in flight: call update_from_output first"
        if (output := self.pop_next()) is not None:
            self._in_flight = output
            return output
        return self._build_step()

    def _build_step(self) -> SchedulerOutput | None:
        self._accepted.clear()  # not empty after an interrupt
        can_admit, num_idle_rounds = True, 0
        if self.limits.short_regime_lens:
            self._switch_rope_regimes()
        if self._waiting:
            self._poll_swaps()
        while True:
            alone = self._request_alone()
            if can_admit and self._waiting:
                for seq in self._admission.admit(with_encoder_input=True, request_id=alone):
                    self._admission.start(seq, self._clock())  # an uncached input is encoded next
            encoder_seqs = [seq for seq in self._running if not seq.encoder_ready]
            if encoder_seqs:
                return self._schedule_encoder(encoder_seqs)
            running = [seq for seq in self._running if alone in (None, seq.request_id)]
            items, budget, oldest = self._batch_builder.continue_running(running, len(self._waiting))
            has_room = can_admit and budget.has_room and self._waiting
            new_items = self._admit(budget, alone) if has_room else []
            items += self._batch_builder.use_rest(oldest, budget)
            has_items = bool(items or new_items)
            allocation = self._allocate(items, new_items)
            if allocation is not None:
                return self._build_output(*allocation)
            if self._running and (items or self._admission.is_blocked):
                self._preempt_or_stop(items)
                # Alone and without shared blocks, a sequence fits, so retry at once. The same holds for waiting beams.
                can_admit = not items or not self._running
            elif not self._waiting or any(seq.prefetch is not None and seq.prefetch.in_flight for seq in self._waiting):
                return None
            elif self.preemption.pending:  # nothing else can run
                self.preemption.wait()
                self._poll_swaps()
            elif not has_items:  # what was waited for may have come meanwhile
                num_idle_rounds += 1
                assert num_idle_rounds < MAX_IDLE_ROUNDS, "no waiting sequence can be admitted"

    def _request_alone(self) -> int | None:
        """Return the request of a failed step that is recomputed now, while all others wait; None if there is none."""
        while self._alone and self._alone[0][0].request_id not in self._requests:
            self._alone.popleft()
        return self._alone[0][0].request_id if self._alone else None

    def schedule_next(self) -> SchedulerOutput | None:
        """Build the step after the one in flight, whose tokens are not known yet; ``schedule`` returns it next.

        Every sequence decodes one more token. Returns None if one of them will end, or if other sequences could run.
        """
        output = self._in_flight
        assert output is not None and self._next is None, "schedule_next is called once while a step is in flight"
        if self._waiting:
            self._poll_swaps()
        can_admit = bool(self._waiting) and not self._admission.is_blocked
        if can_admit or self._alone or self.drafter is not None or len(output.scheduled) != len(self._running):
            return None
        if self.limits.short_regime_lens or not all(map(_continues, output.scheduled)):
            return None
        items = []
        for seq, start, count, *_ in output.scheduled:
            tokens = seq.token_ids[start : start + count]
            self.kv_cache_manager.commit(seq.seq_index, tokens, start)  # published when the logits are known
            seq.num_computed_tokens = start + count
            items.append(self._batch_builder.decode_item(seq))
        allocation = self.kv_cache_manager.allocate_slots(
            [(seq.seq_index, seq.num_computed_tokens, 1) for _, seq, _ in items]
        )
        if allocation is None:
            return None
        scheduled = tuple(ScheduledSequence(seq, seq.num_computed_tokens, 1, range(1), True) for _, seq, _ in items)
        self._steps += 1
        self._tokens += len(items)
        self._next = SchedulerOutput(scheduled, self._batch_builder.build(items, allocation)[0], allocation)
        return self._next

    def pop_next(self) -> SchedulerOutput | None:
        """Return the step of ``schedule_next``, unless all its sequences have ended; ``schedule`` then builds another.

        The results of those that have ended are dropped.
        """
        output, self._next = self._next, None
        if output is None or all(scheduled.sequence.state != RUNNING for scheduled in output.scheduled):
            return None
        return output

    def _poll_swaps(self) -> None:
        """Process finished swap I/O and prefetch the next admissible sequence."""
        if self.preemption.poll():
            self._admission.unblock()
            for seq, error in self.preemption.failed(self._waiting):
                self._pending_chunks.append(self._end(seq, "error", error))
        if self.preemption.has_swapped and self._waiting:
            seq = next((seq for seq in self._waiting if self._admission.is_ready(seq)), self._waiting[0])
            self.preemption.prefetch(seq)

    def _admit(self, budget: PromptBudget, request_id: int | None) -> list[BatchItem]:
        """Admit waiting sequences while indices, the budget and blocks last; they are not running yet."""
        new_items: list[BatchItem] = []
        for seq in self._admission.admit(with_encoder_input=False, request_id=request_id):
            new_items.append(self._batch_builder.prefill_item(seq, budget))
            if not budget.has_room:
                break
        return new_items

    def _schedule_encoder(self, unencoded: Sequence[TokenSequence]) -> SchedulerOutput:
        """Build an encoder step for uncached inputs within the token limit."""
        seqs, sub_batches = next_encoder_batch(unencoded, self._batch_builder.max_num_batched_tokens)
        seq_indices = [seq.seq_index for seq in seqs if seq.token_ids]
        assert len(seq_indices) in (0, len(seqs)), "encoder outputs are either returned or read by a decoder"
        allocation = self.kv_cache_manager.allocate_encoder_slots(seq_indices) if seq_indices else None
        self._steps += 1
        self._tokens += sum(len(seq.request.encoder_tokens) for seq in seqs)
        no_allocation = BlockAllocation(BlockOps((), ()), (), ())
        self._in_flight = SchedulerOutput((), (), no_allocation, EncoderBatch(seqs, sub_batches, allocation))
        return self._in_flight

    def _allocate(
        self, items: list[BatchItem], new_items: list[BatchItem]
    ) -> tuple[list[BatchItem], BlockAllocation] | None:
        """Allocate slots for all ``items`` and as many ``new_items`` as fit; others keep waiting."""
        while items or new_items:
            all_items = self._batch_builder.sort(items + new_items)
            allocation = self.kv_cache_manager.allocate_slots(
                [(seq.seq_index, seq.num_computed_tokens, num_new_tokens) for _, seq, num_new_tokens in all_items]
            )
            if allocation is not None:
                return all_items, allocation
            if any(seq.draft_token_ids for _, seq, _ in items):  # no sequence is preempted for drafts
                items[:] = [self._without_drafts(item) for item in items]
                continue
            if not new_items:
                return None
            seq = new_items.pop()[1]
            self._admission.release(seq)
            if all(beam.seq_index < 0 for beam in seq.request.sequences if beam.state != IDLE):
                self._admission.release_idle_beams(seq.request)
            self._admission.block()
            if not items and not new_items and not self._running:
                error = f"the cache has no room for {len(seq.token_ids)} tokens of one sequence"
                self._pending_chunks.append(self._end(seq, "length", error, limit="pool"))
            else:
                self._admission.enqueue(seq)
        return None

    def _without_drafts(self, item: BatchItem) -> BatchItem:
        seq = item[1]
        if not seq.draft_token_ids:
            return item
        seq.draft_token_ids = ()
        return self._batch_builder.decode_item(seq)

    def _preempt_or_stop(self, items: Sequence[BatchItem]) -> None:
        """Preempt the youngest sequence that may be preempted, or end it with its output so far."""
        seq = choose_victim(self._running, items, self.kv_cache_manager)
        if seq is not None and not stops_when_full(seq):
            self._preempt(seq)
            return
        if not items and self._alone:  # no other sequence ends for the one that was to be computed alone
            self._alone.popleft()
            return
        assert seq is not None, "sequences with reserved blocks have none"
        log_full_pool("a sequence is ended", seq, self.kv_cache_manager.stats())
        is_beam = seq.request.beams is not None
        chunks = self._end_beams(seq.request, limit="pool") if is_beam else [self._end(seq, "length", limit="pool")]
        self._pending_chunks += chunks

    def _switch_rope_regimes(self) -> None:
        """Recompute sequences that outgrew the original length of their RoPE scaling, as prompts of their tokens."""
        for seq in [*self._running, *self._waiting]:
            regime = self.limits.rope_regime(len(seq.token_ids))
            if regime != seq.rope_regime:
                LOG.info("request %d, sample %d is recomputed: longer RoPE scaling", seq.request_id, seq.sample_index)
                if seq.state == RUNNING:
                    self._admission.requeue(seq)
                self.preemption.forget(seq)
                seq.prefetch, seq.rope_regime = None, regime

    def _preempt(self, seq: TokenSequence) -> None:
        self._admission.requeue(seq, self.preemption.preempt)
        seq.request.metrics.num_preemptions += 1
        self._preemptions += 1
        self._admission.block()

    def _build_output(self, items: list[BatchItem], allocation: BlockAllocation) -> SchedulerOutput:
        scheduled, has_pooling = [], False
        now: float | None = None
        for _, seq, num_new_tokens in items:
            if seq.swapped is not None:
                self.preemption.on_restored(seq)
            seq.prefetch = None
            if seq.state == WAITING:
                now = self._clock() if now is None else now
                self._admission.start(seq, now)
            scheduled.append(schedule_span(seq, num_new_tokens))
            has_pooling |= seq.request.pooling is not None
            self._tokens += num_new_tokens
        self._steps += 1
        sub_batches, cross_sub_batches = self._batch_builder.build(items, allocation)
        self._in_flight = SchedulerOutput(
            tuple(scheduled), sub_batches, allocation, None, cross_sub_batches, has_pooling
        )
        return self._in_flight

    def update_from_output(self, output: SchedulerOutput, results: Sequence[SequenceOutput]) -> list[StreamChunk]:
        """Apply one result per scheduled sequence, in order; results of ended samples are dropped."""
        assert output is self._in_flight, "this output is not in flight"
        if output.encoder_batch is not None:
            return self._update_from_encoder(output.encoder_batch, results)
        assert len(results) == len(output.scheduled), f"{len(results)} results for {len(output.scheduled)} spans"
        self._in_flight = None
        if self._alone and _are_recomputed(self._alone[0], output):
            self._alone.popleft()
        chunks = self.pop_chunks()
        for (seq, start, count, logit_offsets, is_sampled, drafts), result in zip(
            output.scheduled, results, strict=True
        ):
            if seq.state != RUNNING:  # it ended, or was preempted with a beam that is recomputed
                continue
            if drafts:
                count, logit_offsets = count - len(drafts), logit_offsets[: -len(drafts)]
                seq.draft_token_ids = ()
                seq.request.metrics.num_draft_tokens += len(drafts)
                self._draft_tokens += len(drafts)
            if result.error is not None:
                chunks += self._recover(seq, result.error) if result.retry else self._fail(seq, result.error)
                continue
            end = start + count
            is_pooled = seq.request.pooling is not None
            num_sure = end if is_pooled else start + logit_offsets.stop
            self._commit(seq, end, num_sure)
            if seq.wants_prompt_logprobs:
                seq.add_prompt_logprobs(end, result.prompt_logprobs)
            if is_sampled and seq.request.beams is not None:
                seq.beam_candidates, seq.candidate_logprobs = result.candidates, result.candidate_logprobs
                chunks += self._advance(seq.request, seq.request.beams)
            elif is_sampled:
                chunks.append(self._append_sampled(seq, result))
                if result.next_outputs:
                    self._accepted.append((seq, result.next_outputs))
            elif end >= seq.max_len:  # no token was requested
                chunk = self._end(seq, "stop" if is_pooled else "length", limit=None if is_pooled else seq.limited_by)
                chunks.append(chunk._replace(prompt_logprobs=seq.pop_prompt_logprobs(), output=result.output))
        return chunks

    def _commit(self, seq: TokenSequence, end: int, num_sure: int) -> None:
        """Commit a sequence's tokens up to ``end``, unless schedule_next did, and publish those that are sure."""
        start, seq.num_computed_tokens = seq.num_computed_tokens, end
        if start < end:
            self.kv_cache_manager.commit(seq.seq_index, seq.token_ids[start:end], num_sure)
        else:
            self.kv_cache_manager.publish(seq.seq_index, num_sure)

    def retry_alone(self, output: SchedulerOutput) -> bool:
        """Recompute the sequences of a failed step, one request at a time; the request at fault then fails alone.

        Returns False, and changes nothing, if there is one request only, or if its tokens cannot be recomputed.
        """
        assert output is self._in_flight, "this output is not in flight"
        by_request: dict[int, list[TokenSequence]] = {}
        for scheduled in output.scheduled:
            by_request.setdefault(scheduled.sequence.request_id, []).append(scheduled.sequence)
        manager = self.kv_cache_manager
        if len(by_request) < 2 or manager.lossy or manager.uses_offload:
            return False
        self._in_flight = None
        for seq in [scheduled.sequence for scheduled in output.scheduled]:
            if seq.state == RUNNING:  # the beams of a request wait together
                self._admission.requeue(seq, publish=False)  # the step may not have filled its blocks
                self.preemption.forget(seq)
        self._alone = deque(by_request.values())
        return True

    def append_accepted(self) -> list[StreamChunk]:
        """Append the next token of sequences whose last one was an accepted draft; [] if there is none.

        Call it until then. In between, a sequence may end, at a stop string for example: its other tokens are dropped.
        """
        chunks: list[StreamChunk] = []
        accepted, self._accepted = self._accepted, []
        for seq, (result, *others) in accepted:
            if seq.state != RUNNING:
                continue
            if result.error is not None:
                chunks += self._fail(seq, result.error)
                continue
            self.kv_cache_manager.commit(seq.seq_index, seq.token_ids[-1:])
            seq.num_computed_tokens += 1
            seq.request.metrics.num_accepted_tokens += 1
            self._accepted_tokens += 1
            chunks.append(self._append_sampled(seq, result))
            if others:
                self._accepted.append((seq, tuple(others)))
        return chunks

    def _update_from_encoder(self, batch: EncoderBatch, results: Sequence[SequenceOutput]) -> list[StreamChunk]:
        assert len(results) == len(batch.sequences), f"{len(results)} results for {len(batch.sequences)} encoder inputs"
        self._in_flight = None
        chunks = self.pop_chunks()
        for seq, result in zip(batch.sequences, results, strict=True):
            if seq.state == DONE:
                continue
            if result.error is not None:
                chunks += self._fail(seq, result.error)
            elif not seq.token_ids:
                chunks.append(self._end(seq, "stop")._replace(output=result.output))
            else:
                seq.encoder_ready = True
                self.kv_cache_manager.commit_encoder_blocks(seq.seq_index)
        return chunks

    def pop_finished_states(self) -> list[FinishedState]:
        """Return the states of ended requests with ``keep_state``; valid until the next step."""
        states, self._finished_states = self._finished_states, []
        return states

    def pop_chunks(self) -> list[StreamChunk]:
        """Return chunks from outside a step; ``update_from_output`` returns them too."""
        chunks, self._pending_chunks = self._pending_chunks, []
        return chunks

    def _append_sampled(self, seq: TokenSequence, result: SequenceOutput) -> StreamChunk:
        token, metrics = result.token_id, seq.request.metrics
        assert token is not None, "a sampled span must return a token"
        if metrics.first_token is None:
            metrics.first_token = self._clock()
        metrics.num_completion_tokens += 1
        prompt_logprobs = seq.pop_prompt_logprobs() if seq.prompt_logprobs else ()
        seq.token_ids.append(token)
        is_end = token in seq.stop_tokens and seq.num_generated_tokens > seq.sampling_params.min_tokens
        if is_end or result.is_complete:
            chunk = self._end(seq, "stop")
        elif len(seq.token_ids) >= seq.max_len:
            chunk = self._end(seq, "length", limit=seq.limited_by)
        else:
            return StreamChunk(seq.request_id, seq.sample_index, token, result.logprob, prompt_logprobs)
        return chunk._replace(token_id=token, logprob=result.logprob, prompt_logprobs=prompt_logprobs)

    def _recover(self, seq: TokenSequence, reason: str) -> list[StreamChunk]:
        """Preempt a sequence whose offloaded tokens cannot be read; it is recomputed."""
        seq.num_recoveries += 1
        if seq.num_recoveries > MAX_RECOVERIES:
            return self._fail(seq, f"the offloaded tokens of request {seq.request_id} cannot be read: {reason}")
        LOG.warning("request %d, sample %d is recomputed: %s", seq.request_id, seq.sample_index, reason)
        self._preempt(seq)
        return []

    def _fail(self, seq: TokenSequence, error: str) -> list[StreamChunk]:
        if seq.request.beams is not None:
            return self._end_beams(seq.request, "error", error)
        return [self._end(seq, "error", error)]

    def _advance(self, request: Request, beams: BeamSearch | DiverseBeamSearch) -> list[StreamChunk]:
        """Once all beams have candidates, fork beams with several children and free those with none."""
        if any(seq.beam_candidates is None for seq in request.live_beams):
            return []
        if request.metrics.first_token is None:
            request.metrics.first_token = self._clock()
        live = request.live_beams
        logprobs = [{score.token_id: score for score in seq.candidate_logprobs} for seq in live]
        requested = logprobs if request.sampling_params.logprobs is not None else ()
        candidates = [seq.beam_candidates or () for seq in live]
        children = beams.advance([seq.token_ids for seq in live], candidates, requested)
        if not children:
            return self._end_beams(request)
        self._admission.continue_beams(request, children)
        return []

    def _end_beams(
        self,
        request: Request,
        reason: FinishReason | None = None,
        error: str | None = None,
        limit: cache.config.LengthLimit | None = None,
    ) -> list[StreamChunk]:
        """End a search and return its best hypotheses, or for a ``reason`` such as "abort" only the ends.

        ``limit`` is the limit that ended the live beams, if not their own.
        """
        assert request.beams is not None
        best = request.beams.best_hypotheses([seq.token_ids for seq in request.live_beams]) if reason is None else []
        if reason is None and len(best) < request.sampling_params.n:
            best, reason, error = [], "error", NO_ALLOWED_BEAM
        self._admission.release_idle_beams(request)
        for seq in request.sequences:
            if seq.state == IDLE:
                seq.state = DONE
        for seq in [seq for seq in request.sequences if seq.state != DONE]:
            self._end(seq, reason or "stop")
        if reason is not None:
            samples = range(request.sampling_params.n)
            return [StreamChunk(request.id, sample, finish_reason=reason, error=error) for sample in samples]
        request.metrics.num_completion_tokens = sum(len(hypothesis.tokens) for hypothesis in best)
        first, *others = hypothesis_chunks(request.id, best, limit or request.sequences[0].limited_by)
        return [first._replace(prompt_logprobs=request.sequences[0].pop_prompt_logprobs()), *others]

    def _end(
        self,
        seq: TokenSequence,
        reason: FinishReason,
        error: str | None = None,
        limit: cache.config.LengthLimit | None = None,
    ) -> StreamChunk:
        """End a sequence: release its index, its blocks and its copy, and return its last chunk."""
        if seq.state == RUNNING:
            if seq.request.keep_state and reason in ("stop", "length"):
                layout = self.kv_cache_manager.export_layout(seq.seq_index)
                if layout is not None and layout.length:
                    tokens = tuple(seq.token_ids[: layout.length])
                    self._finished_states.append(FinishedState(seq.request_id, tokens, seq.rope_regime, layout))
            self._running.remove(seq)
            self._admission.release(seq, publish=reason != "error")
        elif seq in self._waiting:
            self._waiting.remove(seq)
            self._admission.unblock()
        LOG.debug("request %d, sample %d ended: %s", seq.request_id, seq.sample_index, reason)
        self.preemption.forget(seq)
        seq.prefetch = None  # late loads write to an unreferenced buffer
        seq.state = DONE
        if all(sibling.state == DONE for sibling in seq.request.sequences):
            seq.request.metrics.finished = self._clock()
            if seq.request.reserved_blocks is not None:
                self._reservations.release(seq.request.reserved_blocks)
            self._ended[seq.request_id] = self._requests.pop(seq.request_id).metrics
            if len(self._ended) > MAX_FINISHED_METRICS:
                del self._ended[next(iter(self._ended))]
        return StreamChunk(seq.request_id, seq.sample_index, finish_reason=reason, error=error, limit=limit)

    def check(self) -> None:
        """Assert that every sequence is in one place, and the invariants of indices and blocks."""
        self._admission.check([seq for request in self._requests.values() for seq in request.sequences])
        self.kv_cache_manager.check()


def _are_recomputed(seqs: Sequence[TokenSequence], output: SchedulerOutput) -> bool:
    """Return True if sequences of a failed step have all their tokens again, with this step."""
    sampled = {id(scheduled.sequence) for scheduled in output.scheduled if scheduled.is_sampled}
    return all(id(seq) in sampled for seq in seqs if seq.state == RUNNING) and all(seq.state != WAITING for seq in seqs)


def _continues(scheduled: ScheduledSequence) -> bool:
    """Return True if a sequence of a step decodes one more token, unless the token of this step ends it."""
    seq = scheduled.sequence
    is_alone = not scheduled.draft_token_ids and seq.request.beams is None
    return is_alone and scheduled.is_sampled and seq.state == RUNNING and len(seq.token_ids) + 1 < seq.max_len
