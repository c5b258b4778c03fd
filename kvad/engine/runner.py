"""From a plan to logits: build the step's tensors, apply the moves, run the model once.

Everything a step needs is built here from the plan's integers; the model sees tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvad import config as cfg
from kvad.engine.scheduler import Plan
from kvad.model.positions import depends_on_limit, rope_regime
from kvad.model.transformer import Transformer
from kvad.step import EMPTY_BLOCK, Lane, Memory, Moves, Place, Step

__all__ = ["Cache", "Runner", "build_step"]


class Cache(Memory, Protocol):
    """A memory that a ledger moves: :class:`kvad.cache.memory.Memory`, or a stand-in for it."""

    def apply(self, moves: Moves) -> None: ...


class Runner:
    """Runs plans on one model and one cache."""

    def __init__(self, model: Transformer, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.device = model.embed.tokens.weight.device
        self._with_limits = any(
            isinstance(layer.mixer.position, cfg.Rope) and depends_on_limit(layer.mixer.position)
            for layer in model.config.decoder.kinds.values()
        )

    def regime(self, limit: int) -> str:
        """Names the rotary regime of a row that may reach ``limit``: rows of other regimes share no blocks."""
        kinds = self.model.config.decoder.kinds
        ropes = [layer.mixer.position for layer in kinds.values() if isinstance(layer.mixer.position, cfg.Rope)]
        return ",".join(str(rope_regime(rope, limit)) for rope in ropes)

    @torch.inference_mode()
    def run(self, plan: Plan) -> Tensor:
        """Logits [N, V] of the plan's wanted positions, in the order of its work."""
        self.cache.apply(plan.placed.moves)
        step = build_step(plan, self.device, with_limits=self._with_limits)
        hidden = self.model(step, self.cache)
        return self.model.logits(hidden, step.wanted)


def build_step(plan: Plan, device: torch.device, *, with_limits: bool = False) -> Step:
    """The plan's integers as tensors.  ``limits`` only where the model's rotary regime asks for them."""
    tokens: list[int] = []
    positions: list[int] = []
    limits: list[int] = []
    wanted: list[int] = []
    for work in plan.work:
        end = work.start + work.count
        wanted.extend(len(tokens) + offset for offset in work.wanted)
        tokens.extend(work.row.tokens[work.start : end])
        positions.extend(range(work.start, end))
        if with_limits:
            limits.extend([work.row.limit] * work.count)
    places = tuple(
        Place(_integers(slots, device), _tables(plan.lanes, tables, device))
        for slots, tables in zip(plan.placed.slots, plan.placed.tables, strict=True)
    )
    return Step(
        tokens=_integers(tokens, device),
        positions=_integers(positions, device),
        lanes=plan.lanes,
        wanted=_integers(wanted, device),
        limits=_integers(limits, device) if with_limits else None,
        places=places,
    )


def _integers(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)


def _tables(lanes: Sequence[Lane], tables: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """One [rows, P] per lane, padded with the empty block to its longest row."""
    out, start = [], 0
    for lane in lanes:
        rows = tables[start : start + lane.rows]
        start += lane.rows
        table = np.full((lane.rows, max(map(len, rows))), EMPTY_BLOCK, dtype=np.int64)
        for i, blocks in enumerate(rows):
            table[i, : len(blocks)] = blocks
        out.append(torch.from_numpy(table).to(device))
    return tuple(out)
