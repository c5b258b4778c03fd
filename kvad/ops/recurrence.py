"""Causal convolutions and recurrences over the tokens of a sequence.

Convolutions and recurrences with a decay per channel are elementwise: equal in any chunks. The gated delta rule
multiplies matrices, so its result is equal bit for bit only for chunks of equal size that begin at equal positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvad.model_input import DeltaInputs

DELTA_CHUNK = 64  # tokens of a chunk of the delta rule without a cache


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


def gated_delta_rule(state: Tensor, inputs: DeltaInputs, document: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to one chunk of each sequence -> outputs [R, L, H, Dv], state after the last token.

    Token t changes the state S to ``a S + b k (v - a S^T k)^T`` and reads ``S^T q``. Written as ``a S + k u^T``, the
    changes u of a chunk solve a triangular system (Yang et al. 2024, DeltaNet, sec. 3.2; gated: 2025, sec. 3.3):
    ``u_t = b_t (v_t - A_t S^T k_t - sum of (A_t / A_s) (k_t . k_s) u_s over s < t)``, with A the products of a.

    Args:
        state: State before the chunk [R, H, D, Dv].
        inputs: Of the chunk, [R, L, ...]. A token with k = v = 0, log_decay = 0 and beta = 0 changes nothing.
        document: Number of the token's document within the chunk [R, L]; documents above 0 do not read the state.
    """
    v, beta = inputs.v.transpose(1, 2), inputs.beta.transpose(1, 2).unsqueeze(-1)
    total = inputs.log_decay.transpose(1, 2).cumsum(dim=-1)  # log A, [R, H, L]
    groups = v.shape[1] // inputs.k.shape[2]
    q, k = (x.transpose(1, 2).repeat_interleave(groups, dim=1) for x in (inputs.q, inputs.k))
    is_past = torch.ones(v.shape[2], v.shape[2], dtype=torch.bool, device=v.device).tril()
    from_state = total.exp()
    if document is not None:
        is_past = is_past & (document.unsqueeze(-1) == document.unsqueeze(-2)).unsqueeze(1)
        from_state = from_state.masked_fill((document > 0).unsqueeze(1), 0)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~is_past, -torch.inf).exp()  # [R, H, L, L]
    from_state = from_state.unsqueeze(-1)
    system = beta * (k @ k.mT) * decay
    target = beta * (v - from_state * (k @ state))
    changes = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    outputs = from_state * (q @ state) + ((q @ k.mT) * decay) @ changes
    state = from_state[:, :, -1:] * state + (k * decay[:, :, -1].unsqueeze(-1)).mT @ changes
    return outputs.transpose(1, 2), state


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
