"""Eviction on the device: per-layer, per-head metadata, and the eviction itself.

The host decides how many slots stay and in which blocks (``EvictOp``). Which tokens stay is decided here, separately
for each layer and head, and the host never reads it. Retained slots fill the blocks from the front in their old order.

    one head, held: positions 0 1 2 3 4 5 6 7, scores 9 1 2 8 3 7 0 5, three stay:   0 3 5
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvad.cache.device.tensors import BlockArrays, BlockTable, LayerTensor, allocate_head_major, gather_blocks
from kvad.cache.groups import CacheGroup
from kvad.cache.policy import ALL_QUERIES, EvictionContext, EvictionPolicy
from kvad.model_input import EvictOp


class EvictionEvent(NamedTuple):
    """One sequence's eviction in one layer, for an eviction hook."""

    layer: int
    op: EvictOp
    positions: Tensor  # [K, held]
    scores: Tensor  # [K, held] as compared; inf stays anyway
    order: Tensor  # [K, retained] indices of the retained slots


EvictionHook = Callable[[EvictionEvent], None]


class PerHeadMetadata(BlockArrays):
    """Positions and attention mass per head and slot of one layer.

    ``positions`` [blocks, K, block_size] int32, -1 for an empty slot; ``mass`` of the same shape, or None if the policy
    does not observe attention.
    """

    def __init__(self, group: CacheGroup, device: torch.device | str) -> None:
        assert group.eviction_policy is not None
        shape = group.num_blocks, group.spec.num_kv_heads, group.block_size
        self.positions = allocate_head_major(*shape, dtype=torch.int32, fill=-1, device=device)
        self.mass, self.arrays = None, (self.positions,)
        if group.eviction_policy.observed_queries:
            mass_dtype = torch.float64 if group.key_format == "float64" else torch.float32
            self.mass = allocate_head_major(*shape, dtype=mass_dtype, device=device)
            self.arrays = self.positions, self.mass

    def clear(self, blocks: Tensor) -> None:
        """Empty whole blocks."""
        self.positions.index_fill_(0, blocks, -1)
        if self.mass is not None:
            self.mass.index_fill_(0, blocks, 0)

    def copy(self, source: int, target: int, num_retained: int) -> None:
        """Copy the first ``num_retained`` slots of a block; the others become empty."""
        self.positions[target], self.positions[target, :, num_retained:] = self.positions[source], -1
        if self.mass is not None:
            self.mass[target], self.mass[target, :, num_retained:] = self.mass[source], 0

    def write(self, blocks: Tensor, offsets: Tensor, positions: Tensor) -> None:
        """Write the positions of new tokens [T] for all heads, with no attention mass."""
        self.positions[blocks, :, offsets] = positions.to(torch.int32).unsqueeze(1)
        if self.mass is not None:
            self.mass[blocks, :, offsets] = 0

    def read(self, table: BlockTable) -> Tensor:
        """Return positions [R, K, S] int64."""
        return gather_blocks(self.positions.unsqueeze(-1), table).squeeze(-1).long()

    def add(self, table: BlockTable, mass: Tensor) -> None:
        """Add attention mass [R, K, S]."""
        assert self.mass is not None
        mass = mass.to(self.mass.dtype)
        if table.per_row == 1:
            self.mass[table.flat, :, : table.slots] += mass
            return
        num_seqs, num_heads, _ = mass.shape
        blocks = mass.view(num_seqs, num_heads, table.per_row, -1).transpose(1, 2).flatten(0, 1)
        self.mass.index_put_((table.flat,), blocks, accumulate=True)


