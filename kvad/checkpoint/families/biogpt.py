"""BioGPT (Luo et al. 2022): a decoder with learned positions and LayerNorm before each half.

Two unused rows precede the positions, and embeddings are multiplied by sqrt(hidden_size).  transformers' class
normalizes with epsilon 1e-5 whatever ``layer_norm_eps`` is; kvad does the same.
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
    LearnedPositionsConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    StackConfig,
)


def read(fields: HFConfigReader) -> ModelConfig:
    fields.require_one_of(
        "add_cross_attention", False, reason="A decoder of an encoder-decoder is read with its encoder."
    )
    hidden_size, max_seq_len = fields.integer("hidden_size"), fields.integer("max_position_embeddings", default=1024)
    attention = AttentionConfig(fields.integer("num_attention_heads"), position=None, qkv_bias=True, out_bias=True)
    mlp = PlainMLPConfig(
        fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "gelu"), bias=True
    )
    layer = LayerConfig(attention, mlp, NormConfig("layer", 1e-5, bias=True))
    scale = math.sqrt(hidden_size) if fields.flag("scale_embedding", True) else 1.0
    return ModelConfig(
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=max_seq_len,
        decoder=StackConfig(fields.integer("num_hidden_layers"), {"L": layer}),
        embedding=EmbeddingConfig(LearnedPositionsConfig(max_seq_len + 2, offset=2), scale),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", "biogpt.embed_tokens")
    yield tensor_rule("embedding.positions", "biogpt.embed_positions")
    for i in range(config.stack.num_layers):
        yield from prefix_rules(f"decoder.layers.{i}", f"biogpt.layers.{i}", FAIRSEQ_LAYER)
    yield tensor_rule("decoder.norm", "biogpt.layer_norm")
    yield tensor_rule("head", "output_projection")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: LayerConfig = single_layer_type(config, "biogpt")
    fields = {
        "architectures": ["BioGptForCausalLM"],
        "model_type": "biogpt",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.stack.num_layers,
        "num_attention_heads": layer.attention.num_heads,
        "intermediate_size": layer.mlp.intermediate_size,
        "hidden_act": hf_activation(layer.mlp.activation),
        "layer_norm_eps": layer.norm.eps,
        "scale_embedding": config.embedding.scale != 1.0,
        "tie_word_embeddings": config.tie_embeddings,
    }
    return fields


FAMILY = Family(
    ("biogpt",),
    read,
    rules,
    write,
    prefix="biogpt.",
    ignored=(r"output_projection\.weight",),
    head=("output_projection.weight", "biogpt.embed_tokens.weight"),
)
