"""Memory: the device face of the cache.  It holds tensors and decides nothing.

One :class:`~kvad.cache.store.Store` of keys and one of values per layer, in the formats of their group, and per group
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
from itertools import chain
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kvad.cache.carry import Host, carry_in, carry_out
from kvad.cache.cuts import HeadColumns, Witness, count_queries, cut_layer
from kvad.cache.layout import Table, read, read_column, split
from kvad.cache.levels import Compressor, fold_layer, fold_positions, means, pack_layer
from kvad.cache.lines import Blocks, Slots, copy_in, copy_out
from kvad.cache.policy import MANY
from kvad.cache.quest import Bounds, ChosenReading
from kvad.cache.sizing import Group, group_bytes
from kvad.cache.spill import Spill, Tile
from kvad.cache.store import Store
from kvad.cache.swap import Copier
from kvad.errors import CacheError
from kvad.ops.attend import Kernel, Reading
from kvad.ops.lanes import Probe, lane_spans, observe
from kvad.ops.merge import Part
from kvad.ops.rotary import Angles, rotate_rows
from kvad.step import Compact, Fold, Lane, Mark, Moves, Place, Reach, Rotary, Score, Step, View

__all__ = ["Held", "Memory", "Pieces"]


class Pieces(Protocol):
    """A row from elsewhere, that knows how to write itself."""

    def put(self, memory: Memory, blocks: Sequence[Sequence[int]]) -> None:
        """Into these blocks per group, which changed hands."""
        ...


class Held(NamedTuple):
    """One raw array of a group, [blocks, ...], and which of its blocks a row has.  ``name``: the group's number, the
    layer's, what it holds, and which of its arrays: "0.3.keys.0"."""

    name: str
    array: Tensor
    blocks: Tensor


