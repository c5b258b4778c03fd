"""Norms, MLPs, mixture of experts and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvad import config as cfg
from kvad import ops
from kvad.model.positions import sinusoidal_embedding


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _quick_gelu(x: Tensor) -> Tensor:
    """Compute x sigmoid(1.702 x) (Hendrycks & Gimpel 2016, sec. 2)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu2,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def dropout_active(rate: float, module: nn.Module) -> bool:
    """Return True if dropout applies now: in training, with gradients."""
    return rate > 0 and module.training and torch.is_grad_enabled()


def apply_dropout(x: Tensor, rate: float, module: nn.Module) -> Tensor:
    """Apply dropout to x if it is active, with torch's random numbers."""
    return F.dropout(x, rate) if dropout_active(rate, module) else x


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019) over the last dim, in at least float32.

    If ``heads`` is given, x is [..., heads, width] and each head has separate weights.
    """

    def __init__(self, width: int, spec: cfg.NormConfig, heads: int | None = None) -> None:
        super().__init__()
        self.spec, self.width, self.num_weights = spec, width, heads is not None
        shape = (width,) if heads is None else (heads, width)
        start = torch.zeros(shape) if spec.unit_offset else torch.ones(shape)
        self.weight = nn.Parameter(start) if spec.weight else None
        self.bias = nn.Parameter(torch.zeros(shape)) if spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        weight = None if self.weight is None else self.weight.to(wide.dtype)
        if weight is not None and self.spec.unit_offset:
            weight = weight + 1.0
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        if self.spec.kind == "layer":
            if self.num_weights:
                return _affine(F.layer_norm(wide, (self.width,), eps=self.spec.eps), weight, bias).to(x.dtype)
            return F.layer_norm(wide, (self.width,), weight, bias, self.spec.eps).to(x.dtype)
        out = F.rms_norm(wide, (self.width,), None if self.num_weights else weight, self.spec.eps)
        return _affine(out, weight if self.num_weights else None, bias).to(x.dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


class PlainMLP(nn.Module):
    """MLP: up, activation, down."""

    def __init__(self, width: int, spec: cfg.PlainMLPConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.activation = ACTIVATIONS[spec.activation]
        self.up = ops.linear.Linear(width, spec.intermediate_size, spec.bias)
        self.down = ops.linear.Linear(spec.intermediate_size, width, spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(apply_dropout(self.activation(self.up(x)), self.dropout, self))
        return out


class GatedMLP(nn.Module):
    """Gated MLP: activation(gate) * up, down."""

    def __init__(self, width: int, spec: cfg.GatedMLPConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.activation = ACTIVATIONS[spec.activation]
        self.gate = ops.linear.Linear(width, spec.intermediate_size, spec.bias)
        self.up = ops.linear.Linear(width, spec.intermediate_size, spec.bias)
        self.down = ops.linear.Linear(spec.intermediate_size, width, spec.bias)
        self.gate_up = ops.linear.PackedLinear()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x, self.gate, self.up)
        out: Tensor = self.down(apply_dropout(self.activation(gate) * up, self.dropout, self))
        return out


class MixtureOfExperts(nn.Module):
    """Mixture of experts (``config.MoEConfig``). Each expert is computed once, for the tokens routed to it."""

    tiles: ops.batch_invariant.TileSizes | None = None

    def __init__(self, width: int, spec: cfg.MoEConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.spec, self.dropout = spec, dropout
        self.activation = ACTIVATIONS[spec.activation] if spec.swiglu_alpha is None else torch.sigmoid
        self.router = ops.linear.Linear(width, spec.num_experts, spec.router_bias)
        self.gate = nn.Parameter(torch.empty(spec.num_experts, spec.intermediate_size, width))
        self.up = nn.Parameter(torch.empty(spec.num_experts, spec.intermediate_size, width))
        self.down = nn.Parameter(torch.empty(spec.num_experts, width, spec.intermediate_size))
        hidden = (spec.num_experts, spec.intermediate_size)
        self.gate_bias = nn.Parameter(torch.zeros(hidden)) if spec.bias else None
        self.up_bias = nn.Parameter(torch.zeros(hidden)) if spec.bias else None
        self.down_bias = nn.Parameter(torch.zeros(spec.num_experts, width)) if spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the experts: x [T, E] -> [T, E]."""
        share, chosen = self.route(x)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, rank = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, token, self._expert(expert, x[token]) * share[token, rank].unsqueeze(-1))
        return out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for x [T, E]: their weights [T, n] and indices [T, n]."""
        logits = self.router(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.spec.router != "softmax_last":
            best, chosen = logits.to(wide).softmax(dim=-1).topk(self.spec.num_experts_per_token, dim=-1)
            total = best.sum(dim=-1, keepdim=True) if self.spec.router == "softmax_first" else 1.0
            return (best / total).to(x.dtype), chosen
        best, chosen = logits.topk(self.spec.num_experts_per_token, dim=-1)
        return best.to(wide).softmax(dim=-1).to(x.dtype), chosen

    def _expert(self, index: int, x: Tensor) -> Tensor:
        def bias(biases: Tensor | None) -> Tensor | None:
            return None if biases is None else biases[index]

        gate = ops.linear.linear(x, self.gate[index], bias(self.gate_bias), self.tiles)
        up = ops.linear.linear(x, self.up[index], bias(self.up_bias), self.tiles)
        if self.spec.swiglu_limit is not None:
            gate, up = gate.clamp(max=self.spec.swiglu_limit), up.clamp(-self.spec.swiglu_limit, self.spec.swiglu_limit)
        if self.spec.swiglu_alpha is not None:
            inner = (up + 1) * gate * self.activation(self.spec.swiglu_alpha * gate)
        else:
            inner = self.activation(gate) * up
        inner = apply_dropout(inner, self.dropout, self)
        return ops.linear.linear(inner, self.down[index], bias(self.down_bias), self.tiles)


def build_mlp(
    width: int, spec: cfg.PlainMLPConfig | cfg.GatedMLPConfig | cfg.MoEConfig, dropout: float = 0.0
) -> PlainMLP | GatedMLP | MixtureOfExperts:
    if isinstance(spec, cfg.MoEConfig):
        return MixtureOfExperts(width, spec, dropout)
    return GatedMLP(width, spec, dropout) if isinstance(spec, cfg.GatedMLPConfig) else PlainMLP(width, spec, dropout)


class Embedding(nn.Module):
    """Token embedding (``config.EmbeddingConfig``); with ``vocab`` None it shares another embedding's table."""

    def __init__(self, width: int, vocab: int | None, spec: cfg.EmbeddingConfig) -> None:
        super().__init__()
        self.spec = spec
        table = width if spec.embedding_size is None else spec.embedding_size
        inner = width if spec.projection == "start" else table  # size at which positions and token types are added
        self.tokens = None if vocab is None else nn.Embedding(vocab, table)
        learned = spec.position if isinstance(spec.position, cfg.LearnedPositionsConfig) else None
        self.positions = None if learned is None else nn.Embedding(learned.num_positions, inner)
        self.token_types = nn.Embedding(spec.num_token_types, inner) if spec.num_token_types else None
        self.norm = Norm(inner, spec.norm) if spec.norm else None
        has_bias = spec.projection == "end"
        self.projection = None if spec.embedding_size is None else ops.linear.Linear(table, width, has_bias)

    def forward(
        self, tokens: Tensor, positions: Tensor, table: Tensor | None = None, token_types: Tensor | None = None
    ) -> Tensor:
        """Embed tokens [T] at positions [T], with token types [T] if any -> [T, E]."""
        if table is None:
            assert self.tokens is not None, "this embedding has no table"
            table = self.tokens.weight
        x = F.embedding(tokens, table)
        if self.spec.scale != 1.0:
            x = x * torch.tensor(self.spec.scale, dtype=x.dtype)  # rounded on the host, with no copy
        if self.projection is not None and self.spec.projection == "start":
            x = self.projection(x)
        if self.norm is not None and self.spec.norm_first:
            x = self.norm(x)
        if isinstance(self.spec.position, cfg.LearnedPositionsConfig):
            assert self.positions is not None
            x = x + self.positions(positions + self.spec.position.offset)
        elif isinstance(self.spec.position, cfg.SinusoidalPositionsConfig):
            x = x + sinusoidal_embedding(positions, x.shape[-1], self.spec.position, x.dtype)
        if self.token_types is not None:
            x = x + (self.token_types.weight[0] if token_types is None else self.token_types(token_types))
        if self.norm is not None and not self.spec.norm_first:
            x = self.norm(x)
        return x if self.projection is None or self.spec.projection == "start" else self.projection(x)
