"""The cache of a mesh: every rank's groups, and a row's state gathered from them or cut for them.

One ledger serves all ranks.  A rank has *all* groups in their order, with the same blocks, so that block ids, tables
and moves mean the same everywhere; of each group its stores hold this rank's kv heads of this rank's layers.  Layers
are numbered anew within a rank, from 0, as its part of the model has them.  Positions, one per slot and group, lie on
every rank: they are what makes a slot visible.

A row's state is arrays by name, as ``Memory.held`` has them: "group.positions" [n, block_size], "group.layer.kind.part"
[n, K, ...], axis 1 being kv heads.  :func:`merge` and :func:`split` are inverse to each other, so what one mesh has
kept another may have again.  No torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvad.cache.mesh import Mesh, kv_head_copies, kv_head_range, layer_range
from kvad.cache.policy import EvictionContext, EvictionPolicy
from kvad.cache.sizing import CacheGroup, group_bytes
from kvad.errors import CacheError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ShardedPolicy", "block_bytes", "shard_groups", "local_layers", "merge_shards", "split_shards"]

SequenceArrays = Mapping[str, "Tensor"]


def local_layers(groups: Sequence[CacheGroup], layers: int, mesh: Mesh) -> dict[int, int]:
    """The layers of this rank's stage, as the whole memory numbers them (``layers`` of the decoder, then its
    cross-attention) -> as the rank does.

    4 layers with cross-attention, the second of two stages:   {2: 0, 3: 1, 6: 2, 7: 3}
    """
    every = sorted(layer for group in groups if group.lower_level is None for layer in group.layers)
    mine = layer_range(layers, mesh)
    return {layer: number for number, layer in enumerate(layer for layer in every if layer % layers in mine)}


def shard_groups(groups: Sequence[CacheGroup], layers: int, mesh: Mesh) -> tuple[CacheGroup, ...]:
    """What a rank's Memory holds; ``groups`` as sizing has them, ``layers`` of the decoder."""
    numbers = local_layers(groups, layers, mesh)
    return tuple(
        group._replace(
            spec=group.spec._replace(num_kv_heads=len(kv_head_range(group.spec.num_kv_heads, mesh))),
            layers=tuple(numbers[layer] for layer in group.layers if layer in numbers),
        )
        for group in groups
    )


