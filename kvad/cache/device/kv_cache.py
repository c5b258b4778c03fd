"""KVCache: the device half of the cache. It stores tensors; the KVCacheManager makes the decisions.

Each layer has one ``kvad.cache.device.tensors.LayerTensor`` of keys and one of values, in the formats of its
group (of latent attention the values are part of the keys: ``LatentValues``); each group has a column of positions,
``[blocks, block_size]`` int64. A slot is visible if its position is >= 0, which holds only if the owner of its block
wrote it: ``apply`` clears blocks that change owner (positions to -1, contents to zero), and block 0 (NULL_BLOCK, pads
tables) is never written. So one mask rule works for contiguous, paged and ring-buffer layouts.

An offloaded level has positions here but no stores: its blocks are in an OffloadFile (``offload_reader.py``).

A cross-attention group stores encoder inputs instead of sequences: written once, in a step without decoder tokens, and
read by every sequence of the same input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvad import ops
from kvad.cache.device.eviction import (
    EvictionHook,
    PerHeadMetadata,
    SummarizerFn,
    evict_layer,
    mean_summary,
    merge_layer,
    merge_positions,
    quantize_layer,
)
from kvad.cache.device.host_copy import (
    BlockIndex,
    HostCopier,
    SlotIndex,
    SlotPlan,
    block_bytes_per_group,
    copy_blocks_in,
    copy_blocks_out,
)
from kvad.cache.device.offload_reader import OffloadReader, OffloadTile
from kvad.cache.device.quest import BlockKeyBounds
from kvad.cache.device.tensors import ArrayBlocks, BlockArrays, BlockStates, LatentValues, LayerTensor, split_slots
from kvad.cache.device.views import LayerView, ReadPlan, WriteIndex
from kvad.cache.groups import CacheGroup, group_bytes
from kvad.cache.offload import BlockStore
from kvad.cache.policy import UNBOUNDED
from kvad.model_input import BlockOps, CacheView, EvictOp, MergeOp, ModelInput, Rotary, SlotMapping


class RestorableState(Protocol):
    """A sequence's state that can write itself into a KVCache."""

    def restore(self, kv_cache: KVCache, blocks: Sequence[Sequence[int]]) -> None:
        """Write into newly allocated blocks per group."""
        ...


