"""Many callers, one engine: requests of all threads share one batch, and whoever holds the lock drives it for all.

A :class:`Ticket` gathers one request's pieces.  Dropping a ticket (an iterator closed, an exception on the way) cancels
what is left of its request, also from a finaliser that runs in the middle of a step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from kvad.cache.full import LimitName
from kvad.cache.state import State
from kvad.engine.completion import Completion, Sample, Timings, Usage
from kvad.engine.engine import Engine, Piece
from kvad.engine.request import Sampling, TokenScore
from kvad.engine.row import Usage as EngineUsage
from kvad.errors import EngineError, NumericalError

__all__ = ["Desk", "Ticket"]


class Desk:
    """Takes requests and hands out their pieces."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lock = threading.Lock()
        self._mail: dict[int, deque[Piece]] = {}
        self._dropped: deque[int] = deque()  # requests to cancel: a finaliser may run in the middle of a step
        self._closed = False

    def submit(self, queue: Callable[[Engine], int], sampling: Sampling, num_prompt: int) -> Ticket:
        """``queue`` hands the request to the engine and returns its number."""
        with self.lock:
            self.alive()
            self._cancel_dropped()
            request = queue(self.engine)
            self._mail[request] = deque()
            return Ticket(self, request, sampling, num_prompt, self.engine.usage(request))

    def next(self, request: int) -> Piece:
        """The request's next piece; whoever holds the lock steps the engine for everybody."""
        while True:
            with self.lock:
                self.alive()
                self._cancel_dropped()
                box = self._mail[request]
                if box:
                    return box.popleft()
                pieces = self.engine.step()
                if not pieces and self.engine.idle:
                    raise EngineError(f"request {request} ended without saying so", "this is a bug in kvad")
                for piece in pieces:
                    if piece.request in self._mail:
                        self._mail[piece.request].append(piece)

    def drop(self, tickets: Sequence[Ticket]) -> None:
        """Cancel what is left of requests.  May be called from anywhere, a finaliser inside a step included."""
        self._dropped.extend(ticket.request for ticket in tickets)
        if self.lock.acquire(blocking=False):
            try:
                self._cancel_dropped()
            finally:
                self.lock.release()

    def kept(self, request: int) -> State:
        """What a request has left (``Engine.kept``)."""
        with self.lock:
            self.alive()
            return self.engine.kept(request)

    def forget(self, request: int) -> None:
        with self.lock:
            self._mail.pop(request, None)

    def alive(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed", "load it again")

    def close(self) -> None:
        with self.lock:
            if not self._closed:
                self._closed = True
                self.engine.close()

    def _cancel_dropped(self) -> None:
        while self._dropped:
            request = self._dropped.popleft()
            if self._mail.pop(request, None) is not None and not self._closed:
                self.engine.cancel(request)


class Ticket:
    """Gathers one request's pieces."""

    def __init__(self, desk: Desk, request: int, sampling: Sampling, num_prompt: int, usage: EngineUsage) -> None:
        self.desk, self.request, self.sampling = desk, request, sampling
        self._num_prompt, self.usage = num_prompt, usage

    def pieces(self) -> Iterator[Piece]:
        left = self.sampling.n
        while left:
            piece = self.desk.next(self.request)
            if piece.error is not None:
                kind = NumericalError if piece.error.startswith("numerical") else EngineError
                raise kind(f"request {self.request}, sample {piece.sample}: {piece.error}")
            left -= piece.finish is not None
            yield piece

    def answer(self) -> Tensor:
        """What an encoder says of the text."""
        (piece,) = self.pieces()
        self.desk.forget(self.request)
        assert piece.output is not None
        return piece.output

    def finish(self) -> Completion:
        n = self.sampling.n
        texts, tokens = [""] * n, [list[int]() for _ in range(n)]
        scores, reasons = [list[TokenScore]() for _ in range(n)], ["stop"] * n
        totals: list[float | None] = [None] * n
        limits: list[LimitName | None] = [None] * n
        prompt: list[TokenScore] = []
        for piece in self.pieces():
            texts[piece.sample] += piece.text
            prompt.extend(piece.prompt)
            if piece.token is not None:
                tokens[piece.sample].append(piece.token)
            if piece.score is not None:
                scores[piece.sample].append(piece.score)
            if piece.finish is not None:
                reasons[piece.sample], totals[piece.sample] = piece.finish, piece.total
                limits[piece.sample] = piece.limit
        cached = self.usage.cached
        self.desk.forget(self.request)
        samples = tuple(
            Sample(text, tuple(ids), tuple(score), reason, total, limit)
            for text, ids, score, reason, total, limit in zip(
                texts, tokens, scores, reasons, totals, limits, strict=True
            )
        )
        count = sum(map(len, tokens))
        return Completion(samples, Usage(self._num_prompt, count, cached), _timings(self.usage, count), tuple(prompt))


def _timings(usage: EngineUsage, count: int) -> Timings:
    """By the stamps of the engine: other requests may have kept the caller waiting."""
    assert usage.finished is not None, "the request has not ended"
    first = usage.finished if usage.first_token is None else usage.first_token
    decode = usage.finished - first
    rate = (count - 1) / decode if count > 1 and decode > 0 else 0.0
    return Timings(first - usage.arrived, usage.finished - usage.arrived, rate)
