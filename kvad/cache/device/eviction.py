"""What a policy that ranks leaves of a row: columns per layer and head, and the cut itself.  The device's half.

The host says how many slots stay and in which blocks (``step.Compact``); which ones is decided here, in each layer and
head apart, and never read by the host.  What stays fills the blocks from the front in its old order.

    one head, held: positions 0 1 2 3 4 5 6 7, ranks 9 1 2 8 3 7 0 5, three stay:   0 3 5
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvad.cache.device.tensors import BlockTable, LayerTensor, allocate_head_major, gather_blocks
from kvad.cache.groups import CacheGroup
from kvad.cache.policy import ALL_QUERIES, EvictionContext, EvictionPolicy
from kvad.model_input import EvictOp


class EvictionEvent(NamedTuple):
    """One row's cut in one layer, as a witness is told of it: ``positions`` [K, held]; ``ranks`` [K, held] as they were
    compared (inf: stays anyway); ``order`` [K, kept], which of the held slots stay."""

    layer: int
    op: EvictOp
    positions: Tensor
    scores: Tensor
    order: Tensor


EvictionHook = Callable[[EvictionEvent], None]


class PerHeadMetadata:
    """Of one layer: which position each head has in a slot (-1: none), and the attention that it got.

    ``positions`` [blocks, K, block_size] int32; ``mass``, of the same shape, where the policy watches.
    """

    def __init__(self, group: CacheGroup, device: torch.device | str) -> None:
        assert group.eviction_policy is not None
        shape = group.num_blocks, group.spec.num_kv_heads, group.block_size
        self.positions = allocate_head_major(*shape, dtype=torch.int32, fill=-1, device=device)
        mass = torch.float64 if group.key_format == "float64" else torch.float32
        self.mass = (
            allocate_head_major(*shape, dtype=mass, device=device) if group.eviction_policy.observed_queries else None
        )

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return (self.positions,) if self.mass is None else (self.positions, self.mass)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def clear(self, blocks: Tensor) -> None:
        self.positions.index_fill_(0, blocks, -1)
        if self.mass is not None:
            self.mass.index_fill_(0, blocks, 0)

    def copy(self, source: int, target: int, kept: int) -> None:
        self.positions[target], self.positions[target, :, kept:] = self.positions[source], -1
        if self.mass is not None:
            self.mass[target], self.mass[target, :, kept:] = self.mass[source], 0

    def write(self, blocks: Tensor, offsets: Tensor, positions: Tensor) -> None:
        """New tokens [T]: all heads have them, and nobody has looked at them yet."""
        self.positions[blocks, :, offsets] = positions.to(torch.int32).unsqueeze(1)
        if self.mass is not None:
            self.mass[blocks, :, offsets] = 0

    def read(self, table: BlockTable) -> Tensor:
        """Positions [R, K, S] int64."""
        return gather_blocks(self.positions.unsqueeze(-1), table).squeeze(-1).long()

    def add(self, table: BlockTable, mass: Tensor) -> None:
        """mass [R, K, S] on top of what there is."""
        assert self.mass is not None
        mass = mass.to(self.mass.dtype)
        if table.per_row == 1:
            self.mass[table.flat, :, table.start : table.start + table.slots] += mass
            return
        rows, heads, _ = mass.shape
        blocks = mass.view(rows, heads, table.per_row, -1).transpose(1, 2).flatten(0, 1)
        self.mass.index_put_((table.flat,), blocks, accumulate=True)


def count_queries(policy: EvictionPolicy, positions: Tensor) -> Tensor:
    """positions [R, L] -> 1.0 where a query's attention counts: it is one of the last ``watch`` before a cut."""
    if policy.observed_queries == ALL_QUERIES:
        return torch.ones_like(positions, dtype=torch.float32)
    cut = (positions.clamp(min=policy.budget) // policy.interval + 1) * policy.interval
    return (cut - positions <= policy.observed_queries).float()


def eviction_scores(policy: EvictionPolicy, seen: EvictionContext, bits: int = 12) -> Tensor:
    """[K, held]: what is compared; inf for those that stay anyway.

    Ranks are compared by their first ``bits`` bits, and of equals the older stays: else the order in which a step adds
    up its sums would choose between equal tokens, and with it the neighbours.
    """
    ranks = round_mantissa(policy.score(seen).double(), bits)
    always = (seen.positions >= seen.length - policy.recent) | (seen.positions < policy.num_sinks)
    return ranks.masked_fill(always, torch.inf)


def top_slots(ranks: Tensor, kept: int) -> Tensor:
    """[K, kept]: which of the held slots stay, in their order."""
    return ranks.sort(dim=-1, descending=True, stable=True).indices[:, :kept].sort(dim=-1).values


def round_mantissa(x: Tensor, bits: int) -> Tensor:
    """To so many bits behind the first."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**bits).round(), exponent - bits)


def evict_layer(
    group: CacheGroup,
    layer: int,
    keys: LayerTensor,
    values: LayerTensor,
    columns: PerHeadMetadata,
    cuts: Sequence[EvictOp],
    witness: EvictionHook | None = None,
) -> None:
    """All cuts of one step in one layer: everything that stays is read before anything is written."""
    policy, size = group.eviction_policy, group.block_size
    assert policy is not None
    device = columns.positions.device
    arrays = (*keys.arrays, *values.arrays, *columns.arrays)
    taken: list[list[Tensor]] = []
    for cut in cuts:
        table = BlockTable(torch.tensor([cut.blocks], device=device), size, cut.num_held)
        seen = EvictionContext(
            columns.read(table)[0, :, : cut.num_held],
            None if columns.mass is None else gather_blocks(columns.mass.unsqueeze(-1), table)[0, :, : cut.num_held, 0],
            lambda table=table, cut=cut: keys.read(table, _wide(keys))[0, :, : cut.num_held],  # type: ignore[misc]
            lambda table=table, cut=cut: values.read(table, _wide(values))[0, :, : cut.num_held],  # type: ignore[misc]
            cut.length,
            layer,
        )
        ranks = eviction_scores(policy, seen, bits=30 if keys.format.name == "float64" else 12)
        order = top_slots(ranks, cut.num_retained)
        if witness is not None:
            witness(EvictionEvent(layer, cut, seen.positions, ranks, order))
        taken.append([_slots(array, table.flat, order) for array in arrays])
        if columns.mass is not None and policy.observed_queries != ALL_QUERIES:
            taken[-1][-1].zero_()  # the next queries that count begin anew
    for cut, kept in zip(cuts, taken, strict=True):
        targets = torch.tensor(cut.target_blocks, device=device)
        for array, slots in zip(arrays, kept, strict=True):
            _fill(array, targets, slots, -1 if array is columns.positions else 0)


def _wide(store: LayerTensor) -> torch.dtype:
    return torch.float64 if store.format.name == "float64" else torch.float32


def _slots(array: Tensor, blocks: Tensor, order: Tensor) -> Tensor:
    """array [blocks, K, size(, width)] -> [K, kept(, width)], the slots in ``order`` [K, kept] of those blocks."""
    held = array[blocks].transpose(0, 1).flatten(1, 2)  # [K, P * size(, width)]
    if held.dim() == 2:
        return held.gather(1, order)
    return held.gather(1, order.unsqueeze(-1).expand(-1, -1, held.shape[-1]))


def _fill(array: Tensor, blocks: Tensor, slots: Tensor, empty: int) -> None:
    """The inverse: slots [K, kept(, width)] into the front of ``blocks``, ``empty`` behind them."""
    heads, size = array.shape[1], array.shape[2]
    whole = array.new_full((heads, len(blocks) * size, *array.shape[3:]), empty)
    whole[:, : slots.shape[1]] = slots
    array[blocks] = whole.view(heads, len(blocks), size, *array.shape[3:]).transpose(0, 1)
