"""Attention whose bits depend on the query's own row alone: fixed tiles of queries, and of keys at fixed positions.

Tile t holds the keys at positions ``t * KEYS .. (t + 1) * KEYS - 1`` of a row, wherever a memory keeps them, and tiles
are added in ascending order.  The maximum is taken over all keys first (which rounds nothing), so a tile in which a
query sees nothing adds exactly zero: neither a chunk's end, nor the width of a table, nor a longer neighbour shows.

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
    q: Tensor, k: Tensor, v: Tensor, reading: AttentionMask, score: AttentionParams, tiles: TileSizes
) -> Tensor:
    """q [R, L, H, D], k [R, K, S, D], v [R, K, S, Dv] -> out [R, L, H, Dv] in q's dtype; see ``ops/attend.py``."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    grid = _grid(reading)
    rows, new, heads, _ = q.shape
    group, slots = heads // k.shape[1], grid.reading.shape[2]
    sizes = sorted(
        {round_up_to_group(size, group) // group for size in tiles.sizes}
    )  # queries: a group is read together
    fitting = tuple(size for size in sizes if rows * heads * size * slots <= SCORE_BUDGET)
    made = []
    for low, high in split_tiles(new, fitting or (sizes[0],)):
        block = q[:, low : min(high, new)], low, high - low
        out = _block(block, k, v, grid, score)
        if not math.isfinite(out.sum().item()):  # 0 x NaN: what nobody sees must be taken away
            out = _block(block, k, zero_nonfinite(v), grid, score)
            out = propagate_nonfinite(out.transpose(1, 2), v, reading.visible(low, min(high, new))).transpose(1, 2)
        made.append(out)
    return (made[0] if len(made) == 1 else torch.cat(made, dim=1)).to(q.dtype)


class _Grid:
    """A reading's keys in the order of their positions, each tile's first one at a multiple of KEYS.

    ``index`` [R, tiles * KEYS]: where each lies among the slots; None: there already.
    """

    def __init__(self, reading: AttentionMask) -> None:
        assert not reading.per_head and reading.weight is None, "aligned tiles are of whole tokens"
        at = reading.keys.position
        rows, slots = at.shape
        seen = at >= 0
        self.index: Tensor | None = None
        if bool((seen & (at != torch.arange(slots, device=at.device))).any()):
            first = torch.where(seen, at, at.amax() + 1).amin(dim=-1, keepdim=True) // KEYS * KEYS
            width = -(-int((at - first).amax().item() + 1) // KEYS) * KEYS
            cells = torch.where(seen, at - first, width)  # what is not there goes to a cell behind the last
            order = torch.arange(slots, device=at.device).expand(rows, -1)
            self.index = order.new_zeros((rows, width + 1)).scatter_(1, cells, order)[:, :width]
            at = at.new_full((rows, width + 1), -1).scatter_(1, cells, at)[:, :width]
            assert int((at >= 0).sum()) == int(seen.sum()), "two keys of a row at one position"
        else:
            at = F.pad(at, (0, -slots % KEYS), value=-1)
        self.reading = AttentionMask(reading.queries, TokenPositions(at), reading.pattern)
        self._kept: dict[int, list[int]] = {}

    def kept(self, low: int, seen: Tensor) -> list[int]:
        """The tiles of which a block of queries sees anything; ``seen`` [R, 1, queries, tiles * KEYS]."""
        if low not in self._kept:
            self._kept[low] = (
                seen.unflatten(-1, (-1, KEYS)).any_rank(-1).flatten(0, 2).any_rank(0).nonzero().flatten().tolist()
            )
        return self._kept[low]

    def tile(self, x: Tensor, number: int) -> Tensor:
        """x [R, K, S, D] -> [R * K, KEYS, D]."""
        low = number * KEYS
        if self.index is not None:
            at = self.index[:, None, low : low + KEYS, None].expand(-1, x.shape[1], -1, x.shape[3])
            x = x.gather(2, at)
        else:
            x = x[:, :, low : low + KEYS]
            x = x if x.shape[2] == KEYS else pad_to(x, 2, KEYS)
        return x.flatten(0, 1).to(compute_dtype(x.dtype))


def _grid(reading: AttentionMask) -> _Grid:
    """Made once per reading, for the layers that share it."""
    if not isinstance(reading.aligned, _Grid):
        reading.aligned = _Grid(reading)
    return reading.aligned


def _block(block: tuple[Tensor, int, int], k: Tensor, v: Tensor, grid: _Grid, score: AttentionParams) -> Tensor:
    """One block of queries [R, n, H, D], its first one and its size in a tile -> [R, n, H, Dv], as wide as computed."""
    q, low, size = block
    rows, new, heads, dim = q.shape
    wide, value_dim = compute_dtype(q.dtype), v.shape[-1]
    seen = grid.reading.visible(low, low + new)
    kept = grid.kept(low, seen)
    out = q.new_zeros((rows * k.shape[1], heads // k.shape[1] * size, -(-value_dim // NARROW) * NARROW), dtype=wide)
    total = q.new_zeros((rows, heads, size), dtype=wide)
    if kept:
        turned = pad_to(q.to(wide), 1, size).transpose(1, 2).reshape(rows * k.shape[1], -1, dim)
        scores = [torch.bmm(turned, grid.tile(k, t).mT).view(rows, heads, size, KEYS) for t in kept]
        logits = _logits(torch.stack(scores), seen, kept, low, new, grid.reading, score)
        top = logits.amax(dim=-1).amax(dim=0)
        if score.sink_logits is not None:
            top = torch.maximum(top, score.sink_logits.to(wide).view(1, -1, 1))
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = (logits - top.unsqueeze(-1)).exp()
        sums = weights.sum(dim=-1)
        for number, t in enumerate(kept):
            values = grid.tile(v, t)
            values = values if out.shape[-1] == value_dim else pad_to(values, 2, out.shape[-1])
            out = out + torch.bmm(weights[number].view(out.shape[0], -1, KEYS), values)
            total = total + sums[number]
        if score.sink_logits is not None:
            total = total + (score.sink_logits.to(wide).view(1, -1, 1) - top).exp()
    out = out[..., :value_dim].reshape(rows, heads, size, value_dim) / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return out[:, :, :new].transpose(1, 2)


def _logits(
    scores: Tensor, seen: Tensor, kept: list[int], low: int, new: int, reading: AttentionMask, score: AttentionParams
) -> Tensor:
    """q.k of tiles [n, R, H, size, KEYS] -> logits, -inf where a key is not to be seen (or a query only fills up)."""
    size, heads = scores.shape[3], scores.shape[2]

    def tiled(x: Tensor) -> Tensor:
        """[R, heads, new, tiles * KEYS] -> [n, R, heads, size, KEYS]."""
        whole: Tensor = F.pad(x, (0, 0, 0, size - new)).unflatten(-1, (-1, KEYS)).permute(3, 0, 1, 2, 4)
        return whole[kept]

    logits = scores * score.scale
    if score.logit_softcap is not None:
        logits = score.logit_softcap * torch.tanh(logits / score.logit_softcap)
    added = reading.additive_bias(score, heads, scores.dtype, low, low + new)
    logits = logits if added is None else logits + tiled(added)
    return logits.masked_fill(~tiled(seen), -math.inf)
