"""Batch-invariant operations: a row's bits depend on its own tokens only, not on the batch.

A matrix product chooses its kernel, and so the order of its sums, by the number of rows; an elementwise function may
use other instructions for the last elements of a tensor. Therefore products are computed in tiles of a few fixed sizes,
padded with zeros, and elements in whole vectors.

No library guarantees that a row of a tile gets the same bits at any index, with any other rows and in a tile of any
size. ``find_invariant_tiles`` tests this for every shape of a model, on this machine and with this number of
threads, when an engine starts. Sizes that fail are not used; if none is left, the engine refuses to start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.errors import ConfigError
from kvad.model_input import AttentionParams, TokenPositions
from kvad.ops.attention import SCORE_BUDGET, AttentionMask, propagate_nonfinite, zero_nonfinite
from kvad.ops.attention import TileSizes as TileSizes

SIZES = (8, 32, 128)  # token rows of a tile; the largest is as fast as any
QUERIES = (8, 12, 32, 128)  # the same for attention: with groups of 3 or 5 heads 8 becomes 9 or 10, which may fail
NARROW = 16  # products with fewer output features depend on the row's index; they are padded with zero features
VECTOR = 64  # elements; a multiple of two vectors of any dtype and instruction set
SERIAL = 1 << 14  # elements that torch gives to one thread, whatever the function
KEYS = 128  # keys of a tile of attention


class MatmulShape(NamedTuple):
    """Shape of a product to test: [rows, in_features] x [out_features, in_features]."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    bias: bool = False
    batch: int = 0  # products per call, in attention; 0: a linear layer
    group: int = 1  # rows come in whole groups of this many heads
    across: bool = False  # the second matrix is stored as [in_features, out_features]


def tiled_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: TileSizes) -> Tensor:
    """Multiply x [.., in] by weight [out, in] -> [.., out], in tiles of token rows."""
    flat = x.reshape(-1, x.shape[-1])
    narrow = max(NARROW - weight.shape[0], 0)
    if narrow:
        weight = F.pad(weight, (0, 0, 0, narrow))
        bias = None if bias is None else F.pad(bias, (0, narrow))
    spans = list(split_tiles(flat.shape[0], tiles.sizes))
    aligned = pad_to(flat, 0, spans[-1][1] if spans else 0)
    outs = [F.linear(aligned[low:high], weight, bias) for low, high in spans]
    out = outs[0] if len(outs) == 1 else torch.cat(outs) if outs else flat.new_zeros((0, weight.shape[0]))
    features = weight.shape[0] - narrow
    return out[: flat.shape[0], :features].reshape(*x.shape[:-1], features)


