"""Activation checkpointing and torch.compile for a model's training steps.

Neither changes what a model stores or computes. Only the parts between two attention calls are compiled, because each
of them is one graph: norms, projections of queries, keys and values, and MLPs. Attention itself already has fused
kernels (``ops/attention.py``). Evaluations and samples, whose rows have any length, are not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from kvad import model as model_lib
from kvad import ops
from kvad.errors import ConfigError
from kvad.model import Transformer
from kvad.train.config import TrainConfig


def apply_acceleration(model: Transformer, train: TrainConfig) -> None:
    """Apply [train]'s acceleration options to a model before its first step.

    Raises:
        ConfigError: If torch finds no compiler.
    """
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            stack.checkpoint_activations = train.activation_checkpointing
    if not train.compile:
        return
    reason = ops.compile.compile_error(train.device)
    if reason is not None:
        raise ConfigError(f"train.compile: torch cannot compile for {train.device}: {reason}", "Leave it out.")
    for module in model.modules():
        if isinstance(module, (model_lib.layers.Norm, model_lib.layers.PlainMLP, model_lib.layers.GatedMLP)):
            _compile(module, "forward")
        elif isinstance(module, model_lib.attention.Attention):
            _compile(module, "project")


def _compile(module: nn.Module, name: str) -> None:
    plain: Callable[..., Any] = getattr(module, name)
    setattr(module, name, _InTraining(module, plain, ops.compile.lazy_compile(plain)))


class _InTraining:
    """Method that runs compiled while its module is in training mode."""

    def __init__(self, module: nn.Module, plain: Callable[..., Any], fast: Callable[..., Any]) -> None:
        self._module, self._plain, self._fast = module, plain, fast

    def __call__(self, *arguments: Any) -> Any:
        return (self._fast if self._module.training else self._plain)(*arguments)
