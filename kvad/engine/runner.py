"""From a plan to logits: apply the moves, put the plan's integers into the step's static buffers, run the model once.

The model sees tensors only; :meth:`Runner.leaves` is the flat list of all that outlive a step.  It runs eagerly.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvad import config as cfg
from kvad.engine.buffers import StepBuffers
from kvad.engine.scheduler import Plan
from kvad.model.positions import depends_on_limit, rope_regime
from kvad.model.transformer import Transformer
from kvad.step import Memory, Moves

__all__ = ["Cache", "Runner"]


class Cache(Memory, Protocol):
    """A memory that a ledger moves: :class:`kvad.cache.memory.Memory`, or a stand-in for it."""

    def apply(self, moves: Moves) -> None: ...

    def leaves(self) -> list[Tensor]: ...


class Runner:
    """Runs plans on one model and one cache."""

    def __init__(self, model: Transformer, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.device = model.embed.tokens.weight.device
        with_limits = any(
            isinstance(layer.mixer.position, cfg.Rope) and depends_on_limit(layer.mixer.position)
            for layer in model.config.decoder.kinds.values()
        )
        self.buffers = StepBuffers(self.device, with_limits=with_limits)

    def regime(self, limit: int) -> str:
        """Names the rotary regime of a row that may reach ``limit``: rows of other regimes share no blocks."""
        kinds = self.model.config.decoder.kinds
        ropes = [layer.mixer.position for layer in kinds.values() if isinstance(layer.mixer.position, cfg.Rope)]
        return ",".join(str(rope_regime(rope, limit)) for rope in ropes)

    def leaves(self) -> list[Tensor]:
        """Every tensor that a step reads or writes and that outlives it: inputs, cache, weights; none is made anew."""
        return [*self.buffers.leaves(), *self.cache.leaves(), *self.model.leaves()]

    @torch.inference_mode()
    def run(self, plan: Plan) -> Tensor:
        """Logits [N, V] of the plan's wanted positions, in the order of its work."""
        self.cache.apply(plan.placed.moves)
        step = self.buffers.fill(plan)
        hidden = self.model(step, self.cache)
        return self.model.logits(hidden, step.wanted)
