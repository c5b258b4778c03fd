"""Parts that all generating routes share: limits, options, submission, reading of chunks, usage and timings."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvad import engine as engine_lib
from kvad.engine import StreamChunk
from kvad.engine.scheduling import StructuredOutput, TokenLogprob
from kvad.server.api.errors import ApiError, from_exception, invalid, shutting_down
from kvad.server.api.logprobs import TokenTexts
from kvad.server.api.schema import GenerationBody
from kvad.server.api.text_threads import TextThreads, count_chars
from kvad.server.async_llm import AsyncLLM, RequestStream, Signal, chunk_error
from kvad.server.config import ServerConfig
from kvad.server.metrics import ServerMetrics

PromptInput = engine_lib.requests.PromptInput
Submission = engine_lib.submission.Submission
MAX_COMPILATIONS = 4  # of structured outputs in the engine's process at the same time
PING_SECONDS = 10.0  # without an event, a comment keeps the connection open
REFUSAL_SECONDS = 2.0  # a response begins with the first token, or after this time
# Fields of a body that are fields of SamplingParams, unchanged.
SAMPLING_FIELDS = (
    "temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "no_repeat_ngram_size", "min_tokens", "ignore_eos", "num_beams", "length_penalty", "overflow",
)  # fmt: skip


@dataclass
class ApiContext:
    """Everything that the routes share."""

    llm: AsyncLLM
    config: ServerConfig
    metrics: ServerMetrics
    model_name: str
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    active: Counter[str] = field(default_factory=Counter)  # requests per API key
    poll: asyncio.Future[dict[str, Any]] | None = None  # last state of the cache for the pages
    poll_time: float = 0.0

    def __post_init__(self) -> None:
        self.token_texts = TokenTexts(self.llm.tokenizer)
        self.threads = TextThreads(self.config.limits.max_large_texts)
        self._compilers = asyncio.Semaphore(MAX_COMPILATIONS)

    @property
    def adapters(self) -> Mapping[str, str]:
        """Folders of the adapters by name, which clients give as the model."""
        adapters: Mapping[str, str] = self.llm.info["adapters"]
        return adapters

    def check_model(self, name: str | None) -> str:
        """Return the adapter of the requested model, "" for the base; raise a 404 if it is not served."""
        if name in (None, self.model_name):
            return ""
        if name in self.adapters:
            return str(name)
        names = " or ".join(repr(known) for known in (self.model_name, *self.adapters))
        message = f"model: {name!r} is not served here: use {names}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def check_running(self) -> None:
        """Raise a 503 if the server is shutting down or the engine has ended."""
        if self.draining:
            raise shutting_down()
        if self.llm.failure is not None:
            raise ApiError(503, str(self.llm.failure), code="engine_error", retry_after=5)

    def check_room(self, num_sequences: int = 1, num_tokens: int = 1) -> None:
        """Raise a 429 or 503 if these sequences would exceed the queue's limits; an empty queue accepts any number."""
        self.check_running()
        limits, streams = self.config.limits, self.llm.streams
        waiting = sum(stream.num_waiting for stream in streams)
        queued = sum(stream.num_tokens for stream in streams if not stream.started)
        if waiting + num_sequences > limits.max_queued_requests and waiting:
            message = f"the queue has {waiting} sequences, its limit is {limits.max_queued_requests}: try again"
            raise ApiError(429, message, code="queue_full", retry_after=1)
        if queued + num_tokens > limits.max_queued_tokens and queued:
            message = f"the queue has {queued} prompt tokens, its limit is {limits.max_queued_tokens}: try again"
            raise ApiError(429, message, code="queue_full", retry_after=1)

    async def compile(self, output: StructuredOutput, visible_special_tokens: Sequence[str] = ()) -> None:
        """Compile a structured output in the engine's process.

        A request that has ended leaves the queue, so that what still runs is bounded.

        Raises:
            RequestError: If it cannot be compiled.
        """
        await self._compilers.acquire()
        fields = {"structured_output": output.to_json(), "visible_special_tokens": list(visible_special_tokens)}
        call = asyncio.ensure_future(self.llm.call("compile", **fields))
        call.add_done_callback(self._end_compilation)
        await asyncio.shield(call)

    def _end_compilation(self, call: asyncio.Future[Any]) -> None:
        self._compilers.release()
        if not call.cancelled():
            call.exception()  # it may have no reader

    def salt(self, key: str, cache_salt: str | None) -> str:
        """Return the salt of the prefix cache: API keys share no blocks, unless the server is configured so."""
        owner = "" if self.config.shares_prefixes else key
        return f"{owner}\0{cache_salt or ''}" if owner or cache_salt else ""


