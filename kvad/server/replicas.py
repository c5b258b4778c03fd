"""Replicas: several engines behind Ray Serve, each request sent to one whose prefix cache has its first blocks.

``kvad serve --replicas N`` starts them on this machine, or on the cluster of ``RAY_ADDRESS``. Ray starts, checks,
restarts and drains them; the API stays in this process, and ``routing.py`` chooses the replica of a request. Ray sends
Python objects as pickles between its processes: run it in a network that you trust.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvad.errors import EngineError, KvadError
from kvad.server.async_llm import AsyncLLM, RequestStream, Signal, Submission
from kvad.server.routing import merge_replies, prefix_key, rank_replicas, rename_requests
from kvad.server.wire import Message

APP = "kvad"
HEALTH_SECONDS = 5.0
MAX_REQUESTS = 4096  # of a replica at the same time
RAY_ERRORS = (RayError, RayServeException)  # the latter of Serve's router


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ray Serve's router: replicas by ``rank_replicas``, or the one whose number the request names."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return replicas by preference, one per rank."""
        replicas = {str(each.replica_id.unique_id): each for each in candidate_replicas}
        route = pending_request.args[0] if pending_request is not None and pending_request.args else {}
        if "replica" in route:
            names = sorted(replicas)
            return [[replicas[names[route["replica"] % len(names)]]]] if names else []
        known = {name: self.replica_queue_len_cache.get(each.replica_id) for name, each in replicas.items()}
        order = rank_replicas(route.get("key", ""), {name: load or 0 for name, load in known.items()})
        return [[replicas[name]] for name in order]


class EngineReplica:
    """One engine in an actor of Ray. The first argument of every method is for the router."""

    def __init__(self, model: str, load: Mapping[str, Any]) -> None:
        self._model, self._load = model, dict(load)
        self._llm: AsyncLLM | None = None
        self._numbers: dict[int, int] = {}  # number of a request here -> the server's
        self._lock = asyncio.Lock()

    async def _open(self) -> AsyncLLM:
        async with self._lock:
            if self._llm is None:
                self._llm = await AsyncLLM.load(self._model, **self._load)
            return self._llm

    async def info(self, route: Message) -> Message:
        return (await self._open()).info

    async def run(
        self, route: Message, submission: Submission, session: Mapping[str, str] | None
    ) -> AsyncIterator[Any]:
        """Yield lists of chunks, and at the end the metrics and the session's report."""
        llm = await self._open()
        stream = llm.submit(submission, session=session)
        self._numbers[stream.number] = route["number"]
        if len(self._numbers) > MAX_REQUESTS:
            del self._numbers[next(iter(self._numbers))]
        async for chunks in stream.parts():
            yield chunks
        yield stream.metrics, stream.session

    async def call(self, route: Message, operation: str, arguments: Message) -> tuple[str, Message]:
        """Return the name of this replica, and its engine's reply."""
        reply = await (await self._open()).call(operation, **arguments)
        return serve.get_replica_context().replica_tag, rename_requests(reply, self._numbers)

    async def embed(
        self, route: Message, inputs: Sequence[list[int]], adapter: str, cache_salt: str
    ) -> list[list[float]]:
        llm = await self._open()
        first = llm._next_number + 1  # the requests, one per text, are added before the first await
        self._numbers |= {first + index: route["number"] for index in range(len(inputs))}
        return await llm.embed_ids(inputs, adapter=adapter, cache_salt=cache_salt)

    async def check_health(self) -> None:
        """Raise an error if the engine's process has ended; Ray then restarts the replica."""
        if self._llm is not None and self._llm.failure is not None:
            raise self._llm.failure


