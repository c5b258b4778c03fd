"""The attention layer: project, attend through the view, project back. It does not know whether a cache exists."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kvad import config as cfg
from kvad import ops
from kvad.config import ModelConfig, attention_dims, encoder_hidden_size, query_dim
from kvad.model.layers import Norm, dropout_active, project, project_together
from kvad.model_input import (
    AlibiSlopes,
    AttentionParams,
    CacheView,
    DisentangledBias,
    PositionBias,
    RelativeBuckets,
    Rotary,
    TokenAdapters,
)

# A tensor is the table of disentangled attention [2 span, E], normalized.
PositionEncoding = Rotary | AlibiSlopes | RelativeBuckets | PositionBias | Tensor | None


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
        scales: dict[object, float] = {"default": 1 / math.sqrt(query_dim(config, spec)), "none": 1.0}
        self.scale = scales[spec.softmax_scale] if spec.softmax_scale in scales else float(spec.softmax_scale)
        self.qkv = ops.linear.PackedLinear()
        self._add_projections(width, key_input_size, norm)
        self.sink_logits = nn.Parameter(torch.zeros(self.heads)) if spec.sink_logits else None
        own = spec.position if isinstance(spec.position, cfg.T5BiasConfig) and not spec.position.shared else None
        self.relative_bias = None if own is None else nn.Parameter(torch.zeros(own.num_buckets, self.heads))

    def _add_projections(self, width: int, key_input_size: int, norm: cfg.NormConfig) -> None:
        spec = self.spec
        self.q = ops.linear.Linear(width, self.heads * self.head_dim, spec.qkv_bias)
        self.k = ops.linear.Linear(key_input_size, self.kv_heads * self.head_dim, spec.qkv_bias)
        if not spec.values_from_keys:
            self.v = ops.linear.Linear(key_input_size, self.kv_heads * self.value_dim, spec.qkv_bias)
        self.out = ops.linear.Linear(self.heads * self.value_dim, width, spec.out_bias)
        self.gate = ops.linear.Linear(width, self.heads * self.value_dim, spec.qkv_bias) if spec.output_gate else None
        self.sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
        self.q_norm = self._norm(self.heads, spec.qk_norm_config or norm)
        self.k_norm = self._norm(self.kv_heads, spec.qk_norm_config or norm)
        value_norm = cfg.NormConfig(eps=norm.eps, weight=False)
        self.v_norm = Norm(self.value_dim, value_norm) if spec.value_norm else None

    def input_projections(self) -> tuple[ops.linear.Linear, ...]:
        """Return the layers that read the input."""
        return (self.q, self.k) if self.spec.values_from_keys else (self.q, self.k, self.v)

    def _norm(self, heads: int, norm: cfg.NormConfig) -> Norm | None:
        if self.spec.qk_norm == "none":
            return None
        if self.spec.qk_norm == "full":
            return Norm(self.head_dim * heads, norm)
        return Norm(self.head_dim, norm, heads if self.spec.qk_norm == "each" else None)

    def forward(
        self, x: Tensor, view: CacheView, encoding: PositionEncoding, adapters: TokenAdapters | None = None
    ) -> Tensor:
        """Apply the layer: x [T, E] -> [T, E]."""
        attended = view.attend(*self.project(x, adapters), self.attention_params(encoding))
        return self.output(attended, x, adapters)

    def output(self, attended: Tensor, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """Project attended values [T, H, Dv] to [T, E]; x [T, E] is the layer's input, which the gate reads."""
        heads = attended.flatten(-2)
        if self.gate is not None:
            heads = heads * self.sigmoid(project(self.gate, x, adapters))
        return project(self.out, heads, adapters)

    def project(self, x: Tensor, adapters: TokenAdapters | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [T, E] to q [T, H, D], k [T, K, D], v [T, K, Dv], clamped and normalized, not rotated."""
        return self.split_heads(project_together(self.qkv, self.input_projections(), x, adapters))

    def split_heads(self, projections: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Split the products of ``input_projections`` [T, ...] as ``project`` does."""
        flat_q, flat_k, *others = projections
        (flat_v,) = others or (flat_k,)
        if self.spec.clip_qkv is not None:
            flat_q, flat_k, flat_v = map(self._clip, (flat_q, flat_k, flat_v))
        q = self._heads(flat_q, self.q_norm, self.heads)
        k = self._heads(flat_k, self.k_norm, self.kv_heads)
        v = flat_v.unflatten(-1, (self.kv_heads, self.value_dim))
        return q, k, v if self.v_norm is None else self.v_norm(v)

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
        table, encoding = (encoding, None) if isinstance(encoding, Tensor) else (None, encoding)
        return AttentionParams(
            scale=self.scale,
            logit_softcap=self.spec.logit_softcap,
            rotary=encoding if isinstance(encoding, Rotary) else None,
            bias=None if isinstance(encoding, Rotary) else encoding,
            sink_logits=self.sink_logits,
            disentangled=None if table is None else self._disentangled(table),
            dropout=self.dropout if dropout_active(self.dropout, self) else 0.0,
        )

    def _disentangled(self, table: Tensor) -> DisentangledBias:
        """Project the table of distances [2 span, E] by the matrices of q and k."""
        position, size = self.spec.position, (self.heads, self.head_dim)
        assert isinstance(position, cfg.DisentangledConfig)
        query_rows = self.q(table).unflatten(-1, size) if position.position_to_content else None
        key_rows = self.k(table).unflatten(-1, size) if position.content_to_position else None
        return DisentangledBias(query_rows, key_rows, position.span, position.num_buckets, position.max_distance)


class CrossAttention(Attention):
    """Cross-attention (Vaswani et al. 2017, sec. 3.2.3): keys and values are written once per encoder input."""

    def __init__(
        self, config: ModelConfig, spec: cfg.AttentionConfig, norm: cfg.NormConfig, width: int | None = None
    ) -> None:
        super().__init__(config, spec, norm, width, encoder_hidden_size(config))
        self.kv = ops.linear.PackedLinear()

    def forward(
        self, x: Tensor, view: CacheView, encoding: PositionEncoding = None, adapters: TokenAdapters | None = None
    ) -> Tensor:
        """Apply the layer: x [T, E] -> [T, E]."""
        attended = view.attend(self.project_queries(x, adapters), None, None, self.attention_params(encoding))
        return self.output(attended, x, adapters)

    def output(self, attended: Tensor, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """Project attended values [T, H, Dv] to [T, E]."""
        return project(self.out, attended.flatten(-2), adapters)

    def project_queries(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """Project x [T, E] to q [T, H, D], clamped and normalized."""
        return self._heads(self._clip(project(self.q, x, adapters)), self.q_norm, self.heads)

    def write_encoder_output(
        self, encoder_output: Tensor, view: CacheView, adapters: TokenAdapters | None = None
    ) -> None:
        """Write the keys and values of the encoder's output [S, E]."""
        flat_k, flat_v = map(self._clip, project_together(self.kv, (self.k, self.v), encoder_output, adapters))
        k = self._heads(flat_k, self.k_norm, self.kv_heads)
        view.write(k, flat_v.unflatten(-1, (self.kv_heads, self.value_dim)))


class LatentAttention(Attention):
    """Multi-head latent attention (MLA, DeepSeek-V2, 2024, sec. 2.1), absorbed: all heads read one key-value head.

    A head's key is (k_rope, W_k c) and its value W_v c, with the token's latent c. Since q . W_k c = (W_k^T q) . c, the
    queries are multiplied by W_k and the attention's output by W_v, and the cache stores (k_rope, c) only: the key is
    that vector, the value its last part. ``kv_up`` is (W_k, W_v) of each head in turn.
    """

    def _add_projections(self, width: int, key_input_size: int, norm: cfg.NormConfig) -> None:
        assert self.spec.latent is not None
        self.latent, bias = self.spec.latent, self.spec.qkv_bias
        rank, norm = self.latent.kv_lora_rank, self.latent.norm or norm
        queries = self.heads * self.latent.qk_head_dim
        if self.latent.q_lora_rank is None:
            self.q = ops.linear.Linear(width, queries, False)
        else:
            self.q_down = ops.linear.Linear(width, self.latent.q_lora_rank, bias)
            self.q_norm = Norm(self.latent.q_lora_rank, norm)
            self.q_up = ops.linear.Linear(self.latent.q_lora_rank, queries, False)
        self.kv_down = ops.linear.Linear(key_input_size, rank + self.latent.qk_rope_head_dim, bias)
        self.kv_norm = Norm(rank, norm)
        ups = self.latent.qk_nope_head_dim + self.latent.v_head_dim
        self.kv_up = ops.linear.Linear(rank, self.heads * ups, False)
        self.out = ops.linear.Linear(self.heads * self.latent.v_head_dim, width, self.spec.out_bias)

    def input_projections(self) -> tuple[ops.linear.Linear, ...]:
        """Return the layers that read the input."""
        return (self.q if self.latent.q_lora_rank is None else self.q_down), self.kv_down

    def output(self, attended: Tensor, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """Project attended latents [T, H, rank] to [T, E]."""
        _, value_weight = self._up_weights(x.dtype)
        return project(self.out, self._multiply_heads(attended, value_weight).flatten(-2), adapters)

    def project(self, x: Tensor, adapters: TokenAdapters | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [T, E] to q [T, H, rope + rank], k [T, 1, rope + rank], v [T, 1, rank], not rotated."""
        sizes = self.latent
        flat_q, down = project_together(self.qkv, self.input_projections(), x, adapters)
        if sizes.q_lora_rank is not None:
            assert self.q_norm is not None
            flat_q = project(self.q_up, self.q_norm(flat_q), adapters)
        q_nope, q_rope = flat_q.unflatten(-1, (self.heads, -1)).split(
            (sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), dim=-1
        )
        key_weight, _ = self._up_weights(x.dtype)
        q = torch.cat((q_rope, self._multiply_heads(q_nope, key_weight.mT)), dim=-1)
        c, k_rope = down.split((sizes.kv_lora_rank, sizes.qk_rope_head_dim), dim=-1)
        k = torch.cat((k_rope, self.kv_norm(c)), dim=-1).unsqueeze(-2)
        return q, k, k[..., sizes.qk_rope_head_dim :]

    def _up_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return W_k [H, nope, rank] and W_v [H, v, rank]."""
        weight = self.kv_up.effective_weight().to(dtype).unflatten(0, (self.heads, -1))
        key_weight, value_weight = weight.split((self.latent.qk_nope_head_dim, self.latent.v_head_dim), dim=1)
        return key_weight, value_weight

    def _multiply_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply x [T, H, in] by weight [H, out, in] -> [T, H, out]."""
        if self.kv_up.tiles is None:
            return torch.einsum("thi,hoi->tho", x, weight)
        heads = (ops.linear.linear(x[:, h], weight[h], None, self.kv_up.tiles) for h in range(self.heads))
        return torch.stack(list(heads), dim=1)


def build_attention(
    config: ModelConfig, spec: cfg.AttentionConfig, norm: cfg.NormConfig, width: int | None = None
) -> Attention:
    """Build kvad's attention, or the config's plugin, a subclass of it."""
    custom = spec.custom_class
    if spec.latent is not None:
        return LatentAttention(config, spec, norm, width)
    cls = Attention if custom is None else cfg.plugins.load_plugin(custom, "attention.custom_class", Attention)
    attention: Attention = cls(config, spec, norm, width)
    return attention
