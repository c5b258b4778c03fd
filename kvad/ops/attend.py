"""Scaled dot-product attention over what a row may read (Vaswani et al. 2017, sec. 3.2.1).

Promises: accumulation in float32 at least; no [L, S] matrix of a whole long step (queries go in blocks); a fully
masked query gives zeros; NaN or infinity in a slot that a query may not see never reaches that query.

Two kernels: ``reference`` (plain matrix products, any dtype, softcap, sinks, weights) and ``sdpa`` (torch's fused
one).  The fused one multiplies masked values by zero, and 0 x NaN is NaN; so its output is checked on the way out and
a block that is not finite is computed again by the reference, which looks at what is visible only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.step import Bias, Buckets, Mark, Reach, Score, Slopes

__all__ = ["Attended", "Kernel", "Reading", "attend", "distance_bias", "t5_bucket"]

Kernel = Literal["auto", "reference", "sdpa"]
MASK_BUDGET = 1 << 22  # elements of [rows, queries, slots] made at a time
SCORE_BUDGET = 1 << 24  # elements of [rows, heads, queries, slots] made at a time, where a kernel needs them


class Attended(NamedTuple):
    """``out`` [R, L, H, Dv]; ``weights`` [R, H, L, S] and ``scores`` (logits, same shape) only where asked for."""

    out: Tensor
    weights: Tensor | None = None
    scores: Tensor | None = None


class Reading:
    """Who sees whom in one lane, built once per step and shared by the layers of a group.

    ``queries`` [R, L] and ``keys`` [R, S] are marks.  Small masks and biases are kept; large ones are made per block of
    queries and dropped.
    """

    def __init__(self, queries: Mark, keys: Mark, reach: Reach) -> None:
        self.queries, self.keys, self.reach = queries, keys, reach
        rows, new = queries.position.shape
        self.shape = (rows, new, keys.position.shape[-1])
        self._small = math.prod(self.shape) <= MASK_BUDGET
        self._visible: Tensor | None = None
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}  # by id, beside what it belongs to: ids are used again

    @cached_property
    def far(self) -> Tensor | None:
        """[R, L]: how much nearer than by its position a query is to see a sink; None: no query any nearer."""
        if not self.reach.turns:
            return None
        far = self.queries.position - self.reach.renumbered(self.queries.position)
        return far if bool(far.any()) else None

    def visible(self, low: int, high: int) -> Tensor:
        """[R, high - low, S] of booleans for queries low..high."""
        if not self._small:
            return self.reach.allows(_cut(self.queries, low, high), self.keys)
        if self._visible is None:
            self._visible = self.reach.allows(self.queries, self.keys)
        return self._visible[:, low:high]

    def bias(self, bias: Slopes | Buckets | Bias, low: int, high: int) -> Tensor:
        """[R, H, high - low, S], what positions add to the logits."""
        if not isinstance(bias, (Slopes, Buckets)):
            return distance_bias(bias, self.queries.position[:, low:high], self.keys.position, self.reach)
        source = bias.slopes if isinstance(bias, Slopes) else bias.table
        if math.prod(self.shape) * source.shape[-1] > MASK_BUDGET:
            return distance_bias(bias, self.queries.position[:, low:high], self.keys.position, self.reach)
        if id(source) not in self._biases:
            made = distance_bias(bias, self.queries.position, self.keys.position, self.reach)
            self._biases[id(source)] = source, made
        return self._biases[id(source)][1][:, :, low:high]

    def queries_at_once(self, heads: int, scores: bool) -> int:
        """How many queries to take per block so that what is made beside k and v stays within the budgets."""
        rows, new, slots = self.shape
        per_query = rows * slots * (heads if scores else 1)
        return max(1, min(new, (SCORE_BUDGET if scores else MASK_BUDGET) // max(per_query, 1)))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reading: Reading,
    score: Score,
    *,
    kernel: Kernel = "auto",
    want: bool = False,
) -> Attended:
    """q [R, L, H, D], k [R, K, S, D], v [R, K, S, Dv] -> out [R, L, H, Dv] in q's dtype.

    ``want``: also return scores and weights (then the reference kernel is used).  Query head h reads key-value head
    ``h // (H / K)``.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)
    plain = score.softcap is None and score.sink_logits is None and not want
    fused = plain and kernel != "reference" and not (q.dtype == torch.float16 and q.device.type == "cpu")
    blocks = list(_blocks(q, k, v, reading, score, fused, want))
    if len(blocks) == 1:
        return blocks[0]
    weights = torch.cat([b.weights for b in blocks if b.weights is not None], dim=2) if want else None
    scores = torch.cat([b.scores for b in blocks if b.scores is not None], dim=2) if want else None
    return Attended(torch.cat([b.out for b in blocks], dim=1), weights, scores)


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, reading: Reading, score: Score, fused: bool, want: bool
) -> Iterator[Attended]:
    """The answer, a block of queries at a time; a fused block that is not finite is cut again for the reference."""
    heads, new = q.shape[2], q.shape[1]
    small = reading.queries_at_once(heads, scores=True)
    if fused:  # with a bias, or with values of another width, torch makes the scores as well
        streams = score.bias is None and v.shape[-1] == q.shape[-1]
        size = reading.queries_at_once(heads, scores=False) if streams else small
        for low in range(0, new, size):
            high = min(low + size, new)
            out = _fused(q[:, low:high], k, v, reading, score, low, high)
            if _finite(out):
                yield Attended(out)
            else:
                for start in range(low, high, small):
                    end = min(start + small, high)
                    yield _reference(q[:, start:end], k, v, reading, score, start, end, want)
        return
    for low in range(0, new, small):
        high = min(low + small, new)
        yield _reference(q[:, low:high], k, v, reading, score, low, high, want)


