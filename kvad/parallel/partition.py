"""Partition of weights, cache groups and a sequence's state over the ranks of a mesh.

One KVCacheManager serves all ranks. A rank has *all* groups in the same order, with the same blocks, so block ids,
tables and BlockOps are valid on every rank; its tensors hold this rank's kv heads of this rank's layers. Layers are
numbered from 0 within a rank, as in its part of the model. Positions, one per slot and group, are on every rank.

A sequence's state is a dict of arrays, as ``KVCache.read_blocks`` returns it: "group.positions" [n, block_size] and
"group.layer.kind.part" [n, K, ...], where axis 1 is the kv heads. ``merge_shards`` and ``split_shards`` are
inverse, so a state can move between meshes.

``plan_ranks`` computes the bytes of every rank in advance. They equal, to the byte, what ``tensor_parallel``
keeps and what a rank's KVCache allocates, because both use ``weight_shards`` and ``shard_groups``. No torch.

=====================================  ===============================================================================
q, k, v; gate, up of an MLP            by rows (outputs): heads of this rank, a share of the intermediate size
out; down                              by columns (inputs); each rank has a part of the sum, the first has the bias
experts                                each expert, shared or not, by its intermediate size; the router is replicated
norms of q and k                       by heads if there is a weight per head or per number, else replicated
sink logits, relative bias (T5)        by heads
embeddings, the head                   replicated on every rank
norms of layers; the final norm        replicated in their stage; in the last stage
=====================================  ===============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvad import cache
from kvad import config as cfg
from kvad.cache import CacheGroup, group_bytes
from kvad.cache.sizing import MemoryPlan, PoolPlan
from kvad.config import ModelConfig, attention_dims
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


def local_layers(groups: Sequence[CacheGroup], mesh: Mesh) -> dict[int, int]:
    """Map the unsharded cache's layer numbers of this rank's stage to the rank's own numbers.

    The cache numbers the decoder's layers first, then its cross-attention. Example: 4 layers with cross-attention, the
    second of two stages: {2: 0, 3: 1, 6: 2, 7: 3}.
    """
    upper_groups = [group for group in groups if group.lower_level is None]
    all_layers = sorted(layer for group in upper_groups for layer in group.layers)
    num_layers = sum(len(group.layers) for group in upper_groups if not group.spec.is_cross_attention)
    stage = layer_range(num_layers, mesh)
    return {layer: index for index, layer in enumerate(layer for layer in all_layers if layer % num_layers in stage)}


def shard_groups(groups: Sequence[CacheGroup], mesh: Mesh) -> tuple[CacheGroup, ...]:
    """Return the cache groups of this rank."""
    numbers = local_layers(groups, mesh)
    return tuple(
        group._replace(
            spec=group.spec._replace(num_kv_heads=len(kv_head_range(group.spec.num_kv_heads, mesh))),
            layers=tuple(numbers[layer] for layer in group.layers if layer in numbers),
        )
        for group in groups
    )


def block_bytes(groups: Sequence[CacheGroup], mesh: Mesh) -> list[int]:
    """Return a block's bytes per group, summed over all ranks; replicated positions and heads count on each rank."""
    shards = [shard_groups(groups, rank) for rank in mesh.all_ranks()]
    return [sum(group_bytes(part).total // part.num_blocks for part in parts) for parts in zip(*shards, strict=True)]


def merge_shards(parts: Sequence[SequenceArrays], groups: Sequence[CacheGroup], mesh: Mesh) -> dict[str, Tensor]:
    """Merge the states of all ranks, in order, into that of the unsharded cache, as its ``KVCache.read_blocks``.

    Raises:
        CacheError: If the ranks' positions differ, or an array is missing.
    """
    if len(parts) != mesh.size:
        raise CacheError(f"sequence state: must have {mesh.size} shards on a mesh of {mesh}, got {len(parts)}")
    whole: dict[str, Tensor] = {}
    numbers = [local_layers(groups, rank) for rank in mesh.all_ranks()]
    for number, group in enumerate(groups):
        name = f"{number}.positions"
        if not any(name in part for part in parts):
            continue  # a sequence's own state omits cross-attention groups
        for rank, part in enumerate(parts):
            if name not in parts[0] or name not in part or not part[name].equal(parts[0][name]):
                raise CacheError(f"rank {rank} has other positions than rank 0 in {name}", "this is a bug in kvad")
        whole[name] = parts[0][name]
        for layer in group.layers:
            owners = [rank for rank, local in enumerate(numbers) if layer in local]
            shards = [parts[rank] for rank in owners[:: kv_head_copies(group.spec.num_kv_heads, mesh)]]
            prefix = f"{number}.{numbers[owners[0]][layer]}."
            merged = _merge_layer(shards, prefix, group.spec.num_kv_heads, f"{number}.{layer}")
            whole |= {f"{number}.{layer}.{kind}": array for kind, array in merged.items()}
    return whole


def _merge_layer(shards: Sequence[SequenceArrays], prefix: str, kv_heads: int, where: str) -> dict[str, Tensor]:
    """Merge one layer's arrays, whose local names begin with ``prefix``, from ranks that have different kv heads."""
    kinds = [name.removeprefix(prefix) for name in shards[0] if name.startswith(prefix)]
    if not kinds:
        raise CacheError(f"{where}: a rank of its stage has no arrays of this layer")
    merged: dict[str, Tensor] = {}
    for kind in kinds:
        arrays = [shard[prefix + kind] for shard in shards if prefix + kind in shard]
        if len(arrays) != len(shards) or sum(array.shape[1] for array in arrays) != kv_heads:
            raise CacheError(f"{where}.{kind}: the ranks of its stage do not have all {kv_heads} kv heads")
        merged[kind] = _concat_heads(arrays, kv_heads)
    return merged


def _concat_heads(shards: Sequence[Tensor], kv_heads: int) -> Tensor:
    """Concatenate along axis 1, without importing torch."""
    first = shards[0]
    merged, low = first.new_empty((first.shape[0], kv_heads, *first.shape[2:])), 0
    for shard in shards:
        merged[:, low : low + shard.shape[1]] = shard
        low += shard.shape[1]
    return merged


def split_shards(whole: SequenceArrays, groups: Sequence[CacheGroup], mesh: Mesh) -> dict[str, Tensor]:
    """Return this rank's part of an unsharded state, in the order of the rank's ``KVCache.read_blocks``.

    Raises:
        CacheError: If an array does not belong to the cache.
    """
    numbers = local_layers(groups, mesh)
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


@dataclass(frozen=True)
class ShardedPolicy(cache.policy.EvictionPolicy):
    """An eviction policy on a rank that has some heads of a layer; its scores equal those of one process.

    If scores depend on each head alone, the policy scores this rank's heads. Otherwise all heads of the layer are
    gathered and scored, and this rank's are returned.
    """

    policy: cache.policy.EvictionPolicy = field(kw_only=True)
    heads: range = field(kw_only=True)  # this rank's kv heads
    head_ids: tuple[int, ...] = field(kw_only=True)  # the model's number of each layer of this rank
    gather: Callable[[Tensor], Tensor] = field(kw_only=True)  # [K of this rank, ...] -> [K, ...], in order

    def __post_init__(self) -> None:
        """Check nothing: the wrapped policy was checked."""

    def __str__(self) -> str:
        return str(self.policy)

    @property
    def observed_queries(self) -> int:
        return self.policy.observed_queries

    @property
    def per_head_independent(self) -> bool:
        return self.policy.per_head_independent

    def score(self, context: cache.policy.EvictionContext) -> Tensor:
        context = context._replace(layer=self.head_ids[context.layer])
        if self.policy.per_head_independent:
            return self.policy.score(context)
        keys, values = context.keys, context.values
        gathered = context._replace(
            positions=self.gather(context.positions),
            attention_mass=None if context.attention_mass is None else self.gather(context.attention_mass),
            keys=lambda: self.gather(keys()),
            values=lambda: self.gather(values()),
        )
        return self.policy.score(gathered)[self.heads.start : self.heads.stop]


ShardSlice = tuple[range, ...]  # one range per dim of a tensor


@dataclass(frozen=True, kw_only=True)
class RankPlan(PoolPlan):
    """Memory of one rank, in bytes."""

    mesh: Mesh
    layers: range
    weights: int

    @property
    def total(self) -> int:
        return self.weights + self.pool


def plan_ranks(plan: MemoryPlan, mesh: Mesh) -> tuple[RankPlan, ...]:
    """Plan the memory of every rank in order; an encoder alone has weights only. ConfigError if it does not fit."""
    check_model_fits_mesh(plan.config, mesh)
    groups = tuple(group_plan.group for group_plan in plan.groups)
    check_cache_fits_mesh(groups, mesh)
    layers = plan.config.stack.num_layers
    plans = []
    for rank in mesh.all_ranks():
        shards, dtype = weight_shards(plan.config, rank), plan.weights_dtype
        number_bytes = cfg.parameter_shapes.number_bytes
        weights = sum(math.prod(map(len, shard)) * number_bytes(name, dtype) for name, shard in shards.items())
        pools = tuple(group_bytes(group) for group in shard_groups(groups, rank))
        plans.append(RankPlan(mesh=rank, layers=layer_range(layers, rank), weights=weights, groups=pools))
    return tuple(plans)


def weight_shards(config: ModelConfig, mesh: Mesh) -> dict[str, ShardSlice]:
    """Return this rank's slice of each weight by name; weights of other ranks only are omitted."""
    slices = {
        name: _tensor_slice(name.split("."), shape, config, mesh)
        for name, shape in cfg.parameter_shapes.weight_shapes(config).items()
    }
    return {name: shard for name, shard in slices.items() if shard is not None}


def _tensor_slice(pieces: list[str], shape: tuple[int, ...], config: ModelConfig, mesh: Mesh) -> ShardSlice | None:
    whole = tuple(map(range, shape))
    stack: cfg.StackConfig | None = {"encoder": config.encoder, "decoder": config.decoder}.get(pieces[0])
    child = pieces[1]
    if stack is None or child in ("positions", "relative_embedding"):
        return whole
    if child == "norm":
        return whole if mesh.is_last_stage else None
    if child == "relative_bias":
        return whole[0], query_head_range(stack.layer_types[pieces[2]].attention.num_heads, mesh)
    index, part, names = int(pieces[2]), pieces[3], pieces[4:]
    if index not in layer_range(stack.num_layers, mesh):
        return None
    layer = stack.layer_config(index)
    attention = {"attention": layer.attention, "cross_attention": layer.cross_attention}.get(part)
    if isinstance(attention, cfg.AttentionConfig):
        return _attention_slice(names, whole, config, attention, mesh)
    return _mlp_slice(names, whole, mesh) if part == "mlp" else whole


def _attention_slice(
    names: list[str], whole: ShardSlice, config: ModelConfig, attention: cfg.AttentionConfig, mesh: Mesh
) -> ShardSlice | None:
    if attention.latent is not None:
        assert mesh.tensor_parallel == 1, "check_model_fits_mesh refuses latent attention"
        return whole
    num_heads, num_kv_heads, dim, value_dim = attention_dims(config, attention)
    queries, keys = query_head_range(num_heads, mesh), kv_head_range(num_kv_heads, mesh)
    match names:
        case ["sink_logits"]:
            return (queries,)
        case ["relative_bias"]:
            return whole[0], queries
        case ["out", "bias"]:
            return whole if mesh.tensor_rank == 0 else None
        case ["out", "weight"]:
            return whole[0], _times(queries, value_dim)
        case ["q_norm" | "k_norm" as name, _]:
            heads = queries if name == "q_norm" else keys
            return {"head": whole[0], "each": heads, "full": _times(heads, dim)}[attention.qk_norm], *whole[1:]
        case ["gate", _]:
            return _times(queries, value_dim), *whole[1:]
        case ["q" | "k" | "v" as name, _]:
            return _times(queries if name == "q" else keys, value_dim if name == "v" else dim), *whole[1:]
    assert mesh.tensor_parallel == 1, "check_model_fits_mesh refuses custom attention"
    return whole


def _times(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _mlp_slice(names: list[str], whole: ShardSlice, mesh: Mesh) -> ShardSlice | None:
    """Return the slice of ``up.weight``, or, of experts, which have an extra first dim, ``up`` or ``up_bias``."""
    if names[0] == "shared":
        return _mlp_slice(names[1:], whole, mesh)
    if names[0] in ("router", "shared_gate", "selection_bias", "alpha_p", "alpha_n"):
        return whole
    module, _, leaf = names[0].partition("_")
    is_experts, is_bias = len(names) == 1, "bias" in (leaf, names[-1])
    if module == "down" and is_bias:
        return whole if mesh.tensor_rank == 0 else None
    axis = (module == "down") + is_experts
    share = even_share(len(whole[axis]), mesh.tensor_parallel, mesh.tensor_rank)
    return *whole[:axis], share, *whole[axis + 1 :]
