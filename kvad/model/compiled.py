"""Layers compiled with torch.compile, for inference.

Compiled are the parts of a layer between its attention calls, in which every token is computed separately. All layers
of a kind share one compilation for any number of tokens, and one for a single token. Attention itself, caches and
mixtures of experts, which choose experts on the host, are computed as before.

    x -> _project -> attention -> _finish                                                       -> x
    x -> _project -> attention -> _add_attention -> _project_cross -> attention -> _add_cross -> _add_dense -> x
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from kvad import ops
from kvad.model.attention import Attention, LatentAttention, PositionEncoding
from kvad.model.layers import MixtureOfExperts, Routing
from kvad.model.transformer import LayerStack, Transformer, TransformerLayer
from kvad.model_input import CacheView, TokenAdapters

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


class CompiledLayer(TransformerLayer):
    """A layer with the modules of another one; ``kind`` is its stack and letter."""

    def __init__(self, layer: TransformerLayer, compiler: ops.runtime.RegionCompiler, kind: tuple[str, str]) -> None:
        self.__dict__.update(layer.__dict__)  # the same modules, without a copy
        self._compiler, self._kind = compiler, kind

    def forward(
        self,
        x: Tensor,
        view: CacheView,
        cross_view: CacheView | None,
        encoding: PositionEncoding,
        routings: list[Routing] | None = None,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        """Apply the layer as ``TransformerLayer.forward`` does."""
        assert adapters is None, "an engine with adapters compiles no layers"
        attention, cross, is_dense = self.attention, self.cross_attention, not isinstance(self.mlp, MixtureOfExperts)
        if type(attention) not in (Attention, LatentAttention):  # a recurrence, or a custom class
            if self.is_parallel:
                return super().forward(x, view, cross_view, encoding, routings)
            x = self._branch(x, lambda h: attention(h, view, encoding), self.norm1, self.norm1_after)
        else:
            assert isinstance(attention, Attention)
            attended = view.attend(*self._run(_project, x), attention.attention_params(encoding))
            if is_dense and cross is None:
                return self._run(_finish, x, attended)
            if self.is_parallel:
                return self._add_parallel(x, lambda h: attention.output(attended, h), self._mlp(routings))
            x = self._run(_add_attention, x, attended)
        if cross is not None:
            assert cross_view is not None, "this layer has cross-attention"
            q = self._run(_project_cross, x)
            attended = cross_view.attend(q, None, None, cross.attention_params(None))
            x = self._run(_add_cross, x, attended)
        return self._run(_add_dense, x) if is_dense else self._add_mlp(x, self._mlp(routings))

    def _run(self, function: Callable[..., T], *tensors: Tensor) -> T:
        return self._compiler.run(self._kind, function, self, *tensors)


def _project(layer: CompiledLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert isinstance(layer.attention, Attention)
    return layer.attention.project(layer._branch_input(x, layer.norm1))


def _finish(layer: CompiledLayer, x: Tensor, attended: Tensor) -> Tensor:
    if layer.is_parallel:
        assert isinstance(layer.attention, Attention)
        attention = layer.attention
        return layer._add_parallel(x, lambda h: attention.output(attended, h), layer.mlp)
    return _add_dense(layer, _add_attention(layer, x, attended))


def _add_attention(layer: CompiledLayer, x: Tensor, attended: Tensor) -> Tensor:
    assert isinstance(layer.attention, Attention)
    attention = layer.attention
    return layer._branch(x, lambda h: attention.output(attended, h), layer.norm1, layer.norm1_after)


def _project_cross(layer: CompiledLayer, x: Tensor) -> Tensor:
    assert layer.cross_attention is not None
    return layer.cross_attention.project_queries(layer._branch_input(x, layer.norm_cross))


def _add_cross(layer: CompiledLayer, x: Tensor, attended: Tensor) -> Tensor:
    assert layer.cross_attention is not None
    cross = layer.cross_attention
    return layer._branch(x, lambda h: cross.output(attended, h), layer.norm_cross, layer.norm_cross_after)


def _add_dense(layer: CompiledLayer, x: Tensor) -> Tensor:
    return layer._add_mlp(x, layer.mlp)


def compile_layers(model: Transformer) -> Transformer:
    """Return a model with the same parameters whose layers are compiled at their first call; ``model`` is unchanged.

    Layers with forward hooks, and with weights in GGUF's blocks, are not compiled.
    """
    compiled = _share(model)
    for name in ("encoder", "decoder"):
        stack = getattr(model, name)
        if stack is not None:
            setattr(compiled, name, _compile_stack(stack, model.compiler, name))
    return compiled


def compilable_layers(model: Transformer) -> list[TransformerLayer]:
    """Return the layers that ``compile_layers`` compiles."""
    return [layer for layer in model.modules() if isinstance(layer, TransformerLayer) and _is_compilable(layer)]


def _compile_stack(stack: LayerStack, compiler: ops.runtime.RegionCompiler, name: str) -> LayerStack:
    compiled, layers = _share(stack), list[nn.Module]()
    for index, layer in enumerate(stack.layers):
        assert isinstance(layer, TransformerLayer)
        kind = (name, stack.spec.layer_type(index))
        layers.append(CompiledLayer(layer, compiler, kind) if _is_compilable(layer) else layer)
    compiled.layers = nn.ModuleList(layers)
    return compiled


def _share(module: M) -> M:
    """Return a copy of a module that has the same children, and whose children can be replaced."""
    shared = copy.copy(module)
    shared._modules = dict(module._modules)
    return shared


def _is_compilable(layer: TransformerLayer) -> bool:
    """Return False for modules that a graph cannot contain."""
    return not any(
        isinstance(module, ops.block_matrix.BlockLinear) or module._forward_hooks or module._forward_pre_hooks
        for module in layer.modules()
    )
