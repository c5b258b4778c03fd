"""``serve``: run the server until a signal or the end of the engine."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvad.errors import UsageError
from kvad.server import api
from kvad.server.api import ApiContext, ApiError
from kvad.server.app import build_app
from kvad.server.async_llm import AsyncLLM
from kvad.server.config import ServerConfig
from kvad.server.guards import json_response
from kvad.server.limits import MAX_HEAD, ServerLimits
from kvad.server.metrics import ServerMetrics

LOG = logging.getLogger(__name__)
POLL_SECONDS = 0.05
LAST_SECONDS = 2.0  # for the last events of requests that the shutdown ends
MAX_PIPELINED = 8  # requests of a connection that wait; beyond them its end is noticed at the next write only
CLOSING_TICKS = 100  # of 0.1 s: a closed connection has 10 to 20 s to read the rest
_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


def serve(
    model: Path, load: Mapping[str, Any], config: ServerConfig, on_ready: Callable[[str, AsyncLLM], None] | None = None
) -> int:
    """Load a model and serve it; return the exit code.

    Args:
        model: The checkpoint.
        load: Keywords of ``AsyncLLM.load``.
        config: Options of the server.
        on_ready: Called with the address and the model when requests are accepted.

    Raises:
        UsageError: If the address cannot be bound, or an adapter has the model's name.
        KvadError: As ``LLM.load``.
    """
    config = replace(config, model_name=config.model_name or model.resolve().name or str(model))
    if config.model_name in load.get("adapters", {}):
        raise UsageError(f"--adapter: {config.model_name!r} is the base model", "Choose another NAME, or --model-name.")
    _raise_file_limit()
    listener = _bind(config)
    with listener:
        return asyncio.run(_serve(model, load, config, listener, on_ready))


def check_address(config: ServerConfig) -> None:
    """Raise a UsageError if the server could not listen on its address."""
    _bind(config).close()


def _raise_file_limit() -> None:
    """Allow as many connections as the system lets this process have; the usual default is 1,024 files."""
    with suppress(ImportError, OSError, ValueError):  # there is none on Windows
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _bind(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio turns off Nagle's algorithm only if the protocol is given: else each response waits 40 ms for an ACK
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UsageError(f"{config.host}:{config.port}: {error}", "Choose another --host or --port.") from None
    return listener


async def _serve(
    model: Path,
    load: Mapping[str, Any],
    config: ServerConfig,
    listener: socket.socket,
    on_ready: Callable[[str, AsyncLLM], None] | None,
) -> int:
    stop = _Stop()
    sessions = {"session_dir": config.session_dir, "session_limits": config.limits.sessions}
    loading = asyncio.ensure_future(_load(model, {**load, **sessions}, config.num_replicas))
    await _first_of(stop.first.wait(), loading)
    if not loading.done():  # a signal while the model is loaded
        loading.cancel()
        await asyncio.wait([loading])
        return 0
    async with loading.result() as llm:
        stop.listen()  # again: Ray installs handlers
        context = ApiContext(llm, config, ServerMetrics(config.model_name), config.model_name)
        settings = uvicorn.Config(
            build_app(context),
            http=type("_LimitedProtocol", (_Protocol,), {"limits": config.limits}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=1024,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        )
        server = _Server(settings)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not task.done():
            await asyncio.sleep(POLL_SECONDS)
        host, port = listener.getsockname()[:2]
        if on_ready is not None and not task.done():
            on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}", llm)
        await _first_of(stop.first.wait(), llm.ended.wait(), task)
        context.draining = True
        if llm.failure is None:
            await _drain(context, stop, config.shutdown_seconds)
        server.should_exit = True
        await task
        return 0 if llm.failure is None else 1


async def _load(model: Path, load: Mapping[str, Any], num_replicas: int) -> AsyncLLM:
    if num_replicas == 1:
        return await AsyncLLM.load(model, **load)
    from kvad.server.replicas import ReplicatedLLM

    return await ReplicatedLLM.load_replicas(model, num_replicas, **load)


async def _first_of(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(each) for each in waits]
    _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for each in pending:
        if each is not tasks[-1]:
            each.cancel()


async def _drain(context: ApiContext, stop: _Stop, seconds: float) -> None:
    """Wait for the running requests, then end the others with an error event; a second signal ends them now."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while context.active and loop.time() < end and not stop.second.is_set():
        await asyncio.sleep(POLL_SECONDS)
    if context.active:
        LOG.warning("%d requests are ended because the server shuts down", sum(context.active.values()))
        await context.llm.stop_all(api.errors.shutting_down())
        end = loop.time() + LAST_SECONDS
        while context.active and loop.time() < end:
            await asyncio.sleep(POLL_SECONDS)


