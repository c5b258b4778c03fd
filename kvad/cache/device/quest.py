"""Reading only the blocks that matter to a query: all is kept, little of it looked at (Tang et al. 2024, Quest).

Each block keeps, per kv head and channel, the smallest and the largest of its keys.  They bound q.k of all its tokens:

    q.k <= sum_d max(q_d min_d, q_d max_d)

A query reads its own block and those of the highest bounds (the largest over the heads of its group); blocks that end
behind it do not count, so that a query of a chunk chooses as it would alone.  A bias by distance is not in the bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvad import ops
from kvad.cache.device.eviction import round_mantissa
from kvad.cache.device.tensors import BlockTable, LayerTensor, allocate_head_major, gather_blocks
from kvad.cache.groups import CacheGroup
from kvad.model_input import NULL_BLOCK, AttentionPattern, TokenPositions


class BlockKeyBounds:
    """Of one layer: ``least`` and ``most`` [blocks, K, 1, D], over the keys that lie in a block."""

    def __init__(self, group: CacheGroup, keys: LayerTensor, device: torch.device | str) -> None:
        assert group.sparse_read_policy is not None
        self._keys, self._size = keys, group.block_size
        self._others = -(-group.sparse_read_policy.budget // group.block_size) - 1  # blocks beside a query's own
        self._bits = 30 if group.key_format == "float64" else 12
        dtype = torch.float64 if group.key_format == "float64" else torch.float32
        shape = group.num_blocks, group.spec.num_kv_heads, 1, group.spec.head_dim
        self.key_min = allocate_head_major(*shape, dtype=dtype, fill=torch.inf, device=device)
        self.key_max = allocate_head_major(*shape, dtype=dtype, fill=-torch.inf, device=device)

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return self.key_min, self.key_max

    @property
    def nbytes(self) -> int:
        return self.key_min.nbytes + self.key_max.nbytes

    def clear(self, blocks: Tensor) -> None:
        self.key_min.index_fill_(0, blocks, torch.inf)
        self.key_max.index_fill_(0, blocks, -torch.inf)

    def copy(self, source: int, target: int, kept: int) -> None:
        """Over the slots that are kept: bounds of all would let another row's tokens choose."""
        self.clear(torch.tensor([target], device=self.key_min.device))
        offsets = torch.arange(kept, device=self.key_min.device)
        self.update(torch.full_like(offsets, target), offsets)

    def update(self, blocks: Tensor, offsets: Tensor) -> None:
        """Keys were stored in these slots [T]."""
        k = self._keys.read_slots(blocks, offsets, self.key_min.dtype).unsqueeze(2)
        where = blocks.view(-1, 1, 1, 1).expand_as(k)
        self.key_min.scatter_reduce_(0, where, k, "amin")
        self.key_max.scatter_reduce_(0, where, k, "amax")

    def reads_all(self, table: BlockTable) -> bool:
        """Whether a query reads all blocks anyway."""
        return table.per_row <= self._others + 1

    def select_blocks(self, q: Tensor, positions: Tensor, table: BlockTable) -> Tensor:
        """q [R, L, H, D], positions [R, L] -> which blocks each query reads, [R, K, L, P] of booleans."""
        least, most = (
            x.masked_fill(x.isinf(), 0.0)
            for x in (gather_blocks(self.key_min, table), gather_blocks(self.key_max, table))
        )
        rows, kv_heads, many, _ = least.shape
        grouped = q.to(least.dtype).transpose(1, 2).unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [R, K, G * L, D]
        bound = grouped.clamp(min=0) @ most.transpose(-1, -2) + grouped.clamp(max=0) @ least.transpose(-1, -2)
        bound = bound.view(rows, kv_heads, -1, q.shape[1], many).amax(dim=2)  # [R, K, L, P]
        own = (positions // self._size)[:, None, :, None]
        blocks = torch.arange(many, device=q.device)
        ranks = round_mantissa(bound.double(), self._bits).masked_fill(blocks >= own, -torch.inf)
        best = ranks.sort(dim=-1, descending=True, stable=True).indices[..., : self._others]
        chosen = torch.zeros_like(ranks, dtype=torch.bool).scatter_(-1, best, True)
        return (chosen & (blocks < own)) | (blocks == own)

    def selected_blocks(self, chosen: Tensor, table: BlockTable) -> Tensor:
        """chosen [R, K, 1, P] -> the blocks that each head reads, [R, K, n]; the empty one where it reads fewer."""
        order = chosen.squeeze(2).byte().sort(dim=-1, descending=True, stable=True).indices[..., : self._others + 1]
        blocks = table.flat.view(table.rows, 1, table.per_row).expand(-1, chosen.shape[1], -1)
        return blocks.gather(-1, order).masked_fill(~chosen.squeeze(2).gather(-1, order), NULL_BLOCK)


class SparseMask(ops.attention.AttentionMask):
    """A reading in which each query sees the blocks that it chose: ``chosen`` [R, K, L, P]."""

    def __init__(
        self,
        queries: TokenPositions,
        keys: TokenPositions,
        pattern: AttentionPattern,
        selected: Tensor,
        block_size: int,
    ) -> None:
        super().__init__(queries, keys, pattern)
        self._selected, self._size = selected, block_size
        self._masks *= selected.shape[1]

    def visible(self, low: int, high: int) -> Tensor:
        """[R, K, high - low, S]."""
        slots = self._selected[:, :, low:high].repeat_interleave(self._size, dim=-1)[..., : self.shape[2]]
        return super().visible(low, high) & slots
