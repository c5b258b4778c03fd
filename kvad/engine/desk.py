"""Many callers, one engine: requests of all threads share one batch, and whoever holds the lock drives it for all.

A :class:`Ticket` gathers one request's pieces.  Dropping a ticket (an iterator closed, an exception on the way) cancels
what is left of its request, also from a finaliser that runs in the middle of a step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from kvad.cache.full import LengthLimit
from kvad.cache.state import SequenceState
from kvad.engine.completion import Completion, CompletionChoice, CompletionUsage, Timings
from kvad.engine.engine import Engine, StreamChunk
from kvad.engine.request import SamplingParams, TokenLogprob
from kvad.engine.row import RequestMetrics as EngineUsage
from kvad.errors import EngineError, NumericalError

__all__ = ["EngineClient", "RequestHandle"]


class EngineClient:
    """Takes requests and hands out their pieces."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lock = threading.Lock()
        self._mail: dict[int, deque[StreamChunk]] = {}
        self._dropped: deque[int] = deque()  # requests to cancel: a finaliser may run in the middle of a step
        self._closed = False

    def submit(self, queue: Callable[[Engine], int], sampling: SamplingParams, num_prompt: int) -> RequestHandle:
        """``queue`` hands the request to the engine and returns its number."""
        with self.lock:
            self.check_open()
            self._cancel_dropped()
            request = queue(self.engine)
            self._mail[request] = deque()
            return RequestHandle(self, request, sampling, num_prompt, self.engine.metrics(request))

    def next_chunk(self, request: int) -> StreamChunk:
        """The request's next piece; whoever holds the lock steps the engine for everybody."""
        while True:
            with self.lock:
                self.check_open()
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

    def cancel(self, tickets: Sequence[RequestHandle]) -> None:
        """Cancel what is left of requests.  May be called from anywhere, a finaliser inside a step included."""
        self._dropped.extend(ticket.request for ticket in tickets)
        if self.lock.acquire(blocking=False):
            try:
                self._cancel_dropped()
            finally:
                self.lock.release()

    def pop_state(self, request: int) -> SequenceState:
        """What a request has left (``Engine.kept``)."""
        with self.lock:
            self.check_open()
            return self.engine.pop_state(request)

    def forget(self, request: int) -> None:
        with self.lock:
            self._mail.pop(request, None)

    def check_open(self) -> None:
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
                self.engine.abort_request(request)


class RequestHandle:
    """Gathers one request's pieces."""

    def __init__(
        self, client: EngineClient, request: int, sampling: SamplingParams, num_prompt: int, metrics: EngineUsage
    ) -> None:
        self.client, self.request, self.sampling = client, request, sampling
        self._num_prompt, self.metrics = num_prompt, metrics

    def chunks(self) -> Iterator[StreamChunk]:
        left = self.sampling.n
        while left:
            piece = self.client.next_chunk(self.request)
            if piece.error is not None:
                kind = NumericalError if piece.error.startswith("numerical") else EngineError
                raise kind(f"request {self.request}, sample {piece.sample_index}: {piece.error}")
            left -= piece.finish_reason is not None
            yield piece

    def encoder_output(self) -> Tensor:
        """What an encoder says of the text."""
        (piece,) = self.chunks()
        self.client.forget(self.request)
        assert piece.output is not None
        return piece.output

    def result(self) -> Completion:
        n = self.sampling.n
        texts, tokens = [""] * n, [list[int]() for _ in range(n)]
        scores, reasons = [list[TokenLogprob]() for _ in range(n)], ["stop"] * n
        totals: list[float | None] = [None] * n
        limits: list[LengthLimit | None] = [None] * n
        prompt: list[TokenLogprob] = []
        for piece in self.chunks():
            texts[piece.sample_index] += piece.text
            prompt.extend(piece.prompt_logprobs)
            if piece.token_id is not None:
                tokens[piece.sample_index].append(piece.token_id)
            if piece.logprob is not None:
                scores[piece.sample_index].append(piece.logprob)
            if piece.finish_reason is not None:
                reasons[piece.sample_index], totals[piece.sample_index] = piece.finish_reason, piece.cumulative_logprob
                limits[piece.sample_index] = piece.limit
        cached = self.metrics.num_cached_tokens
        self.client.forget(self.request)
        samples = tuple(
            CompletionChoice(text, tuple(ids), tuple(score), reason, total, limit)
            for text, ids, score, reason, total, limit in zip(
                texts, tokens, scores, reasons, totals, limits, strict=True
            )
        )
        count = sum(map(len, tokens))
        return Completion(
            samples, CompletionUsage(self._num_prompt, count, cached), _timings(self.metrics, count), tuple(prompt)
        )


def _timings(usage: EngineUsage, count: int) -> Timings:
    """By the stamps of the engine: other requests may have kept the caller waiting."""
    assert usage.finished is not None, "the request has not ended"
    first = usage.finished if usage.first_token is None else usage.first_token
    decode = usage.finished - first
    rate = (count - 1) / decode if count > 1 and decode > 0 else 0.0
    return Timings(first - usage.arrived, usage.finished - usage.arrived, rate)
