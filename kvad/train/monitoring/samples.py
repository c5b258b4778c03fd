"""Greedy samples during training, without a cache (``train`` must not import it)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvad.checkpoint import GenerationConfig
from kvad.model import NoCache, Transformer
from kvad.model_input import ModelInput, SubBatch


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
        encoder_input = _model_input([sources[row] for row in live], device)
        model_input = _model_input(rows, device)._replace(encoder_input=encoder_input)
        logits = model.logits(model(model_input, no_cache), model_input.logit_indices)
        logits[:, list(generation.suppress_tokens)] = -torch.inf
        chosen = dict(zip(live, logits.argmax(dim=-1).tolist(), strict=True))
        live = [row for row in live if chosen[row] not in generation.eos_token_ids]
        for row in live:
            outputs[row].append(chosen[row])
        live = [row for row in live if len(outputs[row]) < max_tokens]
    return outputs


def _model_input(rows: Sequence[Sequence[int]], device: torch.device) -> ModelInput:
    """Build rows of any lengths, one sub-batch each, with logits at the last token of each."""

    def flat(lists: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([value for values in lists for value in values], dtype=torch.int64, device=device)

    lengths = [len(row) for row in rows]
    ends = torch.tensor(lengths, device=device).cumsum(0) - 1
    sub_batches = tuple(SubBatch(1, length, length) for length in lengths)
    return ModelInput(flat(rows), flat([range(length) for length in lengths]), sub_batches, ends)
