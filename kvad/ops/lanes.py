"""Lanes: how flat tokens are cut into rectangles, and the one place where a lane attends (and may be watched)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from kvad.ops.aligned import attend_aligned
from kvad.ops.attend import Attended, Kernel, Reading, attend
from kvad.ops.invariant import Tiles
from kvad.step import Lane, Score

__all__ = ["Probe", "Seen", "fold", "lane_spans", "observe"]


class Seen(NamedTuple):
    """What one attention layer did in one lane: the values a debugger asks for.

    ``q`` [R, L, H, D] and ``k`` [R, K, S, D] rotated, ``v`` [R, K, S, Dv], ``positions`` [R, S] of the keys,
    ``scores`` and ``weights`` [R, H, L, S], ``out`` [R, L, H, Dv].
    """

    layer: int
    lane: int
    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    scores: Tensor
    weights: Tensor
    out: Tensor


Probe = Callable[[Seen], None]


def lane_spans(lanes: Sequence[Lane]) -> list[tuple[int, int]]:
    """(first, last + 1) of each lane in the flat tokens."""
    spans, start = [], 0
    for lane in lanes:
        spans.append((start, start + lane.rows * lane.new))
        start = spans[-1][1]
    return spans


def fold(lane: Lane, sources: int) -> Lane:
    """The same tokens, rows that share a source as one row.

    Lane(rows=6, new=1, read=S) over 2 sources  ->  Lane(rows=2, new=3, read=S)
    """
    assert lane.rows % sources == 0, f"{lane.rows} rows over {sources} sources"
    return Lane(sources, lane.rows // sources * lane.new, lane.read)


def observe(
    layer: int,
    lane: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reading: Reading,
    score: Score,
    kernel: Kernel,
    probe: Probe | None,
) -> Tensor:
    """Attend in one lane -> flat [R * L, H, Dv], and show a probe what was seen."""
    if isinstance(kernel, Tiles):
        out = attend_aligned(q, k, v, reading, score, kernel)
        done = Attended(out) if probe is None else attend(q, k, v, reading, score, want=True)._replace(out=out)
    else:
        done = attend(q, k, v, reading, score, kernel=kernel, want=probe is not None)
    if probe is not None:
        assert done.scores is not None and done.weights is not None
        probe(Seen(layer, lane, q, k, v, reading.keys.position, done.scores, done.weights, done.out))
    return done.out.flatten(0, 1)
