"""Finds the first difference between a cached and an uncached run and names the fault.

``diagnose`` repeats the replay and records every layer. In the order of time, layer by layer and sequence by
sequence, it compares what the cache attended with (q, keys and values of every visible slot, visibility, the output)
with what the reference computed for the same tokens (``kvad.verify.mismatch``). At the first difference it
determines which fault explains it (``kvad.verify.signatures``), without using which fault was injected. A correct cache
has no first difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kvad.cache import CacheConfig, build_groups
from kvad.config import attention_specs
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling import SchedulerOutput
from kvad.errors import EngineError
from kvad.model import Transformer
from kvad.verify import mismatch as records
from kvad.verify.mismatch import AttentionCall, ExpectedLayout, Mismatch, RecordingCache
from kvad.verify.reference_model import ReferenceModel
from kvad.verify.replay import ReplayEngine, ReplayStream
from kvad.verify.report import UNKNOWN_FAULT, MismatchFinding
from kvad.verify.signatures import SIGNATURES

CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4}  # relative to the largest element, if nothing is rounded
NOISE_FACTOR = 4  # times the distance of the plain model in the engine's dtype from the float64 reference, per layer


class Subject(NamedTuple):
    """An engine to diagnose: its parts, and the references of its model in float64 and in its own dtype."""

    model: Transformer
    reference: ReferenceModel
    plain: ReferenceModel
    config: EngineConfig = EngineConfig()
    prepare: Callable[[Engine], None] = lambda _engine: None  # called with the engine before it runs


def diagnose(
    subject: Subject, cache: CacheConfig, streams: Sequence[ReplayStream], *, squeezes: int = 0, lossy: bool = False
) -> MismatchFinding | None:
    """Find and name the first difference between an engine and the reference under ``cache.policy``'s masks.

    Args:
        squeezes: Number of preemptions to force.
        lossy: Report only what the formats do not explain: errors of layer 0's keys and values beyond their
            rounding, and gross ones (an overflow) in later layers, to which rounding has spread.
    """
    model = subject.model
    specs = cache.restrict(attention_specs(model.config))
    reference = {
        (index, sample): records.reference_layers(subject.reference, stream, sample, specs, cache.endless)
        for index, stream in enumerate(streams)
        for sample in range(len(stream.forced_tokens))
    }
    noise = [0.0] * len(reference[0, 0])
    if subject.plain.compute_dtype not in CLOSE:  # a half precision: as far off as the plain model is
        plain = records.reference_layers(subject.plain, streams[0], 0, specs, cache.endless)
        noise = [records.relative_gap(*pair) for pair in zip(plain, reference[0, 0], strict=True)]
    close = [max(CLOSE.get(subject.plain.compute_dtype, 0.0), NOISE_FACTOR * gap) for gap in noise]

    latest: SchedulerOutput

    def on_scheduled(output: SchedulerOutput) -> None:
        nonlocal latest
        latest = output
        layout.apply(output)

    def compare(call: AttentionCall) -> None:
        """Stop the replay at the first difference."""
        context = records.ComparisonContext(
            model, subject.reference, streams, reference, recorder.inner, layout, close, cache.token_formats, lossy
        )
        rows = [(trace, row) for trace in call.seen for row in range(len(trace.q))]
        first_token = 0
        for scheduled, (trace, row) in zip(latest.scheduled, rows, strict=True):
            low, first_token = first_token, first_token + scheduled.num_tokens
            if not replay.is_compared(scheduled):
                continue
            mismatch = Mismatch(context, call, scheduled, trace, row, low)
            difference = mismatch.first_difference()
            if difference is not None:
                tensor, position, size = difference
                explanations = filter(None, (test(mismatch) for test in SIGNATURES))
                fault, evidence = next(explanations, (UNKNOWN_FAULT, "no test explains it"))
                where = call.layer, *mismatch.key, position
                raise _Stop(MismatchFinding(fault, *where, tensor, size, evidence, stored=cache.format_name))

    recorder = RecordingCache(compare)

    def prepare(engine: Engine) -> RecordingCache:
        subject.prepare(engine)
        return recorder.wrap(engine.kv_cache)

    config = dataclasses.replace(subject.config, attention_hook=recorder.seen.append, speculative=None)
    with ReplayEngine(model, cache, streams, config, wrap=prepare, watch=on_scheduled) as replay:
        layout = ExpectedLayout(build_groups(attention_specs(model.config), cache), replay.key)
        try:
            replay.run_all(squeezes=squeezes)
        except _Stop as stop:
            finding: MismatchFinding = stop.args[0]
            return finding
        except (EngineError, AssertionError):  # the engine failed before anything differed
            return None
    return None


class _Stop(BaseException):
    """Ends a run whose result is known; it is the only argument."""
