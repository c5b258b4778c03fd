"""AsyncLLM: the asynchronous twin of ``LLM``, whose engine runs in a separate process.

    from kvad import AsyncLLM
    async with await AsyncLLM.load("runs/demo") as llm:
        async for chunk in llm.stream("def __init__(self", max_tokens=64):
            print(chunk.text, end="")

Leaving the loop cancels the request. Texts are encoded in threads of this process, so that long ones delay neither
other requests nor the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Unpack

from kvad import config as config_lib
from kvad import engine as engine_lib
from kvad import errors, storage
from kvad import text as text_lib
from kvad.cache.sizing import MemoryBudget
from kvad.checkpoint import GenerationConfig
from kvad.config import ModelConfig
from kvad.engine import Completion, PromptEncoder, StreamChunk, scheduling
from kvad.engine.scheduling import RequestMetrics, SamplingParams
from kvad.errors import ConfigError, EngineError, KvadError, NumericalError, RequestError
from kvad.server import wire
from kvad.server.limits import SESSION_LIMITS, SessionLimits
from kvad.server.wire import Message
from kvad.text import Tokenizer, load_tokenizer

LOG = logging.getLogger(__name__)
PromptInput = engine_lib.requests.PromptInput
GenerateOptions = engine_lib.requests.GenerateOptions
Submission = engine_lib.submission.Submission
SubmissionBuilder = engine_lib.submission.SubmissionBuilder
TextScore = engine_lib.output.TextScore
CLOSE_SECONDS = 10.0  # the engine's process is killed if it has not ended by then
MAX_REQUEST_IDS = 256
MAX_NICE = 19


class Signal:
    """Wakes the one reader of one or several request streams."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[bool] | None = None

    def set(self) -> None:
        if self._waiter is not None:
            _resolve(self._waiter, True)

    async def wait(self, timeout: float | None) -> bool:
        """Return True after the next ``set``, False after ``timeout`` seconds."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = None if timeout is None else loop.call_later(timeout, _resolve, waiter, False)
        try:
            is_set: bool = await waiter
            return is_set
        finally:
            if timer is not None:
                timer.cancel()


def _resolve(waiter: asyncio.Future[bool], value: bool) -> None:
    if not waiter.done():
        waiter.set_result(value)


class RequestStream:
    """Chunks of one request as they arrive; after the last one, its metrics.

    Attributes:
        submission: The request; None for a text that is embedded.
        num_tokens: Tokens of its prompt, or of the text.
        metrics: Counts and times in seconds, set at the end.
        session: Reused tokens of a session's turn, set at the end.
        started: Samples that have sent a chunk.
        is_turn: True for a turn of a session.
        max_unread: Largest number of chunks that wait for the reader; beyond it the request fails (0: any number).
    """

    def __init__(self, llm: AsyncLLM, number: int, signal: Signal, submission: Submission | None = None) -> None:
        self.number, self.submission = number, submission
        self.num_tokens = 0 if submission is None else len(submission.input_ids)
        self.metrics: RequestMetrics | None = None
        self.session: dict[str, Any] | None = None
        self.started: set[int] = set()
        self.is_turn = False
        self.max_unread = 0
        self._llm, self._signal = llm, signal
        self._chunks: list[StreamChunk] = []
        self._error: Exception | None = None

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a chunk; a beam search sends its chunks at the end."""
        return (1 if self.submission is None else self.submission.num_sequences) - len(self.started)

    def add(self, *chunks: StreamChunk) -> None:
        """Add the chunks of one message; those of a beam search arrive at once, before any can be read."""
        if self.max_unread and len(self._chunks) >= self.max_unread:
            self.cancel()
            self._chunks.clear()
            self.fail(RequestError(f"stream: the client has left {self.max_unread:,} tokens unread", "Read faster."))
            return
        self._chunks += chunks
        self.started.update(chunk.sample_index for chunk in chunks)
        self._signal.set()

    def end(self, metrics: RequestMetrics, session: dict[str, Any] | None) -> None:
        self.metrics, self.session = metrics, session
        self._signal.set()

    async def parts(self) -> AsyncGenerator[list[StreamChunk], None]:
        """Yield the chunks that have arrived, as lists, until the end. Leaving the loop cancels the request."""
        try:
            while True:
                ended = self.metrics is not None
                if chunks := self.take():
                    yield chunks
                if ended:
                    return
                if not self._chunks and self.metrics is None and self._error is None:
                    await self._signal.wait(None)
        finally:
            self.cancel()

    def fail(self, error: Exception) -> None:
        """End the stream with an error after the chunks that have arrived; later errors are ignored."""
        self._error = self._error or error
        self._signal.set()

    def take(self) -> list[StreamChunk]:
        """Return the chunks that have arrived since the last call.

        Raises:
            Exception: Why the request ended: it was refused, the engine's process ended, or ``AsyncLLM.stop_all``.
        """
        if self._error is not None and not self._chunks:
            raise self._error
        chunks, self._chunks = self._chunks, []
        return chunks

    async def chunks(self) -> AsyncGenerator[StreamChunk, None]:
        """Yield chunks; an error of a sample is raised. Leaving the loop cancels the request."""
        async with aclosing(self.parts()) as parts:
            async for chunks in parts:
                for chunk in chunks:
                    if chunk.error is not None:
                        raise chunk_error(chunk)
                    yield chunk

    async def completion(self) -> Completion:
        """Return the whole result."""
        submission = self.submission
        assert submission is not None, "an encoder's output is not a completion"
        chunks = [chunk async for chunk in self.chunks()]
        assert self.metrics is not None
        return engine_lib.output.assemble_completion(
            chunks, submission.sampling_params, len(submission.input_ids), self.metrics
        )

    def cancel(self) -> None:
        """End the request now, unless it has ended; its blocks are freed before the next step."""
        self._llm.cancel(self)


