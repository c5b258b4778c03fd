"""Scaled dot-product attention over what a row may read (Vaswani et al. 2017, sec. 3.2.1).

Promises: accumulation in float32 at least; no [L, S] matrix of a whole long step (queries go in blocks); a fully
masked query gives zeros; NaN or infinity in a slot that a query may not see never reaches that query.

Two kernels: ``reference`` (plain matrix products, any dtype, softcap, sinks, weights) and ``sdpa`` (torch's fused
one).  The fused one multiplies masked values by zero, and 0 x NaN is NaN; so its output is checked on the way out and
a block that is not finite is computed again by the reference, which looks at what is visible only.

What distances add to the logits of attention: slopes (ALiBi), buckets (T5), and biases of one's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.model_input import (
    AlibiSlopes,
    AttentionParams,
    AttentionPattern,
    PositionBias,
    RelativeBuckets,
    TokenPositions,
)
from kvad.ops.batch_invariant import TileSizes


def expand_kv_heads(x: Tensor, heads: int) -> Tensor:
    """[R, 1 or K, ...] -> [R, 1 or heads, ...]: what holds for a kv head holds for the heads that read it."""
    return x if x.shape[1] in (1, heads) or heads == 1 else x.repeat_interleave(heads // x.shape[1], dim=1)


def position_bias(
    bias: AlibiSlopes | RelativeBuckets | PositionBias,
    queries: Tensor,
    keys: Tensor,
    reach: AttentionPattern | None = None,
) -> Tensor:
    """queries [R, L], keys [R, S] or [R, K, S] (positions) -> [R, H, L, S]; distances as ``reach`` numbers them."""
    turns = reach is not None and reach.renumbers_sinks
    if not isinstance(bias, (AlibiSlopes, RelativeBuckets)):
        assert not turns, "a position encoding of one's own is not renumbered"
        return bias.compute(queries, keys) if keys.dim() == 2 else _between(bias, queries, keys)
    keys, queries = keys.unsqueeze(1) if keys.dim() == 2 else keys, queries.unsqueeze(1)  # [R, 1 or K, S], [R, 1, L]
    if reach is None:
        ahead = keys.unsqueeze(-2) - queries.unsqueeze(-1)  # k - q
    else:
        ahead, queries = -reach.distance(queries, keys), reach.renumbered_query(queries) if turns else queries
    if isinstance(bias, AlibiSlopes):
        ahead = expand_kv_heads(ahead, bias.slopes.shape[0])
        slopes = bias.slopes.view(1, -1, 1, 1)
        if bias.round_to_bfloat16:
            there = slopes.bfloat16() * (queries.unsqueeze(-1) + ahead).bfloat16()
            return (there.to(slopes.dtype) - slopes * queries.unsqueeze(-1).to(slopes.dtype)) * bias.factor
        return -slopes * bias.factor * ahead.abs().to(slopes.dtype)
    bucket = t5_bucket(ahead, bias.table.shape[0], bias.max_distance, bias.bidirectional)  # [R, 1 or K, L, S]
    if bucket.shape[1] == 1:
        return F.embedding(bucket[:, 0], bias.table).permute(0, 3, 1, 2)
    heads = torch.arange(bias.table.shape[1], device=bucket.device).view(1, -1, 1, 1)
    return bias.table[expand_kv_heads(bucket, heads.numel()), heads]


def _between(bias: PositionBias, queries: Tensor, keys: Tensor) -> Tensor:
    """A bias of one's own, which knows keys [R, S], for keys [R, K, S]: each kv head's own heads of its answer."""
    kv_heads = keys.shape[1]
    every = [bias.compute(queries, keys[:, head]) for head in range(kv_heads)]
    return torch.cat([each.chunk(kv_heads, dim=1)[head] for head, each in enumerate(every)], dim=1)


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


Kernel = Literal["auto", "reference", "sdpa"] | TileSizes  # in tiles: bits that no neighbour shows in (ops/aligned.py)
MASK_BUDGET = 1 << 22  # elements of [rows, queries, slots] made at a time
SCORE_BUDGET = 1 << 24  # elements of [rows, heads, queries, slots] made at a time, where a kernel needs them


class AttentionOutput(NamedTuple):
    """``out`` [R, L, H, Dv]; the others only where asked for.

    ``weights`` and ``scores`` (logits) [R, H, L, S]; ``lse`` [R, H, L], the logarithm of the softmax's denominator;
    ``mass``: one [R, K, S] per part, the attention that each of its keys got.
    """

    out: Tensor
    weights: Tensor | None = None
    scores: Tensor | None = None
    lse: Tensor | None = None
    mass: tuple[Tensor, ...] | None = None


class AttentionMask:
    """Who sees whom in one lane, built once per step and shared by the layers of a group.

    ``queries`` [R, L] and ``keys`` [R, S] are marks, or [R, K, S] where each kv head keeps other tokens.  ``weight``
    [R, S] or [R, K, S] is added to the logits: log n of a key that stands for n tokens.  Small masks and biases are
    kept; large ones are made per block of queries and dropped.
    """

    def __init__(
        self, queries: TokenPositions, keys: TokenPositions, pattern: AttentionPattern, weight: Tensor | None = None
    ) -> None:
        self.queries, self.keys, self.pattern = queries, keys, pattern
        self.weight = _by_head(weight)
        rows, new = queries.position.shape
        self.shape = (rows, new, keys.position.shape[-1])
        self.per_head = keys.position.dim() == 3
        self._masks = math.prod(self.shape) * (keys.position.shape[1] if self.per_head else 1)  # elements of a mask
        self.aligned: object = None  # what ops/aligned.py keeps of it
        self._visible: Tensor | None = None
        self._additive_bias: dict[torch.dtype, Tensor] = {}
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}  # by id, beside what it belongs to: ids are used again

    def with_weight(self, weight: Tensor) -> AttentionMask:
        """The same, masks and biases shared, with a weight of its own."""
        if self._visible is None and self._masks <= MASK_BUDGET:
            self._visible = self._allows(0, self.shape[1])
        other = copy(self)
        other.weight = _by_head(weight)
        return other

    @cached_property
    def is_plain_causal(self) -> bool:
        """Whether query i sees keys 0 .. i and no others, in every row: what a kernel knows without a mask."""
        if self.pattern != AttentionPattern() or self.keys is not self.queries or self.queries.document_id is not None:
            return False
        place = self.queries.causal_index
        return bool((place[:, 1:] > place[:, :-1]).all() & (self.queries.position >= 0).all() & (place >= 0).all())

    def additive_mask(self, dtype: torch.dtype) -> Tensor | None:
        """[R, 1 or K, L, S] of zeros, -inf where a key is not to be seen: made once for the layers that share it.

        None of a triangle, which needs none.
        """
        if self.is_plain_causal:
            return None
        if dtype not in self._additive_bias:
            seen = self.visible(0, self.shape[1])
            self._additive_bias[dtype] = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)
        return self._additive_bias[dtype]

    @cached_property
    def sink_shift(self) -> Tensor | None:
        """[R, L]: how much nearer than by its position a query is to see a sink; None: no query any nearer."""
        if not self.pattern.renumbers_sinks:
            return None
        far = self.queries.position - self.pattern.renumbered_query(self.queries.position)
        return far if bool(far.any()) else None

    @cached_property
    def num_sink_slots(self) -> int:
        """How many of the first slots hold all sinks."""
        where = (self.keys.position < self.pattern.num_sinks).logical_and(self.keys.position >= 0).any(dim=0).nonzero()
        return int(where.max()) + 1 if len(where) else 0

    def visible(self, low: int, high: int) -> Tensor:
        """[R, 1 or K, high - low, S] of booleans for queries low..high."""
        if self._masks > MASK_BUDGET:
            return self._allows(low, high)
        if self._visible is None:
            self._visible = self._allows(0, self.shape[1])
        return self._visible if high - low == self.shape[1] else self._visible[:, :, low:high]

    def _allows(self, low: int, high: int) -> Tensor:
        queries = _slice_positions(self.queries, low, high)
        if not self.per_head:
            return self.pattern.visible(queries, self.keys).unsqueeze(1)
        spread = TokenPositions(*(None if x is None else x.unsqueeze(1) for x in queries))  # type: ignore[arg-type]
        return self.pattern.visible(spread, self.keys)

    def bias(self, bias: AlibiSlopes | RelativeBuckets | PositionBias, low: int, high: int) -> Tensor:
        """[R, H, high - low, S], what positions add to the logits."""
        if not isinstance(bias, (AlibiSlopes, RelativeBuckets)):
            return position_bias(bias, self.queries.position[:, low:high], self.keys.position, self.pattern)
        source = bias.slopes if isinstance(bias, AlibiSlopes) else bias.table
        if math.prod(self.shape) * source.shape[-1] > MASK_BUDGET:
            return position_bias(bias, self.queries.position[:, low:high], self.keys.position, self.pattern)
        if id(source) not in self._biases:
            made = position_bias(bias, self.queries.position, self.keys.position, self.pattern)
            self._biases[id(source)] = source, made
        return self._biases[id(source)][1][:, :, low:high]

    def additive_bias(
        self, score: AttentionParams, heads: int, dtype: torch.dtype, low: int, high: int
    ) -> Tensor | None:
        """[R, 1 or H, 1 or high - low, S] in ``dtype``: what bias and weight add to the logits; None: nothing."""
        bias = None if score.bias is None else self.bias(score.bias, low, high).to(dtype)
        if self.weight is None:
            return bias
        weight = self.weight.to(dtype).unsqueeze(2)
        weight = weight if weight.shape[1] == 1 else weight.repeat_interleave(heads // weight.shape[1], dim=1)
        return weight if bias is None else bias + weight

    def max_queries_per_block(self, heads: int, scores: bool) -> int:
        """How many queries to take per block so that what is made beside k and v stays within the budgets."""
        rows, new, slots = self.shape
        per_query = rows * slots * heads if scores else self._masks // max(new, 1)
        return max(1, min(new, (SCORE_BUDGET if scores else MASK_BUDGET) // max(per_query, 1)))


def dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reading: AttentionMask,
    score: AttentionParams,
    *,
    kernel: Kernel = "auto",
    want: bool = False,
) -> AttentionOutput:
    """q [R, L, H, D], k [R, K, S, D], v [R, K, S, Dv] -> out [R, L, H, Dv] in q's dtype.

    ``want``: also return scores and weights (then the reference kernel is used).  Query head h reads key-value head
    ``h // (H / K)``.
    """
    blocks = list(attention_by_query_block(q, k, v, reading, score, kernel=kernel, want=want))
    if len(blocks) == 1:
        return blocks[0]
    weights, scores = concat_blocks([b.weights for b in blocks]), concat_blocks([b.scores for b in blocks])
    return AttentionOutput(torch.cat([b.out for b in blocks], dim=1), weights, scores)


def _by_head(weight: Tensor | None) -> Tensor | None:
    """[R, S] or [R, K, S] -> [R, 1 or K, S]."""
    return weight if weight is None or weight.dim() == 3 else weight.unsqueeze(1)


def concat_blocks(blocks: Sequence[Tensor | None]) -> Tensor | None:
    """[R, H, queries, ...] each -> [R, H, L, ...]; None of what was not asked for."""
    made = [x for x in blocks if x is not None]
    return torch.cat(made, dim=2) if made else None


def attention_by_query_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reading: AttentionMask,
    score: AttentionParams,
    *,
    kernel: Kernel,
    want: bool,
    lse: bool = False,
) -> Iterator[AttentionOutput]:
    """The answer, a block of queries at a time; a fused block that is not finite is cut again for the reference.

    ``lse``: with the logarithm of the denominator, -inf where a query sees nothing, and ``out`` as wide as it was made.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)
    plain = score.logit_softcap is None and score.sink_logits is None and not want
    fused = plain and kernel != "reference" and not (q.dtype == torch.float16 and q.device.type == "cpu")
    fused = fused and (not lse or _supports_lse(q, k, v, score))
    assert not (lse and score.dropout), "what is merged is read from a cache, and nothing is dropped there"
    heads, new = q.shape[2], q.shape[1]
    small = reading.max_queries_per_block(heads, scores=True)
    if fused:  # with a bias, dropout, or values of another width, torch makes the scores as well
        streams = (
            score.bias is None
            and score.dropout == 0.0
            and v.shape[-1] == q.shape[-1]
            and (reading.weight is None or new == 1)
        )
        size = reading.max_queries_per_block(heads, scores=False) if streams else small
        if streams and new > 1 and _needs_grad(q) and reading.is_plain_causal:
            size = new
        for low in range(0, new, size):
            high = min(low + size, new)
            made = _fused(q[:, low:high], k, v, reading, score, low, high, lse)
            if _finite(made.out):
                yield made
            else:
                for start in range(low, high, small):
                    end = min(start + small, high)
                    yield _reference(q[:, start:end], k, v, reading, score, start, end, want, lse)
        return
    for low in range(0, new, small):
        high = min(low + small, new)
        yield _reference(q[:, low:high], k, v, reading, score, low, high, want, lse)


