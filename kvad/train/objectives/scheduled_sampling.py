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
    """Return the share of decoder inputs to sample in optimizer step ``step`` (from 0)."""
    progress = min(1.0, step / steps)
    rise = {
        "linear": progress,
        "exponential": 1 - math.pow(0.01, progress),
        "sigmoid": 1 / (1 + math.exp(-10 * (progress - 0.5))),
    }[options.scheduled_sampling_schedule]
    return options.scheduled_sampling * rise


class SampledPairDataset(PairDataset):
    """Pairs with drawn decoder positions; raises ConfigError if the number of steps is unknown."""

    def __init__(
        self,
        store: TokenStore,
        config: RunConfig,
        num_held_out: int,
        pad: int,
        parts: Sequence[data.document_dataset.MixtureSource] = (),
        vocab: int | None = None,
    ) -> None:
        super().__init__(store, config, num_held_out, pad, parts, vocab)
        if not (config.data.reset_positions and config.data.isolate_documents):
            name = "isolate_documents" if config.data.reset_positions else "reset_positions"
            raise ConfigError(f"data.{name}: must be true with objective.scheduled_sampling", "Leave it out.")
        self._options, self._seed = config.objective, config.train.seed
        steps = config.objective.scheduled_sampling_steps or config.train.last_step
        if steps is None:
            raise ConfigError(
                "objective.scheduled_sampling_steps: must be given for a run that only the clock ends",
                "Give the number of steps in which the share rises.",
            )
        self._steps = steps
        self._step_rows = config.train.batch_size * config.train.gradient_accumulation_steps

    def micro_batches(self, step: int) -> list[Batch]:
        share, number, drawn = sampling_rate(self._options, self._steps, step), step * self._step_rows, []
        for batch in super().micro_batches(step):
            (sub_batch,) = batch.model_input.sub_batches
            random = np.stack(
                [
                    row_rng(self._seed, TRAIN_STREAM, number + row).random(sub_batch.num_new_tokens)
                    for row in range(sub_batch.num_seqs)
                ]
            )
            number += sub_batch.num_seqs
            chosen = torch.from_numpy(random.reshape(-1) < share).to(batch.model_input.token_ids.device)
            inside = batch.model_input.positions > 0
            if batch.model_input.document_ids is not None:  # otherwise every row is one pair without padding
                inside &= batch.model_input.document_ids >= 0
            drawn.append(batch._replace(sampled_indices=(chosen & inside).nonzero().view(-1)))
        return drawn


class ScheduledSamplingObjective(CrossEntropyObjective):
    """Cross entropy of targets whose decoder reads some of its own predictions.

    Evaluations use teacher forcing.
    """

    def __init__(self, model: Transformer, autocast: Autocast, smoothing: float = 0.0) -> None:
        super().__init__(model, autocast, smoothing)
        self._first = _FirstPass(model, model.config, autocast)

    def accumulate_gradients(self, batch: Batch, total: float) -> float:
        return super().accumulate_gradients(self._first.with_samples(batch), total)


class _FirstPass:
    def __init__(self, model: Transformer, config: ModelConfig, autocast: Autocast) -> None:
        self._model, self._no_cache, self._autocast = model, NoCache(config), autocast

    @torch.no_grad()
    def with_samples(self, batch: Batch) -> Batch:
        """Return the batch with the model's own tokens at the drawn positions."""
        if batch.sampled_indices is None or not len(batch.sampled_indices):
            return batch
        with self._autocast():
            hidden = self._model(batch.model_input, self._no_cache)
        tokens = batch.model_input.token_ids.clone()
        tokens[batch.sampled_indices] = self._likeliest(hidden, batch.sampled_indices - 1)
        return batch._replace(model_input=batch.model_input._replace(token_ids=tokens), sampled_indices=None)

    def _likeliest(self, hidden: Tensor, at: Tensor) -> Tensor:
        """Return the most likely token [M] after each of the positions ``at`` [M]."""
        return torch.cat([logits.argmax(dim=-1) for logits in logit_chunks(self._model, hidden, at, self._autocast)])
