"""CPU kernels in C++, called once per step: operations over a model's stack, the cache's tensors and a step's input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.ops.native import library as library
    from kvad.ops.native import packed_store as packed_store
    from kvad.ops.native.library import Adapter as Adapter
    from kvad.ops.native.library import Experts as Experts
    from kvad.ops.native.library import FileMappings as FileMappings
    from kvad.ops.native.library import GroupInput as GroupInput
    from kvad.ops.native.library import Library as Library
    from kvad.ops.native.library import LoraTerm as LoraTerm
    from kvad.ops.native.library import Op as Op
    from kvad.ops.native.library import PackedWeights as PackedWeights
    from kvad.ops.native.library import Program as Program
    from kvad.ops.native.library import StepInput as StepInput
    from kvad.ops.native.library import Store as Store
    from kvad.ops.native.library import SubBatchTable as SubBatchTable
    from kvad.ops.native.library import load as load
    from kvad.ops.native.packed_store import PackedStore as PackedStore
    from kvad.ops.native.packed_store import Verification as Verification
    from kvad.ops.native.packed_store import WeightFile as WeightFile

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
