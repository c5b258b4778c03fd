"""Tensors that both sides rank: functions of their indices, equal on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS, HEADS, KV_HEADS, DIM = 40, 4, 2, 4


def numbers(seed: int, *shape: int) -> Tensor:
    """Return numbers between -2 and 2 of a Lehmer generator."""
    count, state, values = int(torch.tensor(shape).prod()), seed * 7919 + 1, []
    for _ in range(count):
        state = state * 48271 % 2147483647
        values.append(4 * state / 2147483647 - 2)
    return torch.tensor(values, dtype=torch.float64).view(shape)


def keys(seed: int) -> Tensor:
    """Return keys [1, K, n, D]."""
    return numbers(seed, 1, KV_HEADS, TOKENS, DIM)


def attention(seed: int) -> Tensor:
    """Return attention of causal queries over those keys, [1, H, n, n]."""
    queries = numbers(seed + 1000, 1, HEADS, TOKENS, DIM)
    logits = queries @ keys(seed).repeat_interleave(HEADS // KV_HEADS, 1).transpose(-1, -2)
    ahead = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return logits.masked_fill(ahead, -torch.inf).softmax(-1)
