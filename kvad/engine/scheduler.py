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

from kvad.cache.full import LimitName
from kvad.cache.ledger import Ledger, LedgerStats, Parked, Placed
from kvad.engine.beams import BeamGroup
from kvad.engine.lanes import Item, Lanes, fold_lanes
from kvad.engine.limits import Limits, Promises
from kvad.engine.request import Event, FinishReason, Result, Sampling, TokenScore
from kvad.engine.row import DONE, IDLE, RUNNING, WAITING, Encoding, Left, Plan, Request, Row, Usage, Work
from kvad.engine.seating import Seating
from kvad.engine.swaps import Swaps
from kvad.errors import ConfigError, RequestError
from kvad.step import Lane, Moves

__all__ = ["Plan", "Row", "Scheduler", "SchedulerStats", "Usage", "Work"]

MOST_LOSSES = 2  # a row whose spilled part was lost is computed again so often, then it ends
KEPT_USAGES = 4096  # of ended requests, the latest
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
        ledger: Ledger,
        *,
        rows: int,
        budget: int,
        chunk: int,
        limit: int | Limits,
        clock: Callable[[], float] = time.monotonic,
        swaps: Swaps | None = None,
    ) -> None:
        limits = limit if isinstance(limit, Limits) else Limits(limit)
        if rows < 1 or chunk < 1 or limits.row < 1:
            raise ConfigError(f"rows {rows}, chunk {chunk} and limit {limits.row} must be at least 1")
        if budget < rows:
            raise ConfigError(f"budget: {budget} tokens per step do not give each of {rows} rows one")
        self.ledger = ledger
        self.swaps = Swaps(ledger) if swaps is None else swaps
        self._budget = budget
        self._chunk = chunk
        self.limits = limits
        self._promises = Promises(ledger.groups, ledger.spare)
        self._clock = clock
        self._seating = Seating(ledger, rows)
        self._running, self._waiting = self._seating.running, self._seating.waiting  # oldest first, both
        self._seats = self._seating.free
        self._requests: dict[int, Request] = {}
        self._ended: dict[int, Usage] = {}
        self._flying: Plan | None = None
        self._pending: list[Event] = []
        self._left: list[Left] = []
        self._arrivals = self._preemptions = self._steps = self._tokens = 0
        self._blocked = -1  # ledger.releases when an admission last failed: no sense in trying before it grows
        self._lanes = Lanes(ledger.groups)

    # ------------------------------------------------------------ requests

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        sampling: Sampling,
        root: bytes = b"",
        *,
        stop_tokens: frozenset[int] = frozenset(),
        source: Sequence[int] | None = None,
        want: str = "head",
        parked: Parked | None = None,
        keep: bool = False,
    ) -> Usage:
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
        on_full = self.limits.on_full if answered else self.limits.chosen(sampling)
        limit, by = (0, None) if answered else self.limits.end(len(prompt), sampling, self.ledger.capacity)
        usage = Usage(len(prompt) if source is None else len(source), self._clock())
        stops = stop_tokens | frozenset(sampling.stop_tokens)
        read = None if source is None else tuple(source)
        request = Request(request_id, self._arrivals, sampling, root, stops, usage, read, want)
        self._arrivals += 1
        if sampling.beams > 1 and not answered:
            self._check_beams(sampling, limit)
            if limit > len(prompt):  # else there is nothing to search
                request.beams = BeamGroup(sampling, len(prompt), limit, stops)
        if on_full == "refuse" and not answered:
            request.promised = self._promises.take(max(sampling.n, sampling.beams), max(len(prompt), limit - 1))
        request.keep = keep
        self._requests[request_id] = request
        for sample in range(sampling.n if request.beams is None else sampling.beams):
            row = Row(request, sample, list(prompt), limit, by or "model", on_full)
            row.parked = parked
            request.rows.append(row)
            if request.beams is not None and sample:
                row.state = IDLE
            else:
                self._waiting.append(row)
        request.live = request.rows[:1]
        return usage

    def _check_beams(self, sampling: Sampling, limit: int) -> None:
        if self.ledger.lossy:
            raise RequestError(
                "beams share what they have read, and under this cache's policy each row keeps what it ranks highest",
                "search under a policy by position (full, window, sinks, truncate), or sample",
            )
        if sampling.beams > self._seating.num_seats:
            raise RequestError(
                f"{sampling.beams} beams need as many rows, there are {self._seating.num_seats}", "ask for fewer"
            )
        if not self.ledger.holds(sampling.beams, limit):
            raise RequestError(
                f"the cache has no room for {sampling.beams} beams of {limit} tokens",
                "ask for fewer beams or tokens, or give the cache more blocks",
            )

    def _check_source(self, source: Sequence[int] | None, answered: bool) -> None:
        """The caller knows the encoder's own limit; here it is what the cache holds."""
        if source is None:
            return
        if not source:
            raise RequestError("the source is empty: an encoder reads at least one token")
        holds = self.ledger.source_capacity
        if not answered and len(source) > holds:
            raise RequestError(
                f"the source has {len(source)} tokens, the cache holds {holds} of one", "shorten it, nothing is cut"
            )

    def cancel(self, request_id: int) -> list[Event]:
        """End every sample of a request, also while a plan is in flight.  Nothing happens if it has ended."""
        request = self._requests.get(request_id)
        if request is not None and request.beams is not None:
            return self._end_beams(request, "cancelled")
        rows = [row for row in request.rows if row.state != DONE] if request is not None else []
        return [self._end(row, "cancelled") for row in rows]

    def finish(self, request_id: int, sample: int, reason: FinishReason = "stop") -> list[Event]:
        """End one sample (a stop string was found).  Nothing happens if it has ended."""
        request = self._requests.get(request_id)
        if request is not None and request.beams is not None:
            return self._end_beams(request, reason)
        rows = [row for row in request.rows if row.sample == sample and row.state != DONE] if request else []
        return [self._end(row, reason) for row in rows]

    def preempt(self, request_id: int) -> bool:
        """Make a request's running rows give way between two steps, as if the pool had run out (``kvad verify``
        do).  False: none of them runs."""
        assert self._flying is None, "a plan is in flight: settle it first"
        running = [row for row in self.rows(request_id) if row.state == RUNNING and row.pending is None]
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

    def usage(self, request_id: int) -> Usage:
        """Of a request that runs or waits, or of the latest that ended; KeyError for others."""
        request = self._requests.get(request_id)
        return request.usage if request is not None else self._ended[request_id]

    def cached(self, request_id: int) -> int:
        """Prompt tokens of the request that a prefix hit made free."""
        return self.usage(request_id).cached

    def rows(self, request_id: int) -> tuple[Row, ...]:
        request = self._requests.get(request_id)
        return tuple(request.rows) if request is not None else ()

    # ------------------------------------------------------------ a step

    def plan(self) -> Plan | None:
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
            elif not self._waiting or any(row.fetch is not None and row.fetch.coming for row in self._waiting):
                return None
            elif self.swaps.pending:  # nothing else to do
                self.swaps.wait()
                self._see_parked()

    def _see_parked(self) -> None:
        """What the parking has done meanwhile; and the next row that could be seated is fetched."""
        if self.swaps.poll():
            self._blocked = -1
            for row, error in self.swaps.lost(self._waiting):
                self._end(row, "error", error, tell=True)
        if self.swaps.holding and self._waiting:
            row = next((row for row in self._waiting if self._seating.ready(row)), self._waiting[0])
            self.swaps.fetch(row)

    def _continue(self) -> tuple[list[Item], int]:
        """The running rows' next tokens: decoding rows first, then prompts, oldest first; and the budget left."""
        items: list[Item] = []
        reading: list[Row] = []
        left = self._budget
        for row in self._running:
            assert row.encoded, "sources come first"
            if row.pending is not None:
                continue  # a beam that waits for the others
            if row.computed + 1 == len(row.tokens):
                items.append((self._lanes.key(row, 1), row, 1))
                left -= 1
            else:
                reading.append(row)
        for row in reading:
            if left <= 0:
                break
            new = self._span(row, left)
            items.append((self._lanes.key(row, new), row, new))
            left -= new
        return items, left

    def _admit(self, left: int) -> list[Item]:
        """Seat waiting rows while there are seats, tokens and blocks; they are not running yet."""
        fresh: list[Item] = []
        if self._running and self._blocked == self.ledger.releases and self._waiting[0].group.beams is None:
            return fresh
        place = 0
        while place < len(self._waiting) and self._seats and left > 0:
            row = self._waiting[place]
            if row.group.source is not None or not self._seating.able(row):
                place += 1
                continue
            if not self._seating.enter(row, self.swaps, [each for _, each, _ in fresh]):
                self._blocked = self.ledger.releases
                break
            del self._waiting[place]
            new = self._span(row, left)
            fresh.append((self._lanes.key(row, new), row, new))
            left -= new
        return fresh

    def _span(self, row: Row, left: int) -> int:
        """New tokens of a row in this step: a chunk, that ends where a policy cuts the row."""
        return min(len(row.tokens) - row.computed, self._chunk, left, self.ledger.room(row.seat))

    def _admit_sources(self) -> None:
        """Seat waiting rows that have a source, oldest first; those whose source is not known wait to be encoded."""
        if self._running and self._blocked == self.ledger.releases and self._waiting[0].group.beams is None:
            return
        place, now = 0, self._clock()
        while place < len(self._waiting) and self._seats:
            row = self._waiting[place]
            if row.group.source is None or not self._seating.able(row):
                place += 1
                continue
            if not self._seating.enter(row, self.swaps):
                self._blocked = self.ledger.releases
                return
            del self._waiting[place]
            self._seating.sit(row, now)

    def _encode(self) -> Plan | None:
        """A step of the encoder, for as many unread sources as the budget allows, at least one; None: none waits."""
        unread = [row for row in self._running if not row.encoded]
        if not unread:
            return None
        unread = [row for row in unread if bool(row.tokens) == bool(unread[0].tokens)]  # what is kept, or answered
        chosen: list[tuple[int, int, Row]] = []
        left = self._budget
        for row in unread:
            length = len(row.group.source or ())
            if chosen and length > left:
                break
            chosen.append((length, row.seat, row))
            left -= length
        chosen.sort(key=lambda each: each[:2])
        rows = tuple(row for _, _, row in chosen)
        lengths = [length for length, _, _ in chosen]
        lanes = tuple(Lane(lengths.count(n), n, n) for n in sorted(set(lengths)))
        kept = [row.seat for row in rows if row.tokens]
        assert len(kept) in (0, len(rows)), "an encoder answers, or is read by a decoder"
        placed = self.ledger.place_sources(kept) if kept else None
        self._steps += 1
        self._tokens += sum(lengths)
        nothing = Placed(Moves((), ()), (), ())
        self._flying = Plan((), (), nothing, Encoding(rows, lanes, placed))
        return self._flying

    def _reserve(self, items: list[Item], fresh: list[Item]) -> tuple[list[Item], Placed] | None:
        """Place all of ``items``, and as many of ``fresh`` as there is room for: the others wait on."""
        while items or fresh:
            every = items + fresh
            every.sort(key=_by_request if self.ledger.source_capacity else None)
            placed = self.ledger.reserve([(row.seat, row.computed, new) for _, row, new in every])
            if placed is not None:
                return every, placed
            if not fresh:
                return None
            row = fresh.pop()[1]
            self._seating.leave(row)
            if all(beam.seat < 0 for beam in row.group.rows if beam.state != IDLE):
                self._seating.unseat_idle(row.group)
            self._blocked = self.ledger.releases
            if not items and not fresh and not self._running:
                error = f"the cache has no room for {len(row.tokens)} tokens of one row"
                self._end(row, "length", error, limit="pool", tell=True)
            else:
                self._seating.wait(row)
        return None

    def _give_way(self, items: Sequence[Item]) -> None:
        """The pool has run out: the youngest row that may give way does.  A row that says "stop" does so only where it
        is one that cannot grow, or where one that was promised room cannot."""
        growing = {id(row) for _, row, new in items if row.on_full != "preempt" and self.ledger.grows(row.seat, new)}
        yielding = [row for row in reversed(self._running) if row.on_full != "refuse"]
        assert yielding, "rows that were promised room have none"
        row = next((row for row in yielding if not _says_stop(row) or id(row) in growing), yielding[0])
        if _says_stop(row):
            self._stop(row)
        else:
            self._log("a row is preempted", row)
            self._preempt(row)

    def _stop(self, row: Row) -> None:
        """End a row with what it has, or a search with the best of it."""
        self._log("a row is ended", row)
        if row.group.beams is not None:
            self._pending.extend(self._end_beams(row.group, limit="pool"))
        else:
            self._end(row, "length", limit="pool", tell=True)

    def _log(self, what: str, row: Row, stats: LedgerStats | None = None) -> None:
        """``stats``: of the pools as they were when they had run out."""
        if LOG.isEnabledFor(logging.INFO):
            stats = self.ledger.stats() if stats is None else stats
            LOG.info(
                "the pool has run out: %s (request %d, sample %d); blocks used %s, peak %s, watermark %s, of %s",
                what, row.request, row.sample, stats.used, stats.peak, stats.watermark, stats.total,
            )  # fmt: skip

    def _preempt(self, row: Row) -> None:
        rows = [row] if row.group.beams is None else [beam for beam in row.group.rows if beam.state == RUNNING]
        for each in rows:
            self._running.remove(each)
            full = self.ledger.stats() if LOG.isEnabledFor(logging.INFO) else None
            self._log(f"a row is preempted, {self.swaps.leave(each)}", each, full)
            self._seating.leave(each, released=each.parked is not None)
            each.state, each.pending = WAITING, None
            self._seating.wait(each)
        self._seating.unseat_idle(row.group)
        row.group.usage.preemptions += 1
        self._preemptions += 1
        self._blocked = self.ledger.releases

    def _depart(self, items: list[Item], placed: Placed) -> Plan:
        work = []
        now: float | None = None
        for _, row, new in items:
            if row.parked is not None:
                self.swaps.woken(row)
            row.fetch = None
            if row.state == WAITING:
                now = self._clock() if now is None else now
                self._seating.sit(row, now)
            work.append(self._work(row, new))
            self._tokens += new
        self._steps += 1
        lanes = self._lanes.cut(items, placed)
        cross = fold_lanes(items, lanes) if self.ledger.source_capacity else None
        self._flying = Plan(tuple(work), lanes, placed, cross=cross)
        return self._flying

    def _work(self, row: Row, new: int) -> Work:
        start, end = row.computed, row.computed + new
        samples = end == len(row.tokens) and end < row.limit
        # The last token scores what follows it, unless nothing does: its logits vouch for this span (see settle).
        stop = new if samples or end < len(row.tokens) else new - 1
        first = stop - 1
        if row.wants_prompt and row.scored < row.prompt_len - 1:
            first = min(first, max(row.scored - start, 0))
        return Work(row, start, new, range(max(first, 0), stop), samples)

    # ------------------------------------------------------------ what came out

    def settle(self, plan: Plan, results: Sequence[Result]) -> list[Event]:
        """One Result per work, in its order.  Results of samples that ended meanwhile are dropped."""
        assert plan is self._flying, "this plan is not in flight"
        if plan.encoding is not None:
            return self._settle_encoding(plan.encoding, results)
        assert len(results) == len(plan.work), f"{len(results)} results for {len(plan.work)} spans"
        self._flying = None
        events = self.drain()
        commit = self.ledger.commit
        for (row, start, count, wanted, samples), result in zip(plan.work, results, strict=True):
            if row.state != RUNNING:  # it has ended, or goes back with a beam that is computed again
                continue
            if result.fault is not None:
                events.extend(self._lost(row, result.fault) if result.again else self._fault(row, result.fault))
                continue
            row.computed = end = start + count
            tokens = row.tokens
            commit(row.seat, tokens[start:end], start + wanted.stop)
            if row.wants_prompt:
                self._score(row, end, result)
            if samples and row.group.beams is not None:
                row.pending = result.candidates
                events.extend(self._advance(row.group, row.group.beams))
            elif samples:
                events.append(self._sampled(row, result))
            elif end >= row.limit:  # nothing was to be generated
                events.append(self._end(row, "length", limit=row.by)._replace(prompt=_told(row)))
        return events

    def _settle_encoding(self, encoding: Encoding, results: Sequence[Result]) -> list[Event]:
        assert len(results) == len(encoding.rows), f"{len(results)} results for {len(encoding.rows)} sources"
        self._flying = None
        events = self.drain()
        for row, result in zip(encoding.rows, results, strict=True):
            if row.state == DONE:
                continue
            if result.fault is not None:
                events.extend(self._fault(row, result.fault))
            elif not row.tokens:
                events.append(self._end(row, "stop")._replace(output=result.output))
            else:
                row.encoded = True
                self.ledger.commit_source(row.seat)
        return events

    def left(self) -> list[Left]:
        """What ended rows have left, where it was asked for; read it before the next step is run."""
        left, self._left = self._left, []
        return left

    def drain(self) -> list[Event]:
        """Events that happened outside a step.  ``settle`` tells them too."""
        events, self._pending = self._pending, []
        return events

    def _score(self, row: Row, end: int, result: Result) -> None:
        stop = _scores_end(row, end)
        if stop > row.scored:
            assert len(result.prompt) == stop - row.scored, (
                f"{len(result.prompt)} scores for {stop - row.scored} tokens"
            )
            row.scores.extend(result.prompt)
            row.scored = stop

    def _sampled(self, row: Row, result: Result) -> Event:
        token = result.token
        assert token is not None, "this span was to be sampled"
        usage = row.group.usage
        if usage.first_token is None:
            usage.first_token = self._clock()
        usage.completion += 1
        prompt = _told(row) if row.scores else ()
        row.tokens.append(token)
        if token in row.stop_tokens and row.generated > row.sampling.min_tokens:
            return self._end(row, "stop")._replace(token=token, score=result.score, prompt=prompt)
        if len(row.tokens) >= row.limit:
            end = self._end(row, "length", limit=row.by)
            return end._replace(token=token, score=result.score, prompt=prompt)
        return Event(row.request, row.sample, token, result.score, prompt)

    def _lost(self, row: Row, why: str) -> list[Event]:
        """What the row had spilled cannot be read.  Its tokens are known: it goes back to be computed again."""
        row.losses += 1
        if row.losses > MOST_LOSSES:
            return self._fault(row, f"the spilled part of request {row.request} cannot be read: {why}")
        LOG.warning("request %d, sample %d is computed again: %s", row.request, row.sample, why)
        self._preempt(row)
        return []

    def _fault(self, row: Row, fault: str) -> list[Event]:
        if row.group.beams is not None:
            return self._end_beams(row.group, "error", fault)
        return [self._end(row, "error", fault)]

    # ------------------------------------------------------------ beams

    def _advance(self, request: Request, beams: BeamGroup) -> list[Event]:
        """Once every beam has its candidates: fork those with several children, give up those with none."""
        if any(row.pending is None for row in request.live):
            return []
        live, sequences = request.live, [row.tokens for row in request.live]
        if request.usage.first_token is None:
            request.usage.first_token = self._clock()
        children = beams.advance(sequences, [row.pending or () for row in live])
        if not children:
            return self._end_beams(request)
        first: dict[int, int] = {}  # parent -> its first child, which goes on in its seat
        for rank, child in enumerate(children):
            first.setdefault(child.parent, rank)
        for number, row in enumerate(live):
            row.pending = None
            if number not in first:
                self._running.remove(row)
                self.ledger.release(row.seat)
                row.state = IDLE
        spare = [row for row in request.rows if row.state == IDLE]
        request.live = [
            live[child.parent] if first[child.parent] == rank else self._seating.fork(live[child.parent], spare.pop(0))
            for rank, child in enumerate(children)
        ]
        for row, child in zip(request.live, children, strict=True):
            row.tokens.append(child.token)
        return []

    def _end_beams(
        self,
        request: Request,
        reason: FinishReason | None = None,
        error: str | None = None,
        limit: LimitName | None = None,
    ) -> list[Event]:
        """End a search: its best hypotheses, token by token, or (``reason``) nothing of it.  ``limit``: what ended
        those that live, where it is not their own."""
        assert request.beams is not None
        limit = limit or request.rows[0].by
        best = request.beams.best([row.tokens for row in request.live]) if reason is None else []
        if reason is None and len(best) < request.sampling.n:
            best, reason, error = [], "error", "no continuation of the beams is allowed"
        for row in request.rows:
            if row.state == IDLE:
                if row.seat >= 0:
                    heapq.heappush(self._seats, row.seat)
                row.state = DONE
        for row in [row for row in request.rows if row.state != DONE]:
            self._end(row, reason or "stop", error)
        events: list[Event] = []
        request.usage.completion = sum(len(each.tokens) for each in best)
        for number, each in enumerate(best):
            events.extend(Event(request.id, number, token) for token in each.tokens[:-1])
            last = each.tokens[-1] if each.tokens else None
            by = limit if each.finish == "length" else None
            events.append(Event(request.id, number, last, finish=each.finish, total=each.score, limit=by))
        if not best:
            ends = range(request.sampling.n)
            events = [Event(request.id, number, finish=reason or "error", error=error) for number in ends]
        return events

    def _end(
        self,
        row: Row,
        reason: FinishReason,
        error: str | None = None,
        *,
        limit: LimitName | None = None,
        tell: bool = False,
    ) -> Event:
        if row.state == RUNNING:
            standing = self.ledger.standing(row.seat) if row.group.keep and reason in ("stop", "length") else None
            if standing is not None and standing.length:
                self._left.append(Left(row.request, tuple(row.tokens[: standing.length]), standing))
            self._running.remove(row)
            self._seating.leave(row, publish=reason != "error")
        elif row in self._waiting:
            self._waiting.remove(row)
            self._blocked = -1
        self.swaps.forget(row)
        row.fetch = None  # what is still on its way comes into memory that nobody reads
        row.state = DONE
        request = row.group
        if all(sibling.state == DONE for sibling in request.rows):
            request.usage.finished = self._clock()
            if request.promised is not None:
                self._promises.give_back(request.promised)
            del self._requests[request.id]
            self._ended[request.id] = request.usage
            if len(self._ended) > KEPT_USAGES:
                del self._ended[next(iter(self._ended))]
        event = Event(row.request, row.sample, finish=reason, error=error, limit=limit)
        if tell:
            self._pending.append(event)
        return event

    def check(self) -> None:
        """Assert that every row is in one place, seats add up, and the ledger's own law."""
        self._seating.check([row for request in self._requests.values() for row in request.rows])
        self.ledger.check()


def _says_stop(row: Row) -> bool:
    """Nothing is lost of a row that has said nothing yet: it can wait."""
    return row.on_full == "stop" and row.generated > 0


def _by_request(item: Item) -> tuple[int, tuple[int, int]]:
    """Lane by lane as without it, but there a request's rows side by side: they share a source (``fold_lanes``)."""
    return item[0] >> 16, item[1].order


def _scores_end(row: Row, end: int) -> int:
    """Positions before this one, computed up to ``end``, score a prompt token (the last prompt token scores none)."""
    return min(end, row.prompt_len - 1)


def _told(row: Row) -> tuple[TokenScore, ...]:
    scores, row.scores = tuple(row.scores), []
    return scores
