"""Memory: the device face of the cache.  It holds tensors and decides nothing.

One :class:`~kvad.cache.store.Store` of keys and one of values per layer, in the formats of their group, and per group
one column of positions, ``[blocks, block_size]`` int64.  A slot is visible iff its position is >= 0, which is so iff
the row that owns its block wrote it: ``apply`` clears blocks that change hands (positions to -1, contents to zero), and
nothing ever writes block 0 (empty, it pads tables).  So whether rows are contiguous, paged or ring-shaped, one mask
rule serves.

A cross-attention's group holds sources instead of rows: written once, by a step without decoder tokens, and read by
every row that shares the source.

Memory must never choose: which block, which row, what to drop are the ledger's integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvad.cache.layout import Table, read_column, split
from kvad.cache.sizing import Group
from kvad.cache.store import Store
from kvad.errors import CacheError
from kvad.ops.attend import Kernel, Reading
from kvad.ops.lanes import Probe, lane_spans, observe
from kvad.ops.rotary import Angles
from kvad.step import Lane, Mark, Moves, Place, Reach, Score, Step, View

__all__ = ["Memory"]


class Memory:
    """Stores for every layer of a model, allocated once, in the formats that ``groups`` name.

    Keys and values come back in the query's dtype when they are read.  ``probe`` is shown what every layer sees (a
    debugger's and ``kvad verify``'s seam); it costs the fused kernel.  ConfigError where torch lacks a format.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        device: torch.device | str = "cpu",
        kernel: Kernel = "auto",
        probe: Probe | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.kernel, self.probe = kernel, probe
        keys: dict[int, Store] = {}
        values: dict[int, Store] = {}
        self.positions: list[Tensor] = []
        for group in self.groups:
            spec, size = group.mixer, group.block_size
            for layer in group.layers:
                keys[layer] = Store(group.keys, group.blocks, spec.kv_heads, size, spec.head_dim, device)
                values[layer] = Store(group.values, group.blocks, spec.kv_heads, size, spec.value_dim, device)
            self.positions.append(torch.full((group.blocks, size), -1, dtype=torch.int64, device=device))
        self.keys = [keys[layer] for layer in sorted(keys)]
        self.values = [values[layer] for layer in sorted(values)]

    def leaves(self) -> list[Tensor]:
        """Every tensor of the cache, flat: keys and values by layer, then positions by group."""
        stores = (*self.keys, *self.values)
        return [*(array for store in stores for array in store.arrays), *self.positions]

    def payload_bytes(self) -> int:
        return sum(store.data.nbytes for store in (*self.keys, *self.values))

    def scale_bytes(self) -> int:
        return sum(store.nbytes for store in (*self.keys, *self.values)) - self.payload_bytes()

    def column_bytes(self) -> int:
        return sum(t.nbytes for t in self.positions)

    def release(self) -> None:
        """Give every store back.  The memory cannot be opened afterwards."""
        self.keys, self.values, self.positions, self.groups = [], [], [], ()

    def apply(self, moves: Moves) -> None:
        """Edits between two steps: clear blocks that change hands, then copy on write."""
        for group, positions, clear, copy in zip(self.groups, self.positions, moves.clear, moves.copy, strict=True):
            if clear:
                self._clear(group, positions, torch.tensor(clear, device=positions.device))
            for source, target, kept in copy:
                self._copy(group, positions, source, target, kept)

    def _clear(self, group: Group, positions: Tensor, blocks: Tensor) -> None:
        positions.index_fill_(0, blocks, -1)
        for layer in group.layers:
            self.keys[layer].clear(blocks)
            self.values[layer].clear(blocks)

    def _copy(self, group: Group, positions: Tensor, source: int, target: int, kept: int) -> None:
        positions[target, :kept] = positions[source, :kept]
        positions[target, kept:] = -1
        for layer in group.layers:
            self.keys[layer].copy(source, target)
            self.values[layer].copy(source, target)

    def open(self, step: Step) -> Sequence[View]:
        """Mark the new tokens' slots and build one view per layer; masks and indices are made once per group."""
        angles = Angles(step.positions)
        views: list[View | None] = [None] * len(self.keys)
        sources = iter(() if step.source is None else step.source.places)
        nothing = Place(step.positions, ())  # of a step that is all source
        for number, group in enumerate(self.groups):
            place = step.places[number] if step.lanes else nothing
            if group.mixer.cross:
                written = _Written(self, number, step.source, next(sources)) if step.source is not None else None
                read = _Reads(self, number, step, place)
                for layer in group.layers:
                    views[layer] = _CrossView(written, read, layer, self.keys[layer], self.values[layer])
                continue
            shared = _Shared(self, number, step, place, angles)
            for layer in group.layers:
                views[layer] = _MemoryView(shared, layer, self.keys[layer], self.values[layer])
        return [view for view in views if view is not None]


