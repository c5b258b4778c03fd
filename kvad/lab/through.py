"""Rows that leave the cache and come back (parked, from a tier, from a session, spilled): their logits on the way.

Real engines are driven, over tokens that are known: what may come next is one token (``Sampling.allowed``), and the
runner notes the logits of every position that it computes.  So a row that has been away can be laid beside the judge of
:mod:`kvad.lab.verify`, position by position, like one that has not.

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

from kvad.cache.policy import Spilled
from kvad.cache.session import load_state, save_state
from kvad.cache.sizing import CacheConfig
from kvad.cache.state import State
from kvad.engine.costs import Costs
from kvad.engine.engine import Engine
from kvad.engine.request import Sampling
from kvad.engine.runner import Runner
from kvad.engine.scheduler import Plan
from kvad.errors import EngineError, UsageError, nearest
from kvad.lab.replay import Key, Replayed, Stream
from kvad.model.transformer import Transformer

__all__ = ["WAYS", "Went", "check_way", "through"]

PLENTY = 1 << 40  # bytes of host memory: no bound
AWAY = 2  # times that each row is parked
EVERY = 3  # steps between two that are


@dataclass(frozen=True)
class Way:
    """``moved``: what is counted of it."""

    what: str
    moved: str


WAYS: dict[str, Way] = {
    "park": Way("parked in host memory, and woken", "bytes"),
    "park-disk": Way("parked on disk, and woken", "bytes"),
    "ram": Way("a prefix from the tier in host memory", "tokens"),
    "disk": Way("a prefix from the tier on disk, in a new engine", "tokens"),
    "session": Way("saved as a session, and restored in a new engine", "tokens"),
    "spill": Way("spilled to host memory", "bytes"),
    "spill-disk": Way("spilled to disk", "bytes"),
}


@dataclass(frozen=True)
class Went:
    """``replayed``: the logits of what was computed after, or between, the absences; ``missed``: why a row that was to
    come back was computed instead."""

    replayed: Replayed
    moved: int
    missed: str = ""


def check_way(name: str) -> None:
    """UsageError for what is none of :data:`WAYS`."""
    if name not in WAYS:
        raise UsageError(f"--through: {name!r} is no way of leaving and coming back", nearest(name, WAYS))


def through(
    way: str,
    model: Transformer,
    cache: CacheConfig,
    streams: Sequence[Stream],
    folder: Path,
    *,
    other: CacheConfig | None = None,
) -> Went:
    """Send each stream's first sample that way.

    ``folder``: for files, new ones; ``other``: the cache that a session is restored in, and a prefix from disk found by
    (default: the same).  ConfigError, RequestError, EntryError: this memory cannot do it, in the product's words.
    """
    check_way(way)
    if way.startswith("park"):
        return _parked(way, model, cache, streams, folder)
    if way == "session":
        return _restored(model, cache, other or cache, streams, folder)
    if way.startswith("spill"):
        return _spilled(way, model, cache, streams, folder)
    return _from_tier(way, model, cache, other or cache, streams, folder)


# ---------------------------------------------------------------- the ways


def _parked(way: str, model: Transformer, cache: CacheConfig, streams: Sequence[Stream], folder: Path) -> Went:
    """Rows give way in turn."""
    ram = PLENTY if way == "park" else 0
    rows = _Rows(
        model, replace(cache, park_ram=ram), streams, park_dir=folder if way == "park-disk" else None, costs=_Always()
    )
    with rows:
        requests = [rows.submit(number) for number in range(len(streams))]
        left = dict.fromkeys(requests, AWAY)

        def between(step: int) -> None:
            turn = [request for request in left if left[request]]
            if step % EVERY == EVERY - 1 and turn:
                request = min(turn, key=lambda each: (-left[each], each))
                left[request] -= rows.engine.scheduler.preempt(request)

        rows.run(between)
        told = rows.engine.swaps.stats()
    return Went(rows.replayed, told.swapped_bytes if (told.to_disk if way == "park-disk" else told.to_ram) else 0)


def _from_tier(
    way: str, model: Transformer, cache: CacheConfig, other: CacheConfig, streams: Sequence[Stream], folder: Path
) -> Went:
    """Each row once, for the tier; then its whole blocks are known, and it goes on behind them."""
    given: dict[str, Any] = {"tier_ram": PLENTY} if way == "ram" else {"tier": str(folder / "tier")}
    longest = max(stream.limit for stream in streams)
    given |= {"prefix": True, "blocks": None, "rows": min(2, cache.rows), "capacity": min(cache.capacity, longest)}
    first = again = _Rows(model, replace(cache, **given), streams)
    with first:
        for number in range(len(streams)):
            first.submit(number)
        first.run()
        if way == "ram":
            first.crowd(replace(cache, **given))
            first.pieces.clear()
            _twice(again)
    if way == "disk":
        again = _Rows(model, replace(other, **given), streams)
        with again:
            _twice(again)
    deposits = again.engine.ledger.deposits
    tokens = 0 if deposits is None else deposits.hits.tokens[way]
    missed = "" if deposits is None or tokens else ", ".join(deposits.hits.misses)
    return Went(again.replayed, tokens, missed)


def _twice(rows: _Rows) -> None:
    for number in range(len(rows.streams)):
        rows.submit(number, from_=rows.middle(number))
    rows.run()


def _restored(
    model: Transformer, cache: CacheConfig, other: CacheConfig, streams: Sequence[Stream], folder: Path
) -> Went:
    """Every row to its middle, in company; then all of them from their files, in company again."""
    first = _Rows(model, cache, streams)
    with first:
        requests = {first.submit(number, keep=True): number for number in range(len(streams))}

        def between(step: int) -> None:
            for request, number in requests.items():
                rows = first.engine.scheduler.rows(request)
                if rows and rows[0].state != "done" and len(rows[0].tokens) >= first.middle(number):
                    first.engine.scheduler.finish(request, 0)
                    first.engine.keeper.collect(first.engine.scheduler.left())

        first.run(between)
        for request, number in requests.items():
            first.save(first.engine.kept(request), folder / f"{number}.session")
    second = _Rows(model, other, streams)
    with second:
        again = [
            second.submit(number, from_=second.middle(number), resume=second.load(folder / f"{number}.session"))
            for number in range(len(streams))
        ]
        second.run()
        usages = [second.engine.usage(request) for request in again]
    missed = ", ".join(dict.fromkeys(usage.missed for usage in usages if usage.missed))
    return Went(second.replayed, sum(usage.cached for usage in usages), missed)


def _spilled(way: str, model: Transformer, cache: CacheConfig, streams: Sequence[Stream], folder: Path) -> Went:
    """A quarter of the longest row stays in the pool."""
    ram = PLENTY if way == "spill" else 0
    given: dict[str, Any] = {"spill_ram": ram, "spill_dir": str(folder)}
    if not isinstance(cache.kept, Spilled):
        longest, size = max(stream.limit for stream in streams), cache.block_size
        given |= {"on_full": "spill", "capacity": max(2 * size, longest // 4), "blocks": None}
    rows = _Rows(model, replace(cache, **given), streams)
    with rows:
        for number in range(len(streams)):
            rows.submit(number)
        rows.run()
        spill = rows.engine.memory.spill
        told = None if spill is None else spill.stats()
    if told is None:
        return Went(rows.replayed, 0)
    return Went(rows.replayed, told.from_ram if way == "spill" else told.from_disk)


# ---------------------------------------------------------------- an engine, over known tokens


class _Always(Costs):
    """Copying is cheaper than computing, whatever was measured."""

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        return True


class _Noting(Runner):
    """Computes the logits of every position, notes them, and gives those that were wanted."""

    note: Callable[[int, int, Tensor], None]

    def run(self, plan: Plan) -> Tensor:
        every = tuple(work._replace(wanted=range(work.count)) for work in plan.work)
        logits = super().run(plan._replace(work=every))
        at, wanted = 0, []
        for work in plan.work:
            self.note(work.row.request, work.start, logits[at : at + work.count])
            wanted += [at + each for each in work.wanted]
            at += work.count
        return logits[wanted]


class _Rows:
    """An engine for some streams, closed at the end of its ``with``."""

    def __init__(self, model: Transformer, cache: CacheConfig, streams: Sequence[Stream], **options: Any) -> None:
        self.streams, self.pieces = streams, dict[Key, list[tuple[int, Tensor]]]()
        self.engine = Engine(model, cache, budget=cache.chunk + cache.rows, **options)
        self._streams: dict[int, int] = {}  # by request
        noting = _Noting(model, self.engine.memory)
        noting.note = self._note
        self.engine.runner = noting

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    @property
    def replayed(self) -> Replayed:
        return Replayed(self.pieces)

    def middle(self, number: int) -> int:
        """Tokens of a stream of which half of what it generates is there."""
        stream = self.streams[number]
        return len(stream.prompt) + len(stream.forced[0]) // 2

    def submit(self, number: int, *, from_: int | None = None, **options: Any) -> int:
        """A stream's first sample, from its prompt or from so many of its tokens on; the request's number."""
        stream = self.streams[number]
        whole = (*stream.prompt, *stream.forced[0])
        start = len(stream.prompt) if from_ is None else from_
        sampling = Sampling(max_tokens=len(whole) - start, ignore_eos=True, allowed=lambda so_far: [whole[len(so_far)]])
        request = self.engine.submit(whole[:start], sampling, source=stream.source, **options)
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
        vocab = self.engine.model.config.vocab
        longest = max(self.streams, key=lambda each: each.limit)
        for turn in range(cache.rows):
            tokens = [(token + 1 + turn) % vocab for token in (*longest.prompt, *longest.forced[0])]
            self.engine.submit(tokens[:-1], Sampling(max_tokens=1), source=longest.source)
        self.run()

    def save(self, state: State, path: Path) -> None:
        save_state(path, state, self.engine.identity(state.regime, salt=state.salt), state.tokens, {})

    def load(self, path: Path) -> State:
        engine = self.engine
        return load_state(
            path, lambda regime, salt: engine.identity(regime, salt=salt), engine.memory, engine.keeper.home
        ).state

    def _note(self, request: int, start: int, logits: Tensor) -> None:
        if request in self._streams:
            self.pieces.setdefault((self._streams[request], 0), []).append((start, logits))
