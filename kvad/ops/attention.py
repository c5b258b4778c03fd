"""Scaled dot-product attention (Vaswani et al. 2017, sec. 3.2.1).

Guarantees: accumulation in at least float32; no [L, S] matrix for a long step (queries are processed in blocks);
a fully masked query gives zeros; NaN or infinity in a slot that is invisible to a query never reaches that query.

Two kernels: ``reference`` (matrix products, any dtype, softcap, sinks, weights) and ``sdpa`` (torch's fused kernel).
The fused kernel multiplies masked values by zero, and 0 x NaN is NaN, so a block whose output is not finite is computed
again by the reference kernel, which reads visible values only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from kvad.ops.position_bias import expand_kv_heads, position_bias


class TileSizes(NamedTuple):
    """Tile sizes of batch-invariant operations (ops/batch_invariant.py); any split into them gives the same bits."""

    sizes: tuple[int, ...]  # ascending


Kernel = Literal["auto", "reference", "sdpa"] | TileSizes
MASK_BUDGET = 1 << 22  # elements of [seqs, queries, slots] created at a time
SCORE_BUDGET = 1 << 24  # elements of [seqs, heads, queries, slots] created at a time, if a kernel needs them


class AttentionOutput(NamedTuple):
    """Result of attention; all fields but ``out`` are returned on request only."""

    out: Tensor  # [R, L, H, Dv]
    weights: Tensor | None = None  # [R, H, L, S]
    scores: Tensor | None = None  # logits [R, H, L, S]
    lse: Tensor | None = None  # [R, H, L], the logarithm of the softmax's denominator
    mass: tuple[Tensor, ...] | None = None  # one [R, K, S] per part: the attention that each key received


class AttentionMask:
    """Visibility in one sub-batch, built once per step and shared by the layers of a cache group.

    Small masks and biases are stored; large ones are computed per block of queries. Positions of queries are [R, L],
    those of keys [R, S], or [R, K, S] if each kv head stores other tokens. ``weight`` [R, S] or [R, K, S] is added to
    the logits: log n for a key that summarizes n tokens.
    """

    def __init__(
        self, queries: TokenPositions, keys: TokenPositions, pattern: AttentionPattern, weight: Tensor | None = None
    ) -> None:
        self.queries, self.keys, self.pattern = queries, keys, pattern
        self.weight = _by_head(weight)
        rows, new = queries.position.shape
        self.shape = (rows, new, keys.position.shape[-1])
        self.per_head = keys.position.dim() == 3
        self._num_elements = math.prod(self.shape) * (keys.position.shape[1] if self.per_head else 1)
        self.aligned: object = None  # the grid of ops/batch_invariant.py
        self._visible: Tensor | None = None
        self._additive_bias: dict[torch.dtype, Tensor] = {}
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}  # by id, with the tensor itself, because ids are reused

    def with_weight(self, weight: Tensor) -> AttentionMask:
        """Return a copy with another weight that shares masks and biases."""
        if self._visible is None and self._num_elements <= MASK_BUDGET:
            self._visible = self._compute_visible(0, self.shape[1])
        other = copy(self)
        other.weight = _by_head(weight)
        return other

    @cached_property
    def is_plain_causal(self) -> bool:
        """True if query i sees exactly keys 0 .. i in every sequence, so that a kernel needs no mask."""
        if self.pattern != AttentionPattern() or self.keys is not self.queries or self.queries.document_id is not None:
            return False
        index = self.queries.causal_index
        return bool((index[:, 1:] > index[:, :-1]).all() & (self.queries.position >= 0).all() & (index >= 0).all())

    def additive_mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return [R, 1 or K, L, S], 0 or -inf if invisible, computed once; None for a plain causal mask."""
        if self.is_plain_causal:
            return None
        if dtype not in self._additive_bias:
            seen = self.visible(0, self.shape[1])
            self._additive_bias[dtype] = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)
        return self._additive_bias[dtype]

    @cached_property
    def sink_shift(self) -> Tensor | None:
        """Distances [R, L] by which each query is moved nearer to the sinks; None if all are zero."""
        if not self.pattern.renumbers_sinks:
            return None
        far = self.queries.position - self.pattern.renumbered_query(self.queries.position)
        return far if bool(far.any()) else None

    @cached_property
    def num_sink_slots(self) -> int:
        """Number of leading slots that contain all sinks."""
        slots = (self.keys.position < self.pattern.num_sinks).logical_and(self.keys.position >= 0).any(dim=0).nonzero()
        return int(slots.max()) + 1 if len(slots) else 0

    def visible(self, low: int, high: int) -> Tensor:
        """Return booleans [R, 1 or K, high - low, S] for queries low..high."""
        if self._num_elements > MASK_BUDGET:
            return self._compute_visible(low, high)
        if self._visible is None:
            self._visible = self._compute_visible(0, self.shape[1])
        return self._visible if high - low == self.shape[1] else self._visible[:, :, low:high]

    def _compute_visible(self, low: int, high: int) -> Tensor:
        tensors = [None if x is None else x[:, low:high] for x in self.queries]
        if not self.per_head:
            return self.pattern.visible(TokenPositions(*tensors), self.keys).unsqueeze(1)  # type: ignore[arg-type]
        spread = TokenPositions(*(None if x is None else x.unsqueeze(1) for x in tensors))  # type: ignore[arg-type]
        return self.pattern.visible(spread, self.keys)

    def bias(self, bias: AlibiSlopes | RelativeBuckets | PositionBias | Tensor, low: int, high: int) -> Tensor:
        """Return the position bias [R, H, high - low, S] of queries low..high."""
        if isinstance(bias, Tensor):
            return bias[:, :, low:high]
        table = None
        if isinstance(bias, (AlibiSlopes, RelativeBuckets)):
            table = bias.slopes if isinstance(bias, AlibiSlopes) else bias.table
        if table is None or math.prod(self.shape) * table.shape[-1] > MASK_BUDGET:
            return position_bias(bias, self.queries.position[:, low:high], self.keys.position, self.pattern)
        if id(table) not in self._biases:
            full = position_bias(bias, self.queries.position, self.keys.position, self.pattern)
            self._biases[id(table)] = table, full
        return self._biases[id(table)][1][:, :, low:high]

    def additive_bias(
        self, params: AttentionParams, heads: int, dtype: torch.dtype, low: int, high: int
    ) -> Tensor | None:
        """Return the sum of bias and weight [R, 1 or H, 1 or high - low, S] in ``dtype``, or None."""
        bias = None if params.bias is None else self.bias(params.bias, low, high).to(dtype)
        if self.weight is None:
            return bias
        weight = expand_kv_heads(self.weight.to(dtype).unsqueeze(2), heads)
        return weight if bias is None else bias + weight

    def max_queries_per_block(self, heads: int, scores: bool) -> int:
        """Return the number of queries per block for which masks (and scores, if needed) fit the budgets."""
        rows, new, slots = self.shape
        per_query = rows * slots * heads if scores else self._num_elements // max(new, 1)
        return max(1, min(new, (SCORE_BUDGET if scores else MASK_BUDGET) // max(per_query, 1)))


def dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    params: AttentionParams,
    *,
    kernel: Kernel = "auto",
    return_weights: bool = False,
    lse: bool = False,
) -> AttentionOutput:
    """Compute attention: q [R, L, H, D], k [R, K, S, D], v [R, K, S, Dv] -> out [R, L, H, Dv] in q's dtype.

    q and k are rotated. Query head h reads key-value head ``h // (H / K)``. With ``return_weights``, scores and weights
    are returned too, computed by the reference kernel. With ``lse``, the log of the denominator is returned too (-inf
    if a query sees no key), and ``out`` keeps the compute dtype.

    Queries are processed in blocks. A block of the fused kernel that is not finite is recomputed in smaller blocks by
    the reference kernel.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)
    plain = params.logit_softcap is None and params.sink_logits is None and not return_weights
    fused = plain and kernel != "reference" and not (q.dtype == torch.float16 and q.device.type == "cpu")
    fused = fused and (not lse or _supports_lse(q, k, v, params))
    assert not (lse and params.dropout), "merged parts are read from a cache, without dropout"
    heads, new = q.shape[2], q.shape[1]
    size = small = mask.max_queries_per_block(heads, scores=True)
    # With a bias, dropout, or another value dim, torch materializes the scores.
    streams = params.bias is None and params.dropout == 0.0 and v.shape[-1] == q.shape[-1]
    if fused and streams and (mask.weight is None or new == 1):
        size = mask.max_queries_per_block(heads, scores=False)
        if new > 1 and _needs_grad(q) and mask.is_plain_causal:
            size = new
    blocks = []
    for low in range(0, new, size):
        high = min(low + size, new)
        output = _fused(q, k, v, mask, params, (low, high), lse) if fused else None
        if output is not None and _finite(output.out):
            blocks.append(output)
            continue
        for start in range(low, high, small):
            span = start, min(start + small, high)
            blocks.append(_reference(q, k, v, mask, params, span, return_weights, lse))
    return blocks[0] if len(blocks) == 1 else _concatenate(blocks)


def _by_head(weight: Tensor | None) -> Tensor | None:
    """Add the head dim: [R, S] or [R, K, S] -> [R, 1 or K, S]."""
    return weight if weight is None or weight.dim() == 3 else weight.unsqueeze(1)


def _concatenate(blocks: Sequence[AttentionOutput]) -> AttentionOutput:
    """Concatenate blocks of queries; what the blocks do not have remains None."""

    def joined(tensors: list[Tensor | None]) -> Tensor | None:
        present = [x for x in tensors if x is not None]  # [R, H, queries, ...] each
        return torch.cat(present, dim=2) if present else None

    weights, scores = joined([block.weights for block in blocks]), joined([block.scores for block in blocks])
    out, lse = torch.cat([block.out for block in blocks], dim=1), joined([block.lse for block in blocks])
    return AttentionOutput(out, weights, scores, lse)


def _supports_lse(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> bool:
    """Return True if a fused kernel returns the denominator: torch's on CPU, without gradients."""
    is_trained = params.bias.table.requires_grad if isinstance(params.bias, RelativeBuckets) else False
    graph = torch.is_grad_enabled() and (is_trained or q.requires_grad or k.requires_grad or v.requires_grad)
    return q.device.type == "cpu" and v.shape[-1] == q.shape[-1] and not graph


def _finite(x: Tensor) -> bool:
    """Return True if the sum is finite; finite terms whose sum overflows only cost a second computation."""
    return math.isfinite(x.detach().sum().item())


def _needs_grad(q: Tensor) -> bool:
    """Return True in training, whose shortcuts must not change the bits of inference."""
    return torch.is_grad_enabled() and q.requires_grad


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, params: AttentionParams, span: tuple[int, int], lse: bool
) -> AttentionOutput:
    """Attend with torch's kernel: queries low..high of q [R, L, H, D], the ``span``."""
    low, high = span
    q = q[:, low:high]
    rows, new, heads, _ = q.shape
    plain = not lse and params.bias is None and mask.weight is None
    if plain and new == mask.shape[1] > 1 and not mask.per_head and _needs_grad(q):
        out = _sdpa(q.transpose(1, 2), k, v, mask.additive_mask(q.dtype), params.scale, params.dropout)
        return AttentionOutput(out.transpose(1, 2))
    seen = mask.visible(low, high)
    attn_mask = seen if plain else _as_bias(q, mask, params, low, high)
    inputs = _to_sdpa_layout(q, k, v, attn_mask)
    if lse:
        query, key, value, attn_mask = inputs
        attn_mask = attn_mask.expand(*query.shape[:3], -1)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # the public function omits lse
        out, total = kernel(query, key, value, attn_mask=attn_mask, scale=params.scale)  # lse [B, heads, queries]
        blind = ~expand_kv_heads(seen.any(dim=-1), heads)  # torch returns 0 for these
        total = total.reshape(rows, heads, new).masked_fill(blind, -math.inf)
    else:
        out, total = _sdpa(*inputs, params.scale, params.dropout), None
    out = out.reshape(rows, 1, heads, -1) if new == 1 else out.reshape(rows, heads, new, -1).transpose(1, 2)
    return AttentionOutput(out, lse=total)