class _Written:
    """Where a group's new tokens go; their positions are marked at once."""

    def __init__(self, memory: Memory, number: int, step: Step, place: Place) -> None:
        assert place.slots is not None, "this group's tokens have no slots"
        self.blocks, self.offsets = split(place.slots, memory.groups[number].block_size)
        memory.positions[number][self.blocks, self.offsets] = step.positions


class _Reads:
    """What a group's lanes read, and who sees what of it."""

    def __init__(self, memory: Memory, number: int, step: Step, place: Place) -> None:
        group = memory.groups[number]
        self.lanes: Sequence[Lane] = step.lanes if place.lanes is None else place.lanes
        self.spans = lane_spans(self.lanes)
        self.kernel, self.probe = memory.kernel, memory.probe
        reach = Reach(group.mixer.causal, group.mixer.window)
        self.tables, self.readings = [], []
        for lane, (low, high), blocks in zip(self.lanes, self.spans, place.tables, strict=True):
            table = Table(blocks, group.block_size, lane.read)
            queries = Mark(step.positions[low:high].view(lane.rows, lane.new))
            self.tables.append(table)
            self.readings.append(Reading(queries, Mark(read_column(memory.positions[number], table)), reach))

    def attend(self, layer: int, q: Tensor, keys: Store, values: Store, score: Score) -> Tensor:
        outs = []
        for number, lane in enumerate(self.lanes):
            low, high = self.spans[number]
            queries = q[low:high].unflatten(0, (lane.rows, lane.new))
            k, v = keys.read(self.tables[number], q.dtype), values.read(self.tables[number], q.dtype)
            outs.append(observe(layer, number, queries, k, v, self.readings[number], score, self.kernel, self.probe))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)


class _Shared:
    """What the layers of one group share in one step."""

    def __init__(self, memory: Memory, number: int, step: Step, place: Place, angles: Angles) -> None:
        self.angles = angles
        self.written = _Written(memory, number, step, place)
        self.read = _Reads(memory, number, step, place)


class _MemoryView:
    def __init__(self, shared: _Shared, layer: int, keys: Store, values: Store) -> None:
        self._shared, self._layer, self._keys, self._values = shared, layer, keys, values

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: Score) -> Tensor:
        assert k is not None and v is not None, "self-attention brings its own keys and values"
        shared, written = self._shared, self._shared.written
        _refuse_gradients(q, k, v)
        if score.rotary is not None:
            q, k = shared.angles.rotate(q, score.rotary), shared.angles.rotate(k, score.rotary)
        self._keys.write(written.blocks, written.offsets, k)
        self._values.write(written.blocks, written.offsets, v)
        return shared.read.attend(self._layer, q, self._keys, self._values, score)

    def write(self, k: Tensor, v: Tensor) -> None:
        raise AssertionError("self-attention reads no source")


class _CrossView:
    """``written`` None: this step brings no source."""

    def __init__(self, written: _Written | None, reads: _Reads, layer: int, keys: Store, values: Store) -> None:
        self._written, self._reads = written, reads
        self._layer, self._keys, self._values = layer, keys, values

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: Score) -> Tensor:
        assert k is None and v is None, "a source is written once, by write"
        _refuse_gradients(q)
        return self._reads.attend(self._layer, q, self._keys, self._values, score)

    def write(self, k: Tensor, v: Tensor) -> None:
        assert self._written is not None, "this step brings no source"
        _refuse_gradients(k, v)
        self._keys.write(self._written.blocks, self._written.offsets, k)
        self._values.write(self._written.blocks, self._written.offsets, v)


def _refuse_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise CacheError(
            "a Memory keeps no graph: no gradient can pass through its keys and values",
            "train with kvad.model.fresh.Fresh, or run this under torch.no_grad()",
        )
