"""What a model makes of a few sources while it is trained: greedy, and without a cache (``train`` knows none)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvad.checkpoint import GenerationConfig
from kvad.model import NoCache, Transformer
from kvad.model_input import ModelInput, SubBatch


@torch.no_grad()
def greedy_decode(
    model: Transformer, sources: Sequence[Sequence[int]], generation: GenerationConfig, most: int
) -> list[list[int]]:
    """The likeliest token after the likeliest token of each target, ``most`` at most; what ends it is left out.

    All sources run together, each in a lane of its own; every token is computed from the start again.
    """
    assert generation.decoder_start_token_id is not None
    found: list[list[int]] = [[] for _ in sources]
    live = list(range(len(sources)))
    device, memory = next(model.parameters()).device, NoCache(model.config)
    while live and most > 0:
        rows = [[generation.decoder_start_token_id, *found[row]] for row in live]
        step = _step(rows, device)._replace(encoder_input=_step([sources[row] for row in live], device))
        logits = model.logits(model(step, memory), step.logit_indices)
        logits[:, list(generation.suppress_tokens)] = -torch.inf
        chosen = dict(zip(live, logits.argmax(dim=-1).tolist(), strict=True))
        live = [row for row in live if chosen[row] not in generation.eos_token_ids]
        for row in live:
            found[row].append(chosen[row])
        live = [row for row in live if len(found[row]) < most]
    return found


def _step(rows: Sequence[Sequence[int]], device: torch.device) -> ModelInput:
    """Rows of any lengths, a lane each; the last token of each is wanted."""

    def flat(lists: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([value for one in lists for value in one], dtype=torch.int64, device=device)

    lengths = [len(row) for row in rows]
    ends = torch.tensor(lengths, device=device).cumsum(0) - 1
    lanes = tuple(SubBatch(1, length, length) for length in lengths)
    return ModelInput(flat(rows), flat([range(length) for length in lengths]), lanes, ends)
