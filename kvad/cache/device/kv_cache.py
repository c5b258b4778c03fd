"""Memory: the device face of the cache.  It holds tensors and decides nothing.

One :class:`~kvad.cache.device.tensors.LayerTensor` of keys and one of values per layer, in the formats of their group, and per group
one column of positions, ``[blocks, block_size]`` int64.  A slot is visible iff its position is >= 0, which is so iff
the row that owns its block wrote it: ``apply`` clears blocks that change hands (positions to -1, contents to zero), and
nothing ever writes block 0 (empty, it pads tables).  So whether rows are contiguous, paged or ring-shaped, one mask
rule serves.

A level that is spilled has its positions here and no stores: its blocks are bytes in a spool (``spill.py``).

A cross-attention's group holds sources instead of rows: written once, by a step without decoder tokens, and read by
every row that shares the source.

Memory must never choose: which block, which row, what to drop are the ledger's integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kvad import ops
from kvad.cache.device.demotion import SummarizerFn, mean_summary, merge_layer, merge_positions, quantize_layer
from kvad.cache.device.eviction import EvictionHook, PerHeadMetadata, evict_layer
from kvad.cache.device.host_copy import HostCopier, HostStore, copy_blocks_in, copy_blocks_out
from kvad.cache.device.offload_reader import OffloadReader
from kvad.cache.device.quest import BlockKeyBounds
from kvad.cache.device.slot_copy import BlockIndex, SlotIndex, copy_slots_in, copy_slots_out
from kvad.cache.device.tensors import LayerTensor
from kvad.cache.device.views import CrossAttentionView, GroupStepPlan, ReadPlan, SelfAttentionView, WriteIndex
from kvad.cache.groups import CacheGroup, group_bytes
from kvad.cache.policy import UNBOUNDED
from kvad.model_input import BlockOps, CacheView, EvictOp, MergeOp, ModelInput, Rotary, SlotMapping


class RestorableState(Protocol):
    """A row from elsewhere, that knows how to write itself."""

    def restore(self, memory: KVCache, blocks: Sequence[Sequence[int]]) -> None:
        """Into these blocks per group, which changed hands."""
        ...


class ArrayBlocks(NamedTuple):
    """One raw array of a group, [blocks, ...], and which of its blocks a row has.  ``name``: the group's number, the
    layer's, what it holds, and which of its arrays: "0.3.keys.0"."""

    name: str
    array: Tensor
    blocks: Tensor


