"""Attention over several parts, merged by log-sum-exp: one softmax over the keys of all of them.

    out = sum_i exp(lse_i - lse) out_i,    lse = log sum_i exp(lse_i)

A sequence may read parts in different forms: recent keys, older quantized ones, summaries, a shared prefix. Each part
is computed by a suitable kernel (``ops/attention.py``, whose guarantees hold here too), and only its output and its
log-sum-exp are kept. Parts may therefore come from a generator that dequantizes one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from kvad.model_input import AttentionParams
from kvad.ops.attention import AttentionMask, AttentionOutput, Kernel, attention_logits, dot_product_attention


class AttentionPart(NamedTuple):
    """A part of the keys and values that a sub-batch reads; H, K and Dv are equal in all its parts."""

    q: Tensor  # [R, L, H, D], rotated to match this part's keys
    k: Tensor  # [R, K, S, D]
    v: Tensor  # [R, K, S, Dv]
    mask: AttentionMask


def merge_attention(
    parts: Iterable[AttentionPart],
    params: AttentionParams,
    *,
    kernel: Kernel = "auto",
    return_weights: bool = False,
    count: Tensor | None = None,
) -> AttentionOutput:
    """Compute attention over several parts: out [R, L, H, Dv] in q's dtype, and lse [R, H, L] if there are several.

    Args:
        parts: At least one. With ``count`` they are read twice: an iterator's parts are kept in memory until the end,
            those of another iterable are created again.
        return_weights: Also return weights and scores [R, H, L, S] over the concatenated keys of all parts.
        count: Also return the attention that each key received, per part [R, K, S]: the final weights, summed over the
            heads that read the key and over the queries, with these factors of the queries [R, L].
    """
    iterable = list(parts) if count is not None and isinstance(parts, Iterator) else parts
    iterator = iter(iterable)
    first, second = next(iterator, None), next(iterator, None)
    assert first is not None, "attention needs at least one part"
    if second is None:
        output = dot_product_attention(*first, params, kernel=kernel, return_weights=return_weights)
        return output if count is None else output._replace(mass=(_mass(first, params, None, count),))
    pending = [first, second]
    del first, second
    q = pending[0].q
    total, scores = _Sum(), []
    for part in chain(drain(pending), iterator):
        output = _attend_part(part, params._replace(sink_logits=None), kernel, return_weights)
        assert output.lse is not None
        total.add(output.out, output.lse)
        scores.append(output.scores)
    out, lse = total.close(params.sink_logits)
    merged = AttentionOutput(out.to(q.dtype), lse=lse)
    if return_weights:
        all_scores = torch.cat([x for x in scores if x is not None], dim=-1)
        merged = merged._replace(scores=all_scores, weights=(all_scores - _floor_lse(lse).unsqueeze(-1)).exp())
    if count is not None:
        merged = merged._replace(mass=tuple(_mass(part, params, lse, count) for part in iterable))
    return merged


def drain(parts: list[AttentionPart]) -> Iterator[AttentionPart]:
    """Yield parts and remove them from the list, so that each is freed after use."""
    while parts:
        yield parts.pop(0)


def _attend_part(part: AttentionPart, params: AttentionParams, kernel: Kernel, return_weights: bool) -> AttentionOutput:
    """Compute one part's output for all queries, with its lse; a part without keys has lse -inf."""
    q, _, v, mask = part
    rows, new, heads, _ = q.shape
    if mask.shape[2] == 0:
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_full((rows, heads, new), -math.inf, dtype=wide)
        scores = lse.unsqueeze(-1)[..., :0] if return_weights else None
        return AttentionOutput(q.new_zeros((rows, new, heads, v.shape[-1]), dtype=wide), scores=scores, lse=lse)
    return dot_product_attention(*part, params, kernel=kernel, return_weights=return_weights, lse=True)


class _Sum:
    """Running sum of outputs weighted by exp(lse - top), ``top`` the largest lse so far (Milakov & Gimelshein 2018).

    A part in which a query sees no key does not change a bit of its sum.
    """

    _top: Tensor | None = None
    _total: Tensor
    _out: Tensor

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Add a part's out [R, L, H, Dv] and lse [R, H, L]."""
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
        """Return out [R, L, H, Dv] and lse [R, H, L], with the sinks in the denominator."""
        assert self._top is not None, "nothing was added"
        top, total, out = self._top, self._total, self._out
        if sink_logits is not None:
            sinks = sink_logits.to(total.dtype).view(1, -1, 1)
            higher = torch.maximum(top, sinks.detach())
            old = (top - higher).exp()
            total, out, top = total * old + (sinks - higher).exp(), out * _over_values(old), higher
        blind = total == 0
        total = total.masked_fill(blind, 1.0)
        return out / _over_values(total), (_floor_lse(top) + total.log()).masked_fill(blind, -math.inf)


def _floor_lse(lse: Tensor) -> Tensor:
    """Replace -inf by 0, so that -inf minus it stays -inf."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _over_values(share: Tensor) -> Tensor:
    """Align with values: [R, H, L] -> [R, L, H, 1]."""
    return share.transpose(1, 2).unsqueeze(-1)


@torch.no_grad()
def _mass(part: AttentionPart, params: AttentionParams, lse: Tensor | None, count: Tensor) -> Tensor:
    """Compute a part's mass [R, K, S]; ``lse``: the denominators over all parts, None if there is one part."""
    q, k, _, mask = part
    rows, _, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    mass = q.new_zeros((rows, k.shape[1], mask.shape[2]), dtype=wide)
    if mask.shape[2] == 0:
        return mass
    queries = (count != 0).any(dim=0).nonzero().flatten().tolist()
    begin, end = (queries[0], queries[-1] + 1) if queries else (0, 0)
    size = mask.max_queries_per_block(heads, scores=True)
    for low in range(begin, end, size):
        high = min(low + size, end)
        logits = attention_logits(q[:, low:high], k.to(q.dtype), mask, params, low, high)
        denominator = logits.logsumexp(dim=-1) if lse is None else lse[:, :, low:high]
        if lse is None and params.sink_logits is not None:
            denominator = torch.logaddexp(denominator, params.sink_logits.to(wide).view(1, -1, 1))
        weights = (logits - _floor_lse(denominator).unsqueeze(-1)).exp_()
        share = count[:, None, low:high, None].to(wide)  # a query with count 0 may have any weights, NaN included
        weights = torch.where(share != 0, weights * share, torch.zeros_like(weights))
        mass += weights.view(rows, k.shape[1], -1, weights.shape[-1]).sum(dim=2)
    return mass
