"""Sequences that leave the cache and return (swap space, prefix cache, session, offload), with the logits on the way.

Real engines run over known tokens: only one token is allowed next (``SamplingParams.allowed_tokens_fn``), and the
runner records the logits of every computed position. So a sequence that was away can be compared with the reference of
:mod:`kvad.verify.run`, position by position, like one that stayed.

* ``swap``, ``swap-disk``: each sequence is preempted twice and copied out and in, never recomputed;
* ``prefix-ram``: other sequences fill the pool, so a known prefix is read from the RAM store;
* ``prefix-disk``: a second engine uses the folder that the first one wrote;
* ``session``: every sequence is saved in the middle of its text and continues in a new engine;
* ``offload``, ``offload-disk``: the pool holds a part of each sequence, attention reads the rest from host or disk.

:attr:`RoundTripRun.moved` is the amount that took the round trip: if it is 0, nothing was tested. An impossible
configuration is refused by the engine with its own error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kvad import cache as cache_lib
from kvad.cache import CacheConfig
from kvad.cache.sessions import SequenceState, load_session, save_session
from kvad.engine import Engine, scheduling
from kvad.engine.execution import ModelRunner
from kvad.engine.scheduling import SamplingParams, SchedulerOutput
from kvad.errors import EngineError, UsageError, suggest
from kvad.model import Transformer
from kvad.verify.replay import ReplayResult, ReplayStream, SequenceKey

LARGE_RAM = 1 << 40  # bytes of host memory: no bound
NUM_ABSENCES = 2  # times that each sequence is preempted
PREEMPTION_INTERVAL = 3  # steps between two preemptions


@dataclass(frozen=True)
class RoundTrip:
    """A round trip; ``unit``: what is counted of it."""

    description: str
    unit: str


ROUND_TRIPS: dict[str, RoundTrip] = {
    "swap": RoundTrip("swapped out to host memory and back in", "bytes"),
    "swap-disk": RoundTrip("swapped out to disk and back in", "bytes"),
    "prefix-ram": RoundTrip("a prefix read from the RAM store", "tokens"),
    "prefix-disk": RoundTrip("a prefix read from the disk store in a new engine", "tokens"),
    "session": RoundTrip("saved as a session and restored in a new engine", "tokens"),
    "offload": RoundTrip("offloaded to host memory", "bytes"),
    "offload-disk": RoundTrip("offloaded to disk", "bytes"),
}


@dataclass(frozen=True)
class RoundTripRun:
    """Result of a round trip.

    ``replay``: logits of what was computed after, or between, the absences; ``miss_reason``: why a sequence was
    recomputed instead of restored.
    """

    replay: ReplayResult
    moved: int
    miss_reason: str = ""


def check_round_trip(name: str) -> None:
    """Raise UsageError if ``name`` is not in :data:`ROUND_TRIPS`."""
    if name not in ROUND_TRIPS:
        raise UsageError(f"--round-trip: {name!r} is no round trip", suggest(name, ROUND_TRIPS))


def run_round_trip(
    way: str,
    model: Transformer,
    cache: CacheConfig,
    streams: Sequence[ReplayStream],
    folder: Path,
    *,
    other: CacheConfig | None = None,
) -> RoundTripRun:
    """Send each stream's first sample on a round trip.

    Args:
        folder: New files are written here.
        other: Cache in which a session is restored and a prefix from disk is found (default: the same).

    Raises:
        ConfigError, RequestError, StorageError: If this cache does not support the round trip.
    """
    check_round_trip(way)
    if way.startswith("swap"):
        return _through_swap(way, model, cache, streams, folder)
    if way == "session":
        return _through_session(model, cache, other or cache, streams, folder)
    if way.startswith("offload"):
        return _through_offload(way, model, cache, streams, folder)
    return _through_prefix_cache(way, model, cache, other or cache, streams, folder)


# ---------------------------------------------------------------- the round trips


def _through_swap(
    way: str, model: Transformer, cache: CacheConfig, streams: Sequence[ReplayStream], folder: Path
) -> RoundTripRun:
    """Preempt the sequences in turn."""
    ram = LARGE_RAM if way == "swap" else 0
    run = _ReplayEngine(
        model,
        replace(cache, swap_space=ram),
        streams,
        swap_dir=folder if way == "swap-disk" else None,
        cost_model=_AlwaysSwap(),
    )
    with run:
        requests = [run.submit(number) for number in range(len(streams))]
        remaining = dict.fromkeys(requests, NUM_ABSENCES)

        def between(step: int) -> None:
            turn = [request for request in remaining if remaining[request]]
            if step % PREEMPTION_INTERVAL == PREEMPTION_INTERVAL - 1 and turn:
                request = min(turn, key=lambda request: (-remaining[request], request))
                remaining[request] -= run.engine.scheduler.preempt(request)

        run.run(between)
        stats = run.engine.preemption.stats()
    return RoundTripRun(
        run.result, stats.swapped_bytes if (stats.to_disk if way == "swap-disk" else stats.to_ram) else 0
    )


def _through_prefix_cache(
    way: str, model: Transformer, cache: CacheConfig, other: CacheConfig, streams: Sequence[ReplayStream], folder: Path
) -> RoundTripRun:
    """Run each sequence once to store its blocks, then again after its known blocks."""
    fields: dict[str, Any] = (
        {"prefix_cache_ram": LARGE_RAM} if way == "prefix-ram" else {"prefix_cache_dir": str(folder / "prefix-cache")}
    )
    longest = max(stream.limit for stream in streams)
    fields |= {
        "enable_prefix_caching": True,
        "num_blocks": None,
        "max_num_seqs": min(2, cache.max_num_seqs),
        "max_seq_len": min(cache.max_seq_len, longest),
    }
    first = second = _ReplayEngine(model, replace(cache, **fields), streams)
    with first:
        for number in range(len(streams)):
            first.submit(number)
        first.run()
        if way == "prefix-ram":
            first.crowd(replace(cache, **fields))
            first.pieces.clear()
            _run_twice(second)
    if way == "prefix-disk":
        second = _ReplayEngine(model, replace(other, **fields), streams)
        with second:
            _run_twice(second)
    prefix_offload = second.engine.kv_cache_manager.prefix_offload
    tokens = 0 if prefix_offload is None else prefix_offload.hits.tokens[way.removeprefix("prefix-")]
    miss_reason = "" if prefix_offload is None or tokens else ", ".join(prefix_offload.hits.misses)
    return RoundTripRun(second.result, tokens, miss_reason)


def _run_twice(rows: _ReplayEngine) -> None:
    for number in range(len(rows.streams)):
        rows.submit(number, from_=rows.middle(number))
    rows.run()


def _through_session(
    model: Transformer, cache: CacheConfig, other: CacheConfig, streams: Sequence[ReplayStream], folder: Path
) -> RoundTripRun:
    """Run every sequence to its middle, together with the others.

    Then continue all of them from their files.
    """
    first = _ReplayEngine(model, cache, streams)
    with first:
        requests = {first.submit(number, keep_state=True): number for number in range(len(streams))}

        def between(step: int) -> None:
            for request, number in requests.items():
                rows = first.engine.scheduler.sequences(request)
                if rows and rows[0].state != "done" and len(rows[0].token_ids) >= first.middle(number):
                    first.engine.scheduler.finish_sequence(request, 0)
                    first.engine.state_keeper.collect(first.engine.scheduler.pop_finished_states())

        first.run(between)
        for request, number in requests.items():
            first.save(first.engine.pop_state(request), folder / f"{number}.session")
    second = _ReplayEngine(model, other, streams)
    with second:
        requests_again = [
            second.submit(number, from_=second.middle(number), resume=second.load(folder / f"{number}.session"))
            for number in range(len(streams))
        ]
        second.run()
        metrics = [second.engine.metrics(request) for request in requests_again]
    miss_reason = ", ".join(dict.fromkeys(usage.resume_miss_reason for usage in metrics if usage.resume_miss_reason))
    return RoundTripRun(second.result, sum(usage.num_cached_tokens for usage in metrics), miss_reason)


def _through_offload(
    way: str, model: Transformer, cache: CacheConfig, streams: Sequence[ReplayStream], folder: Path
) -> RoundTripRun:
    """Keep a quarter of the longest sequence in the pool."""
    ram = LARGE_RAM if way == "offload" else 0
    fields: dict[str, Any] = {"offload_ram": ram, "offload_dir": str(folder)}
    if not isinstance(cache.resolved_policy, cache_lib.policy.OffloadPolicy):
        longest, size = max(stream.limit for stream in streams), cache.block_size
        fields |= {"overflow": "offload", "max_seq_len": max(2 * size, longest // 4), "num_blocks": None}
    run = _ReplayEngine(model, replace(cache, **fields), streams)
    with run:
        for number in range(len(streams)):
            run.submit(number)
        run.run()
        reader = run.engine.kv_cache.offload_reader
        stats = None if reader is None else reader.stats()
    if stats is None:
        return RoundTripRun(run.result, 0)
    return RoundTripRun(run.result, stats.from_ram if way == "offload" else stats.from_disk)


# ---------------------------------------------------------------- an engine over known tokens


class _AlwaysSwap(scheduling.preemption.SwapCostModel):
    """Copying is always cheaper than recomputing."""

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        return True


class _RecordingRunner(ModelRunner):
    """Computes and records the logits of every position; returns the requested ones."""

    record: Callable[[int, int, Tensor], None]

    def execute(self, output: SchedulerOutput) -> Tensor:
        all_logits = tuple(
            scheduled._replace(logit_offsets=range(scheduled.num_tokens)) for scheduled in output.scheduled
        )
        logits = super().execute(output._replace(scheduled=all_logits))
        offset, requested = 0, []
        for scheduled in output.scheduled:
            self.record(scheduled.sequence.request_id, scheduled.start, logits[offset : offset + scheduled.num_tokens])
            requested += [offset + index for index in scheduled.logit_offsets]
            offset += scheduled.num_tokens
        return logits[requested]


class _ReplayEngine:
    """An engine for some streams, closed at the end of its ``with``."""

    def __init__(self, model: Transformer, cache: CacheConfig, streams: Sequence[ReplayStream], **options: Any) -> None:
        self.streams, self.pieces = streams, dict[SequenceKey, list[tuple[int, Tensor]]]()
        self.engine = Engine(
            model, cache, max_num_batched_tokens=cache.prefill_chunk_size + cache.max_num_seqs, **options
        )
        self._streams: dict[int, int] = {}  # by request
        runner = _RecordingRunner(model, self.engine.kv_cache)
        runner.record = self._record
        self.engine.runner = runner

    def __enter__(self) -> _ReplayEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    @property
    def result(self) -> ReplayResult:
        return ReplayResult(self.pieces)

    def middle(self, index: int) -> int:
        """Return the number of a stream's tokens when half of its generation is done."""
        stream = self.streams[index]
        return len(stream.prompt) + len(stream.forced_tokens[0]) // 2

    def submit(self, index: int, *, from_: int | None = None, **options: Any) -> int:
        """Submit a stream's first sample, from its prompt or its first ``from_`` tokens.

        Return the request's id.
        """
        stream = self.streams[index]
        whole = (*stream.prompt, *stream.forced_tokens[0])
        start = len(stream.prompt) if from_ is None else from_
        sampling = SamplingParams(
            max_tokens=len(whole) - start, ignore_eos=True, allowed_tokens_fn=lambda tokens: [whole[len(tokens)]]
        )
        request = self.engine.add_request(whole[:start], sampling, encoder_token_ids=stream.source, **options)
        self._streams[request] = index
        return request

    def run(self, between: Callable[[int], None] = lambda _: None) -> None:
        """Run to the end; raises EngineError if a sequence failed."""
        step = 0
        while not self.engine.idle:
            for chunk in self.engine.step():
                if chunk.error is not None:
                    raise EngineError(f"sequence {self._streams.get(chunk.request)} failed: {chunk.error}")
            self.engine.scheduler.check()
            between(step)
            step += 1

    def crowd(self, cache: CacheConfig) -> None:
        """Fill the pool with other sequences, so the streams' cached blocks are evicted."""
        vocab = self.engine.model.config.vocab_size
        longest = max(self.streams, key=lambda stream: stream.limit)
        for shift in range(cache.max_num_seqs):
            tokens = [(token + 1 + shift) % vocab for token in (*longest.prompt, *longest.forced_tokens[0])]
            self.engine.add_request(tokens[:-1], SamplingParams(max_tokens=1), encoder_token_ids=longest.source)
        self.run()

    def save(self, state: SequenceState, path: Path) -> None:
        save_session(path, state, self.engine.cache_fingerprint(state.regime, cache_salt=state.salt), state.tokens, {})

    def load(self, path: Path) -> SequenceState:
        engine = self.engine
        return load_session(
            path,
            lambda regime, salt: engine.cache_fingerprint(regime, cache_salt=salt),
            engine.kv_cache,
            engine.state_keeper.engine_id,
        ).state

    def _record(self, request: int, start: int, logits: Tensor) -> None:
        if request in self._streams:
            self.pieces.setdefault((self._streams[request], 0), []).append((start, logits))
