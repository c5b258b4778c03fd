"""Sequences as the sampler receives them, built without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvad.engine.scheduling.request import SamplingParams
from kvad.engine.scheduling.sequence import Request, RequestMetrics, TokenSequence


def token_sequence(
    params: SamplingParams,
    tokens: Sequence[int],
    num_prompt_tokens: int = 1,
    sample_index: int = 0,
    stop_tokens: frozenset[int] = frozenset(),
    max_len: int = 1 << 62,
) -> TokenSequence:
    """Return a sample with these tokens, the first ``num_prompt_tokens`` of which are its prompt.

    Its seed is 0 unless ``params`` has one.
    """
    params = replace(params, seed=0) if params.uses_seed and params.seed is None else params
    request = Request(0, 0, params, b"", stop_tokens, RequestMetrics(num_prompt_tokens, 0.0))
    seq = TokenSequence(request, sample_index, list(tokens[:num_prompt_tokens]), max_len)
    seq.token_ids = list(tokens)
    return seq