class Memory:
    """Stores for every layer of a model, allocated once, in the formats that ``groups`` name.

    Keys and values come back in the query's dtype when they are read.  ``rotate``: whether RoPE turns keys as they are
    stored or as they are read; ``exact``: its angles are computed in float64, for rows without an end.
    ``compressors``, by layer: what makes summaries of tokens, means where there is none.  ``probe`` is shown what every
    layer sees (a debugger's and ``kvad verify``'s seam); it costs the fused kernel.  ``spill``: where spilled levels
    lie; all in host memory if none is given.  ConfigError where torch lacks the format.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        device: torch.device | str = "cpu",
        rotate: Literal["write", "read"] = "write",
        exact: bool = False,
        compressors: Mapping[int, Compressor] | None = None,
        kernel: Kernel = "auto",
        probe: Probe | None = None,
        spill: Spill | None = None,
    ) -> None:
        self.groups = self.whole = tuple(groups)  # whole: of all ranks, where this is one of several
        self.ranks = 1
        self.kernel, self.probe = kernel, probe
        self.witness: Witness | None = None  # told of every cut; what it asks of the tensors, the step waits for
        self.rotates_on_read, self.exact = rotate == "read", exact
        self.stores: list[dict[int, tuple[Store, Store]]] = []  # per group, by layer: keys and values
        self.weights: list[dict[int, Store]] = []  # per group, by layer: the logits of summaries
        self.positions: list[Tensor] = []
        spilled = [group.level is not None and group.level.spilled for group in self.groups]
        self.spill = Spill(self.groups, MANY) if spill is None and any(spilled) else spill
        for group, elsewhere in zip(self.groups, spilled, strict=True):
            spec, size = group.mixer, group.block_size
            held = {}
            for layer in () if elsewhere else group.layers:
                keys = Store(group.keys, group.blocks, spec.kv_heads, size, spec.head_dim, device)
                held[layer] = keys, Store(group.values, group.blocks, spec.kv_heads, size, spec.value_dim, device)
            self.stores.append(held)
            self.weights.append(_weights(group, device))
            self.positions.append(torch.full((group.blocks, size), -1, dtype=torch.int64, device=device))
        written = {  # those that take tokens, or a source's
            layer: pair
            for group, held in zip(self.groups, self.stores, strict=True)
            for layer, pair in held.items()
            if group.level is None
        }
        self.keys = [written[layer][0] for layer in sorted(written)]
        self.values = [written[layer][1] for layer in sorted(written)]
        self.rotaries: dict[int, Rotary] = {}  # by layer, as it was last written with
        self.compressors: dict[int, Compressor] = dict(compressors or {})
        ranked = [(layer, group) for group in self.groups if group.scored is not None for layer in group.layers]
        self.columns = {layer: HeadColumns(group, device) for layer, group in ranked}
        choosing = [(layer, group) for group in self.groups if group.chooses is not None for layer in group.layers]
        self.bounds = {layer: Bounds(group, self.keys[layer], device) for layer, group in choosing}
        self.parked: dict[int, list[Tensor] | Pieces] = {}  # on the host, by key; on a GPU: when copier.arrived
        self.copier = Copier(torch.device(device))
        self.tiers: Host | None = None  # who takes blocks that are copied out, and lends those that come in

    def leaves(self) -> list[Tensor]:
        """Every tensor of the cache, flat: keys and values by layer, what heads keep by layer, weights of summaries,
        positions by group."""
        stores: list[Store | HeadColumns | Bounds] = [*self._stores(), *self.columns.values(), *self.bounds.values()]
        stores += self._weights()
        return [*(array for store in stores for array in store.arrays), *self.positions]

    def payload_bytes(self) -> int:
        return sum(store.data.nbytes for store in self._stores())

    def scale_bytes(self) -> int:
        return sum(store.nbytes for store in self._stores()) - self.payload_bytes()

    def column_bytes(self) -> int:
        columns: list[Store | HeadColumns | Bounds] = [*self.columns.values(), *self.bounds.values()]
        columns += self._weights()
        return sum(each.nbytes for each in self.positions) + sum(each.nbytes for each in columns)

    def _weights(self) -> Iterator[Store]:
        for held in self.weights:
            yield from held.values()

    def _stores(self) -> Iterator[Store]:
        for side in (0, 1):
            yield from (pair[side] for held in self.stores for pair in held.values())

    def release(self) -> None:
        """Give every store back.  The memory cannot be opened afterwards."""
        self.keys, self.values, self.positions, self.groups, self.whole = [], [], [], (), ()
        self.columns, self.bounds, self.parked, self.stores, self.weights = {}, {}, {}, [], []
        if self.spill is not None:
            self.spill.close()

    def apply(self, moves: Moves) -> None:
        """Edits between two steps, in the order that :class:`Moves` names."""
        if self.tiers is not None:
            carry_out(self, self.tiers, moves.store)
        self._park_and_wake(moves)
        if self.tiers is not None:  # into blocks that a parked row may have had
            carry_in(self, self.tiers, moves.load)
        for group, positions, cuts in zip(self.groups, self.positions, moves.compact, strict=False):
            if cuts:
                self._compact(group, positions, cuts)
        for number, pairs in enumerate(moves.pack):
            if pairs:
                self._pack(number, pairs)
        for number, folds in enumerate(moves.fold):
            if folds:
                self._fold(number, folds)
        for group, positions, clear, copy in zip(self.groups, self.positions, moves.clear, moves.copy, strict=True):
            if clear:
                self._clear(group, positions, torch.tensor(clear, device=positions.device))
            for source, target, kept in copy:
                self._copy(group, positions, source, target, kept)

    def forgo(self, moves: Moves) -> None:
        """The step of these moves has failed, before they were applied or behind: what they have not copied out is not
        waited for, and what they were to copy in or to drop is dropped."""
        if self.tiers is not None:
            for number, _ in (*moves.store, *moves.load):
                self.tiers.cancel(number)
        for key in (*(key for key, _ in moves.wake), *moves.drop):
            self.parked.pop(key, None)

    def _park_and_wake(self, moves: Moves) -> None:
        for key, blocks in moves.park:
            self.parked[key] = self.copier.out(key, self.held(blocks))
        for key, blocks in moves.wake:
            parked = self.parked.pop(key)
            if isinstance(parked, list):
                self.copier.back(key, self.held(blocks), parked)
            else:
                parked.put(self, blocks)
        for key in moves.drop:
            self.parked.pop(key, None)

    def held(self, blocks: Sequence[Sequence[int]]) -> Iterator[Held]:
        """Every raw array of the groups, and which blocks of it a row has; ``blocks``: per group, those that take
        tokens first, then their levels, then cross-attention's; groups beyond ``blocks`` are left out."""
        every_group = zip(self.groups, self.positions, self.stores, self.weights, blocks, strict=False)
        for number, (group, positions, stores, weights, ids) in enumerate(every_group):
            where = torch.tensor(ids, dtype=torch.int64, device=positions.device)
            yield Held(f"{number}.positions", positions, where)
            for layer, (keys, values) in stores.items():
                every: dict[str, Store | HeadColumns | Bounds] = {"keys": keys, "values": values}
                if group.level is None:
                    every |= {type(each).__name__.lower(): each for each in self._columns(layer)}
                elif layer in weights:
                    every["weights"] = weights[layer]
                for kind, store in every.items():
                    for part, array in enumerate(store.arrays):
                        yield Held(f"{number}.{layer}.{kind}.{part}", array, where)

    def block_bytes(self) -> list[int]:
        """Of each group, what a block of it takes: on all ranks."""
        return [group_bytes(group).total // group.blocks for group in self.groups]

    def row(self, blocks: Blocks) -> dict[str, Tensor]:
        """Every raw array of these blocks on the host, by name (:meth:`held`): of all ranks."""
        return {each.name: each.array[each.blocks].cpu() for each in self.held(blocks)}

    def put_row(self, blocks: Blocks, state: Mapping[str, Tensor]) -> None:
        """The inverse, into as many blocks; what a group without blocks would have is not asked for."""
        for each in self.held(blocks):
            if len(each.blocks):
                each.array[each.blocks] = state[each.name].to(each.array.device)

    def copy_out(self, blocks: Blocks, slots: Slots) -> dict[str, Tensor]:
        """A row's numbers on the host, by slot (``lines.py``): of all ranks, as one process would have them."""
        return copy_out(self, blocks, slots)

    def copy_in(self, blocks: Blocks, slots: Slots, arrays: Mapping[str, Tensor]) -> None:
        """The inverse, into blocks that changed hands."""
        copy_in(self, blocks, slots, arrays)

    def shaped(self) -> dict[str, Tensor]:
        """The whole cache's arrays by name, [blocks, ...]: shapes and dtypes alone are meant."""
        return {each.name: each.array for each in self.held([() for _ in self.groups])}

    def folding(self) -> dict[int, Rotary]:
        """Of layers whose old tokens become summaries, how keys are turned back for it; as the whole cache numbers
        them."""
        folds = [group for group in self.groups if group.level is not None and group.level.ratio > 1]
        layers = {layer for group in folds for layer in group.layers}
        return {layer: rotary for layer, rotary in self.rotaries.items() if layer in layers}

    def fold_with(self, rotaries: Mapping[int, Rotary]) -> None:
        """The inverse, where it is needed before the first step of a row."""
        for layer, rotary in rotaries.items():
            inv_freq = rotary.inv_freq.to(self.positions[0].device)
            self.rotaries.setdefault(layer, rotary._replace(inv_freq=inv_freq))

    def lost(self, rows: Sequence[int]) -> dict[int, str]:
        """Of the step that was opened last, with so many ``rows`` in each lane: which of them, counted through, read
        spilled tokens that are not there any more, and why.  Their answers are wrong; those of others are not."""
        return {} if self.spill is None else self.spill.lost(rows)

    def _columns(self, layer: int) -> list[HeadColumns | Bounds]:
        return [kept[layer] for kept in (self.columns, self.bounds) if layer in kept]

    def _pack(self, number: int, pairs: Sequence[tuple[int, int]]) -> None:
        level, positions = self.groups[number].level, self.positions[number]
        assert level is not None
        sources, targets = torch.tensor(pairs, device=positions.device).unbind(1)
        if level.spilled:
            assert self.spill is not None
            self.spill.pack(number, self.stores[level.above], sources, targets.tolist())
        for layer, below in self.stores[number].items():
            pack_layer(self.stores[level.above][layer], below, sources, targets)
        positions[targets] = self.positions[level.above][sources]

    def _fold(self, number: int, folds: Sequence[Fold]) -> None:
        level, column = self.groups[number].level, self.positions[number]
        assert level is not None
        positions = self.positions[level.above][torch.tensor([fold.source for fold in folds], device=column.device)]
        for layer, (keys, values) in self.stores[number].items():
            rotary = None if self.rotates_on_read else self.rotaries.get(layer)
            compress = self.compressors.get(layer, means)
            above = self.stores[level.above][layer]
            below = keys, values, self.weights[number][layer]
            fold_layer(above, below, folds, positions, level.ratio, rotary, compress)
        fold_positions(column, folds, positions, level.ratio)

    def _compact(self, group: Group, positions: Tensor, cuts: Sequence[Compact]) -> None:
        for layer in group.layers:
            cut_layer(group, layer, self.keys[layer], self.values[layer], self.columns[layer], cuts, self.witness)
        for cut in cuts:  # heads keep other tokens; that a slot is taken is all that they share
            blocks = torch.tensor(cut.targets, device=positions.device)
            filled = torch.arange(len(cut.targets) * group.block_size, device=positions.device)
            positions[blocks] = filled.masked_fill(filled >= cut.kept, -1).view(len(cut.targets), -1)

    def clear(self, number: int, blocks: Sequence[int]) -> None:
        """Blocks of a group that takes tokens, or a source's, change hands."""
        positions = self.positions[number]
        self._clear(self.groups[number], positions, torch.tensor(blocks, dtype=torch.int64, device=positions.device))

    def _clear(self, group: Group, positions: Tensor, blocks: Tensor) -> None:
        positions.index_fill_(0, blocks, -1)
        for layer in group.layers:
            self.keys[layer].clear(blocks)
            self.values[layer].clear(blocks)
            for columns in self._columns(layer):
                columns.clear(blocks)

    def _copy(self, group: Group, positions: Tensor, source: int, target: int, kept: int) -> None:
        positions[target, :kept] = positions[source, :kept]
        positions[target, kept:] = -1
        for layer in group.layers:
            self.keys[layer].copy(source, target)
            self.values[layer].copy(source, target)
            for columns in self._columns(layer):
                columns.copy(source, target, kept)

    def open(self, step: Step) -> Sequence[View]:
        """Mark the new tokens' slots and build one view per layer; masks and indices are made once per group."""
        angles = Angles(step.positions, exact=self.exact)
        views: list[View | None] = [None] * len(self.keys)
        sources = iter(() if step.source is None else step.source.places)
        nothing = Place(step.positions, ())  # of a step that is all source
        tiles = self.spill.open(step, self.positions) if self.spill is not None and step.lanes else {}
        for number, group in enumerate(self.groups):
            place = step.places[number] if step.lanes else nothing
            if group.mixer.cross:
                written = _Written(self, number, step.source, next(sources)) if step.source is not None else None
                read = _Reads(self, number, step, place)
                for layer in group.layers:
                    views[layer] = _CrossView(written, read, layer, self.keys[layer], self.values[layer])
                continue
            if group.level is not None:
                continue
            shared = _Shared(self, number, step, place, angles, tiles)
            for layer in group.layers:
                if layer in self.columns:
                    self.columns[layer].write(shared.written.blocks, shared.written.offsets, step.positions)
                views[layer] = _MemoryView(shared, layer, self.keys[layer], self.values[layer])
        return [view for view in views if view is not None]


def _weights(group: Group, device: torch.device | str) -> dict[int, Store]:
    """Of the summaries of a level, by layer: what their logits get."""
    if group.level is None or group.level.ratio == 1:
        return {}
    wide, heads = group.weight_format, group.mixer.kv_heads
    return {layer: Store(wide, group.blocks, heads, group.block_size, 1, device) for layer in group.layers}


class _Written:
    """Where a group's new tokens go; their positions are marked at once."""

    def __init__(self, memory: Memory, number: int, step: Step, place: Place) -> None:
        assert place.slots is not None, "this group's tokens have no slots"
        self.blocks, self.offsets = split(place.slots, memory.groups[number].block_size)
        memory.positions[number][self.blocks, self.offsets] = step.positions


class _Reads:
    """What a group's lanes read, and who sees what of it."""

    def __init__(
        self, memory: Memory, number: int, step: Step, place: Place, tiles: Mapping[int, Sequence[Tile]] | None = None
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

    def __init__(self, memory: Memory, number: int, step: Step) -> None:
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

    def parts(self, layer: int, lane: int, q: Tensor, score: Score, reads: _Reads, at: slice) -> Iterator[Part]:
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

    def __init__(self, memory: Memory, number: int, step: Step, tiles: Sequence[Tile]) -> None:
        assert memory.spill is not None
        self.spill, self.number, self.reach = memory.spill, number, Reach.of(memory.groups[number].mixer)
        self.tiles = [[tile for tile in tiles if tile.lane == lane] for lane in range(len(step.lanes))]
        spans = zip(step.lanes, lane_spans(step.lanes), strict=True)
        self.queries = [Mark(step.positions[low:high].view(lane.rows, lane.new)) for lane, (low, high) in spans]

    def parts(self, layer: int, lane: int, q: Tensor, score: Score, reads: _Reads, at: slice) -> Iterator[Part]:
        """Each is read when it is asked for; its masks are its own, for those of all would be as long as the row."""
        for tile in self.tiles[lane]:
            k, v = self.spill.read(self.number, layer, tile, q)
            if reads.turning and score.rotary is not None:
                k = rotate_rows(k, tile.keys.position, score.rotary, at, exact=reads.exact)
            yield Part(q, k, v, Reading(self.queries[lane], tile.keys, self.reach))


def _levels_below(groups: Sequence[Group], number: int) -> list[int]:
    """Oldest tokens first."""
    return [i for i, group in reversed(list(enumerate(groups))) if group.level is not None and group.level.of == number]


class _Shared:
    """What the layers of one group share in one step."""

    def __init__(
        self,
        memory: Memory,
        number: int,
        step: Step,
        place: Place,
        angles: Angles,
        tiles: Mapping[int, Sequence[Tile]],
    ) -> None:
        self.angles, self.rotaries = angles, memory.rotaries
        self.written = _Written(memory, number, step, place)
        self.read = _Reads(memory, number, step, place, tiles)


class _MemoryView:
    def __init__(self, shared: _Shared, layer: int, keys: Store, values: Store) -> None:
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
