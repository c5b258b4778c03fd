"""Quantized checkpoints of other libraries, dequantized one tensor at a time when they are read.

| module | content |
|---|---|
| `scheme` | `quantization_config` of a `config.json`: what is read, what is refused and why |
| `layouts` | how GPTQ, AWQ, compressed-tensors, FP8 and MXFP4 pack a matrix, and its dequantization |
| `tensors` | the tensors of a folder, with one matrix in place of its packed parts |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.checkpoint.quantized import layouts as layouts
    from kvad.checkpoint.quantized import scheme as scheme
    from kvad.checkpoint.quantized import tensors as tensors
    from kvad.checkpoint.quantized.scheme import QuantizationScheme as QuantizationScheme
    from kvad.checkpoint.quantized.scheme import read_scheme as read_scheme
    from kvad.checkpoint.quantized.tensors import DequantizedTensors as DequantizedTensors

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
