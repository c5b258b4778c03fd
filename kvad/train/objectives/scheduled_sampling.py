"""Scheduled sampling (Bengio et al. 2015) in two passes (Mihaylova & Martins 2019).

With teacher forcing a decoder reads only correct tokens and never its own mistakes. Here a share of its inputs are its
own predictions: a first pass, without gradient, reads the correct tokens; at drawn positions the input becomes the most
likely token of the position before; the second pass learns from that. Targets stay unchanged::

    right tokens    BOS  t1  t2  t3         predictions       u1  u2  u3  u4
    drawn            .    .   x   .         decoder input     BOS t1  u2  t3        targets   t1 t2 t3 EOS

So a step costs one more forward pass. The share rises from 0 to ``objective.scheduled_sampling`` over the first n
steps; with r = min(1, step / n)::

    linear       r                        exponential  1 - 0.01^r            sigmoid  1 / (1 + exp(-10 (r - 1/2)))

Positions are drawn by (seed, step, row in the step). The first token of a target is never replaced.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from kvad.errors import ConfigError
from kvad.train import data
from kvad.train.config import ObjectiveConfig, RunConfig
from kvad.train.data import Batch
from kvad.train.objectives.cross_entropy import CrossEntropyObjective


def sampling_rate(options: ObjectiveConfig, steps: int, step: int) -> float:
    """Return the share of decoder inputs to sample in optimizer step ``step`` (from 0)."""
    progress = min(1.0, step / steps)
    rise = {
        "linear": progress,
        "exponential": 1 - math.pow(0.01, progress),
        "sigmoid": 1 / (1 + math.exp(-10 * (progress - 0.5))),
    }[options.scheduled_sampling_schedule]
    return options.scheduled_sampling * rise


class ScheduledSampling(data.packed_dataset.RowTransform):
    """Transform that draws decoder positions in training.

    Raises:
        ConfigError: If pairs are not isolated or the number of steps is unknown.
    """

    def __init__(self, config: RunConfig) -> None:
        if not (config.data.reset_positions and config.data.isolate_documents):
            name = "isolate_documents" if config.data.reset_positions else "reset_positions"
            raise ConfigError(f"data.{name}: must be true with objective.scheduled_sampling", "Leave it out.")
        steps = config.objective.scheduled_sampling_steps or config.train.last_step
        if steps is None:
            raise ConfigError(
                "objective.scheduled_sampling_steps: must be given for a run that only the clock ends",
                "Give the number of steps in which the share rises.",
            )
        self._options, self._steps = config.objective, steps

    def __call__(
        self, row: data.collate.PackedRow, random: np.random.Generator, step: int | None
    ) -> data.collate.PackedRow:
        if step is None:
            return row
        share, drawn = sampling_rate(self._options, self._steps, step), list[data.collate.Segment]()
        for segment in row:
            is_sampled = random.random(len(segment.tokens)) < share
            is_sampled[0] = False  # nothing precedes the first token
            drawn.append(segment._replace(is_sampled=is_sampled))
        return drawn


class ScheduledSamplingObjective(CrossEntropyObjective):
    """Cross entropy of targets whose decoder reads some of its own predictions.

    Evaluations use teacher forcing.
    """

    def accumulate_gradients(self, batch: Batch, total: float) -> float:
        return super().accumulate_gradients(self._with_samples(batch), total)

    @torch.no_grad()
    def _with_samples(self, batch: Batch) -> Batch:
        """Return the batch with the model's own tokens at the drawn positions."""
        if batch.sampled_indices is None or not len(batch.sampled_indices):
            return batch
        with self._autocast():
            hidden = self._model(batch.model_input, self._cache)
        before = self.logit_chunks(hidden, batch.sampled_indices - 1)
        tokens = batch.model_input.token_ids.clone()
        tokens[batch.sampled_indices] = torch.cat([logits.argmax(dim=-1) for logits in before])
        return batch._replace(model_input=batch.model_input._replace(token_ids=tokens), sampled_indices=None)
