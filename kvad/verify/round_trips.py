"""Rows that leave the cache and come back (parked, from a tier, from a session, spilled): their logits on the way.

Real engines are driven, over tokens that are known: what may come next is one token (``Sampling.allowed``), and the
runner notes the logits of every position that it computes.  So a row that has been away can be laid beside the judge of
:mod:`kvad.verify.run`, position by position, like one that has not.

* ``park``, ``park-disk``: rows are made to give way, each twice, and are copied out and in, never computed again;
* ``ram``: the pool is filled by strangers, so that what comes of a known prefix comes from the tier in host memory;
* ``disk``: a second engine, on the folder that the first one wrote;
* ``session``: every row is saved in the middle of its text, and goes on in an engine that was started for it;
* ``spill``, ``spill-disk``: the pool holds a part of each row, and attention reads the rest from below it.

:attr:`Went.moved` says how much really went that way: a way that nothing took has shown nothing.  What a memory cannot
do is refused by the product itself, with its own error.
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
NUM_ABSENCES = 2  # times that each row is parked
PREEMPTION_INTERVAL = 3  # steps between two that are


@dataclass(frozen=True)
class RoundTrip:
    """``moved``: what is counted of it."""

    description: str
    unit: str


ROUND_TRIPS: dict[str, RoundTrip] = {
    "park": RoundTrip("parked in host memory, and woken", "bytes"),
    "park-disk": RoundTrip("parked on disk, and woken", "bytes"),
    "ram": RoundTrip("a prefix from the tier in host memory", "tokens"),
    "disk": RoundTrip("a prefix from the tier on disk, in a new engine", "tokens"),
    "session": RoundTrip("saved as a session, and restored in a new engine", "tokens"),
    "spill": RoundTrip("spilled to host memory", "bytes"),
    "spill-disk": RoundTrip("spilled to disk", "bytes"),
}


@dataclass(frozen=True)
class RoundTripRun:
    """``replayed``: the logits of what was computed after, or between, the absences; ``missed``: why a row that was to
    come back was computed instead."""

    replay: ReplayResult
    moved: int
    miss_reason: str = ""


def check_round_trip(name: str) -> None:
    """UsageError for what is none of :data:`WAYS`."""
    if name not in ROUND_TRIPS:
        raise UsageError(f"--through: {name!r} is no way of leaving and coming back", suggest(name, ROUND_TRIPS))


def run_round_trip(
    way: str,
    model: Transformer,
    cache: CacheConfig,
    streams: Sequence[ReplayStream],
    folder: Path,
    *,
    other: CacheConfig | None = None,
) -> RoundTripRun:
    """Send each stream's first sample that way.

    ``folder``: for files, new ones; ``other``: the cache that a session is restored in, and a prefix from disk found by
    (default: the same).  ConfigError, RequestError, EntryError: this memory cannot do it, in the product's words.
    """
    check_round_trip(way)
    if way.startswith("park"):
        return _through_swap(way, model, cache, streams, folder)
    if way == "session":
        return _through_session(model, cache, other or cache, streams, folder)
    if way.startswith("spill"):
        return _through_offload(way, model, cache, streams, folder)
    return _through_prefix_cache(way, model, cache, other or cache, streams, folder)


# ---------------------------------------------------------------- the ways


def _through_swap(
    way: str, model: Transformer, cache: CacheConfig, streams: Sequence[ReplayStream], folder: Path
) -> RoundTripRun:
    """Rows give way in turn."""
    ram = LARGE_RAM if way == "park" else 0
    rows = _Rows(
        model, replace(cache, swap_space=ram), streams, park_dir=folder if way == "park-disk" else None, costs=_Always()
    )
    with rows:
        requests = [rows.submit(number) for number in range(len(streams))]
        left = dict.fromkeys(requests, NUM_ABSENCES)

        def between(step: int) -> None:
            turn = [request for request in left if left[request]]
            if step % PREEMPTION_INTERVAL == PREEMPTION_INTERVAL - 1 and turn:
                request = min(turn, key=lambda each: (-left[each], each))
                left[request] -= rows.engine.scheduler.preempt(request)

        rows.run(between)
        told = rows.engine.preemption.stats()
    return RoundTripRun(
        rows.replayed, told.swapped_bytes if (told.to_disk if way == "park-disk" else told.to_ram) else 0
    )


def _through_prefix_cache(
    way: str, model: Transformer, cache: CacheConfig, other: CacheConfig, streams: Sequence[ReplayStream], folder: Path
) -> RoundTripRun:
    """Each row once, for the tier; then its whole blocks are known, and it goes on behind them."""
    given: dict[str, Any] = {"tier_ram": LARGE_RAM} if way == "ram" else {"tier": str(folder / "tier")}
    longest = max(stream.limit for stream in streams)
    given |= {
        "prefix": True,
        "blocks": None,
        "rows": min(2, cache.max_num_seqs),
        "capacity": min(cache.max_seq_len, longest),
    }
    first = again = _Rows(model, replace(cache, **given), streams)
    with first:
        for number in range(len(streams)):
            first.submit(number)
        first.run()
        if way == "ram":
            first.crowd(replace(cache, **given))
            first.pieces.clear()
            _run_twice(again)
    if way == "disk":
        again = _Rows(model, replace(other, **given), streams)
        with again:
            _run_twice(again)
    deposits = again.engine.kv_cache_manager.prefix_offload
    tokens = 0 if deposits is None else deposits.hits.tokens[way]
    missed = "" if deposits is None or tokens else ", ".join(deposits.hits.misses)
    return RoundTripRun(again.replayed, tokens, missed)


def _run_twice(rows: _Rows) -> None:
    for number in range(len(rows.streams)):
        rows.submit(number, from_=rows.middle(number))
    rows.run()


def _through_session(
    model: Transformer, cache: CacheConfig, other: CacheConfig, streams: Sequence[ReplayStream], folder: Path
) -> RoundTripRun:
    """Every row to its middle, in company; then all of them from their files, in company again."""
    first = _Rows(model, cache, streams)
    with first:
        requests = {first.submit(number, keep=True): number for number in range(len(streams))}

        def between(step: int) -> None:
            for request, number in requests.items():
                rows = first.engine.scheduler.sequences(request)
                if rows and rows[0].state != "done" and len(rows[0].token_ids) >= first.middle(number):
                    first.engine.scheduler.finish_sequence(request, 0)
                    first.engine.state_keeper.collect(first.engine.scheduler.pop_finished_states())

        first.run(between)
        for request, number in requests.items():
            first.save(first.engine.pop_state(request), folder / f"{number}.session")
    second = _Rows(model, other, streams)
    with second:
        again = [
            second.submit(number, from_=second.middle(number), resume=second.load(folder / f"{number}.session"))
            for number in range(len(streams))
        ]
        second.run()
        usages = [second.engine.metrics(request) for request in again]
    missed = ", ".join(dict.fromkeys(usage.resume_miss_reason for usage in usages if usage.resume_miss_reason))
    return RoundTripRun(second.replayed, sum(usage.num_cached_tokens for usage in usages), missed)


def _through_offload(
    way: str, model: Transformer, cache: CacheConfig, streams: Sequence[ReplayStream], folder: Path
) -> RoundTripRun:
    """A quarter of the longest row stays in the pool."""
    ram = LARGE_RAM if way == "spill" else 0
    given: dict[str, Any] = {"spill_ram": ram, "spill_dir": str(folder)}
    if not isinstance(cache.resolved_policy, cache_lib.policy.OffloadPolicy):
        longest, size = max(stream.limit for stream in streams), cache.block_size
        given |= {"on_full": "spill", "capacity": max(2 * size, longest // 4), "blocks": None}
    rows = _Rows(model, replace(cache, **given), streams)
    with rows:
        for number in range(len(streams)):
            rows.submit(number)
        rows.run()
        spill = rows.engine.kv_cache.offload_reader
        told = None if spill is None else spill.stats()
    if told is None:
        return RoundTripRun(rows.replayed, 0)
    return RoundTripRun(rows.replayed, told.from_ram if way == "spill" else told.from_disk)


# ---------------------------------------------------------------- an engine, over known tokens


class _Always(scheduling.preemption.SwapCostModel):
    """Copying is cheaper than computing, whatever was measured."""

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        return True


class _RecordingRunner(ModelRunner):
    """Computes the logits of every position, notes them, and gives those that were wanted."""

    note: Callable[[int, int, Tensor], None]

    def execute(self, plan: SchedulerOutput) -> Tensor:
        every = tuple(work._replace(logit_offsets=range(work.num_tokens)) for work in plan.scheduled)
        logits = super().execute(plan._replace(scheduled=every))
        at, wanted = 0, []
        for work in plan.scheduled:
            self.note(work.sequence.request_id, work.start, logits[at : at + work.num_tokens])
            wanted += [at + each for each in work.logit_offsets]
            at += work.num_tokens
        return logits[wanted]


class _Rows:
    """An engine for some streams, closed at the end of its ``with``."""

    def __init__(self, model: Transformer, cache: CacheConfig, streams: Sequence[ReplayStream], **options: Any) -> None:
        self.streams, self.pieces = streams, dict[SequenceKey, list[tuple[int, Tensor]]]()
        self.engine = Engine(
            model, cache, max_num_batched_tokens=cache.prefill_chunk_size + cache.max_num_seqs, **options
        )
        self._streams: dict[int, int] = {}  # by request
        noting = _RecordingRunner(model, self.engine.kv_cache)
        noting.note = self._note
        self.engine.runner = noting

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    @property
    def replayed(self) -> ReplayResult:
        return ReplayResult(self.pieces)

    def middle(self, number: int) -> int:
        """Tokens of a stream of which half of what it generates is there."""
        stream = self.streams[number]
        return len(stream.prompt) + len(stream.forced_tokens[0]) // 2

    def submit(self, number: int, *, from_: int | None = None, **options: Any) -> int:
        """A stream's first sample, from its prompt or from so many of its tokens on; the request's number."""
        stream = self.streams[number]
        whole = (*stream.prompt, *stream.forced_tokens[0])
        start = len(stream.prompt) if from_ is None else from_
        sampling = SamplingParams(
            max_tokens=len(whole) - start, ignore_eos=True, allowed_tokens_fn=lambda so_far: [whole[len(so_far)]]
        )
        request = self.engine.add_request(whole[:start], sampling, source=stream.source, **options)
        self._streams[request] = number
        return request

    def run(self, between: Callable[[int], None] = lambda _: None) -> None:
        """To the end of all.  EngineError: a row ended with an error."""
        step = 0
        while not self.engine.idle:
            for piece in self.engine.step():
                if piece.error is not None:
                    raise EngineError(f"row {self._streams.get(piece.request)} has failed: {piece.error}")
            self.engine.scheduler.check()
            between(step)
            step += 1

    def crowd(self, cache: CacheConfig) -> None:
        """Fill the pool with rows that share nothing with the streams, so that what was known of these is evicted."""
        vocab = self.engine.model.config.vocab_size
        longest = max(self.streams, key=lambda each: each.limit)
        for turn in range(cache.max_num_seqs):
            tokens = [(token + 1 + turn) % vocab for token in (*longest.prompt, *longest.forced_tokens[0])]
            self.engine.add_request(tokens[:-1], SamplingParams(max_tokens=1), source=longest.source)
        self.run()

    def save(self, state: SequenceState, path: Path) -> None:
        save_session(path, state, self.engine.cache_fingerprint(state.regime, salt=state.salt), state.tokens, {})

    def load(self, path: Path) -> SequenceState:
        engine = self.engine
        return load_session(
            path,
            lambda regime, salt: engine.cache_fingerprint(regime, salt=salt),
            engine.kv_cache,
            engine.state_keeper.engine_id,
        ).state

    def _note(self, request: int, start: int, logits: Tensor) -> None:
        if request in self._streams:
            self.pieces.setdefault((self._streams[request], 0), []).append((start, logits))