def _finite(x: Tensor) -> bool:
    """A sum is not finite where a term is not; a sum of finite terms that overflows costs a second computation."""
    return math.isfinite(x.sum().item())


def _fused(q: Tensor, k: Tensor, v: Tensor, reading: Reading, score: Score, low: int, high: int) -> Tensor:
    mask = reading.visible(low, high).unsqueeze(1)
    if score.bias is not None:
        wide = torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype
        mask = reading.bias(score.bias, low, high).to(wide).masked_fill(~mask, -math.inf)
    rows, new, heads, dim = q.shape
    kv_heads = k.shape[1]
    if new == 1 and heads != kv_heads:  # one query: its group's heads become the queries of one kv head
        folded = q.view(rows, kv_heads, heads // kv_heads, dim)
        if mask.shape[1] != 1:
            mask = mask.reshape(rows, kv_heads, heads // kv_heads, -1)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=score.scale)
        return out.reshape(rows, 1, heads, -1)
    grouped = heads != kv_heads
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, scale=score.scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, reading: Reading, score: Score, low: int, high: int, want: bool
) -> Attended:
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, new, heads, dim = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    seen = reading.visible(low, high)
    grouped = q.to(wide).transpose(1, 2).reshape(rows, kv_heads, -1, dim)  # [R, K, (H/K) * L, D]
    logits = (grouped @ k.to(wide).transpose(-1, -2)).view(rows, heads, new, slots) * score.scale
    if score.softcap is not None:
        logits = score.softcap * torch.tanh(logits / score.softcap)
    if score.bias is not None:
        logits = logits + reading.bias(score.bias, low, high).to(wide)
    logits = logits.masked_fill(~seen.unsqueeze(1), -math.inf)
    weights = _softmax(logits, score.sink_logits)
    out = (weights.view(rows, kv_heads, -1, slots) @ _only_seen(v.to(wide))).view(rows, heads, new, -1)
    out = _poison(out, v, seen).transpose(1, 2).to(q.dtype)
    return Attended(out, weights, logits) if want else Attended(out)


def _softmax(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Over the last dimension, with the row's maximum taken off; a row of -inf gives zeros, not NaN."""
    top = logits.amax(dim=-1, keepdim=True)
    if sink_logits is not None:
        sinks = sink_logits.to(logits.dtype).view(1, -1, 1, 1)
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == -math.inf, 0.0)
    exp = (logits - top).exp()
    total = exp.sum(dim=-1, keepdim=True)
    if sink_logits is not None:
        total = total + (sinks - top).exp()
    return exp / total.masked_fill(total == 0, 1.0)


def _only_seen(v: Tensor) -> Tensor:
    """v with what is not finite as zero, so that a weight of zero times it is zero."""
    return v if _finite(v) else torch.where(torch.isfinite(v), v, torch.zeros_like(v))


def _poison(out: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """A query that *may* see a value that is not finite gets NaN: faults are loud where they are visible."""
    if _finite(v):
        return out
    broken = (~torch.isfinite(v)).any(dim=-1)  # [R, K, S]
    reached = (seen.unsqueeze(1) & broken.unsqueeze(2)).any(dim=-1)  # [R, K, L]
    return out.masked_fill(reached.repeat_interleave(out.shape[1] // v.shape[1], dim=1).unsqueeze(-1), math.nan)


def _cut(mark: Mark, low: int, high: int) -> Mark:
    return Mark(mark.position[:, low:high], None if mark.document is None else mark.document[:, low:high])


def distance_bias(bias: Slopes | Buckets | Bias, queries: Tensor, keys: Tensor, reach: Reach | None = None) -> Tensor:
    """queries [R, L], keys [R, S] (positions) -> [R, H, L, S]; distances as ``reach`` numbers them."""
    turns = reach is not None and reach.turns
    if not isinstance(bias, (Slopes, Buckets)):
        assert not turns, "a position encoding of one's own is not renumbered"
        return bias.between(queries, keys)
    ahead = -reach.distance(queries, keys) if reach is not None else keys.unsqueeze(-2) - queries.unsqueeze(-1)  # k - q
    if isinstance(bias, Slopes):
        slopes = bias.slopes.view(1, -1, 1, 1)
        if bias.rounded:
            from_there = queries if reach is None or not turns else reach.renumbered(queries)
            there = slopes.bfloat16() * (from_there.unsqueeze(-1) + ahead).unsqueeze(1).bfloat16()
            return (there.to(slopes.dtype) - slopes * from_there[:, None, :, None].to(slopes.dtype)) * bias.factor
        return -slopes * bias.factor * ahead.abs().unsqueeze(1).to(slopes.dtype)
    bucket = t5_bucket(ahead, bias.table.shape[0], bias.max_distance, bias.bidirectional)
    return F.embedding(bucket, bias.table).permute(0, 3, 1, 2)


def t5_bucket(ahead: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of ``ahead`` = k - q (Raffel et al. 2020, sec. 2.1; the reference code's integer rounding).

    Bidirectional: half of the buckets for keys behind, half for keys ahead.  Half of a direction's buckets hold one
    distance each, the others grow in width logarithmically up to ``max_distance``.
    Example (32 buckets, 128, bidirectional): query 0, keys 0..9 -> 0 17 18 19 20 21 22 23 24 24.
    """
    offset = torch.zeros_like(ahead)
    if bidirectional:
        buckets //= 2
        offset = torch.where(ahead > 0, buckets, 0)
        distance = ahead.abs()
    else:
        distance = (-ahead).clamp(min=0)
    exact = buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    large = (exact + (ratio * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, large)
