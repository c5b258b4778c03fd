"""What a row's bits depend on: its own tokens, and not how many rows or tokens are computed beside it.

A matrix product picks its kernel, and so the order of its sums, by how many rows it gets; a function of elements may
take other instructions for the last few of a tensor.  So here products come in tiles of a few fixed numbers of token
rows, padded with zeros, and elements in whole vectors.  Attention over fixed tiles of keys is ``ops/aligned.py``.

That a row of a tile gets the same bits at any place, beside any other rows and in a tile of any of the sizes, is no
promise of the libraries: :func:`measure` tries it for every shape of a model, on this machine and with this number of
threads, when an engine starts; what does not hold is not used, and where nothing holds the engine is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.errors import ConfigError

SIZES = (8, 32, 128)  # token rows of a tile; the most is as fast as any
QUERIES = (8, 12, 32, 128)  # the same, of attention: in groups of 3 or 5 heads 8 become 9 or 10, which may not hold
NARROW = 16  # products of fewer output features differ from place to place; they get features of zeros
VECTOR = 64  # elements; a multiple of two vectors of any dtype and instruction set
SERIAL = 1 << 14  # elements that torch gives to one thread, whatever the function
KEYS = 128  # keys of a tile of attention


class TileSizes(NamedTuple):
    """The sizes of tiles in use, ascending: any split of a step's tokens into them gives the same bits."""

    sizes: tuple[int, ...]


class MatmulShape(NamedTuple):
    """A shape to try: [rows, inner] x [outer, inner].

    ``batch``: so many at a time, as attention has them (0: a linear layer), in rows of whole ``group``s of heads;
    ``across``: the second one lies as [inner, outer].
    """

    in_features: int
    out_features: int
    dtype: torch.dtype
    bias: bool = False
    batch: int = 0
    group: int = 1
    across: bool = False


def tiled_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: TileSizes) -> Tensor:
    """x [.., in], weight [out, in] -> [.., out], in tiles of token rows."""
    flat = x.reshape(-1, x.shape[-1])
    narrow = max(NARROW - weight.shape[0], 0)
    if narrow:
        weight = F.pad(weight, (0, 0, 0, narrow))
        bias = None if bias is None else F.pad(bias, (0, narrow))
    spans = list(split_tiles(flat.shape[0], tiles.sizes))
    aligned = pad_to(flat, 0, spans[-1][1] if spans else 0)
    made = [F.linear(aligned[low:high], weight, bias) for low, high in spans]
    out = made[0] if len(made) == 1 else torch.cat(made) if made else flat.new_zeros((0, weight.shape[0]))
    features = weight.shape[0] - narrow
    return out[: flat.shape[0], :features].reshape(*x.shape[:-1], features)


