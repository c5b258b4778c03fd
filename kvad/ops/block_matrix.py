"""Matrices in the block formats of GGUF, and in Hugging Face's MXFP4, as they are in a file.

A row is a sequence of blocks of 32 or 256 weights with their scales. ``BlockMatrix.quantized`` returns the same numbers
as a ``QuantizedMatrix``: equal products of float32, so that both dequantize to the same bits. Formats whose numbers it
cannot hold (5 bits with a minimum, fewer bits, tables) are not in ``BLOCK_FORMATS``.

    q8_0  d, 32 x int8                        w = d * q
    q4_0  d, 16 bytes                         w = d * q - 8 d            first 16 weights in the low bits
    q4_1  d, m, 16 bytes                      w = d * q + m
    q5_0  d, 4 bytes, 16 bytes                w = d * (q - 16)           fifth bits in the 4 bytes
    q4_K  d, dmin, 12 bytes, 128 bytes        w = d s * q - dmin m       8 groups of 32, s and m have 6 bits
    q6_K  128 bytes, 64 bytes, 16 x int8, d   w = d s * (q - 32)         16 groups of 16
    mxfp4 e, 16 bytes                         w = 2^(e - 128) * q        q: twice an E2M1 number

``d``, ``m`` and ``dmin`` are float16. Hugging Face's MXFP4 has the first weight of each pair in the low bits, and the
scales of all blocks in a tensor of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvad.ops.quantized_linear import QuantizedLinear, QuantizedMatrix, WeightFormat

CHUNK = 1 << 22  # weights that are converted at a time


class BlockFormat(NamedTuple):
    """A block format, and the quantized matrix of the same numbers."""

    size: int  # weights of a block
    num_bytes: int
    quantized: WeightFormat
    halves: tuple[int, ...]  # positions of float16 numbers
    decode: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]  # numbers [.., size], scales, minima


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low bits of all bytes, then their high bits, in the last dimension."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _decode_q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return blocks[..., 2:].view(torch.int8), _half(blocks, 0), None


def _decode_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    scale = _half(blocks, 0).float()
    return _nibbles(blocks[..., 2:]), scale, -8 * scale


def _decode_q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _decode_q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    fifth = blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1
    numbers = _nibbles(blocks[..., 6:]) | fifth.flatten(-2) << 4
    return numbers.view(torch.int8) - 16, _half(blocks, 0), None


def _decode_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = torch.cat((first & 63, rest & 15 | first >> 2 & 48), -1)
    minimum = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), -1)
    numbers = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return numbers, _half(blocks, 0).float() * scale.float(), -(_half(blocks, 2).float() * minimum.float())


def _decode_q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(-3)
    scale = _half(blocks, 208).float() * blocks[..., 192:208].view(torch.int8).float()
    return (low | high << 4).view(torch.int8) - 32, scale, None


def _decode_mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _nibbles(blocks[..., 1:]), _powers(blocks[..., :1]), None


def _decode_mxfp4_pairs(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    packed = blocks[..., 1:]
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2), _powers(blocks[..., :1]), None


def _powers(exponent: Tensor) -> Tensor:
    """Return 2^(exponent - 128) in float32."""
    exponent = exponent.int()
    bits = torch.where(exponent < 2, 1 << 21 + exponent, exponent - 1 << 23)  # 2^-128 and 2^-127 are subnormal
    return bits.int().view(torch.float32)


BLOCK_FORMATS = {
    "Q8_0": BlockFormat(32, 34, WeightFormat(8, 32, torch.float16), (0,), _decode_q8_0),
    "Q4_0": BlockFormat(32, 18, WeightFormat(4, 32, torch.float32), (0,), _decode_q4_0),
    "Q4_1": BlockFormat(32, 20, WeightFormat(4, 32, torch.float16), (0, 2), _decode_q4_1),
    "Q5_0": BlockFormat(32, 22, WeightFormat(8, 32, torch.float16), (0,), _decode_q5_0),
    "Q4_K": BlockFormat(256, 144, WeightFormat(4, 32, torch.float32), (0, 2), _decode_q4_k),
    "Q6_K": BlockFormat(256, 210, WeightFormat(8, 16, torch.float32), (208,), _decode_q6_k),
    "MXFP4": BlockFormat(32, 17, WeightFormat(4, 32, torch.float32, is_e2m1=True), (), _decode_mxfp4),
    "MXFP4 pairs": BlockFormat(32, 17, WeightFormat(4, 32, torch.float32, is_e2m1=True), (), _decode_mxfp4_pairs),
}


class BlockMatrix(NamedTuple):
    """A matrix [out, in] in a block format."""

    blocks: Tensor  # uint8 [stored rows, in / size, num_bytes]
    order: Tensor | None  # int64 [out], the stored row of each row; None: the same
    kind: str  # of BLOCK_FORMATS
    scales: Tensor | None = None  # uint8 [stored rows, in / size]: the first byte of each block, if blocks lack it

    @property
    def block_format(self) -> BlockFormat:
        """The format of the blocks."""
        return BLOCK_FORMATS[self.kind]

    @property
    def out_features(self) -> int:
        """Number of rows."""
        return len(self.blocks if self.order is None else self.order)

    @property
    def in_features(self) -> int:
        """Number of columns."""
        return self.blocks.shape[1] * self.block_format.size

    @property
    def format(self) -> WeightFormat:
        """Form of the numbers of ``quantized``."""
        return self.block_format.quantized

    @property
    def num_bytes(self) -> int:
        """Bytes of ``quantized``, which the kernels read; the blocks have fewer."""
        form = self.format
        group_bytes = form.group_size * form.bits // 8 + form.scale_dtype.itemsize * (2 if form.has_minimum else 1)
        return self.out_features * (self.in_features // form.group_size) * group_bytes

    @property
    def is_finite(self) -> bool:
        """False if a scale is NaN or infinite."""
        return all(bool(_half(self.blocks, at).isfinite().all()) for at in self.block_format.halves)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by field."""
        parts = {"blocks": self.blocks, "order": self.order, "scales": self.scales}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    def select(self, rows: Tensor) -> BlockMatrix:
        """Return the stored rows with these numbers, int64; views of the blocks if they are at equal distances."""
        first, step = int(rows[0]), int(rows[1] - rows[0]) if len(rows) > 1 else 1
        if step < 1 or not torch.equal(rows, torch.arange(len(rows)) * step + first):
            return self._replace(order=rows.contiguous())
        selected = slice(first, first + step * len(rows), step)
        scales = None if self.scales is None else self.scales[selected]
        return self._replace(blocks=self.blocks[selected], order=None, scales=scales)

    def quantized(self, rows: slice = slice(None)) -> QuantizedMatrix:
        """Return rows of the same numbers with separate scales."""
        start, stop, _ = rows.indices(self.out_features)
        bits, group_size, scale_dtype, _ = self.format
        device, groups = self.blocks.device, self.in_features // group_size
        count = max(0, stop - start)
        data = torch.empty(
            count, self.in_features * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8, device=device
        )
        scale = torch.empty(count, groups, dtype=scale_dtype, device=device)
        minimum = torch.empty_like(scale) if self.format.has_minimum else None
        step = max(1, CHUNK // self.in_features)
        for low in range(0, count, step):
            part = slice(low, min(count, low + step))
            stored: slice | Tensor = slice(start + part.start, start + part.stop)
            stored = stored if self.order is None else self.order[stored]
            blocks = self.blocks[stored]
            if self.scales is not None:
                blocks = torch.cat((self.scales[stored].unsqueeze(-1), blocks), -1)
            numbers, scales, minima = self.block_format.decode(blocks)
            numbers = numbers.flatten(-2)
            data[part] = numbers if bits == 8 else numbers[:, ::2] | numbers[:, 1::2] << 4
            scale[part] = scales.flatten(-2)
            if minimum is not None and minima is not None:
                minimum[part] = minima.flatten(-2)
        return QuantizedMatrix(data, scale, minimum, bits, group_size)

    def dequantize(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Return the rows of the matrix in a dtype; computed in float32, or in float64 for that dtype."""
        return self.quantized(rows).dequantize(dtype)


class BlockLinear(QuantizedLinear):
    """Linear layer for inference whose weight is in a block format."""

    blocks: Tensor
    order: Tensor | None
    scales: Tensor | None

    def __init__(self, matrix: BlockMatrix, bias: nn.Parameter | None = None) -> None:
        super().__init__(matrix, bias)  # type: ignore[arg-type]

    def _set_matrix(self, matrix: BlockMatrix) -> None:  # type: ignore[override]
        self.kind, self.bits = matrix.kind, matrix.format.bits
        for name in ("blocks", "order", "scales"):
            self.register_buffer(name, getattr(matrix, name))

    @property
    def matrix(self) -> BlockMatrix:  # type: ignore[override]
        """The weight; its tensors are those of the layer."""
        return BlockMatrix(self.blocks, self.order, self.kind, self.scales)
