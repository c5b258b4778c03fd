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
from kvad.model import NoCache, Transformer
from kvad.train import data
from kvad.train.config import ObjectiveConfig, RunConfig
from kvad.train.data import Batch, PairDataset, TokenStore
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective, logit_chunks
from kvad.train.objectives.masked_lm import TRAIN_STREAM, row_rng


def sampling_rate(options: ObjectiveConfig, steps: int, step: int) -> float:
    """Of the tokens that a decoder reads in optimizer step ``step`` (from 0), those that are its own."""
    through = min(1.0, step / steps)
    rise = {
        "linear": through,
        "exponential": 1 - math.pow(0.01, through),
        "sigmoid": 1 / (1 + math.exp(-10 * (through - 0.5))),
    }[options.scheduled_sampling_schedule]
    return options.scheduled_sampling * rise


class SampledPairDataset(PairDataset):
    """Pairs of which some places of the decoder are drawn.  ConfigError where nobody says over how many steps."""

    def __init__(
        self,
        store: TokenStore,
        config: RunConfig,
        held: int,
        pad: int,
        parts: Sequence[data.document_dataset.MixtureSource] = (),
        vocab: int | None = None,
    ) -> None:
        super().__init__(store, config, held, pad, parts, vocab)
        if not (config.data.reset_positions and config.data.isolate_documents):
            name = "isolate" if config.data.reset_positions else "reset"
            raise ConfigError(f"data.{name}: sampling must know where each target of a row begins", "leave it out")
        self._options, self._seed = config.objective, config.train.seed
        steps = config.objective.scheduled_sampling_steps or config.train.last_step
        if steps is None:
            raise ConfigError(
                "objective.scheduled_sampling_steps is missing: a run that only the clock ends has no last step",
                "say in how many steps the share of sampled tokens is to rise",
            )
        self._steps = steps
        self._step_rows = config.train.batch_size * config.train.gradient_accumulation_steps

    def micro_batches(self, step: int) -> list[Batch]:
        share, number, drawn = sampling_rate(self._options, self._steps, step), step * self._step_rows, []
        for batch in super().micro_batches(step):
            (lane,) = batch.model_input.sub_batches
            random = np.stack(
                [
                    row_rng(self._seed, TRAIN_STREAM, number + row).random(lane.num_new_tokens)
                    for row in range(lane.num_seqs)
                ]
            )
            number += lane.num_seqs
            chosen = torch.from_numpy(random.reshape(-1) < share).to(batch.model_input.token_ids.device)
            inside = batch.model_input.positions > 0
            if batch.model_input.document_ids is not None:  # else every row is one pair, without padding
                inside &= batch.model_input.document_ids >= 0
            drawn.append(batch._replace(sampled_indices=(chosen & inside).nonzero().view(-1)))
        return drawn


class ScheduledSamplingObjective(CrossEntropyObjective):
    """Cross entropy of targets whose decoder reads some of its own tokens; it is judged by teacher forcing."""

    def __init__(self, model: Transformer, autocast: Autocast, smoothing: float = 0.0) -> None:
        super().__init__(model, autocast, smoothing)
        self._first = _FirstPass(model, model.config, autocast)

    def accumulate_gradients(self, batch: Batch, total: float) -> float:
        return super().accumulate_gradients(self._first.mixed(batch), total)


class _FirstPass:
    def __init__(self, model: Transformer, config: ModelConfig, autocast: Autocast) -> None:
        self._model, self._memory, self._autocast = model, NoCache(config), autocast

    @torch.no_grad()
    def mixed(self, batch: Batch) -> Batch:
        """The batch with the model's own tokens at the places that were drawn."""
        if batch.sampled_indices is None or not len(batch.sampled_indices):
            return batch
        with self._autocast():
            hidden = self._model(batch.model_input, self._memory)
        tokens = batch.model_input.token_ids.clone()
        tokens[batch.sampled_indices] = self._likeliest(hidden, batch.sampled_indices - 1)
        return batch._replace(model_input=batch.model_input._replace(token_ids=tokens), sampled_indices=None)

    def _likeliest(self, hidden: Tensor, at: Tensor) -> Tensor:
        """The likeliest token [M] after each of the places ``at`` [M]."""
        return torch.cat([logits.argmax(dim=-1) for logits in logit_chunks(self._model, hidden, at, self._autocast)])
