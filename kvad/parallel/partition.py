"""The cache of a mesh: every rank's groups, and a row's state gathered from them or cut for them.

One ledger serves all ranks.  A rank has *all* groups in their order, with the same blocks, so that block ids, tables
and moves mean the same everywhere; of each group its stores hold this rank's kv heads of this rank's layers.  Layers
are numbered anew within a rank, from 0, as its part of the model has them.  Positions, one per slot and group, lie on
every rank: they are what makes a slot visible.

A row's state is arrays by name, as ``Memory.held`` has them: "group.positions" [n, block_size], "group.layer.kind.part"
[n, K, ...], axis 1 being kv heads.  :func:`merge` and :func:`split` are inverse to each other, so what one mesh has
kept another may have again.  No torch is imported.

Every rank's bytes before anything is allocated: which numbers of which weight it has, and its part of the pool.

The one promise: what stands here is what ``kvad.parallel`` cuts and what a rank's Memory allocates, to the byte, for
:func:`weight_cuts` and ``sharding.cut_groups`` say it to both.  No torch.

=====================================  ===============================================================================
q, k, v; gate, up of an MLP            by rows (outputs): heads of this rank, a share of the hidden width
out; down                              by columns (inputs); every rank has a part of the sum, the first has the bias
experts                                each expert by its hidden width, the router whole: ranks choose the same experts
norms of q and k                       a weight for each head, or for all numbers: by heads; one for all heads: whole
sink logits, tables of distances (T5)  by heads
embeddings, the head                   whole on every rank: they have no part in the cache
norms of layers; the final one         whole, in their stage; in the last stage
=====================================  ===============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvad import cache
from kvad import config as config_lib
from kvad.cache import CacheGroup, group_bytes
from kvad.cache.sizing import MemoryPlan
from kvad.config import AttentionConfig, ModelConfig, MoEConfig, StackConfig, head_dim
from kvad.errors import CacheError
from kvad.parallel.mesh import (
    Mesh,
    check_cache_fits_mesh,
    check_model_fits_mesh,
    even_share,
    kv_head_copies,
    kv_head_range,
    layer_range,
    query_head_range,
)

if TYPE_CHECKING:
    from torch import Tensor

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
class ShardedPolicy(cache.policy.EvictionPolicy):
    """A policy that ranks, on a rank that has some heads of a layer: it says of them what it would say of all.

    ``policy`` is asked about its own heads where it looks at each head alone (``Scored.alone``); else about all heads
    of the layer, which ``gather`` ([K of this rank, ...] -> [K, ...], in order) brings together, and the answer is cut.
    ``heads``: this rank's, of all; ``numbers``: the whole model's number of each layer of this rank.
    """

    policy: cache.policy.EvictionPolicy = field(kw_only=True)
    heads: range = field(kw_only=True)
    head_ids: tuple[int, ...] = field(kw_only=True)
    gather: Callable[[Tensor], Tensor] = field(kw_only=True)

    @staticmethod
    def wrap(
        policy: cache.policy.EvictionPolicy, heads: range, numbers: tuple[int, ...], gather: Callable[[Tensor], Tensor]
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

    def score(self, seen: cache.policy.EvictionContext) -> Tensor:
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


ShardSlice = tuple[range, ...]  # of each dimension of a tensor


@dataclass(frozen=True)
class RankPlan:
    """What one rank has; bytes.  ``groups``: of the whole pool, reserved blocks included."""

    mesh: Mesh
    layers: range
    weights: int
    groups: tuple[cache.groups.GroupBytes, ...]

    @property
    def payload(self) -> int:
        return sum(group.payload for group in self.groups)

    @property
    def scales(self) -> int:
        return sum(group.scales for group in self.groups)

    @property
    def metadata(self) -> int:
        return sum(group.metadata for group in self.groups)

    @property
    def pool(self) -> int:
        """What the rank's Memory allocates."""
        return sum(group.total for group in self.groups)

    @property
    def total(self) -> int:
        return self.weights + self.pool


