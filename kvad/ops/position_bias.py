"""Position biases of attention logits: ALiBi, T5's relative buckets, and custom encodings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.model_input import AlibiSlopes, AttentionPattern, DisentangledBias, PositionBias, RelativeBuckets


def expand_kv_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each kv head's entry for its query heads: [R, 1 or K, ...] -> [R, 1 or heads, ...]."""
    return x if x.shape[1] in (1, heads) or heads == 1 else x.repeat_interleave(heads // x.shape[1], dim=1)


def position_bias(
    bias: AlibiSlopes | RelativeBuckets | PositionBias,
    queries: Tensor,
    keys: Tensor,
    pattern: AttentionPattern | None = None,
) -> Tensor:
    """Compute the bias [R, H, L, S] from positions of queries [R, L] and keys [R, S] or [R, K, S].

    ``pattern`` renumbers the distances if it renumbers sinks.
    """
    renumbers = pattern is not None and pattern.renumbers_sinks
    if not isinstance(bias, (AlibiSlopes, RelativeBuckets)):
        assert not renumbers, "a custom position encoding is not renumbered"
        if keys.dim() == 2:
            return bias.compute(queries, keys)
        biases = [bias.compute(queries, at).chunk(keys.shape[1], dim=1) for at in keys.unbind(1)]
        return torch.cat([chunks[head] for head, chunks in enumerate(biases)], dim=1)  # each kv head's query heads
    keys, queries = keys.unsqueeze(1) if keys.dim() == 2 else keys, queries.unsqueeze(1)  # [R, 1 or K, S], [R, 1, L]
    if pattern is None:
        ahead = keys.unsqueeze(-2) - queries.unsqueeze(-1)  # k - q
    else:
        ahead, queries = -pattern.distance(queries, keys), pattern.renumbered_query(queries) if renumbers else queries
    if isinstance(bias, AlibiSlopes):
        ahead = expand_kv_heads(ahead, bias.slopes.shape[0])
        slopes = bias.slopes.view(1, -1, 1, 1)
        if bias.round_to_bfloat16:
            at_key = slopes.bfloat16() * (queries.unsqueeze(-1) + ahead).bfloat16()
            return (at_key.to(slopes.dtype) - slopes * queries.unsqueeze(-1).to(slopes.dtype)) * bias.factor
        return -slopes * bias.factor * ahead.abs().to(slopes.dtype)
    bucket = t5_bucket(ahead, bias.table.shape[0], bias.max_distance, bias.bidirectional)  # [R, 1 or K, L, S]
    if bucket.shape[1] == 1:
        return F.embedding(bucket[:, 0], bias.table).permute(0, 3, 1, 2)
    heads = torch.arange(bias.table.shape[1], device=bucket.device).view(1, -1, 1, 1)
    return bias.table[expand_kv_heads(bucket, heads.numel()), heads]


def disentangled_bias(
    bias: DisentangledBias, q: Tensor, k: Tensor, positions: tuple[Tensor, Tensor], scale: float
) -> Tensor:
    """Compute DeBERTa's bias [R, H, L, S] of q [R, L, H, D] and k [R, H, S, D].

    Logit (i, j) has ``scale`` times q_i . key_rows[d] + k_j . query_rows[d], where d is the row of the distance i - j
    (He et al. 2021, eq. 4: the distance of the second term is j - i, and its rows are in the opposite order).
    ``positions`` are those of queries [R, L] and keys [R, S].
    """
    distance = positions[0].unsqueeze(-1) - positions[1].unsqueeze(-2)
    bucket = distance if bias.num_buckets is None else log_bucket(distance, bias.num_buckets, bias.max_distance)
    rows = (bucket + bias.span).clamp(0, 2 * bias.span - 1).unsqueeze(1).expand(-1, q.shape[2], -1, -1)
    terms = []
    if bias.key_rows is not None:
        terms.append(torch.einsum("rlhd,phd->rhlp", q, bias.key_rows).gather(-1, rows))
    if bias.query_rows is not None:
        terms.append(torch.einsum("rhsd,phd->rhsp", k, bias.query_rows).gather(-1, rows.mT).mT)
    return scale * sum(terms[1:], terms[0])


def log_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return DeBERTa-v2's bucket of a distance: itself up to half of the buckets, then logarithmic, with its sign.

    Example (8 buckets, 20): distances 0 .. 20 -> 0 1 2 3 4 5 5 6 6 6 6 7 7 7 7 7 8 8 8 8 8.
    """
    half = num_buckets // 2
    inside = (distance < half) & (distance > -half)
    size = torch.where(inside, half - 1, distance.abs())
    ratio = torch.log(size / half) / torch.log(torch.tensor((max_distance - 1) / half))
    bucket = (torch.ceil(ratio * (half - 1)) + half) * distance.sign()
    return torch.where(size <= half, distance, bucket.to(distance.dtype))


def t5_bucket(ahead: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Return the bucket of ``ahead`` = k - q (Raffel et al. 2020, sec. 2.1, with the reference code's rounding).

    Bidirectional: half of the buckets are for keys behind, half for keys ahead. Half of a direction's buckets have one
    distance each; the width of the others grows logarithmically up to ``max_distance``.
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
