"""Products with a weight matrix, [.., in] x [out, in] -> [.., out]: the one place where their kernel is chosen.

One row is special on a CPU.  torch gives it to MKL's matrix-vector product, which reads the weights with one thread,
however many there are; as a batch of products, one per thread with a share of the output features, every thread reads.
Measured on two cores of a Zen 4 (``dev/LOG.md``): 9 -> 24 GB/s for [704, 256], 9 -> 33 for [4096, 256], in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Linear", "linear"]

SMALLEST = 1 << 15  # weights; below, starting the threads costs more than they save


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [.., in], weight [out, in], bias [out] -> [.., out]."""
    parts = _parts(x, weight)
    if parts == 1:
        return F.linear(x, weight, bias)
    shares = weight.view(parts, -1, weight.shape[1]).transpose(1, 2)
    out = torch.bmm(x.reshape(1, 1, -1).expand(parts, 1, -1), shares).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def _parts(x: Tensor, weight: Tensor) -> int:
    """Into how many shares the output features are cut: 1 = not at all."""
    one_row = x.numel() == x.shape[-1]
    if not one_row or x.device.type != "cpu" or weight.numel() < SMALLEST or torch.is_grad_enabled():
        return 1
    if x.dtype not in (torch.float32, torch.float64) or not weight.is_contiguous():
        return 1
    threads = torch.get_num_threads()
    return threads if weight.shape[0] % threads == 0 else 1


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
