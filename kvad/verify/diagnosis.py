"""Finds the first difference between a cached and an uncached run and names the fault.

``diagnose`` repeats the replay and records every layer. In the order of time, layer by layer and sequence by
sequence, it compares what the cache attended with (q, keys and values of every visible slot, visibility, the output)
with what the reference computed for the same tokens (``kvad.verify.mismatch``). At the first difference it
determines which fault explains it (``kvad.verify.mismatch_signatures``). It never uses which fault was injected.
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
    specs = config.restrict(attention_specs(model.config))
    reference: Mapping[SequenceKey, list[RecordedLayer]] = {
        (index, sample): reference_layers(model, stream, sample, specs, config.endless)
        for index, stream in enumerate(streams)
        for sample in range(len(stream.forced_tokens))
    }
    close = CLOSE[next(iter(reference.values()))[0].q.dtype]
    layout = ExpectedLayout(build_groups(attention_specs(model.config), config))
    recorder: RecordingKVCache
    latest: SchedulerOutput

    def make(groups: Sequence[CacheGroup]) -> ManagedCache:
        nonlocal recorder
        recorder = RecordingKVCache(compare, lambda hook: build(groups, hook))
        return recorder

    def on_scheduled(output: SchedulerOutput) -> None:
        nonlocal latest
        latest = output
        layout.apply(output)

    def compare(call: AttentionCall) -> None:
        """Stop the replay at the first difference."""
        context = ComparisonContext(
            model, streams, reference, recorder.inner, layout, close, config.token_formats, lossy
        )
        group = next(index for index, g in enumerate(layout.groups) if call.layer in g.layers)
        for row in expected_rows(latest, layout, group, call.seen):
            mismatch = Mismatch(context, call, row)
            difference = mismatch.first_difference()
            if difference is not None:
                tensor, position, size = difference
                fault, evidence = explain_mismatch(mismatch)
                raise _MismatchFound(
                    MismatchFinding(
                        fault, call.layer, *row.key, position, tensor, size, evidence, stored=config.format_name
                    )
                )

    try:
        replay_streams(model, config, streams, squeezes=squeezes, make=make, watch=on_scheduled, keep=False)
    except _MismatchFound as error:
        return error.finding
    return None


class _MismatchFound(Exception):
    def __init__(self, finding: MismatchFinding) -> None:
        super().__init__(finding.evidence)
        self.finding = finding
