"""Norms, MLPs, mixture of experts and embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvad import config as cfg
from kvad import ops
from kvad.model.positions import sinusoidal_embedding
from kvad.model_input import TokenAdapters


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _quick_gelu(x: Tensor) -> Tensor:
    """Compute x sigmoid(1.702 x) (Hendrycks & Gimpel 2016, sec. 2)."""
    return x * torch.sigmoid(1.702 * x)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """Compute xIELU (Huang & Schlag 2024, eq. 9): a_p x^2 + x/2 above 0, a_n (e^x - 1 - x) + x/2 below.

    The slopes are a_p = softplus(alpha_p) and a_n = 1/2 + softplus(alpha_n).
    """
    positive, negative = F.softplus(alpha_p.to(x.dtype)), 0.5 + F.softplus(alpha_n.to(x.dtype))
    below = torch.expm1(x.clamp(max=-1e-6)) - x
    return torch.where(x > 0, positive * x * x, negative * below) + 0.5 * x


def _inverse_softplus(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([math.log(math.expm1(value))]))


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


def project(layer: ops.linear.Linear, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
    """Apply a layer, with the terms of the tokens' adapters, if any: [T, in] -> [T, out]."""
    out: Tensor = layer(x)
    return out if adapters is None else adapters.add(layer, x, out)


def project_together(
    packed: ops.linear.PackedLinear, layers: Sequence[ops.linear.Linear], x: Tensor, adapters: TokenAdapters | None
) -> Sequence[Tensor]:
    """Apply layers with the same input as ``project`` does."""
    outs = packed(x, *layers)
    if adapters is None:
        return outs
    return [adapters.add(layer, x, out) for layer, out in zip(layers, outs, strict=True)]


class RelativeEmbedding(nn.Module):
    """Table of distances of disentangled attention (``config.DisentangledConfig``), and its norm."""

    def __init__(self, width: int, spec: cfg.DisentangledConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * spec.span, width))
        self.norm = None if spec.norm is None else Norm(width, spec.norm)

    def forward(self) -> Tensor:
        """Return the rows [2 span, E]."""
        return self.weight if self.norm is None else self.norm(self.weight)


