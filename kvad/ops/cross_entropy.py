"""Cross entropy of a linear layer with many outputs, and its gradient, in slices of positions.

    logits = scale (x W^T + b)        loss = sum over positions of -(1 - e) log p(target) - e / C sum over c of log p(c)

The gradient of the logits is p minus the target distribution. It is computed in place and propagated to x, W and b at
once: only slices of [N, C] exist, two at a time; W is converted to a lower precision once, and its gradient is summed
in place. (As in Wijmans et al. 2024, sec. 4, without a custom kernel.)
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # elements of [positions, C] computed at a time


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
    """Compute the summed loss in nats and the gradient of loss / total with respect to x [N, E].

    The gradients of weight [C, E] and bias [C] are added to their ``grad`` if they require one; targets are [N].
    ``dtype`` is that of the three products, by default that of x; the rest is in at least float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    narrow, low, factor = x.to(dtype), weight.to(dtype), scale / total
    gradient, summed = torch.empty_like(x), torch.zeros((), dtype=torch.float64, device=x.device)
    for at in _slices(x.shape[0], weight.shape[0]):
        rows, target = narrow[at], targets[at].unsqueeze(1)
        logits = rows @ low.mT if bias is None else torch.addmm(bias.to(rows.dtype), rows, low.mT)
        probs = (logits.to(wide) if scale == 1.0 else logits.to(wide) * scale).log_softmax(dim=-1)
        del logits
        summed -= (1 - smoothing) * probs.gather(1, target).sum(dtype=torch.float64)
        if smoothing:
            summed -= smoothing / weight.shape[0] * probs.sum(dtype=torch.float64)
        probs.exp_()
        if smoothing:
            probs -= smoothing / weight.shape[0]
        probs.scatter_add_(1, target, probs.new_full(target.shape, smoothing - 1))
        error = probs if rows.dtype == wide else (probs * factor).to(rows.dtype)  # scaled before it is rounded
        gradient[at] = error @ low
        _add(weight, error.mT, rows, factor if error is probs else 1.0)
        if bias is not None and bias.requires_grad:
            _grad(bias).add_(error.sum(dim=0, dtype=wide), alpha=factor if error is probs else 1.0)
    if narrow.dtype == wide:
        gradient *= factor
    return float(summed), gradient


def _slices(count: int, width: int) -> list[slice]:
    """Split ``count`` positions into as few, about equally long slices as CHUNK_ELEMENTS allows."""
    num_slices = max(1, -(-count // max(1, CHUNK_ELEMENTS // width)))
    bounds = [count * index // num_slices for index in range(num_slices + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]


def _add(weight: Tensor, error: Tensor, x: Tensor, factor: float) -> None:
    """Add factor x error [C, n] x [n, E] to the gradient of a weight [C, E]."""
    if not weight.requires_grad:
        return
    if error.dtype != weight.dtype:
        _grad(weight).add_(error @ x)
    elif weight.grad is None:
        # With beta 0, the uninitialized gradient is not read.
        weight.grad = torch.empty_like(weight).addmm_(error, x, beta=0.0, alpha=factor)
    else:
        weight.grad.addmm_(error, x, alpha=factor)


def _grad(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
