"""Falcon (Almazrouei et al. 2023).

RoPE or ALiBi, halves in parallel or not, q, k, v fused in three ways.  The first architecture has all heads (rows by
head: q, k, v) or one key-value head (all q, then k, v), and one norm for both halves; ``new_decoder_architecture``
has groups of heads (q ..., k, v) and a norm for each half, or one.

ALiBi is slope times position, rounded to bfloat16 and, unlike BLOOM's, added before the division by sqrt(head_dim).
transformers adds it once, as kvad does, in its default attention (sdpa), and twice in ``eager``, for which no model
was trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, grouped_transform, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, read_rope, rope_fields, single_layer_type
from kvad.config import (
    AlibiConfig,
    AttentionConfig,
    LayerConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    RopeConfig,
    StackConfig,
)
from kvad.errors import CheckpointError

_LAYER = {"attention.out": "self_attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}
_NORMS = {
    "pre": {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
    "parallel": {"norm1": "input_layernorm"},
    "parallel_pair": {"norm1": "ln_attn", "norm2": "ln_mlp"},
}


def read(fields: HFConfigReader) -> ModelConfig:
    fields.require_one_of("apply_residual_connection_post_layernorm", False, reason="transformers' class ignores it.")
    hidden_size, heads = fields.integer("n_embed", "hidden_size", default=4544), fields.integer("num_attention_heads")
    max_seq_len, bias = fields.integer("max_position_embeddings", default=2048), fields.flag("bias")
    alibi = AlibiConfig(factor=(hidden_size // heads) ** -0.5, round_to_bfloat16=True)
    attention = AttentionConfig(
        heads,
        _kv_heads(fields, heads),
        position=alibi if fields.flag("alibi") else read_rope(fields, max_seq_len=max_seq_len),
        qkv_bias=bias,
        out_bias=bias,
    )
    hidden = fields.integer("ffn_hidden_size", default=4 * hidden_size)
    mlp = PlainMLPConfig(hidden, fields.choice("activation", ACTIVATIONS, "gelu"), bias)
    layer = LayerConfig(
        attention, mlp, NormConfig("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=True)
    )
    return ModelConfig(
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=max_seq_len,
        decoder=StackConfig(fields.integer("num_hidden_layers"), {"L": layer}, norm_position=_norm_position(fields)),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _kv_heads(fields: HFConfigReader, heads: int) -> int:
    if fields.flag("new_decoder_architecture"):
        return fields.integer("num_kv_heads", default=heads)
    if fields.flag("multi_query", True):
        return 1
    fields.require_one_of("num_kv_heads", heads, reason="Groups of heads need new_decoder_architecture.")
    return heads


def _norm_position(fields: HFConfigReader) -> Any:
    """Return the norm positions that transformers' class can compute."""
    if fields.flag("new_decoder_architecture"):
        fields.require_one_of("parallel_attn", True, reason="The new architecture is parallel.")
        fields.require_one_of("num_ln_in_parallel_attn", 1, 2)
        return "parallel" if fields.get("num_ln_in_parallel_attn") == 1 else "parallel_pair"
    if not fields.flag("parallel_attn", True):
        return "pre"
    fields.require_one_of("num_ln_in_parallel_attn", 1, reason="Two norms need new_decoder_architecture.")
    return "parallel"


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", "transformer.word_embeddings")
    for i in range(config.stack.num_layers):
        kvad_prefix, hf_prefix = f"decoder.layers.{i}", f"transformer.h.{i}"
        attention = config.stack.layer_config(i).attention
        qkv = tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv")
        yield tensor_rule(
            qkv,
            f"{hf_prefix}.self_attention.query_key_value",
            grouped_transform(attention.num_kv_heads or attention.num_heads),
        )
        yield from prefix_rules(kvad_prefix, hf_prefix, {**_LAYER, **_NORMS[config.stack.norm_position]})
    yield tensor_rule("decoder.norm", "transformer.ln_f")
    yield tensor_rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    """Write the first architecture if it can express the model."""
    layer: LayerConfig = single_layer_type(config, "falcon")
    attention, norm_position = layer.attention, config.stack.norm_position
    kv_heads = attention.num_kv_heads or attention.num_heads
    if norm_position not in _NORMS:
        raise CheckpointError(f"falcon cannot express this model: norm_position is {norm_position}")
    new = norm_position == "parallel_pair" or kv_heads not in (1, attention.num_heads)
    fields = {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.stack.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": new,
        "multi_query": kv_heads == 1,
        "parallel_attn": norm_position != "pre",
        "num_ln_in_parallel_attn": 2 if norm_position == "parallel_pair" else 1,
        "alibi": isinstance(attention.position, AlibiConfig),
        "bias": attention.qkv_bias,
        "ffn_hidden_size": layer.mlp.intermediate_size,
        "activation": hf_activation(layer.mlp.activation),
        "layer_norm_epsilon": layer.norm.eps,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if isinstance(attention.position, RopeConfig):
        fields |= rope_fields(attention.position)
    return fields


FAMILY = Family(
    ("falcon",),
    read,
    rules,
    write,
    prefix="transformer.",
    ignored=(r".*rotary(_emb)?\.inv_freq", r".*maybe_rotary\.inv_freq", r"lm_head\.weight"),
    head=("lm_head.weight", "transformer.word_embeddings.weight"),
)
