"""Phi-1, 1.5 and 2 (Gunasekar et al. 2023).

Parallel halves after one norm, partial RoPE by halves, biases everywhere.  The head has a bias too; q and k are
optionally normalized per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, read_rope, require_rope, rope_fields
from kvad.checkpoint.families._decoder import (
    attention_config,
    build_model_config,
    build_stack,
    decoder_family,
    size_fields,
    with_defaults,
)
from kvad.config import LanguageHeadConfig, LayerConfig, ModelConfig, NormConfig, PlainMLPConfig

_LAYER = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.dense",
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
    "norm1": "input_layernorm",
}


def read(fields: HFConfigReader) -> ModelConfig:
    fields = with_defaults(fields, max_position_embeddings=2048)
    fields.require_one_of("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    attention = attention_config(
        fields,
        position=read_rope(fields, max_seq_len=fields.integer("max_position_embeddings"), partial_rotary_factor=0.5),
        qkv_bias=True,
        out_bias=True,
        qk_norm="head" if fields.flag("qk_layernorm") else "none",
    )
    mlp = PlainMLPConfig(
        fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "gelu_new"), bias=True
    )
    layer = LayerConfig(attention, mlp, NormConfig("layer", fields.number("layer_norm_eps", default=1e-5), bias=True))
    decoder = build_stack({"L": layer}, "L" * fields.integer("num_hidden_layers"), norm_position="parallel")
    return build_model_config(fields, decoder, head=LanguageHeadConfig(bias=True))


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", "model.embed_tokens")
    for i in range(config.stack.num_layers):
        yield from prefix_rules(f"decoder.layers.{i}", f"model.layers.{i}", _LAYER)
    yield tensor_rule("decoder.norm", "model.final_layernorm")
    yield tensor_rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer_config(0)
    fields = {
        **size_fields(config, "phi", "PhiForCausalLM"),
        "qk_layernorm": layer.attention.qk_norm == "head",
        "hidden_act": hf_activation(layer.mlp.activation),
        "layer_norm_eps": layer.norm.eps,
        **rope_fields(require_rope(layer.attention.position, "phi"), partial=True),
    }
    return fields


FAMILY = decoder_family(("phi",), read, rules, write)
