"""Attention over several parts, merged by log-sum-exp: one softmax over the keys of all of them.

    out = sum_i exp(lse_i - lse) out_i,    lse = log sum_i exp(lse_i)

What a row reads may lie in pieces that differ in form: recent keys as they are, older ones packed, summaries, a shared
prefix.  Each part is attended to by whichever kernel takes it (``ops/attend.py``, whose promises hold here too), and
only its answer and its log-sum-exp are kept.  So parts may come from a generator that unpacks one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from kvad.model_input import AttentionParams
from kvad.ops.attention import (
    AttentionMask,
    AttentionOutput,
    Kernel,
    attention_by_query_block,
    attention_logits,
    concat_blocks,
    dot_product_attention,
)


class AttentionPart(NamedTuple):
    """A piece of what a lane reads: q [R, L, H, D] (turned as this part's keys want it), k [R, K, S, D],
    v [R, K, S, Dv].  H, K and Dv are the same in all parts of a lane."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask


def merge_attention(
    parts: Iterable[AttentionPart],
    score: AttentionParams,
    *,
    kernel: Kernel = "auto",
    want: bool = False,
    mass: bool = False,
    count: Tensor | None = None,
) -> AttentionOutput:
    """-> out [R, L, H, Dv] in the dtype of q, and lse [R, H, L] where there is more than one part.

    ``want``: weights and scores [R, H, L, S] over the keys of all parts, one part behind the other (debugging).
    ``mass``: per part [R, K, S], how much attention each key got: the final weights, over all parts together, summed
    over the heads that read it and over the queries, each times its ``count`` [R, L] (None: all count once).  Parts
    are read twice then: those of a generator are kept until the end, those of a sequence (or of anything else that
    can be gone through again) are made again.
    """
    again = list(parts) if mass and isinstance(parts, Iterator) else parts
    source = iter(again)
    first, second = next(source, None), next(source, None)
    assert first is not None, "attention over no part at all"
    if second is None:
        done = dot_product_attention(*first, score, kernel=kernel, want=want)
        return done._replace(mass=(_mass(first, score, None, count),)) if mass else done
    ahead = [first, second]
    del first, second
    shape = ahead[0].q
    total, scores = _Sum(), []
    for part in chain(_drain(ahead), source):
        made = _attend_part(part, score._replace(sink_logits=None), kernel, want)
        assert made.lse is not None
        total.add(made.out, made.lse)
        scores.append(made.scores)
    out, lse = total.close(score.sink_logits)
    merged = AttentionOutput(out.to(shape.dtype), lse=lse)
    if want:
        every = torch.cat([x for x in scores if x is not None], dim=-1)
        merged = merged._replace(scores=every, weights=(every - _floor_lse(lse).unsqueeze(-1)).exp())
    if mass:
        merged = merged._replace(mass=tuple(_mass(part, score, lse, count) for part in again))
    return merged


def _drain(parts: list[AttentionPart]) -> Iterator[AttentionPart]:
    """Parts from a list that lets them go."""
    while parts:
        yield parts.pop(0)


def _attend_part(part: AttentionPart, score: AttentionParams, kernel: Kernel, want: bool) -> AttentionOutput:
    """One part's answer to all queries, with its lse; a part without keys says nothing."""
    q, _, v, reading = part
    rows, new, heads, _ = q.shape
    if reading.shape[2] == 0:
        wide = torch.promote_types(q.dtype, torch.float32)
        nothing = q.new_full((rows, heads, new), -math.inf, dtype=wide)
        scores = nothing.unsqueeze(-1)[..., :0] if want else None
        return AttentionOutput(q.new_zeros((rows, new, heads, v.shape[-1]), dtype=wide), scores=scores, lse=nothing)
    blocks = list(attention_by_query_block(*part, score, kernel=kernel, want=want, lse=True))
    if len(blocks) == 1:
        return blocks[0]
    out, scores = torch.cat([b.out for b in blocks], dim=1), concat_blocks([b.scores for b in blocks])
    return AttentionOutput(out, scores=scores, lse=concat_blocks([b.lse for b in blocks]))


class _Sum:
    """Answers weighted by exp(lse - top), where ``top`` is the largest lse so far (Milakov & Gimelshein 2018).

    A part in which a query sees nothing changes no bit of its sum.
    """

    def __init__(self) -> None:
        self._top: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """out [R, L, H, Dv], lse [R, H, L]."""
        out = out.to(lse.dtype)
        if self._top is None:
            self._top = lse.detach()
            share = (lse - _floor_lse(self._top)).exp()
            self._total, self._out = share, out * _over_values(share)
            return
        top = torch.maximum(self._top, lse.detach())
        old, share = (self._top - _floor_lse(top)).exp(), (lse - _floor_lse(top)).exp()
        self._total = self._total * old + share
        self._out = self._out * _over_values(old) + out * _over_values(share)
        self._top = top

    def close(self, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> out [R, L, H, Dv] and lse [R, H, L], the sinks in the denominator."""
        assert self._top is not None, "nothing was added"
        top, total, out = self._top, self._total, self._out
        if sink_logits is not None:
            sinks = sink_logits.to(total.dtype).view(1, -1, 1)
            higher = torch.maximum(top, sinks.detach())
            old = (top - higher).exp()
            total, out, top = total * old + (sinks - higher).exp(), out * _over_values(old), higher
        nothing = total == 0
        total = total.masked_fill(nothing, 1.0)
        return out / _over_values(total), (_floor_lse(top) + total.log()).masked_fill(nothing, -math.inf)


def _floor_lse(lse: Tensor) -> Tensor:
    """-inf as 0, so that taking it off what is -inf too leaves -inf."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _over_values(share: Tensor) -> Tensor:
    """[R, H, L] -> [R, L, H, 1]."""
    return share.transpose(1, 2).unsqueeze(-1)


@torch.no_grad()
def _mass(part: AttentionPart, score: AttentionParams, lse: Tensor | None, count: Tensor | None) -> Tensor:
    """[R, K, S]; ``lse``: the denominators over all parts (None: this is the only one)."""
    q, k, _, reading = part
    rows, new, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    mass = q.new_zeros((rows, k.shape[1], reading.shape[2]), dtype=wide)
    if reading.shape[2] == 0:
        return mass
    begin, end = (0, new) if count is None else _counted(count)
    size = reading.max_queries_per_block(heads, scores=True)
    for low in range(begin, end, size):
        high = min(low + size, end)
        logits = attention_logits(q[:, low:high], k.to(q.dtype), reading, score, low, high)
        below = _lse(logits, score.sink_logits) if lse is None else lse[:, :, low:high]
        weights = (logits - _floor_lse(below).unsqueeze(-1)).exp_()
        if count is not None:  # a query that does not count may hold anything
            share = count[:, None, low:high, None].to(wide)
            weights = torch.where(share != 0, weights * share, torch.zeros_like(weights))
        mass += weights.view(rows, k.shape[1], -1, weights.shape[-1]).sum(dim=2)
    return mass


def _counted(count: Tensor) -> tuple[int, int]:
    """The first query that counts in any row, and one past the last."""
    which = (count != 0).any(dim=0).nonzero().flatten().tolist()
    return (which[0], which[-1] + 1) if which else (0, 0)


def _lse(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """[R, H, L, S] -> [R, H, L]."""
    lse = logits.logsumexp(dim=-1)
    return lse if sink_logits is None else torch.logaddexp(lse, sink_logits.to(lse.dtype).view(1, -1, 1))
