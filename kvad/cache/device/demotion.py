"""Demotion on the device: blocks are quantized into another format or merged into summaries.

The host decides which block is demoted and to where (``BlockOps.quantize``, ``BlockOps.merge``). A summary replaces
``ratio`` tokens: it has the mean of their values and the mean of their *unrotated* keys, at the mean position; rotated
keys point in different directions, so their mean is short. Its logit is increased by log(ratio), the ``weight`` of
``AttentionMask``: n equal keys count n times. A trained ``SummarizerFn`` replaces all three.

    ratio 4, positions 8 9 10 11:  one slot at position 9 (its key at 9.5), weight log 4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvad import ops
from kvad.cache.device.tensors import BlockTable, LayerTensor
from kvad.model_input import MergeOp, Rotary

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
                store.clear(blocks.new_tensor([op.target_block]))
            elif op.base_block != op.target_block:
                store.copy(op.base_block, op.target_block)
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
    wide = torch.float64 if store.format.name == "float64" else torch.float32
    return store.read(BlockTable(blocks.view(-1, 1), size, size), wide)
