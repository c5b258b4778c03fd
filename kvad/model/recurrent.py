"""Mixers of tokens without attention: the view provides what earlier tokens left, from a cache or from this step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvad import config as cfg
from kvad import ops
from kvad.model.layers import ACTIVATIONS
from kvad.model_input import CacheView


class ChannelConvolution(nn.Module):
    """Parameters of a causal convolution with one kernel per channel: weight [C, W], the oldest input first."""

    def __init__(self, channels: int, kernel_size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: Tensor, view: CacheView) -> Tensor:
        """Convolve x [T, C] along each sequence of the view -> [T, C]."""
        out = view.convolve(x, self.weight.to(x.dtype))
        return out if self.bias is None else out + self.bias.to(x.dtype)


class ShortConv(nn.Module):
    """Gated short convolution (``config.ShortConvConfig``)."""

    def __init__(self, spec: cfg.ShortConvConfig, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.input = ops.linear.Linear(width, 3 * width, spec.bias)
        self.conv = ChannelConvolution(width, spec.kernel_size, spec.bias)
        self.out = ops.linear.Linear(width, width, spec.bias)

    def forward(self, x: Tensor, view: CacheView, encoding: object = None) -> Tensor:
        """Apply the layer: x [T, E] -> [T, E]; it has no position encoding."""
        before, after, values = self.input(x).chunk(3, dim=-1)
        out: Tensor = self.out(after * self.conv(before * values, view))
        return out


class BlockLinear(nn.Module):
    """Linear layer of square blocks: weight [blocks, in, out], bias [blocks, out]."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        size = width // num_blocks
        self.weight = nn.Parameter(torch.empty(num_blocks, size, size))
        self.bias = nn.Parameter(torch.zeros(num_blocks, size))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply each block's share of x [T, C] -> [T, C]."""
        shares = x.unflatten(-1, self.bias.shape).transpose(0, 1)
        out = torch.baddbmm(self.bias.to(x.dtype).unsqueeze(1), shares, self.weight.to(x.dtype))
        return out.transpose(0, 1).flatten(1)


class GatedRecurrence(nn.Module):
    """Recurrent block of Griffin (``config.GatedRecurrenceConfig``)."""

    def __init__(self, spec: cfg.GatedRecurrenceConfig, width: int) -> None:
        super().__init__()
        self.spec, self.activation = spec, ACTIVATIONS[spec.activation]
        # Initial decays between 0.9 and 0.999, as in the paper (sec. 2.4).
        self.decay = nn.Parameter(torch.linspace(0.9, 0.999, spec.width).log().neg().expm1().log())
        self.gate = ops.linear.Linear(width, spec.width)
        self.input = ops.linear.Linear(width, spec.width)
        self.conv = ChannelConvolution(spec.width, spec.kernel_size, bias=True)
        self.input_gate = BlockLinear(spec.width, spec.num_blocks)
        self.decay_gate = BlockLinear(spec.width, spec.num_blocks)
        self.out = ops.linear.Linear(spec.width, width)

    def forward(self, x: Tensor, view: CacheView, encoding: object = None) -> Tensor:
        """Apply the layer: x [T, E] -> [T, E]; it has no position encoding."""
        inputs = self.conv(self.input(x), view)
        wide = torch.promote_types(x.dtype, torch.float32)
        gates = torch.sigmoid(self.decay_gate(inputs)).to(wide)
        log_decay = -8.0 * gates * F.softplus(self.decay.to(wide))
        gated = inputs * torch.sigmoid(self.input_gate(inputs))
        states = view.recur(gated.to(wide), log_decay).to(x.dtype)
        out: Tensor = self.out(self.activation(self.gate(x)) * states)
        return out


def build_recurrent(spec: cfg.ShortConvConfig | cfg.GatedRecurrenceConfig, width: int) -> ShortConv | GatedRecurrence:
    """Build a mixer without attention."""
    return ShortConv(spec, width) if isinstance(spec, cfg.ShortConvConfig) else GatedRecurrence(spec, width)
