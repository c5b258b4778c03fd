"""BLOOM (BigScience 2022): ALiBi, a norm after the embedding, q, k, v fused by head.

The MLP is four times as wide as the model.  ``apply_residual_connection_post_layernorm`` adds each half to its
normalized input.  No field limits the length: ``seq_length``, which published files have, is the training length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, grouped_transform, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import single_layer_type
from kvad.config import (
    AlibiConfig,
    AttentionConfig,
    EmbeddingConfig,
    LayerConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    StackConfig,
)

_LAYER = {
    "attention.out": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}


def read(fields: HFConfigReader) -> ModelConfig:
    hidden_size = fields.integer("n_embed", "hidden_size", default=64)
    norm = NormConfig("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=True)
    heads = fields.integer("n_head", "num_attention_heads", default=8)
    layer = LayerConfig(
        AttentionConfig(heads, position=AlibiConfig(), qkv_bias=True, out_bias=True),
        PlainMLPConfig(4 * hidden_size, "gelu_tanh", bias=True),
        norm,
    )
    normed = fields.flag("apply_residual_connection_post_layernorm")
    layers = fields.integer("n_layer", "num_hidden_layers", default=2)
    return ModelConfig(
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=fields.integer("seq_length", default=2048),
        decoder=StackConfig(layers, {"L": layer}, norm_position="normed" if normed else "pre"),
        embedding=EmbeddingConfig(norm=norm),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", "transformer.word_embeddings")
    yield tensor_rule("embedding.norm", "transformer.word_embeddings_layernorm")
    for i in range(config.stack.num_layers):
        kvad_prefix, hf_prefix = f"decoder.layers.{i}", f"transformer.h.{i}"
        by_head = grouped_transform(config.stack.layer_config(i).attention.num_heads)
        qkv = tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv")
        yield tensor_rule(qkv, f"{hf_prefix}.self_attention.query_key_value", by_head)
        yield from prefix_rules(kvad_prefix, hf_prefix, _LAYER)
    yield tensor_rule("decoder.norm", "transformer.ln_f")
    yield tensor_rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: LayerConfig = single_layer_type(config, "bloom")
    fields = {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": config.vocab_size,
        "seq_length": config.max_seq_len,
        "hidden_size": config.hidden_size,
        "n_layer": config.stack.num_layers,
        "n_head": layer.attention.num_heads,
        "layer_norm_epsilon": layer.norm.eps,
        "apply_residual_connection_post_layernorm": config.stack.norm_position == "normed",
        "tie_word_embeddings": config.tie_embeddings,
    }
    return fields


FAMILY = Family(
    ("bloom",),
    read,
    rules,
    write,
    prefix="transformer.",
    ignored=(r"lm_head\.weight",),
    head=("lm_head.weight", "transformer.word_embeddings.weight"),
)