def plan_ranks(plan: MemoryPlan, mesh: Mesh) -> tuple[RankPlan, ...]:
    """Of every rank, in order; an encoder has weights alone.  ConfigError where the mesh does not fit."""
    check_model_fits_mesh(plan.config, mesh)
    groups = tuple(each.group for each in plan.groups)
    check_cache_fits_mesh(groups, mesh)
    layers = plan.config.stack.num_layers
    made = []
    for each in mesh.all_ranks():
        numbers = sum(math.prod(map(len, cut)) for cut in weight_shards(plan.config, each).values())
        pools = tuple(group_bytes(group) for group in shard_groups(groups, layers, each))
        made.append(
            RankPlan(
                each,
                layer_range(layers, each),
                numbers * config_lib.DTYPE_BYTES[plan.weights_dtype],
                pools,
            )
        )
    return tuple(made)


def weight_shards(config: ModelConfig, mesh: Mesh) -> dict[str, ShardSlice]:
    """By name: which numbers of each weight this rank has; names that it has nothing of are left out."""
    cuts = {
        name: _tensor_slice(name.split("."), shape, config, mesh)
        for name, shape in config_lib.parameter_shapes.weight_shapes(config).items()
    }
    return {name: cut for name, cut in cuts.items() if cut is not None}


def _tensor_slice(pieces: list[str], shape: tuple[int, ...], config: ModelConfig, mesh: Mesh) -> ShardSlice | None:
    whole = tuple(map(range, shape))
    side, of = pieces[0], pieces[1]
    stack: StackConfig | None = {"encoder": config.encoder, "decoder": config.decoder}.get(side)
    if stack is None or of == "positions":
        return whole
    if of == "norm":
        return whole if mesh.is_last_stage else None
    if of == "relative":
        return whole[0], query_head_range(stack.layer_types[pieces[2]].attention.num_heads, mesh)
    index, part = int(pieces[2]), pieces[3]
    if index not in layer_range(stack.num_layers, mesh):
        return None
    layer = stack.layer_config(index)
    if part in ("attention", "cross"):
        mixer = layer.attention if part == "attention" else layer.cross_attention
        assert mixer is not None
        return _attention_slice(pieces[4:], whole, config, mixer, mesh)
    if part == "mlp":
        name = pieces[4] if isinstance(layer.mlp, MoEConfig) else f"{pieces[4]}_{pieces[5]}"
        return _mlp_slice(name, whole, isinstance(layer.mlp, MoEConfig), mesh)
    return whole


def _attention_slice(
    names: list[str], whole: ShardSlice, config: ModelConfig, mixer: AttentionConfig, mesh: Mesh
) -> ShardSlice | None:
    dim, name = head_dim(config, mixer), names[0]
    value_dim = mixer.value_dim or dim
    queries, keys = query_head_range(mixer.num_heads, mesh), kv_head_range(mixer.num_kv_heads or mixer.num_heads, mesh)
    if name == "sink_logits":
        return (queries,)
    if name == "relative":
        return whole[0], queries
    if name == "out":
        if names[1] == "bias":
            return whole if mesh.tensor_rank == 0 else None
        return whole[0], _times(queries, value_dim)
    if name in ("q_norm", "k_norm"):
        heads = queries if name == "q_norm" else keys
        first = {"head": whole[0], "each": heads, "full": _times(heads, dim)}[mixer.qk_norm]
        return first, *whole[1:]
    if name in ("q", "k", "v"):
        heads = queries if name == "q" else keys
        return _times(heads, value_dim if name == "v" else dim), *whole[1:]
    assert mesh.tensor_parallel == 1, "check_mesh refuses what it does not know"
    return whole


def _times(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _mlp_slice(name: str, whole: ShardSlice, experts: bool, mesh: Mesh) -> ShardSlice | None:
    """``whole`` of experts has their number in front."""

    def part(axis: int) -> ShardSlice:
        mine = even_share(len(whole[axis]), mesh.tensor_parallel, mesh.tensor_rank)
        return *whole[:axis], mine, *whole[axis + 1 :]

    if name == "router":
        return whole
    if name == "down_bias":
        return whole if mesh.tensor_rank == 0 else None
    down = name in ("down", "down_weight")
    return part((1 if down else 0) + experts)
