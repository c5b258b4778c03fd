"""Logits of one whole sequence without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvad.model import NoCache, Transformer, whole_sequences
from kvad.model_input import CacheProtocol


@torch.inference_mode()
def run_uncached(
    model: Transformer, tokens: Sequence[int], cache: CacheProtocol | None = None, source: Sequence[int] | None = None
) -> Tensor:
    """Compute logits [T, V] of ``tokens``, which attend to the encoder input ``source`` if it is given."""
    device = model.token_embedding.device
    model_input = whole_sequences([tokens], device)
    if source is not None:
        model_input = model_input._replace(encoder_input=whole_sequences([source], device))
    return model.logits(model(model_input, cache or NoCache(model.config)), model_input.logit_indices)
