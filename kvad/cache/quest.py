"""Reading only the blocks that matter to a query: all is kept, little of it looked at (Tang et al. 2024, Quest).

Each block keeps, per kv head and channel, the smallest and the largest of its keys.  They bound q.k of all its tokens:

    q.k <= sum_d max(q_d min_d, q_d max_d)

A query reads its own block and those of the highest bounds (the largest over the heads of its group); blocks that end
behind it do not count, so that a query of a chunk chooses as it would alone.  A bias by distance is not in the bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvad.cache.cuts import rounded
from kvad.cache.layout import Table, by_head, read
from kvad.cache.sizing import Group
from kvad.cache.store import Store
from kvad.ops.attend import Reading
from kvad.step import EMPTY_BLOCK, Mark, Reach

__all__ = ["Bounds", "ChosenReading"]


class Bounds:
    """Of one layer: ``least`` and ``most`` [blocks, K, 1, D], over the keys that lie in a block."""

    def __init__(self, group: Group, keys: Store, device: torch.device | str) -> None:
        assert group.chooses is not None
        self._keys, self._size = keys, group.block_size
        self._others = -(-group.chooses.budget // group.block_size) - 1  # blocks beside a query's own
        self._bits = 30 if group.keys == "float64" else 12
        dtype = torch.float64 if group.keys == "float64" else torch.float32
        shape = group.blocks, group.mixer.kv_heads, 1, group.mixer.head_dim
        self.least = by_head(*shape, dtype=dtype, fill=torch.inf, device=device)
        self.most = by_head(*shape, dtype=dtype, fill=-torch.inf, device=device)

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return self.least, self.most

    @property
    def nbytes(self) -> int:
        return self.least.nbytes + self.most.nbytes

    def clear(self, blocks: Tensor) -> None:
        self.least.index_fill_(0, blocks, torch.inf)
        self.most.index_fill_(0, blocks, -torch.inf)

    def copy(self, source: int, target: int, kept: int) -> None:
        """Over the slots that are kept: bounds of all would let another row's tokens choose."""
        self.clear(torch.tensor([target], device=self.least.device))
        offsets = torch.arange(kept, device=self.least.device)
        self.wrote(torch.full_like(offsets, target), offsets)

    def wrote(self, blocks: Tensor, offsets: Tensor) -> None:
        """Keys were stored in these slots [T]."""
        k = self._keys.at(blocks, offsets, self.least.dtype).unsqueeze(2)
        where = blocks.view(-1, 1, 1, 1).expand_as(k)
        self.least.scatter_reduce_(0, where, k, "amin")
        self.most.scatter_reduce_(0, where, k, "amax")

    def few(self, table: Table) -> bool:
        """Whether a query reads all blocks anyway."""
        return table.per_row <= self._others + 1

    def choose(self, q: Tensor, positions: Tensor, table: Table) -> Tensor:
        """q [R, L, H, D], positions [R, L] -> which blocks each query reads, [R, K, L, P] of booleans."""
        least, most = (x.masked_fill(x.isinf(), 0.0) for x in (read(self.least, table), read(self.most, table)))
        rows, kv_heads, many, _ = least.shape
        grouped = q.to(least.dtype).transpose(1, 2).unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [R, K, G * L, D]
        bound = grouped.clamp(min=0) @ most.transpose(-1, -2) + grouped.clamp(max=0) @ least.transpose(-1, -2)
        bound = bound.view(rows, kv_heads, -1, q.shape[1], many).amax(dim=2)  # [R, K, L, P]
        own = (positions // self._size)[:, None, :, None]
        blocks = torch.arange(many, device=q.device)
        ranks = rounded(bound.double(), self._bits).masked_fill(blocks >= own, -torch.inf)
        best = ranks.sort(dim=-1, descending=True, stable=True).indices[..., : self._others]
        chosen = torch.zeros_like(ranks, dtype=torch.bool).scatter_(-1, best, True)
        return (chosen & (blocks < own)) | (blocks == own)

    def gathered(self, chosen: Tensor, table: Table) -> Tensor:
        """chosen [R, K, 1, P] -> the blocks that each head reads, [R, K, n]; the empty one where it reads fewer."""
        order = chosen.squeeze(2).byte().sort(dim=-1, descending=True, stable=True).indices[..., : self._others + 1]
        blocks = table.flat.view(table.rows, 1, table.per_row).expand(-1, chosen.shape[1], -1)
        return blocks.gather(-1, order).masked_fill(~chosen.squeeze(2).gather(-1, order), EMPTY_BLOCK)


class ChosenReading(Reading):
    """A reading in which each query sees the blocks that it chose: ``chosen`` [R, K, L, P]."""

    def __init__(self, queries: Mark, keys: Mark, reach: Reach, chosen: Tensor, block_size: int) -> None:
        super().__init__(queries, keys, reach)
        self._chosen, self._size = chosen, block_size
        self._masks *= chosen.shape[1]

    def visible(self, low: int, high: int) -> Tensor:
        """[R, K, high - low, S]."""
        slots = self._chosen[:, :, low:high].repeat_interleave(self._size, dim=-1)[..., : self.shape[2]]
        return super().visible(low, high) & slots
