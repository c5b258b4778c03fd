"""Lanes: how flat tokens are cut into rectangles, and the one place where a lane attends (and may be watched)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from kvad.model_input import AttentionParams, SubBatch, TokenPositions
from kvad.ops.attention import AttentionMask, AttentionOutput, Kernel, dot_product_attention
from kvad.ops.batch_invariant import TileSizes
from kvad.ops.batch_invariant_attention import invariant_attention
from kvad.ops.merge import AttentionPart, merge_attention
from kvad.ops.rotary import rotate_by


class AttentionTrace(NamedTuple):
    """What one attention layer did in one lane: the values a debugger asks for.

    ``q`` [R, L, H, D] and ``k`` [R, K, S, D] rotated, ``v`` [R, K, S, Dv], ``positions`` [R, S] of the keys,
    ``scores`` and ``weights`` [R, H, L, S], ``out`` [R, L, H, Dv].
    """

    layer: int
    sub_batch: int
    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    scores: Tensor
    weights: Tensor
    out: Tensor


AttentionHook = Callable[[AttentionTrace], None]


def sub_batch_spans(lanes: Sequence[SubBatch]) -> list[tuple[int, int]]:
    """(first, last + 1) of each lane in the flat tokens."""
    spans, start = [], 0
    for lane in lanes:
        spans.append((start, start + lane.num_seqs * lane.num_new_tokens))
        start = spans[-1][1]
    return spans


def fold_rows(lane: SubBatch, sources: int) -> SubBatch:
    """The same tokens, rows that share a source as one row.

    Lane(rows=6, new=1, read=S) over 2 sources  ->  Lane(rows=2, new=3, read=S)
    """
    assert lane.num_seqs % sources == 0, f"{lane.num_seqs} rows over {sources} sources"
    return SubBatch(sources, lane.num_seqs // sources * lane.num_new_tokens, lane.num_read_slots)


def attend_sub_batch(
    layer: int,
    lane: int,
    part: AttentionPart,
    score: AttentionParams,
    kernel: Kernel,
    probe: AttentionHook | None,
    at: slice,
    count: Tensor | None = None,
    below: Iterable[AttentionPart] = (),
) -> AttentionOutput:
    """Attend in one lane, and show a probe what was seen: of several parts, one behind the other.

    ``below``: what lies before ``part``; a generator's parts are there one after the other, but for a probe, which is
    shown all at once.  ``at``: the lane's flat tokens; ``count`` [R, L]: which queries' attention is asked for
    (``Attended.mass``).
    """
    q, k, v, reading = part
    before = iter(below)
    first = next(before, None)
    alone = first is None
    parts: Iterable[AttentionPart] = (part,) if first is None else chain(_gone([first]), before, (part,))
    del first
    if probe is not None or count is not None:
        parts = list(parts)
    far, want = reading.sink_shift if score.rotary is not None else None, probe is not None
    if isinstance(kernel, TileSizes):
        assert alone and far is None and count is None, "aligned tiles are of whole tokens, where they were"
        done = AttentionOutput(invariant_attention(q, k, v, reading, score, kernel))
        done = dot_product_attention(q, k, v, reading, score, want=True)._replace(out=done.out) if want else done
    elif far is not None:
        assert alone, "levels and sinks that are numbered anew do not meet"
        done = _renumbered(part, far, score, kernel, want, at)
    elif count is not None or not alone:
        done = merge_attention(parts, score, kernel=kernel, want=want, mass=count is not None, count=count)
    else:
        done = dot_product_attention(q, k, v, reading, score, kernel=kernel, want=want)
    if probe is not None:
        assert done.scores is not None and done.weights is not None
        k, v = torch.cat([part.k for part in parts], dim=2), torch.cat([part.v for part in parts], dim=2)
        positions = torch.cat([part.mask.keys.position for part in parts], dim=-1)
        probe(AttentionTrace(layer, lane, q, k, v, positions, done.scores, done.weights, done.out))
    return done


def _gone(parts: list[AttentionPart]) -> Iterator[AttentionPart]:
    """From a list that lets them go."""
    while parts:
        yield parts.pop()


def _renumbered(
    part: AttentionPart, far: Tensor, score: AttentionParams, kernel: Kernel, want: bool, at: slice
) -> AttentionOutput:
    """Keys and queries are rotated by their positions; a sink is to look ``far`` [R, L] nearer than that.

    One query of a row: its sinks are turned.  Several: each has a distance of its own, so the sinks are a part that is
    asked with queries turned back.
    """
    assert score.rotary is not None
    q, k, v, reading = part
    positions = reading.keys.position
    sinks = positions < reading.pattern.num_sinks
    if far.shape[1] == 1:
        width = reading.num_sink_slots
        nearer = rotate_by(k[:, :, :width], far * sinks[:, :width], score.rotary, at)
        return dot_product_attention(
            q, torch.cat((nearer, k[:, :, width:]), 2), v, reading, score, kernel=kernel, want=want
        )
    back = rotate_by(q.transpose(1, 2), -far, score.rotary, at).transpose(1, 2)
    first = AttentionMask(reading.queries, TokenPositions(positions.masked_fill(~sinks, -1)), reading.pattern)
    rest = AttentionMask(reading.queries, TokenPositions(positions.masked_fill(sinks, -1)), reading.pattern)
    done = merge_attention(
        (AttentionPart(back, k, v, first), AttentionPart(q, k, v, rest)), score, kernel=kernel, want=want
    )
    if not want:
        return done
    assert done.scores is not None and done.weights is not None  # of the same keys twice, half of them not seen
    (a, b), (c, d) = done.scores.chunk(2, dim=-1), done.weights.chunk(2, dim=-1)
    return done._replace(scores=torch.maximum(a, b), weights=c + d)
