"""Position encodings as functions of positions and a config.

Sinusoidal embeddings (Vaswani et al. 2017, sec. 3.5), RoPE frequencies with their scalings (Su et al. 2021; linear,
dynamic NTK, Llama 3, YaRN, LongRoPE) and ALiBi slopes (Press et al. 2021).

Dynamic and longrope scaling have two regimes: a sequence of at most ``original_max_seq_len`` tokens has the frequencies
of that length, a longer one those of the model's maximum length. Its other tokens decide, never how many may follow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvad import config as cfg


def sinusoidal_embedding(
    positions: Tensor, width: int, spec: cfg.SinusoidalPositionsConfig, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Compute sinusoidal embeddings [T, width] of positions [T].

    ``interleaved``: PE(p, 2i) = sin(p / base^(2i/width)), PE(p, 2i+1) = cos of the same.  ``concat`` puts all sines
    before all cosines; ``fairseq`` likewise with base^(i/(width/2 - 1)).
    """
    half = width // 2
    index = torch.arange(half, dtype=torch.float64, device=positions.device)
    exponent = index / (half - 1) if spec.form == "fairseq" else 2 * index / width
    angle = (positions + spec.offset).to(torch.float64).unsqueeze(-1) / torch.pow(spec.base, exponent)
    if spec.form == "interleaved":
        return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2).to(dtype)
    return torch.cat((angle.sin(), angle.cos()), dim=-1).to(dtype)


def alibi_slopes(heads: int) -> list[float]:
    """Return one slope per head: 2^(-8h/n), h = 1..n, if n is a power of two.

    Otherwise: the slopes of the next lower power of two, then every second slope of the next higher one.
    """
    lower = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (i + 1) / lower) for i in range(lower)]
    between = [2.0 ** (-8 * (i + 1) / (2 * lower)) for i in range(0, 2 * lower, 2)]
    return (slopes + between)[:heads]


def query_scale(spec: cfg.QueryScalingConfig, positions: Tensor) -> Tensor:
    """Compute the factor [T] of queries at positions [T] (``config.QueryScalingConfig``), in float64."""
    periods = torch.div(positions, spec.original_max_seq_len, rounding_mode="floor")
    return 1 + spec.beta * torch.log1p(periods.to(torch.float64))


def short_regime_len(rope: cfg.RopeConfig, max_seq_len: int) -> int | None:
    """Return the number of tokens beyond which a sequence has other frequencies; None if it never has.

    Args:
        rope: The encoding.
        max_seq_len: The model's maximum length.
    """
    if not isinstance(rope.scaling, (cfg.DynamicScalingConfig, cfg.LongRopeScalingConfig)):
        return None
    original = rope.scaling.original_max_seq_len
    return original if original < max_seq_len else None


def short_regime_lens(stack: cfg.StackConfig, max_seq_len: int) -> tuple[int, ...]:
    """Return the distinct ``short_regime_len`` of a stack's layers, ascending; () for most models."""
    mixers = [layer.attention for layer in stack.layer_types.values()]
    ropes = [mixer.position for mixer in mixers if isinstance(mixer, cfg.AttentionConfig)]
    lens = [short_regime_len(rope, max_seq_len) for rope in ropes if isinstance(rope, cfg.RopeConfig)]
    return tuple(sorted({length for length in lens if length is not None}))


def rope_frequencies(rope: cfg.RopeConfig, dim: int, max_seq_len: int) -> Tensor:
    """Return radians per position of each pair, [D_rot/2] in float32, of the regime of ``max_seq_len`` tokens."""
    rotated = int(dim * rope.partial_rotary_factor)
    exponent = torch.arange(0, rotated, 2, dtype=torch.int64).to(torch.float32) / rotated
    scaling = rope.scaling
    theta = rope.theta
    if isinstance(scaling, cfg.DynamicScalingConfig) and max_seq_len > scaling.original_max_seq_len:
        growth = scaling.factor * max_seq_len / scaling.original_max_seq_len - (scaling.factor - 1)
        theta = theta * growth ** (rotated / (rotated - 2))
    frequencies = 1.0 / (theta**exponent)
    if isinstance(scaling, cfg.LinearScalingConfig):
        return frequencies / scaling.factor
    if isinstance(scaling, cfg.ProportionalScalingConfig):
        is_rotated = torch.arange(rotated // 2) < int(scaling.fraction * rotated // 2)
        return frequencies / scaling.factor * is_rotated
    if isinstance(scaling, cfg.Llama3ScalingConfig):
        return _llama3(frequencies, scaling)
    if isinstance(scaling, cfg.YarnScalingConfig):
        return _yarn(theta**exponent, scaling, rope.theta, rotated)
    if isinstance(scaling, cfg.LongRopeScalingConfig):
        factors = scaling.long_factor if max_seq_len > scaling.original_max_seq_len else scaling.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponent)
    return frequencies


def rope_attention_factor(rope: cfg.RopeConfig, max_seq_len: int) -> float:
    """Return the factor of cos and sin; ``max_seq_len`` is the model's, not the sequence's."""
    scaling = rope.scaling
    if isinstance(scaling, cfg.YarnScalingConfig):
        return _yarn_factor(scaling)
    if isinstance(scaling, cfg.LongRopeScalingConfig):
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        growth = scaling.factor if scaling.factor is not None else max_seq_len / scaling.original_max_seq_len
        return 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(scaling.original_max_seq_len))
    return 1.0


def _llama3(frequencies: Tensor, s: cfg.Llama3ScalingConfig) -> Tensor:
    wavelength = 2 * math.pi / frequencies
    smooth = (s.original_max_seq_len / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    between = (1 - smooth) * frequencies / s.factor + smooth * frequencies
    long, short = s.original_max_seq_len / s.low_freq_factor, s.original_max_seq_len / s.high_freq_factor
    scaled = torch.where(wavelength > long, frequencies / s.factor, between)
    return torch.where(wavelength < short, frequencies, scaled)


def _yarn(powers: Tensor, s: cfg.YarnScalingConfig, theta: float, rotated: int) -> Tensor:
    """Compute YaRN's frequencies; ``powers`` is theta^(2i/D).

    The order of operations is that of the reference code, for equal bits: at position 100,000 the last bit of a
    frequency is a hundredth of a radian.
    """

    def dimension(turns: float) -> float:
        return rotated * math.log(s.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    width = high - low if high != low else 0.001
    keep = 1 - ((torch.arange(rotated // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (s.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_factor(s: cfg.YarnScalingConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if s.factor <= 1 else 0.1 * weight * math.log(s.factor) + 1.0

    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return mscale(s.mscale) / mscale(s.mscale_all_dim)
    return mscale(1.0)
