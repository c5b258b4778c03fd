"""Linear layers, [.., in] x [out, in] -> [.., out], and their kernels.

A single row is special on CPU: torch calls MKL's matrix-vector product, which reads the weights with one thread. As a
batch of products, one per thread with a share of the output features, all threads read.
Measured on two cores of a Zen 4 (``dev/LOG.md``): 9 -> 24 GB/s for [704, 256], 9 -> 33 for [4096, 256], in float32.
Several rows of float32 are multiplied by oneDNN instead of MKL: twice as fast on a Zen 5.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvad.ops.batch_invariant import TileSizes, tiled_matmul

SMALLEST = 1 << 15  # elements of the weight; below, starting the threads costs more than it saves
HAS_ONEDNN = (  # a private operator of torch, which its compiler uses
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tiles: TileSizes | None = None) -> Tensor:
    """Multiply x [.., in] by weight [out, in] and add bias [out] -> [.., out]; batch-invariant with ``tiles``."""
    if tiles is not None:
        return tiled_matmul(x, weight, bias, tiles)
    if _prefers_onednn(x, weight):
        product: Tensor = (
            torch.ops.kvad.onednn_linear(x, weight, bias)
            if torch.compiler.is_compiling()
            else _onednn_linear(x, weight, bias)
        )
        return product
    parts = _parts(x, weight)
    if parts == 1:
        return F.linear(x, weight, bias)
    shares = weight.view(parts, -1, weight.shape[1]).transpose(1, 2)
    out = torch.bmm(x.reshape(1, 1, -1).expand(parts, 1, -1), shares).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _num_threads() -> int:
    return torch.get_num_threads()


@functools.cache
def prepare_graphs() -> torch.library.Library:
    """Let torch.compile read ``linear``, and return the owner of its operator.

    A graph reads the number of threads once; torch compiles again if it changes. oneDNN's operator accepts variable
    weights outside of graphs only.
    """
    torch.compiler.assume_constant_result(_num_threads)
    library = torch.library.Library("kvad", "DEF")
    library.define("onednn_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.impl("onednn_linear", _onednn_linear, "CPU")

    def shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    torch.library.register_fake("kvad::onednn_linear", shape, lib=library)
    return library


def add_linear(total: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Add x [T, in] times weight [out, in] and bias [out] to ``total`` [T, out], in place and in one kernel."""
    total.addmm_(x, weight.t())
    if bias is not None:
        total += bias


def _prefers_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return True for float32 products of several rows on a CPU with AVX-512, which MKL uses on Intel's CPUs only."""
    is_float = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    is_large = x.numel() > x.shape[-1] and weight.numel() >= SMALLEST
    return HAS_ONEDNN and is_float and is_large and not torch.is_grad_enabled()


def _parts(x: Tensor, weight: Tensor) -> int:
    """Return the number of shares into which the output features are split."""
    one_row = x.numel() == x.shape[-1]
    if not one_row or x.device.type != "cpu" or weight.numel() < SMALLEST or torch.is_grad_enabled():
        return 1
    if x.dtype not in (torch.float32, torch.float64) or not weight.is_contiguous():
        return 1
    threads = _num_threads()
    return threads if weight.shape[0] % threads == 0 else 1


class Linear(nn.Linear):
    """Linear layer that uses ``linear``."""

    tiles: TileSizes | None = None  # batch-invariant if set

    def reset_parameters(self) -> None:
        """Initialize the parameters, unless they have no memory: a checkpoint replaces them."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.tiles)

    def effective_weight(self) -> Tensor:
        """Return the matrix [out, in] that ``forward`` multiplies by."""
        return self.weight


class PackedLinear:
    """Several products of one input, ``(x W1, x W2, ...)``, computed by one kernel after ``pack``.

    ``pack`` concatenates the weights; the layers' parameters become views of the result, so names, values and bytes
    do not change. If a layer has another weight later (a copy of the model, another dtype, training), the products are
    computed separately again: the packed weight is used only while every parameter is a view of it.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def __call__(self, x: Tensor, *layers: Linear) -> Sequence[Tensor]:
        """Return x [.., in] times each layer's weight, [.., out] each; with gradients, every layer is called itself."""
        is_separate = torch.is_grad_enabled() or torch.compiler.is_compiling()  # graphs have no addresses
        weight = None if is_separate else self.weight_for(*layers)
        if weight is None:
            return [layer(x) for layer in layers]
        return self.split(linear(x, weight, self._bias, layers[0].tiles))

    def weight_for(self, *layers: Linear) -> Tensor | None:
        """Return the packed weight [out, in], or None if the layers have other weights."""
        return self._weight if self._weight is not None and self._is_packed(layers) else None

    @property
    def bias(self) -> Tensor | None:
        """The packed bias [out], if the layers have one."""
        return self._bias

    def split(self, out: Tensor) -> Sequence[Tensor]:
        """Split the product with the packed weight into those of the layers."""
        return torch.split(out, self._sizes, dim=-1)

    @property
    def shape(self) -> tuple[int, int] | None:
        """Shape [out, in] of the packed weight, or None."""
        return None if self._weight is None else (self._weight.shape[0], self._weight.shape[1])

    @torch.no_grad()
    def pack(self, *layers: Linear) -> None:
        """Concatenate the weights, unless only some of the layers have a bias, or one has a quantized weight."""
        if any("weight" not in layer._parameters for layer in layers):
            return
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

    def _is_packed(self, layers: Sequence[Linear]) -> bool:
        """Return True if every parameter is a view of the packed weight, whose memory cannot be reused meanwhile."""
        if any(type(layer).forward is not Linear.forward for layer in layers):
            return False  # a layer with more than its weight, such as an adapter
        weights: list[Tensor | None] = [layer.weight for layer in layers]
        return _are_views(weights, self._weight) and _are_views([layer.bias for layer in layers], self._bias)


def _are_views(tensors: Sequence[Tensor | None], packed: Tensor | None) -> bool:
    """Return True if the tensors follow each other in ``packed``; without one, if all are None."""
    if packed is None:
        return all(tensor is None for tensor in tensors)
    at = packed.data_ptr()
    for tensor in tensors:
        if tensor is None or tensor.data_ptr() != at:
            return False
        at += tensor.numel() * tensor.element_size()
    return True