class KVCache:
    """Stores for every layer of a model, allocated once, in the formats that ``groups`` name.

    Keys and values come back in the query's dtype when they are read.  ``rotate``: whether RoPE turns keys as they are
    stored or as they are read; ``exact``: its angles are computed in float64, for rows without an end.
    ``compressors``, by layer: what makes summaries of tokens, means where there is none.  ``probe`` is shown what every
    layer sees (a debugger's and ``kvad verify``'s seam); it costs the fused kernel.  ``spill``: where spilled levels
    lie; all in host memory if none is given.  ConfigError where torch lacks the format.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        device: torch.device | str = "cpu",
        rope_at: Literal["write", "read"] = "write",
        exact_rope: bool = False,
        summarizers: Mapping[int, SummarizerFn] | None = None,
        kernel: ops.attention.Kernel = "auto",
        attention_hook: ops.sub_batch.AttentionHook | None = None,
        offload_reader: OffloadReader | None = None,
    ) -> None:
        self.groups = self.all_groups = tuple(groups)  # whole: of all ranks, where this is one of several
        self.ranks = 1
        self.kernel, self.attention_hook = kernel, attention_hook
        self.eviction_hook: EvictionHook | None = (
            None  # told of every cut; what it asks of the tensors, the step waits for
        )
        self.rope_on_read, self.exact_rope = rope_at == "read", exact_rope
        self.stores: list[dict[int, tuple[LayerTensor, LayerTensor]]] = []  # per group, by layer: keys and values
        self.weights: list[dict[int, LayerTensor]] = []  # per group, by layer: the logits of summaries
        self.positions: list[Tensor] = []
        spilled = [group.lower_level is not None and group.lower_level.is_offloaded for group in self.groups]
        self.offload_reader = (
            OffloadReader(self.groups, UNBOUNDED) if offload_reader is None and any(spilled) else offload_reader
        )
        for group, elsewhere in zip(self.groups, spilled, strict=True):
            spec, size = group.spec, group.block_size
            held = {}
            for layer in () if elsewhere else group.layers:
                keys = LayerTensor(group.key_format, group.num_blocks, spec.num_kv_heads, size, spec.head_dim, device)
                held[layer] = (
                    keys,
                    LayerTensor(group.value_format, group.num_blocks, spec.num_kv_heads, size, spec.value_dim, device),
                )
            self.stores.append(held)
            self.weights.append(_weights(group, device))
            self.positions.append(torch.full((group.num_blocks, size), -1, dtype=torch.int64, device=device))
        written = {  # those that take tokens, or a source's
            layer: pair
            for group, held in zip(self.groups, self.stores, strict=True)
            for layer, pair in held.items()
            if group.lower_level is None
        }
        self.keys = [written[layer][0] for layer in sorted(written)]
        self.values = [written[layer][1] for layer in sorted(written)]
        self.rotaries: dict[int, Rotary] = {}  # by layer, as it was last written with
        self.summarizers: dict[int, SummarizerFn] = dict(summarizers or {})
        ranked = [
            (layer, group) for group in self.groups if group.eviction_policy is not None for layer in group.layers
        ]
        self.head_metadata = {layer: PerHeadMetadata(group, device) for layer, group in ranked}
        choosing = [
            (layer, group) for group in self.groups if group.sparse_read_policy is not None for layer in group.layers
        ]
        self.block_bounds = {layer: BlockKeyBounds(group, self.keys[layer], device) for layer, group in choosing}
        self.swapped: dict[
            int, list[Tensor] | RestorableState
        ] = {}  # on the host, by key; on a GPU: when copier.arrived
        self.copier = HostCopier(torch.device(device))
        self.host_store: HostStore | None = None  # who takes blocks that are copied out, and lends those that come in

    def tensors(self) -> list[Tensor]:
        """Every tensor of the cache, flat: keys and values by layer, what heads keep by layer, weights of summaries,
        positions by group."""
        stores: list[LayerTensor | PerHeadMetadata | BlockKeyBounds] = [
            *self._stores(),
            *self.head_metadata.values(),
            *self.block_bounds.values(),
        ]
        stores += self._weights()
        return [*(array for store in stores for array in store.arrays), *self.positions]

    def payload_bytes(self) -> int:
        return sum(store.data.nbytes for store in self._stores())

    def scale_bytes(self) -> int:
        return sum(store.nbytes for store in self._stores()) - self.payload_bytes()

    def metadata_bytes(self) -> int:
        columns: list[LayerTensor | PerHeadMetadata | BlockKeyBounds] = [
            *self.head_metadata.values(),
            *self.block_bounds.values(),
        ]
        columns += self._weights()
        return sum(each.nbytes for each in self.positions) + sum(each.nbytes for each in columns)

    def _weights(self) -> Iterator[LayerTensor]:
        for held in self.weights:
            yield from held.values()

    def _stores(self) -> Iterator[LayerTensor]:
        for side in (0, 1):
            yield from (pair[side] for held in self.stores for pair in held.values())

    def release(self) -> None:
        """Give every store back.  The memory cannot be opened afterwards."""
        self.keys, self.values, self.positions, self.groups, self.all_groups = [], [], [], (), ()
        self.head_metadata, self.block_bounds, self.swapped, self.stores, self.weights = {}, {}, {}, [], []
        if self.offload_reader is not None:
            self.offload_reader.close()

    def apply(self, moves: BlockOps) -> None:
        """Edits between two steps, in the order that :class:`Moves` names."""
        if self.host_store is not None:
            copy_blocks_out(self, self.host_store, moves.store)
        self._park_and_wake(moves)
        if self.host_store is not None:  # into blocks that a parked row may have had
            copy_blocks_in(self, self.host_store, moves.load)
        for group, positions, cuts in zip(self.groups, self.positions, moves.evict, strict=False):
            if cuts:
                self._compact(group, positions, cuts)
        for number, pairs in enumerate(moves.quantize):
            if pairs:
                self._pack(number, pairs)
        for number, folds in enumerate(moves.merge):
            if folds:
                self._fold(number, folds)
        for group, positions, clear, copy in zip(self.groups, self.positions, moves.clear, moves.copy, strict=True):
            if clear:
                self._clear(group, positions, torch.tensor(clear, device=positions.device))
            for source, target, kept in copy:
                self._copy(group, positions, source, target, kept)

    def discard(self, moves: BlockOps) -> None:
        """The step of these moves has failed, before they were applied or behind: what they have not copied out is not
        waited for, and what they were to copy in or to drop is dropped."""
        if self.host_store is not None:
            for number, _ in (*moves.store, *moves.load):
                self.host_store.cancel(number)
        for key in (*(key for key, _ in moves.swap_in), *moves.drop_swapped):
            self.swapped.pop(key, None)

    def _park_and_wake(self, moves: BlockOps) -> None:
        for key, blocks in moves.swap_out:
            self.swapped[key] = self.copier.copy_out(key, self.iter_arrays(blocks))
        for key, blocks in moves.swap_in:
            parked = self.swapped.pop(key)
            if isinstance(parked, list):
                self.copier.copy_in(key, self.iter_arrays(blocks), parked)
            else:
                parked.restore(self, blocks)
        for key in moves.drop_swapped:
            self.swapped.pop(key, None)

    def iter_arrays(self, blocks: Sequence[Sequence[int]]) -> Iterator[ArrayBlocks]:
        """Every raw array of the groups, and which blocks of it a row has; ``blocks``: per group, those that take
        tokens first, then their levels, then cross-attention's; groups beyond ``blocks`` are left out."""
        every_group = zip(self.groups, self.positions, self.stores, self.weights, blocks, strict=False)
        for number, (group, positions, stores, weights, ids) in enumerate(every_group):
            where = torch.tensor(ids, dtype=torch.int64, device=positions.device)
            yield ArrayBlocks(f"{number}.positions", positions, where)
            for layer, (keys, values) in stores.items():
                every: dict[str, LayerTensor | PerHeadMetadata | BlockKeyBounds] = {"keys": keys, "values": values}
                if group.lower_level is None:
                    every |= {type(each).__name__.lower(): each for each in self._head_metadata(layer)}
                elif layer in weights:
                    every["weights"] = weights[layer]
                for kind, store in every.items():
                    for part, array in enumerate(store.arrays):
                        yield ArrayBlocks(f"{number}.{layer}.{kind}.{part}", array, where)

    def block_bytes(self) -> list[int]:
        """Of each group, what a block of it takes: on all ranks."""
        return [group_bytes(group).total // group.num_blocks for group in self.groups]

    def read_blocks(self, blocks: BlockIndex) -> dict[str, Tensor]:
        """Every raw array of these blocks on the host, by name (:meth:`held`): of all ranks."""
        return {each.name: each.array[each.blocks].cpu() for each in self.iter_arrays(blocks)}

    def write_blocks(self, blocks: BlockIndex, state: Mapping[str, Tensor]) -> None:
        """The inverse, into as many blocks; what a group without blocks would have is not asked for."""
        for each in self.iter_arrays(blocks):
            if len(each.blocks):
                each.array[each.blocks] = state[each.name].to(each.array.device)

    def copy_out(self, blocks: BlockIndex, slots: SlotIndex) -> dict[str, Tensor]:
        """A row's numbers on the host, by slot (``lines.py``): of all ranks, as one process would have them."""
        return copy_slots_out(self, blocks, slots)

    def copy_in(self, blocks: BlockIndex, slots: SlotIndex, arrays: Mapping[str, Tensor]) -> None:
        """The inverse, into blocks that changed hands."""
        copy_slots_in(self, blocks, slots, arrays)

    def array_specs(self) -> dict[str, Tensor]:
        """The whole cache's arrays by name, [blocks, ...]: shapes and dtypes alone are meant."""
        return {each.name: each.array for each in self.iter_arrays([() for _ in self.groups])}

    def summary_rotaries(self) -> dict[int, Rotary]:
        """Of layers whose old tokens become summaries, how keys are turned back for it; as the whole cache numbers
        them."""
        folds = [group for group in self.groups if group.lower_level is not None and group.lower_level.ratio > 1]
        layers = {layer for group in folds for layer in group.layers}
        return {layer: rotary for layer, rotary in self.rotaries.items() if layer in layers}

    def set_summary_rotaries(self, rotaries: Mapping[int, Rotary]) -> None:
        """The inverse, where it is needed before the first step of a row."""
        for layer, rotary in rotaries.items():
            inv_freq = rotary.inv_freq.to(self.positions[0].device)
            self.rotaries.setdefault(layer, rotary._replace(inv_freq=inv_freq))

    def failed_rows(self, rows: Sequence[int]) -> dict[int, str]:
        """Of the step that was opened last, with so many ``rows`` in each lane: which of them, counted through, read
        spilled tokens that are not there any more, and why.  Their answers are wrong; those of others are not."""
        return {} if self.offload_reader is None else self.offload_reader.failed_rows(rows)

    def _head_metadata(self, layer: int) -> list[PerHeadMetadata | BlockKeyBounds]:
        return [kept[layer] for kept in (self.head_metadata, self.block_bounds) if layer in kept]

    def _pack(self, number: int, pairs: Sequence[tuple[int, int]]) -> None:
        level, positions = self.groups[number].lower_level, self.positions[number]
        assert level is not None
        sources, targets = torch.tensor(pairs, device=positions.device).unbind(1)
        if level.is_offloaded:
            assert self.offload_reader is not None
            self.offload_reader.write_blocks(number, self.stores[level.upper_group], sources, targets.tolist())
        for layer, below in self.stores[number].items():
            quantize_layer(self.stores[level.upper_group][layer], below, sources, targets)
        positions[targets] = self.positions[level.upper_group][sources]

    def _fold(self, number: int, folds: Sequence[MergeOp]) -> None:
        level, column = self.groups[number].lower_level, self.positions[number]
        assert level is not None
        positions = self.positions[level.upper_group][
            torch.tensor([fold.source_block for fold in folds], device=column.device)
        ]
        for layer, (keys, values) in self.stores[number].items():
            rotary = None if self.rope_on_read else self.rotaries.get(layer)
            compress = self.summarizers.get(layer, mean_summary)
            above = self.stores[level.upper_group][layer]
            below = keys, values, self.weights[number][layer]
            merge_layer(above, below, folds, positions, level.ratio, rotary, compress)
        merge_positions(column, folds, positions, level.ratio)

    def _compact(self, group: CacheGroup, positions: Tensor, cuts: Sequence[EvictOp]) -> None:
        for layer in group.layers:
            evict_layer(
                group, layer, self.keys[layer], self.values[layer], self.head_metadata[layer], cuts, self.eviction_hook
            )
        for cut in cuts:  # heads keep other tokens; that a slot is taken is all that they share
            blocks = torch.tensor(cut.target_blocks, device=positions.device)
            filled = torch.arange(len(cut.target_blocks) * group.block_size, device=positions.device)
            positions[blocks] = filled.masked_fill(filled >= cut.num_retained, -1).view(len(cut.target_blocks), -1)

    def clear(self, number: int, blocks: Sequence[int]) -> None:
        """Blocks of a group that takes tokens, or a source's, change hands."""
        positions = self.positions[number]
        self._clear(self.groups[number], positions, torch.tensor(blocks, dtype=torch.int64, device=positions.device))

    def _clear(self, group: CacheGroup, positions: Tensor, blocks: Tensor) -> None:
        positions.index_fill_(0, blocks, -1)
        for layer in group.layers:
            self.keys[layer].clear(blocks)
            self.values[layer].clear(blocks)
            for columns in self._head_metadata(layer):
                columns.clear(blocks)

    def _copy(self, group: CacheGroup, positions: Tensor, source: int, target: int, kept: int) -> None:
        positions[target, :kept] = positions[source, :kept]
        positions[target, kept:] = -1
        for layer in group.layers:
            self.keys[layer].copy(source, target)
            self.values[layer].copy(source, target)
            for columns in self._head_metadata(layer):
                columns.copy(source, target, kept)

    def open(self, step: ModelInput) -> Sequence[CacheView]:
        """Mark the new tokens' slots and build one view per layer; masks and indices are made once per group."""
        angles = ops.rotary.RotaryCache(step.positions, exact=self.exact_rope)
        views: list[CacheView | None] = [None] * len(self.keys)
        sources = iter(() if step.encoder_input is None else step.encoder_input.slot_mappings)
        nothing = SlotMapping(step.positions, ())  # of a step that is all source
        tiles = (
            self.offload_reader.open(step, self.positions)
            if self.offload_reader is not None and step.sub_batches
            else {}
        )
        for number, group in enumerate(self.groups):
            place = step.slot_mappings[number] if step.sub_batches else nothing
            if group.spec.is_cross_attention:
                written = (
                    WriteIndex(self, number, step.encoder_input, next(sources))
                    if step.encoder_input is not None
                    else None
                )
                read = ReadPlan(self, number, step, place)
                for layer in group.layers:
                    views[layer] = CrossAttentionView(written, read, layer, self.keys[layer], self.values[layer])
                continue
            if group.lower_level is not None:
                continue
            shared = GroupStepPlan(self, number, step, place, angles, tiles)
            for layer in group.layers:
                if layer in self.head_metadata:
                    self.head_metadata[layer].write(shared.written.blocks, shared.written.offsets, step.positions)
                views[layer] = SelfAttentionView(shared, layer, self.keys[layer], self.values[layer])
        return [view for view in views if view is not None]


def _weights(group: CacheGroup, device: torch.device | str) -> dict[int, LayerTensor]:
    """Of the summaries of a level, by layer: what their logits get."""
    if group.lower_level is None or group.lower_level.ratio == 1:
        return {}
    wide, heads = group.weight_format, group.spec.num_kv_heads
    return {layer: LayerTensor(wide, group.num_blocks, heads, group.block_size, 1, device) for layer in group.layers}