def _supports_lse(q: Tensor, k: Tensor, v: Tensor, score: AttentionParams) -> bool:
    """Whether a fused kernel gives the denominator too: torch's on a CPU, which knows no gradient of it."""
    learned = score.bias.table.requires_grad if isinstance(score.bias, RelativeBuckets) else False
    graph = torch.is_grad_enabled() and (learned or q.requires_grad or k.requires_grad or v.requires_grad)
    return q.device.type == "cpu" and v.shape[-1] == q.shape[-1] and not graph


def _finite(x: Tensor) -> bool:
    """A sum is not finite where a term is not; a sum of finite terms that overflows costs a second computation."""
    return math.isfinite(x.detach().sum().item())


def _needs_grad(q: Tensor) -> bool:
    """Whether a gradient is made.  What training is spared nobody else is: their bits are to stay what they were."""
    return torch.is_grad_enabled() and q.requires_grad


def _fused(
    q: Tensor, k: Tensor, v: Tensor, reading: AttentionMask, score: AttentionParams, low: int, high: int, lse: bool
) -> AttentionOutput:
    rows, new, heads, _ = q.shape
    plain = not lse and score.bias is None and reading.weight is None
    if plain and new == reading.shape[1] > 1 and not reading.per_head and _needs_grad(q):
        out = _sdpa(q.transpose(1, 2), k, v, reading.additive_mask(q.dtype), score.scale, score.dropout)
        return AttentionOutput(out.transpose(1, 2))
    seen = mask = reading.visible(low, high)
    if not plain:
        mask = _as_bias(q, reading, score, low, high)
    laid = _to_sdpa_layout(q, k, v, mask)
    if lse:
        out, total = _sdpa_with_lse(*laid, score.scale)
        blind = ~expand_kv_heads(seen.any(dim=-1), heads)  # torch says 0 there
        total = total.reshape(rows, heads, new).masked_fill(blind, -math.inf)
    else:
        out, total = _sdpa(*laid, score.scale, score.dropout), None
    out = out.reshape(rows, 1, heads, -1) if new == 1 else out.reshape(rows, heads, new, -1).transpose(1, 2)
    return AttentionOutput(out, lse=total)


