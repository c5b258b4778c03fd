"""Attention as a layer: project, ask the view, project back.  It does not know whether a cache exists."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kvad import config as cfg
from kvad.config import ModelConfig
from kvad.model.parts import Norm
from kvad.ops.linear import Joint, Linear
from kvad.step import Buckets, Rotary, Score, Slopes, View

__all__ = ["Attention"]

Encoding = Rotary | Slopes | Buckets | None


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values (Ainslie et al. 2023); see :class:`kvad.config.Attention`."""

    def __init__(self, config: ModelConfig, spec: cfg.Attention, norm: cfg.Norm) -> None:
        super().__init__()
        self.heads, self.kv_heads = spec.heads, spec.kv_heads or spec.heads
        self.head_dim = cfg.head_dim(config, spec)
        self.value_dim = spec.value_dim or self.head_dim
        self.spec = spec
        self.q = Linear(config.width, self.heads * self.head_dim, spec.bias)
        self.k = Linear(config.width, self.kv_heads * self.head_dim, spec.bias)
        self.v = Linear(config.width, self.kv_heads * self.value_dim, spec.bias)
        self.qkv = Joint()
        self.out = Linear(self.heads * self.value_dim, config.width, spec.out_bias)
        per_head = spec.qk_norm == "head"
        has_norm = spec.qk_norm != "none"
        self.q_norm = Norm(self.head_dim * (1 if per_head else self.heads), norm) if has_norm else None
        self.k_norm = Norm(self.head_dim * (1 if per_head else self.kv_heads), norm) if has_norm else None
        self.sink_logits = nn.Parameter(torch.zeros(self.heads)) if spec.sinks else None
        own_table = isinstance(spec.position, cfg.T5Bias) and not spec.position.shared
        self.relative = nn.Parameter(torch.zeros(spec.position.buckets, self.heads)) if own_table else None  # type: ignore[union-attr]

    def forward(self, x: Tensor, view: View, encoding: Encoding) -> Tensor:
        """x [T, E] -> [T, E]."""
        mixed = view.attend(*self.project(x), self.score(encoding))
        out: Tensor = self.out(mixed.flatten(-2))
        return out

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, E] -> q [T, H, D], k [T, K, D], v [T, K, Dv], normalised where the config says so, not yet rotated."""
        flat_q, flat_k, flat_v = self.qkv(x, self.q, self.k, self.v)
        q = self._heads(flat_q, self.q_norm, self.heads)
        k = self._heads(flat_k, self.k_norm, self.kv_heads)
        return q, k, flat_v.unflatten(-1, (self.kv_heads, self.value_dim))

    def _heads(self, flat: Tensor, norm: Norm | None, heads: int) -> Tensor:
        shape = (*flat.shape[:-1], heads, self.head_dim)
        if norm is None:
            return flat.view(shape)
        normed: Tensor = norm(flat.view(shape)) if norm.width == self.head_dim else norm(flat).view(shape)
        return normed

    def score(self, encoding: Encoding) -> Score:
        """How this layer's q.k becomes a logit, given what the stack shares among its kind's layers."""
        if self.relative is not None:
            position = self.spec.position
            assert isinstance(position, cfg.T5Bias)
            encoding = Buckets(self.relative, position.max_distance, position.bidirectional)
        return Score(
            scale=_scale(self.spec.scale, self.head_dim),
            softcap=self.spec.softcap,
            rotary=encoding if isinstance(encoding, Rotary) else None,
            bias=encoding if isinstance(encoding, (Slopes, Buckets)) else None,
            sink_logits=self.sink_logits,
        )


def _scale(scale: str | float, head_dim: int) -> float:
    if scale == "default":
        return 1 / math.sqrt(head_dim)
    return 1.0 if scale == "none" else float(scale)
