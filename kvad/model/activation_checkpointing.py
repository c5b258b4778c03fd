"""Activation checkpointing of a layer (Chen et al. 2016, sec. 4).

Only the layer's input and output are stored; the backward pass recomputes the rest with the same random numbers. The
gradient is the same bit for bit, except for a bias table shared by layers, whose gradients are summed in another order.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kvad import ops
from kvad.model.attention import PositionEncoding
from kvad.model_input import AttentionParams, CacheView, RelativeBuckets


def checkpointed_layer(
    layer: nn.Module, x: Tensor, view: CacheView, cross: CacheView | None, encoding: PositionEncoding
) -> Tensor:
    """Compute ``layer(x, view, cross, encoding)`` [T, E], recomputed in the backward pass."""
    out: Tensor = checkpoint(layer, x, _RecomputedView(view), cross, encoding, use_reentrant=False)
    return out


class _RecomputedView:
    """A view that computes learned biases each time.

    A bias cached by the first layer of a step would not be part of the graph when that layer is recomputed.
    """

    def __init__(self, view: CacheView) -> None:
        self._view = view

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        if isinstance(params.bias, RelativeBuckets):
            params = params._replace(bias=_RecomputedBias(params.bias))
        return self._view.attend(q, k, v, params)

    def write(self, k: Tensor, v: Tensor) -> None:
        self._view.write(k, v)


class _RecomputedBias:
    """A relative bias that is not cached."""

    def __init__(self, bias: RelativeBuckets) -> None:
        self._bias = bias

    def compute(self, queries: Tensor, keys: Tensor) -> Tensor:
        return ops.attention.position_bias(self._bias, queries, keys)
