"""Where a memory first differs from the judge, and what that looks like: evidence in, the name of a fault out.

:func:`diagnose` runs the replay again, watching every layer.  In the order of time, layer by layer and row by row, it
compares what the memory attended with (q, the keys and values at every visible place, who is visible, the output) with
what the judge computed for the same tokens (:mod:`kvad.lab.case`), and asks at the first difference which fault
explains it (:mod:`kvad.lab.hypotheses`).  It never asks which fault was injected.  An unhurt memory has no first
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from kvad.cache.memory import Memory
from kvad.cache.sizing import CacheConfig, Group, groups
from kvad.config import mixers
from kvad.engine.runner import Cache
from kvad.engine.scheduler import Plan
from kvad.lab.case import Case, World
from kvad.lab.findings import Finding
from kvad.lab.hypotheses import explain
from kvad.lab.replay import Key, Stream, replay
from kvad.lab.watch import Books, Call, Layer, WatchedCache, judge_layers, told
from kvad.model.transformer import Transformer
from kvad.ops.lanes import Probe

__all__ = ["BuildMemory", "diagnose"]

BuildMemory = Callable[[Sequence[Group], Probe], Memory]
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4}  # relative to the largest element, when nothing is rounded


def diagnose(
    model: Transformer,
    config: CacheConfig,
    streams: Sequence[Stream],
    build: BuildMemory,
    *,
    squeezes: int = 0,
    lossy: bool = False,
) -> Finding | None:
    """The first difference of ``build``'s memory from ``model`` without one (under the masks of ``config.policy``),
    named; None where there is none.

    ``lossy``: only what the formats do not excuse: layer 0's keys and values beyond their rounding, and gross
    ones (an overflow) further up, where rounding has spread.
    """
    inspector = _Inspector(model, config, streams, build, lossy)
    try:
        replay(model, config, streams, squeezes=squeezes, make=inspector.make, watch=inspector.enter, keep=False)
    except _Found as found:
        return found.finding
    return None


class _Found(Exception):
    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.evidence)
        self.finding = finding


class _Inspector:
    """Compares every call with the judge's and stops the replay at the first difference."""

    plan: Plan
    world: World

    def __init__(
        self,
        model: Transformer,
        config: CacheConfig,
        streams: Sequence[Stream],
        build: BuildMemory,
        lossy: bool,
    ) -> None:
        self.model, self.config, self.streams, self.build = model, config, streams, build
        self.lossy = lossy
        specs = config.narrowed(mixers(model.config))
        self.judge: Mapping[Key, list[Layer]] = {
            (number, sample): judge_layers(model, stream, sample, specs, config.endless)
            for number, stream in enumerate(streams)
            for sample in range(len(stream.forced))
        }

    def make(self, placed: Sequence[Group]) -> Cache:
        """The memory that the replay runs on, watched."""
        watched = WatchedCache(self.look)
        memory = self.build(placed, watched.probe)
        close = CLOSE[next(iter(self.judge.values()))[0].q.dtype]
        books = Books(groups(mixers(self.model.config), self.config))
        self.world = World(self.model, self.streams, self.judge, memory, books, close, self.config.formats, self.lossy)
        return watched.hold(memory)

    def enter(self, plan: Plan) -> None:
        self.plan = plan
        self.world.books.enter(plan)

    def look(self, call: Call) -> None:
        books = self.world.books
        group = next(number for number, g in enumerate(books.groups) if call.layer in g.layers)
        for row in told(self.plan, books, group, call.seen):
            case = Case(self.world, call, row)
            where = case.first_difference()
            if where is not None:
                what, position, size = where
                fault, evidence = explain(case)
                stored = self.config.stored
                raise _Found(Finding(fault, call.layer, *row.key, position, what, size, evidence, stored))
