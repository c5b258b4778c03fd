"""GPT (Radford et al. 2018).

Learned positions, LayerNorm after each half, weights stored as [in, out].  There is no final norm.  ``gelu`` in its
config is the tanh approximation; the MLP is always four times as wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, tensor_rule
from kvad.checkpoint.families._common import single_layer_type
from kvad.checkpoint.families.gpt2 import layer_rules
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

_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}  # Hugging Face -> kvad


def read(fields: HFConfigReader) -> ModelConfig:
    hidden_size, max_seq_len = fields.integer("n_embd", default=768), fields.integer("n_positions", default=512)
    attention = AttentionConfig(fields.integer("n_head", default=12), position=None, qkv_bias=True, out_bias=True)
    mlp = PlainMLPConfig(4 * hidden_size, fields.choice("afn", _ACTIVATIONS, "gelu"), bias=True)
    layer = LayerConfig(
        attention, mlp, NormConfig("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=True)
    )
    layers = fields.integer("n_layer", default=12)
    return ModelConfig(
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size", default=40478),
        max_seq_len=max_seq_len,
        decoder=StackConfig(layers, {"L": layer}, norm_position="post", final_norm=False),
        embedding=EmbeddingConfig(LearnedPositionsConfig(max_seq_len)),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", "transformer.tokens_embed")
    yield tensor_rule("embedding.positions", "transformer.positions_embed")
    yield from layer_rules(config)
    yield tensor_rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: LayerConfig = single_layer_type(config, "openai-gpt")
    activation = layer.mlp.activation
    fields = {
        "architectures": ["OpenAIGPTLMHeadModel"],
        "model_type": "openai-gpt",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_embd": config.hidden_size,
        "n_layer": config.stack.num_layers,
        "n_head": layer.attention.num_heads,
        "afn": "gelu" if activation == "gelu_tanh" else activation,
        "layer_norm_epsilon": layer.norm.eps,
        "tie_word_embeddings": config.tie_embeddings,
    }
    return fields


FAMILY = Family(
    ("openai-gpt",),
    read,
    rules,
    write,
    prefix="transformer.",
    ignored=(r"position_ids", r".*\.attn\.bias", r"lm_head\.weight"),
    head=("lm_head.weight", "transformer.tokens_embed.weight"),
)