def split_tiles(count: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield (low, high) of tiles that cover ``count`` rows: full large ones first; the last one may end beyond.

    split_tiles(45, (8, 32)) -> (0, 32) (32, 40) (40, 48)
    """
    low = 0
    for size in sorted(sizes, reverse=True):
        while count - low >= size or (size == min(sizes) and low < count):
            yield low, low + size
            low += size


def pad_to(x: Tensor, dim: int, size: int) -> Tensor:
    """Pad x with zeros to ``size`` along a dim; the result is contiguous and aligned like a new tensor."""
    if x.shape[dim] == size and x.is_contiguous() and x.data_ptr() % 64 == 0:
        return x
    out = x.new_zeros((*x.shape[:dim], size, *x.shape[dim + 1 :]))
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out


def elementwise(f: Callable[..., Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
    """Apply f with the same instructions for every element: in whole vectors, and without a split between threads."""
    flat = x.reshape(-1)
    if flat.numel() % VECTOR:
        flat = pad_to(flat, 0, -(-flat.numel() // VECTOR) * VECTOR)
    chunks = [f(chunk, *parameters) for chunk in flat.split(SERIAL)]
    out = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    return out[: x.numel()].view(x.shape)


@torch.inference_mode()
def find_invariant_tiles(products: Iterable[MatmulShape], sizes: tuple[int, ...] = SIZES) -> TileSizes:
    """Return the tile sizes that are batch-invariant for all products on this machine, with this number of threads.

    Raises:
        ConfigError: If the largest size is not, or if an elementwise function depends on the element's index.
    """
    _check_functions()
    for shape in sorted(set(products), key=str):
        sizes = tuple(_agreeing(shape, sizes))
        if SIZES[-1] not in sizes:
            raise _invariance_error(
                f"a product of {shape.in_features} by {shape.out_features} in {str(shape.dtype).removeprefix('torch.')}"
            )
    return TileSizes(sizes)


def _agreeing(shape: MatmulShape, sizes: tuple[int, ...]) -> list[int]:
    """Return the tile sizes that agree with the largest one, at every index of a row and with other neighbors."""
    largest, run = round_up_to_group(SIZES[-1], shape.group), _runner(shape)
    x = torch.randn(max(shape.batch, 1), largest, shape.in_features, generator=torch.Generator().manual_seed(1))
    x = x.to(shape.dtype)
    expected = run(x, largest)
    agreeing = []
    for size in sizes:
        tile = round_up_to_group(size, shape.group)  # one tile of each size; rolling changes indices and neighbors
        rolled = (run(x[:, :tile].roll(by, 1), tile).roll(-by, 1) for by in (3, tile // 2 + 1))
        if all(torch.equal(out, expected[:, :tile]) for out in rolled):
            agreeing.append(size)
    return agreeing


def _runner(shape: MatmulShape) -> Callable[[Tensor, int], Tensor]:
    """Return a function (x [batch, rows, in], tile size) -> [batch, rows, out] with random weights."""
    batch, out_features = max(shape.batch, 1), max(shape.out_features, NARROW)
    if shape.batch:
        out_features = -(-shape.out_features // NARROW) * NARROW
    layout = (batch, shape.in_features, out_features) if shape.across else (batch, out_features, shape.in_features)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(layout, generator=generator).to(shape.dtype)
    bias = torch.randn(out_features, generator=generator).to(shape.dtype) if shape.bias else None

    def run(x: Tensor, size: int) -> Tensor:
        tiles = [pad_to(tile, 1, size) for tile in x.split(size, dim=1)]
        if not shape.batch:
            return torch.cat([F.linear(tile[0], weight[0], bias) for tile in tiles])[: x.shape[1]].unsqueeze(0)
        matrix = weight if shape.across else weight.mT
        out = torch.cat([torch.bmm(tile, matrix) for tile in tiles], dim=1)[:, : x.shape[1]]
        single = torch.bmm(tiles[0][-1:], matrix[-1:])  # one product of the batch, as for a single sequence
        return out if torch.equal(single, out[-1:, :size]) else torch.full_like(out, float("nan"))

    return run


def round_up_to_group(size: int, group: int) -> int:
    """Round ``size`` up to whole groups."""
    return -(-size // group) * group


def _check_functions() -> None:
    """Check that the functions used by attention, RoPE and softmax do not depend on the element's index."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(VECTOR * 5 + 7, generator=generator) * 8 + 0.1
    for name in ("exp", "tanh", "cos", "sin", "log", "sqrt", "rsqrt"):
        f = getattr(torch, name)
        if not torch.equal(torch.cat([f(element) for element in x.split(1)]), f(x)):
            raise _invariance_error(f"{name} of a vector")
    rows = torch.rand(9, KEYS, generator=generator)
    if not torch.equal(torch.cat([row.sum(-1) for row in rows.split(1)]), rows.sum(-1)):
        raise _invariance_error("a sum over keys")


def _invariance_error(operation: str) -> ConfigError:
    return ConfigError(
        f"deterministic: on this machine, with {torch.get_num_threads()} threads, {operation} depends on the batch",
        "try another number of threads (OMP_NUM_THREADS), or run without --deterministic",
    )


# Attention: fixed tiles of queries, and of keys at fixed positions. Tile t contains the keys at positions t * KEYS ..
# (t + 1) * KEYS - 1 of a sequence, whatever their slots, and tiles are added in ascending order. The maximum is taken
# over all keys first (without rounding), so a tile in which a query sees no key adds exactly zero. The ends of chunks,
# the width of the table and longer neighbors change nothing.
#
#     out = sum_t exp(z_t - max z) v_t / sum_t sum exp(z_t - max z)


def invariant_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, params: AttentionParams, tiles: TileSizes
) -> Tensor:
    """Compute attention with the shapes and guarantees of ``ops.attention.dot_product_attention``."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    if not isinstance(mask.aligned, _Grid):
        mask.aligned = _Grid(mask)  # for all layers that share the mask
    grid = mask.aligned
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
            is_seen = seen.unflatten(-1, (-1, KEYS)).any(-1).flatten(0, 2).any(0)
            self._visible_tiles[low] = is_seen.nonzero().flatten().tolist()
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
        return x.flatten(0, 1).to(torch.promote_types(x.dtype, torch.float32))


def _block(block: tuple[Tensor, int, int], k: Tensor, v: Tensor, grid: _Grid, params: AttentionParams) -> Tensor:
    """Compute a block (queries [R, n, H, D], the first query, the tile size) -> [R, n, H, Dv] in the compute dtype."""
    q, low, size = block
    rows, new, heads, dim = q.shape
    wide, value_dim = torch.promote_types(q.dtype, torch.float32), v.shape[-1]
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
