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

from kvad.cache.cuts import HeadColumns, count_queries
from kvad.cache.layout import Table, read, read_column, split
from kvad.cache.quest import Bounds, ChosenReading
from kvad.cache.sizing import Group
from kvad.cache.spill import Spill, Tile
from kvad.cache.store import Store
from kvad.errors import CacheError
from kvad.ops.attend import Kernel, Reading
from kvad.ops.lanes import Probe, lane_spans, observe
from kvad.ops.merge import Part
from kvad.ops.rotary import Angles, rotate_rows
from kvad.step import Lane, Mark, Place, Reach, Rotary, Score, Step

__all__ = ["CrossView", "Reads", "RowView", "Shared", "Written"]


class Holder(Protocol):
    """A Memory, as its views see it."""

    groups: tuple[Group, ...]
    positions: list[Tensor]
    stores: list[dict[int, tuple[Store, Store]]]
    weights: list[dict[int, Store]]
    columns: dict[int, HeadColumns]
    bounds: dict[int, Bounds]
    rotaries: dict[int, Rotary]
    rotates_on_read: bool
    exact: bool
    kernel: Kernel
    probe: Probe | None
    spill: Spill | None


class Written:
    """Where a group's new tokens go; their positions are marked at once."""

    def __init__(self, memory: Holder, number: int, step: Step, place: Place) -> None:
        assert place.slots is not None, "this group's tokens have no slots"
        self.blocks, self.offsets = split(place.slots, memory.groups[number].block_size)
        memory.positions[number][self.blocks, self.offsets] = step.positions


class Reads:
    """What a group's lanes read, and who sees what of it."""

    def __init__(
        self, memory: Holder, number: int, step: Step, place: Place, tiles: Mapping[int, Sequence[Tile]] | None = None
    ) -> None:
        group = memory.groups[number]
        self.lanes: Sequence[Lane] = step.lanes if place.lanes is None else place.lanes
        self.spans = lane_spans(self.lanes)
        self.kernel, self.probe = memory.kernel, memory.probe
        reach = Reach.of(group.mixer)
        self.turning, self.exact = memory.rotates_on_read, memory.exact
        self.tables, self.readings = [], []
        self.columns, self.bounds, policy = memory.columns, memory.bounds, group.scored
        self.positions = memory.positions[number]
        self.counts: list[Tensor | None] = []
        self.lower: list[_Lower | _Spilled] = [
            _Spilled(memory, other, step, tiles[other]) if tiles and other in tiles else _Lower(memory, other, step)
            for other in _levels_below(memory.groups, number)
            if step.lanes
        ]
        for lane, (low, high), blocks in zip(self.lanes, self.spans, place.tables, strict=True):
            table = Table(blocks, group.block_size, lane.read)
            queries = Mark(step.positions[low:high].view(lane.rows, lane.new))
            self.tables.append(table)
            self.readings.append(Reading(queries, Mark(read_column(memory.positions[number], table)), reach))
            counted = policy is not None and policy.watch > 0
            self.counts.append(count_queries(policy, queries.position) if policy is not None and counted else None)

    def attend(self, layer: int, q: Tensor, keys: Store, values: Store, score: Score) -> Tensor:
        outs = []
        columns = self.columns.get(layer)
        for number, lane in enumerate(self.lanes):
            low, high = self.spans[number]
            queries, at, table = q[low:high].unflatten(0, (lane.rows, lane.new)), slice(low, high), self.tables[number]
            bounds = self.bounds.get(layer)
            if bounds is not None and not bounds.few(table):
                part = self._chosen(bounds, queries, self.readings[number], table, keys, values)
                seen = observe(layer, number, part, score, self.kernel, self.probe, at)
                outs.append(seen.out.flatten(0, 1))
                continue
            k, v = keys.read(table, q.dtype), values.read(table, q.dtype)
            reading, count = self.readings[number], self.counts[number]
            turning = self.turning and score.rotary is not None
            if columns is not None and (turning or score.bias is not None):  # else it does not matter where a key was
                reading = Reading(reading.queries, Mark(columns.read(table)), reading.reach)
            if turning:
                assert score.rotary is not None
                k = rotate_rows(k, reading.keys.position, score.rotary, at, exact=self.exact)
            first = Part(queries, k, v, reading)
            others = [lower.parts(layer, number, queries, score, self, at) for lower in self.lower]
            seen = observe(layer, number, first, score, self.kernel, self.probe, at, count, below=chain(*others))
            if columns is not None and count is not None:
                assert seen.mass is not None
                columns.add(table, seen.mass[0])
            outs.append(seen.out.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=0)

    def _chosen(self, bounds: Bounds, q: Tensor, reading: Reading, table: Table, keys: Store, values: Store) -> Part:
        """What the queries choose to read: one query of a row gathers it, of several each has a mask."""
        chosen = bounds.choose(q, reading.queries.position, table)
        if q.shape[1] > 1:
            made = ChosenReading(reading.queries, reading.keys, reading.reach, chosen, table.block_size)
            return Part(q, keys.read(table, q.dtype), values.read(table, q.dtype), made)
        blocks = bounds.gathered(chosen, table)
        few = Reading(reading.queries, Mark(self.positions[blocks].flatten(2)), reading.reach)
        return Part(q, keys.lines(blocks, q.dtype), values.lines(blocks, q.dtype), few)