def new_id(prefix: str, request_id: str | None = None) -> str:
    return f"{prefix}-{request_id or uuid.uuid4().hex}"


def event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error_events(error: ApiError) -> bytes:
    """Return the last events of a stream that fails."""
    return event(error.body()) + DONE


@dataclass(frozen=True)
class EventStream:
    """Response of server-sent events; ``events`` yields whole events, ``failed`` returns the last ones of a failure."""

    events: AsyncIterator[bytes]
    failed: Callable[[ApiError], bytes] = error_events


# ---------------------------------------------------------------- options


def sampling_settings(context: ApiContext, body: GenerationBody, *, n: int | None = None) -> dict[str, Any]:
    """Return the given options as fields of SamplingParams, within the limits.

    Raises:
        ApiError: 400 that names the field and its limit.
    """
    limits, fields = context.config.limits, dict[str, Any]()
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "requires stream to be true")
    for name in SAMPLING_FIELDS:
        if (value := getattr(body, name)) is not None:
            fields[name] = value
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    check_limit("stop", len(stops), limits.max_stop, "strings")
    for text in stops:
        check_limit("stop", len(text), limits.max_stop_chars, "characters in a string")
    if stops:
        fields["stop"] = tuple(stops)
    if body.stop_token_ids:
        check_limit("stop_token_ids", len(body.stop_token_ids), limits.max_stop, "tokens")
        fields["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.top_k is not None:
        fields["top_k"] = max(0, body.top_k)
    if body.seed is not None:
        fields["seed"] = body.seed % (1 << 64)
    if body.logit_bias:
        check_limit("logit_bias", len(body.logit_bias), limits.max_logit_bias, "entries")
        fields["logit_bias"] = _logit_bias(body.logit_bias)
    n = body.n if n is None else n
    check_limit("n", n, limits.max_n, "samples")
    if n != 1:
        fields["n"] = n
    return fields


def check_limit(param: str, value: int, limit: int, noun: str) -> None:
    """Raise a 400 if a value exceeds its limit."""
    if value > limit:
        raise invalid(param, f"must be at most {limit:,} {noun}, got {value:,}. This is a limit of the server.")


def check_chars(context: ApiContext, param: str, value: Any) -> int:
    """Return the number of characters of all texts in messages and tools; raise a 400 if there are too many."""
    size = count_chars(value)
    check_limit(param, size, context.config.limits.max_prompt_chars, "characters")
    return size


def _logit_bias(entries: Mapping[str, float]) -> dict[int, float]:
    for key in entries:
        if not (key.isascii() and key.isdigit()) or key != str(int(key[:20])):  # "01" and "1_0" may equal another key
            raise invalid("logit_bias", f"keys must be token ids, such as {{'42': -5}}, got {key[:80]!r}")
    return {int(token): bias for token, bias in entries.items()}


def split_prompts(context: ApiContext, param: str, prompt: Any) -> list[PromptInput]:
    """Return the prompts of a text, a list of texts, token ids or a list of token ids, within the limits."""
    limits = context.config.limits
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompts = [prompt]
    else:
        prompts = list(prompt)
    if not prompts:
        raise invalid(param, "must have at least one prompt, got none")
    check_limit(param, len(prompts), limits.max_prompts, "prompts")
    for each in prompts:
        is_text = isinstance(each, str)
        limit = limits.max_prompt_chars if is_text else limits.max_prompt_tokens
        check_limit(param, len(each), limit, "characters" if is_text else "tokens")
    return prompts


def check_submissions(context: ApiContext, submissions: Sequence[Submission]) -> None:
    """Check the numbers of tokens and sequences, and the room in the queue."""
    limits = context.config.limits
    num_sequences = sum(each.num_sequences for each in submissions)
    check_limit("n", num_sequences, limits.max_sequences, "sequences of all prompts")
    for each in submissions:
        check_limit("prompt", len(each.input_ids), limits.max_prompt_tokens, "tokens")
    context.check_room(num_sequences, sum(len(each.input_ids) for each in submissions))


# ---------------------------------------------------------------- requests that run


class SampleChunks(NamedTuple):
    """Chunks of one sample that have arrived together: one event."""

    prompt_index: int
    sample_index: int
    chunks: list[StreamChunk]  # never empty

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        return [chunk.token_id for chunk in self.chunks if chunk.token_id is not None]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [chunk.logprob for chunk in self.chunks if chunk.logprob is not None]

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        return [score for chunk in self.chunks for score in chunk.prompt_logprobs]

    @property
    def finish_reason(self) -> str | None:
        return self.chunks[-1].finish_reason


class RequestGroup:
    """The requests of one HTTP request, read together."""

    def __init__(
        self,
        context: ApiContext,
        submissions: Sequence[Submission],
        *,
        session: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> None:
        check_submissions(context, submissions)
        self.context, self.submissions, self._signal = context, submissions, Signal()
        self._num_tokens = 0  # generated ones that were read
        self.num_reasoning_tokens: int | None = None  # those of thoughts; None: the model has none
        self._num_unfinished = sum(each.sampling_params.n for each in submissions)
        self._failure = "cancelled"  # code of the reason, if samples are unfinished at the end
        self._error: Exception | None = None  # why the group ends, after the chunks that have arrived
        self.streams: list[RequestStream] = []
        with self.cancel_on_error():
            for submission in submissions:
                stream = context.llm.submit(submission, session=session, signal=self._signal)
                stream.max_unread = context.config.limits.max_unread_tokens
                if request_id is not None:
                    context.llm.name_request(stream, request_id)
                self.streams.append(stream)

    @contextmanager
    def cancel_on_error(self) -> Iterator[None]:
        """End the requests if the block raises: no response will read them."""
        try:
            yield
        except BaseException:
            self.cancel()
            raise

    @property
    def model_name(self) -> str:
        """The name of the model in responses."""
        return self.submissions[0].adapter or self.context.model_name

    @property
    def ended(self) -> bool:
        return all(stream.metrics is not None for stream in self.streams)

    async def next_chunks(self, timeout: float | None = None) -> list[SampleChunks] | None:
        """Return the chunks that have arrived, by sample; [] at the end, None after a timeout.

        Raises:
            Exception: If a request was refused, a sample failed, or the server shuts down; after the chunks before it.
        """
        try:
            return await self._next_chunks(timeout)
        except Exception as error:
            self._failure = from_exception(error).code or self._failure
            raise

    async def _next_chunks(self, timeout: float | None) -> list[SampleChunks] | None:
        while True:
            if self._error is not None:
                raise self._error
            ended = self.ended
            samples: dict[tuple[int, int], list[StreamChunk]] = {}
            try:
                for index, stream in enumerate(self.streams):
                    for chunk in stream.take():
                        if chunk.error is not None:
                            raise chunk_error(chunk)
                        samples.setdefault((index, chunk.sample_index), []).append(chunk)
                        self._num_tokens += chunk.token_id is not None
                        self._num_unfinished -= chunk.finish_reason is not None
            except Exception as error:  # raised by the next call, if chunks have arrived before it
                self._error = error
            if samples or (ended and self._error is None):
                return [SampleChunks(*key, chunks) for key, chunks in samples.items()]
            if self._error is None and not await self._signal.wait(timeout):
                return None

    async def all_chunks(self) -> list[list[StreamChunk]]:
        """Return all chunks of each prompt."""
        results: list[list[StreamChunk]] = [[] for _ in self.streams]
        try:
            while samples := await self.next_chunks():
                for sample in samples:
                    results[sample.prompt_index] += sample.chunks
        finally:
            self.cancel()
        return results

    def cancel(self) -> None:
        """End the requests that have not ended, and count their samples."""
        for stream in self.streams:
            stream.cancel()
        if self._num_unfinished > 0:
            self.context.metrics.observe_failure(self._failure, self._num_unfinished)
            self._num_unfinished = 0

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's token counts of all ended requests."""
        metrics = [stream.metrics for stream in self.streams if stream.metrics is not None]
        counts = self._counts(sum(each.num_completion_tokens for each in metrics))
        return {**counts, "prompt_tokens_details": {"cached_tokens": sum(each.num_cached_tokens for each in metrics)}}

    def _counts(self, completion_tokens: int) -> dict[str, Any]:
        prompt_tokens = sum(len(each.input_ids) for each in self.submissions)
        total = prompt_tokens + completion_tokens
        counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
        if self.num_reasoning_tokens is None:
            return counts
        return {**counts, "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens}}

    def event_usage(self, body: GenerationBody) -> dict[str, Any]:
        """Return the field ``usage`` of an event: null, or the token counts so far, or {} if they are not requested."""
        if not body.wants_usage:
            return {}
        return {"usage": self._counts(self._num_tokens) if body.wants_every_usage else None}

    def timings(self) -> dict[str, Any]:
        """Return seconds and rates of the first request, measured by the engine."""
        metrics = self.streams[0].metrics
        assert metrics is not None, "the request has not ended"
        timings = engine_lib.output.Timings.from_metrics(metrics, metrics.num_completion_tokens)
        result: dict[str, Any] = {
            "queue_seconds": (metrics.admitted or metrics.arrived) - metrics.arrived,
            "first_token_seconds": timings.first_token,
            "total_seconds": timings.total,
            "tokens_per_second": timings.tokens_per_second or None,
            "cached_tokens": metrics.num_cached_tokens,
            "preemptions": metrics.num_preemptions,
            "draft_tokens": metrics.num_draft_tokens,
            "accepted_tokens": metrics.num_accepted_tokens,
        }
        return result if self.streams[0].session is None else {**result, "session": self.streams[0].session}

    def last_events(self, head: Mapping[str, Any], body: GenerationBody) -> bytes:
        """Return the last events: token counts and timings, if they are requested, in one, and the end."""
        fields: dict[str, Any] = {}
        if body.wants_usage:
            fields["usage"] = self.usage()
        if body.timings:
            fields["timings"] = self.timings()
        return (event({**head, "choices": [], **fields}) if fields else b"") + DONE

    def observe(self) -> None:
        """Add the ended requests to the metrics."""
        for stream in self.streams:
            if stream.metrics is not None:
                self.context.metrics.observe_request(stream.metrics)


async def stream_events(
    group: RequestGroup, convert: Callable[[SampleChunks], bytes], finish: Callable[[], bytes]
) -> AsyncIterator[bytes]:
    """Yield the events of a group: ``convert`` of its chunks, then ``finish``; comments while nothing arrives.

    The first item is b"" if no token has arrived in ``REFUSAL_SECONDS``, so that the response can begin.
    """
    metrics = group.context.metrics
    timeout = REFUSAL_SECONDS
    try:
        while True:
            samples = await group.next_chunks(timeout)
            if samples is None:
                yield b"" if timeout == REFUSAL_SECONDS else b": ping\n\n"
            elif samples:
                metrics.observe_chunks(len(samples))
                if data := b"".join(map(convert, samples)):
                    yield data
            else:
                break
            timeout = PING_SECONDS
        group.observe()
        yield finish()
    finally:
        group.cancel()


async def build(
    context: ApiContext, make: Callable[[PromptInput], Submission], prompts: Sequence[PromptInput]
) -> list[Submission]:
    """Return the submissions of prompts; long ones are encoded in a thread."""
    size = sum(len(prompt) for prompt in prompts)
    if size < 2000:
        return [make(prompt) for prompt in prompts]
    return await context.threads.run(size, lambda: [make(prompt) for prompt in prompts])


def session_of(body: GenerationBody, key: str, num_sequences: int) -> dict[str, str] | None:
    """Return the identity of the request's session, if it has one."""
    if body.session is None:
        return None
    num_sequences = max(num_sequences, body.num_beams or 1)
    if num_sequences != 1:
        problem = f"must be one sequence, got {num_sequences}. Send one prompt with n=1 and without num_beams."
        raise invalid("session", problem)
    return {"name": body.session, "owner": key}


async def cancel_on_disconnect(receive: Callable[[], Any], work: Any) -> Any:
    """Return the result of ``work``; cancel it if the client disconnects.

    Raises:
        ConnectionError: If the client has disconnected.
    """
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ConnectionError("the client has disconnected")
    finally:
        for each in (task, watcher):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError):
                    await each


async def _disconnected(receive: Callable[[], Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
