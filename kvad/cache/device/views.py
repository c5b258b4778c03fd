"""What a layer sees of a Memory in one step: where its new tokens go, and what its queries read.

Masks, tables and indices are made once per group and step (:class:`Shared`) and asked by each of its layers
(:class:`RowView`); cross-attention reads what its source's step wrote (:class:`CrossView`).  What lies below a group,
as levels or in a spool, is read as further parts of the same softmax.

Never: a choice of blocks; a gradient.
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
    """A Memory, as its views see it."""

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
    """Where a group's new tokens go; their positions are marked at once."""

    def __init__(self, memory: KVCacheState, number: int, step: ModelInput, slot_mapping: SlotMapping) -> None:
        assert slot_mapping.slots is not None, "this group's tokens have no slots"
        self.blocks, self.offsets = split_slots(slot_mapping.slots, memory.groups[number].block_size)
        memory.positions[number][self.blocks, self.offsets] = step.positions


class ReadPlan:
    """What a group's lanes read, and who sees what of it."""

    def __init__(
        self,
        memory: KVCacheState,
        number: int,
        step: ModelInput,
        slot_mapping: SlotMapping,
        tiles: Mapping[int, Sequence[OffloadTile]] | None = None,
    ) -> None:
        group = memory.groups[number]
        self.sub_batches: Sequence[SubBatch] = (
            step.sub_batches if slot_mapping.sub_batches is None else slot_mapping.sub_batches
        )
        self.spans = ops.sub_batch.sub_batch_spans(self.sub_batches)
        self.kernel, self.attention_hook = memory.kernel, memory.attention_hook
        reach = AttentionPattern.from_spec(group.spec)
        self.turning, self.exact = memory.rope_on_read, memory.exact_rope
        self.tables, self.readings = [], []
        self.columns, self.bounds, policy = memory.head_metadata, memory.block_bounds, group.eviction_policy
        self.positions = memory.positions[number]
        self.counts: list[Tensor | None] = []
        self.lower: list[_LowerLevel | _OffloadedLevel] = [
            _OffloadedLevel(memory, other, step, tiles[other])
            if tiles and other in tiles
            else _LowerLevel(memory, other, step)
            for other in _levels_below(memory.groups, number)
            if step.sub_batches
        ]
        for lane, (low, high), blocks in zip(self.sub_batches, self.spans, slot_mapping.block_tables, strict=True):
            table = BlockTable(blocks, group.block_size, lane.num_read_slots)
            queries = TokenPositions(step.positions[low:high].view(lane.num_seqs, lane.num_new_tokens))
            self.tables.append(table)
            self.readings.append(
                ops.attention.AttentionMask(
                    queries, TokenPositions(gather_metadata(memory.positions[number], table)), reach
                )
            )
            counted = policy is not None and policy.observed_queries > 0
            self.counts.append(count_queries(policy, queries.position) if policy is not None and counted else None)

    def attend(self, layer: int, q: Tensor, keys: LayerTensor, values: LayerTensor, score: AttentionParams) -> Tensor:
        outs = []
        columns = self.columns.get(layer)
        for number, lane in enumerate(self.sub_batches):
            low, high = self.spans[number]
            queries, at, table = (
                q[low:high].unflatten(0, (lane.num_seqs, lane.num_new_tokens)),
                slice(low, high),
                self.tables[number],
            )
            bounds = self.bounds.get(layer)
            if bounds is not None and not bounds.reads_all(table):
                part = self._chosen(bounds, queries, self.readings[number], table, keys, values)
                seen = ops.sub_batch.attend_sub_batch(layer, number, part, score, self.kernel, self.attention_hook, at)
                outs.append(seen.out.flatten(0, 1))
                continue
            k, v = keys.read(table, q.dtype), values.read(table, q.dtype)
            reading, count = self.readings[number], self.counts[number]
            turning = self.turning and score.rotary is not None
            if columns is not None and (turning or score.bias is not None):  # else it does not matter where a key was
                reading = ops.attention.AttentionMask(
                    reading.queries, TokenPositions(columns.read(table)), reading.pattern
                )
            if turning:
                assert score.rotary is not None
                k = ops.rotary.rotate_rows(k, reading.keys.position, score.rotary, at, exact=self.exact)
            first = ops.merge.AttentionPart(queries, k, v, reading)
            others = [lower.parts(layer, number, queries, score, self, at) for lower in self.lower]
            seen = ops.sub_batch.attend_sub_batch(
                layer, number, first, score, self.kernel, self.attention_hook, at, count, below=chain(*others)
            )
            if columns is not None and count is not None:
                assert seen.mass is not None
                columns.add(table, seen.mass[0])
            outs.append(seen.out.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)

    def _chosen(
        self,
        bounds: BlockKeyBounds,
        q: Tensor,
        reading: ops.attention.AttentionMask,
        table: BlockTable,
        keys: LayerTensor,
        values: LayerTensor,
    ) -> ops.merge.AttentionPart:
        """What the queries choose to read: one query of a row gathers it, of several each has a mask."""
        chosen = bounds.select_blocks(q, reading.queries.position, table)
        if q.shape[1] > 1:
            made = SparseMask(reading.queries, reading.keys, reading.pattern, chosen, table.block_size)
            return ops.merge.AttentionPart(q, keys.read(table, q.dtype), values.read(table, q.dtype), made)
        blocks = bounds.selected_blocks(chosen, table)
        few = ops.attention.AttentionMask(
            reading.queries, TokenPositions(self.positions[blocks].flatten(2)), reading.pattern
        )
        return ops.merge.AttentionPart(
            q, keys.read_per_head(blocks, q.dtype), values.read_per_head(blocks, q.dtype), few
        )


