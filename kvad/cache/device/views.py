"""Cache views: one layer's access to the KVCache in one step.

Masks, tables and indices are computed once per group and step (:class:`GroupStepPlan`) and shared by its layers
(:class:`SelfAttentionView`); cross-attention reads the encoder input that was written earlier
(:class:`CrossAttentionView`). Lower levels and offloaded tokens are further parts of the same softmax.

Views do not choose blocks and support no gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from kvad import ops
from kvad.cache.device.eviction import PerHeadMetadata, count_queries
from kvad.cache.device.offload_reader import OffloadReader, OffloadTile
from kvad.cache.device.quest import BlockKeyBounds, SparseMask
from kvad.cache.device.tensors import BlockTable, LayerTensor, gather_blocks, gather_metadata, split_slots
from kvad.cache.groups import CacheGroup
from kvad.errors import CacheError
from kvad.model_input import (
    AttentionParams,
    AttentionPattern,
    ModelInput,
    Rotary,
    SlotMapping,
    SubBatch,
    TokenPositions,
)


class KVCacheState(Protocol):
    """The part of KVCache that its views read."""

    groups: tuple[CacheGroup, ...]
    positions: list[Tensor]
    stores: list[dict[int, tuple[LayerTensor, LayerTensor]]]
    weights: list[dict[int, LayerTensor]]
    head_metadata: dict[int, PerHeadMetadata]
    block_bounds: dict[int, BlockKeyBounds]
    rotaries: dict[int, Rotary]
    rope_on_read: bool
    exact_rope: bool
    kernel: ops.attention.Kernel
    attention_hook: ops.sub_batch.AttentionHook | None
    offload_reader: OffloadReader | None


class WriteIndex:
    """Slots of a group's new tokens; their positions are written immediately."""

    def __init__(
        self, kv_cache: KVCacheState, group_index: int, model_input: ModelInput, slot_mapping: SlotMapping
    ) -> None:
        assert slot_mapping.slots is not None, "the group's new tokens need slots"
        self.blocks, self.offsets = split_slots(slot_mapping.slots, kv_cache.groups[group_index].block_size)
        kv_cache.positions[group_index][self.blocks, self.offsets] = model_input.positions


class ReadPlan:
    """Tables and masks of a group's sub-batches in one step."""

    def __init__(
        self,
        kv_cache: KVCacheState,
        group_index: int,
        model_input: ModelInput,
        slot_mapping: SlotMapping,
        tiles: Mapping[int, Sequence[OffloadTile]] | None = None,
    ) -> None:
        group = kv_cache.groups[group_index]
        self.sub_batches: Sequence[SubBatch] = (
            model_input.sub_batches if slot_mapping.sub_batches is None else slot_mapping.sub_batches
        )
        self.spans = ops.sub_batch.sub_batch_spans(self.sub_batches)
        self.kernel, self.attention_hook = kv_cache.kernel, kv_cache.attention_hook
        pattern = AttentionPattern.from_spec(group.spec)
        self.rotate_keys, self.exact_rope = kv_cache.rope_on_read, kv_cache.exact_rope
        self.tables, self.masks = [], []
        self.head_metadata, self.bounds, policy = kv_cache.head_metadata, kv_cache.block_bounds, group.eviction_policy
        self.positions = kv_cache.positions[group_index]
        self.query_counts: list[Tensor | None] = []
        self.lower: list[_LowerLevel | _OffloadedLevel] = [
            _OffloadedLevel(kv_cache, level, model_input, tiles[level])
            if tiles and level in tiles
            else _LowerLevel(kv_cache, level, model_input)
            for level in _levels_below(kv_cache.groups, group_index)
            if model_input.sub_batches
        ]
        for sub_batch, (low, high), block_ids in zip(
            self.sub_batches, self.spans, slot_mapping.block_tables, strict=True
        ):
            table = BlockTable(block_ids, group.block_size, sub_batch.num_read_slots)
            queries = TokenPositions(model_input.positions[low:high].view(sub_batch.num_seqs, sub_batch.num_new_tokens))
            self.tables.append(table)
            self.masks.append(
                ops.attention.AttentionMask(
                    queries, TokenPositions(gather_metadata(kv_cache.positions[group_index], table)), pattern
                )
            )
            observes = policy is not None and policy.observed_queries > 0
            self.query_counts.append(
                count_queries(policy, queries.position) if policy is not None and observes else None
            )

    def attend(self, layer: int, q: Tensor, keys: LayerTensor, values: LayerTensor, params: AttentionParams) -> Tensor:
        """Return attention outputs [T, H, Dv] of one layer."""
        outputs = []
        metadata = self.head_metadata.get(layer)
        for index, sub_batch in enumerate(self.sub_batches):
            low, high = self.spans[index]
            queries, span, table = (
                q[low:high].unflatten(0, (sub_batch.num_seqs, sub_batch.num_new_tokens)),
                slice(low, high),
                self.tables[index],
            )
            bounds = self.bounds.get(layer)
            if bounds is not None and not bounds.reads_all(table):
                sparse_part = self._sparse_part(bounds, queries, self.masks[index], table, keys, values)
                result = ops.sub_batch.attend_sub_batch(
                    layer, index, sparse_part, params, self.kernel, self.attention_hook, span
                )
                outputs.append(result.out.flatten(0, 1))
                continue
            k, v = keys.read(table, q.dtype), values.read(table, q.dtype)
            mask, counts = self.masks[index], self.query_counts[index]
            rotate_keys = self.rotate_keys and params.rotary is not None
            if metadata is not None and (rotate_keys or params.bias is not None):  # Otherwise only visibility matters.
                mask = ops.attention.AttentionMask(mask.queries, TokenPositions(metadata.read(table)), mask.pattern)
            if rotate_keys:
                assert params.rotary is not None
                k = ops.rotary.rotate_rows(k, mask.keys.position, params.rotary, span, exact=self.exact_rope)
            first_part = ops.merge.AttentionPart(queries, k, v, mask)
            lower_parts = [lower.parts(layer, index, queries, params, self, span) for lower in self.lower]
            result = ops.sub_batch.attend_sub_batch(
                layer,
                index,
                first_part,
                params,
                self.kernel,
                self.attention_hook,
                span,
                counts,
                lower_parts=chain(*lower_parts),
            )
            if metadata is not None and counts is not None:
                assert result.mass is not None
                metadata.add(table, result.mass[0])
            outputs.append(result.out.flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=0)

    def _sparse_part(
        self,
        bounds: BlockKeyBounds,
        q: Tensor,
        mask: ops.attention.AttentionMask,
        table: BlockTable,
        keys: LayerTensor,
        values: LayerTensor,
    ) -> ops.merge.AttentionPart:
        """Return the attention part of sparsely read blocks.

        With one query per sequence, its blocks are gathered; with several, each query has a mask.
        """
        selected = bounds.select_blocks(q, mask.queries.position, table)
        if q.shape[1] > 1:
            sparse_mask = SparseMask(mask.queries, mask.keys, mask.pattern, selected, table.block_size)
            return ops.merge.AttentionPart(q, keys.read(table, q.dtype), values.read(table, q.dtype), sparse_mask)
        blocks = bounds.selected_blocks(selected, table)
        mask_of_selected = ops.attention.AttentionMask(
            mask.queries, TokenPositions(self.positions[blocks].flatten(2)), mask.pattern
        )
        return ops.merge.AttentionPart(
            q, keys.read_per_head(blocks, q.dtype), values.read_per_head(blocks, q.dtype), mask_of_selected
        )


