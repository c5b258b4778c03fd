"""The parts of a layer that are not attention: norms, MLPs, embeddings and the head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvad import config as cfg
from kvad.config import ModelConfig
from kvad.model.positions import sinusoid
from kvad.ops.linear import Joint, Linear, linear

__all__ = ["ACTIVATIONS", "Embedding", "Gated", "Head", "Norm", "Plain", "make_mlp"]


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu2,
    "silu": F.silu,
}


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019) over the last dimension, in float32 at least."""

    def __init__(self, width: int, spec: cfg.Norm) -> None:
        super().__init__()
        self.spec, self.width = spec, width
        self.weight = nn.Parameter(torch.zeros(width) if spec.unit_offset else torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        weight = self.weight.to(wide.dtype)
        if self.spec.unit_offset:
            weight = weight + 1.0
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        if self.spec.kind == "layer":
            return F.layer_norm(wide, (self.width,), weight, bias, self.spec.eps).to(x.dtype)
        out = F.rms_norm(wide, (self.width,), weight, self.spec.eps)
        return (out if bias is None else out + bias).to(x.dtype)


class Plain(nn.Module):
    def __init__(self, width: int, spec: cfg.Plain) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.up = Linear(width, spec.hidden, spec.bias)
        self.down = Linear(spec.hidden, width, spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


class Gated(nn.Module):
    def __init__(self, width: int, spec: cfg.Gated) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.gate = Linear(width, spec.hidden, spec.bias)
        self.up = Linear(width, spec.hidden, spec.bias)
        self.down = Linear(spec.hidden, width, spec.bias)
        self.gate_up = Joint()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x, self.gate, self.up)
        out: Tensor = self.down(self.activation(gate) * up)
        return out


def make_mlp(width: int, spec: cfg.Plain | cfg.Gated) -> Plain | Gated:
    return Gated(width, spec) if isinstance(spec, cfg.Gated) else Plain(width, spec)


class Embedding(nn.Module):
    """Token ids to vectors: scaled, with absolute positions added and a norm where the config says so."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.scale, self.position = config.embedding_scale, config.position
        self.tokens = nn.Embedding(config.vocab, config.width)
        learned = isinstance(self.position, cfg.LearnedPositions)
        self.positions = nn.Embedding(self.position.size, config.width) if learned else None  # type: ignore[union-attr]
        self.norm = Norm(config.width, config.embedding_norm) if config.embedding_norm else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens, positions [T] -> [T, E]."""
        x: Tensor = self.tokens(tokens)
        if self.scale != 1.0:
            x = x * torch.tensor(self.scale, dtype=x.dtype, device=x.device)
        if isinstance(self.position, cfg.LearnedPositions):
            assert self.positions is not None
            x = x + self.positions(positions + self.position.offset)
        elif isinstance(self.position, cfg.SinusoidalPositions):
            x = x + sinusoid(positions, x.shape[-1], self.position, x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        return x


class Head(nn.Module):
    """Hidden states to logits; a tied head (Press & Wolf 2017) reads the embedding's matrix and owns none."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.spec = config.head
        self.weight = None if config.tie else nn.Parameter(torch.empty(config.vocab, config.width))
        self.bias = nn.Parameter(torch.zeros(config.vocab)) if config.head.bias else None

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """hidden [N, E], embedding [V, E] -> [N, V]."""
        logits = linear(hidden, embedding if self.weight is None else self.weight, self.bias)
        if self.spec.scale != 1.0:
            logits = logits * self.spec.scale
        if self.spec.softcap is not None:
            logits = self.spec.softcap * torch.tanh(logits / self.spec.softcap)
        return logits