def _as_bias(q: Tensor, mask: AttentionMask, params: AttentionParams, low: int, high: int) -> Tensor:
    """Return the additive mask [R, 1, K or H, queries, S]: bias and weight, -inf if invisible."""
    seen, wide = mask.visible(low, high), q.dtype
    if q.device.type == "cpu":
        wide = torch.promote_types(wide, torch.float32)
    added = mask.additive_bias(params, q.shape[2], wide, low, high)
    if added is None:
        return torch.zeros_like(seen, dtype=wide).masked_fill_(~seen, -math.inf)
    return added.masked_fill(~expand_kv_heads(seen, added.shape[1]), -math.inf)


def _to_sdpa_layout(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arrange for SDPA: q [B, heads, queries, D]; k, v [B, kv heads, S, D]; attn_mask [B, 1 or heads, ..].

    With one query, the heads of a group become the queries of their kv head. With a mask per kv head, each kv head
    becomes a batch entry.
    """
    rows, new, heads, dim = q.shape
    kv_heads = k.shape[1]
    if new == 1 and heads != kv_heads:
        if attn_mask.shape[1] == heads:
            attn_mask = attn_mask.reshape(rows, kv_heads, -1, attn_mask.shape[-1])
        return q.view(rows, kv_heads, -1, dim), k, v, attn_mask
    q = q.transpose(1, 2)
    if attn_mask.shape[1] not in (1, heads):
        q = q.reshape(rows * kv_heads, -1, new, dim)
        k, v, attn_mask = (x.flatten(0, 1).unsqueeze(1) for x in (k, v, attn_mask))
    return q, k, v, attn_mask


def _sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Call torch's fused attention; without a mask it is causal."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=attn_mask is None, scale=scale, enable_gqa=grouped
    )


def attention_logits(q: Tensor, k: Tensor, mask: AttentionMask, params: AttentionParams, low: int, high: int) -> Tensor:
    """Compute the logits [R, H, high - low, S] in at least float32, -inf if invisible."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, new, heads, dim = q.shape
    grouped = q.to(wide).transpose(1, 2).reshape(rows, k.shape[1], -1, dim)  # [R, K, (H/K) * L, D]
    logits = (grouped @ k.to(wide).transpose(-1, -2)).view(rows, heads, new, k.shape[2]) * params.scale
    if params.logit_softcap is not None:
        logits = params.logit_softcap * torch.tanh(logits / params.logit_softcap)
    added = mask.additive_bias(params, heads, wide, low, high)
    logits = logits if added is None else logits + added
    return logits.masked_fill(~expand_kv_heads(mask.visible(low, high), heads), -math.inf)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    params: AttentionParams,
    span: tuple[int, int],
    return_weights: bool,
    lse: bool,
) -> AttentionOutput:
    """Attend with matrix products: queries low..high of q [R, L, H, D], the ``span``."""
    low, high = span
    q = q[:, low:high]
    rows, new, heads, _ = q.shape
    logits = attention_logits(q, k, mask, params, low, high)
    weights, total = _softmax(logits, params.sink_logits)
    if params.dropout:
        weights = F.dropout(weights, params.dropout)
    grouped = weights.view(rows, k.shape[1], -1, k.shape[2]) @ zero_nonfinite(v.to(weights.dtype))
    out = propagate_nonfinite(grouped.view(rows, heads, new, -1), v, mask.visible(low, high)).transpose(1, 2)
    output = AttentionOutput(out, lse=total.squeeze(-1)) if lse else AttentionOutput(out.to(q.dtype))
    return output._replace(weights=weights, scores=logits) if return_weights else output