class _LowerLevel:
    """Tables and masks of a lower level in one step."""

    def __init__(self, kv_cache: KVCacheState, group_index: int, model_input: ModelInput) -> None:
        group = kv_cache.groups[group_index]
        assert group.lower_level is not None
        self.stores, self.weights = kv_cache.stores[group_index], kv_cache.weights[group_index]
        pattern, slot_mapping = AttentionPattern.from_spec(group.spec), model_input.slot_mappings[group_index]
        self.tables, self.masks = [], []
        for sub_batch, (low, high), blocks in zip(
            model_input.sub_batches,
            ops.sub_batch.sub_batch_spans(model_input.sub_batches),
            slot_mapping.block_tables,
            strict=True,
        ):
            table = BlockTable(blocks, group.block_size, blocks.shape[1] * group.block_size)
            queries, keys = (
                TokenPositions(model_input.positions[low:high].view(sub_batch.num_seqs, sub_batch.num_new_tokens)),
                kv_cache.positions[group_index],
            )
            self.tables.append(table)
            self.masks.append(
                ops.attention.AttentionMask(queries, TokenPositions(gather_metadata(keys, table)), pattern)
            )

    def parts(
        self, layer: int, sub_batch: int, q: Tensor, params: AttentionParams, read_plan: ReadPlan, span: slice
    ) -> Iterator[ops.merge.AttentionPart]:
        """Yield the part of a sub-batch; none if no sequence has blocks in this level."""
        table, mask = self.tables[sub_batch], self.masks[sub_batch]
        if table.per_row == 0:
            return
        keys, values = self.stores[layer]
        k, v = keys.read(table, q.dtype), values.read(table, q.dtype)
        if read_plan.rotate_keys and params.rotary is not None:
            k = ops.rotary.rotate_rows(k, mask.keys.position, params.rotary, span, exact=read_plan.exact_rope)
        if layer in self.weights:
            mask = mask.with_weight(gather_blocks(self.weights[layer].data, table).squeeze(-1))
        yield ops.merge.AttentionPart(q, k, v, mask)


