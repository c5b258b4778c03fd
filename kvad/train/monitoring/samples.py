"""Greedy samples during training, without a cache (``train`` must not import it)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvad.checkpoint import GenerationConfig
from kvad.model import NoCache, Transformer, whole_sequences


@torch.no_grad()
def greedy_decode(
    model: Transformer, sources: Sequence[Sequence[int]], generation: GenerationConfig, max_tokens: int
) -> list[list[int]]:
    """Decode the most likely token repeatedly, up to ``max_tokens``; end tokens are left out.

    All sources run together, each in its own sub-batch; every token is recomputed from the start.
    """
    assert generation.decoder_start_token_id is not None
    outputs: list[list[int]] = [[] for _ in sources]
    live = list(range(len(sources)))
    device, no_cache = next(model.parameters()).device, NoCache(model.config)
    while live and max_tokens > 0:
        rows = [[generation.decoder_start_token_id, *outputs[row]] for row in live]
        encoder_input = whole_sequences([sources[row] for row in live], device)
        model_input = whole_sequences(rows, device, last_only=True)._replace(encoder_input=encoder_input)
        logits = model.logits(model(model_input, no_cache), model_input.logit_indices)
        logits[:, list(generation.suppress_tokens)] = -torch.inf
        chosen = dict(zip(live, logits.argmax(dim=-1).tolist(), strict=True))
        live = [row for row in live if chosen[row] not in generation.eos_token_ids]
        for row in live:
            outputs[row].append(chosen[row])
        live = [row for row in live if len(outputs[row]) < max_tokens]
    return outputs
