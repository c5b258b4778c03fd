"""Fresh: the memory that forgets.  Every lane row attends to its own new tokens and nothing is kept.

Training, encoders and the uncached judge use it; ``kvad verify`` holds every cache against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvad.config import ModelConfig, mixers
from kvad.ops.attend import Kernel, Reading
from kvad.ops.lanes import Probe, lane_spans, observe
from kvad.ops.rotary import Angles
from kvad.step import Lane, Mark, Reach, Score, Step, View

__all__ = ["Fresh"]


class Fresh:
    """``open`` gives one view per attention layer; layers of equal reach share masks."""

    def __init__(self, config: ModelConfig, *, kernel: Kernel = "auto", probe: Probe | None = None) -> None:
        self._specs = mixers(config)
        self._kernel, self._probe = kernel, probe

    def open(self, step: Step) -> Sequence[View]:
        angles = Angles(step.positions)
        spans = lane_spans(step.lanes)
        readings: dict[Reach, list[Reading]] = {}
        views = []
        for index, spec in enumerate(self._specs):
            reach = Reach(spec.causal, spec.window)
            if reach not in readings:
                readings[reach] = [
                    _reading(step, reach, lane, span) for lane, span in zip(step.lanes, spans, strict=True)
                ]
            views.append(_FreshView(index, step.lanes, spans, readings[reach], angles, self._kernel, self._probe))
        return views


def _reading(step: Step, reach: Reach, lane: Lane, span: tuple[int, int]) -> Reading:
    def cut(flat: Tensor) -> Tensor:
        return flat[span[0] : span[1]].view(lane.rows, lane.new)

    mark = Mark(cut(step.positions), None if step.documents is None else cut(step.documents))
    return Reading(mark, mark, reach)


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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
        if score.rotary is not None:
            q, k = self._angles.rotate(q, score.rotary), self._angles.rotate(k, score.rotary)
        outs = []
        for number, (lane, (low, high), reading) in enumerate(
            zip(self._lanes, self._spans, self._readings, strict=True)
        ):
            queries = q[low:high].unflatten(0, (lane.rows, lane.new))
            keys = k[low:high].unflatten(0, (lane.rows, lane.new)).transpose(1, 2)
            values = v[low:high].unflatten(0, (lane.rows, lane.new)).transpose(1, 2)
            outs.append(observe(self._layer, number, queries, keys, values, reading, score, self._kernel, self._probe))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)