_FORM_ERROR = "sampling failed: structured_output: "  # of ``sampler`` and ``grammar``


def chunk_error(chunk: StreamChunk) -> KvadError:
    """Return the exception of a chunk with an error.

    Options that leave no token, and a structured output whose text exceeds a limit, are the client's error.
    """
    assert chunk.error is not None
    message = f"sample {chunk.sample_index}: {chunk.error}"
    if chunk.error.startswith(_FORM_ERROR):
        problem = chunk.error.removeprefix(_FORM_ERROR)
        return RequestError(f"structured_output: sample {chunk.sample_index}: {problem}", "Use a simpler form.")
    if chunk.error in (scheduling.request.NO_ALLOWED_TOKEN, scheduling.request.NO_ALLOWED_BEAM):
        return RequestError(message, "Omit one of the options that contradict each other.")
    return NumericalError(message) if chunk.error.startswith("numerical") else EngineError(message)


class AsyncLLM:
    """A model in a separate engine process, for one event loop. Built by ``load``."""

    info: dict[str, Any]  # of the engine (``engine_process.describe``), set when the model is loaded

    def __init__(self) -> None:
        self.last_message = time.monotonic()  # arrival of the engine's last message, or of the first of the requests
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: dict[int, RequestStream] = {}
        self.request_ids: dict[int, str] = {}  # names of the last requests that have one, by number
        self._replies: dict[int, asyncio.Future[Message]] = {}
        self._next_number = 0
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._failure: KvadError | None = None
        self.ended = asyncio.Event()  # the engine's process has closed the connection

    @staticmethod
    async def load(
        path: str | Path,
        *,
        dtype: str | None = None,
        device: str = "cpu",
        memory: str | float | MemoryBudget = "auto",
        adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        rope_scaling: str | None = None,
        activation_bits: int | None = None,
        revision: str | None = None,
        session_dir: str | Path | None = None,
        session_limits: SessionLimits = SESSION_LIMITS,
        nice: int = 0,
        **settings: Unpack[engine_lib.options.LoadOptions],
    ) -> AsyncLLM:
        """Load a checkpoint in a new process.

        Args:
            path: As in ``LLM.load``, like the other arguments; dtypes and devices are names.
            dtype: Dtype of the computation.
            device: Device of model and cache.
            memory: Memory of the device for model and cache.
            adapter: LoRA adapter that is merged into the weights.
            adapters: LoRA adapters by name, which requests choose.
            rope_scaling: Another RoPE scaling.
            activation_bits: 8 rounds the inputs of int8 and int4 weights.
            revision: Revision on the hub.
            session_dir: Folder of the sessions of requests (None: they are refused).
            session_limits: Largest session files of an API key.
            nice: Lower priority of the engine's process than of this one: 0 to 19, as in the command ``nice``.
            **settings: ``kvad.engine.options.LoadOptions``.

        Raises:
            ConfigError: If ``nice`` is out of range.
            KvadError: As ``LLM.load``.
        """
        if not 0 <= nice <= MAX_NICE:
            raise ConfigError(f"nice: must be from 0 to {MAX_NICE}, got {nice}")
        llm = AsyncLLM()
        budget = memory if isinstance(memory, MemoryBudget) else MemoryBudget(memory)  # type: ignore[arg-type]
        fields: dict[str, Any] = dict(settings) | {
            "path": str(path), "dtype": dtype, "device": device, "memory": list(budget), "adapter": adapter,
            "adapters": adapters or {}, "rope_scaling": rope_scaling, "activation_bits": activation_bits,
            "revision": revision,
        }  # fmt: skip
        try:
            sessions = {"session_dir": session_dir, "session_limits": list(session_limits)}
            await llm._connect({"load": fields, **sessions}, nice)
        except BaseException:
            if llm._process is not None:
                llm._process.kill()  # it may still be loading
            await llm.close()
            raise
        return llm

    async def _connect(self, load: Message, nice: int) -> None:
        """Start the engine's process and wait until the model is loaded."""
        loop = asyncio.get_running_loop()
        parent, child = socket.socketpair()
        with child:
            command = [sys.executable, "-m", "kvad.server.engine_process", str(child.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[child.fileno()], stdin=subprocess.DEVNULL)
        if nice:  # before it starts its threads, which inherit it
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
        parent.setblocking(False)
        transport, _ = await loop.create_connection(lambda: _Connection(self), sock=parent)
        self._transport = transport
        transport.write(wire.encode_frame({name: storage.strict_json.plain_value(each) for name, each in load.items()}))
        message = await self._ready
        self.info = message["ready"]

    # ------------------------------------------------------------ text

    @cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.info["config"])

    @cached_property
    def generation(self) -> GenerationConfig:
        return config_lib.serialization.from_dict(GenerationConfig, self.info["generation"])

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(Path(self.info["template_folders"][""])) if self.info["has_tokenizer"] else None

    @cached_property
    def texts(self) -> PromptEncoder:
        lengths = {"endless": self.info["endless"], "max_len": self.info["max_len"]}
        return PromptEncoder(self.config, self.tokenizer, self.generation, **lengths)

    @cached_property
    def builder(self) -> SubmissionBuilder:
        return SubmissionBuilder(self.texts)

    @cached_property
    def chat_templates(self) -> text_lib.chat_template.ChatTemplates:
        return text_lib.chat_template.ChatTemplates(
            {name: Path(folder) for name, folder in self.info["template_folders"].items()}
        )

    @property
    def chat_template(self) -> text_lib.chat_template.ChatTemplate | None:
        return self.chat_templates.find()

    async def generate(
        self, prompt: PromptInput, sampling_params: SamplingParams | None = None, **settings: Unpack[GenerateOptions]
    ) -> Completion:
        """Continue one prompt (``LLM.generate``); gather several calls for a batch."""
        return await self.submit(await self._build(prompt, sampling_params, settings)).completion()

    async def stream(
        self, prompt: PromptInput, sampling_params: SamplingParams | None = None, **settings: Unpack[GenerateOptions]
    ) -> AsyncIterator[StreamChunk]:
        """Yield chunks of one prompt's samples; leaving the loop cancels the rest."""
        stream = self.submit(await self._build(prompt, sampling_params, settings))
        async with aclosing(stream.chunks()) as chunks:  # else the request ends when the inner loop is collected
            async for chunk in chunks:
                yield chunk

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **settings: Unpack[GenerateOptions],
    ) -> Completion:
        """Answer a conversation in the model's chat template (``LLM.chat``)."""
        adapter = settings.get("adapter", "")
        tokens = await asyncio.to_thread(self.render_chat, messages, tools=tools, adapter=adapter)
        return await self.generate(tokens, sampling_params, **settings)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> list[int]:
        """Return the token ids of a conversation; blocks while another process renders the template.

        Args:
            messages: Objects with ``role`` and ``content``.
            tools: JSON schemas of the tools that the template names.
            generation_prompt: End with the start of the assistant's turn.
            continue_final: End inside the last message, to continue it.
            variables: Further variables of the template.
            adapter: Name of the adapter that answers, which may have a template.

        Raises:
            RequestError: If the model has no chat template.
            ChatTemplateError: If the template refuses the messages.
        """
        return self.texts.encode_chat(
            self.chat_templates.find(adapter),
            messages,
            tools=tools,
            generation_prompt=generation_prompt,
            continue_final=continue_final,
            variables=variables,
        )

    async def score(self, text: PromptInput, **settings: Unpack[engine_lib.requests.ScoreOptions]) -> TextScore:
        """Return each token's log-probability given the tokens before it (``LLM.score``)."""
        build = self.builder.scoring(
            settings.get("encoder_input"),
            settings.get("source_language"),
            top_logprobs=settings.get("top_logprobs", 0),
            cache_salt=settings.get("cache_salt", ""),
            adapter=settings.get("adapter", ""),
        )
        submission = await asyncio.to_thread(build, text)
        return engine_lib.submission.text_score(submission.prompt_token_ids, await self.submit(submission).completion())

    async def embed(self, texts: Sequence[PromptInput], *, adapter: str = "") -> list[list[float]]:
        """Return one vector per text, with the checkpoint's pooling and normalization."""
        inputs = [await asyncio.to_thread(self.texts.encode_embedding, text) for text in texts]
        return await self.embed_ids(inputs, adapter=adapter)

    async def embed_ids(
        self, inputs: Sequence[list[int]], *, adapter: str = "", cache_salt: str = ""
    ) -> list[list[float]]:
        """Return one vector per encoded text; a decoder's cached prefixes are shared with the same salt only."""
        pooling = self.generation.pooling
        if self.config.kind == "decoder":
            message = {"op": "embed", "pool": pooling or "last", "cache_salt": cache_salt, "adapter": adapter}
        elif adapter:
            raise RequestError(f"adapter: an {self.config.kind} embeds with its base only, got {adapter!r}")
        else:
            message = {"op": "encode", "pool": pooling or "mean"}
        streams = [self._open({**message, "token_ids": ids}, Signal()) for ids in inputs]
        try:
            vectors: list[Any] = [[chunk async for chunk in stream.chunks()][-1].output for stream in streams]
        finally:
            for stream in streams:
                stream.cancel()
        return [_normalize(vector) for vector in vectors] if self.generation.normalize else vectors

    async def _build(
        self, prompt: PromptInput, sampling_params: SamplingParams | None, settings: GenerateOptions
    ) -> Submission:
        return await asyncio.to_thread(self.builder.generation(sampling_params, settings), prompt)

    # ------------------------------------------------------------ requests

    def submit(
        self, submission: Submission, *, session: Mapping[str, str] | None = None, signal: Signal | None = None
    ) -> RequestStream:
        """Send a request to the engine.

        Args:
            submission: The request.
            session: The session's ``name`` and ``owner``, if the request is a session's turn.
            signal: Signal of a reader of several streams.

        Raises:
            RequestError: If a field cannot be sent.
            EngineError: If the engine's process has ended.
        """
        params = wire.params_to_json(submission.sampling_params)
        message = {"op": "generate", **submission._asdict(), "params": params}
        del message["sampling_params"]
        if session is not None:
            message["session"] = dict(session)
        stream = self._open(message, signal or Signal(), submission)
        stream.is_turn = session is not None
        return stream

    def _open(self, message: Message, signal: Signal, submission: Submission | None = None) -> RequestStream:
        number = self._number()
        stream = RequestStream(self, number, signal, submission)
        if submission is None:
            stream.num_tokens = len(message["token_ids"])
        self._send({"id": number, **message})
        self._add(stream)
        return stream

    def _add(self, stream: RequestStream) -> None:
        if not self._streams:
            self.last_message = time.monotonic()  # no message was due before
        self._streams[stream.number] = stream

    def cancel(self, stream: RequestStream) -> None:
        """End a request now, unless it has ended."""
        if self._streams.pop(stream.number, None) is not None and self._failure is None:
            self._send({"op": "cancel", "id": stream.number})

    def name_request(self, stream: RequestStream, request_id: str) -> None:
        """Set a request's name; it is known for a while after the request's end."""
        self.request_ids[stream.number] = request_id
        if len(self.request_ids) > MAX_REQUEST_IDS:
            del self.request_ids[next(iter(self.request_ids))]

    async def stop_all(self, error: Exception) -> None:
        """Fail all requests and cancel them; turns of sessions end with the tokens so far, and are saved first."""
        streams = list(self._streams.values())
        turns = [stream for stream in streams if stream.is_turn]
        self._stop([stream for stream in streams if not stream.is_turn], error)
        if turns:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.call("save_turns")
            except Exception as problem:
                LOG.warning("sessions are not saved: %s", problem or type(problem).__name__)
        self._stop(turns, error)

    def _stop(self, streams: Sequence[RequestStream], error: Exception) -> None:
        for stream in streams:
            self.cancel(stream)
            stream.fail(error)

    async def call(self, operation: str, **arguments: Any) -> Message:
        """Return the engine's reply to another message, such as "stats"."""
        number = self._number()
        self._send({"op": operation, "id": number, **arguments})
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        try:
            return await future
        finally:
            self._replies.pop(number, None)

    @property
    def streams(self) -> Collection[RequestStream]:
        """The requests that have not ended."""
        return self._streams.values()

    @property
    def failure(self) -> KvadError | None:
        """Why the engine's process has ended, if it has."""
        return self._failure

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _send(self, message: Message) -> None:
        if self._failure is not None:
            raise self._failure
        assert self._transport is not None
        self._transport.write(wire.encode_frame(message))

    # ------------------------------------------------------------ messages of the engine

    def on_message(self, message: Message) -> None:
        """Distribute a message of the engine."""
        if "chunks" in message:
            self._on_chunks(message)
        elif "reply" in message:
            self._on_reply(message)
        elif not self._ready.done():
            if "error" in message:
                self._ready.set_exception(error_from_json(message["error"]))
            else:
                self._ready.set_result(message)

    def _on_chunks(self, message: Message) -> None:
        streams = self._streams
        for number, chunks in itertools.groupby(message["chunks"], itemgetter(0)):
            stream = streams.get(number)
            if stream is not None:
                stream.add(*map(wire.chunk_from_json, chunks))
        for ended in message.get("ended", ()):
            stream = streams.pop(ended["id"], None)
            if stream is not None:
                stream.end(RequestMetrics(**ended["metrics"]), ended.get("session"))

    def _on_reply(self, message: Message) -> None:
        number, error = message.pop("reply"), message.get("error")
        stream, future = self._streams.get(number), self._replies.get(number)
        if stream is not None and error is not None:
            del self._streams[number]
            stream.fail(error_from_json(error))
        if future is not None and not future.done():
            if error is not None:
                future.set_exception(error_from_json(error))
            else:
                future.set_result(message)

    def on_end(self) -> None:
        """Fail all requests, because the engine's process has closed the connection."""
        self._failure = EngineError("the engine's process has ended", "Its log has the reason.")
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.fail(self._failure)
        for future in [*self._replies.values(), self._ready]:
            if not future.done():
                future.set_exception(self._failure)
        if not self._ready.cancelled():
            self._ready.exception()  # it may have no reader
        self.ended.set()

    # ------------------------------------------------------------ closing

    async def close(self) -> int:
        """End the engine's process and return its exit code. Closing twice is allowed."""
        if self._transport is not None:
            self._transport.close()
        process = self._process
        if process is None:
            return 0
        try:
            return await asyncio.to_thread(process.wait, CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            LOG.warning("the engine's process has not ended in %g s and is killed", CLOSE_SECONDS)
            process.kill()
            return await asyncio.to_thread(process.wait)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class _Connection(asyncio.Protocol):
    """Passes the messages of the engine's process to an AsyncLLM."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm, self._frames = llm, wire.FrameReader()

    def data_received(self, data: bytes) -> None:
        self._llm.last_message = time.monotonic()
        for message in self._frames.feed(data):
            self._llm.on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._llm.on_end()


def error_from_json(fields: Mapping[str, str]) -> KvadError:
    """Return the error that the engine's process sent."""
    kind: type[KvadError] = getattr(errors, fields["kind"], EngineError)
    return kind(fields["message"], fields["hint"])


def _normalize(vector: list[float]) -> list[float]:
    norm = max(math.sqrt(math.fsum(value * value for value in vector)), 1e-12)  # as torch.nn.functional.normalize
    return [value / norm for value in vector]
