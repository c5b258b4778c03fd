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
from kvad.cache.mesh import check_mesh, copies, kv_share, layer_share, query_share
from kvad.cache.portions import Cut, weight_cuts
from kvad.errors import EngineError
from kvad.model.compress import LayerCompressor
from kvad.model.mixers import Attention, Encoding
from kvad.model.parts import Experts, Gated, Norm, Plain
from kvad.model.transformer import Layer, Stack, Transformer
from kvad.ops.linear import Joint, Linear
from kvad.parallel.links import Links
from kvad.step import Bias, Buckets, Slopes, View

__all__ = ["shard", "shard_compressor"]


def shard(model: Transformer, links: Links) -> None:
    """Cut ``model``, for good, down to this rank's part.  ConfigError where the mesh does not fit the model.

    Its memory is then one of ``cut_groups``; Fresh knows nothing of stages and is for meshes of one stage.
    """
    mesh = links.mesh
    check_mesh(model.config, mesh)
    _cut_parameters(model, weight_cuts(model.config, mesh))
    for stack in (model.encoder, model.decoder):
        if stack is None:
            continue
        if mesh.tensor > 1:
            for layer in stack.layers:
                assert isinstance(layer, Layer)
                _share_layer(layer, links)
        if mesh.pipeline > 1:
            _stage(stack, links, crossing=stack is model.decoder and model.encoder is not None)


def _cut_parameters(model: Transformer, cuts: dict[str, Cut]) -> None:
    """Only what stays is copied; packs of the whole weights go."""
    for module in model.modules():
        for name in ("qkv", "kv", "gate_up"):
            if isinstance(getattr(module, name, None), Joint):
                setattr(module, name, Joint())
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
        if isinstance(module, Linear) and leaf == "weight" and kept is not None:
            module.out_features, module.in_features = kept.shape


# ---------------------------------------------------------------- heads


def _share_layer(layer: Layer, links: Links) -> None:
    for mixer in (layer.mixer, layer.cross):
        if mixer is not None:
            _share_mixer(mixer, links)
    mlp = layer.mlp
    if isinstance(mlp, (Plain, Gated)):
        _add_up(mlp.down, links)
    else:
        assert isinstance(mlp, Experts)
        _add_up(mlp, links)


def _share_mixer(mixer: Attention, links: Links) -> None:
    mesh, heads = links.mesh, query_share(mixer.heads, links.mesh)
    if mixer.spec.qk_norm == "full":
        assert mixer.q_norm is not None and mixer.k_norm is not None
        twice = copies(mixer.kv_heads, mesh)
        mixer.q_norm = _SharedNorm(mixer.q_norm, mixer.heads * mixer.head_dim, 1, links)
        mixer.k_norm = _SharedNorm(mixer.k_norm, mixer.kv_heads * mixer.head_dim, twice, links)
    mixer.heads, mixer.kv_heads = len(heads), len(kv_share(mixer.kv_heads, mesh))
    if isinstance(mixer.spec.position, (cfg.Alibi, cfg.OwnPositions)):
        mixer.register_forward_pre_hook(_Heads(heads))
    _add_up(mixer.out, links)


def _add_up(module: nn.Module, links: Links) -> None:
    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return links.sum(out)

    module.register_forward_hook(hook)


class _SharedNorm(Norm):
    """A norm over the numbers of all heads, of which this rank has some; each lies on ``copies`` ranks."""

    def __init__(self, norm: Norm, width: int, copies: int, links: Links) -> None:
        nn.Module.__init__(self)
        self.spec, self.width, self.each = norm.spec, width, False
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

    def __call__(self, _: nn.Module, given: tuple[Tensor, View, Encoding]) -> tuple[Tensor, View, Encoding]:
        x, view, encoding = given
        if isinstance(encoding, Slopes):
            return x, view, encoding._replace(slopes=self._cut(encoding.slopes))
        if isinstance(encoding, Buckets):
            return x, view, encoding._replace(table=self._cut(encoding.table))
        own = encoding is not None and hasattr(encoding, "between")
        return x, view, _SomeHeads(encoding, self._heads) if own else encoding  # type: ignore[arg-type]

    def _cut(self, of: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not of:
            self._last = of, of[..., self._heads.start : self._heads.stop].contiguous()
        return self._last[1]


class _SomeHeads:
    """A bias of one's own, of some heads."""

    def __init__(self, whole: Bias, heads: range) -> None:
        self._whole, self._heads = whole, heads

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self._whole.between(queries, keys)[:, self._heads.start : self._heads.stop]


def shard_compressor(compressor: LayerCompressor, links: Links) -> LayerCompressor:
    """A compressor of one layer, for this rank's heads: every number of it belongs to one kv head."""
    kv_heads, dim, value_dim = compressor.sizes
    heads = kv_share(kv_heads, links.mesh)
    ratio, hidden = compressor.place.shape[-1], compressor.inner.shape[-1]
    part = LayerCompressor(len(heads), dim, value_dim, ratio, hidden)
    for name, parameter in compressor.named_parameters():
        kept = parameter.detach()[heads.start : heads.stop].clone()
        setattr(part, name, nn.Parameter(kept, requires_grad=False))
    return part


# ---------------------------------------------------------------- layers


def _stage(stack: Stack, links: Links, *, crossing: bool) -> None:
    mesh, whole = links.mesh, stack.spec
    mine = layer_share(whole.layers, mesh)
    stack.layers = stack.layers[mine.start : mine.stop]
    stack.spec = replace(whole, layers=len(mine), pattern="".join(whole.kind_of(index) for index in mine))
    if not mesh.last:
        stack.norm = None

    def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, step, views, *cross = given
        seen = _views_of(views, mine, whole.layers, list(*cross), crossing)
        if mesh.stage > 0:
            x = links.take_over(x)
        return (x, step, seen, *cross)

    def after(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        if not mesh.last:
            links.hand_on(out)
        return links.of_last(out)

    stack.register_forward_pre_hook(before)
    stack.register_forward_hook(after)


def _views_of(views: Sequence[View], mine: range, layers: int, cross: Sequence[View], crossing: bool) -> Sequence[View]:
    """Those of this stage's layers: a rank's memory has no others, an encoder's views are of all of its layers."""
    if len(views) == len(mine) and len(cross) == len(mine) * crossing:
        return views
    if len(views) == layers and not cross:
        return views[mine.start : mine.stop]
    raise EngineError(
        f"a stage of {len(mine)} of {layers} layers was given {len(views)} + {len(cross)} views",
        "its memory holds the groups of cut_groups; Fresh knows nothing of stages",
    )
