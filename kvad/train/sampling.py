"""Scheduled sampling (Bengio et al. 2015), in two passes (Mihaylova & Martins 2019, sec. 3.1).

With teacher forcing a decoder reads right tokens only, and never its own mistakes.  Here a share of what it reads is
what the model itself says: a first pass, without gradient, reads the right tokens; where a place was drawn, its token
becomes the likeliest one of the place before; the second pass learns from that.  The targets stay::

    right tokens    BOS  t1  t2  t3         the model says    u1  u2  u3  u4
    drawn            .    .   x   .         it reads          BOS t1  u2  t3        targets   t1 t2 t3 EOS

So a step costs one forward pass more.  The share rises from 0 to ``objective.sampling`` over the first n steps; with
r = min(1, step / n)::

    linear       r                        exponential  1 - 0.01^r            sigmoid  1 / (1 + exp(-10 (r - 1/2)))

Places are drawn by (seed, step, row in the step).  The token that opens a target is never another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvad.config import ModelConfig
from kvad.errors import ConfigError
from kvad.model.fresh import Fresh
from kvad.model.transformer import Transformer
from kvad.train.config import ObjectiveConfig, RunConfig
from kvad.train.data import Batch, Part
from kvad.train.masking import TRAINING, draws
from kvad.train.objective import Autocast, NextToken, slices
from kvad.train.pair_data import PairData
from kvad.train.store import TokenStore

__all__ = ["SampledPairs", "Sampling", "share_of"]


def share_of(options: ObjectiveConfig, steps: int, step: int) -> float:
    """Of the tokens that a decoder reads in optimizer step ``step`` (from 0), those that are its own."""
    through = min(1.0, step / steps)
    rise = {
        "linear": through,
        "exponential": 1 - math.pow(0.01, through),
        "sigmoid": 1 / (1 + math.exp(-10 * (through - 0.5))),
    }[options.sampling_schedule]
    return options.sampling * rise


class SampledPairs(PairData):
    """Pairs of which some places of the decoder are drawn.  ConfigError where nobody says over how many steps."""

    def __init__(
        self,
        store: TokenStore,
        config: RunConfig,
        held: int,
        pad: int,
        parts: Sequence[Part] = (),
        vocab: int | None = None,
    ) -> None:
        super().__init__(store, config, held, pad, parts, vocab)
        if not (config.data.reset and config.data.isolate):
            name = "isolate" if config.data.reset else "reset"
            raise ConfigError(f"data.{name}: sampling must know where each target of a row begins", "leave it out")
        self._options, self._seed = config.objective, config.train.seed
        steps = config.objective.sampling_steps or config.train.last_step
        if steps is None:
            raise ConfigError(
                "objective.sampling_steps is missing: a run that only the clock ends has no last step",
                "say in how many steps the share of sampled tokens is to rise",
            )
        self._steps = steps
        self._step_rows = config.train.batch * config.train.accumulate

    def micro_batches(self, step: int) -> list[Batch]:
        share, number, drawn = share_of(self._options, self._steps, step), step * self._step_rows, []
        for batch in super().micro_batches(step):
            (lane,) = batch.step.lanes
            random = np.stack([draws(self._seed, TRAINING, number + row).random(lane.new) for row in range(lane.rows)])
            number += lane.rows
            chosen = torch.from_numpy(random.reshape(-1) < share).to(batch.step.tokens.device)
            inside = batch.step.positions > 0
            if batch.step.documents is not None:  # else every row is one pair, without padding
                inside &= batch.step.documents >= 0
            drawn.append(batch._replace(mixed=(chosen & inside).nonzero().view(-1)))
        return drawn


class Sampling(NextToken):
    """Cross entropy of targets whose decoder reads some of its own tokens; it is judged by teacher forcing."""

    def __init__(self, model: Transformer, autocast: Autocast, smoothing: float = 0.0) -> None:
        super().__init__(model, autocast, smoothing)
        self._first = _FirstPass(model, model.config, autocast)

    def backward(self, batch: Batch, total: float) -> float:
        return super().backward(self._first.mixed(batch), total)


class _FirstPass:
    def __init__(self, model: Transformer, config: ModelConfig, autocast: Autocast) -> None:
        self._model, self._memory, self._autocast = model, Fresh(config), autocast

    @torch.no_grad()
    def mixed(self, batch: Batch) -> Batch:
        """The batch with the model's own tokens at the places that were drawn."""
        if batch.mixed is None or not len(batch.mixed):
            return batch
        with self._autocast():
            hidden = self._model(batch.step, self._memory)
        tokens = batch.step.tokens.clone()
        tokens[batch.mixed] = self._likeliest(hidden, batch.mixed - 1)
        return batch._replace(step=batch.step._replace(tokens=tokens), mixed=None)

    def _likeliest(self, hidden: Tensor, at: Tensor) -> Tensor:
        """The likeliest token [M] after each of the places ``at`` [M]."""
        return torch.cat([logits.argmax(dim=-1) for logits in slices(self._model, hidden, at, self._autocast)])
