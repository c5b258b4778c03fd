"""Which rows run in the next step, and with how many tokens.  Integers only: no torch, no clock but the one given.

A source (of an encoder-decoder's row, or an encoder's own) is read whole, in a step of its own, before anything else of
its row; sources that wait are encoded together.

``plan`` gives every decoding row its token, then continues the prompts that are being read (in chunks), then admits
who waits, first come, first served, all under ``budget`` tokens and ``rows`` seats; a plan is already placed by the
ledger.  ``settle`` takes what came out and says what happened.  One plan may be in flight.

Invariants: the oldest row advances or ends, so everything ends; a row's tokens do not depend on its neighbours; a row
is in exactly one of *waiting* (no seat, no blocks), *running* (a seat) and *done*.

A beam search's beams are rows that go on together: each waits until all have their candidates, then some are forked
(blocks shared, copied when written) and some given up.  They are preempted together.

When a pool is full the youngest running row is preempted: it gives its blocks back (published ones may survive until
it returns), waits at its old place in the queue and computes its tokens again, or is parked and has its blocks back as
they were (``swaps.py``); others run until what was parked is at hand.  A row that says "stop" ends instead, when it is
the one that cannot grow; one that says "refuse" never gives way: its blocks were promised when it came (``limits.py``).
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

MAX_RECOVERIES = 2  # a row whose spilled part was lost is computed again so often, then it ends
MAX_FINISHED_METRICS = 4096  # of ended requests, the latest
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SchedulerStats:
    running: int
    waiting: int
    preemptions: int
    steps: int
    tokens: int  # computed, recomputed ones included


class Scheduler:
    """Owns the ledger.  ``budget``: tokens per step; ``chunk``: of one row; ``limit``: tokens of the longest row, or
    all that there is to say of where rows end; ``swaps``: how they give way (None: as without a parking)."""

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
                f"rows {max_num_seqs}, chunk {prefill_chunk_size} and limit {limits.max_len} must be at least 1"
            )
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"budget: {max_num_batched_tokens} tokens per step do not give each of {max_num_seqs} rows one"
            )
        self.kv_cache_manager = kv_cache_manager
        self.preemption = PreemptionManager(kv_cache_manager) if preemption is None else preemption
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefill_chunk_size = prefill_chunk_size
        self.limits = limits
        self._promises = BlockReservations(kv_cache_manager.groups, kv_cache_manager.watermark_blocks)
        self._clock = clock
        self._seating = AdmissionQueue(kv_cache_manager, max_num_seqs)
        self._running, self._waiting = self._seating.running, self._seating.waiting  # oldest first, both
        self._seats = self._seating.free_indices
        self._requests: dict[int, Request] = {}
        self._ended: dict[int, RequestMetrics] = {}
        self._flying: SchedulerOutput | None = None
        self._pending: list[SequenceEvent] = []
        self._pop_finished_states: list[FinishedState] = []
        self._arrivals = self._preemptions = self._steps = self._tokens = 0
        self._blocked = -1  # ledger.releases when an admission last failed: no sense in trying before it grows
        self._lanes = SubBatchBuilder(kv_cache_manager.groups)

    # ------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        root: bytes = b"",
        *,
        stop_tokens: frozenset[int] = frozenset(),
        source: Sequence[int] | None = None,
        want: str = "head",
        parked: SwappedSequence | None = None,
        keep: bool = False,
    ) -> RequestMetrics:
        """Queue a request; ``stop_tokens`` join those of ``sampling``.  The Usage is kept up to date until it ends.

        ``parked``: what there is of the first tokens of the one row (``Ledger.adopt``); it is the caller's no more.
        ``keep``: tell with :meth:`left` what the row leaves when it ends by itself.

        ``source``: what an encoder reads, known to it; ``prompt`` then begins the target, or is empty: the encoder's
        answer itself is wanted (``want``: the head's, or its states pooled by "mean" or "first"), as the one event.

        RequestError: no prompt; a prompt beyond the model's limit; more tokens than the whole pool could hold; a way to
        go on that the cache was not laid out for; what "refuse" refuses.  ``max_tokens=None`` goes up to the model's
        limit, the cache's or what the pool holds, whichever is less, or without an end where there is none.
        """
        assert request_id not in self._requests, f"request {request_id} is running already"
        answered = source is not None and not prompt
        self._check_source(source, answered)
        on_full = self.limits.on_full if answered else self.limits.overflow_mode(sampling)
        limit, by = (
            (0, None) if answered else self.limits.resolve(len(prompt), sampling, self.kv_cache_manager.capacity)
        )
        usage = RequestMetrics(len(prompt) if source is None else len(source), self._clock())
        stops = stop_tokens | frozenset(sampling.stop_token_ids)
        read = None if source is None else tuple(source)
        request = Request(request_id, self._arrivals, sampling, root, stops, usage, read, want)
        self._arrivals += 1
        if sampling.num_beams > 1 and not answered:
            self._check_beams(sampling, limit)
            if limit > len(prompt):  # else there is nothing to search
                request.beams = BeamSearch(sampling, len(prompt), limit, stops)
        if on_full == "refuse" and not answered:
            request.reserved_blocks = self._promises.reserve(
                max(sampling.n, sampling.num_beams), max(len(prompt), limit - 1)
            )
        request.keep_state = keep
        self._requests[request_id] = request
        for sample in range(sampling.n if request.beams is None else sampling.num_beams):
            row = TokenSequence(request, sample, list(prompt), limit, by or "model", on_full)
            row.swapped = parked
            request.sequences.append(row)
            if request.beams is not None and sample:
                row.state = IDLE
            else:
                self._waiting.append(row)
        request.live_beams = request.sequences[:1]
        return usage

    def _check_beams(self, sampling: SamplingParams, limit: int) -> None:
        if self.kv_cache_manager.lossy:
            raise RequestError(
                "beams share what they have read, and under this cache's policy each row keeps what it ranks highest",
                "search under a policy by position (full, window, sinks, truncate), or sample",
            )
        if sampling.num_beams > self._seating.max_num_seqs:
            raise RequestError(
                f"{sampling.num_beams} beams need as many rows, there are {self._seating.max_num_seqs}", "ask for fewer"
            )
        if not self.kv_cache_manager.has_capacity(sampling.num_beams, limit):
            raise RequestError(
                f"the cache has no room for {sampling.num_beams} beams of {limit} tokens",
                "ask for fewer beams or tokens, or give the cache more blocks",
            )

    def _check_source(self, source: Sequence[int] | None, answered: bool) -> None:
        """The caller knows the encoder's own limit; here it is what the cache holds."""
        if source is None:
            return
        if not source:
            raise RequestError("the source is empty: an encoder reads at least one token")
        holds = self.kv_cache_manager.max_source_len
        if not answered and len(source) > holds:
            raise RequestError(
                f"the source has {len(source)} tokens, the cache holds {holds} of one", "shorten it, nothing is cut"
            )

    def abort_request(self, request_id: int) -> list[SequenceEvent]:
        """End every sample of a request, also while a plan is in flight.  Nothing happens if it has ended."""
        request = self._requests.get(request_id)
        if request is not None and request.beams is not None:
            return self._end_beams(request, "cancelled")
        rows = [row for row in request.sequences if row.state != DONE] if request is not None else []
        return [self._end(row, "cancelled") for row in rows]

    def finish_sequence(self, request_id: int, sample: int, reason: FinishReason = "stop") -> list[SequenceEvent]:
        """End one sample (a stop string was found).  Nothing happens if it has ended."""
        request = self._requests.get(request_id)
        if request is not None and request.beams is not None:
            return self._end_beams(request, reason)
        rows = [row for row in request.sequences if row.sample_index == sample and row.state != DONE] if request else []
        return [self._end(row, reason) for row in rows]

    def preempt(self, request_id: int) -> bool:
        """Make a request's running rows give way between two steps, as if the pool had run out (``kvad verify``
        do).  False: none of them runs."""
        assert self._flying is None, "a plan is in flight: settle it first"
        running = [row for row in self.sequences(request_id) if row.state == RUNNING and row.beam_candidates is None]
        for row in running:
            if row.state == RUNNING:  # beams leave together
                self._preempt(row)
        return bool(running)

    @property
    def idle(self) -> bool:
        """Nothing to do: no request, no event that was not told."""
        return not self._requests and not self._pending

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self._running), len(self._waiting), self._preemptions, self._steps, self._tokens)

    def metrics(self, request_id: int) -> RequestMetrics:
        """Of a request that runs or waits, or of the latest that ended; KeyError for others."""
        request = self._requests.get(request_id)
        return request.metrics if request is not None else self._ended[request_id]

    def num_cached_tokens(self, request_id: int) -> int:
        """Prompt tokens of the request that a prefix hit made free."""
        return self.metrics(request_id).num_cached_tokens

    def sequences(self, request_id: int) -> tuple[TokenSequence, ...]:
        request = self._requests.get(request_id)
        return tuple(request.sequences) if request is not None else ()

    # ------------------------------------------------------------ a step

    def schedule(self) -> SchedulerOutput | None:
        """The next step, placed; None when there is nothing to run, or all that waits is on its way from the tiers.
        :meth:`settle` it before the next."""
        assert self._flying is None, "a plan is in flight: settle it first"
        admitting = True
        self._see_parked()
        while True:
            if admitting and self._waiting:
                self._admit_sources()
            encoding = self._encode()
            if encoding is not None:
                return encoding
            items, left = self._continue()
            fresh = self._admit(left) if admitting and left > 0 and self._waiting else []
            placed = self._reserve(items, fresh)
            if placed is not None:
                return self._depart(*placed)
            if self._running:
                self._give_way(items)
                # Alone, without shared blocks, it will fit: try again at once.  So do beams that waited for others.
                admitting = not items or not self._running
            elif not self._waiting or any(row.prefetch is not None and row.prefetch.in_flight for row in self._waiting):
                return None
            elif self.preemption.pending:  # nothing else to do
                self.preemption.wait()
                self._see_parked()

    def _see_parked(self) -> None:
        """What the parking has done meanwhile; and the next row that could be seated is fetched."""
        if self.preemption.poll():
            self._blocked = -1
            for row, error in self.preemption.failed(self._waiting):
                self._end(row, "error", error, tell=True)
        if self.preemption.has_swapped and self._waiting:
            row = next((row for row in self._waiting if self._seating.is_ready(row)), self._waiting[0])
            self.preemption.prefetch(row)

    def _continue(self) -> tuple[list[BatchItem], int]:
        """The running rows' next tokens: decoding rows first, then prompts, oldest first; and the budget left."""
        items: list[BatchItem] = []
        reading: list[TokenSequence] = []
        left = self._max_num_batched_tokens
        for row in self._running:
            assert row.encoder_ready, "sources come first"
            if row.beam_candidates is not None:
                continue  # a beam that waits for the others
            if row.num_computed_tokens + 1 == len(row.token_ids):
                items.append((self._lanes.sort_key(row, 1), row, 1))
                left -= 1
            else:
                reading.append(row)
        for row in reading:
            if left <= 0:
                break
            new = self._span(row, left)
            items.append((self._lanes.sort_key(row, new), row, new))
            left -= new
        return items, left

    def _admit(self, left: int) -> list[BatchItem]:
        """Seat waiting rows while there are seats, tokens and blocks; they are not running yet."""
        fresh: list[BatchItem] = []
        if (
            self._running
            and self._blocked == self.kv_cache_manager.num_frees
            and self._waiting[0].request.beams is None
        ):
            return fresh
        place = 0
        while place < len(self._waiting) and self._seats and left > 0:
            row = self._waiting[place]
            if row.request.encoder_tokens is not None or not self._seating.is_admissible(row):
                place += 1
                continue
            if not self._seating.try_admit(row, self.preemption, [each for _, each, _ in fresh]):
                self._blocked = self.kv_cache_manager.num_frees
                break
            del self._waiting[place]
            new = self._span(row, left)
            fresh.append((self._lanes.sort_key(row, new), row, new))
            left -= new
        return fresh

    def _span(self, row: TokenSequence, left: int) -> int:
        """New tokens of a row in this step: a chunk, that ends where a policy cuts the row."""
        return min(
            len(row.token_ids) - row.num_computed_tokens,
            self._prefill_chunk_size,
            left,
            self.kv_cache_manager.tokens_until_eviction(row.seq_index),
        )

    def _admit_sources(self) -> None:
        """Seat waiting rows that have a source, oldest first; those whose source is not known wait to be encoded."""
        if (
            self._running
            and self._blocked == self.kv_cache_manager.num_frees
            and self._waiting[0].request.beams is None
        ):
            return
        place, now = 0, self._clock()
        while place < len(self._waiting) and self._seats:
            row = self._waiting[place]
            if row.request.encoder_tokens is None or not self._seating.is_admissible(row):
                place += 1
                continue
            if not self._seating.try_admit(row, self.preemption):
                self._blocked = self.kv_cache_manager.num_frees
                return
            del self._waiting[place]
            self._seating.start(row, now)

    def _encode(self) -> SchedulerOutput | None:
        """A step of the encoder, for as many unread sources as the budget allows, at least one; None: none waits."""
        unread = [row for row in self._running if not row.encoder_ready]
        if not unread:
            return None
        unread = [
            row for row in unread if bool(row.token_ids) == bool(unread[0].token_ids)
        ]  # what is kept, or answered
        chosen: list[tuple[int, int, TokenSequence]] = []
        left = self._max_num_batched_tokens
        for row in unread:
            length = len(row.request.encoder_tokens or ())
            if chosen and length > left:
                break
            chosen.append((length, row.seq_index, row))
            left -= length
        chosen.sort(key=lambda each: each[:2])
        rows = tuple(row for _, _, row in chosen)
        lengths = [length for length, _, _ in chosen]
        lanes = tuple(SubBatch(lengths.count(n), n, n) for n in sorted(set(lengths)))
        kept = [row.seq_index for row in rows if row.token_ids]
        assert len(kept) in (0, len(rows)), "an encoder answers, or is read by a decoder"
        placed = self.kv_cache_manager.allocate_encoder_slots(kept) if kept else None
        self._steps += 1
        self._tokens += sum(lengths)
        nothing = BlockAllocation(BlockOps((), ()), (), ())
        self._flying = SchedulerOutput((), (), nothing, EncoderBatch(rows, lanes, placed))
        return self._flying

    def _reserve(
        self, items: list[BatchItem], fresh: list[BatchItem]
    ) -> tuple[list[BatchItem], BlockAllocation] | None:
        """Place all of ``items``, and as many of ``fresh`` as there is room for: the others wait on."""
        while items or fresh:
            every = items + fresh
            every.sort(key=_request_order if self.kv_cache_manager.max_source_len else None)
            placed = self.kv_cache_manager.allocate_slots(
                [(row.seq_index, row.num_computed_tokens, new) for _, row, new in every]
            )
            if placed is not None:
                return every, placed
            if not fresh:
                return None
            row = fresh.pop()[1]
            self._seating.release(row)
            if all(beam.seq_index < 0 for beam in row.request.sequences if beam.state != IDLE):
                self._seating.release_idle_beams(row.request)
            self._blocked = self.kv_cache_manager.num_frees
            if not items and not fresh and not self._running:
                error = f"the cache has no room for {len(row.token_ids)} tokens of one row"
                self._end(row, "length", error, limit="pool", tell=True)
            else:
                self._seating.enqueue(row)
        return None

    def _give_way(self, items: Sequence[BatchItem]) -> None:
        """The pool has run out: the youngest row that may give way does.  A row that says "stop" does so only where it
        is one that cannot grow, or where one that was promised room cannot."""
        growing = {
            id(row)
            for _, row, new in items
            if row.overflow != "preempt" and self.kv_cache_manager.needs_blocks(row.seq_index, new)
        }
        yielding = [row for row in reversed(self._running) if row.overflow != "refuse"]
        assert yielding, "rows that were promised room have none"
        row = next((row for row in yielding if not _stops_when_full(row) or id(row) in growing), yielding[0])
        if _stops_when_full(row):
            self._stop(row)
        else:
            self._log("a row is preempted", row)
            self._preempt(row)

    def _stop(self, row: TokenSequence) -> None:
        """End a row with what it has, or a search with the best of it."""
        self._log("a row is ended", row)
        if row.request.beams is not None:
            self._pending.extend(self._end_beams(row.request, limit="pool"))
        else:
            self._end(row, "length", limit="pool", tell=True)

    def _log(self, what: str, row: TokenSequence, stats: CacheStats | None = None) -> None:
        """``stats``: of the pools as they were when they had run out."""
        if LOG.isEnabledFor(logging.INFO):
            stats = self.kv_cache_manager.stats() if stats is None else stats
            LOG.info(
                "the pool has run out: %s (request %d, sample %d); blocks used %s, peak %s, watermark %s, of %s",
                what, row.request_id, row.sample_index, stats.used, stats.peak, stats.watermark, stats.total,
            )  # fmt: skip

    def _preempt(self, row: TokenSequence) -> None:
        rows = [row] if row.request.beams is None else [beam for beam in row.request.sequences if beam.state == RUNNING]
        for each in rows:
            self._running.remove(each)
            full = self.kv_cache_manager.stats() if LOG.isEnabledFor(logging.INFO) else None
            self._log(f"a row is preempted, {self.preemption.preempt(each)}", each, full)
            self._seating.release(each, released=each.swapped is not None)
            each.state, each.beam_candidates = WAITING, None
            self._seating.enqueue(each)
        self._seating.release_idle_beams(row.request)
        row.request.metrics.num_preemptions += 1
        self._preemptions += 1
        self._blocked = self.kv_cache_manager.num_frees

    def _depart(self, items: list[BatchItem], placed: BlockAllocation) -> SchedulerOutput:
        work = []
        now: float | None = None
        for _, row, new in items:
            if row.swapped is not None:
                self.preemption.on_restored(row)
            row.prefetch = None
            if row.state == WAITING:
                now = self._clock() if now is None else now
                self._seating.start(row, now)
            work.append(self._work(row, new))
            self._tokens += new
        self._steps += 1
        lanes = self._lanes.build(items, placed)
        cross = group_by_source(items, lanes) if self.kv_cache_manager.max_source_len else None
        self._flying = SchedulerOutput(tuple(work), lanes, placed, cross_sub_batches=cross)
        return self._flying

    def _work(self, row: TokenSequence, new: int) -> ScheduledSequence:
        start, end = row.num_computed_tokens, row.num_computed_tokens + new
        samples = end == len(row.token_ids) and end < row.max_len
        # The last token scores what follows it, unless nothing does: its logits vouch for this span (see settle).
        stop = new if samples or end < len(row.token_ids) else new - 1
        first = stop - 1
        if row.wants_prompt_logprobs and row.num_scored_tokens < row.num_prompt_tokens - 1:
            first = min(first, max(row.num_scored_tokens - start, 0))
        return ScheduledSequence(row, start, new, range(max(first, 0), stop), samples)

    # ------------------------------------------------------------ what came out

    def update_from_output(self, plan: SchedulerOutput, results: Sequence[SequenceOutput]) -> list[SequenceEvent]:
        """One Result per work, in its order.  Results of samples that ended meanwhile are dropped."""
        assert plan is self._flying, "this plan is not in flight"
        if plan.encoder_batch is not None:
            return self._settle_encoding(plan.encoder_batch, results)
        assert len(results) == len(plan.scheduled), f"{len(results)} results for {len(plan.scheduled)} spans"
        self._flying = None
        events = self.pop_events()
        commit = self.kv_cache_manager.commit
        for (row, start, count, wanted, samples), result in zip(plan.scheduled, results, strict=True):
            if row.state != RUNNING:  # it has ended, or goes back with a beam that is computed again
                continue
            if result.error is not None:
                events.extend(self._lost(row, result.error) if result.retry else self._fault(row, result.error))
                continue
            row.num_computed_tokens = end = start + count
            tokens = row.token_ids
            commit(row.seq_index, tokens[start:end], start + wanted.stop)
            if row.wants_prompt_logprobs:
                self._score(row, end, result)
            if samples and row.request.beams is not None:
                row.beam_candidates = result.candidates
                events.extend(self._advance(row.request, row.request.beams))
            elif samples:
                events.append(self._sampled(row, result))
            elif end >= row.max_len:  # nothing was to be generated
                events.append(
                    self._end(row, "length", limit=row.limited_by)._replace(prompt_logprobs=_pop_prompt_logprobs(row))
                )
        return events

    def _settle_encoding(self, encoding: EncoderBatch, results: Sequence[SequenceOutput]) -> list[SequenceEvent]:
        assert len(results) == len(encoding.sequences), f"{len(results)} results for {len(encoding.sequences)} sources"
        self._flying = None
        events = self.pop_events()
        for row, result in zip(encoding.sequences, results, strict=True):
            if row.state == DONE:
                continue
            if result.error is not None:
                events.extend(self._fault(row, result.error))
            elif not row.token_ids:
                events.append(self._end(row, "stop")._replace(output=result.output))
            else:
                row.encoder_ready = True
                self.kv_cache_manager.commit_encoder_blocks(row.seq_index)
        return events

    def pop_finished_states(self) -> list[FinishedState]:
        """What ended rows have left, where it was asked for; read it before the next step is run."""
        left, self._pop_finished_states = self._pop_finished_states, []
        return left

    def pop_events(self) -> list[SequenceEvent]:
        """Events that happened outside a step.  ``settle`` tells them too."""
        events, self._pending = self._pending, []
        return events

    def _score(self, row: TokenSequence, end: int, result: SequenceOutput) -> None:
        stop = _prompt_end(row, end)
        if stop > row.num_scored_tokens:
            assert len(result.prompt_logprobs) == stop - row.num_scored_tokens, (
                f"{len(result.prompt_logprobs)} scores for {stop - row.num_scored_tokens} tokens"
            )
            row.prompt_logprobs.extend(result.prompt_logprobs)
            row.num_scored_tokens = stop

    def _sampled(self, row: TokenSequence, result: SequenceOutput) -> SequenceEvent:
        token = result.token_id
        assert token is not None, "this span was to be sampled"
        usage = row.request.metrics
        if usage.first_token is None:
            usage.first_token = self._clock()
        usage.num_completion_tokens += 1
        prompt = _pop_prompt_logprobs(row) if row.prompt_logprobs else ()
        row.token_ids.append(token)
        if token in row.stop_tokens and row.num_generated_tokens > row.sampling_params.min_tokens:
            return self._end(row, "stop")._replace(token_id=token, logprob=result.logprob, prompt_logprobs=prompt)
        if len(row.token_ids) >= row.max_len:
            end = self._end(row, "length", limit=row.limited_by)
            return end._replace(token_id=token, logprob=result.logprob, prompt_logprobs=prompt)
        return SequenceEvent(row.request_id, row.sample_index, token, result.logprob, prompt)

    def _lost(self, row: TokenSequence, why: str) -> list[SequenceEvent]:
        """What the row had spilled cannot be read.  Its tokens are known: it goes back to be computed again."""
        row.num_recoveries += 1
        if row.num_recoveries > MAX_RECOVERIES:
            return self._fault(row, f"the spilled part of request {row.request_id} cannot be read: {why}")
        LOG.warning("request %d, sample %d is computed again: %s", row.request_id, row.sample_index, why)
        self._preempt(row)
        return []

    def _fault(self, row: TokenSequence, fault: str) -> list[SequenceEvent]:
        if row.request.beams is not None:
            return self._end_beams(row.request, "error", fault)
        return [self._end(row, "error", fault)]

    # ------------------------------------------------------------ beams

    def _advance(self, request: Request, beams: BeamSearch) -> list[SequenceEvent]:
        """Once every beam has its candidates: fork those with several children, give up those with none."""
        if any(row.beam_candidates is None for row in request.live_beams):
            return []
        live, sequences = request.live_beams, [row.token_ids for row in request.live_beams]
        if request.metrics.first_token is None:
            request.metrics.first_token = self._clock()
        children = beams.advance(sequences, [row.beam_candidates or () for row in live])
        if not children:
            return self._end_beams(request)
        first: dict[int, int] = {}  # parent -> its first child, which goes on in its seat
        for rank, child in enumerate(children):
            first.setdefault(child.parent, rank)
        for number, row in enumerate(live):
            row.beam_candidates = None
            if number not in first:
                self._running.remove(row)
                self.kv_cache_manager.free(row.seq_index)
                row.state = IDLE
        spare = [row for row in request.sequences if row.state == IDLE]
        request.live_beams = [
            live[child.parent] if first[child.parent] == rank else self._seating.fork(live[child.parent], spare.pop(0))
            for rank, child in enumerate(children)
        ]
        for row, child in zip(request.live_beams, children, strict=True):
            row.token_ids.append(child.token)
        return []

    def _end_beams(
        self,
        request: Request,
        reason: FinishReason | None = None,
        error: str | None = None,
        limit: cache.config.LengthLimit | None = None,
    ) -> list[SequenceEvent]:
        """End a search: its best hypotheses, token by token, or (``reason``) nothing of it.  ``limit``: what ended
        those that live, where it is not their own."""
        assert request.beams is not None
        limit = limit or request.sequences[0].limited_by
        best = request.beams.best_hypotheses([row.token_ids for row in request.live_beams]) if reason is None else []
        if reason is None and len(best) < request.sampling_params.n:
            best, reason, error = [], "error", "no continuation of the beams is allowed"
        for row in request.sequences:
            if row.state == IDLE:
                if row.seq_index >= 0:
                    heapq.heappush(self._seats, row.seq_index)
                row.state = DONE
        for row in [row for row in request.sequences if row.state != DONE]:
            self._end(row, reason or "stop", error)
        events: list[SequenceEvent] = []
        request.metrics.num_completion_tokens = sum(len(each.tokens) for each in best)
        for number, each in enumerate(best):
            events.extend(SequenceEvent(request.id, number, token) for token in each.tokens[:-1])
            last = each.tokens[-1] if each.tokens else None
            by = limit if each.finish == "length" else None
            events.append(
                SequenceEvent(
                    request.id, number, last, finish_reason=each.finish, cumulative_logprob=each.score, limit=by
                )
            )
        if not best:
            ends = range(request.sampling_params.n)
            events = [
                SequenceEvent(request.id, number, finish_reason=reason or "error", error=error) for number in ends
            ]
        return events

    def _end(
        self,
        row: TokenSequence,
        reason: FinishReason,
        error: str | None = None,
        *,
        limit: cache.config.LengthLimit | None = None,
        tell: bool = False,
    ) -> SequenceEvent:
        if row.state == RUNNING:
            standing = (
                self.kv_cache_manager.export_layout(row.seq_index)
                if row.request.keep_state and reason in ("stop", "length")
                else None
            )
            if standing is not None and standing.length:
                self._pop_finished_states.append(
                    FinishedState(row.request_id, tuple(row.token_ids[: standing.length]), standing)
                )
            self._running.remove(row)
            self._seating.release(row, publish=reason != "error")
        elif row in self._waiting:
            self._waiting.remove(row)
            self._blocked = -1
        self.preemption.forget(row)
        row.prefetch = None  # what is still on its way comes into memory that nobody reads
        row.state = DONE
        request = row.request
        if all(sibling.state == DONE for sibling in request.sequences):
            request.metrics.finished = self._clock()
            if request.reserved_blocks is not None:
                self._promises.release(request.reserved_blocks)
            del self._requests[request.id]
            self._ended[request.id] = request.metrics
            if len(self._ended) > MAX_FINISHED_METRICS:
                del self._ended[next(iter(self._ended))]
        event = SequenceEvent(row.request_id, row.sample_index, finish_reason=reason, error=error, limit=limit)
        if tell:
            self._pending.append(event)
        return event

    def check(self) -> None:
        """Assert that every row is in one place, seats add up, and the ledger's own law."""
        self._seating.check([row for request in self._requests.values() for row in request.sequences])
        self.kv_cache_manager.check()


def _stops_when_full(row: TokenSequence) -> bool:
    """Nothing is lost of a row that has said nothing yet: it can wait."""
    return row.overflow == "stop" and row.num_generated_tokens > 0


def _request_order(item: BatchItem) -> tuple[int, tuple[int, int]]:
    """Lane by lane as without it, but there a request's rows side by side: they share a source (``fold_lanes``)."""
    return item[0] >> 16, item[1].priority


def _prompt_end(row: TokenSequence, end: int) -> int:
    """Positions before this one, computed up to ``end``, score a prompt token (the last prompt token scores none)."""
    return min(end, row.num_prompt_tokens - 1)


def _pop_prompt_logprobs(row: TokenSequence) -> tuple[TokenLogprob, ...]:
    scores, row.prompt_logprobs = tuple(row.prompt_logprobs), []
    return scores
