"""XGLM (Lin et al. 2021).

A decoder with fairseq's sinusoids from position 2 on, LayerNorm before each half.  Embeddings are multiplied by
sqrt(hidden_size), and the norms have a fixed epsilon.  The sinusoids are not weights, but old files may have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, FAIRSEQ_LAYER, hf_activation, single_layer_type
from kvad.config import (
    AttentionConfig,
    EmbeddingConfig,
    LayerConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    SinusoidalPositionsConfig,
    StackConfig,
)


def read(fields: HFConfigReader) -> ModelConfig:
    fields.require_one_of(
        "add_cross_attention", False, reason="A decoder of an encoder-decoder is read with its encoder."
    )
    hidden_size = fields.integer("d_model")
    attention = AttentionConfig(fields.integer("attention_heads"), position=None, qkv_bias=True, out_bias=True)
    mlp = PlainMLPConfig(
        fields.integer("ffn_dim"), fields.choice("activation_function", ACTIVATIONS, "gelu"), bias=True
    )
    layer = LayerConfig(attention, mlp, NormConfig("layer", 1e-5, bias=True))
    scale = math.sqrt(hidden_size) if fields.flag("scale_embedding", True) else 1.0
    return ModelConfig(
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=fields.integer("max_position_embeddings", default=2048),
        decoder=StackConfig(fields.integer("num_layers"), {"L": layer}),
        embedding=EmbeddingConfig(SinusoidalPositionsConfig(form="fairseq", offset=2), scale),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", "model.embed_tokens")
    for i in range(config.stack.num_layers):
        yield from prefix_rules(f"decoder.layers.{i}", f"model.layers.{i}", FAIRSEQ_LAYER)
    yield tensor_rule("decoder.norm", "model.layer_norm")
    yield tensor_rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: LayerConfig = single_layer_type(config, "xglm")
    fields = {
        "architectures": ["XGLMForCausalLM"],
        "model_type": "xglm",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "d_model": config.hidden_size,
        "num_layers": config.stack.num_layers,
        "attention_heads": layer.attention.num_heads,
        "ffn_dim": layer.mlp.intermediate_size,
        "activation_function": hf_activation(layer.mlp.activation),
        "scale_embedding": config.embedding.scale != 1.0,
        "tie_word_embeddings": config.tie_embeddings,
    }
    return fields


FAMILY = Family(
    ("xglm",),
    read,
    rules,
    write,
    prefix="model.",
    ignored=(r"embed_positions\.weights", r"lm_head\.weight"),
    head=("lm_head.weight", "model.embed_tokens.weight"),
)
