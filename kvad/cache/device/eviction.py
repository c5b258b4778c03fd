"""Eviction and demotion on the device: some slots stay, or blocks are quantized or merged into summaries.

The host decides how many slots stay and in which blocks (``EvictOp``). Which tokens stay is decided here, separately
for each layer and head, and the host never reads it. Retained slots fill the blocks from the front in their old order.

    one head, held: positions 0 1 2 3 4 5 6 7, scores 9 1 2 8 3 7 0 5, three stay:   0 3 5

The host also decides which block is demoted and to where (``BlockOps.quantize``, ``BlockOps.merge``). A summary
replaces ``ratio`` tokens: it has the mean of their values and the mean of their *unrotated* keys, at the mean position;
rotated keys point in different directions, so their mean is short. Its logit is increased by log(ratio), the ``weight``
of ``AttentionMask``: n equal keys count n times. A trained ``SummarizerFn`` replaces all three.

    ratio 4, positions 8 9 10 11:  one slot at position 9 (its key at 9.5), weight log 4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvad import ops
from kvad.cache.device.tensors import BlockArrays, BlockTable, LayerTensor, allocate_head_major, gather_blocks
from kvad.cache.groups import CacheGroup
from kvad.cache.policy import ALL_QUERIES, EvictionContext, EvictionPolicy
from kvad.model_input import EvictOp, MergeOp, Rotary


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
        self.mass, self.arrays, self.empty_values = None, (self.positions,), (-1, 0)
        if group.eviction_policy.observed_queries:
            mass_dtype = torch.float64 if group.key_format == "float64" else torch.float32
            self.mass = allocate_head_major(*shape, dtype=mass_dtype, device=device)
            self.arrays = self.positions, self.mass

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the visible slots of blocks; the others become empty."""
        assert self.mass is None  # a sequence whose attention is observed is never forked
        for source, target, num_retained in copies:
            self.positions[target], self.positions[target, :, num_retained:] = self.positions[source], -1

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


# (unrotated keys [n, K, ratio, D], values [n, K, ratio, Dv]) -> keys [n, K, D] and values [n, K, Dv] of the summaries,
# and the weights that are added to log(ratio), [n, K].
SummarizerFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def mean_summary(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Summarize by means; needs no training."""
    return keys.mean(dim=2), values.mean(dim=2), keys.new_zeros(keys.shape[:2])


def quantize_layer(
    upper: tuple[LayerTensor, LayerTensor], lower: tuple[LayerTensor, LayerTensor], sources: Tensor, targets: Tensor
) -> None:
    """Copy whole blocks of one layer into the lower level's format."""
    for source, target in zip(upper, lower, strict=True):
        if target.arrays:
            target.write_blocks(targets, _blocks(source, sources))


def merge_layer(
    upper: tuple[LayerTensor, LayerTensor],
    lower: tuple[LayerTensor, LayerTensor, LayerTensor],
    ops_to_merge: Sequence[MergeOp],
    positions: Tensor,
    ratio: int,
    rotary: Rotary | None,
    summarizer: SummarizerFn,
) -> None:
    """Merge blocks of one layer (``upper``: keys, values) into summaries (``lower``: keys, values, weights).

    ``positions`` [n, block_size] are those of the source blocks; ``rotary`` is None if the stored keys are not rotated.
    """
    keys, values = (_blocks(store, _ids(ops_to_merge, "source_block", positions)) for store in upper)
    if rotary is not None:
        keys = ops.rotary.rotate_blocks(keys, -positions, rotary, 1 / rotary.factor)
    grouped = [x.unflatten(2, (-1, ratio)).transpose(1, 2).flatten(0, 1) for x in (keys, values)]  # [m, K, ratio, D]
    summary_keys, summary_values, extra_weights = summarizer(*grouped)
    if rotary is not None:
        mean_positions = positions.unflatten(1, (-1, ratio)).double().mean(-1).view(-1, 1)
        unrotated = summary_keys.unsqueeze(2)
        summary_keys = ops.rotary.rotate_blocks(unrotated, mean_positions, rotary, rotary.factor).squeeze(2)
    slots = torch.arange(positions.shape[1] // ratio, device=positions.device)
    blocks = _ids(ops_to_merge, "target_block", positions).repeat_interleave(len(slots))
    offsets = (_ids(ops_to_merge, "first_slot", positions).unsqueeze(1) + slots).flatten()
    weights = (math.log(ratio) + extra_weights).unsqueeze(-1)
    for store, values_to_write in zip(lower, (summary_keys, summary_values, weights), strict=True):
        for op in ops_to_merge:
            if op.first_slot == 0:
                store.clear([op.target_block])
            elif op.base_block != op.target_block:
                store.copy([(op.base_block, op.target_block, op.first_slot)])
        store.write(blocks, offsets, values_to_write)


def merge_positions(lower_positions: Tensor, ops_to_merge: Sequence[MergeOp], positions: Tensor, ratio: int) -> None:
    """Write the positions of summaries: the mean of their tokens' positions, rounded down."""
    mean_positions = positions.unflatten(1, (-1, ratio)).sum(-1) // ratio
    for op, block_positions in zip(ops_to_merge, mean_positions, strict=True):
        if op.first_slot == 0:
            lower_positions[op.target_block] = -1
        elif op.base_block != op.target_block:
            lower_positions[op.target_block] = lower_positions[op.base_block]
            lower_positions[op.target_block, op.first_slot :] = -1
        lower_positions[op.target_block, op.first_slot : op.first_slot + len(block_positions)] = block_positions


def _ids(ops_to_merge: Sequence[MergeOp], name: str, like: Tensor) -> Tensor:
    return torch.tensor([getattr(op, name) for op in ops_to_merge], device=like.device)


def _blocks(store: LayerTensor, blocks: Tensor) -> Tensor:
    """Decode whole blocks: [n, K, block_size, D], at least float32."""
    size = store.data.shape[2]
    return store.read(BlockTable(blocks.view(-1, 1), size, size), _wide(store))