def block_bytes(groups: Sequence[CacheGroup], layers: int, mesh: Mesh) -> list[int]:
    """Of each group a block's bytes on all ranks together: positions, and heads that lie on several, as often as they
    are there."""
    every = [shard_groups(groups, layers, each) for each in mesh.all_ranks()]
    return [sum(group_bytes(part).total // part.num_blocks for part in parts) for parts in zip(*every, strict=True)]


# ---------------------------------------------------------------- a row's state


def merge_shards(
    parts: Sequence[SequenceArrays], groups: Sequence[CacheGroup], layers: int, mesh: Mesh
) -> dict[str, Tensor]:
    """The state of one row from those of all ranks, in their order; ``groups``, ``layers``: the whole cache's.

    Names and their order are those of the unsharded ``Memory.held``.  CacheError where ranks do not agree on what they
    hold, or one lacks a part: a state is whole or there is none.
    """
    if len(parts) != mesh.size:
        raise CacheError(f"the state of a row on a mesh of {mesh} has {mesh.size} parts, found {len(parts)}")
    whole: dict[str, Tensor] = {}
    for number, group in enumerate(groups):
        name = f"{number}.positions"
        if not any(name in part for part in parts):
            continue  # groups of sources are left out of a row's own state
        _check_positions(name, parts)
        whole[name] = parts[0][name]
        for layer in group.layers:
            whole |= _merge_layer(parts, number, layer, group, groups, layers, mesh)
    return whole


def _check_positions(name: str, parts: Sequence[SequenceArrays]) -> None:
    first = parts[0].get(name)
    for rank, part in enumerate(parts):
        if first is None or name not in part or not part[name].equal(first):
            raise CacheError(f"rank {rank} holds other positions than rank 0 in {name}", "this is a bug in kvad")


def _merge_layer(
    parts: Sequence[SequenceArrays],
    number: int,
    layer: int,
    group: CacheGroup,
    groups: Sequence[CacheGroup],
    layers: int,
    mesh: Mesh,
) -> dict[str, Tensor]:
    owners = [each for each in mesh.all_ranks() if layer % layers in layer_range(layers, each)]
    local = local_layers(groups, layers, owners[0])[layer]
    prefix, kv_heads = f"{number}.{local}.", group.spec.num_kv_heads
    kinds = [name.removeprefix(prefix) for name in parts[owners[0].rank] if name.startswith(prefix)]
    if not kinds:
        raise CacheError(f"rank {owners[0].rank} holds nothing of layer {layer} of group {number}")
    made: dict[str, Tensor] = {}
    for kind in kinds:
        pieces = [parts[each.rank].get(prefix + kind) for each in owners[:: kv_head_copies(kv_heads, mesh)]]
        found = [piece for piece in pieces if piece is not None]
        if len(found) != len(pieces) or sum(piece.shape[1] for piece in found) != kv_heads:
            raise CacheError(f"{number}.{layer}.{kind}: {kv_heads} kv heads are not on the ranks of its stage")
        made[f"{number}.{layer}.{kind}"] = _joined(found, kv_heads)
    return made


def _joined(pieces: Sequence[Tensor], kv_heads: int) -> Tensor:
    """Along the axis of heads."""
    first = pieces[0]
    whole, low = first.new_empty((first.shape[0], kv_heads, *first.shape[2:])), 0
    for piece in pieces:
        whole[:, low : low + piece.shape[1]] = piece
        low += piece.shape[1]
    return whole


def split_shards(whole: SequenceArrays, groups: Sequence[CacheGroup], layers: int, mesh: Mesh) -> dict[str, Tensor]:
    """This rank's part of a row's state: names and order are those of its own ``Memory.held``.

    CacheError for a name that the cache has no place for.
    """
    numbers = local_layers(groups, layers, mesh)
    part: dict[str, Tensor] = {}
    for name, array in whole.items():
        number, at, *kind = name.split(".")
        if not number.isdecimal() or int(number) >= len(groups):
            raise CacheError(f"{name}: the cache has {len(groups)} groups")
        group = groups[int(number)]
        if at == "positions":
            part[name] = array
            continue
        if not at.isdecimal() or int(at) not in group.layers:
            raise CacheError(f"{name}: group {number} has the layers {', '.join(map(str, group.layers))}")
        if array.shape[1] != group.spec.num_kv_heads:
            raise CacheError(f"{name}: {array.shape[1]} kv heads, the cache has {group.spec.num_kv_heads}")
        if int(at) in numbers:
            heads = kv_head_range(group.spec.num_kv_heads, mesh)
            part[".".join((number, str(numbers[int(at)]), *kind))] = array[:, heads.start : heads.stop]
    return part


# ---------------------------------------------------------------- what ranks


@dataclass(frozen=True)
class ShardedPolicy(EvictionPolicy):
    """A policy that ranks, on a rank that has some heads of a layer: it says of them what it would say of all.

    ``policy`` is asked about its own heads where it looks at each head alone (``Scored.alone``); else about all heads
    of the layer, which ``gather`` ([K of this rank, ...] -> [K, ...], in order) brings together, and the answer is cut.
    ``heads``: this rank's, of all; ``numbers``: the whole model's number of each layer of this rank.
    """

    policy: EvictionPolicy = field(kw_only=True)
    heads: range = field(kw_only=True)
    head_ids: tuple[int, ...] = field(kw_only=True)
    gather: Callable[[Tensor], Tensor] = field(kw_only=True)

    @staticmethod
    def wrap(
        policy: EvictionPolicy, heads: range, numbers: tuple[int, ...], gather: Callable[[Tensor], Tensor]
    ) -> ShardedPolicy:
        sizes = policy.budget, policy.interval, policy.recent, policy.num_sinks
        return ShardedPolicy(*sizes, policy=policy, heads=heads, head_ids=numbers, gather=gather)

    def __str__(self) -> str:
        return str(self.policy)

    @property
    def observed_queries(self) -> int:
        return self.policy.observed_queries

    @property
    def per_head_independent(self) -> bool:
        return self.policy.per_head_independent

    def score(self, seen: EvictionContext) -> Tensor:
        seen = seen._replace(layer=self.head_ids[seen.layer])
        if self.policy.per_head_independent:
            return self.policy.score(seen)
        keys, values = seen.keys, seen.values
        every = seen._replace(
            positions=self.gather(seen.positions),
            attention_mass=None if seen.attention_mass is None else self.gather(seen.attention_mass),
            keys=lambda: self.gather(keys()),
            values=lambda: self.gather(values()),
        )
        return self.policy.score(every)[self.heads.start : self.heads.stop]
