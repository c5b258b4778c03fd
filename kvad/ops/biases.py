"""What distances add to the logits of attention: slopes (ALiBi), buckets (T5), and biases of one's own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.step import AlibiSlopes, AttentionPattern, PositionBias, RelativeBuckets

__all__ = ["position_bias", "expand_kv_heads", "t5_bucket"]


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
