"""``serve``: run the server until a signal or the end of the engine."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvad.errors import UsageError
from kvad.server.api import ApiContext
from kvad.server.app import build_app
from kvad.server.async_llm import AsyncLLM
from kvad.server.config import ServerConfig
from kvad.server.metrics import ServerMetrics

LOG = logging.getLogger(__name__)
POLL_SECONDS = 0.05


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
    listener = _bind(config)
    with listener:
        return asyncio.run(_serve(model, load, config, listener, on_ready))


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
    async with await _load(model, {**load, "session_dir": config.session_dir}, config.num_replicas) as llm:
        stop.listen()  # again: Ray installs handlers
        context = ApiContext(llm, config, ServerMetrics(config.model_name), config.model_name)
        settings = uvicorn.Config(
            build_app(context),
            http=_protocol(config.limits.header_seconds),
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
        context.llm.stop_all("the server is shutting down")
        while context.active and loop.time() < end + 2.0:
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
    """Server without its own signal handlers."""

    def capture_signals(self) -> Any:
        return nullcontext()


def _protocol(header_seconds: float) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol, which closes a connection whose first request's head does not arrive in time."""

    class Protocol(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head_timer = self.loop.call_later(header_seconds, self._close_idle)

        def _close_idle(self) -> None:
            if getattr(self, "cycle", None) is None:
                self.transport.close()

        def on_headers_complete(self) -> None:
            self._head_timer.cancel()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_timer.cancel()
            super().connection_lost(exc)

    return Protocol
