"""Linear layers whose weights are stored as int8 or int4, and their quantization.

Each group of ``group_size`` inputs of an output feature has one scale; ``group_size`` = in is one scale per feature::

    int8 (symmetric):  w = data * scale              data int8 [out, in]
    int4:              w = data * scale + minimum    data uint8 [out, in / 2], two numbers per byte, low bits first
    E2M1:              w = 2 E2M1(data) * scale      as int4, without a minimum

``scale`` and ``minimum`` are [out, in / group_size]; q8_0 of GGUF has the same numbers with group_size = 32. A group
with NaN or infinity decodes without finite numbers, so damaged weights stay visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvad.errors import ConfigError
from kvad.ops.linear import Linear, linear

TINY = 2.0**-126  # the smallest scale, used by groups of zeros, so that no number is divided by zero
DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers of the 16 codes
BLOCK = 1 << 20  # dequantized numbers in memory at once in a product
ROUNDED_BLOCK = 128  # the most inputs with one scale that are rounded to 8 bits


class WeightFormat(NamedTuple):
    """Form of quantized numbers."""

    bits: int
    group_size: int
    scale_dtype: torch.dtype
    is_e2m1: bool = False

    @property
    def has_minimum(self) -> bool:
        """True if each group has a minimum."""
        return self.bits == 4 and not self.is_e2m1


class QuantizedMatrix(NamedTuple):
    """A matrix [out, in] as integers of ``bits`` bits."""

    data: Tensor  # int8 [out, in] or uint8 [out, in / 2]
    scale: Tensor  # [out, in / group_size]
    minimum: Tensor | None  # as scale, int4 only; None: numbers of 4 bits are E2M1
    bits: int
    group_size: int

    @property
    def in_features(self) -> int:
        """Number of columns."""
        return self.scale.shape[1] * self.group_size

    @property
    def out_features(self) -> int:
        """Number of rows."""
        return len(self.data)

    @property
    def format(self) -> WeightFormat:
        """Form of the numbers."""
        return WeightFormat(self.bits, self.group_size, self.scale.dtype, self.bits == 4 and self.minimum is None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by field."""
        parts = {"data": self.data, "scale": self.scale, "minimum": self.minimum}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    def with_half_scales(self) -> QuantizedMatrix:
        """Return the matrix with scales in float16, if they are in its range; else itself."""
        numbers = [self.scale] if self.minimum is None else [self.scale, self.minimum]
        halves = [tensor.half() for tensor in numbers]
        if any(
            bool((half.isinf() | ((half == 0) & (tensor.abs() > TINY))).any())
            for half, tensor in zip(halves, numbers, strict=True)
        ):
            return self
        return self._replace(scale=halves[0], minimum=None if self.minimum is None else halves[1])

    def dequantize(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Return the rows of the matrix in a dtype; computed in float32, or in float64 for that dtype."""
        computed = torch.promote_types(dtype, torch.float32)
        data = self.data[rows]
        if self.bits == 4:
            data = torch.stack([data & 15, data >> 4], -1).flatten(-2)
            if self.minimum is None:
                data = torch.tensor(DOUBLED_E2M1, dtype=torch.int8, device=data.device)[data.int()]
        numbers = data.to(computed).unflatten(-1, (-1, self.group_size))
        numbers *= self.scale[rows].to(computed)[..., None]
        if self.minimum is not None:
            numbers += self.minimum[rows].to(computed)[..., None]
        result: Tensor = numbers.flatten(-2).to(dtype)
        return result


def quantize_matrix(weight: Tensor, bits: int, group_size: int) -> QuantizedMatrix:
    """Quantize a matrix [out, in]; the error of a number is at most half the scale of its group.

    Raises:
        ConfigError: If the groups do not divide the inputs, or int4 has an odd number of inputs.
    """
    check_groups(weight.shape[-1], bits, group_size)
    groups = weight.float().unflatten(-1, (-1, group_size))
    if bits == 8:
        scale = (groups.abs().amax(-1) / 127).clamp_min(TINY)
        data = (groups / scale[..., None]).round_().nan_to_num_(0).clamp_(-127, 127)
        return QuantizedMatrix(data.to(torch.int8).flatten(-2), scale, None, bits, group_size)
    minimum = groups.amin(-1)
    scale = ((groups.amax(-1) - minimum) / 15).clamp_min(TINY)
    data = ((groups - minimum[..., None]) / scale[..., None]).round_().nan_to_num_(0).clamp_(0, 15)
    low, high = data.to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    return QuantizedMatrix(low | high << 4, scale, minimum, bits, group_size)


def round_inputs(x: Tensor, group_size: int) -> Tensor:
    """Round x [.., in] to integers from -127 to 127, with a scale for each group, or each 128 inputs of one."""
    numbers = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, group_size))
    parts = numbers.split(ROUNDED_BLOCK, -1)
    tops = [part.abs().amax(-1, keepdim=True) for part in parts]
    rounded = [
        (part * (127 / top).nan_to_num_(posinf=0.0)).round_().mul_(top / 127)
        for part, top in zip(parts, tops, strict=True)
    ]
    return torch.cat(rounded, -1).flatten(-2).to(x.dtype)


def check_groups(inputs: int, bits: int, group_size: int) -> None:
    """Raise ConfigError unless a matrix with ``inputs`` columns can be quantized."""
    if bits not in (4, 8):
        raise ConfigError(f"bits: must be 8 or 4, got {bits}")
    if group_size < 1 or inputs % group_size:
        raise ConfigError(f"group_size: must divide the {inputs} inputs of the matrix, got {group_size}")
    if bits == 4 and inputs % 2:
        raise ConfigError(f"bits: 4 must have an even number of inputs, got {inputs}", "Use 8 bits.")


class QuantizedLinear(Linear):
    """Linear layer for inference whose weight is quantized; products dequantize blocks of output features."""

    data: Tensor
    scale: Tensor
    minimum: Tensor | None
    activation_bits: int | None = None  # 8: the inputs are rounded (``round_inputs``)

    def __init__(self, matrix: QuantizedMatrix, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)  # Linear.__init__ would allocate a weight
        self.out_features, self.in_features = matrix.out_features, matrix.in_features
        self._set_matrix(matrix)
        self.bias = bias  # type: ignore[assignment]
        self.training = False

    def _set_matrix(self, matrix: QuantizedMatrix) -> None:
        self.bits, self.group_size = matrix.bits, matrix.group_size
        for name in ("data", "scale", "minimum"):
            self.register_buffer(name, getattr(matrix, name))

    @property
    def matrix(self) -> QuantizedMatrix:
        """The quantized weight; its tensors are those of the layer."""
        return QuantizedMatrix(self.data, self.scale, self.minimum, self.bits, self.group_size)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply [.., in] by the weight -> [.., out]."""
        return self.multiply_rows(input, 0, self.out_features, self.bias)

    def multiply_rows(self, input: Tensor, low: int, high: int, bias: Tensor | None = None) -> Tensor:
        """Multiply [.., in] by rows of the weight and add their bias [high - low] -> [.., high - low]."""
        matrix, size = self.matrix, high - low if self.tiles is not None else max(1, BLOCK // self.in_features)
        if self.activation_bits is not None:
            input = round_inputs(input, matrix.format.group_size)
        parts = [slice(start, min(start + size, high)) for start in range(low, high, size)]
        biases: Sequence[Tensor | None] = [None] * len(parts) if bias is None else bias.to(input.dtype).split(size)
        products = [
            linear(input, matrix.dequantize(input.dtype, rows), own, self.tiles)
            for rows, own in zip(parts, biases, strict=True)
        ]
        return torch.cat(products, -1)

    def effective_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantized matrix [out, in]."""
        return self.matrix.dequantize(dtype)

    def train(self, mode: bool = True) -> QuantizedLinear:
        """Set the evaluation mode; raise ConfigError for the training mode."""
        if mode:
            raise ConfigError(
                f"training: must have floating-point weights, got int{self.bits}", "Train the original checkpoint."
            )
        super().train(False)
        return self