class _LowerLevel:
    """What the lanes of a group read of a level that its tokens have descended to."""

    def __init__(self, memory: KVCacheState, number: int, step: ModelInput) -> None:
        group = memory.groups[number]
        assert group.lower_level is not None
        self.stores, self.weights = memory.stores[number], memory.weights[number]
        reach, place = AttentionPattern.from_spec(group.spec), step.slot_mappings[number]
        self.tables, self.readings = [], []
        for lane, (low, high), blocks in zip(
            step.sub_batches, ops.sub_batch.sub_batch_spans(step.sub_batches), place.block_tables, strict=True
        ):
            table = BlockTable(blocks, group.block_size, blocks.shape[1] * group.block_size)
            queries, keys = (
                TokenPositions(step.positions[low:high].view(lane.num_seqs, lane.num_new_tokens)),
                memory.positions[number],
            )
            self.tables.append(table)
            self.readings.append(
                ops.attention.AttentionMask(queries, TokenPositions(gather_metadata(keys, table)), reach)
            )

    def parts(
        self, layer: int, lane: int, q: Tensor, score: AttentionParams, reads: ReadPlan, at: slice
    ) -> Iterator[ops.merge.AttentionPart]:
        """The part of a lane; none where no row of it has anything here."""
        table, reading = self.tables[lane], self.readings[lane]
        if table.per_row == 0:
            return
        keys, values = self.stores[layer]
        k, v = keys.read(table, q.dtype), values.read(table, q.dtype)
        if reads.turning and score.rotary is not None:
            k = ops.rotary.rotate_rows(k, reading.keys.position, score.rotary, at, exact=reads.exact)
        if layer in self.weights:
            reading = reading.with_weight(gather_blocks(self.weights[layer].data, table).squeeze(-1))
        yield ops.merge.AttentionPart(q, k, v, reading)


