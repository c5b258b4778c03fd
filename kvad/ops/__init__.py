"""Tensor functions; the only package that chooses kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.ops import attention as attention
    from kvad.ops import batch_invariant as batch_invariant
    from kvad.ops import block_matrix as block_matrix
    from kvad.ops import cross_entropy as cross_entropy
    from kvad.ops import gpu as gpu
    from kvad.ops import linear as linear
    from kvad.ops import merge as merge
    from kvad.ops import native as native
    from kvad.ops import position_bias as position_bias
    from kvad.ops import quantize as quantize
    from kvad.ops import quantized_linear as quantized_linear
    from kvad.ops import recurrence as recurrence
    from kvad.ops import rotary as rotary
    from kvad.ops import runtime as runtime
    from kvad.ops import sub_batch as sub_batch
    from kvad.ops import triton as triton

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
