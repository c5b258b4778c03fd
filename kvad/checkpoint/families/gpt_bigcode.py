"""GPT-BigCode, the first StarCoder (Li et al. 2023).

GPT-2 with one key-value head for all queries.  Weights are stored as [out, in]: all q, then k, then v; without
``multi_query``, by head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, grouped_transform, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, single_layer_type
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

_LAYER = {
    "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "norm1": "ln_1",
    "norm2": "ln_2",
}


def read(fields: HFConfigReader) -> ModelConfig:
    fields.require_one_of(
        "add_cross_attention", False, reason="A decoder of an encoder-decoder is read with its encoder."
    )
    hidden_size, heads = fields.integer("n_embd"), fields.integer("n_head")
    max_seq_len = fields.integer("n_positions", default=1024)
    attention = AttentionConfig(
        heads,
        1 if fields.flag("multi_query", True) else heads,
        position=None,
        qkv_bias=True,
        out_bias=True,
        softmax_scale="default" if fields.flag("scale_attn_weights", True) else "none",
    )
    activation = fields.choice("activation_function", ACTIVATIONS, "gelu_pytorch_tanh")
    mlp = PlainMLPConfig(fields.integer("n_inner", default=4 * hidden_size), activation, bias=True)
    layer = LayerConfig(
        attention, mlp, NormConfig("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=True)
    )
    return ModelConfig(
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=max_seq_len,
        decoder=StackConfig(fields.integer("n_layer"), {"L": layer}),
        embedding=EmbeddingConfig(LearnedPositionsConfig(max_seq_len)),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", "transformer.wte")
    yield tensor_rule("embedding.positions", "transformer.wpe")
    for i in range(config.stack.num_layers):
        kvad_prefix, hf_prefix = f"decoder.layers.{i}", f"transformer.h.{i}"
        attention = config.stack.layer_config(i).attention
        qkv = tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv")
        yield tensor_rule(
            qkv, f"{hf_prefix}.attn.c_attn", grouped_transform(attention.num_kv_heads or attention.num_heads)
        )
        yield from prefix_rules(kvad_prefix, hf_prefix, _LAYER)
    yield tensor_rule("decoder.norm", "transformer.ln_f")
    yield tensor_rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: LayerConfig = single_layer_type(config, "gpt_bigcode")
    fields = {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_embd": config.hidden_size,
        "n_layer": config.stack.num_layers,
        "n_head": layer.attention.num_heads,
        "multi_query": layer.attention.num_kv_heads == 1,
        "n_inner": layer.mlp.intermediate_size,
        "activation_function": hf_activation(layer.mlp.activation),
        "layer_norm_epsilon": layer.norm.eps,
        "scale_attn_weights": layer.attention.softmax_scale not in ("none", 1.0),
        "tie_word_embeddings": config.tie_embeddings,
    }
    return fields


FAMILY = Family(
    ("gpt_bigcode",),
    read,
    rules,
    write,
    prefix="transformer.",
    ignored=(r".*\.attn\.(masked_)?bias", r"lm_head\.weight"),
    head=("lm_head.weight", "transformer.wte.weight"),
)