class _OffloadedLevel:
    """What the lanes of a group read of a level that lies in a spool: a part for each tile."""

    def __init__(self, memory: KVCacheState, number: int, step: ModelInput, tiles: Sequence[OffloadTile]) -> None:
        assert memory.offload_reader is not None
        self.spill, self.number, self.reach = (
            memory.offload_reader,
            number,
            AttentionPattern.from_spec(memory.groups[number].spec),
        )
        self.tiles = [[tile for tile in tiles if tile.sub_batch == lane] for lane in range(len(step.sub_batches))]
        spans = zip(step.sub_batches, ops.sub_batch.sub_batch_spans(step.sub_batches), strict=True)
        self.queries = [
            TokenPositions(step.positions[low:high].view(lane.num_seqs, lane.num_new_tokens))
            for lane, (low, high) in spans
        ]

    def parts(
        self, layer: int, lane: int, q: Tensor, score: AttentionParams, reads: ReadPlan, at: slice
    ) -> Iterator[ops.merge.AttentionPart]:
        """Each is read when it is asked for; its masks are its own, for those of all would be as long as the row."""
        for tile in self.tiles[lane]:
            k, v = self.spill.read(self.number, layer, tile, q)
            if reads.turning and score.rotary is not None:
                k = ops.rotary.rotate_rows(k, tile.keys.position, score.rotary, at, exact=reads.exact)
            yield ops.merge.AttentionPart(
                q, k, v, ops.attention.AttentionMask(self.queries[lane], tile.keys, self.reach)
            )


def _levels_below(groups: Sequence[CacheGroup], number: int) -> list[int]:
    """Oldest tokens first."""
    return [
        i
        for i, group in reversed(list(enumerate(groups)))
        if group.lower_level is not None and group.lower_level.token_group == number
    ]


class GroupStepPlan:
    """What the layers of one group share in one step."""

    def __init__(
        self,
        memory: KVCacheState,
        number: int,
        step: ModelInput,
        slot_mapping: SlotMapping,
        angles: ops.rotary.RotaryCache,
        tiles: Mapping[int, Sequence[OffloadTile]],
    ) -> None:
        self.angles, self.rotaries = angles, memory.rotaries
        self.written = WriteIndex(memory, number, step, slot_mapping)
        self.read = ReadPlan(memory, number, step, slot_mapping, tiles)


class SelfAttentionView:
    def __init__(self, shared: GroupStepPlan, layer: int, keys: LayerTensor, values: LayerTensor) -> None:
        self._shared, self._layer, self._keys, self._values = shared, layer, keys, values

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams) -> Tensor:
        assert k is not None and v is not None, "self-attention brings its own keys and values"
        shared, written = self._shared, self._shared.written
        _check_no_gradients(q, k, v)
        if score.rotary is not None:
            shared.rotaries[self._layer] = score.rotary
            q = shared.angles.rotate(q, score.rotary)
            k = k if shared.read.turning else shared.angles.rotate(k, score.rotary)
        self._keys.write(written.blocks, written.offsets, k)
        self._values.write(written.blocks, written.offsets, v)
        if self._layer in shared.read.bounds:
            shared.read.bounds[self._layer].update(written.blocks, written.offsets)
        return shared.read.attend(self._layer, q, self._keys, self._values, score)

    def write(self, k: Tensor, v: Tensor) -> None:
        raise AssertionError("self-attention reads no source")


class CrossAttentionView:
    """``written`` None: this step brings no source."""

    def __init__(
        self, written: WriteIndex | None, reads: ReadPlan, layer: int, keys: LayerTensor, values: LayerTensor
    ) -> None:
        self._written, self._reads = written, reads
        self._layer, self._keys, self._values = layer, keys, values

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams) -> Tensor:
        assert k is None and v is None, "a source is written once, by write"
        _check_no_gradients(q)
        return self._reads.attend(self._layer, q, self._keys, self._values, score)

    def write(self, k: Tensor, v: Tensor) -> None:
        assert self._written is not None, "this step brings no source"
        _check_no_gradients(k, v)
        self._keys.write(self._written.blocks, self._written.offsets, k)
        self._values.write(self._written.blocks, self._written.offsets, v)


def _check_no_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise CacheError(
            "a Memory keeps no graph: no gradient can pass through its keys and values",
            "train with kvad.model.no_cache.NoCache, or run this under torch.no_grad()",
        )
