"""From a plan to logits: apply the moves, put the plan's integers into the step's static buffers, run the model once.

The model sees tensors only; :meth:`Runner.leaves` is the flat list of all that outlive a step.  It runs eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvad import config as cfg
from kvad.engine.buffers import StepBuffers
from kvad.engine.row import Encoding
from kvad.engine.scheduler import Plan
from kvad.model.heads import pool
from kvad.model.positions import depends_on_limit, rope_regime
from kvad.model.transformer import Transformer
from kvad.step import Memory, Moves, Place, Step

__all__ = ["Cache", "Runner"]


class Cache(Memory, Protocol):
    """A memory that a ledger moves: :class:`kvad.cache.memory.Memory`, or a stand-in for it."""

    def apply(self, moves: Moves) -> None: ...

    def leaves(self) -> list[Tensor]: ...


class Runner:
    """Runs plans on one model and one cache."""

    def __init__(self, model: Transformer, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.device = model.table.device
        encoder = model.config.encoder
        self._sources_have_limits = encoder is not None and _asks_for_limits(encoder)
        self.buffers = StepBuffers(
            self.device, longest=model.config.limit if _asks_for_limits(model.config.stack) else None
        )

    def regime(self, limit: int) -> str:
        """Names the rotary regime of a row that may reach ``limit``: rows of other regimes share no blocks."""
        kinds = self.model.config.stack.kinds
        ropes = [layer.mixer.position for layer in kinds.values() if isinstance(layer.mixer.position, cfg.Rope)]
        return ",".join(str(rope_regime(rope, limit)) for rope in ropes)

    def leaves(self) -> list[Tensor]:
        """Every tensor that a step reads or writes and that outlives it: inputs, cache, weights; none is made anew."""
        return [*self.buffers.leaves(), *self.cache.leaves(), *self.model.leaves()]

    @torch.inference_mode()
    def run(self, plan: Plan) -> Tensor:
        """Logits [N, V] of the plan's wanted positions, in the order of its work."""
        assert plan.encoding is None, "an encoder's step gives no logits: encode it"
        self.cache.apply(plan.placed.moves)
        step = self.buffers.fill(plan)
        hidden = self.model(step, self.cache)
        return self.model.logits(hidden, step.wanted)

    @torch.inference_mode()
    def encode(self, encoding: Encoding) -> tuple[Tensor, Step]:
        """The encoder's output [T, E] and its step; what cross-attention will read of it is written.

        A source's limit, which decides its rotary regime, is its own length: it never grows.
        """
        tokens = [token for row in encoding.rows for token in row.group.source or ()]
        positions = [at for row in encoding.rows for at in range(len(row.group.source or ()))]
        placed = encoding.placed
        places = () if placed is None else tuple(Place(self._integers(slots), ()) for slots in placed.slots)
        where = self._integers(positions)
        nothing = where[:0]
        lengths = [len(row.group.source or ()) for row in encoding.rows] if self._sources_have_limits else []
        limits = self._integers([length for length in lengths for _ in range(length)]) if lengths else None
        source = Step(self._integers(tokens), where, encoding.lanes, nothing, limits=limits, places=places)
        if placed is None:
            return self.model.encode(source), source
        self.cache.apply(placed.moves)
        return self.model(Step(nothing, nothing, (), nothing, source=source), self.cache), source

    @torch.inference_mode()
    def answers(self, hidden: Tensor, step: Step, lengths: Sequence[int], wants: Sequence[str]) -> list[Tensor]:
        """What each row of an encoder's step asks for: the head's answer, or its hidden states pooled."""
        said: dict[str, Sequence[Tensor]] = {}
        if "head" in wants:
            said["head"] = self._head(hidden, step, list(lengths))
        if "mean" in wants:
            said["mean"] = pool(hidden, step.lanes, "mean").unbind(0)
        if "first" in wants:
            said["first"] = pool(hidden, step.lanes, "first").unbind(0)
        return [said[want][number] for number, want in enumerate(wants)]

    def _head(self, hidden: Tensor, step: Step, lengths: list[int]) -> Sequence[Tensor]:
        """Of every token, or of the whole row; the hidden states of an encoder-decoder's source."""
        rows: tuple[Tensor, ...]
        if self.model.decoder is not None:
            rows = hidden.split(lengths)
        elif self.model.config.per_row:
            rows = self.model.rows(hidden, step).unbind(0)
        else:
            rows = self.model.logits(hidden, torch.arange(len(hidden), device=hidden.device)).split(lengths)
        return rows

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _asks_for_limits(stack: cfg.Stack) -> bool:
    """Whether a rotary regime of the stack depends on how long a row may become."""
    positions = [layer.mixer.position for layer in stack.kinds.values()]
    return any(isinstance(position, cfg.Rope) and depends_on_limit(position) for position in positions)