class PlainMLP(nn.Module):
    """MLP: up, activation, down."""

    def __init__(self, width: int, spec: cfg.PlainMLPConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        is_learned = spec.activation == "xielu"
        self.activation: Callable[..., Tensor] = xielu if is_learned else ACTIVATIONS[spec.activation]
        self.alpha_p = _inverse_softplus(0.8) if is_learned else None
        self.alpha_n = _inverse_softplus(0.3) if is_learned else None
        self.up = ops.linear.Linear(width, spec.intermediate_size, spec.bias)
        self.down = ops.linear.Linear(spec.intermediate_size, width, spec.bias)

    def forward(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        alphas = () if self.alpha_p is None else (self.alpha_p, self.alpha_n)
        inner = self.activation(project(self.up, x, adapters), *alphas)
        return project(self.down, apply_dropout(inner, self.dropout, self), adapters)


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

    def forward(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        gate, up = project_together(self.gate_up, (self.gate, self.up), x, adapters)
        return project(self.down, apply_dropout(self.activation(gate) * up, self.dropout, self), adapters)


class Routing(NamedTuple):
    """Routing of T tokens in one layer."""

    logits: Tensor  # [T, experts], at least float32
    experts: Tensor  # indices [T, experts per token]


class Router(ops.linear.Linear):
    """Linear layer that is computed in the dtype of its input, also under autocast (Fedus et al. 2021, sec. 2.4)."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        with torch.autocast(input.device.type, enabled=False):
            return ops.linear.linear(input, self.weight.to(input.dtype), bias, self.tiles)


# [experts, out, in]; one matrix [out, in] for each; or a quantized matrix with the rows of one expert after another.
ExpertWeights = nn.Parameter | nn.ParameterList | ops.quantized_linear.QuantizedLinear


class MixtureOfExperts(nn.Module):
    """Mixture of experts (``config.MoEConfig``). Each expert is computed once, for the tokens routed to it."""

    PARTS = ("gate", "up", "down")
    tiles: ops.batch_invariant.TileSizes | None = None

    def __init__(self, width: int, spec: cfg.MoEConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.spec, self.dropout = spec, dropout
        self.sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
        self.activation = ACTIVATIONS[spec.activation] if spec.swiglu_alpha is None else self.sigmoid
        self.router = Router(width, spec.num_experts, spec.router_bias)
        biases = torch.zeros(spec.num_experts) if spec.selection_bias else None
        self.selection_bias = None if biases is None else nn.Parameter(biases, requires_grad=False)
        self.gate: ExpertWeights = nn.Parameter(torch.empty(spec.num_experts, spec.intermediate_size, width))
        self.up: ExpertWeights = nn.Parameter(torch.empty(spec.num_experts, spec.intermediate_size, width))
        self.down: ExpertWeights = nn.Parameter(torch.empty(spec.num_experts, width, spec.intermediate_size))
        hidden = (spec.num_experts, spec.intermediate_size)
        self.gate_bias = nn.Parameter(torch.zeros(hidden)) if spec.bias else None
        self.up_bias = nn.Parameter(torch.zeros(hidden)) if spec.bias else None
        self.down_bias = nn.Parameter(torch.zeros(spec.num_experts, width)) if spec.bias else None
        shared = None if spec.shared_size is None else cfg.GatedMLPConfig(spec.shared_size, spec.activation, spec.bias)
        self.shared = None if shared is None else GatedMLP(width, shared, dropout)
        self.shared_gate = ops.linear.Linear(width, 1, bias=False) if spec.shared_gate else None

    def forward(
        self, x: Tensor, routings: list[Routing] | None = None, adapters: TokenAdapters | None = None
    ) -> Tensor:
        """Apply the experts: x [T, E] -> [T, E]; the routing is appended to ``routings``, if given."""
        logits = project(self.router, x.to(torch.promote_types(x.dtype, torch.float32)), adapters)
        weights, experts = self._choose(logits)
        if routings is not None:
            routings.append(Routing(logits, experts))
        out = self._combine(x, weights.to(x.dtype), experts)
        if self.shared is None:
            return out
        shared: Tensor = self.shared(x, adapters)
        if self.shared_gate is not None:
            shared = self.sigmoid(project(self.shared_gate, x, adapters)) * shared
        return out + shared

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts by logits [T, experts]: their weights and indices, [T, n] each."""
        spec = self.spec
        if spec.sparsemixer_jitter is not None:
            return _sparsemixer(logits, spec.sparsemixer_jitter)
        scores = self.sigmoid(logits) if spec.router == "sigmoid" else logits.softmax(dim=-1)
        ranking = scores.detach()
        if self.selection_bias is not None:
            ranking = ranking + self.selection_bias.to(ranking.dtype)
        if spec.num_groups > 1:
            ranking = self._mask_groups(ranking)
        experts = ranking.topk(spec.num_experts_per_token, dim=-1).indices
        weights = scores.gather(-1, experts)
        if spec.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        return weights * spec.routed_scale, experts

    def _mask_groups(self, ranking: Tensor) -> Tensor:
        """Set the ranking [T, experts] to -inf outside each token's best groups."""
        groups = ranking.unflatten(-1, (self.spec.num_groups, -1))
        values = groups.amax(dim=-1) if self.selection_bias is None else groups.topk(2, dim=-1).values.sum(dim=-1)
        best = values.topk(self.spec.num_groups_per_token, dim=-1).indices
        is_outside = torch.ones_like(values, dtype=torch.bool).scatter_(-1, best, False)
        masked: Tensor = groups.masked_fill(is_outside.unsqueeze(-1), -math.inf)
        return masked.flatten(-2)

    def _combine(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Sum the outputs of the chosen experts, in the order of their indices.

        Example: experts [[2, 0], [0, 1]] sorted are 0 0 1 2, of tokens 0 1 1 0, and end at 2, 3 and 4.
        """
        ordered, order = experts.flatten().sort(stable=True)
        tokens, shares = order // experts.shape[1], weights.flatten()[order].unsqueeze(-1)
        indices = torch.arange(self.spec.num_experts, device=x.device)
        ends = torch.searchsorted(ordered, indices, right=True).tolist()
        out, low = torch.zeros_like(x), 0
        for expert, high in enumerate(ends):
            if low < high:
                rows = tokens[low:high]
                out.index_add_(0, rows, self._expert(expert, x.index_select(0, rows)) * shares[low:high])
            low = high
        return out

    def _expert(self, index: int, x: Tensor) -> Tensor:
        gate = self._product(x, self.gate, self.gate_bias, index)
        up = self._product(x, self.up, self.up_bias, index)
        if self.spec.swiglu_limit is not None:
            gate, up = gate.clamp(max=self.spec.swiglu_limit), up.clamp(-self.spec.swiglu_limit, self.spec.swiglu_limit)
        if self.spec.swiglu_alpha is not None:
            inner = (up + 1) * gate * self.activation(self.spec.swiglu_alpha * gate)
        else:
            inner = self.activation(gate) * up
        inner = apply_dropout(inner, self.dropout, self)
        return self._product(inner, self.down, self.down_bias, index)

    def _product(self, x: Tensor, weights: ExpertWeights, biases: Tensor | None, index: int) -> Tensor:
        bias = None if biases is None else biases[index]
        if isinstance(weights, (Tensor, nn.ParameterList)):
            return ops.linear.linear(x, weights[index], bias, self.tiles)
        rows = weights.out_features // self.spec.num_experts
        return weights.multiply_rows(x, index * rows, (index + 1) * rows, bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert the parameters, but never round the selection bias below float32."""
        biases = None if self.selection_bias is None else self.selection_bias.data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if biases is not None and self.selection_bias is not None and self.selection_bias.dtype.itemsize < 4:
            self.selection_bias.data = biases.to(self.selection_bias.device)
        return self


def _sparsemixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Choose two experts as PhiMoE does at inference; see ``config.MoEConfig.sparsemixer_jitter``."""
    weights, experts, remaining = [], [], logits
    for _ in range(2):
        with torch.no_grad():
            top, best = remaining.max(dim=-1, keepdim=True)
            is_far = (top - logits) / torch.maximum(logits.abs(), top) > 2 * jitter
        weights.append(remaining.masked_fill(is_far, -math.inf).softmax(dim=-1).gather(-1, best))
        experts.append(best)
        remaining = remaining.scatter(-1, best, -math.inf)
    return torch.cat(weights, dim=-1), torch.cat(experts, dim=-1)


def build_mlp(
    width: int, spec: cfg.PlainMLPConfig | cfg.GatedMLPConfig | cfg.MoEConfig, dropout: float = 0.0
) -> PlainMLP | GatedMLP | MixtureOfExperts:
    if isinstance(spec, cfg.MoEConfig):
        return MixtureOfExperts(width, spec, dropout)
    return GatedMLP(width, spec, dropout) if isinstance(spec, cfg.GatedMLPConfig) else PlainMLP(width, spec, dropout)


def _embedding(rows: int, width: int) -> nn.Embedding:
    """Return a table; without memory it is not initialized, for which torch would import its compiler (a second)."""
    table = torch.empty(rows, width)
    return nn.Embedding(rows, width, _weight=table if table.is_meta else None)


class Embedding(nn.Module):
    """Token embedding (``config.EmbeddingConfig``); with ``vocab`` None it shares another embedding's table."""

    def __init__(self, width: int, vocab: int | None, spec: cfg.EmbeddingConfig) -> None:
        super().__init__()
        self.spec = spec
        table = width if spec.embedding_size is None else spec.embedding_size
        inner = width if spec.projection == "start" else table  # size at which positions and token types are added
        self.tokens = None if vocab is None else _embedding(vocab, table)
        learned = spec.position if isinstance(spec.position, cfg.LearnedPositionsConfig) else None
        self.positions = None if learned is None else _embedding(learned.num_positions, inner)
        self.token_types = _embedding(spec.num_token_types, inner) if spec.num_token_types else None
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
