"""The attention layer: project, attend through the view, project back. It does not know whether a cache exists."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kvad import config as cfg
from kvad import ops
from kvad.config import ModelConfig, attention_dims, encoder_hidden_size
from kvad.model.layers import Norm, dropout_active
from kvad.model_input import AlibiSlopes, AttentionParams, CacheView, PositionBias, RelativeBuckets, Rotary

PositionEncoding = Rotary | AlibiSlopes | RelativeBuckets | PositionBias | None


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values (Ainslie et al. 2023).

    ``norm`` is the layer's, used for q and k unless ``spec`` has another; ``width`` the input and output size, by
    default hidden_size; ``key_input_size`` that of keys and values, by default ``width``.
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
        self.heads, self.kv_heads, self.head_dim, self.value_dim = attention_dims(config, spec)
        self.spec, self.dropout = spec, config.dropout.attention
        scales: dict[object, float] = {"default": 1 / math.sqrt(self.head_dim), "none": 1.0}
        self.scale = scales[spec.softmax_scale] if spec.softmax_scale in scales else float(spec.softmax_scale)
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
        """Apply the layer: x [T, E] -> [T, E]."""
        out: Tensor = self.out(view.attend(*self.project(x), self.attention_params(encoding)).flatten(-2))
        return out

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [T, E] to q [T, H, D], k [T, K, D], v [T, K, Dv], clamped and normalized, not rotated."""
        flat_q, flat_k, flat_v = self.qkv(x, self.q, self.k, self.v)
        if self.spec.clip_qkv is not None:
            flat_q, flat_k, flat_v = map(self._clip, (flat_q, flat_k, flat_v))
        q = self._heads(flat_q, self.q_norm, self.heads)
        k = self._heads(flat_k, self.k_norm, self.kv_heads)
        return q, k, flat_v.unflatten(-1, (self.kv_heads, self.value_dim))

    def _clip(self, x: Tensor) -> Tensor:
        return x if self.spec.clip_qkv is None else x.clamp(-self.spec.clip_qkv, self.spec.clip_qkv)

    def _heads(self, flat: Tensor, norm: Norm | None, heads: int) -> Tensor:
        shape = (*flat.shape[:-1], heads, self.head_dim)
        if norm is None:
            return flat.view(shape)
        normed: Tensor = norm(flat).view(shape) if self.spec.qk_norm == "full" else norm(flat.view(shape))
        return normed

    def attention_params(self, encoding: PositionEncoding) -> AttentionParams:
        """Return this layer's attention parameters, given the encoding that its stack shares."""
        if self.relative_bias is not None:
            position = self.spec.position
            assert isinstance(position, cfg.T5BiasConfig)
            encoding = RelativeBuckets(self.relative_bias, position.max_distance, position.bidirectional)
        return AttentionParams(
            scale=self.scale,
            logit_softcap=self.spec.logit_softcap,
            rotary=encoding if isinstance(encoding, Rotary) else None,
            bias=None if isinstance(encoding, Rotary) else encoding,
            sink_logits=self.sink_logits,
            dropout=self.dropout if dropout_active(self.dropout, self) else 0.0,
        )


class CrossAttention(Attention):
    """Cross-attention (Vaswani et al. 2017, sec. 3.2.3): keys and values are written once per encoder input."""

    def __init__(
        self, config: ModelConfig, spec: cfg.AttentionConfig, norm: cfg.NormConfig, width: int | None = None
    ) -> None:
        super().__init__(config, spec, norm, width, encoder_hidden_size(config))
        self.kv = ops.linear.PackedLinear()

    def forward(self, x: Tensor, view: CacheView, encoding: PositionEncoding = None) -> Tensor:
        """Apply the layer: x [T, E] -> [T, E]."""
        q = self._heads(self._clip(self.q(x)), self.q_norm, self.heads)
        out: Tensor = self.out(view.attend(q, None, None, self.attention_params(encoding)).flatten(-2))
        return out

    def write_encoder_output(self, encoder_output: Tensor, view: CacheView) -> None:
        """Write the keys and values of the encoder's output [S, E]."""
        flat_k, flat_v = map(self._clip, self.kv(encoder_output, self.k, self.v))
        k = self._heads(flat_k, self.k_norm, self.kv_heads)
        view.write(k, flat_v.unflatten(-1, (self.kv_heads, self.value_dim)))


def build_attention(
    config: ModelConfig, spec: cfg.AttentionConfig, norm: cfg.NormConfig, width: int | None = None
) -> Attention:
    """Build kvad's attention, or the config's plugin, a subclass of it."""
    custom = spec.custom_class
    cls = Attention if custom is None else cfg.plugins.load_plugin(custom, "attention.custom_class", Attention)
    attention: Attention = cls(config, spec, norm, width)
    return attention