class ReplicatedLLM(AsyncLLM):
    """The interface of ``AsyncLLM`` in front of several replicas."""

    _handle: Any
    _num_replicas: int
    _generators: dict[int, Any]
    _tasks: set[asyncio.Task[None]]

    @staticmethod
    async def load_replicas(path: str | Path, num_replicas: int, **settings: Any) -> ReplicatedLLM:
        """Start replicas, and wait until all have loaded the model.

        Args:
            path: The checkpoint; its path must be valid on every machine.
            num_replicas: Number of replicas.
            **settings: Keywords of ``AsyncLLM.load``.

        Raises:
            KvadError: As ``LLM.load``.
        """
        merged, adapters = settings.get("adapter"), settings.get("adapters") or {}
        settings["adapter"] = None if merged is None else Path(merged).resolve()
        settings["adapters"] = {name: Path(folder).resolve() for name, folder in adapters.items()}
        llm = ReplicatedLLM()
        llm._num_replicas, llm._generators, llm._tasks = num_replicas, {}, set()
        llm._handle = await asyncio.to_thread(_start, str(Path(path).resolve()), num_replicas, settings)
        try:
            infos = await asyncio.gather(*(llm._handle.info.remote({"replica": n}) for n in range(num_replicas)))
        except RayTaskError as error:
            await llm.close()
            raise _kvad_error(error) from None
        llm.info = infos[0]
        return llm

    def submit(
        self, submission: Submission, *, session: Mapping[str, str] | None = None, signal: Signal | None = None
    ) -> RequestStream:
        """Send a request to the replica of its prefix (``AsyncLLM.submit``)."""
        number = self._number()
        stream = RequestStream(self, number, signal or Signal(), submission)
        stream.is_turn = session is not None
        salt = f"{submission.adapter} {submission.cache_salt}"
        key = prefix_key(submission.input_ids, self.info["block_size"], salt, session)
        route = {"key": key, "number": number}
        generator = self._handle.options(stream=True).run.remote(route, submission, session)
        self._add(stream)
        self._generators[number] = generator
        task = asyncio.create_task(self._relay(stream, generator))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _relay(self, stream: RequestStream, generator: Any) -> None:
        """Pass the parts of a replica's answer to the request's stream."""
        try:
            async for part in generator:
                self.last_message = time.monotonic()
                if isinstance(part, list):
                    stream.add(*part)
                else:
                    stream.end(*part)
        except (*RAY_ERRORS, asyncio.CancelledError) as error:
            stream.fail(_kvad_error(error))
        finally:
            self._streams.pop(stream.number, None)
            self._generators.pop(stream.number, None)

    def cancel(self, stream: RequestStream) -> None:
        """End a request now, unless it has ended."""
        self._streams.pop(stream.number, None)
        generator = self._generators.pop(stream.number, None)
        if generator is not None and stream.metrics is None:
            generator.cancel()

    async def call(self, operation: str, **arguments: Any) -> Message:
        """Return the replies of all replicas as one: numbers are added, lists are joined.

        A replica that Ray restarts is left out: its call fails, or another replica replies twice.

        Raises:
            KvadError: If no replica has replied.
        """
        numbers = range(1 if operation == "attention" else self._num_replicas)
        calls = [self._handle.call.remote({"replica": number}, operation, arguments) for number in numbers]
        results = await asyncio.gather(*calls, return_exceptions=True)
        replies = list(dict(each for each in results if not isinstance(each, BaseException)).values())
        if not replies:
            raise _kvad_error(next(each for each in results if isinstance(each, BaseException)))
        return replies[0] if len(replies) == 1 else merge_replies(replies)

    async def embed_ids(
        self, inputs: Sequence[list[int]], *, adapter: str = "", cache_salt: str = ""
    ) -> list[list[float]]:
        """Return one vector per encoded text."""
        route = {"key": "", "number": self._number()}
        try:
            vectors: list[list[float]] = await self._handle.embed.remote(route, list(inputs), adapter, cache_salt)
        except RAY_ERRORS as error:
            raise _kvad_error(error) from None
        return vectors

    async def close(self) -> int:
        """End the replicas and Ray, if it was started here."""
        for stream in list(self._streams.values()):
            self.cancel(stream)
        await asyncio.to_thread(_stop)
        return 0


def _kvad_error(error: BaseException) -> KvadError:
    """Return the error of a replica's engine, or one that the replica has ended."""
    if not isinstance(error, RayTaskError):
        return EngineError(f"a replica has ended: {type(error).__name__}", "Send the request again.")
    return error.cause if isinstance(error.cause, KvadError) else EngineError(f"a replica failed: {error.cause}")


def _start(model: str, num_replicas: int, settings: Mapping[str, Any]) -> Any:
    """Start Ray if necessary, and the replicas; return their handle."""
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    serve.start(http_options={"location": "NoServer"}, logging_config={"log_level": "WARNING"})
    device = str(settings.get("device") or "cpu")
    deployment = serve.deployment(
        EngineReplica,
        num_replicas=num_replicas,
        max_ongoing_requests=MAX_REQUESTS,  # the engine's scheduler queues
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=10,
        ray_actor_options={"num_cpus": 0, "num_gpus": 1 if device.startswith("cuda") or device == "auto" else 0},
        request_router_config=RequestRouterConfig(request_router_class="kvad.server.replicas:PrefixRouter"),
    )
    return serve.run(deployment.bind(model, dict(settings)), name=APP, route_prefix=None)


def _stop() -> None:
    serve.shutdown()
    ray.shutdown()
