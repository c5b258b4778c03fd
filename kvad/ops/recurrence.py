"""Causal convolutions and recurrences over the tokens of a sequence, elementwise: equal in any chunks."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_convolution(history: Tensor, kernel: Tensor, document_id: Tensor | None = None) -> Tensor:
    """Convolve each channel: history [R, W - 1 + L, C], kernel [C, W] -> [R, L, C].

    Output t is the sum of ``kernel[:, i] * history[:, t + i]``, the newest input first; its own is ``i = W - 1``.

    Args:
        history: Inputs of the L new tokens and of the W - 1 before them; zeros before the start of a sequence.
        kernel: Weights of each channel, the oldest input first.
        document_id: Documents of the new tokens [R, L], which do not see each other, in a sequence without a past.
    """
    width, length = kernel.shape[1], history.shape[1] - kernel.shape[1] + 1
    out = history[:, width - 1 :] * kernel[:, -1]
    for distance in range(1, width):
        term = history[:, width - 1 - distance : width - 1 - distance + length] * kernel[:, -1 - distance]
        if document_id is not None:
            term = term * _same_document(document_id, distance).unsqueeze(-1)
        out = out + term
    return out


def gated_recurrence(state: Tensor, x: Tensor, log_decay: Tensor, is_first: Tensor) -> Tensor:
    """Compute all states of a recurrence with a decay per channel (De et al. 2024, Griffin, eq. 4) -> [R, L, C].

    Tokens are computed one after the other, so that a state is the same in any chunks, bit for bit.

    Args:
        state: State before the first token [R, C].
        x: Inputs [R, L, C].
        log_decay: Logarithms of the decay [R, L, C], below 0.
        is_first: Tokens [R, L] that begin a sequence or a document: their state is their input.
    """
    first = is_first.unsqueeze(-1)
    decay = log_decay.exp().masked_fill(first, 0)
    inputs = x * (1 - (2 * log_decay).exp()).sqrt().masked_fill(first, 1)
    states = []
    for token in range(x.shape[1]):
        state = decay[:, token] * state + inputs[:, token]
        states.append(state)
    return torch.stack(states, dim=1)


def first_tokens(document_id: Tensor | None, like: Tensor) -> Tensor:
    """Return True for the first token of each sequence of ``like`` [R, L, C] and of each document: [R, L]."""
    is_first = torch.zeros(like.shape[:2], dtype=torch.bool, device=like.device)
    is_first[:, 0] = True
    if document_id is not None:
        is_first[:, 1:] = document_id[:, 1:] != document_id[:, :-1]
    return is_first


def _same_document(document_id: Tensor, distance: int) -> Tensor:
    """Return True [R, L] for tokens whose document began at least ``distance`` tokens before."""
    same = torch.zeros_like(document_id, dtype=torch.bool)
    same[:, distance:] = document_id[:, distance:] == document_id[:, :-distance]
    return same
