"""Tokens that are already known, sent through the real path: Scheduler, Ledger, Memory, Runner.

``replay`` forces every sampled token, so what comes back can be laid beside :func:`uncached` position by position,
also after the first disagreement.  It adds no path of its own: chunks, lanes, hits, forks and preemptions are the
scheduler's, and :class:`Happened` counts them, so that a scenario that did not take place cannot pass for tested.

A preemption is brought about where it is decided: by a ledger that says, now and then, that a pool is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvad.cache.ledger import Ledger, Placed, Span
from kvad.cache.memory import Memory
from kvad.cache.sizing import CacheConfig, Group, groups
from kvad.config import mixers
from kvad.engine.request import Result, Sampling
from kvad.engine.runner import Cache, Runner
from kvad.engine.scheduler import Plan, Scheduler, Usage, Work
from kvad.model.fresh import Fresh
from kvad.model.transformer import Transformer
from kvad.step import Lane, Step
from kvad.step import Memory as MemoryProtocol

__all__ = ["Happened", "Key", "MakeCache", "Replayed", "Stream", "key_of", "replay", "uncached", "whole_row"]

Key = tuple[int, int]  # (stream, sample)
MakeCache = Callable[[Sequence[Group]], Cache]
ENDLESS = 1 << 40  # tokens of a row without a limit
SQUEEZE_EVERY = 4  # steps of at least two rows between two refusals of the ledger


class Stream(NamedTuple):
    """One request.  ``forced``: per sample, the tokens that are generated, equally many each; ``follows``: submit it
    only when that stream has its first token, so that it can hit the prompt's blocks and prefill beside decoding.
    ``source``: what the encoder of an encoder-decoder reads."""

    prompt: tuple[int, ...]
    forced: tuple[tuple[int, ...], ...]
    follows: int | None = None
    source: tuple[int, ...] | None = None

    @property
    def limit(self) -> int:
        """What the scheduler lets the row reach: it decides the rotary regime."""
        return len(self.prompt) + len(self.forced[0])

    def tokens(self, sample: int) -> tuple[int, ...]:
        """All that is computed: the last forced token is sampled, never fed."""
        return (*self.prompt, *self.forced[sample][:-1])


@dataclass
class Happened:
    """What a replay really did.  ``chunks``: spans that ended inside a prompt; ``mixed``: steps with decoding and
    prefilling rows together; ``recomputed``: tokens computed again after a preemption; ``hit_tokens``: prompt tokens
    that a row found in the cache when it was first seated; ``longest``: the longest row, in tokens; ``encoded``:
    sources that the encoder read."""

    rows: int = 0
    steps: int = 0
    tokens: int = 0
    chunks: int = 0
    mixed: int = 0
    preemptions: int = 0
    recomputed: int = 0
    hit_tokens: int = 0
    forks: int = 0
    longest: int = 0
    encoded: int = 0


@dataclass(frozen=True)
class Replayed:
    """``pieces``: per row (first position, logits [n, V]) of each span in the order of time, recomputed ones too."""

    pieces: dict[Key, list[tuple[int, Tensor]]]
    happened: Happened = field(default_factory=Happened)

    def logits(self, stream: int, sample: int = 0) -> Tensor:
        """[T, V] as last computed; NaN at positions that a prefix hit or a fork made needless."""
        pieces = self.pieces[stream, sample]
        length = max(start + len(part) for start, part in pieces)
        out = pieces[0][1].new_full((length, pieces[0][1].shape[-1]), torch.nan)
        for start, part in pieces:
            out[start : start + len(part)] = part
        return out


def replay(
    model: Transformer,
    config: CacheConfig,
    streams: Sequence[Stream],
    *,
    squeezes: int = 0,
    budget: int | None = None,
    make: MakeCache | None = None,
    watch: Callable[[Plan], None] | None = None,
    keep: bool = True,
) -> Replayed:
    """Run ``streams`` to their end and give the logits of every position that was computed.

    ``config.rows`` seats; ``squeezes``: preemptions to force, beside those of a small pool (``config.blocks``);
    ``budget``: tokens per step (default: a chunk, and one per seat); ``make`` builds the memory (default: the real
    one, which rotates as ``config`` says); ``watch`` sees every plan before it is run; ``keep=False`` drops the logits.
    The scheduler's and the ledger's invariants are checked after every step.
    """
    placed = groups(mixers(model.config), config)
    cache = (make or partial(Memory, rotate=config.rotate, exact=config.endless))(placed)
    runner = Runner(model, cache)
    ledger = _Squeezing(placed, prefix=config.prefix, seats=config.rows, squeezes=squeezes)
    limit = ENDLESS if config.endless else min(model.config.limit, config.capacity)
    scheduler = Scheduler(
        ledger, rows=config.rows, budget=budget or config.chunk + config.rows, chunk=config.chunk, limit=limit
    )
    happened = Happened(rows=sum(len(stream.forced) for stream in streams))
    driver = _Driver(runner, scheduler, streams, Replayed({}, happened))
    while not driver.step(watch, keep):
        scheduler.check()
    happened.preemptions = scheduler.stats().preemptions
    happened.forks = ledger.forks
    happened.hit_tokens = sum(usage.cached for usage in driver.usages)
    return driver.replayed


@torch.inference_mode()
def uncached(
    model: Transformer,
    tokens: Sequence[int],
    limit: int | None = None,
    memory: MemoryProtocol | None = None,
    source: Sequence[int] | None = None,
) -> Tensor:
    """[T, V]: what the model says of the whole sequence with no cache.  ``limit``: what the row may reach."""
    step = whole_row(model, tokens, limit)
    if source is not None:
        step = step._replace(source=whole_row(model, source))
    return model.logits(model(step, memory or Fresh(model.config)), step.wanted)


def whole_row(model: Transformer, tokens: Sequence[int], limit: int | None = None) -> Step:
    """One row from its first token on, all of its logits wanted."""
    flat = torch.tensor(tokens, dtype=torch.int64, device=model.table.device)
    every = torch.arange(len(tokens), device=flat.device)
    limits = torch.full_like(every, len(tokens) if limit is None else limit)
    return Step(flat, every, (Lane(1, len(tokens), len(tokens)),), every, limits=limits)


def key_of(work: Work) -> Key:
    return work.row.request, work.row.sample


class _Squeezing(Ledger):
    """The ledger, that refuses a step of two rows or more every few steps; it counts forks too."""

    def __init__(self, placed: Sequence[Group], *, prefix: bool, seats: int, squeezes: int) -> None:
        super().__init__(placed, prefix=prefix, seats=seats)
        self.forks = 0
        self._squeezes, self._calm = squeezes, 0

    def reserve(self, spans: Sequence[Span] | Sequence[tuple[int, int, int]]) -> Placed | None:
        if self._squeezes and len(spans) > 1 and all(self.length(span[0]) for span in spans):
            self._calm += 1
            if self._calm > SQUEEZE_EVERY:
                self._calm = 0
                self._squeezes -= 1
                return None
        return super().reserve(spans)

    def fork(self, row: int, child: int, length: int) -> bool:
        done = super().fork(row, child, length)
        self.forks += done
        return done


class _Driver:
    """Submits, steps, forces tokens and collects logits."""

    def __init__(self, runner: Runner, scheduler: Scheduler, streams: Sequence[Stream], replayed: Replayed) -> None:
        self.runner, self.scheduler, self.streams, self.replayed = runner, scheduler, streams, replayed
        self._waiting = set(range(len(streams)))
        self._begun: set[int] = set()
        self._reached: dict[Key, int] = {}
        self.usages: list[Usage] = []
        self._submit()

    def _submit(self) -> None:
        for number in sorted(self._waiting):
            stream = self.streams[number]
            if stream.follows is None or stream.follows in self._begun:
                self._waiting.remove(number)
                count = len(stream.forced[0])
                assert count and all(len(forced) == count for forced in stream.forced), "samples of unequal lengths"
                sampling = Sampling(max_tokens=count, temperature=0, n=len(stream.forced))
                root = f"{self.runner.regime(stream.limit)} {stream.source}".encode()
                self.usages.append(self.scheduler.add(number, stream.prompt, sampling, root, source=stream.source))

    def step(self, watch: Callable[[Plan], None] | None, keep: bool) -> bool:
        """One plan; True when nothing is left."""
        plan = self.scheduler.plan()
        if plan is None:
            assert self.scheduler.idle and not self._waiting, "the scheduler stands still"
            return True
        if plan.encoding is not None:
            self.runner.encode(plan.encoding)
            self.replayed.happened.encoded += len(plan.encoding.rows)
            self.scheduler.settle(plan, [Result()] * len(plan.encoding.rows))
            return False
        if watch is not None:
            watch(plan)
        every = tuple(work._replace(wanted=range(work.count)) for work in plan.work)
        logits = self.runner.run(plan._replace(work=every))
        self._collect(plan, logits, keep)
        results = [Result(self._forced(work)) if work.samples else Result() for work in plan.work]
        for event in self.scheduler.settle(plan, results):
            assert event.error is None, event.error
            self._begun.add(event.request)
        self._submit()
        return False

    def _forced(self, work: Work) -> int:
        return self.streams[work.row.request].forced[work.row.sample][work.row.generated]

    def _collect(self, plan: Plan, logits: Tensor, keep: bool) -> None:
        happened, at = self.replayed.happened, 0
        happened.steps += 1
        decoding = [work.start >= work.row.prompt_len for work in plan.work]
        happened.mixed += any(decoding) and not all(decoding)
        for work in plan.work:
            key, end = key_of(work), work.start + work.count
            reached = self._reached.get(key, 0)
            happened.tokens += work.count
            happened.recomputed += max(0, min(end, reached) - work.start)
            happened.chunks += end < work.row.prompt_len
            happened.longest = max(happened.longest, end)
            self._reached[key] = max(reached, end)
            if keep:
                self.replayed.pieces.setdefault(key, []).append((work.start, logits[at : at + work.count]))
            at += work.count