class _OffloadedLevel:
    """Tiles of an offloaded level in one step."""

    def __init__(
        self, kv_cache: KVCacheState, group_index: int, model_input: ModelInput, tiles: Sequence[OffloadTile]
    ) -> None:
        assert kv_cache.offload_reader is not None
        self.reader, self.group_index, self.pattern = (
            kv_cache.offload_reader,
            group_index,
            AttentionPattern.from_spec(kv_cache.groups[group_index].spec),
        )
        self.tiles = [
            [tile for tile in tiles if tile.sub_batch == sub_batch] for sub_batch in range(len(model_input.sub_batches))
        ]
        spans = zip(model_input.sub_batches, ops.sub_batch.sub_batch_spans(model_input.sub_batches), strict=True)
        self.queries = [
            TokenPositions(model_input.positions[low:high].view(sub_batch.num_seqs, sub_batch.num_new_tokens))
            for sub_batch, (low, high) in spans
        ]

    def parts(
        self, layer: int, sub_batch: int, q: Tensor, params: AttentionParams, read_plan: ReadPlan, span: slice
    ) -> Iterator[ops.merge.AttentionPart]:
        """Yield one part per tile.

        Each tile is read on demand and has its own mask, since a mask of all tiles would be as long as the sequence.
        """
        for tile in self.tiles[sub_batch]:
            k, v = self.reader.read(self.group_index, layer, tile, q)
            if read_plan.rotate_keys and params.rotary is not None:
                k = ops.rotary.rotate_rows(k, tile.keys.position, params.rotary, span, exact=read_plan.exact_rope)
            yield ops.merge.AttentionPart(
                q, k, v, ops.attention.AttentionMask(self.queries[sub_batch], tile.keys, self.pattern)
            )


def _levels_below(groups: Sequence[CacheGroup], group_index: int) -> list[int]:
    """Return the lower levels of a group, oldest tokens first."""
    return [
        i
        for i, group in reversed(list(enumerate(groups)))
        if group.lower_level is not None and group.lower_level.token_group == group_index
    ]


class GroupStepPlan:
    """Data shared by the layers of one group in one step."""

    def __init__(
        self,
        kv_cache: KVCacheState,
        group_index: int,
        model_input: ModelInput,
        slot_mapping: SlotMapping,
        angles: ops.rotary.RotaryCache,
        tiles: Mapping[int, Sequence[OffloadTile]],
    ) -> None:
        self.angles, self.rotaries = angles, kv_cache.rotaries
        self.write_index = WriteIndex(kv_cache, group_index, model_input, slot_mapping)
        self.read = ReadPlan(kv_cache, group_index, model_input, slot_mapping, tiles)


class SelfAttentionView:
    """View of one self-attention layer: writes the new tokens, then reads."""

    def __init__(self, group_plan: GroupStepPlan, layer: int, keys: LayerTensor, values: LayerTensor) -> None:
        self._group_plan, self._layer, self._keys, self._values = group_plan, layer, keys, values

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        """Rotate and write q, k, v and return attention outputs [T, H, Dv]."""
        assert k is not None and v is not None, "self-attention requires keys and values"
        group_plan, write_index = self._group_plan, self._group_plan.write_index
        _check_no_gradients(q, k, v)
        if params.rotary is not None:
            group_plan.rotaries[self._layer] = params.rotary
            q = group_plan.angles.rotate(q, params.rotary)
            k = k if group_plan.read.rotate_keys else group_plan.angles.rotate(k, params.rotary)
        self._keys.write(write_index.blocks, write_index.offsets, k)
        self._values.write(write_index.blocks, write_index.offsets, v)
        if self._layer in group_plan.read.bounds:
            group_plan.read.bounds[self._layer].update(write_index.blocks, write_index.offsets)
        return group_plan.read.attend(self._layer, q, self._keys, self._values, params)

    def write(self, k: Tensor, v: Tensor) -> None:
        """Not supported: self-attention writes in :meth:`attend`."""
        raise AssertionError("self-attention has no encoder input")


class CrossAttentionView:
    """View of one cross-attention layer; ``write_index`` is None without encoder input."""

    def __init__(
        self, write_index: WriteIndex | None, read_plan: ReadPlan, layer: int, keys: LayerTensor, values: LayerTensor
    ) -> None:
        self._write_index, self._read_plan = write_index, read_plan
        self._layer, self._keys, self._values = layer, keys, values

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        """Return attention outputs [T, H, Dv] over the stored encoder input."""
        assert k is None and v is None, "an encoder input is written once, by write"
        _check_no_gradients(q)
        return self._read_plan.attend(self._layer, q, self._keys, self._values, params)

    def write(self, k: Tensor, v: Tensor) -> None:
        """Store keys and values of the encoder input."""
        assert self._write_index is not None, "the step has no encoder input"
        _check_no_gradients(k, v)
        self._keys.write(self._write_index.blocks, self._write_index.offsets, k)
        self._values.write(self._write_index.blocks, self._write_index.offsets, v)


def _check_no_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise CacheError(
            "KVCache: gradients through cached keys and values are not supported",
            "Train with kvad.model.no_cache.NoCache, or run under torch.no_grad().",
        )
