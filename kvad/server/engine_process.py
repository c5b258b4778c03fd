"""Engine process: one LLM that runs steps for the requests which arrive on a socket.

``AsyncLLM`` starts it with ``python -m kvad.server.engine_process FD`` and sends the arguments of ``LLM.load`` first.
Between two steps all arrived messages are handled; the chunks of a step leave in one message. The process ends when
the socket is closed, and with exit code 1 when the engine cannot continue.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvad import config
from kvad._log import show_log
from kvad.cache.sizing import MemoryBudget
from kvad.engine import StreamChunk
from kvad.engine.scheduling import StructuredOutput
from kvad.errors import KvadError
from kvad.llm import LLM
from kvad.server import cache_view, wire
from kvad.server.limits import SessionLimits
from kvad.server.sessions import SessionTurns
from kvad.server.wire import Message

LOG = logging.getLogger(__name__)
READ_SIZE = 1 << 18
CHECK_INTERVAL = 8  # failed steps after which the engine is checked
# Chunks of short steps are sent together, because a write to a client's socket costs as much as ten tokens: at least so
# many seconds per request pass between two messages, up to the maximum. A request's first chunk is sent at once.
SEND_SECONDS, MAX_SEND_SECONDS = 0.002, 0.016
MAX_ENDED = 256  # ended requests whose numbers are known


class EngineProcess:
    """Runs an LLM's engine for the requests of one connection."""

    def __init__(self, llm: LLM, connection: socket.socket, sessions: SessionTurns) -> None:
        self._llm, self._connection = llm, connection
        self._client = llm.client
        self._client.on_chunk = self._add_chunk
        self._frames = wire.FrameReader()
        self._numbers: dict[int, int] = {}  # the server's number of a request -> the engine's
        self._server_numbers: dict[int, int] = {}  # and the reverse
        self._ended_numbers: dict[int, int] = {}  # the same of requests that ended last
        self._samples_left: dict[int, int] = {}  # engine's number -> samples that have not ended
        self._chunks: list[list[Any]] = []
        self._without_chunk: set[int] = set()  # engine's numbers of requests that have had no chunk
        self._send_now = False
        self._ended: list[tuple[int, int]] = []  # numbers of the server and of the engine
        self._sessions = sessions
        self._failed_steps = 0
        self._last_send = 0.0
        self._send_lock = threading.Lock()
        self._compilers = ThreadPoolExecutor(2, "compiler")
        self._handlers: dict[str, Callable[[Message], Message | None]] = {
            "generate": self._generate,
            "encode": self._encode,
            "embed": self._embed,
            "cancel": self._cancel,
            "save_turns": self._save_turns,
            "stats": lambda message: stats(self._llm),
            "blocks": self._blocks,
            "attention": self._attention,
            "compile": self._compile,
        }

    def run(self) -> int:
        """Handle messages and run steps until the connection is closed; return the exit code."""
        while True:
            idle = self._llm.engine.idle
            if not self._receive(None if idle else 0.0):
                break
            if not self._llm.engine.idle:
                self._step()
        self._llm.close()
        return 0

    def _step(self) -> None:
        try:
            self._client.step()
        except Exception as error:  # the engine ends the request of this step; its chunk comes with the next call
            LOG.error("a step failed: %s", "".join(traceback.format_exception(error)))
            self._failed_steps += 1
            if self._failed_steps % CHECK_INTERVAL == 0:
                self.check_engine()
        self._send_chunks()

    def check_engine(self) -> None:
        """Compute one token, which also prepares the kernels; an exception means that the engine cannot continue."""
        if self._llm.model.config.kind == "encoder":
            self._llm.embed([[0]])
        else:
            self._llm.generate([[0]], max_tokens=1, temperature=0, ignore_eos=True)

    def _receive(self, timeout: float | None) -> bool:
        """Handle the messages that have arrived, waiting for one if ``timeout`` is None; False at the end."""
        self._connection.settimeout(timeout)
        try:
            data = self._connection.recv(READ_SIZE)
        except (BlockingIOError, TimeoutError):
            return True
        if not data:
            return False
        for message in self._frames.feed(data):
            self._answer(message, self._handlers[message["op"]])
        return True

    def _answer(self, message: Message, handler: Callable[[Message], Message | None]) -> None:
        """Call a handler, and send its reply or its error."""
        reply: Message | None
        try:
            reply = handler(message)
        except KvadError as error:
            reply = {"error": error_to_json(error)}
        except Exception as error:  # a bug ends its request only
            LOG.error("%s failed: %s", message["op"], "".join(traceback.format_exception(error)))
            reply = {"error": {"kind": "EngineError", "message": f"{type(error).__name__}: {error}", "hint": ""}}
        if reply is not None:
            self._send({"reply": message["id"], **reply})

    def _send(self, message: Mapping[str, Any]) -> None:
        frame = memoryview(wire.encode_frame(message))
        with self._send_lock:  # a thread that compiles replies, too
            while frame:
                select.select([], [self._connection], [])
                frame = frame[self._connection.send(frame) :]

    # ------------------------------------------------------------ requests

    def _generate(self, message: Message) -> None:
        params = wire.params_from_json(message["params"])
        tokens, source = message["prompt_token_ids"], message["encoder_token_ids"]
        shared = {"cache_salt": message["cache_salt"], "adapter": message["adapter"]}
        if "session" in message:
            request = self._sessions.begin(message["session"], tokens, source, params, **shared)
        else:
            draw_salt = message["draw_salt"]
            request = self._llm.engine.add_request(
                tokens, params, encoder_token_ids=source, draw_salt=draw_salt, **shared
            )
        self._track(message["id"], request, params.n)

    def _encode(self, message: Message) -> None:
        """Queue a text for the encoder; its chunk has the output as a list of numbers."""
        request = self._llm.engine.add_encoder_request(message["token_ids"], message["pool"])
        self._track(message["id"], request, 1)

    def _track(self, number: int, request: int, num_samples: int) -> None:
        self._numbers[number], self._server_numbers[request] = request, number
        self._samples_left[request] = num_samples
        self._without_chunk.add(request)

    def _embed(self, message: Message) -> None:
        """Queue a text for a decoder; its chunk has the pooled hidden states as a list of numbers."""
        request = self._llm.engine.add_embedding_request(
            message["token_ids"], message["pool"], cache_salt=message["cache_salt"], adapter=message["adapter"]
        )
        self._track(message["id"], request, 1)

    def _compile(self, message: Message) -> None:
        """Compile a structured output in a thread, so that the running sequences do not wait for it."""

        def compile_now(message: Message) -> Message:
            output = StructuredOutput.from_json(message["structured_output"])
            self._llm.engine.grammars.compile(output, message["visible_special_tokens"])
            return {}

        self._compilers.submit(self._answer, message, compile_now)

    def _cancel(self, message: Message) -> None:
        request = self._numbers.pop(message["id"], None)
        if request is not None:
            self._sessions.cancel(request)
            self._llm.engine.abort_request(request)
            self._forget_number(request)
            self._samples_left.pop(request)
            self._without_chunk.discard(request)

    def _save_turns(self, message: Message) -> Message:
        """End all turns of sessions with the tokens so far and save them: the server shuts down."""
        self._sessions.end_all()
        return {}

    def _forget_number(self, request: int) -> None:
        """Forget the server's number of a request that has ended; ``_blocks`` still names the last ones."""
        self._ended_numbers[request] = self._server_numbers.pop(request)
        if len(self._ended_numbers) > MAX_ENDED:
            del self._ended_numbers[next(iter(self._ended_numbers))]

    def _blocks(self, message: Message) -> Message:
        """Return the state of the cache for the page."""
        numbers = {**self._ended_numbers, **self._server_numbers}
        return cache_view.block_map(self._llm.engine, numbers, self._sessions.stats())

    def _attention(self, message: Message) -> Message:
        """Return the attention weights of a text's last token in one layer."""
        return cache_view.attention_of_last_token(self._llm, message["token_ids"], message["layer"])

    # ------------------------------------------------------------ chunks

    def _add_chunk(self, chunk: StreamChunk) -> None:
        number = self._server_numbers.get(chunk.request)
        if number is None:
            return
        output = None if chunk.output is None else chunk.output.float().tolist()
        self._chunks.append([number, *chunk[1:7], output, *chunk[8:]])
        self._sessions.add_chunk(chunk)
        if chunk.request in self._without_chunk:
            self._without_chunk.discard(chunk.request)
            self._send_now = True
        if chunk.finish_reason is None:
            return
        self._samples_left[chunk.request] -= 1
        if not self._samples_left[chunk.request]:
            del self._samples_left[chunk.request], self._numbers[number]
            self._forget_number(chunk.request)
            self._ended.append((number, chunk.request))

    def _send_chunks(self) -> None:
        """Send the chunks, unless others were sent just now; sessions are saved first."""
        while self._chunks:
            now = time.monotonic()
            interval = min(MAX_SEND_SECONDS, SEND_SECONDS * len(self._numbers))
            if now - self._last_send < interval and not (self._send_now or self._ended or self._llm.engine.idle):
                return
            self._last_send, self._send_now = now, False
            chunks, ended = self._chunks, self._ended
            self._chunks, self._ended = [], []
            ends = [self._end(number, request) for number, request in ended]
            self._send({"chunks": chunks, "ended": ends} if ends else {"chunks": chunks})

    def _end(self, number: int, request: int) -> Message:
        """Return what is reported of an ended request."""
        end = {"id": number, "metrics": asdict(self._llm.engine.metrics(request))}
        try:
            return {**end, **self._sessions.end(request)}
        except Exception as error:  # the disk failed, for example: the output is right, the session is not saved
            LOG.error("a session is not saved: %s", error, exc_info=not isinstance(error, KvadError))
            message = error.message if isinstance(error, KvadError) else f"{type(error).__name__}: {error}"
            return {**end, "session": {"error": message}}


