"""Which rows run in the next step, and with how many tokens.  Integers only: no torch, no clock but the one given.

``plan`` gives every decoding row its token, then continues the prompts that are being read (in chunks), then admits
who waits, first come, first served, all under ``budget`` tokens and ``rows`` seats; a plan is already placed by the
ledger.  ``settle`` takes what came out and says what happened.  One plan may be in flight.

Invariants: the oldest row always advances, so everything ends; a row's tokens do not depend on its neighbours; a row
is in exactly one of *waiting* (no seat, no blocks), *running* (a seat) and *done*.

When a pool is full the youngest running row is preempted: it gives its blocks back (published ones may survive until
it returns), waits at its old place in the queue and computes its tokens again.
"""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvad.cache.ledger import Ledger, Placed
from kvad.engine.request import Event, FinishReason, Result, Sampling, TokenScore
from kvad.engine.row import DONE, RUNNING, WAITING, Plan, Request, Row, Usage, Work
from kvad.errors import ConfigError, RequestError
from kvad.step import Lane

__all__ = ["Plan", "Row", "Scheduler", "SchedulerStats", "Usage", "Work"]

SHORT_READ = 64  # slots; rows that read less are not told apart: one more lane would cost more than the reading
KEPT_USAGES = 4096  # of ended requests, the latest


@dataclass(frozen=True)
class SchedulerStats:
    running: int
    waiting: int
    preemptions: int
    steps: int
    tokens: int  # computed, recomputed ones included


_Item = tuple[int, Row, int]  # sort key, row, number of new tokens


