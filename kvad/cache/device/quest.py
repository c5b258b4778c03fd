"""Sparse reads: a query reads only the most relevant blocks (Tang et al. 2024, Quest).

Each block stores, per kv head and channel, the minimum and maximum of its keys. They bound q.k of all its tokens:

    q.k <= sum_d max(q_d min_d, q_d max_d)

A query reads its own block and those with the highest bounds (the maximum over the heads of its group). Blocks that end
after the query do not count, so a query of a chunk chooses as it would alone. Position biases are not in the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvad import ops
from kvad.cache.device.eviction import round_mantissa
from kvad.cache.device.tensors import BlockArrays, BlockTable, LayerTensor, allocate_head_major, gather_blocks
from kvad.cache.groups import CacheGroup
from kvad.model_input import NULL_BLOCK, AttentionPattern, TokenPositions


class BlockKeyBounds(BlockArrays):
    """Minimum and maximum of the keys of each block of one layer, [blocks, K, 1, D]."""

    def __init__(self, group: CacheGroup, keys: LayerTensor, device: torch.device | str) -> None:
        assert group.sparse_read_policy is not None
        self._keys, self._size = keys, group.block_size
        self._others = -(-group.sparse_read_policy.budget // group.block_size) - 1  # blocks besides the query's own
        self._bits = 30 if group.key_format == "float64" else 12
        dtype = torch.float64 if group.key_format == "float64" else torch.float32
        shape = group.num_blocks, group.spec.num_kv_heads, 1, group.spec.head_dim
        self.key_min = allocate_head_major(*shape, dtype=dtype, fill=torch.inf, device=device)
        self.key_max = allocate_head_major(*shape, dtype=dtype, fill=-torch.inf, device=device)
        self.arrays, self.empty_values = (self.key_min, self.key_max), (torch.inf, -torch.inf)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Compute the bounds of copied blocks from their visible slots.

        Copied bounds of all slots would let another sequence's tokens decide.
        """
        for _, target, num_retained in copies:
            self.clear([target])
            offsets = torch.arange(num_retained, device=self.key_min.device)
            self.update(torch.full_like(offsets, target), offsets)

    def update(self, blocks: Tensor, offsets: Tensor) -> None:
        """Include the keys stored in these slots [T]."""
        k = self._keys.read_slots(blocks, offsets, self.key_min.dtype).unsqueeze(2)
        index = blocks.view(-1, 1, 1, 1).expand_as(k)
        self.key_min.scatter_reduce_(0, index, k, "amin")
        self.key_max.scatter_reduce_(0, index, k, "amax")

    def reads_all(self, table: BlockTable) -> bool:
        """True if every query reads all blocks."""
        return table.per_row <= self._others + 1

    def select_blocks(self, q: Tensor, positions: Tensor, table: BlockTable) -> Tensor:
        """Return which blocks each query reads.

        q [R, L, H, D], positions [R, L] -> bool [R, K, L, P].
        """
        gathered = (gather_blocks(array, table) for array in self.arrays)
        key_min, key_max = (bounds.masked_fill(bounds.isinf(), 0.0) for bounds in gathered)
        num_seqs, kv_heads, num_blocks, _ = key_min.shape
        grouped = q.to(key_min.dtype).transpose(1, 2).unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [R, K, G * L, D]
        bound = grouped.clamp(min=0) @ key_max.transpose(-1, -2) + grouped.clamp(max=0) @ key_min.transpose(-1, -2)
        bound = bound.view(num_seqs, kv_heads, -1, q.shape[1], num_blocks).amax(dim=2)  # [R, K, L, P]
        own_block = (positions // self._size)[:, None, :, None]
        blocks = torch.arange(num_blocks, device=q.device)
        scores = round_mantissa(bound.double(), self._bits).masked_fill(blocks >= own_block, -torch.inf)
        top_blocks = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self._others]
        selected = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, top_blocks, True)
        return (selected & (blocks < own_block)) | (blocks == own_block)

    def selected_blocks(self, selected: Tensor, table: BlockTable) -> Tensor:
        """Return the block ids that each head reads; unused entries are NULL_BLOCK.

        selected [R, K, 1, P] -> [R, K, n].
        """
        order = selected.squeeze(2).byte().sort(dim=-1, descending=True, stable=True).indices[..., : self._others + 1]
        blocks = table.flat.view(table.rows, 1, table.per_row).expand(-1, selected.shape[1], -1)
        return blocks.gather(-1, order).masked_fill(~selected.squeeze(2).gather(-1, order), NULL_BLOCK)


class SparseMask(ops.attention.AttentionMask):
    """Mask in which each query sees only its selected blocks, [R, K, L, P]."""

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
        self._num_elements *= selected.shape[1]

    def visible(self, low: int, high: int) -> Tensor:
        """Return the mask [R, K, high - low, S]."""
        slots = self._selected[:, :, low:high].repeat_interleave(self._size, dim=-1)[..., : self.shape[2]]
        return super().visible(low, high) & slots
