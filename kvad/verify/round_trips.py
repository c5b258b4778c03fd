"""Sequences that leave the cache and return (swap space, prefix cache, session, offload), and beam searches.

The engines are those of ``kvad.verify.replay``, so a sequence that was away can be compared with the reference of
``kvad.verify.run``, position by position, like one that stayed.

``RoundTripRun.moved`` is the amount that took the round trip: if it is 0, nothing was tested. An impossible
configuration is refused by the engine with its own error.

The tokens of a beam search are not known before it runs, so its computed spans are recorded with all tokens before
them. Afterwards the reference computes each beam that is no prefix of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kvad import benchmarks
from kvad import cache as cache_lib
from kvad.cache import CacheConfig
from kvad.cache.sessions import load_session, save_session
from kvad.engine import Engine, EngineConfig, scheduling
from kvad.engine.execution import ModelRunner
from kvad.engine.scheduling import SamplingParams, SchedulerOutput
from kvad.errors import UsageError, suggest
from kvad.model import Transformer
from kvad.verify.reference_model import WholeSequence
from kvad.verify.replay import PrepareEngine, ReplayEngine, ReplayResult, ReplayStream, in_one_process

LARGE_RAM = 1 << 40  # bytes of host memory: no bound
NUM_ABSENCES = 2  # times that each sequence is preempted
PREEMPTION_INTERVAL = 3  # steps between two preemptions


@dataclass(frozen=True)
class RoundTripRun:
    """Result of a round trip."""

    replay: ReplayResult  # logits of what was computed after, or between, the absences
    moved: int
    miss_reason: str = ""  # why a sequence was recomputed instead of restored


class _Job(NamedTuple):
    """Model, cache and inputs of a round trip."""

    model: Transformer
    cache: CacheConfig
    other: CacheConfig  # of the second engine
    streams: Sequence[ReplayStream]
    folder: Path  # for new files
    config: EngineConfig  # of both engines
    prepare: PrepareEngine

    def open(self, cache: CacheConfig, **options: Any) -> ReplayEngine:
        """Open an engine with this cache and these more options."""
        model, config = self.prepare(self.model, cache, replace(self.config, **options))
        return ReplayEngine(model, cache, self.streams, config)


@dataclass(frozen=True)
class RoundTrip:
    """A round trip; ``unit``: what is counted of it."""

    description: str
    unit: str
    run: Callable[[_Job], RoundTripRun]


def check_round_trip(name: str) -> None:
    """Raise UsageError if ``name`` is not in ``ROUND_TRIPS``."""
    if name not in ROUND_TRIPS:
        raise UsageError(f"--round-trip: {name!r} is no round trip", suggest(name, ROUND_TRIPS))


def run_round_trip(
    name: str,
    model: Transformer,
    cache: CacheConfig,
    streams: Sequence[ReplayStream],
    folder: Path,
    *,
    other: CacheConfig | None = None,
    config: EngineConfig | None = None,
    prepare: PrepareEngine = in_one_process,
) -> RoundTripRun:
    """Send each stream's first sample on a round trip.

    New files are written in ``folder``; ``other`` is the cache in which a session is restored and a prefix from disk is
    found (default: the same). ``prepare`` divides each engine among ranks.

    Raises:
        ConfigError, RequestError, StorageError: If this cache does not support the round trip.
    """
    check_round_trip(name)
    config = config or EngineConfig()
    return ROUND_TRIPS[name].run(_Job(model, cache, other or cache, streams, folder, config, prepare))


def _through_swap(job: _Job, *, disk: bool) -> RoundTripRun:
    """Preempt each sequence ``NUM_ABSENCES`` times in turn; it is copied out and in, never recomputed."""
    cache, swap_dir = replace(job.cache, swap_space=0 if disk else LARGE_RAM), job.folder if disk else None
    with job.open(cache, swap_dir=swap_dir, cost_model=_AlwaysSwap()) as run:
        requests = [run.submit(number) for number in range(len(job.streams))]
        remaining = dict.fromkeys(requests, NUM_ABSENCES)

        def preempt(step: int) -> None:
            turn = [request for request in remaining if remaining[request]]
            if step % PREEMPTION_INTERVAL == PREEMPTION_INTERVAL - 1 and turn:
                request = min(turn, key=lambda request: (-remaining[request], request))
                remaining[request] -= run.engine.scheduler.preempt(request)

        run.run(preempt)
        stats = run.engine.preemption.stats()
    return RoundTripRun(run.result, stats.swapped_bytes if (stats.to_disk if disk else stats.to_ram) else 0)


def _through_prefix_cache(job: _Job, *, disk: bool) -> RoundTripRun:
    """Run each sequence once to store its blocks, then again after its known blocks.

    In RAM, other sequences fill the pool in between; on disk, a second engine uses the folder that the first one wrote.
    """
    fields: dict[str, Any] = {
        "enable_prefix_caching": True,
        "num_blocks": None,
        "max_num_seqs": min(2, job.cache.max_num_seqs),
        "max_seq_len": min(job.cache.max_seq_len, max(stream.limit for stream in job.streams)),
    }
    fields |= {"prefix_cache_dir": str(job.folder / "prefix-cache")} if disk else {"prefix_cache_ram": LARGE_RAM}
    cache = replace(job.cache, **fields)
    with job.open(cache) as first:
        _run_first_samples(first)
        if not disk:
            first.evict_blocks()
            first.result.pieces.clear()
            _run_first_samples(first, from_middle=True)
    second = first
    if disk:
        with job.open(replace(job.other, **fields)) as second:
            _run_first_samples(second, from_middle=True)
    prefix_offload = second.engine.kv_cache_manager.prefix_offload
    tokens = 0 if prefix_offload is None else prefix_offload.hits.tokens["disk" if disk else "ram"]
    miss_reason = "" if prefix_offload is None or tokens else ", ".join(prefix_offload.hits.misses)
    return RoundTripRun(second.result, tokens, miss_reason)


def _through_session(job: _Job) -> RoundTripRun:
    """Run every sequence to its middle, together with the others, then continue all of them from their files."""
    paths = [job.folder / f"{number}.session" for number in range(len(job.streams))]
    with job.open(job.cache) as first:
        requests = [first.submit(number, keep_state=True) for number in range(len(job.streams))]

        def finish_at_middle(_step: int) -> None:
            for number, request in enumerate(requests):
                rows = first.engine.scheduler.sequences(request)
                if rows and rows[0].state != "done" and len(rows[0].token_ids) >= first.middle(number):
                    first.engine.scheduler.finish_sequence(request, 0)
                    first.engine.state_keeper.collect(first.engine.scheduler.pop_finished_states())

        first.run(finish_at_middle)
        for path, request in zip(paths, requests, strict=True):
            state = first.engine.pop_state(request)
            fingerprint = first.engine.cache_fingerprint(state.regime, cache_salt=state.salt)
            save_session(path, state, fingerprint, state.tokens, {})
    with job.open(job.other) as second:
        cache, engine_id = second.engine.kv_cache, second.engine.state_keeper.engine_id
        fingerprint_for = second.engine.cache_fingerprint
        states = [
            load_session(path, lambda regime, salt: fingerprint_for(regime, cache_salt=salt), cache, engine_id).state
            for path in paths
        ]
        requests = [second.submit(n, start=second.middle(n), resume=state) for n, state in enumerate(states)]
        second.run()
        metrics = [second.engine.metrics(request) for request in requests]
    miss_reason = ", ".join(dict.fromkeys(usage.resume_miss_reason for usage in metrics if usage.resume_miss_reason))
    return RoundTripRun(second.result, sum(usage.num_cached_tokens for usage in metrics), miss_reason)


def _through_offload(job: _Job, *, disk: bool) -> RoundTripRun:
    """Keep a quarter of the longest sequence in the pool; attention reads the rest from host memory or disk."""
    fields: dict[str, Any] = {"offload_ram": 0 if disk else LARGE_RAM, "offload_dir": str(job.folder)}
    if not isinstance(job.cache.resolved_policy, cache_lib.policy.OffloadPolicy):
        longest, size = max(stream.limit for stream in job.streams), job.cache.block_size
        fields |= {"overflow": "offload", "max_seq_len": max(2 * size, longest // 4), "num_blocks": None}
    with job.open(replace(job.cache, **fields)) as run:
        _run_first_samples(run)
        reader = run.engine.kv_cache.offload_reader
        stats = None if reader is None else reader.stats()
    moved = 0 if stats is None else stats.from_disk if disk else stats.from_ram
    return RoundTripRun(run.result, moved)


ROUND_TRIPS: dict[str, RoundTrip] = {
    "swap": RoundTrip("swapped out to host memory and back in", "bytes", partial(_through_swap, disk=False)),
    "swap-disk": RoundTrip("swapped out to disk and back in", "bytes", partial(_through_swap, disk=True)),
    "prefix-ram": RoundTrip("a prefix read from the RAM store", "tokens", partial(_through_prefix_cache, disk=False)),
    "prefix-disk": RoundTrip(
        "a prefix read from the disk store in a new engine", "tokens", partial(_through_prefix_cache, disk=True)
    ),
    "session": RoundTrip("saved as a session and restored in a new engine", "tokens", _through_session),
    "offload": RoundTrip("offloaded to host memory", "bytes", partial(_through_offload, disk=False)),
    "offload-disk": RoundTrip("offloaded to disk", "bytes", partial(_through_offload, disk=True)),
}


class _AlwaysSwap(scheduling.preemption.SwapCostModel):
    """Copying is always cheaper than recomputing."""

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        return True


def _run_first_samples(run: ReplayEngine, *, from_middle: bool = False) -> None:
    """Submit the first sample of all streams and run to the end."""
    for index in range(len(run.streams)):
        run.submit(index, start=run.middle(index) if from_middle else None)
    run.run()


# ---------------------------------------------------------------- beam search

MAX_BEAM_TOKENS = 8  # of a beam: each step adds beams that the reference computes


class BeamSpan(NamedTuple):
    """Logits of a computed span, ``tokens`` up to its end."""

    stream: int
    tokens: tuple[int, ...]
    regime: int  # rotary regime; a beam that exceeds the original length is recomputed in another one
    logits: Tensor

    def is_part_of(self, other: BeamSpan) -> bool:
        """Return True if the other span continues this one."""
        return self.regime == other.regime and other.tokens[: len(self.tokens)] == self.tokens


class BeamRun(NamedTuple):
    """Logits of a search by sequence number, and the sequences that the reference computes."""

    replay: ReplayResult
    sequences: list[WholeSequence]


class _SpanRunner(ModelRunner):
    """Computes the logits of every position, and records them with their tokens."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.model, engine.kv_cache)
        self.spans: list[BeamSpan] = []

    def execute(self, output: SchedulerOutput) -> Tensor:
        logits, first, requested = super().execute(benchmarks.scorers.with_all_logits(output)), 0, list[int]()
        for scheduled in output.scheduled:
            tokens = tuple(scheduled.sequence.token_ids[: scheduled.start + scheduled.num_tokens])
            part = logits[first : first + scheduled.num_tokens].cpu()
            self.spans.append(BeamSpan(scheduled.sequence.request_id, tokens, scheduled.sequence.rope_regime, part))
            requested += [first + offset for offset in scheduled.logit_offsets]
            first += scheduled.num_tokens
        return logits[requested]


