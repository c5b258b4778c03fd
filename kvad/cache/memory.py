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
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kvad.cache.carry import Host, carry_in, carry_out
from kvad.cache.cuts import HeadColumns, Witness, cut_layer
from kvad.cache.levels import Compressor, fold_layer, fold_positions, means, pack_layer
from kvad.cache.lines import Blocks, Slots, copy_in, copy_out
from kvad.cache.policy import MANY
from kvad.cache.quest import Bounds
from kvad.cache.sizing import Group, group_bytes
from kvad.cache.spill import Spill
from kvad.cache.store import Store
from kvad.cache.swap import Copier
from kvad.cache.views import CrossView, Reads, RowView, Shared, Written
from kvad.ops.attend import Kernel
from kvad.ops.lanes import Probe
from kvad.ops.rotary import Angles
from kvad.step import Compact, Fold, Moves, Place, Rotary, Step, View

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
                written = Written(self, number, step.source, next(sources)) if step.source is not None else None
                read = Reads(self, number, step, place)
                for layer in group.layers:
                    views[layer] = CrossView(written, read, layer, self.keys[layer], self.values[layer])
                continue
            if group.level is not None:
                continue
            shared = Shared(self, number, step, place, angles, tiles)
            for layer in group.layers:
                if layer in self.columns:
                    self.columns[layer].write(shared.written.blocks, shared.written.offsets, step.positions)
                views[layer] = RowView(shared, layer, self.keys[layer], self.values[layer])
        return [view for view in views if view is not None]


def _weights(group: Group, device: torch.device | str) -> dict[int, Store]:
    """Of the summaries of a level, by layer: what their logits get."""
    if group.level is None or group.level.ratio == 1:
        return {}
    wide, heads = group.weight_format, group.mixer.kv_heads
    return {layer: Store(wide, group.blocks, heads, group.block_size, 1, device) for layer in group.layers}
