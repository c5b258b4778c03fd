"""How a model's training steps are computed, where [train] asks for another way: ``recompute`` and ``compile``.

Neither is seen in what a model stores or says.  Compiled are the parts between two attentions that are one graph each:
norms, projections of queries, keys and values, MLPs; attention itself has kernels already (``ops/attend.py``).
Evaluations and samples, whose rows have any length, are not compiled.
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
    """Change a model, before its first step.  ConfigError where torch finds no compiler."""
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            stack.checkpoint_activations = train.activation_checkpointing
    if not train.compile:
        return
    why = ops.compile.compile_error(train.device)
    if why is not None:
        raise ConfigError(f"train.compile: torch compiles nothing for {train.device} here: {why}", "leave it out")
    for module in model.modules():
        if isinstance(module, (model_lib.layers.Norm, model_lib.layers.PlainMLP, model_lib.layers.GatedMLP)):
            _compile(module, "forward")
        elif isinstance(module, model_lib.attention.Attention):
            _compile(module, "project")


def check_acceleration(train: TrainConfig) -> None:
    """ConfigError for a run whose model is frozen, where neither would mean anything."""
    for name in ("activation_checkpointing", "compile"):
        if getattr(train, name):
            raise ConfigError(f"train.{name}: means nothing to objective 'compress', whose model is frozen")


def _compile(module: nn.Module, name: str) -> None:
    plain: Callable[..., Any] = getattr(module, name)
    setattr(module, name, _InTraining(module, plain, ops.compile.lazy_compile(plain)))


class _InTraining:
    """A method that is compiled while its module is trained."""

    def __init__(self, module: nn.Module, plain: Callable[..., Any], fast: Callable[..., Any]) -> None:
        self._module, self._plain, self._fast = module, plain, fast

    def __call__(self, *arguments: Any) -> Any:
        return (self._fast if self._module.training else self._plain)(*arguments)
