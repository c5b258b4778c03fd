"""Batch-invariant attention: fixed tiles of queries, and of keys at fixed positions.

Tile t contains the keys at positions ``t * KEYS .. (t + 1) * KEYS - 1`` of a sequence, whatever their slots, and tiles
are added in ascending order. The maximum is taken over all keys first (without rounding), so a tile in which a query
sees no key adds exactly zero. The ends of chunks, the width of the table and longer neighbors change nothing.

    out = sum_t exp(z_t - max z) v_t / sum_t sum exp(z_t - max z)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.model_input import AttentionParams, TokenPositions
from kvad.ops.attention import SCORE_BUDGET, AttentionMask, propagate_nonfinite, zero_nonfinite
from kvad.ops.batch_invariant import KEYS, NARROW, TileSizes, compute_dtype, pad_to, round_up_to_group, split_tiles


def invariant_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, params: AttentionParams, tiles: TileSizes
) -> Tensor:
    """Compute attention with the shapes and guarantees of ``ops.attention.dot_product_attention``."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    grid = _grid(mask)
    rows, new, heads, _ = q.shape
    group, slots = heads // k.shape[1], grid.mask.shape[2]
    sizes = sorted({round_up_to_group(size, group) // group for size in tiles.sizes})  # queries, in whole groups
    fitting = tuple(size for size in sizes if rows * heads * size * slots <= SCORE_BUDGET)
    outs = []
    for low, high in split_tiles(new, fitting or (sizes[0],)):
        block = q[:, low : min(high, new)], low, high - low
        out = _block(block, k, v, grid, params)
        if not math.isfinite(out.sum().item()):  # 0 x NaN: invisible values must be removed
            out = _block(block, k, zero_nonfinite(v), grid, params)
            out = propagate_nonfinite(out.transpose(1, 2), v, mask.visible(low, min(high, new))).transpose(1, 2)
        outs.append(out)
    return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)).to(q.dtype)


class _Grid:
    """A mask's keys in the order of their positions; each tile begins at a multiple of KEYS.

    ``index`` [R, tiles * KEYS] has the slot of each key; None if the slots are in this order already.
    """

    def __init__(self, mask: AttentionMask) -> None:
        assert not mask.per_head and mask.weight is None, "batch-invariant tiles need whole tokens"
        at = mask.keys.position
        rows, slots = at.shape
        seen = at >= 0
        self.index: Tensor | None = None
        if bool((seen & (at != torch.arange(slots, device=at.device))).any()):
            first = torch.where(seen, at, at.amax() + 1).amin(dim=-1, keepdim=True) // KEYS * KEYS
            width = -(-int((at - first).amax().item() + 1) // KEYS) * KEYS
            cells = torch.where(seen, at - first, width)  # empty slots go to an extra cell at the end
            order = torch.arange(slots, device=at.device).expand(rows, -1)
            self.index = order.new_zeros((rows, width + 1)).scatter_(1, cells, order)[:, :width]
            at = at.new_full((rows, width + 1), -1).scatter_(1, cells, at)[:, :width]
            assert int((at >= 0).sum()) == int(seen.sum()), "two keys of a sequence have the same position"
        else:
            at = F.pad(at, (0, -slots % KEYS), value=-1)
        self.mask = AttentionMask(mask.queries, TokenPositions(at), mask.pattern)
        self._visible_tiles: dict[int, list[int]] = {}

    def visible_tiles(self, low: int, seen: Tensor) -> list[int]:
        """Return the tiles with a key that the block sees; ``seen`` [R, 1, queries, tiles * KEYS]."""
        if low not in self._visible_tiles:
            self._visible_tiles[low] = (
                seen.unflatten(-1, (-1, KEYS)).any(-1).flatten(0, 2).any(0).nonzero().flatten().tolist()
            )
        return self._visible_tiles[low]

    def tile(self, x: Tensor, index: int) -> Tensor:
        """Return one tile of x: [R, K, S, D] -> [R * K, KEYS, D]."""
        low = index * KEYS
        if self.index is not None:
            at = self.index[:, None, low : low + KEYS, None].expand(-1, x.shape[1], -1, x.shape[3])
            x = x.gather(2, at)
        else:
            x = x[:, :, low : low + KEYS]
            x = x if x.shape[2] == KEYS else pad_to(x, 2, KEYS)
        return x.flatten(0, 1).to(compute_dtype(x.dtype))


def _grid(mask: AttentionMask) -> _Grid:
    """Return the mask's grid, built once for the layers that share the mask."""
    if not isinstance(mask.aligned, _Grid):
        mask.aligned = _Grid(mask)
    return mask.aligned


def _block(block: tuple[Tensor, int, int], k: Tensor, v: Tensor, grid: _Grid, params: AttentionParams) -> Tensor:
    """Compute a block (queries [R, n, H, D], the first query, the tile size) -> [R, n, H, Dv] in the compute dtype."""
    q, low, size = block
    rows, new, heads, dim = q.shape
    wide, value_dim = compute_dtype(q.dtype), v.shape[-1]
    seen = grid.mask.visible(low, low + new)
    tiles = grid.visible_tiles(low, seen)
    out = q.new_zeros((rows * k.shape[1], heads // k.shape[1] * size, -(-value_dim // NARROW) * NARROW), dtype=wide)
    total = q.new_zeros((rows, heads, size), dtype=wide)
    if tiles:
        queries = pad_to(q.to(wide), 1, size).transpose(1, 2).reshape(rows * k.shape[1], -1, dim)
        scores = [torch.bmm(queries, grid.tile(k, t).mT).view(rows, heads, size, KEYS) for t in tiles]
        logits = _logits(torch.stack(scores), seen, tiles, low, new, grid.mask, params)
        top = logits.amax(dim=-1).amax(dim=0)
        if params.sink_logits is not None:
            top = torch.maximum(top, params.sink_logits.to(wide).view(1, -1, 1))
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = (logits - top.unsqueeze(-1)).exp()
        sums = weights.sum(dim=-1)
        for index, t in enumerate(tiles):
            values = grid.tile(v, t)
            values = values if out.shape[-1] == value_dim else pad_to(values, 2, out.shape[-1])
            out = out + torch.bmm(weights[index].view(out.shape[0], -1, KEYS), values)
            total = total + sums[index]
        if params.sink_logits is not None:
            total = total + (params.sink_logits.to(wide).view(1, -1, 1) - top).exp()
    out = out[..., :value_dim].reshape(rows, heads, size, value_dim) / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return out[:, :, :new].transpose(1, 2)


def _logits(
    scores: Tensor, seen: Tensor, tiles: list[int], low: int, new: int, mask: AttentionMask, params: AttentionParams
) -> Tensor:
    """Turn q.k of tiles [n, R, H, size, KEYS] into logits, -inf if invisible or if the query is padding."""
    size, heads = scores.shape[3], scores.shape[2]

    def tiled(x: Tensor) -> Tensor:
        """Cut into tiles: [R, heads, new, tiles * KEYS] -> [n, R, heads, size, KEYS]."""
        all_tiles: Tensor = F.pad(x, (0, 0, 0, size - new)).unflatten(-1, (-1, KEYS)).permute(3, 0, 1, 2, 4)
        return all_tiles[tiles]

    logits = scores * params.scale
    if params.logit_softcap is not None:
        logits = params.logit_softcap * torch.tanh(logits / params.logit_softcap)
    added = mask.additive_bias(params, heads, scores.dtype, low, low + new)
    logits = logits if added is None else logits + tiled(added)
    return logits.masked_fill(~tiled(seen), -math.inf)
