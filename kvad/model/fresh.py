"""Fresh: the memory that forgets.  Every lane row attends to its own new tokens and nothing is kept.

Training, encoders and the uncached judge use it; ``kvad verify`` holds every cache against it.  A source is kept, with
its graph, for the forward pass that it came with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvad.config import MixerSpec, ModelConfig, encoder_mixers, mixers
from kvad.ops.attend import Kernel, Reading
from kvad.ops.lanes import Probe, fold, lane_spans, observe
from kvad.ops.merge import Part
from kvad.ops.rotary import Angles
from kvad.step import Lane, Mark, Reach, Score, Step, View

__all__ = ["Fresh", "FreshEncoder"]


class Fresh:
    """``open`` gives one view per decoder layer and one per cross-attention; layers of equal reach share masks.

    ``specs``: the layers as a cache's policy lets them see (``CacheConfig.narrowed``), to judge that cache by;
    ``exact``: rotary angles in float64, as a cache of rows without an end has them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        specs: Sequence[MixerSpec] | None = None,
        exact: bool = False,
        kernel: Kernel = "auto",
        probe: Probe | None = None,
    ) -> None:
        self._specs = mixers(config) if specs is None else tuple(specs)
        self._exact = exact or any(spec.renumber for spec in self._specs)
        self._kernel, self._probe = kernel, probe

    def open(self, step: Step) -> Sequence[View]:
        own = [spec for spec in self._specs if not spec.cross]
        views = _views(own, step, self._kernel, self._probe, self._exact)
        if step.source is not None:
            first, count = len(own), len(self._specs) - len(own)
            shared = _Crossing(step, step.source)
            views += [_CrossView(first + i, shared, self._kernel, self._probe) for i in range(count)]
        return views


class FreshEncoder:
    """One view per layer of the encoder: it has no other memory than this."""

    def __init__(self, config: ModelConfig, *, kernel: Kernel = "auto", probe: Probe | None = None) -> None:
        self._specs = encoder_mixers(config)
        self._kernel, self._probe = kernel, probe

    def open(self, step: Step) -> Sequence[View]:
        return _views(self._specs, step, self._kernel, self._probe)


def _views(
    specs: Sequence[MixerSpec], step: Step, kernel: Kernel, probe: Probe | None, exact: bool = False
) -> list[View]:
    angles = Angles(step.positions, exact=exact)
    spans = lane_spans(step.lanes)
    readings: dict[Reach, list[Reading]] = {}
    views: list[View] = []
    for index, spec in enumerate(specs):
        reach = Reach.of(spec)
        if reach not in readings:
            marks = [_mark(step, lane, span) for lane, span in zip(step.lanes, spans, strict=True)]
            readings[reach] = [Reading(mark, mark, reach) for mark in marks]
        views.append(_FreshView(index, step.lanes, spans, readings[reach], angles, kernel, probe))
    return views


def _mark(step: Step, lane: Lane, span: tuple[int, int]) -> Mark:
    def cut(flat: Tensor) -> Tensor:
        return flat[span[0] : span[1]].view(lane.rows, lane.new)

    return Mark(*(None if x is None else cut(x) for x in (step.positions, step.documents, step.order)))  # type: ignore[arg-type]


class _FreshView:
    def __init__(
        self,
        layer: int,
        lanes: Sequence[Lane],
        spans: Sequence[tuple[int, int]],
        readings: Sequence[Reading],
        angles: Angles,
        kernel: Kernel,
        probe: Probe | None,
    ) -> None:
        self._layer, self._lanes, self._spans, self._readings = layer, lanes, spans, readings
        self._angles, self._kernel, self._probe = angles, kernel, probe

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: Score) -> Tensor:
        assert k is not None and v is not None, "self-attention brings its own keys and values"
        if score.rotary is not None:
            q, k = self._angles.rotate(q, score.rotary), self._angles.rotate(k, score.rotary)
        outs = []
        for number, (lane, (low, high), reading) in enumerate(
            zip(self._lanes, self._spans, self._readings, strict=True)
        ):
            queries = q[low:high].unflatten(0, (lane.rows, lane.new))
            keys = k[low:high].unflatten(0, (lane.rows, lane.new)).transpose(1, 2)
            values = v[low:high].unflatten(0, (lane.rows, lane.new)).transpose(1, 2)
            at = slice(low, high)
            part = Part(queries, keys, values, reading)
            seen = observe(self._layer, number, part, score, self._kernel, self._probe, at)
            outs.append(seen.out.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)

    def write(self, k: Tensor, v: Tensor) -> None:
        raise AssertionError("self-attention reads no source")


class _Crossing:
    """Which source row each decoder row attends to: shared by the cross-attention of all layers."""

    def __init__(self, step: Step, source: Step) -> None:
        assert len(step.lanes) in (0, len(source.lanes)), "a lane of sources for each lane of rows"
        self.spans, self.sources = lane_spans(step.lanes), lane_spans(source.lanes)
        self.lanes, self.readings = [], []
        for lane, span, there, at in zip(step.lanes, self.spans, source.lanes, self.sources, strict=False):
            self.lanes.append((fold(lane, there.rows), there))
            queries, keys = _mark(step, fold(lane, there.rows), span), _mark(source, there, at)
            if queries.document is None or keys.document is None:
                queries, keys = queries._replace(document=None), keys._replace(document=None)
            self.readings.append(Reading(queries, keys, Reach(causal=False)))


class _CrossView:
    def __init__(self, layer: int, shared: _Crossing, kernel: Kernel, probe: Probe | None) -> None:
        self._layer, self._shared, self._kernel, self._probe = layer, shared, kernel, probe
        self._held: tuple[Tensor, Tensor] | None = None

    def write(self, k: Tensor, v: Tensor) -> None:
        self._held = k, v

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: Score) -> Tensor:
        assert k is None and v is None and self._held is not None, "the source is written before it is read"
        shared, (keys, values), outs = self._shared, self._held, []
        for number, (lane, there) in enumerate(shared.lanes):
            (low, high), (first, last) = shared.spans[number], shared.sources[number]
            queries, reading = q[low:high].unflatten(0, (lane.rows, lane.new)), shared.readings[number]
            k, v = (x[first:last].unflatten(0, (there.rows, there.new)).transpose(1, 2) for x in (keys, values))
            at = slice(low, high)
            part = Part(queries, k, v, reading)
            seen = observe(self._layer, number, part, score, self._kernel, self._probe, at)
            outs.append(seen.out.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)
