"""Every rank's bytes before anything is allocated: which numbers of which weight it has, and its part of the pool.

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
from dataclasses import dataclass

from kvad.cache.mesh import (
    Mesh,
    check_cache_fits_mesh,
    check_model_fits_mesh,
    even_share,
    kv_head_range,
    layer_range,
    query_head_range,
)
from kvad.cache.planning import MemoryPlan
from kvad.cache.sharding import shard_groups
from kvad.cache.sizing import DTYPE_BYTES, GroupBytes, group_bytes
from kvad.cache.weights import weight_shapes
from kvad.config import AttentionConfig, ModelConfig, MoEConfig, StackConfig, head_dim

__all__ = ["ShardSlice", "RankPlan", "plan_ranks", "weight_shards"]

ShardSlice = tuple[range, ...]  # of each dimension of a tensor


@dataclass(frozen=True)
class RankPlan:
    """What one rank has; bytes.  ``groups``: of the whole pool, reserved blocks included."""

    mesh: Mesh
    layers: range
    weights: int
    groups: tuple[GroupBytes, ...]

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
        made.append(RankPlan(each, layer_range(layers, each), numbers * DTYPE_BYTES[plan.weights_dtype], pools))
    return tuple(made)


def weight_shards(config: ModelConfig, mesh: Mesh) -> dict[str, ShardSlice]:
    """By name: which numbers of each weight this rank has; names that it has nothing of are left out."""
    cuts = {name: _tensor_slice(name.split("."), shape, config, mesh) for name, shape in weight_shapes(config).items()}
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
