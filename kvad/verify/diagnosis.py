"""Finds the first difference between a cached and an uncached run and names the fault.

:func:`diagnose` repeats the replay and records every layer. In the order of time, layer by layer and sequence by
sequence, it compares what the cache attended with (q, keys and values of every visible slot, visibility, the output)
with what the reference computed for the same tokens (:mod:`kvad.verify.mismatch`). At the first difference it
determines which fault explains it (:mod:`kvad.verify.mismatch_signatures`). It never uses which fault was injected.
A correct cache has no first difference.
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

BuildCache = Callable[[Sequence[CacheGroup], ops.sub_batch.AttentionHook], KVCache]
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4}  # relative to the largest element, if nothing is rounded


def diagnose(
    model: Transformer,
    config: CacheConfig,
    streams: Sequence[ReplayStream],
    build: BuildCache,
    *,
    squeezes: int = 0,
    lossy: bool = False,
) -> MismatchFinding | None:
    """Find and name the first difference between a cache and the uncached model under ``config.policy``'s masks.

    Args:
        build: Makes the cache from its groups and an attention hook.
        squeezes: Number of preemptions to force.
        lossy: Report only what the formats do not explain: errors of layer 0's keys and values beyond their
            rounding, and gross ones (an overflow) in later layers, to which rounding has spread.

    Returns:
        The finding, or None if nothing differs.
    """
    inspector = _Inspector(model, config, streams, build, lossy)
    try:
        replay_streams(
            model, config, streams, squeezes=squeezes, make=inspector.make, watch=inspector.on_scheduled, keep=False
        )
    except _MismatchFound as error:
        return error.finding
    return None


class _MismatchFound(Exception):
    def __init__(self, finding: MismatchFinding) -> None:
        super().__init__(finding.evidence)
        self.finding = finding


class _Inspector:
    """Compares every call with the reference and stops the replay at the first difference."""

    output: SchedulerOutput
    context: ComparisonContext

    def __init__(
        self, model: Transformer, config: CacheConfig, streams: Sequence[ReplayStream], build: BuildCache, lossy: bool
    ) -> None:
        self.model, self.config, self.streams, self.build = model, config, streams, build
        self.lossy = lossy
        specs = config.restrict(attention_specs(model.config))
        self.reference: Mapping[SequenceKey, list[RecordedLayer]] = {
            (index, sample): reference_layers(model, stream, sample, specs, config.endless)
            for index, stream in enumerate(streams)
            for sample in range(len(stream.forced_tokens))
        }

    def make(self, groups: Sequence[CacheGroup]) -> ManagedCache:
        """Build the recorded cache that the replay runs on."""
        recorder = RecordingKVCache(self.compare)
        kv_cache = self.build(groups, recorder.attention_hook)
        close = CLOSE[next(iter(self.reference.values()))[0].q.dtype]
        layout = ExpectedLayout(build_groups(attention_specs(self.model.config), self.config))
        self.context = ComparisonContext(
            self.model, self.streams, self.reference, kv_cache, layout, close, self.config.token_formats, self.lossy
        )
        return recorder.attach(kv_cache)

    def on_scheduled(self, output: SchedulerOutput) -> None:
        self.output = output
        self.context.expected_layout.apply(output)

    def compare(self, call: AttentionCall) -> None:
        layout = self.context.expected_layout
        group = next(index for index, g in enumerate(layout.groups) if call.layer in g.layers)
        for seq_row in expected_rows(self.output, layout, group, call.seen):
            mismatch = Mismatch(self.context, call, seq_row)
            difference = mismatch.first_difference()
            if difference is not None:
                tensor, position, size = difference
                fault, evidence = explain_mismatch(mismatch)
                stored = self.config.format_name
                raise _MismatchFound(
                    MismatchFinding(fault, call.layer, *seq_row.key, position, tensor, size, evidence, stored)
                )