def _as_bias(q: Tensor, reading: AttentionMask, score: AttentionParams, low: int, high: int) -> Tensor:
    """[R, 1, K or H, queries, S]: what is added to the logits, -inf where a key is not to be seen."""
    seen, wide = reading.visible(low, high), q.dtype
    if q.device.type == "cpu":
        wide = torch.promote_types(wide, torch.float32)
    added = reading.additive_bias(score, q.shape[2], wide, low, high)
    if added is None:
        return torch.zeros_like(seen, dtype=wide).masked_fill_(~seen, -math.inf)
    return added.masked_fill(~expand_kv_heads(seen, added.shape[1]), -math.inf)


def _to_sdpa_layout(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As a fused kernel takes them: q [B, heads, queries, D]; k, v [B, kv heads, S, D]; mask [B, 1 or heads, ..].

    One query: its group's heads become the queries of one kv head.  Masks of kv heads: each becomes a row of its own.
    """
    rows, new, heads, dim = q.shape
    kv_heads = k.shape[1]
    if new == 1 and heads != kv_heads:
        return (
            q.view(rows, kv_heads, -1, dim),
            k,
            v,
            mask.reshape(rows, kv_heads, -1, mask.shape[-1]) if mask.shape[1] == heads else mask,
        )
    if mask.shape[1] not in (1, heads):
        q, (k, v, mask) = (
            q.transpose(1, 2).reshape(rows * kv_heads, -1, new, dim),
            (x.flatten(0, 1).unsqueeze(1) for x in (k, v, mask)),
        )
        return q, k, v, mask
    return q.transpose(1, 2), k, v, mask


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """``mask`` None: a triangle."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _sdpa_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The kernel behind torch's function, which keeps the denominator to itself -> out, lse [B, heads, queries]."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, attn_mask=mask.expand(q.shape[0], q.shape[1], q.shape[2], -1), scale=scale)
    return out, lse


