"""Attention as a layer: project, ask the view, project back.  It does not know whether a cache exists."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kvad import config as cfg
from kvad import config as config_lib
from kvad import ops
from kvad.config import ModelConfig
from kvad.model.layers import Norm, dropout_active
from kvad.model_input import AlibiSlopes, AttentionParams, CacheView, PositionBias, RelativeBuckets, Rotary

PositionEncoding = Rotary | AlibiSlopes | RelativeBuckets | PositionBias | None


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values (Ainslie et al. 2023); see :class:`kvad.config.model.Attention`.

    ``width``: of the stream, the model's unless given; ``source``: of what keys and values are made of.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: cfg.AttentionConfig,
        norm: cfg.NormConfig,
        width: int | None = None,
        key_input_size: int | None = None,
    ) -> None:
        super().__init__()
        width = config.hidden_size if width is None else width
        key_input_size = width if key_input_size is None else key_input_size
        self.heads, self.kv_heads = spec.num_heads, spec.num_kv_heads or spec.num_heads
        self.head_dim = cfg.head_dim(config, spec)
        self.value_dim = spec.value_dim or self.head_dim
        self.spec, self.dropout = spec, config.dropout.attention
        self.q = ops.linear.Linear(width, self.heads * self.head_dim, spec.qkv_bias)
        self.k = ops.linear.Linear(key_input_size, self.kv_heads * self.head_dim, spec.qkv_bias)
        self.v = ops.linear.Linear(key_input_size, self.kv_heads * self.value_dim, spec.qkv_bias)
        self.qkv = ops.linear.PackedLinear()
        self.out = ops.linear.Linear(self.heads * self.value_dim, width, spec.out_bias)
        self.q_norm = self._norm(self.heads, spec.qk_norm_config or norm)
        self.k_norm = self._norm(self.kv_heads, spec.qk_norm_config or norm)
        self.sink_logits = nn.Parameter(torch.zeros(self.heads)) if spec.sink_logits else None
        own_table = isinstance(spec.position, cfg.T5BiasConfig) and not spec.position.shared
        self.relative_bias = nn.Parameter(torch.zeros(spec.position.num_buckets, self.heads)) if own_table else None  # type: ignore[union-attr]

    def _norm(self, heads: int, norm: cfg.NormConfig) -> Norm | None:
        if self.spec.qk_norm == "none":
            return None
        if self.spec.qk_norm == "full":
            return Norm(self.head_dim * heads, norm)
        return Norm(self.head_dim, norm, heads if self.spec.qk_norm == "each" else None)

    def forward(self, x: Tensor, view: CacheView, encoding: PositionEncoding) -> Tensor:
        """x [T, E] -> [T, E]."""
        mixed = view.attend(*self.project(x), self.attention_params(encoding))
        out: Tensor = self.out(mixed.flatten(-2))
        return out

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, E] -> q [T, H, D], k [T, K, D], v [T, K, Dv], normalised where the config says so, not yet rotated."""
        flat_q, flat_k, flat_v = self.qkv(x, self.q, self.k, self.v)
        if self.spec.clip_qkv is not None:
            flat_q, flat_k, flat_v = map(self._clipped, (flat_q, flat_k, flat_v))
        q = self._heads(flat_q, self.q_norm, self.heads)
        k = self._heads(flat_k, self.k_norm, self.kv_heads)
        return q, k, flat_v.unflatten(-1, (self.kv_heads, self.value_dim))

    def _clipped(self, x: Tensor) -> Tensor:
        return x if self.spec.clip_qkv is None else x.clamp(-self.spec.clip_qkv, self.spec.clip_qkv)

    def _heads(self, flat: Tensor, norm: Norm | None, heads: int) -> Tensor:
        shape = (*flat.shape[:-1], heads, self.head_dim)
        if norm is None:
            return flat.view(shape)
        normed: Tensor = norm(flat).view(shape) if self.spec.qk_norm == "full" else norm(flat.view(shape))
        return normed

    def attention_params(self, encoding: PositionEncoding) -> AttentionParams:
        """How this layer's q.k becomes a logit, given what the stack shares among its kind's layers."""
        if self.relative_bias is not None:
            position = self.spec.position
            assert isinstance(position, cfg.T5BiasConfig)
            encoding = RelativeBuckets(self.relative_bias, position.max_distance, position.bidirectional)
        return AttentionParams(
            scale=_scale(self.spec.softmax_scale, self.head_dim),
            logit_softcap=self.spec.logit_softcap,
            rotary=encoding if isinstance(encoding, Rotary) else None,
            bias=None if isinstance(encoding, Rotary) else encoding,
            sink_logits=self.sink_logits,
            dropout=self.dropout if dropout_active(self.dropout, self) else 0.0,
        )


class CrossAttention(Attention):
    """Attention of a decoder to its source (Vaswani et al. 2017, sec. 3.2.3): keys and values come once per source."""

    def __init__(
        self, config: ModelConfig, spec: cfg.AttentionConfig, norm: cfg.NormConfig, width: int | None = None
    ) -> None:
        super().__init__(config, spec, norm, width, cfg.encoder_hidden_size(config))
        self.kv = ops.linear.PackedLinear()

    def forward(self, x: Tensor, view: CacheView, encoding: PositionEncoding = None) -> Tensor:
        """x [T, E] -> [T, E]."""
        q = self._heads(self._clipped(self.q(x)), self.q_norm, self.heads)
        out: Tensor = self.out(view.attend(q, None, None, self.attention_params(encoding)).flatten(-2))
        return out

    def write_encoder_output(self, source: Tensor, view: CacheView) -> None:
        """Write the keys and values of the encoder's output [S, E]."""
        flat_k, flat_v = map(self._clipped, self.kv(source, self.k, self.v))
        k = self._heads(flat_k, self.k_norm, self.kv_heads)
        view.write(k, flat_v.unflatten(-1, (self.kv_heads, self.value_dim)))


def build_attention(
    config: ModelConfig, spec: cfg.AttentionConfig, norm: cfg.NormConfig, width: int | None = None
) -> Attention:
    """kvad's attention, or the class of one's own that the config names: a subclass of it."""
    made = Attention if spec.custom_class is None else config_lib.plugins.load_plugin(spec.custom_class, "mixer.own")
    mixer: Attention = made(config, spec, norm, width)
    return mixer


def _scale(scale: str | float, head_dim: int) -> float:
    if scale == "default":
        return 1 / math.sqrt(head_dim)
    return 1.0 if scale == "none" else float(scale)