class KVCache:
    """Cached keys and values of all layers, allocated once.

    Args:
        groups: Cache groups; they define layers, sizes and formats.
        device: Device of the tensors.
        rope_at: "write" stores rotated keys, "read" rotates them when they are read.
        exact_rope: Compute RoPE angles in float64, for sequences of unlimited length.
        summarizers: Trained summarizers by layer; means are used for other layers.
        kernel: Attention kernel.
        attention_hook: Called with the attention of every layer; prevents the fused kernel.
        offload_reader: Reads offloaded levels; by default they are all in RAM.

    Raises:
        ConfigError: If torch does not support a format.
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
        self.groups = self.all_groups = tuple(groups)  # all_groups: of all ranks
        self.ranks, self.patterns = 1, [group.spec.pattern for group in self.groups]
        self.kernel, self.attention_hook = kernel, attention_hook
        self.eviction_hook: EvictionHook | None = None  # Called for every eviction; the step waits for it.
        self.rope_on_read, self.exact_rope = rope_at == "read", exact_rope
        self.stores: list[dict[int, tuple[LayerTensor, LayerTensor]]] = []  # per group, by layer: keys and values
        self.weights: list[dict[int, LayerTensor]] = []  # per group, by layer: the logits of summaries
        self.positions: list[Tensor] = []
        is_on_host = torch.device(device).type == "cpu"
        memory = ops.runtime.HostMemory(sum(group_bytes(group).total for group in self.groups)) if is_on_host else None
        for group in self.groups:
            allocate = partial(_allocate, group, device, memory)
            layers = () if group.is_offloaded else group.layers
            self.stores.append({layer: _allocate_stores(group, allocate) for layer in layers})
            self.weights.append({layer: allocate(group.weight_format, 1) for layer in layers if group.has_summaries})
            shape = group.num_blocks, group.block_size
            self.positions.append(torch.full(shape, -1, dtype=torch.int64, device=device))
        if offload_reader is None and any(group.is_offloaded for group in self.groups):
            offload_reader = OffloadReader(self.groups, UNBOUNDED)
        self.offload_reader = offload_reader
        token_layers: dict[int, tuple[LayerTensor, LayerTensor]] = {}  # of groups that take tokens or an encoder input
        for group, stores in zip(self.groups, self.stores, strict=True):
            token_layers |= stores if group.lower_level is None else {}
        self.keys = [token_layers[layer][0] for layer in sorted(token_layers)]
        self.values = [token_layers[layer][1] for layer in sorted(token_layers)]
        self.rotaries: dict[int, Rotary] = {}  # by layer, as last used for writing
        self.summarizers: dict[int, SummarizerFn] = dict(summarizers or {})
        by_layer = [(layer, group) for group in self.groups for layer in group.layers]
        self.head_metadata = {
            layer: PerHeadMetadata(group, device) for layer, group in by_layer if group.eviction_policy is not None
        }
        self.block_bounds = {
            layer: BlockKeyBounds(group, self.keys[layer], device)
            for layer, group in by_layer
            if group.sparse_read_policy is not None
        }
        self.states = {
            layer: BlockStates(group.num_blocks, group.spec.snapshot_size, self.values[layer].data.dtype, device)
            for layer, group in by_layer
            if group.spec.snapshot_size
        }
        self._arrays: list[dict[int, dict[str, BlockArrays]]] = []  # per group, by layer and kind
        for stores, weights in zip(self.stores, self.weights, strict=True):
            others: dict[str, Mapping[int, BlockArrays]] = {
                "weights": weights,
                "head_metadata": self.head_metadata,
                "block_bounds": self.block_bounds,
                "states": self.states,
            }
            self._arrays.append({})
            for layer, (keys, values) in stores.items():  # Metadata are behind the keys that they are computed from.
                own = {kind: arrays[layer] for kind, arrays in others.items() if layer in arrays}
                self._arrays[-1][layer] = {"keys": keys, "values": values, **own}
        # Host copies by key; on a GPU valid after copier.wait.
        self.swapped: dict[int, list[Tensor] | RestorableState] = {}
        self.copier = HostCopier(torch.device(device))
        self.host_store: BlockStore | None = None  # receives evicted blocks and provides loaded ones

    def tensors(self) -> list[Tensor]:
        """Return all tensors: per group positions, then keys, values, metadata and weights by layer."""
        return [item.array for item in self.iter_arrays([()] * len(self.groups))]

    def payload_bytes(self) -> int:
        """Return the bytes of keys, values and states without scales."""
        stores = (store for layers in self.stores for pair in layers.values() for store in pair)
        states = sum(states.nbytes for states in self.states.values())
        return states + sum(store.arrays[0].nbytes for store in stores if store.arrays)

    def scale_bytes(self) -> int:
        """Return the bytes of scales."""
        stored = sum(store.nbytes for layers in self.stores for pair in layers.values() for store in pair)
        return stored + sum(states.nbytes for states in self.states.values()) - self.payload_bytes()

    def metadata_bytes(self) -> int:
        """Return the bytes of positions, per-head metadata, block bounds and weights."""
        return sum(array.nbytes for array in self.tensors()) - self.payload_bytes() - self.scale_bytes()

    def release(self) -> None:
        """Free all tensors. The cache cannot be used afterwards."""
        self.keys, self.values, self.positions, self.groups, self.all_groups = [], [], [], (), ()
        self.head_metadata, self.block_bounds, self.states, self.swapped = {}, {}, {}, {}
        self.stores, self.weights, self._arrays = [], [], []
        if self.offload_reader is not None:
            self.offload_reader.close()

    def apply(self, block_ops: BlockOps) -> None:
        """Apply block operations between two steps, in the order of ``BlockOps``."""
        if self.host_store is not None:
            copy_blocks_out(self, self.host_store, block_ops.store)
        self._swap(block_ops)
        if self.host_store is not None:  # Loaded blocks may have belonged to a swapped sequence.
            copy_blocks_in(self, self.host_store, block_ops.load)
        for group, positions, evict_ops in zip(self.groups, self.positions, block_ops.evict, strict=False):
            if evict_ops:
                self._evict(group, positions, evict_ops)
        for group_index, pairs in enumerate(block_ops.quantize):
            if pairs:
                self._quantize(group_index, pairs)
        for group_index, merge_ops in enumerate(block_ops.merge):
            if merge_ops:
                self._merge(group_index, merge_ops)
        for group_index, (clear, copies) in enumerate(zip(block_ops.clear, block_ops.copy, strict=True)):
            if clear:
                self.clear(group_index, clear)
            if copies:
                self._copy(group_index, copies)

    def discard(self, block_ops: BlockOps) -> None:
        """Cancel the copies of a failed step, and drop the states that it would have swapped in or dropped."""
        if self.host_store is not None:
            for copy_id, _ in (*block_ops.store, *block_ops.load):
                self.host_store.cancel(copy_id)
        for key in (*(key for key, _ in block_ops.swap_in), *block_ops.drop_swapped):
            self.swapped.pop(key, None)
            self.copier.drop(key)

    def prefetch_swapped(self, key: int) -> None:
        """Start moving a swapped sequence to the device, because it returns next."""
        swapped = self.swapped.get(key)
        if isinstance(swapped, list):
            self.copier.prefetch(key, swapped)

    def _swap(self, block_ops: BlockOps) -> None:
        for key, blocks in block_ops.swap_out:
            self.swapped[key] = self.copier.copy_out(key, self.iter_arrays(blocks))
        for key, blocks in block_ops.swap_in:
            swapped = self.swapped.pop(key)
            if isinstance(swapped, list):
                self.copier.copy_in(key, self.iter_arrays(blocks), swapped)
            else:
                swapped.restore(self, blocks)
        for key in block_ops.drop_swapped:
            self.swapped.pop(key, None)
            self.copier.drop(key)

    def iter_arrays(self, blocks: Sequence[Sequence[int]]) -> Iterator[ArrayBlocks]:
        """Yield every raw array of the groups with a sequence's blocks of it; groups beyond ``blocks`` are left out."""
        groups = zip(self.positions, self._arrays, blocks, strict=False)
        for group_index, (positions, layers, ids) in enumerate(groups):
            block_ids = ops.gpu.to_device(torch.tensor(ids, dtype=torch.int64), positions.device)
            yield ArrayBlocks(f"{group_index}.positions", positions, block_ids)
            for layer, arrays_by_kind in layers.items():
                for kind, arrays in arrays_by_kind.items():
                    for index, array in enumerate(arrays.arrays):
                        yield ArrayBlocks(f"{group_index}.{layer}.{kind}.{index}", array, block_ids)

    def block_bytes(self) -> list[int]:
        return list(block_bytes_per_group(self.groups))

    def read_blocks(self, blocks: BlockIndex) -> dict[str, Tensor]:
        """Copy blocks to the host, as arrays by name (``iter_arrays``), of all ranks."""
        return {item.name: item.array[item.blocks].cpu() for item in self.iter_arrays(blocks)}

    def write_blocks(self, blocks: BlockIndex, state: Mapping[str, Tensor]) -> None:
        """Write the arrays of ``read_blocks``; groups without blocks are skipped."""
        for item in self.iter_arrays(blocks):
            if len(item.blocks):
                item.array[item.blocks] = state[item.name].to(item.array.device)

    def copy_out(self, blocks: BlockIndex, slots: SlotIndex) -> dict[str, Tensor]:
        """Copy a sequence's arrays of all ranks to the host, by slot.

        ``slots`` are those of each group in token order [m] (block * block_size + offset); None copies whole blocks.
        Returns arrays [m, K, width] and positions [m], states of full blocks [n, size], or whole blocks [n, ...], by
        the names of ``iter_arrays``.
        """
        plans = [None if group_slots is None else SlotPlan(group_slots) for group_slots in slots]
        copies = {}
        for name, array, block_ids in self.iter_arrays(blocks):
            if ".block_bounds." not in name:
                group_index = int(name.partition(".")[0])
                plan = plans[group_index]
                if plan is not None and ".states." in name:
                    block_ids, plan = plan.ended_blocks(self.groups[group_index].block_size).to(array.device), None
                copies[name] = (array[block_ids] if plan is None else plan.out(array)).cpu()
        return copies

    def copy_in(self, blocks: BlockIndex, slots: SlotIndex, arrays: Mapping[str, Tensor]) -> None:
        """Write the arrays of ``copy_out`` into newly allocated blocks, and compute their bounds."""
        plans = [None if group_slots is None else SlotPlan(group_slots) for group_slots in slots]
        for group_index, plan in enumerate(plans):
            filled = set() if plan is None else plan.filled(self.groups[group_index].block_size)
            partial_blocks = [block for block in blocks[group_index] if block not in filled]
            if plan is not None and partial_blocks:
                self.clear(group_index, partial_blocks)
        for name, array, block_ids in self.iter_arrays(blocks):
            if ".block_bounds." not in name:
                group_index, values = int(name.partition(".")[0]), arrays[name].to(array.device)
                plan = plans[group_index]
                if plan is not None and ".states." in name:
                    block_ids, plan = plan.ended_blocks(self.groups[group_index].block_size).to(array.device), None
                if plan is None:
                    array[block_ids] = values
                else:
                    plan.put(array, values)
        for group, group_blocks, group_slots in zip(self.groups, blocks, slots, strict=False):
            if group.sparse_read_policy is None or group_slots is None:
                continue
            for bounds in (self.block_bounds[layer] for layer in group.layers):
                bounds.clear(group_blocks)
                bounds.update(*split_slots(group_slots.to(bounds.key_min.device), group.block_size))

    def array_specs(self) -> dict[str, Tensor]:
        """Return arrays by name, [blocks, ...], to read their shapes and dtypes."""
        return {item.name: item.array for item in self.iter_arrays([() for _ in self.groups])}

    def summary_rotaries(self) -> dict[int, Rotary]:
        """Return by layer the rotation of keys that are merged into summaries."""
        layers = {layer for weights in self.weights for layer in weights}
        return {layer: rotary for layer, rotary in self.rotaries.items() if layer in layers}

    def set_summary_rotaries(self, rotaries: Mapping[int, Rotary]) -> None:
        """Set the rotations if they are needed before the first step of a sequence."""
        for layer, rotary in rotaries.items():
            inv_freq = rotary.inv_freq.to(self.positions[0].device)
            self.rotaries.setdefault(layer, rotary._replace(inv_freq=inv_freq))

    def failed_rows(self, seqs_per_sub_batch: Sequence[int]) -> dict[int, str]:
        """Return the last step's sequences (over all sub-batches) with unreadable offloaded tokens, and the causes."""
        return {} if self.offload_reader is None else self.offload_reader.failed_rows(seqs_per_sub_batch)

    def _quantize(self, group_index: int, pairs: Sequence[tuple[int, int]]) -> None:
        level, positions = self.groups[group_index].lower_level, self.positions[group_index]
        assert level is not None
        sources, targets = torch.tensor(pairs, device=positions.device).unbind(1)
        if level.is_offloaded:
            assert self.offload_reader is not None
            self.offload_reader.write_blocks(group_index, self.stores[level.upper_group], sources, targets.tolist())
        for layer, lower in self.stores[group_index].items():
            quantize_layer(self.stores[level.upper_group][layer], lower, sources, targets)
        positions[targets] = self.positions[level.upper_group][sources]

    def _merge(self, group_index: int, merge_ops: Sequence[MergeOp]) -> None:
        level, lower_positions = self.groups[group_index].lower_level, self.positions[group_index]
        assert level is not None
        sources = torch.tensor([op.source_block for op in merge_ops], device=lower_positions.device)
        positions = self.positions[level.upper_group][sources]
        for layer, (keys, values) in self.stores[group_index].items():
            rotary = None if self.rope_on_read else self.rotaries.get(layer)
            summarizer = self.summarizers.get(layer, mean_summary)
            upper = self.stores[level.upper_group][layer]
            lower = keys, values, self.weights[group_index][layer]
            merge_layer(upper, lower, merge_ops, positions, level.ratio, rotary, summarizer)
        merge_positions(lower_positions, merge_ops, positions, level.ratio)

    def _evict(self, group: CacheGroup, positions: Tensor, evict_ops: Sequence[EvictOp]) -> None:
        for layer in group.layers:
            keys, values, metadata = self.keys[layer], self.values[layer], self.head_metadata[layer]
            evict_layer(group, layer, keys, values, metadata, evict_ops, self.eviction_hook)
        for op in evict_ops:  # Heads retain different tokens; the column only says that a slot is used.
            blocks = torch.tensor(op.target_blocks, device=positions.device)
            filled = torch.arange(len(op.target_blocks) * group.block_size, device=positions.device)
            positions[blocks] = filled.masked_fill(filled >= op.num_retained, -1).view(len(op.target_blocks), -1)

    def clear(self, group_index: int, block_ids: Sequence[int]) -> None:
        """Clear newly allocated blocks of a group that takes tokens or an encoder input."""
        positions = self.positions[group_index]
        blocks = ops.gpu.to_device(torch.tensor(block_ids, dtype=torch.int64), positions.device)
        positions.index_fill_(0, blocks, -1)
        for arrays_by_kind in self._arrays[group_index].values():
            for arrays in arrays_by_kind.values():
                arrays.clear(block_ids, blocks)

    def _copy(self, group_index: int, copies: Sequence[tuple[int, int, int]]) -> None:
        positions = self.positions[group_index]
        for source, target, num_retained in copies:
            positions[target, :num_retained] = positions[source, :num_retained]
            positions[target, num_retained:] = -1
        for arrays_by_kind in self._arrays[group_index].values():
            for arrays in arrays_by_kind.values():
                arrays.copy(copies)

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        """Write the new tokens' positions and return one view per layer."""
        angles = ops.rotary.RotaryCache(model_input.positions, exact=self.exact_rope)
        views: list[CacheView | None] = [None] * len(self.keys)
        encoder_mappings = iter(() if model_input.encoder_input is None else model_input.encoder_input.slot_mappings)
        empty_mapping = SlotMapping(model_input.positions, ())  # for a step with encoder input only
        tiles: Mapping[int, Sequence[OffloadTile]] = {}
        if self.offload_reader is not None and model_input.sub_batches:
            tiles = self.offload_reader.open(model_input, self.positions)
        for group_index, group in enumerate(self.groups):
            if group.lower_level is not None:
                continue
            slot_mapping = model_input.slot_mappings[group_index] if model_input.sub_batches else empty_mapping
            write_index: WriteIndex | None = None
            if not group.spec.is_cross_attention:
                write_index = WriteIndex(self, group_index, model_input, slot_mapping)
                for layer in self.head_metadata.keys() & set(group.layers):
                    self.head_metadata[layer].write(write_index.blocks, write_index.offsets, model_input.positions)
            elif model_input.encoder_input is not None:
                write_index = WriteIndex(self, group_index, model_input.encoder_input, next(encoder_mappings))
            read_plan = ReadPlan(self, group_index, model_input, slot_mapping, angles, tiles)
            for layer in group.layers:
                stores = self.keys[layer], self.values[layer], self.states.get(layer)
                views[layer] = LayerView(write_index, read_plan, layer, *stores)
        return [view for view in views if view is not None]


def _allocate_stores(group: CacheGroup, allocate: Callable[[str, int], LayerTensor]) -> tuple[LayerTensor, LayerTensor]:
    """Return one layer's keys and values."""
    keys = allocate(group.key_format, group.spec.head_dim)
    if group.spec.values_in_keys:
        return keys, LatentValues(keys, group.spec.value_dim)
    return keys, allocate(group.value_format, group.spec.value_dim)


def _allocate(
    group: CacheGroup, device: torch.device | str, memory: ops.runtime.HostMemory | None, format_name: str, dim: int
) -> LayerTensor:
    spec = group.spec
    return LayerTensor(format_name, group.num_blocks, spec.num_kv_heads, group.block_size, dim, device, memory)
