"""Shard a model in place to one rank's part, with hooks for the sums over ranks; the model's code is unchanged.

* Every parameter is reduced to the slice in ``partition.weight_shards``; layers of other stages are removed.
* The outputs of ``out`` and ``down`` are partial sums over the stage: a hook adds them up, once per attention and once
  per MLP. Their biases are on the first rank only, so they are added once.
* A stage receives its input from the previous stage, and the output of the last stage is broadcast, so the model
  returns the same result on every rank.
* Position biases for all heads (ALiBi slopes, custom encodings) are reduced to the rank's heads in each layer.

For inference only: gradients are not supported. Sums over ranks are added in another order than in one product, so the
result agrees with the unsharded model up to rounding (1e-13 in float64).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kvad import config as cfg
from kvad import model as model_lib
from kvad import ops
from kvad.errors import ConfigError, EngineError
from kvad.model import Transformer
from kvad.model_input import AlibiSlopes, CacheView, PositionBias, RelativeBuckets
from kvad.parallel.mesh import check_model_fits_mesh, kv_head_copies, kv_head_range, layer_range, query_head_range
from kvad.parallel.partition import ShardSlice, weight_shards
from kvad.parallel.process_groups import ProcessGroups


def shard_model(model: Transformer, process_groups: ProcessGroups) -> None:
    """Reduce a model, permanently, to this rank's part.

    The model then needs a cache with the groups of ``partition.shard_groups``, or NoCache on a mesh of one stage.

    Raises:
        ConfigError: If the model does not fit the mesh.
    """
    mesh = process_groups.mesh
    check_model_fits_mesh(model.config, mesh)
    model.join_experts()
    _shard_parameters(model, weight_shards(model.config, mesh))
    for stack in (model.encoder, model.decoder):
        if stack is None:
            continue
        if mesh.tensor_parallel > 1:
            for layer in stack.layers:
                assert isinstance(layer, model_lib.transformer.TransformerLayer)
                _shard_layer(layer, process_groups)
        if mesh.pipeline_parallel > 1:
            has_cross_attention = stack is model.decoder and model.encoder is not None
            _shard_stack(stack, process_groups, has_cross_attention=has_cross_attention)


def _shard_parameters(model: Transformer, cuts: dict[str, ShardSlice]) -> None:
    """Replace every parameter by a copy of its slice, and drop packed weights."""
    for module in model.modules():
        for name in ("qkv", "kv", "gate_up"):
            if isinstance(getattr(module, name, None), ops.linear.PackedLinear):
                setattr(module, name, ops.linear.PackedLinear())
    for name, parameter in list(model.named_parameters()):
        where, _, leaf = name.rpartition(".")
        module, cut = model.get_submodule(where), cuts.get(name)
        if cut is not None and tuple(map(len, cut)) == tuple(parameter.shape):
            continue
        shard = None
        if cut is not None:
            ranges = tuple(slice(part.start, part.stop) for part in cut)
            shard = nn.Parameter(parameter.detach()[ranges].clone(), requires_grad=parameter.requires_grad)
        if isinstance(module, nn.ParameterDict):
            module[leaf] = shard
        else:
            setattr(module, leaf, shard)
        if isinstance(module, ops.linear.Linear) and leaf == "weight" and shard is not None:
            module.out_features, module.in_features = shard.shape


def _shard_layer(layer: model_lib.transformer.TransformerLayer, process_groups: ProcessGroups) -> None:
    for attention in (layer.attention, layer.cross_attention):
        if attention is not None:
            assert isinstance(attention, model_lib.attention.Attention), "check_model_fits_mesh refuses other mixers"
            _shard_attention(attention, process_groups)
    mlp = layer.mlp
    if isinstance(mlp, (model_lib.layers.PlainMLP, model_lib.layers.GatedMLP)):
        _all_reduce(mlp.down, process_groups)
    else:
        assert isinstance(mlp, model_lib.layers.MixtureOfExperts)
        _all_reduce(mlp, process_groups)


def _shard_attention(attention: model_lib.attention.Attention, process_groups: ProcessGroups) -> None:
    mesh, heads = process_groups.mesh, query_head_range(attention.heads, process_groups.mesh)
    if attention.spec.qk_norm == "full":
        assert attention.q_norm is not None and attention.k_norm is not None
        copies, dim = kv_head_copies(attention.kv_heads, mesh), attention.head_dim
        attention.q_norm = _ShardedNorm(attention.q_norm, attention.heads * dim, 1, process_groups)
        attention.k_norm = _ShardedNorm(attention.k_norm, attention.kv_heads * dim, copies, process_groups)
    attention.heads, attention.kv_heads = len(heads), len(kv_head_range(attention.kv_heads, mesh))
    if isinstance(attention.spec.position, (cfg.AlibiConfig, cfg.CustomPositionsConfig)):
        attention.register_forward_pre_hook(_Heads(heads))
    _all_reduce(attention.out, process_groups)


def _all_reduce(module: nn.Module, process_groups: ProcessGroups) -> None:
    module.register_forward_hook(lambda _, __, out: process_groups.sum(out))


class _ShardedNorm(model_lib.layers.Norm):
    """Norm over all heads, some of which are on this rank; each head is on ``copies`` ranks."""

    def __init__(self, norm: model_lib.layers.Norm, width: int, copies: int, process_groups: ProcessGroups) -> None:
        nn.Module.__init__(self)
        self.spec, self.width, self.num_weights = norm.spec, width, False
        self.weight, self.bias = norm.weight, norm.bias
        self._copies, self._links = copies, process_groups

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if self.spec.kind == "layer":
            wide = wide - self._mean(wide)
        wide = wide * torch.rsqrt(self._mean(wide.square()) + self.spec.eps)
        if self.weight is not None:
            weight = self.weight.to(wide.dtype)
            wide = wide * (weight + 1.0 if self.spec.unit_offset else weight)
        return (wide if self.bias is None else wide + self.bias.to(wide.dtype)).to(x.dtype)

    def _mean(self, x: Tensor) -> Tensor:
        return self._links.sum(x.sum(dim=-1, keepdim=True)) / (self._copies * self.width)


class _Heads:
    """Forward pre-hook of an attention layer that reduces position encodings to this rank's heads."""

    def __init__(self, heads: range) -> None:
        self._heads = heads
        self._last: tuple[Tensor, Tensor] | None = None  # the last tensor and its slice: constants stay the same

    def __call__(
        self, _: nn.Module, args: tuple[Tensor, CacheView, model_lib.attention.PositionEncoding]
    ) -> tuple[Tensor, CacheView, model_lib.attention.PositionEncoding]:
        x, view, encoding = args
        if isinstance(encoding, AlibiSlopes):
            return x, view, encoding._replace(slopes=self._slice(encoding.slopes))
        if isinstance(encoding, RelativeBuckets):
            return x, view, encoding._replace(table=self._slice(encoding.table))
        is_custom = encoding is not None and hasattr(encoding, "compute")
        return x, view, _HeadsBias(encoding, self._heads) if is_custom else encoding  # type: ignore[arg-type]

    def _slice(self, tensor: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not tensor:
            self._last = tensor, tensor[..., self._heads.start : self._heads.stop].contiguous()
        return self._last[1]


class _HeadsBias:
    def __init__(self, bias: PositionBias, heads: range) -> None:
        self._bias, self._heads = bias, heads

    def compute(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self._bias.compute(queries, keys)[:, self._heads.start : self._heads.stop]


def shard_summarizer(summarizer: Any, process_groups: ProcessGroups) -> model_lib.summarizer.LayerSummarizer:
    """Return the part of a layer's summarizer for this rank's kv heads; every parameter belongs to one kv head.

    A cache accepts any function, but only kvad's summarizers can be sharded: ConfigError for others.
    """
    if not isinstance(summarizer, model_lib.summarizer.LayerSummarizer):
        message = f"summarizer: {type(summarizer).__name__} cannot be divided by heads"
        raise ConfigError(message, "use one that kvad trained")
    kv_heads, dim, value_dim = summarizer.sizes
    heads = kv_head_range(kv_heads, process_groups.mesh)
    ratio, hidden = summarizer.position_bias.shape[-1], summarizer.hidden_weight.shape[-1]
    part = model_lib.summarizer.LayerSummarizer(len(heads), dim, value_dim, ratio, hidden)
    for name, parameter in summarizer.named_parameters():
        shard = parameter.detach()[heads.start : heads.stop].clone()
        setattr(part, name, nn.Parameter(shard, requires_grad=False))
    return part


def _shard_stack(
    stack: model_lib.transformer.LayerStack, process_groups: ProcessGroups, *, has_cross_attention: bool
) -> None:
    """Keep the layers of this rank's stage, and connect them to the other stages."""
    mesh, whole = process_groups.mesh, stack.spec
    local = layer_range(whole.num_layers, mesh)
    stack.layers = stack.layers[local.start : local.stop]
    stack.spec = replace(whole, num_layers=len(local), layer_pattern="".join(map(whole.layer_type, local)))
    if not mesh.is_last_stage:
        stack.norm = None

    def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, step, views, *cross = given
        seen = _stage_views(views, local, whole.num_layers, list(*cross), has_cross_attention)
        if mesh.stage > 0:
            x = process_groups.receive_previous_stage(x)
        return (x, step, seen, *cross)

    def after(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        if not mesh.is_last_stage:
            process_groups.send_next_stage(out)
        return process_groups.broadcast_from_last_stage(out)

    stack.register_forward_pre_hook(before)
    stack.register_forward_hook(after)


def _stage_views(
    views: Sequence[CacheView], local: range, layers: int, cross: Sequence[CacheView], has_cross_attention: bool
) -> Sequence[CacheView]:
    """Return the views of this stage's layers; a rank's KVCache has no others, an encoder has views of all layers."""
    if len(views) == len(local) and len(cross) == len(local) * has_cross_attention:
        return views
    if len(views) == layers and not cross:
        return views[local.start : local.stop]
    raise EngineError(
        f"a stage with {len(local)} of {layers} layers got {len(views)} + {len(cross)} views",
        "use a cache with the groups of shard_groups; NoCache supports one stage only",
    )
