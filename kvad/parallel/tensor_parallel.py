"""Cut a model down to a rank's part, in place, and let its sums go over the ranks.  Its code stays what it is.

* Every parameter becomes the numbers that ``cache/portions.py`` names; layers of other stages go.
* What ``out`` and ``down`` of a layer give is a part of a sum over the stage: a hook adds the parts up, one sum per
  mixer and one per MLP.  Their biases are on the first rank alone, so that they are added once.
* A stack's first layers get what the stage before has made, and what the last stage makes is handed to every rank: so
  the model answers on each rank what the whole model would.
* Biases by distance come for all heads (ALiBi's slopes, a position encoding of one's own) and are cut for each layer.

For inference: no gradient passes.  Sums over ranks are added in another order than in one product, so a model on a mesh
agrees with the whole one to rounding (1e-13 in float64), not to the bit.
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
from kvad.errors import EngineError
from kvad.model import Transformer
from kvad.model_input import AlibiSlopes, CacheView, PositionBias, RelativeBuckets
from kvad.parallel.mesh import check_model_fits_mesh, kv_head_copies, kv_head_range, layer_range, query_head_range
from kvad.parallel.partition import ShardSlice, weight_shards
from kvad.parallel.process_groups import ProcessGroups


def shard_model(model: Transformer, links: ProcessGroups) -> None:
    """Cut ``model``, for good, down to this rank's part.  ConfigError where the mesh does not fit the model.

    Its memory is then one of ``cut_groups``; Fresh knows nothing of stages and is for meshes of one stage.
    """
    mesh = links.mesh
    check_model_fits_mesh(model.config, mesh)
    _shard_parameters(model, weight_shards(model.config, mesh))
    for stack in (model.encoder, model.decoder):
        if stack is None:
            continue
        if mesh.tensor_parallel > 1:
            for layer in stack.layers:
                assert isinstance(layer, model_lib.transformer.TransformerLayer)
                _shard_layer(layer, links)
        if mesh.pipeline_parallel > 1:
            _stage(stack, links, crossing=stack is model.decoder and model.encoder is not None)


def _shard_parameters(model: Transformer, cuts: dict[str, ShardSlice]) -> None:
    """Only what stays is copied; packs of the whole weights go."""
    for module in model.modules():
        for name in ("qkv", "kv", "gate_up"):
            if isinstance(getattr(module, name, None), ops.linear.PackedLinear):
                setattr(module, name, ops.linear.PackedLinear())
    for name, parameter in list(model.named_parameters()):
        where, _, leaf = name.rpartition(".")
        module, cut = model.get_submodule(where), cuts.get(name)
        if cut is None:
            kept = None
        elif all(len(part) == size for part, size in zip(cut, parameter.shape, strict=True)):
            continue
        else:
            ranges = tuple(slice(part.start, part.stop) for part in cut)
            kept = nn.Parameter(parameter.detach()[ranges].clone(), requires_grad=parameter.requires_grad)
        if isinstance(module, nn.ParameterDict):
            module[leaf] = kept
        else:
            setattr(module, leaf, kept)
        if isinstance(module, ops.linear.Linear) and leaf == "weight" and kept is not None:
            module.out_features, module.in_features = kept.shape


# ---------------------------------------------------------------- heads


def _shard_layer(layer: model_lib.transformer.TransformerLayer, links: ProcessGroups) -> None:
    for mixer in (layer.attention, layer.cross_attention):
        if mixer is not None:
            _shard_attention(mixer, links)
    mlp = layer.mlp
    if isinstance(mlp, (model_lib.layers.PlainMLP, model_lib.layers.GatedMLP)):
        _all_reduce(mlp.down, links)
    else:
        assert isinstance(mlp, model_lib.layers.MixtureOfExperts)
        _all_reduce(mlp, links)


def _shard_attention(mixer: model_lib.attention.Attention, links: ProcessGroups) -> None:
    mesh, heads = links.mesh, query_head_range(mixer.heads, links.mesh)
    if mixer.spec.qk_norm == "full":
        assert mixer.q_norm is not None and mixer.k_norm is not None
        twice = kv_head_copies(mixer.kv_heads, mesh)
        mixer.q_norm = _ShardedNorm(mixer.q_norm, mixer.heads * mixer.head_dim, 1, links)
        mixer.k_norm = _ShardedNorm(mixer.k_norm, mixer.kv_heads * mixer.head_dim, twice, links)
    mixer.heads, mixer.kv_heads = len(heads), len(kv_head_range(mixer.kv_heads, mesh))
    if isinstance(mixer.spec.position, (cfg.AlibiConfig, cfg.CustomPositionsConfig)):
        mixer.register_forward_pre_hook(_Heads(heads))
    _all_reduce(mixer.out, links)


def _all_reduce(module: nn.Module, links: ProcessGroups) -> None:
    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return links.sum(out)

    module.register_forward_hook(hook)


class _ShardedNorm(model_lib.layers.Norm):
    """A norm over the numbers of all heads, of which this rank has some; each lies on ``copies`` ranks."""

    def __init__(self, norm: model_lib.layers.Norm, width: int, copies: int, links: ProcessGroups) -> None:
        nn.Module.__init__(self)
        self.spec, self.width, self.num_weights = norm.spec, width, False
        self.weight, self.bias = norm.weight, norm.bias
        self._copies, self._links = copies, links

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
    """Before an attention layer: what its stack says of all heads, cut for those of this rank."""

    def __init__(self, heads: range) -> None:
        self._heads = heads
        self._last: tuple[Tensor, Tensor] | None = None  # the whole of it, and the cut: constants stay the same

    def __call__(
        self, _: nn.Module, given: tuple[Tensor, CacheView, model_lib.attention.PositionEncoding]
    ) -> tuple[Tensor, CacheView, model_lib.attention.PositionEncoding]:
        x, view, encoding = given
        if isinstance(encoding, AlibiSlopes):
            return x, view, encoding._replace(slopes=self._cut(encoding.slopes))
        if isinstance(encoding, RelativeBuckets):
            return x, view, encoding._replace(table=self._cut(encoding.table))
        own = encoding is not None and hasattr(encoding, "between")
        return x, view, _SomeHeads(encoding, self._heads) if own else encoding  # type: ignore[arg-type]

    def _cut(self, of: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not of:
            self._last = of, of[..., self._heads.start : self._heads.stop].contiguous()
        return self._last[1]


class _SomeHeads:
    """A bias of one's own, of some heads."""

    def __init__(self, whole: PositionBias, heads: range) -> None:
        self._whole, self._heads = whole, heads

    def compute(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self._whole.compute(queries, keys)[:, self._heads.start : self._heads.stop]


def shard_summarizer(
    compressor: model_lib.summarizer.LayerSummarizer, links: ProcessGroups
) -> model_lib.summarizer.LayerSummarizer:
    """A compressor of one layer, for this rank's heads: every number of it belongs to one kv head."""
    kv_heads, dim, value_dim = compressor.sizes
    heads = kv_head_range(kv_heads, links.mesh)
    ratio, hidden = compressor.position_bias.shape[-1], compressor.hidden_weight.shape[-1]
    part = model_lib.summarizer.LayerSummarizer(len(heads), dim, value_dim, ratio, hidden)
    for name, parameter in compressor.named_parameters():
        kept = parameter.detach()[heads.start : heads.stop].clone()
        setattr(part, name, nn.Parameter(kept, requires_grad=False))
    return part


# ---------------------------------------------------------------- layers


def _stage(stack: model_lib.transformer.LayerStack, links: ProcessGroups, *, crossing: bool) -> None:
    mesh, whole = links.mesh, stack.spec
    mine = layer_range(whole.num_layers, mesh)
    stack.layers = stack.layers[mine.start : mine.stop]
    stack.spec = replace(whole, num_layers=len(mine), layer_pattern="".join(whole.layer_type(index) for index in mine))
    if not mesh.is_last_stage:
        stack.norm = None

    def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, step, views, *cross = given
        seen = _stage_views(views, mine, whole.num_layers, list(*cross), crossing)
        if mesh.stage > 0:
            x = links.receive_previous_stage(x)
        return (x, step, seen, *cross)

    def after(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        if not mesh.is_last_stage:
            links.send_next_stage(out)
        return links.broadcast_from_last_stage(out)

    stack.register_forward_pre_hook(before)
    stack.register_forward_hook(after)


def _stage_views(
    views: Sequence[CacheView], mine: range, layers: int, cross: Sequence[CacheView], crossing: bool
) -> Sequence[CacheView]:
    """Those of this stage's layers: a rank's memory has no others, an encoder's views are of all of its layers."""
    if len(views) == len(mine) and len(cross) == len(mine) * crossing:
        return views
    if len(views) == layers and not cross:
        return views[mine.start : mine.stop]
    raise EngineError(
        f"a stage of {len(mine)} of {layers} layers was given {len(views)} + {len(cross)} views",
        "its memory holds the groups of cut_groups; Fresh knows nothing of stages",
    )