def count_queries(policy: EvictionPolicy, positions: Tensor) -> Tensor:
    """Return 1.0 for queries whose attention counts: the last observed ones before an eviction.

    positions [R, L] -> [R, L].
    """
    if policy.observed_queries == ALL_QUERIES:
        return torch.ones_like(positions, dtype=torch.float32)
    next_eviction = (positions.clamp(min=policy.budget) // policy.interval + 1) * policy.interval
    return (next_eviction - positions <= policy.observed_queries).float()


def eviction_scores(policy: EvictionPolicy, context: EvictionContext, bits: int = 12) -> Tensor:
    """Return the scores that are compared, [K, held]; inf for slots that stay anyway.

    Scores are compared by their first ``bits`` bits, and of equal ones the older token stays. Otherwise the summation
    order of a step, and with it the other sequences of the batch, would choose between equal tokens.
    """
    scores = round_mantissa(policy.score(context).double(), bits)
    always = (context.positions >= context.length - policy.recent) | (context.positions < policy.num_sinks)
    return scores.masked_fill(always, torch.inf)


def top_slots(scores: Tensor, num_retained: int) -> Tensor:
    """Return the indices of the retained slots in ascending order, [K, num_retained]."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :num_retained].sort(dim=-1).values


def round_mantissa(x: Tensor, bits: int) -> Tensor:
    """Round to ``bits`` bits after the leading one."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**bits).round(), exponent - bits)


def evict_layer(
    group: CacheGroup,
    layer: int,
    keys: LayerTensor,
    values: LayerTensor,
    metadata: PerHeadMetadata,
    evict_ops: Sequence[EvictOp],
    eviction_hook: EvictionHook | None = None,
) -> None:
    """Apply all evictions of a step to one layer; all reads precede all writes."""
    policy, block_size, device = group.eviction_policy, group.block_size, metadata.positions.device
    assert policy is not None
    arrays = (*keys.arrays, *values.arrays, *metadata.arrays)
    retained: list[list[Tensor]] = []
    for op in evict_ops:
        table = BlockTable(torch.tensor([op.blocks], device=device), block_size, op.num_held)
        mass = metadata.mass
        context = EvictionContext(
            metadata.read(table)[0, :, : op.num_held],
            None if mass is None else gather_blocks(mass.unsqueeze(-1), table)[0, :, : op.num_held, 0],
            lambda table=table, op=op: keys.read(table, _wide(keys))[0, :, : op.num_held],  # type: ignore[misc]
            lambda table=table, op=op: values.read(table, _wide(values))[0, :, : op.num_held],  # type: ignore[misc]
            op.length,
            layer,
        )
        scores = eviction_scores(policy, context, bits=30 if keys.format.name == "float64" else 12)
        order = top_slots(scores, op.num_retained)
        if eviction_hook is not None:
            eviction_hook(EvictionEvent(layer, op, context.positions, scores, order))
        retained.append([_slots(array, table.flat, order) for array in arrays])
        if metadata.mass is not None and policy.observed_queries != ALL_QUERIES:
            retained[-1][-1].zero_()  # Attention is observed from zero until the next eviction.
    for op, slots_per_array in zip(evict_ops, retained, strict=True):
        targets = torch.tensor(op.target_blocks, device=device)
        for array, slots in zip(arrays, slots_per_array, strict=True):
            _fill(array, targets, slots, -1 if array is metadata.positions else 0)


def _wide(store: LayerTensor) -> torch.dtype:
    return torch.float64 if store.format.name == "float64" else torch.float32


def _slots(array: Tensor, blocks: Tensor, order: Tensor) -> Tensor:
    """Gather slots: array [blocks, K, size(, width)] -> [K, retained(, width)].

    ``order`` [K, retained] selects among the slots of ``blocks``.
    """
    held = array[blocks].transpose(0, 1).flatten(1, 2)  # [K, P * size(, width)]
    if held.dim() == 2:
        return held.gather(1, order)
    return held.gather(1, order.unsqueeze(-1).expand(-1, -1, held.shape[-1]))


def _fill(array: Tensor, blocks: Tensor, slots: Tensor, empty: int) -> None:
    """Write slots [K, retained(, width)] to the front of ``blocks`` and ``empty`` after them."""
    num_heads, block_size = array.shape[1], array.shape[2]
    filled = array.new_full((num_heads, len(blocks) * block_size, *array.shape[3:]), empty)
    filled[:, : slots.shape[1]] = slots
    array[blocks] = filled.view(num_heads, len(blocks), block_size, *array.shape[3:]).transpose(0, 1)