def stats(llm: LLM) -> Message:
    """Return counts of the engine and its cache, as plain values."""
    engine = llm.engine
    return {
        "scheduler": engine.scheduler.stats()._asdict(),
        "cache": asdict(engine.kv_cache_manager.stats()),
        "times": asdict(engine.times),
    }


def error_to_json(error: KvadError) -> dict[str, str]:
    return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}


def describe(llm: LLM) -> Message:
    """Return what the server needs to know of the model and its engine."""
    engine, limits = llm.engine, llm.engine.limits
    return {
        "name": llm.name,
        "endless": engine.cache.endless,
        "max_len": limits.max_len,
        "max_num_seqs": engine.cache.max_num_seqs,
        "block_size": engine.cache.block_size,
        "num_blocks": list(engine.kv_cache_manager.stats().total),
        "policy": str(engine.cache.resolved_policy),
        "formats": engine.cache.format_name,
        "dtype": str(engine.model.token_embedding.dtype).removeprefix("torch."),
        "num_layers": engine.model.config.stack.num_layers,
        "adapters": {name: str(adapter.path) for name, adapter in engine.config.adapters.items()},
        "config": engine.model.config.to_dict(),
        "generation": config.serialization.to_dict(llm.generation),
        "has_tokenizer": llm.tokenizer is not None,
        "template_folders": {name: str(folder.absolute()) for name, folder in llm.chat_templates.folders.items()},
    }