class _Stop:
    """The first and the second SIGINT or SIGTERM."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.listen()

    def listen(self) -> None:
        """Install the handlers."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


class _Server(uvicorn.Server):
    """Server without its own signal handlers that ends connections which do not close in time."""

    _closing: frozenset[Any] = frozenset()

    def capture_signals(self) -> Any:
        return nullcontext()

    async def on_tick(self, counter: int) -> bool:
        """Abort the connections that have been closing since the last check: their clients do not read the rest."""
        if counter % CLOSING_TICKS == 0:
            closing = {each for each in self.server_state.connections if each.transport.is_closing()}
            for protocol in self._closing & closing:
                protocol.transport.abort()
            self._closing = frozenset(closing)
        return await super().on_tick(counter)


class _Flow(FlowControl):
    """uvicorn's control of writing, which aborts the connection of a client that does not read.

    A stream has the same time since its beginning, so it ends before, with an error event.
    """

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        super().__init__(transport)
        self._seconds = seconds

    async def drain(self) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await super().drain()
        except TimeoutError:
            LOG.info("a client has not read its responses for %g s", self._seconds)
            self._transport.abort()
            await super().drain()  # until the connection is lost


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with limits of a connection: bytes and seconds of heads and bodies.

    The head of a request is collected here and parsed in one piece.

    An ``Upgrade`` header is renamed: the parser would otherwise drop the body, although the request is answered
    in HTTP/1.1 (Java's client offers HTTP/2 in every first request).
    """

    limits: ServerLimits

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._head, self._in_body, self._body_bytes = bytearray(), False, 0
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # uvicorn's ``cycle`` is the last one of the pipelined ones

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport, self.limits.request_seconds)
        self._close_after(self.limits.header_seconds)

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            if self._in_body:
                self._body_bytes += len(data)  # with the sizes of chunks, and what follows an answered request
                if self._body_bytes > 2 * self.limits.max_body_bytes + MAX_HEAD:
                    self.transport.close()
                else:
                    super().data_received(data)
                return
            start = max(0, len(self._head) - 3)
            self._head += data if self._head else data.lstrip(b"\r\n")  # empty lines before a head keep no connection
            end = self._head.find(b"\r\n\r\n", start) + 4
            if end < 4 or end > MAX_HEAD:
                self._wait_for_head()
                return
            head, data = bytes(self._head[:end]), bytes(self._head[end:])
            self._head.clear()
            super().data_received(_UPGRADE.sub(b"\r\nx-upgrade:", head))

    def _wait_for_head(self) -> None:
        if len(self._head) > MAX_HEAD:
            self._refuse(431, f"the head of a request must be at most {MAX_HEAD:,} bytes")
        elif self._timer is None:
            self._close_after(self.limits.header_seconds)

    def _close_after(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._close_waiting)

    def _close_waiting(self) -> None:
        """Close the connection unless a request is being answered."""
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_body, self._body_bytes = True, 0
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_PIPELINED:  # the end of a connection that is not read would not be noticed
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._timer is None and (self._in_body or self._head):  # the client may send the rest before it reads
            self._close_after(self.limits.body_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request is not valid HTTP/1.1")

    def _refuse(self, status: int, message: str) -> None:
        body = bytes(json_response(ApiError(status, message, code="invalid_http").body()).body)
        fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + fields.encode() + body)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """End the connection of a CONNECT, whose rest is no HTTP, with its response; log nothing."""
        self.shutdown()
