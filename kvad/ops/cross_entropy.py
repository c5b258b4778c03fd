"""Cross entropy of a product with a large matrix, and its gradient, a slice of positions at a time.

    logits = scale (x W^T + b)        loss = sum over positions of -(1 - e) log p(target) - e / C sum over c of log p(c)

The gradient of the logits is p minus what was asked, so it is made in their own place while they are there, and goes on
into x, W and b at once: of [N, C] only slices exist, two at a time, W is brought to a lower precision once, and its
gradient is summed where it lies.  (As in Wijmans et al. 2024, sec. 4, without a kernel of its own.)
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # elements of [positions, C] made at a time


@torch.no_grad()
def cross_entropy_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    total: float,
    *,
    scale: float = 1.0,
    smoothing: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[float, Tensor]:
    """x [N, E], weight [C, E], bias [C], targets [N] -> the summed loss (nats), and x's gradient of loss / total.

    Gradients of weight and bias are added to their ``grad``, where they need one.  ``dtype``: of the three products
    (None: that of x); everything else is in float32 at least.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    narrow, low, factor = x.to(dtype), weight.to(dtype), scale / total
    gradient, summed = torch.empty_like(x), torch.zeros((), dtype=torch.float64, device=x.device)
    for at in _slices(x.shape[0], weight.shape[0]):
        some, asked = narrow[at], targets[at].unsqueeze(1)
        logits = some @ low.mT if bias is None else torch.addmm(bias.to(some.dtype), some, low.mT)
        chances = (logits.to(wide) if scale == 1.0 else logits.to(wide) * scale).log_softmax(dim=-1)
        del logits
        summed -= (1 - smoothing) * chances.gather(1, asked).sum(dtype=torch.float64)
        if smoothing:
            summed -= smoothing / weight.shape[0] * chances.sum(dtype=torch.float64)
        chances.exp_()
        if smoothing:
            chances -= smoothing / weight.shape[0]
        chances.scatter_add_(1, asked, chances.new_full(asked.shape, smoothing - 1))
        error = chances if some.dtype == wide else (chances * factor).to(some.dtype)  # scaled before it is rounded
        gradient[at] = error @ low
        _add(weight, error.mT, some, factor if error is chances else 1.0)
        if bias is not None and bias.requires_grad:
            _grad(bias).add_(error.sum(dim=0, dtype=wide), alpha=factor if error is chances else 1.0)
    if narrow.dtype == wide:
        gradient *= factor
    return float(summed), gradient


def _slices(count: int, width: int) -> list[slice]:
    """As few as SLICE allows, and about equally long."""
    parts = max(1, -(-count // max(1, CHUNK_ELEMENTS // width)))
    cuts = [count * number // parts for number in range(parts + 1)]
    return [slice(low, high) for low, high in pairwise(cuts)]


def _add(weight: Tensor, error: Tensor, x: Tensor, factor: float) -> None:
    """Add factor x error [C, n] x [n, E] to the gradient of a weight [C, E]."""
    if not weight.requires_grad:
        return
    if error.dtype != weight.dtype:
        _grad(weight).add_(error @ x)
    elif weight.grad is None:
        weight.grad = torch.empty_like(weight).addmm_(error, x, beta=0.0, alpha=factor)  # beta 0: it is not read
    else:
        weight.grad.addmm_(error, x, alpha=factor)


def _grad(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
