"""Client of the engine: requests of all threads share one batch.

The thread that holds the lock runs steps for all. Cancelling a handle (a closed iterator, an exception) aborts the rest
of its request, also from a finalizer that runs during a step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from kvad.cache.sessions import SequenceState
from kvad.engine.engine import Engine
from kvad.engine.output import Completion, assemble_completion
from kvad.engine.requests import normalize_prompts
from kvad.engine.scheduling import RequestMetrics, SamplingParams, StreamChunk
from kvad.errors import EngineError, NumericalError

T = TypeVar("T")


class EngineClient:
    """Submits requests to an engine and distributes their chunks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lock = threading.Lock()
        self._chunk_queues: dict[int, deque[StreamChunk]] = {}
        self._cancelled: deque[int] = deque()  # requests to abort; a finalizer may run during a step
        self.on_chunk: Callable[[StreamChunk], None] | None = None  # gets the chunks of requests without a handle
        self._closed = False

    def submit(self, queue: Callable[[], int], sampling_params: SamplingParams, token_ids: list[int]) -> RequestHandle:
        """Submit a request; ``queue`` adds it to the engine and returns its number."""
        with self.lock:
            self.check_open()
            self._abort_cancelled()
            request = queue()
            self._chunk_queues[request] = deque()
            return RequestHandle(self, request, sampling_params, token_ids, self.engine.metrics(request))

    def run_each(
        self,
        prompts: Any,
        submit: Callable[[Any], RequestHandle],
        convert: Callable[[RequestHandle], T],
        progress: Callable[[int, int], object] | None = None,
    ) -> Any:
        """Submit one or many prompts and convert their results; abort all of them on an exception.

        ``progress`` is called with (results, prompts) after every result.
        """
        is_single, prompt_list = normalize_prompts(prompts)
        handles: list[RequestHandle] = []
        try:
            for prompt in prompt_list:
                handles.append(submit(prompt))
            results = []
            for handle in handles:
                results.append(convert(handle))
                if progress is not None:
                    progress(len(results), len(handles))
        except BaseException:
            self.cancel(handles)
            raise
        return results[0] if is_single else results

    def next_chunk(self, request: int) -> StreamChunk:
        """Return the request's next chunk, running engine steps for all requests if needed."""
        while True:
            with self.lock:
                self.check_open()
                self._abort_cancelled()
                chunk_queue = self._chunk_queues[request]
                if chunk_queue:
                    return chunk_queue.popleft()
                if not self._run_step() and self.engine.idle:
                    raise EngineError(f"request {request} ended without a final chunk", "This is a bug in kvad.")

    def step(self) -> None:
        """Run one engine step and distribute its chunks."""
        with self.lock:
            self.check_open()
            self._abort_cancelled()
            self._run_step()

    def _run_step(self) -> list[StreamChunk]:
        chunks = self.engine.step()
        for chunk in chunks:
            if chunk.request in self._chunk_queues:
                self._chunk_queues[chunk.request].append(chunk)
            elif self.on_chunk is not None:
                self.on_chunk(chunk)
        return chunks

    def cancel(self, handles: Sequence[RequestHandle]) -> None:
        """Abort the rest of requests. May be called from anywhere, also from a finalizer during a step."""
        self._cancelled.extend(handle.request for handle in handles)
        self._abort_when_free()

    def _abort_when_free(self) -> None:
        """Abort cancelled requests, unless another thread has the lock: it does so before its last return."""
        while self._cancelled and self.lock.acquire(blocking=False):
            try:
                self._abort_cancelled()
            finally:
                self.lock.release()

    def pop_state(self, request: int) -> SequenceState:
        with self.lock:
            self.check_open()
            return self.engine.pop_state(request)

    def forget(self, request: int) -> None:
        with self.lock:
            self._chunk_queues.pop(request, None)
        self._abort_when_free()

    def check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed", "Load it again.")

    def close(self) -> None:
        with self.lock:
            if not self._closed:
                self._closed = True
                self.engine.close()

    def _abort_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            if self._chunk_queues.pop(request, None) is not None and not self._closed:
                self.engine.abort_request(request)


@dataclass(eq=False)
class RequestHandle:
    """Collects the chunks of one request with the prompt (or encoder input) ``token_ids``."""

    client: EngineClient
    request: int
    sampling_params: SamplingParams
    token_ids: list[int]
    metrics: RequestMetrics

    def chunks(self) -> Iterator[StreamChunk]:
        num_samples_left = self.sampling_params.n
        while num_samples_left:
            chunk = self.client.next_chunk(self.request)
            if chunk.error is not None:
                error_type = NumericalError if chunk.error.startswith("numerical") else EngineError
                hint = "Check the weights: kvad doctor MODEL." if error_type is NumericalError else ""
                raise error_type(f"request {self.request}, sample {chunk.sample_index}: {chunk.error}", hint)
            num_samples_left -= chunk.finish_reason is not None
            yield chunk

    def encoder_output(self) -> Tensor:
        (chunk,) = self.chunks()
        self.client.forget(self.request)
        assert chunk.output is not None
        return chunk.output

    def result(self) -> Completion:
        completion = assemble_completion(self.chunks(), self.sampling_params, len(self.token_ids), self.metrics)
        self.client.forget(self.request)
        return completion