def main(arguments: list[str]) -> int:
    """Serve the connection whose file descriptor is the argument."""
    connection = socket.socket(fileno=int(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server closes the connection when it ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not os.environ.get("KVAD_LOG"):
        show_log(0)
    warnings.showwarning = _log_warning
    frames = wire.FrameReader()
    messages: list[Message] = []
    while not messages:
        data = connection.recv(READ_SIZE)
        if not data:
            return 0
        messages = frames.feed(data)
    try:
        fields = messages[0]["load"]
        llm = LLM.load(fields.pop("path"), **{**fields, "memory": MemoryBudget(*fields.pop("memory"))})
    except KvadError as error:
        connection.sendall(wire.encode_frame({"error": error_to_json(error)}))
        return error.exit_code
    folder, session_limits = messages[0]["session_dir"], SessionLimits(*messages[0]["session_limits"])
    sessions = SessionTurns(llm, None if folder is None else Path(folder), session_limits)
    process = EngineProcess(llm, connection, sessions)
    try:
        process.check_engine()
        connection.sendall(wire.encode_frame({"ready": describe(llm)}))
        return process.run()
    except (BrokenPipeError, ConnectionResetError):  # the server ended
        return 0


def _log_warning(message: Warning | str, *_: object, **__: object) -> None:
    LOG.warning("%s", message)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
