"""Where a memory first differs from the judge, and what that looks like: evidence in, the name of a fault out.

:func:`diagnose` runs the replay again, watching every layer.  In the order of time, layer by layer and row by row, it
compares what the memory attended with (q, the keys and values at every visible place, who is visible, the output) with
what the judge computed for the same tokens (:mod:`kvad.verify.mismatch`), and asks at the first difference which fault
explains it (:mod:`kvad.verify.mismatch_signatures`).  It never asks which fault was injected.  An unhurt memory has no first
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from kvad import ops
from kvad.cache import CacheConfig, CacheGroup, build_groups
from kvad.cache.device import KVCache
from kvad.config import attention_specs
from kvad.engine.execution import ManagedCache
from kvad.engine.scheduling import SchedulerOutput
from kvad.model import Transformer
from kvad.verify.mismatch import (
    AttentionCall,
    ComparisonContext,
    ExpectedLayout,
    Mismatch,
    RecordedLayer,
    RecordingKVCache,
    expected_rows,
    reference_layers,
)
from kvad.verify.mismatch_signatures import explain_mismatch
from kvad.verify.replay import ReplayStream, SequenceKey, replay_streams
from kvad.verify.report import MismatchFinding

BuildMemory = Callable[[Sequence[CacheGroup], ops.sub_batch.AttentionHook], KVCache]
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4}  # relative to the largest element, when nothing is rounded


def diagnose(
    model: Transformer,
    config: CacheConfig,
    streams: Sequence[ReplayStream],
    build: BuildMemory,
    *,
    squeezes: int = 0,
    lossy: bool = False,
) -> MismatchFinding | None:
    """The first difference of ``build``'s memory from ``model`` without one (under the masks of ``config.policy``),
    named; None where there is none.

    ``lossy``: only what the formats do not excuse: layer 0's keys and values beyond their rounding, and gross
    ones (an overflow) further up, where rounding has spread.
    """
    inspector = _Inspector(model, config, streams, build, lossy)
    try:
        replay_streams(
            model, config, streams, squeezes=squeezes, make=inspector.make, watch=inspector.enter, keep=False
        )
    except _Found as found:
        return found.finding
    return None


class _Found(Exception):
    def __init__(self, finding: MismatchFinding) -> None:
        super().__init__(finding.evidence)
        self.finding = finding


class _Inspector:
    """Compares every call with the judge's and stops the replay at the first difference."""

    plan: SchedulerOutput
    world: ComparisonContext

    def __init__(
        self,
        model: Transformer,
        config: CacheConfig,
        streams: Sequence[ReplayStream],
        build: BuildMemory,
        lossy: bool,
    ) -> None:
        self.model, self.config, self.streams, self.build = model, config, streams, build
        self.lossy = lossy
        specs = config.restrict(attention_specs(model.config))
        self.judge: Mapping[SequenceKey, list[RecordedLayer]] = {
            (number, sample): reference_layers(model, stream, sample, specs, config.endless)
            for number, stream in enumerate(streams)
            for sample in range(len(stream.forced_tokens))
        }

    def make(self, placed: Sequence[CacheGroup]) -> ManagedCache:
        """The memory that the replay runs on, watched."""
        watched = RecordingKVCache(self.look)
        memory = self.build(placed, watched.attention_hook)
        close = CLOSE[next(iter(self.judge.values()))[0].q.dtype]
        books = ExpectedLayout(build_groups(attention_specs(self.model.config), self.config))
        self.world = ComparisonContext(
            self.model, self.streams, self.judge, memory, books, close, self.config.token_formats, self.lossy
        )
        return watched.attach(memory)

    def enter(self, plan: SchedulerOutput) -> None:
        self.plan = plan
        self.world.expected_layout.apply(plan)

    def look(self, call: AttentionCall) -> None:
        books = self.world.expected_layout
        group = next(number for number, g in enumerate(books.groups) if call.layer in g.layers)
        for row in expected_rows(self.plan, books, group, call.seen):
            case = Mismatch(self.world, call, row)
            where = case.first_difference()
            if where is not None:
                what, position, size = where
                fault, evidence = explain_mismatch(case)
                stored = self.config.format_name
                raise _Found(MismatchFinding(fault, call.layer, *row.key, position, what, size, evidence, stored))
