"""ModelRunner, the program of the native kernels, and the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.engine.execution.draft_model import DraftModel as DraftModel
    from kvad.engine.execution.fused_decoder import describe_gpu as describe_gpu
    from kvad.engine.execution.grammar import GrammarCompiler as GrammarCompiler
    from kvad.engine.execution.model_runner import ManagedCache as ManagedCache
    from kvad.engine.execution.model_runner import ModelRunner as ModelRunner
    from kvad.engine.execution.native_program import KernelSupport as KernelSupport
    from kvad.engine.execution.native_program import kernel_support as kernel_support
    from kvad.engine.execution.sampler import NONFINITE_ERROR as NONFINITE_ERROR
    from kvad.engine.execution.sampler import DeviceTokens as DeviceTokens
    from kvad.engine.execution.sampler import pool_outputs as pool_outputs
    from kvad.engine.execution.sampler import sample_on_device as sample_on_device
    from kvad.engine.execution.sampler import sample_outputs as sample_outputs

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