class _Lower:
    """What the lanes of a group read of a level that its tokens have descended to."""

    def __init__(self, memory: Holder, number: int, step: Step) -> None:
        group = memory.groups[number]
        assert group.level is not None
        self.stores, self.weights = memory.stores[number], memory.weights[number]
        reach, place = Reach.of(group.mixer), step.places[number]
        self.tables, self.readings = [], []
        for lane, (low, high), blocks in zip(step.lanes, lane_spans(step.lanes), place.tables, strict=True):
            table = Table(blocks, group.block_size, blocks.shape[1] * group.block_size)
            queries, keys = Mark(step.positions[low:high].view(lane.rows, lane.new)), memory.positions[number]
            self.tables.append(table)
            self.readings.append(Reading(queries, Mark(read_column(keys, table)), reach))

    def parts(self, layer: int, lane: int, q: Tensor, score: Score, reads: Reads, at: slice) -> Iterator[Part]:
        """The part of a lane; none where no row of it has anything here."""
        table, reading = self.tables[lane], self.readings[lane]
        if table.per_row == 0:
            return
        keys, values = self.stores[layer]
        k, v = keys.read(table, q.dtype), values.read(table, q.dtype)
        if reads.turning and score.rotary is not None:
            k = rotate_rows(k, reading.keys.position, score.rotary, at, exact=reads.exact)
        if layer in self.weights:
            reading = reading.weighing(read(self.weights[layer].data, table).squeeze(-1))
        yield Part(q, k, v, reading)


class _Spilled:
    """What the lanes of a group read of a level that lies in a spool: a part for each tile."""

    def __init__(self, memory: Holder, number: int, step: Step, tiles: Sequence[Tile]) -> None:
        assert memory.spill is not None
        self.spill, self.number, self.reach = memory.spill, number, Reach.of(memory.groups[number].mixer)
        self.tiles = [[tile for tile in tiles if tile.lane == lane] for lane in range(len(step.lanes))]
        spans = zip(step.lanes, lane_spans(step.lanes), strict=True)
        self.queries = [Mark(step.positions[low:high].view(lane.rows, lane.new)) for lane, (low, high) in spans]

    def parts(self, layer: int, lane: int, q: Tensor, score: Score, reads: Reads, at: slice) -> Iterator[Part]:
        """Each is read when it is asked for; its masks are its own, for those of all would be as long as the row."""
        for tile in self.tiles[lane]:
            k, v = self.spill.read(self.number, layer, tile, q)
            if reads.turning and score.rotary is not None:
                k = rotate_rows(k, tile.keys.position, score.rotary, at, exact=reads.exact)
            yield Part(q, k, v, Reading(self.queries[lane], tile.keys, self.reach))


def _levels_below(groups: Sequence[Group], number: int) -> list[int]:
    """Oldest tokens first."""
    return [i for i, group in reversed(list(enumerate(groups))) if group.level is not None and group.level.of == number]


class Shared:
    """What the layers of one group share in one step."""

    def __init__(
        self,
        memory: Holder,
        number: int,
        step: Step,
        place: Place,
        angles: Angles,
        tiles: Mapping[int, Sequence[Tile]],
    ) -> None:
        self.angles, self.rotaries = angles, memory.rotaries
        self.written = Written(memory, number, step, place)
        self.read = Reads(memory, number, step, place, tiles)


class RowView:
    def __init__(self, shared: Shared, layer: int, keys: Store, values: Store) -> None:
        self._shared, self._layer, self._keys, self._values = shared, layer, keys, values

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: Score) -> Tensor:
        assert k is not None and v is not None, "self-attention brings its own keys and values"
        shared, written = self._shared, self._shared.written
        _refuse_gradients(q, k, v)
        if score.rotary is not None:
            shared.rotaries[self._layer] = score.rotary
            q = shared.angles.rotate(q, score.rotary)
            k = k if shared.read.turning else shared.angles.rotate(k, score.rotary)
        self._keys.write(written.blocks, written.offsets, k)
        self._values.write(written.blocks, written.offsets, v)
        if self._layer in shared.read.bounds:
            shared.read.bounds[self._layer].wrote(written.blocks, written.offsets)
        return shared.read.attend(self._layer, q, self._keys, self._values, score)

    def write(self, k: Tensor, v: Tensor) -> None:
        raise AssertionError("self-attention reads no source")


class CrossView:
    """``written`` None: this step brings no source."""

    def __init__(self, written: Written | None, reads: Reads, layer: int, keys: Store, values: Store) -> None:
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
