"""A layer whose activations are not kept: the backward pass computes them again (Chen et al. 2016, sec. 4).

What a layer reads and what comes out are kept, nothing in between; random numbers are drawn again as they were, so the
gradient is the same to the bit (but for a table of biases that layers share: their shares are summed in another order).
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
    """``layer(x, view, cross, encoding)`` [T, E], computed once more when its gradient is asked for."""
    out: Tensor = checkpoint(layer, x, _RecomputedView(view), cross, encoding, use_reentrant=False)
    return out


class _RecomputedView:
    """A view whose learned biases are made each time: what a step keeps of the first layer's would be no part of the
    graph when that layer is computed again."""

    def __init__(self, view: CacheView) -> None:
        self._view = view

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams) -> Tensor:
        if isinstance(score.bias, RelativeBuckets):
            score = score._replace(bias=_RecomputedBias(score.bias))
        return self._view.attend(q, k, v, score)

    def write(self, k: Tensor, v: Tensor) -> None:
        self._view.write(k, v)


class _RecomputedBias:
    """A bias by buckets that nobody keeps."""

    def __init__(self, bias: RelativeBuckets) -> None:
        self._bias = bias

    def compute(self, queries: Tensor, keys: Tensor) -> Tensor:
        return ops.attention.position_bias(self._bias, queries, keys)
