"""Cache views: one layer's access to the KVCache in one step.

Masks, tables and indices are computed once per group and step (``ReadPlan``) and shared by its layers
(``LayerView``); cross-attention reads the encoder input that was written earlier. Lower levels and offloaded tokens are
further parts of the same softmax.

Views do not choose blocks and support no gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvad import ops
from kvad.cache.device.eviction import PerHeadMetadata, count_queries
from kvad.cache.device.offload_reader import OffloadReader, OffloadTile
from kvad.cache.device.quest import BlockKeyBounds, SparseMask
from kvad.cache.device.tensors import (
    BlockStates,
    BlockTable,
    LayerTensor,
    gather_blocks,
    gather_metadata,
    read_pair,
    split_slots,
)
from kvad.cache.groups import CacheGroup
from kvad.errors import CacheError
from kvad.model_input import (
    PADDING_BLOCK,
    AttentionParams,
    AttentionPattern,
    DeltaInputs,
    ModelInput,
    Rotary,
    SlotMapping,
    TokenPositions,
)


class KVCacheState(Protocol):
    """The part of KVCache that its views read."""

    groups: tuple[CacheGroup, ...]
    positions: list[Tensor]
    patterns: list[AttentionPattern]
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
        self.slots, self._block_size = slot_mapping.slots, kv_cache.groups[group_index].block_size
        ops.gpu.write_positions(kv_cache.positions[group_index], self.slots, model_input.positions)

    @property
    def blocks(self) -> Tensor:
        """The block of each new token [T]."""
        return self._split[0]

    @property
    def offsets(self) -> Tensor:
        """The offset of each new token in its block [T]."""
        return self._split[1]

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor]:
        return split_slots(self.slots, self._block_size)

    def write(self, keys: LayerTensor, values: LayerTensor, k: Tensor, v: Tensor) -> None:
        """Write k [T, K, D] and v [T, K, Dv] of one layer."""
        keys.write(self.blocks, self.offsets, k)
        values.write(self.blocks, self.offsets, v)


class _History(NamedTuple):
    """Slots of the last tokens of each sequence of a sub-batch, oldest first."""

    blocks: Tensor  # [R * n]
    offsets: Tensor  # [R * n]
    is_missing: Tensor  # [R, n], before the start of the sequence, or after its end

    def read(self, store: LayerTensor, dtype: torch.dtype) -> Tensor:
        """Return the vectors [R, n, D] of a store with one head; zeros of missing tokens."""
        vectors = store.read_slots(self.blocks, self.offsets, dtype).view(*self.is_missing.shape, -1)
        return vectors.masked_fill(self.is_missing.unsqueeze(-1), 0)


class ReadPlan:
    """Tables and masks of a group's sub-batches in one step."""

    def __init__(
        self,
        kv_cache: KVCacheState,
        group_index: int,
        model_input: ModelInput,
        slot_mapping: SlotMapping,
        angles: ops.rotary.RotaryCache,
        tiles: Mapping[int, Sequence[OffloadTile]],
    ) -> None:
        group, policy = kv_cache.groups[group_index], kv_cache.groups[group_index].eviction_policy
        own_sub_batches = slot_mapping.sub_batches
        self.sub_batches = model_input.sub_batches if own_sub_batches is None else own_sub_batches
        self.spans = [slice(*span) for span in ops.sub_batch.sub_batch_spans(self.sub_batches)]
        self.kernel, self.attention_hook = kv_cache.kernel, kv_cache.attention_hook
        self.rotate_keys, self.exact_rope = kv_cache.rope_on_read, kv_cache.exact_rope
        self.angles, self.rotaries = angles, kv_cache.rotaries
        self.head_metadata, self.bounds = kv_cache.head_metadata, kv_cache.block_bounds
        self.positions, self.is_cross_attention = kv_cache.positions[group_index], group.spec.is_cross_attention
        self.queries = [
            TokenPositions(model_input.positions[span].view(sub_batch.num_seqs, sub_batch.num_new_tokens))
            for sub_batch, span in zip(self.sub_batches, self.spans, strict=True)
        ]
        self.tables = [
            BlockTable(blocks, group.block_size, sub_batch.num_read_slots)
            for sub_batch, blocks in zip(self.sub_batches, slot_mapping.block_tables, strict=True)
        ]
        self._kv_cache, self._group_index = kv_cache, group_index
        observes = policy is not None and policy.observed_queries > 0
        self.query_counts = [
            count_queries(policy, queries.position) if policy is not None and observes else None
            for queries in self.queries
        ]
        self._histories: dict[tuple[int, int], _History] = {}
        self._whole_blocks: dict[int, _History] = {}
        self.lower: list[_LowerLevel | _OffloadedLevel] = []  # oldest tokens first
        for index, lower_group in enumerate(kv_cache.groups if model_input.sub_batches else ()):
            if lower_group.lower_level is None or lower_group.lower_level.token_group != group_index:
                continue
            if index in tiles:
                self.lower.insert(0, _OffloadedLevel(kv_cache, index, self.queries, tiles[index]))
            else:
                self.lower.insert(0, _LowerLevel(kv_cache, index, self.queries, model_input.slot_mappings[index]))
        self.paged_reason = paged_reason(kv_cache, group_index)

    @cached_property
    def masks(self) -> list[ops.attention.AttentionMask]:
        """The masks of the sub-batches, which kernels that read positions do not need."""
        return _masks(self._kv_cache, self._group_index, self.queries, self.tables)

    def is_paged(self, q: Tensor, params: AttentionParams, values: LayerTensor) -> bool:
        """Return True if a kernel reads and writes the blocks of a layer in place."""
        return not self.paged_reason and not ops.gpu.unsupported_layer(params, q.dtype, q.shape[-1], values.dim)

    def attend_paged(self, q: Tensor, keys: LayerTensor, values: LayerTensor, params: AttentionParams) -> Tensor:
        """Return attention outputs [T, H, Dv] of one layer, whose blocks are read in place."""
        outputs, pattern = [], self._kv_cache.patterns[self._group_index]
        for table, queries, span in zip(self.tables, self.queries, self.spans, strict=True):
            positions = self.positions, queries.position.flatten()
            stores = keys.paged, values.paged
            outputs.append(
                ops.gpu.attend_blocks(q[span], stores, table.blocks, table.slots, positions, pattern, params)
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=0)

    def rotated(self, k: Tensor, positions: Tensor, params: AttentionParams, span: slice) -> Tensor:
        """Rotate keys [R, K, S, D] that were stored without rotation."""
        if not self.rotate_keys or params.rotary is None:
            return k
        return ops.rotary.rotate_rows(k, positions, params.rotary, span, exact=self.exact_rope)

    def attend(self, layer: int, q: Tensor, keys: LayerTensor, values: LayerTensor, params: AttentionParams) -> Tensor:
        """Return attention outputs [T, H, Dv] of one layer."""
        outputs = []
        metadata, bounds = self.head_metadata.get(layer), self.bounds.get(layer)
        for index, sub_batch in enumerate(self.sub_batches):
            span, table, counts = self.spans[index], self.tables[index], self.query_counts[index]
            queries = q[span].unflatten(0, (sub_batch.num_seqs, sub_batch.num_new_tokens))
            if bounds is not None and not bounds.reads_all(table):
                part, counts = self._sparse_part(bounds, queries, index, keys, values), None
                lower_parts: Iterator[ops.merge.AttentionPart] = iter(())
            else:
                mask, rotates = self.masks[index], self.rotate_keys and params.rotary is not None
                if metadata is not None and (rotates or params.bias is not None):  # Otherwise only visibility matters.
                    mask = ops.attention.AttentionMask(mask.queries, TokenPositions(metadata.read(table)), mask.pattern)
                k, v = read_pair(keys, values, partial(_read, table=table, dtype=q.dtype))
                k = self.rotated(k, mask.keys.position, params, span)
                part = ops.merge.AttentionPart(queries, k, v, mask)
                lower_parts = chain(*(level.parts(self, layer, index, queries, params) for level in self.lower))
            call = ops.sub_batch.SubBatchCall(layer, index, span, self.kernel, self.attention_hook)
            result = ops.sub_batch.attend_sub_batch(call, part, params, counts, lower_parts)
            if metadata is not None and counts is not None:
                assert result.mass is not None
                metadata.add(table, result.mass[0])
            outputs.append(result.out.flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=0)

    def convolve(self, layer: int, x: Tensor, keys: LayerTensor, kernel: Tensor) -> Tensor:
        """Convolve the stored inputs of one layer, those of this step, x [T, C], included."""
        outputs = []
        for index, span in enumerate(self.spans):
            history = self._history(index, kernel.shape[1]).read(keys, x.dtype)
            out = ops.recurrence.causal_convolution(history, kernel)
            if self.attention_hook is not None:
                inputs, stored = x[span].view(out.shape).unsqueeze(2), keys.read(self.tables[index], x.dtype)
                part = ops.merge.AttentionPart(inputs, stored, stored, self.masks[index])
                call = ops.sub_batch.SubBatchCall(layer, index, span, self.kernel, self.attention_hook)
                ops.sub_batch.trace_inputs(call, part, out)
            outputs.append(out.flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=0)

    def recur(self, x: Tensor, log_decay: Tensor, values: LayerTensor) -> Tensor:
        """Compute the states [T, C] of one layer's new tokens from the stored state before them."""
        outputs = []
        for index, (sub_batch, span) in enumerate(zip(self.sub_batches, self.spans, strict=True)):
            read, rows = self._history(index, 2), sub_batch.num_seqs
            before = slice(None, None, sub_batch.num_new_tokens + 1)  # of each sequence, the token before the new ones
            state = values.read_slots(read.blocks[before], read.offsets[before], x.dtype).view(rows, -1)
            state = state.masked_fill(read.is_missing[:, :1], 0)
            inputs, decay = (each[span].unflatten(0, (rows, sub_batch.num_new_tokens)) for each in (x, log_decay))
            is_first = self.queries[index].position == 0
            outputs.append(ops.recurrence.gated_recurrence(state, inputs, decay, is_first).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=0)

    def delta(self, inputs: DeltaInputs, values: LayerTensor, states: BlockStates) -> Tensor:
        """Apply the gated delta rule to the new tokens of one layer -> [T, H, Dv], and store the states of full blocks.

        Each block is computed from its first token on, from the state behind the block before: a chunk always begins at
        a block and has its size, so that the result is the same in any steps, bit for bit, and after any truncation.
        """
        outputs = []
        for index, (sub_batch, span) in enumerate(zip(self.sub_batches, self.spans, strict=True)):
            read, size = self._whole_block(index), self.tables[index].block_size
            new = DeltaInputs(*(each[span].unflatten(0, (sub_batch.num_seqs, -1)) for each in inputs))
            positions = self.queries[index].position
            targets = (positions - positions[:, :1] // size * size)[..., None, None]  # of the new tokens, [R, L, 1, 1]
            chunks, blocks = _unpack(read.read(values, new.v.dtype)[:, 1:], new), read.blocks.view_as(read.is_missing)
            q = torch.zeros_like(chunks.k).scatter_(1, targets.expand_as(new.q), new.q)
            shape = len(blocks), new.v.shape[2], new.k.shape[3], new.v.shape[3]
            state = states.data[blocks[:, 0]].masked_fill(read.is_missing[:, :1], 0).view(shape)
            outs = []
            for last in range(size, blocks.shape[1], size):  # the column of the block's last token
                chunk = DeltaInputs(*(each[:, last - size : last] for each in chunks._replace(q=q)))
                out, state = ops.recurrence.gated_delta_rule(state, chunk)
                states.data[blocks[:, last].masked_fill(read.is_missing[:, last], PADDING_BLOCK)] = state.flatten(1)
                outs.append(out)
            outputs.append(torch.cat(outs, dim=1).gather(1, targets.expand_as(new.v)).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=0)

    def _history(self, index: int, width: int) -> _History:
        """Find the new tokens and the ``width - 1`` before them."""
        if (index, width) not in self._histories:
            queries = self.queries[index].position
            first = queries[:, :1] - width + 1
            self._histories[index, width] = self._find(index, first, width - 1 + queries.shape[1])
        return self._histories[index, width]

    def _whole_block(self, index: int) -> _History:
        """Find the last token before the block of the first new token, and the tokens of this and later blocks."""
        if index not in self._whole_blocks:
            queries, size = self.queries[index].position, self.tables[index].block_size
            num_blocks = -(-(size - 1 + queries.shape[1]) // size)
            first = queries[:, :1] // size * size - 1
            self._whole_blocks[index] = self._find(index, first, 1 + num_blocks * size)
        return self._whole_blocks[index]

    def _find(self, index: int, first: Tensor, num_read: int) -> _History:
        """Find tokens from position ``first`` [R, 1] to the last new one, by the positions in their slots."""
        positions, table = self.masks[index].keys.position, self.tables[index]
        distance = positions - first
        is_read = (positions >= 0) & (distance >= 0) & (distance < num_read)
        is_read &= positions <= self.queries[index].position[:, -1:]
        slots = positions.new_full((len(positions), num_read + 1), -1)  # the last column takes all other slots
        source = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        slots = slots.scatter_(1, distance.where(is_read, num_read), source)[:, :num_read]
        blocks, offsets = split_slots(slots.clamp(min=0), table.block_size)
        blocks = table.flat.view(table.rows, table.per_row).gather(1, blocks)
        return _History(blocks.flatten(), offsets.flatten(), slots < 0)

    def _sparse_part(
        self, bounds: BlockKeyBounds, q: Tensor, index: int, keys: LayerTensor, values: LayerTensor
    ) -> ops.merge.AttentionPart:
        """Return the attention part of sparsely read blocks.

        With one query per sequence, its blocks are gathered; with several, each query has a mask.
        """
        table, mask = self.tables[index], self.masks[index]
        selected = bounds.select_blocks(q, mask.queries.position, table)
        if q.shape[1] > 1:
            sparse_mask = SparseMask(mask.queries, mask.keys, mask.pattern, selected, table.block_size)
            pair = read_pair(keys, values, partial(_read, table=table, dtype=q.dtype))
            return ops.merge.AttentionPart(q, *pair, sparse_mask)
        blocks = bounds.selected_blocks(selected, table)
        positions = TokenPositions(self.positions[blocks].flatten(2))
        mask = ops.attention.AttentionMask(mask.queries, positions, mask.pattern)
        pair = read_pair(keys, values, lambda store: store.read_per_head(blocks, q.dtype))
        return ops.merge.AttentionPart(q, *pair, mask)


def paged_reason(kv_cache: KVCacheState, group_index: int) -> str:
    """Return why no kernel reads and writes a group's blocks in place; "" if one may."""
    group = kv_cache.groups[group_index]
    reasons = {
        "a kernel of PyTorch was chosen": kv_cache.kernel != "auto",
        "an attention hook reads every layer": kv_cache.attention_hook is not None,
        "keys are rotated when they are read": kv_cache.rope_on_read,
        "an eviction policy reads the attention weights": group.eviction_policy is not None,
        "a policy reads some blocks only": group.sparse_read_policy is not None,
        "a policy moves older tokens to other levels": any(
            other.lower_level is not None and other.lower_level.token_group == group_index for other in kv_cache.groups
        ),
        "layers with a recurrent state": group.spec.is_state,
        "latent attention (MLA)": group.spec.values_in_keys,
    }
    if found := next((reason for reason, holds in reasons.items() if holds), ""):
        return found
    positions, pattern = kv_cache.positions[group_index], kv_cache.patterns[group_index]
    return ops.gpu.unsupported_blocks(positions.device, group.key_format, group.value_format, pattern)


class _LowerLevel:
    """Tables and masks of a lower level in one step.

    It does not keep the ``ReadPlan`` that owns it: a cycle would keep all masks in memory beyond the step.
    """

    def __init__(
        self, kv_cache: KVCacheState, group_index: int, queries: Sequence[TokenPositions], slot_mapping: SlotMapping
    ) -> None:
        size = kv_cache.groups[group_index].block_size
        self.stores, self.weights = kv_cache.stores[group_index], kv_cache.weights[group_index]
        self.tables = [BlockTable(blocks, size, blocks.shape[1] * size) for blocks in slot_mapping.block_tables]
        self.masks = _masks(kv_cache, group_index, queries, self.tables)

    def parts(
        self, read_plan: ReadPlan, layer: int, sub_batch: int, q: Tensor, params: AttentionParams
    ) -> Iterator[ops.merge.AttentionPart]:
        """Yield the part of a sub-batch; none if no sequence has blocks in this level."""
        table, mask = self.tables[sub_batch], self.masks[sub_batch]
        if table.per_row == 0:
            return
        k, v = read_pair(*self.stores[layer], partial(_read, table=table, dtype=q.dtype))
        k = read_plan.rotated(k, mask.keys.position, params, read_plan.spans[sub_batch])
        if layer in self.weights:
            mask = mask.with_weight(gather_blocks(self.weights[layer].data, table).squeeze(-1))
        yield ops.merge.AttentionPart(q, k, v, mask)


class _OffloadedLevel:
    """Tiles of an offloaded level in one step."""

    def __init__(
        self, kv_cache: KVCacheState, group_index: int, queries: Sequence[TokenPositions], tiles: Sequence[OffloadTile]
    ) -> None:
        assert kv_cache.offload_reader is not None
        self._reader, self._group_index, self._queries = kv_cache.offload_reader, group_index, queries
        self._pattern, self._tiles = kv_cache.patterns[group_index], tiles

    def parts(
        self, read_plan: ReadPlan, layer: int, sub_batch: int, q: Tensor, params: AttentionParams
    ) -> Iterator[ops.merge.AttentionPart]:
        """Yield one part per tile.

        Each tile is read on demand and has its own mask, since a mask of all tiles would be as long as the sequence.
        """
        queries, span = self._queries[sub_batch], read_plan.spans[sub_batch]
        for tile in self._tiles:
            if tile.sub_batch == sub_batch:
                k, v = self._reader.read(self._group_index, layer, tile, q)
                k = read_plan.rotated(k, tile.keys.position, params, span)
                yield ops.merge.AttentionPart(q, k, v, ops.attention.AttentionMask(queries, tile.keys, self._pattern))


def _read(store: LayerTensor, table: BlockTable, dtype: torch.dtype) -> Tensor:
    return store.read(table, dtype)


def _pack(inputs: DeltaInputs) -> Tensor:
    """Return what the rule reads of tokens again, in one vector for each: [T, 1, K D + H Dv + 2 H]."""
    parts = inputs.k.flatten(1), inputs.v.flatten(1), inputs.log_decay, inputs.beta
    return torch.cat(parts, dim=-1).unsqueeze(1)


def _unpack(vectors: Tensor, like: DeltaInputs) -> DeltaInputs:
    """Return the inputs [R, n, ...] of vectors [R, n, width], without queries."""
    heads, (keys, values) = like.beta.shape[-1], (each.shape[2:] for each in (like.k, like.v))
    k, v, log_decay, beta = vectors.split((keys.numel(), values.numel(), heads, heads), dim=-1)
    return DeltaInputs(k, k.unflatten(-1, keys), v.unflatten(-1, values), log_decay, beta)


def _masks(
    kv_cache: KVCacheState, group_index: int, queries: Sequence[TokenPositions], tables: Sequence[BlockTable]
) -> list[ops.attention.AttentionMask]:
    column, pattern = kv_cache.positions[group_index], kv_cache.patterns[group_index]
    return [
        ops.attention.AttentionMask(query, TokenPositions(gather_metadata(column, table)), pattern)
        for query, table in zip(queries, tables, strict=True)
    ]


class LayerView:
    """View of one layer; ``write_index`` is None in a cross-attention layer without encoder input."""

    def __init__(
        self,
        write_index: WriteIndex | None,
        read_plan: ReadPlan,
        layer: int,
        keys: LayerTensor,
        values: LayerTensor,
        states: BlockStates | None,
    ) -> None:
        self._write_index, self._read_plan = write_index, read_plan
        self._layer, self._keys, self._values, self._states = layer, keys, values, states

    def write(self, k: Tensor, v: Tensor) -> None:
        """Store keys and values of the encoder input."""
        assert self._write_index is not None and self._read_plan.is_cross_attention, "the step has no encoder input"
        _check_no_gradients(k, v)
        self._write_index.write(self._keys, self._values, k, v)

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        """Return attention outputs [T, H, Dv]. Self-attention first rotates q and k, and writes k and v."""
        read_plan, write_index = self._read_plan, self._write_index
        if read_plan.is_cross_attention:
            assert k is None and v is None, "an encoder input is written once, by write"
            _check_no_gradients(q)
            if read_plan.is_paged(q, params, self._values):
                return read_plan.attend_paged(q, self._keys, self._values, params)
            return read_plan.attend(self._layer, q, self._keys, self._values, params)
        assert k is not None and v is not None and write_index is not None, "requires keys, values and slots"
        _check_no_gradients(q, k, v)
        if read_plan.is_paged(q, params, self._values):
            return self._attend_paged(q, k, v, params)
        if params.rotary is not None:
            read_plan.rotaries[self._layer] = params.rotary
            q = read_plan.angles.rotate(q, params.rotary)
            k = k if read_plan.rotate_keys else read_plan.angles.rotate(k, params.rotary)
        write_index.write(self._keys, self._values, k, v)
        if self._layer in read_plan.bounds:
            read_plan.bounds[self._layer].update(write_index.blocks, write_index.offsets)
        return read_plan.attend(self._layer, q, self._keys, self._values, params)

    def _attend_paged(self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        read_plan, write_index, rotary, angles = self._read_plan, self._write_index, params.rotary, None
        assert write_index is not None
        if rotary is not None:
            read_plan.rotaries[self._layer], angles = rotary, read_plan.angles.angles(rotary)
        stores, interleaved = (self._keys.paged, self._values.paged), rotary is not None and rotary.interleaved
        q = ops.gpu.rotate_and_write((q, k, v), stores, write_index.slots, angles, interleaved)
        return read_plan.attend_paged(q, self._keys, self._values, params)

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Write the inputs x [T, C], and convolve them with those of earlier tokens."""
        assert self._write_index is not None, "requires slots"
        _check_no_gradients(x)
        self._keys.write(self._write_index.blocks, self._write_index.offsets, x.unsqueeze(1))
        return self._read_plan.convolve(self._layer, x, self._keys, kernel)

    def recur(self, x: Tensor, log_decay: Tensor) -> Tensor:
        """Compute and write the states of new tokens, whose slots ``convolve`` has written."""
        assert self._write_index is not None, "requires slots"
        _check_no_gradients(x, log_decay)
        states = self._read_plan.recur(x, log_decay, self._values)
        self._values.write(self._write_index.blocks, self._write_index.offsets, states.unsqueeze(1))
        return states

    def delta(self, inputs: DeltaInputs) -> Tensor:
        """Write the inputs of new tokens, whose slots ``convolve`` has written, and apply the gated delta rule."""
        assert self._write_index is not None and self._states is not None, "requires slots and states"
        _check_no_gradients(*inputs)
        self._values.write(self._write_index.blocks, self._write_index.offsets, _pack(inputs))
        return self._read_plan.delta(inputs, self._values, self._states)


def _check_no_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise CacheError(
            "KVCache: gradients through cached keys and values are not supported",
            "Train with kvad.model.no_cache.NoCache, or run under torch.no_grad().",
        )
