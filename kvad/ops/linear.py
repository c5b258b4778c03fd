"""Products with a weight matrix, [.., in] x [out, in] -> [.., out]: the one place where their kernel is chosen.

One row is special on a CPU.  torch gives it to MKL's matrix-vector product, which reads the weights with one thread,
however many there are; as a batch of products, one per thread with a share of the output features, every thread reads.
Measured on two cores of a Zen 4 (``dev/LOG.md``): 9 -> 24 GB/s for [704, 256], 9 -> 33 for [4096, 256], in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvad.ops.batch_invariant import TileSizes, tiled_matmul

SMALLEST = 1 << 15  # weights; below, starting the threads costs more than they save


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tiles: TileSizes | None = None) -> Tensor:
    """x [.., in], weight [out, in], bias [out] -> [.., out]; ``tiles``: in bits that no neighbour shows in."""
    if tiles is not None:
        return tiled_matmul(x, weight, bias, tiles)
    parts = _parts(x, weight)
    if parts == 1:
        return F.linear(x, weight, bias)
    shares = weight.view(parts, -1, weight.shape[1]).transpose(1, 2)
    out = torch.bmm(x.reshape(1, 1, -1).expand(parts, 1, -1), shares).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def _parts(x: Tensor, weight: Tensor) -> int:
    """Into how many shares the output features are cut: 1 = not at all."""
    one_row = x.numel() == x.shape[-1]
    if not one_row or x.device.type != "cpu" or weight.numel() < SMALLEST or torch.is_grad_enabled():
        return 1
    if x.dtype not in (torch.float32, torch.float64) or not weight.is_contiguous():
        return 1
    threads = torch.get_num_threads()
    return threads if weight.shape[0] % threads == 0 else 1


class Linear(nn.Linear):
    tiles: TileSizes | None = None

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.tiles)


class PackedLinear:
    """Several products of one input, ``(x W1, x W2, ...)``: one kernel instead of several, once it is packed.

    :meth:`pack` lays the weights one behind the other; the layers' own parameters become views of that, so that names,
    values and bytes stay what they were.  Layers that have other weights by now (a copy of the model, another dtype,
    training) have products of their own again: a pack is used only while every weight still is where it was put.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def __call__(self, x: Tensor, *layers: Linear) -> Sequence[Tensor]:
        """x [.., in] -> one [.., out] per layer.  Where gradients are wanted each layer has a product of its own: they
        belong to its parameters, and the pack has none."""
        if self._weight is None or torch.is_grad_enabled() or not self._holds(layers):
            return [layer(x) for layer in layers]
        return torch.split(linear(x, self._weight, self._bias, layers[0].tiles), self._sizes, dim=-1)

    @property
    def shape(self) -> tuple[int, int] | None:
        """[out, in] of the joined weight; None: not packed."""
        return None if self._weight is None else (self._weight.shape[0], self._weight.shape[1])

    @torch.no_grad()
    def pack(self, *layers: Linear) -> None:
        """Join the weights; layers with a bias beside layers without stay as they are."""
        biases = [layer.bias.data for layer in layers if layer.bias is not None]
        if len(biases) not in (0, len(layers)):
            return
        self._sizes = [layer.out_features for layer in layers]
        self._weight = torch.cat([layer.weight.data for layer in layers])
        self._bias = torch.cat(biases) if biases else None
        for layer, share in zip(layers, self._weight.split(self._sizes), strict=True):
            layer.weight.data = share
        if self._bias is not None:
            for layer, share in zip(layers, self._bias.split(self._sizes), strict=True):
                layer.bias.data = share

    def _holds(self, layers: Sequence[Linear]) -> bool:
        """Whether every parameter lies in the pack; its memory is alive, so nothing else can lie there."""
        assert self._weight is not None
        at, step = self._weight.data_ptr(), self._weight.shape[1] * self._weight.element_size()
        for layer, size in zip(layers, self._sizes, strict=True):
            if layer.weight.data_ptr() != at or type(layer).forward is not Linear.forward:
                return False  # another weight, or a layer that says more than its weight (an adapter beside it)
            at += size * step
        return self._holds_biases(layers)

    def _holds_biases(self, layers: Sequence[Linear]) -> bool:
        if self._bias is None:
            return all(layer.bias is None for layer in layers)
        at = self._bias.data_ptr()
        for layer, size in zip(layers, self._sizes, strict=True):
            if layer.bias is None or layer.bias.data_ptr() != at:
                return False
            at += size * self._bias.element_size()
        return True
