"""GPU kernels in Triton: attention over block tables, rotation and cache write, norms, products of one row, sampling.

The modules import triton, which a CPU build of torch lacks: check ``support.unavailable_reason`` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.ops.triton import attention as attention
    from kvad.ops.triton import cache_write as cache_write
    from kvad.ops.triton import fused as fused
    from kvad.ops.triton import sampling as sampling
    from kvad.ops.triton import support as support
    from kvad.ops.triton.support import DTYPES as DTYPES
    from kvad.ops.triton.support import PagedStore as PagedStore
    from kvad.ops.triton.support import RMSNorm as RMSNorm
    from kvad.ops.triton.support import unavailable_reason as unavailable_reason
    from kvad.ops.triton.support import unsupported_format as unsupported_format

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
