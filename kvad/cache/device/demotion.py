"""Tokens that descend: whole blocks packed into other formats, and summaries of them.  The device's half.

The host says which block goes where (``Moves.pack``, ``Moves.fold``).  A summary stands for ``ratio`` tokens: the mean
of their values, and of their keys *unrotated*, put at the mean position; rotated keys point in different directions,
and their mean is short.  Its logit gets log(ratio), the ``weight`` of ``ops.attend.Reading``: n equal keys count n
times.  A :data:`Compressor` that was learned may say something else instead, of all three.

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

# (keys unrotated [n, K, ratio, D], values [n, K, ratio, Dv]) -> those of the summaries, [n, K, D] and [n, K, Dv], and
# what each logit gets beyond log(ratio), [n, K].
SummarizerFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def mean_summary(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The summary that knows nothing of the model."""
    return keys.mean(dim=2), values.mean(dim=2), keys.new_zeros(keys.shape[:2])


def quantize_layer(
    above: tuple[LayerTensor, LayerTensor], below: tuple[LayerTensor, LayerTensor], sources: Tensor, targets: Tensor
) -> None:
    """Whole blocks, decoded and encoded anew."""
    for here, there in zip(above, below, strict=True):
        there.write_blocks(targets, _blocks(here, sources))


def merge_layer(
    above: tuple[LayerTensor, LayerTensor],
    below: tuple[LayerTensor, LayerTensor, LayerTensor],
    folds: Sequence[MergeOp],
    positions: Tensor,
    ratio: int,
    rotary: Rotary | None,
    compress: SummarizerFn,
) -> None:
    """``below``: keys, values and weights.  ``positions`` [n, block_size]: of the blocks that are folded; ``rotary``:
    how the keys in the store are rotated (None: they are not)."""
    keys, values = (_blocks(store, _ids(folds, "source_block", positions)) for store in above)
    if rotary is not None:
        keys = ops.rotary.rotate_blocks(keys, -positions, rotary, 1 / rotary.factor)
    cut = (-1, ratio)
    short = [x.unflatten(2, cut).transpose(1, 2).flatten(0, 1) for x in (keys, values)]  # [n * slots, K, ratio, D]
    made, summed, more = compress(*short)
    if rotary is not None:
        middle = positions.unflatten(1, cut).double().mean(-1).view(-1, 1)
        made = ops.rotary.rotate_blocks(made.unsqueeze(2), middle, rotary, rotary.factor).squeeze(2)
    slots = positions.shape[1] // ratio
    blocks = _ids(folds, "target_block", positions).repeat_interleave(slots)
    offsets = (
        _ids(folds, "first_slot", positions).unsqueeze(1) + torch.arange(slots, device=positions.device)
    ).flatten()
    weight = (math.log(ratio) + more).unsqueeze(-1)
    for store, x in zip(below, (made, summed, weight), strict=True):
        for fold in folds:
            if fold.first_slot == 0:
                store.clear(blocks.new_tensor([fold.target_block]))
            elif fold.base_block != fold.target_block:
                store.copy(fold.base_block, fold.target_block)
        store.write(blocks, offsets, x)


def merge_positions(column: Tensor, folds: Sequence[MergeOp], positions: Tensor, ratio: int) -> None:
    """A summary's position: the mean of its tokens', rounded down."""
    middle = positions.unflatten(1, (-1, ratio)).sum(-1) // ratio
    for fold, each in zip(folds, middle, strict=True):
        if fold.first_slot == 0:
            column[fold.target_block] = -1
        elif fold.base_block != fold.target_block:
            column[fold.target_block] = column[fold.base_block]
            column[fold.target_block, fold.first_slot :] = -1
        column[fold.target_block, fold.first_slot : fold.first_slot + len(each)] = each


def _ids(folds: Sequence[MergeOp], name: str, like: Tensor) -> Tensor:
    return torch.tensor([getattr(fold, name) for fold in folds], device=like.device)


def _blocks(store: LayerTensor, blocks: Tensor) -> Tensor:
    """[n, K, block_size, D], in float32 at least."""
    size = store.data.shape[2]
    wide = torch.float64 if store.format.name == "float64" else torch.float32
    return store.read(BlockTable(blocks.view(-1, 1), size, size), wide)