def attention_logits(
    q: Tensor, k: Tensor, reading: AttentionMask, score: AttentionParams, low: int, high: int
) -> Tensor:
    """[R, H, high - low, S] in float32 at least, -inf where a key is not to be seen."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, new, heads, dim = q.shape
    grouped = q.to(wide).transpose(1, 2).reshape(rows, k.shape[1], -1, dim)  # [R, K, (H/K) * L, D]
    logits = (grouped @ k.to(wide).transpose(-1, -2)).view(rows, heads, new, k.shape[2]) * score.scale
    if score.logit_softcap is not None:
        logits = score.logit_softcap * torch.tanh(logits / score.logit_softcap)
    added = reading.additive_bias(score, heads, wide, low, high)
    logits = logits if added is None else logits + added
    return logits.masked_fill(~expand_kv_heads(reading.visible(low, high), heads), -math.inf)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reading: AttentionMask,
    score: AttentionParams,
    low: int,
    high: int,
    want: bool,
    lse: bool,
) -> AttentionOutput:
    rows, new, heads, _ = q.shape
    logits = attention_logits(q, k, reading, score, low, high)
    weights, total = _softmax(logits, score.sink_logits)
    if score.dropout:
        weights = F.dropout(weights, score.dropout)
    out = (weights.view(rows, k.shape[1], -1, k.shape[2]) @ zero_nonfinite(v.to(weights.dtype))).view(
        rows, heads, new, -1
    )
    out = propagate_nonfinite(out, v, reading.visible(low, high)).transpose(1, 2)
    if lse:
        return AttentionOutput(out, weights if want else None, logits if want else None, total.squeeze(-1))
    return AttentionOutput(out.to(q.dtype), weights, logits) if want else AttentionOutput(out.to(q.dtype))


def _softmax(logits: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Over the last dimension, with the row's maximum taken off; a row of -inf gives zeros, not NaN.

    -> the weights, and the logarithm of the denominator with a last dimension of one.
    """
    top = logits.amax(dim=-1, keepdim=True)
    if sink_logits is not None:
        sinks = sink_logits.to(logits.dtype).view(1, -1, 1, 1)
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == -math.inf, 0.0)
    exp = (logits - top).exp()
    total = exp.sum(dim=-1, keepdim=True)
    if sink_logits is not None:
        total = total + (sinks - top).exp()
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    return exp / total, (top + total.log()).masked_fill(nothing, -math.inf)


def zero_nonfinite(v: Tensor) -> Tensor:
    """v with what is not finite as zero, so that a weight of zero times it is zero."""
    return v if _finite(v) else torch.where(torch.isfinite(v), v, torch.zeros_like(v))


def propagate_nonfinite(out: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """A query that *may* see a value that is not finite gets NaN: faults are loud where they are visible."""
    if _finite(v):
        return out
    broken = (~torch.isfinite(v)).any(dim=-1)  # [R, K, S]
    reached = (seen & broken.unsqueeze(2)).any(dim=-1)  # [R, K, L]
    return out.masked_fill(reached.repeat_interleave(out.shape[1] // v.shape[1], dim=1).unsqueeze(-1), math.nan)


def _slice_positions(mark: TokenPositions, low: int, high: int) -> TokenPositions:
    return TokenPositions(*(None if x is None else x[:, low:high] for x in mark))  # type: ignore[arg-type]