class Scheduler:
    """Owns the ledger.  ``budget``: tokens per step; ``chunk``: of one row; ``limit``: tokens of the longest row."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        rows: int,
        budget: int,
        chunk: int,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if rows < 1 or chunk < 1 or limit < 1:
            raise ConfigError(f"rows {rows}, chunk {chunk} and limit {limit} must be at least 1")
        if budget < rows:
            raise ConfigError(f"budget: {budget} tokens per step do not give each of {rows} rows one")
        self.ledger = ledger
        self._budget = budget
        self._chunk = chunk
        self._limit = limit
        self._clock = clock
        self._seats = list(range(rows))  # free ones, a heap: the lowest first
        self._num_seats = rows
        self._requests: dict[int, Request] = {}
        self._ended: dict[int, Usage] = {}
        self._running: list[Row] = []  # oldest first, like _waiting
        self._waiting: list[Row] = []
        self._flying: Plan | None = None
        self._pending: list[Event] = []
        self._arrivals = self._preemptions = self._steps = self._tokens = 0
        self._blocked = -1  # ledger.releases when an admission last failed: no sense in trying before it grows
        many = [group for group in ledger.groups if group.blocks_per_row > 1]
        self._unit = max([SHORT_READ, *(group.block_size for group in many)])
        self._reads = max((g.blocks_per_row * g.block_size for g in ledger.groups), default=1)  # of a row at most

    # ------------------------------------------------------------ requests

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        sampling: Sampling,
        root: bytes = b"",
        *,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> Usage:
        """Queue a request; ``stop_tokens`` join those of ``sampling``.  The Usage is kept up to date until it ends.

        RequestError: no prompt; a prompt beyond the model's limit; more tokens than the whole pool could hold.
        ``max_tokens=None`` goes up to the model's limit or to what the pool holds, whichever is less.
        """
        assert request_id not in self._requests, f"request {request_id} is running already"
        limit = self._row_limit(prompt, sampling)
        usage = Usage(len(prompt), self._clock())
        stops = stop_tokens | frozenset(sampling.stop_tokens)
        request = Request(request_id, self._arrivals, sampling, root, stops, usage)
        self._arrivals += 1
        self._requests[request_id] = request
        for sample in range(sampling.n):
            row = Row(request, sample, list(prompt), limit)
            request.rows.append(row)
            self._waiting.append(row)
        return usage

    def _row_limit(self, prompt: Sequence[int], sampling: Sampling) -> int:
        length, holds = len(prompt), self.ledger.capacity
        if not length:
            raise RequestError("the prompt is empty: a model continues at least one token")
        if length > self._limit:
            raise RequestError(
                f"the prompt has {length} tokens, the limit is {self._limit}", "shorten the prompt, nothing is cut"
            )
        if sampling.max_tokens is None:
            limit = min(self._limit, max(length, holds + 1))  # the last token is sampled, never stored
        else:
            limit = min(self._limit, length + sampling.max_tokens)
        needed = max(length, limit - 1)
        if needed > holds:
            raise RequestError(
                f"{length} prompt tokens and max_tokens {sampling.max_tokens} need room for {needed} tokens, "
                f"the whole cache holds {holds} of one row",
                "ask for fewer tokens, or give the cache more blocks",
            )
        return limit

    def cancel(self, request_id: int) -> list[Event]:
        """End every sample of a request, also while a plan is in flight.  Nothing happens if it has ended."""
        request = self._requests.get(request_id)
        rows = [row for row in request.rows if row.state != DONE] if request is not None else []
        return [self._end(row, "cancelled") for row in rows]

    def finish(self, request_id: int, sample: int, reason: FinishReason = "stop") -> list[Event]:
        """End one sample (a stop string was found).  Nothing happens if it has ended."""
        request = self._requests.get(request_id)
        rows = [row for row in request.rows if row.sample == sample and row.state != DONE] if request else []
        return [self._end(row, reason) for row in rows]

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
        """The next step, placed; None when there is nothing to run.  :meth:`settle` it before the next."""
        assert self._flying is None, "a plan is in flight: settle it first"
        admitting = True
        while True:
            items, left = self._continue()
            fresh = self._admit(left) if admitting and left > 0 and self._waiting else []
            placed = self._reserve(items, fresh)
            if placed is not None:
                return self._depart(*placed)
            if self._running:
                admitting = len(self._running) == 1  # alone, without shared blocks, it will fit: try again at once
                self._preempt(self._running[-1])
            elif not self._waiting:
                return None

    def _continue(self) -> tuple[list[_Item], int]:
        """The running rows' next tokens: decoding rows first, then prompts, oldest first; and the budget left."""
        items: list[_Item] = []
        reading: list[Row] = []
        left = self._budget
        for row in self._running:
            if row.computed + 1 == len(row.tokens):
                items.append((self._key(row, 1), row, 1))
                left -= 1
            else:
                reading.append(row)
        for row in reading:
            if left <= 0:
                break
            new = min(len(row.tokens) - row.computed, self._chunk, left)
            items.append((self._key(row, new), row, new))
            left -= new
        return items, left

    def _key(self, row: Row, new: int) -> int:
        """Sorts by (new tokens, read bucket, seat); the bucket is a power of two of units."""
        end = row.computed + new
        if end > row.width:
            units = -(-min(end, self._reads) // self._unit)
            row.width = self._unit << (units - 1).bit_length()
        return ((new << 40 | row.width) << 16) + row.seat

    def _admit(self, left: int) -> list[_Item]:
        """Seat waiting rows while there are seats, tokens and blocks; they are not running yet."""
        fresh: list[_Item] = []
        if self._running and self._blocked == self.ledger.releases:
            return fresh
        place = 0
        while place < len(self._waiting) and self._seats and left > 0:
            row = self._waiting[place]
            if not self._ready(row):
                place += 1
                continue
            if not self._enter(row, alone=not self._running and not fresh):
                self._blocked = self.ledger.releases
                break
            del self._waiting[place]
            new = min(len(row.tokens) - row.computed, self._chunk, left)
            fresh.append((self._key(row, new), row, new))
            left -= new
        return fresh

    def _ready(self, row: Row) -> bool:
        """Samples 1 .. n-1 wait until sample 0 has computed the prompt that they share."""
        first = row.group.rows[0]
        return row is first or first.state == DONE or (first.state == RUNNING and first.computed >= row.prompt_len)

    def _enter(self, row: Row, alone: bool) -> bool:
        """Give a row a seat and what the cache knows of it; False, and no change, if its tokens have no room now."""
        seat = row.seat = self._seats[0]
        length = self._share(row, seat)
        if length is None:
            most = row.scored if row.wants_prompt and row.scored < row.prompt_len - 1 else None
            length = self.ledger.admit(seat, row.tokens, row.group.root, most)
            assert length is not None, f"seat {seat} is taken"
        row.computed = length
        if not alone and not self.ledger.fits(seat, len(row.tokens)):
            self._leave(row, seated=False)
            return False
        heapq.heappop(self._seats)
        return True

    def _share(self, row: Row, seat: int) -> int | None:
        """Fork a new sample from a sibling that has the prompt: all of it but the last token, which gives logits."""
        length = row.prompt_len - 1
        if row.sample == 0 or row.generated or length == 0:
            return None
        for sibling in row.group.rows:
            if sibling.state == RUNNING and sibling.computed >= row.prompt_len:
                return length if self.ledger.fork(sibling.seat, seat, length) else None
        return None

    def _leave(self, row: Row, *, seated: bool = True, publish: bool = True) -> None:
        self.ledger.release(row.seat, publish)
        if seated:
            heapq.heappush(self._seats, row.seat)
        row.seat, row.computed, row.width = -1, 0, 0

    def _reserve(self, items: list[_Item], fresh: list[_Item]) -> tuple[list[_Item], Placed] | None:
        """Place all of ``items``, and as many of ``fresh`` as there is room for: the others wait on."""
        while items or fresh:
            every = items + fresh
            every.sort()
            placed = self.ledger.reserve([(row.seat, row.computed, new) for _, row, new in every])
            if placed is not None:
                return every, placed
            if not fresh:
                return None
            row = fresh.pop()[1]
            self._leave(row)
            self._blocked = self.ledger.releases
            if not items and not fresh and not self._running:
                self._end(row, "length", f"the cache has no room for {len(row.tokens)} tokens of one row", tell=True)
            else:
                insort(self._waiting, row, key=_order)
        return None

    def _preempt(self, row: Row) -> None:
        self._running.remove(row)
        self._leave(row)
        row.state = WAITING
        row.group.usage.preemptions += 1
        self._preemptions += 1
        insort(self._waiting, row, key=_order)
        self._blocked = self.ledger.releases

    def _depart(self, items: list[_Item], placed: Placed) -> Plan:
        work = []
        now: float | None = None
        for _, row, new in items:
            if row.state == WAITING:
                now = self._clock() if now is None else now
                self._seat_down(row, now)
            work.append(self._work(row, new))
            self._tokens += new
        self._steps += 1
        self._flying = Plan(tuple(work), self._lanes(items, placed), placed)
        return self._flying

    def _seat_down(self, row: Row, now: float) -> None:
        row.state = RUNNING
        insort(self._running, row, key=_order)
        usage = row.group.usage
        if usage.admitted is None:
            usage.admitted = now
            usage.cached = row.computed

    def _work(self, row: Row, new: int) -> Work:
        start, end = row.computed, row.computed + new
        samples = end == len(row.tokens) and end < row.limit
        # The last token scores what follows it, unless nothing does: its logits vouch for this span (see settle).
        stop = new if samples or end < len(row.tokens) else new - 1
        first = stop - 1
        if row.wants_prompt and row.scored < row.prompt_len - 1:
            first = min(first, max(row.scored - start, 0))
        return Work(row, start, new, range(max(first, 0), stop), samples)

    def _lanes(self, items: list[_Item], placed: Placed) -> tuple[Lane, ...]:
        lanes, begin = [], 0
        for stop in range(1, len(items) + 1):
            if stop == len(items) or items[stop][0] >> 16 != items[begin][0] >> 16:
                lanes.append(Lane(stop - begin, items[begin][2], self._read(items, placed, begin, stop)))
                begin = stop
        return tuple(lanes)

    def _read(self, items: list[_Item], placed: Placed, begin: int, stop: int) -> int:
        """Slots that the lane's widest row reads in the group where it reads most."""
        read = 0
        for group, tables in zip(self.ledger.groups, placed.tables, strict=True):
            if group.blocks_per_row > 1:
                slots = max(map(len, tables[begin:stop])) * group.block_size
            else:  # a row's only block: no further than it is written
                longest = max(row.computed + new for _, row, new in items[begin:stop])
                slots = min(group.block_size, -(-longest // SHORT_READ) * SHORT_READ)
            read = max(read, slots)
        return read

    # ------------------------------------------------------------ what came out

    def settle(self, plan: Plan, results: Sequence[Result]) -> list[Event]:
        """One Result per work, in its order.  Results of samples that ended meanwhile are dropped."""
        assert plan is self._flying, "this plan is not in flight"
        assert len(results) == len(plan.work), f"{len(results)} results for {len(plan.work)} spans"
        self._flying = None
        events = self.drain()
        commit = self.ledger.commit
        for (row, start, count, wanted, samples), result in zip(plan.work, results, strict=True):
            if row.state == DONE:
                continue
            if result.fault is not None:
                events.append(self._end(row, "error", result.fault))
                continue
            row.computed = end = start + count
            tokens = row.tokens
            commit(row.seat, tokens[start:end], start + wanted.stop)
            if row.wants_prompt:
                self._score(row, end, result)
            if samples:
                events.append(self._sampled(row, result))
            elif end >= row.limit:  # nothing was to be generated
                events.append(self._end(row, "length")._replace(prompt=_told(row)))
        return events

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
            return self._end(row, "length")._replace(token=token, score=result.score, prompt=prompt)
        return Event(row.request, row.sample, token, result.score, prompt)

    def _end(self, row: Row, reason: FinishReason, error: str | None = None, *, tell: bool = False) -> Event:
        if row.state == RUNNING:
            self._running.remove(row)
            self._leave(row, publish=reason != "error")
        elif row in self._waiting:
            self._waiting.remove(row)
            self._blocked = -1
        row.state = DONE
        request = row.group
        if all(sibling.state == DONE for sibling in request.rows):
            request.usage.finished = self._clock()
            del self._requests[request.id]
            self._ended[request.id] = request.usage
            if len(self._ended) > KEPT_USAGES:
                del self._ended[next(iter(self._ended))]
        event = Event(row.request, row.sample, finish=reason, error=error)
        if tell:
            self._pending.append(event)
        return event

    def check(self) -> None:
        """Assert that every row is in one place, seats add up, and the ledger's own law."""
        assert len(self._running) + len(self._seats) == self._num_seats, "seats leak"
        seats = sorted([row.seat for row in self._running] + self._seats)
        assert seats == list(range(self._num_seats)), "a seat is taken twice"
        for rows, state in ((self._running, RUNNING), (self._waiting, WAITING)):
            assert all(row.state == state for row in rows), f"a row in the {state} list is not {state}"
            assert [_order(row) for row in rows] == sorted({_order(row) for row in rows}), f"{state}: out of order"
        alive = [row for request in self._requests.values() for row in request.rows if row.state != DONE]
        assert len(alive) == len(self._running) + len(self._waiting), "a row is lost"
        for row in self._running:
            assert row.computed == self.ledger.length(row.seat), "the row and the ledger disagree on its length"
            assert row.computed < len(row.tokens) <= row.limit, "a row with nothing to compute is running"
        self.ledger.check()


def _order(row: Row) -> tuple[int, int]:
    return row.order


def _scores_end(row: Row, end: int) -> int:
    """Positions before this one, computed up to ``end``, score a prompt token (the last prompt token scores none)."""
    return min(end, row.prompt_len - 1)


def _told(row: Row) -> tuple[TokenScore, ...]:
    scores, row.scores = tuple(row.scores), []
    return scores
