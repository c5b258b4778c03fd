"""Mixers of tokens without attention: the view provides what earlier tokens left, from a cache or from this step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvad import config as cfg
from kvad import ops
from kvad.model.layers import ACTIVATIONS, Norm, project
from kvad.model_input import CacheView, DeltaInputs, TokenAdapters


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

    def forward(
        self, x: Tensor, view: CacheView, encoding: object = None, adapters: TokenAdapters | None = None
    ) -> Tensor:
        """Apply the layer: x [T, E] -> [T, E]; it has no position encoding."""
        before, after, values = project(self.input, x, adapters).chunk(3, dim=-1)
        return project(self.out, after * self.conv(before * values, view), adapters)


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
        self.decay = _parameter(0.9, 0.999, spec.width, lambda decay: math.log(math.expm1(-math.log(decay))))
        self.gate = ops.linear.Linear(width, spec.width)
        self.input = ops.linear.Linear(width, spec.width)
        self.conv = ChannelConvolution(spec.width, spec.kernel_size, bias=True)
        self.input_gate = BlockLinear(spec.width, spec.num_blocks)
        self.decay_gate = BlockLinear(spec.width, spec.num_blocks)
        self.out = ops.linear.Linear(spec.width, width)

    def forward(
        self, x: Tensor, view: CacheView, encoding: object = None, adapters: TokenAdapters | None = None
    ) -> Tensor:
        """Apply the layer: x [T, E] -> [T, E]; it has no position encoding."""
        inputs = self.conv(project(self.input, x, adapters), view)
        wide = torch.promote_types(x.dtype, torch.float32)
        gates = torch.sigmoid(self.decay_gate(inputs)).to(wide)
        log_decay = -8.0 * gates * F.softplus(self.decay.to(wide))
        gated = inputs * torch.sigmoid(self.input_gate(inputs))
        states = view.recur(gated.to(wide), log_decay).to(x.dtype)
        return project(self.out, self.activation(project(self.gate, x, adapters)) * states, adapters)


class GatedDelta(nn.Module):
    """Gated DeltaNet (``config.GatedDeltaConfig``)."""

    def __init__(self, spec: cfg.GatedDeltaConfig, width: int) -> None:
        super().__init__()
        self.spec, self.activation = spec, ACTIVATIONS[spec.activation]
        keys, values, heads = spec.keys_size, spec.values_size, spec.num_value_heads
        self.q, self.k = (ops.linear.Linear(width, keys, bias=False) for _ in range(2))
        self.v, self.gate = (ops.linear.Linear(width, values, bias=False) for _ in range(2))
        self.beta, self.decay = (ops.linear.Linear(width, heads, bias=False) for _ in range(2))
        self.conv = ChannelConvolution(2 * keys + values, spec.kernel_size, bias=False)
        self.decay_bias = nn.Parameter(torch.ones(heads))
        self.log_rate = _parameter(1.0, 16.0, heads, math.log)
        self.norm = Norm(spec.value_dim, cfg.NormConfig(eps=spec.norm_eps))
        self.out = ops.linear.Linear(values, width, bias=False)

    def forward(
        self, x: Tensor, view: CacheView, encoding: object = None, adapters: TokenAdapters | None = None
    ) -> Tensor:
        """Apply the layer: x [T, E] -> [T, E]; it has no position encoding."""
        states = self.norm(view.delta(self.delta_inputs(x, view, adapters)))
        gate = F.silu(project(self.gate, x, adapters).to(states.dtype)).view_as(states)
        return project(self.out, (states * gate).to(x.dtype).flatten(-2), adapters)

    def delta_inputs(self, x: Tensor, view: CacheView, adapters: TokenAdapters | None = None) -> DeltaInputs:
        """Convolve and normalize x [T, E]."""
        spec, wide = self.spec, torch.promote_types(x.dtype, torch.float32)
        q, k, v = (project(layer, x, adapters) for layer in (self.q, self.k, self.v))
        mixed = self.activation(self.conv(torch.cat((q, k, v), dim=-1), view)).to(wide)
        q, k, v = mixed.split((spec.keys_size, spec.keys_size, spec.values_size), dim=-1)
        q, k = (_unit(part.unflatten(-1, (spec.num_key_heads, spec.key_dim))) for part in (q, k))
        rate = self.log_rate.to(wide).exp() * F.softplus(
            project(self.decay, x, adapters).to(wide) + self.decay_bias.to(wide)
        )
        beta = torch.sigmoid(project(self.beta, x, adapters).to(wide))
        return DeltaInputs(q * spec.key_dim**-0.5, k, v.unflatten(-1, (spec.num_value_heads, -1)), -rate, beta)


def _parameter(first: float, last: float, count: int, function: Callable[[float], float]) -> nn.Parameter:
    """Build a parameter [count] of a function of evenly spaced numbers.

    Without functions of tensors: on the meta device, where models are built to be loaded, they import for seconds.
    """
    step = (last - first) / max(1, count - 1)
    return nn.Parameter(torch.tensor([function(first + step * index) for index in range(count)]))


def _unit(x: Tensor) -> Tensor:
    """Scale x [..., D] to length one."""
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


def build_recurrent(spec: cfg.RecurrentMixer, width: int) -> ShortConv | GatedRecurrence | GatedDelta:
    """Build a mixer without attention."""
    if isinstance(spec, cfg.ShortConvConfig):
        return ShortConv(spec, width)
    if isinstance(spec, cfg.GatedDeltaConfig):
        return GatedDelta(spec, width)
    assert isinstance(spec, cfg.GatedRecurrenceConfig)
    return GatedRecurrence(spec, width)