def run_beams(
    model: Transformer,
    cache: CacheConfig,
    streams: Sequence[ReplayStream],
    num_beams: int,
    config: EngineConfig,
    prepare: PrepareEngine = in_one_process,
) -> BeamRun:
    """Search from each stream's prompt with ``num_beams`` beams; ``prepare`` divides the engine among ranks.

    Raises:
        ConfigError, RequestError: If the engine does not support it.
    """
    cache = replace(cache, max_num_seqs=max(num_beams, cache.max_num_seqs), num_blocks=None)
    model, config = prepare(model, cache, config)
    engine = Engine(model, cache, config)
    runner = engine.runner = _SpanRunner(engine)
    counts = [min(MAX_BEAM_TOKENS, len(stream.forced_tokens[0])) for stream in streams]
    try:
        for stream, count in zip(streams, counts, strict=True):
            sampling = SamplingParams(max_tokens=count, temperature=0, num_beams=num_beams, ignore_eos=True)
            engine.add_request(stream.prompt, sampling, encoder_token_ids=stream.source, cache_salt=stream.salt)
        benchmarks.scorers.run_engine(engine)
    finally:
        engine.close()
    sequences, run = list[WholeSequence](), ReplayResult({})
    for index, stream in enumerate(streams):
        spans = [span for span in runner.spans if span.stream == index]
        longest = list[BeamSpan]()
        for span in sorted(spans, key=lambda span: (-len(span.tokens), span.tokens)):
            if not any(span.is_part_of(other) for other in longest):
                longest.append(span)
        for span in spans:
            number = next(n for n, other in enumerate(longest, len(sequences)) if span.is_part_of(other))
            run.pieces.setdefault((number, 0), []).append((len(span.tokens) - len(span.logits), span.logits))
        sequences += [WholeSequence(span.tokens, stream.source) for span in longest]
    return BeamRun(run, sequences)