def split_tiles(count: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(low, high) of tiles that cover ``count`` rows: as many of the largest as are full, then smaller ones; the last
    one may end beyond.    cut(45, (8, 32))  ->  (0, 32) (32, 40) (40, 48)"""
    low = 0
    for size in sorted(sizes, reverse=True):
        while count - low >= size or (size == min(sizes) and low < count):
            yield low, low + size
            low += size


def pad_to(x: Tensor, dim: int, size: int) -> Tensor:
    """x, contiguous and where torch would allocate it, with zeros to ``size`` along a dimension."""
    if x.shape[dim] == size and x.is_contiguous() and x.data_ptr() % 64 == 0:
        return x
    out = x.new_zeros((*x.shape[:dim], size, *x.shape[dim + 1 :]))
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out


def elementwise(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f of each element, by the same instructions wherever it stands: whole vectors, and no cut between threads."""
    flat = x.reshape(-1)
    if flat.numel() % VECTOR:
        flat = pad_to(flat, 0, -(-flat.numel() // VECTOR) * VECTOR)
    made = f(flat) if flat.numel() <= SERIAL else torch.cat([f(piece) for piece in flat.split(SERIAL)])
    return made[: x.numel()].view(x.shape)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What attention computes in."""
    return torch.promote_types(dtype, torch.float32)


@torch.inference_mode()
def find_invariant_tiles(products: Iterable[MatmulShape], sizes: tuple[int, ...] = SIZES) -> TileSizes:
    """Which of these tiles give every row of every product the same bits on this machine, with this number of threads.

    ConfigError where the largest is not among them, or where a function of elements depends on the element's place.
    """
    _try_functions()
    for shape in sorted(set(products), key=str):
        sizes = tuple(_agreeing(shape, sizes))
        if SIZES[-1] not in sizes:
            raise _refused(
                f"a product of {shape.in_features} by {shape.out_features} in {str(shape.dtype).removeprefix('torch.')}"
            )
    return TileSizes(sizes)


def _agreeing(shape: MatmulShape, sizes: tuple[int, ...]) -> list[int]:
    """The sizes of tiles that agree with the largest, at every place of a row and beside other rows."""
    most, run = round_up_to_group(SIZES[-1], shape.group), _runner(shape)
    x = torch.randn(max(shape.batch, 1), most, shape.in_features, generator=torch.Generator().manual_seed(1))
    x = x.to(shape.dtype)
    right = run(x, most)
    agreeing = []
    for size in sizes:
        tile = round_up_to_group(size, shape.group)  # one of each size, turned round: rows change places and neighbours
        turned = (run(x[:, :tile].roll(by, 1), tile).roll(-by, 1) for by in (3, tile // 2 + 1))
        if all(torch.equal(other, right[:, :tile]) for other in turned):
            agreeing.append(size)
    return agreeing


def _runner(shape: MatmulShape) -> Callable[[Tensor, int], Tensor]:
    """x [batch, rows, inner], rows of a tile -> [batch, rows, outer], with the weights of a product."""
    outer, batch = (
        -(-shape.out_features // NARROW) * NARROW if shape.batch else max(shape.out_features, NARROW),
        max(shape.batch, 1),
    )
    lies = (batch, shape.in_features, outer) if shape.across else (batch, outer, shape.in_features)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(lies, generator=draw).to(shape.dtype)
    bias = torch.randn(outer, generator=draw).to(shape.dtype) if shape.bias else None

    def run(x: Tensor, size: int) -> Tensor:
        tiles = [pad_to(tile, 1, size) for tile in x.split(size, dim=1)]
        if not shape.batch:
            return torch.cat([F.linear(tile[0], weight[0], bias) for tile in tiles])[: x.shape[1]].unsqueeze(0)
        turned = weight if shape.across else weight.mT
        made = torch.cat([torch.bmm(tile, turned) for tile in tiles], dim=1)[:, : x.shape[1]]
        alone = torch.bmm(tiles[0][-1:], turned[-1:])  # one of the batch, as of a single row
        return made if torch.equal(alone, made[-1:, :size]) else torch.full_like(made, float("nan"))

    return run


def round_up_to_group(size: int, group: int) -> int:
    """The rows of a tile of whole groups: at least ``size``."""
    return -(-size // group) * group


def _try_functions() -> None:
    """Attention, rotary angles and softmax use these as they are: they must not care for the element's place."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(VECTOR * 5 + 7, generator=draw) * 8 + 0.1
    for name in ("exp", "tanh", "cos", "sin", "log", "sqrt", "rsqrt"):
        f = getattr(torch, name)
        if not torch.equal(torch.cat([f(one) for one in x.split(1)]), f(x)):
            raise _refused(f"{name} of a vector")
    rows = torch.rand(9, KEYS, generator=draw)
    if not torch.equal(torch.cat([row.sum(-1) for row in rows.split(1)]), rows.sum(-1)):
        raise _refused("a sum over keys")


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"deterministic: on this machine, with {torch.get_num_threads()} threads, {what} depends on what is beside it",
        "try another number of threads (OMP_NUM_THREADS), or run without --deterministic",
    )
