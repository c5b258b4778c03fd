"""GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023).

Partial RoPE by halves, q, k, v fused by head.  The halves of a layer are in parallel with a norm for each
(``use_parallel_residual``), or sequential. ``rotary_pct`` and ``rotary_emb_base`` are its names of
``partial_rotary_factor`` and ``rope_theta``, which newer files have too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, grouped_transform, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import (
    ACTIVATIONS,
    hf_activation,
    read_rope,
    require_rope,
    rope_fields,
    single_layer_type,
)
from kvad.config import AttentionConfig, LayerConfig, ModelConfig, NormConfig, PlainMLPConfig, StackConfig

_LAYER = {
    "attention.out": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}


def read(fields: HFConfigReader) -> ModelConfig:
    max_seq_len, bias = fields.integer("max_position_embeddings", default=2048), fields.flag("attention_bias", True)
    theta, fraction = fields.number("rotary_emb_base", default=10000.0), fields.number("rotary_pct", default=0.25)
    if "rotary_emb_base" in fields:
        fields.require_one_of("rope_theta", theta, reason=f"rotary_emb_base is {theta}.")
    if "rotary_pct" in fields:
        fields.require_one_of("partial_rotary_factor", fraction, reason=f"rotary_pct is {fraction}.")
    position = read_rope(fields, max_seq_len=max_seq_len, theta=theta, partial_rotary_factor=fraction)
    attention = AttentionConfig(fields.integer("num_attention_heads"), position=position, qkv_bias=bias, out_bias=bias)
    mlp = PlainMLPConfig(
        fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "gelu"), bias=True
    )
    layer = LayerConfig(attention, mlp, NormConfig("layer", fields.number("layer_norm_eps", default=1e-5), bias=True))
    parallel = fields.flag("use_parallel_residual", True)
    layers = fields.integer("num_hidden_layers")
    return ModelConfig(
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=max_seq_len,
        decoder=StackConfig(layers, {"L": layer}, norm_position="parallel_pair" if parallel else "pre"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", "gpt_neox.embed_in")
    for i in range(config.stack.num_layers):
        kvad_prefix, hf_prefix = f"decoder.layers.{i}", f"gpt_neox.layers.{i}"
        by_head = grouped_transform(config.stack.layer_config(i).attention.num_heads)
        yield tensor_rule(
            tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv"),
            f"{hf_prefix}.attention.query_key_value",
            by_head,
        )
        yield from prefix_rules(kvad_prefix, hf_prefix, _LAYER)
    yield tensor_rule("decoder.norm", "gpt_neox.final_layer_norm")
    yield tensor_rule("head", "embed_out")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: LayerConfig = single_layer_type(config, "gpt_neox")
    position = require_rope(layer.attention.position, "gpt_neox")
    fields = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.stack.num_layers,
        "num_attention_heads": layer.attention.num_heads,
        "attention_bias": layer.attention.qkv_bias,
        "intermediate_size": layer.mlp.intermediate_size,
        "hidden_act": hf_activation(layer.mlp.activation),
        "layer_norm_eps": layer.norm.eps,
        "use_parallel_residual": config.stack.norm_position == "parallel_pair",
        "rotary_pct": position.partial_rotary_factor,
        "rotary_emb_base": position.theta,
        "tie_word_embeddings": config.tie_embeddings,
        **rope_fields(position, partial=True),
    }
    return fields


FAMILY = Family(
    ("gpt_neox",),
    read,
    rules,
    write,
    prefix="gpt_neox.",
    ignored=(r".*\.attention\.(masked_)?bias", r".*rotary_emb\.inv_freq", r"embed_out\.weight"),
    head=("embed_out.weight", "gpt_neox.embed_in.weight"),
)