def _softmax(logits: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute softmax weights and the log of the denominator over the last dim; a row of -inf gives zeros, not NaN."""
    top = logits.amax(dim=-1, keepdim=True)
    if sink_logits is not None:
        sinks = sink_logits.to(logits.dtype).view(1, -1, 1, 1)
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == -math.inf, 0.0)
    exp = (logits - top).exp()
    total = exp.sum(dim=-1, keepdim=True)
    if sink_logits is not None:
        total = total + (sinks - top).exp()
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    return exp / total, (top + total.log()).masked_fill(blind, -math.inf)


def zero_nonfinite(v: Tensor) -> Tensor:
    """Replace values that are not finite by zero, so that zero weights times them are zero."""
    return v if _finite(v) else torch.where(torch.isfinite(v), v, torch.zeros_like(v))


def propagate_nonfinite(out: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Set queries that may see a value that is not finite to NaN, so that numerical errors are visible."""
    if _finite(v):
        return out
    broken = (~torch.isfinite(v)).any(dim=-1)  # [R, K, S]
    reached = (seen & broken.unsqueeze(2)).any(dim=-1)  # [R, K, L]
    return out.masked_fill(reached.repeat_interleave(out.shape[1] // v.shape[1], dim=1).unsqueeze(-1), math.nan)
