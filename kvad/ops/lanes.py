"""Lanes: how flat tokens are cut into rectangles, and the one place where a lane attends (and may be watched)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvad.ops.attend import Attended, Kernel, Reading, attend
from kvad.ops.merge import Part, merge
from kvad.ops.rotary import turn
from kvad.step import Lane, Mark, Score

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


def _renumbered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reading: Reading,
    far: Tensor,
    score: Score,
    kernel: Kernel,
    want: bool,
    at: slice,
) -> Attended:
    """Keys and queries are rotated by their positions; a sink is to look ``far`` [R, L] nearer than that.

    One query of a row: its sinks are turned.  Several: each has a distance of its own, so the sinks are a part that is
    asked with queries turned back.
    """
    assert score.rotary is not None
    rows, new = far.shape
    sinks = reading.keys.position < reading.reach.sinks
    if new == 1:
        nearer = turn(k, far * sinks, score.rotary, at)
        return attend(q, nearer, v, reading, score, kernel=kernel, want=want)
    if want:
        each = []
        for i in range(new):
            one = Reading(Mark(reading.queries.position[:, i : i + 1]), reading.keys, reading.reach)
            here = slice(at.start + i, at.stop, new)
            each.append(_renumbered(q[:, i : i + 1], k, v, one, far[:, i : i + 1], score, kernel, want, here))
        weights, scores = [x.weights for x in each], [x.scores for x in each]
        return Attended(torch.cat([x.out for x in each], 1), torch.cat(weights, 2), torch.cat(scores, 2))
    back = turn(q.transpose(1, 2), -far, score.rotary, at).transpose(1, 2)
    positions = reading.keys.position
    parts = (
        Part(back, k, v, Reading(reading.queries, Mark(positions.masked_fill(~sinks, -1)), reading.reach)),
        Part(q, k, v, Reading(reading.queries, Mark(positions.masked_fill(sinks, -1)), reading.reach)),
    )
    return merge(parts, score, kernel=kernel)


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
    at: slice,
) -> Tensor:
    """Attend in one lane -> flat [R * L, H, Dv], and show a probe what was seen.  ``at``: the lane's flat tokens."""
    far = reading.far if score.rotary is not None else None
    if far is None:
        done = attend(q, k, v, reading, score, kernel=kernel, want=probe is not None)
    else:
        done = _renumbered(q, k, v, reading, far, score, kernel, probe is not None, at)
    if probe is not None:
        assert done.scores is not None and done.weights is not None
        probe(Seen(layer, lane, q, k, v, reading.keys.position, done.scores, done.weights, done.out))
    return done.out.flatten(0, 1)
