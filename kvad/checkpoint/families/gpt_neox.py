"""GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023): RoPE by halves on part of each head, q, k and v fused
by head, both halves in parallel with a norm for each (``use_parallel_residual``) or one after the other.

``rotary_pct`` and ``rotary_emb_base`` are its names of ``partial_rotary_factor`` and ``rope_theta``, which newer files
have beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families.common import (
    ACTIVATIONS,
    one_kind,
    rope,
    rope_fields,
    rotary,
    their_activation,
)
from kvad.checkpoint.hf import Family, Fields, Rule, grouped, rule, rules_under
from kvad.config import Attention, Layer, ModelConfig, Norm, Plain, Stack

__all__ = ["FAMILY"]

_LAYER = {
    "mixer.out": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}


def read(fields: Fields) -> ModelConfig:
    limit, bias = fields.integer("max_position_embeddings", default=2048), fields.flag("attention_bias", True)
    theta, fraction = fields.number("rotary_emb_base", default=10000.0), fields.number("rotary_pct", default=0.25)
    if "rotary_emb_base" in fields:
        fields.refuse("rope_theta", theta, why=f"rotary_emb_base is {theta}")
    if "rotary_pct" in fields:
        fields.refuse("partial_rotary_factor", fraction, why=f"rotary_pct is {fraction}")
    position = rope(fields, limit=limit, theta=theta, fraction=fraction)
    mixer = Attention(fields.integer("num_attention_heads"), position=position, bias=bias, out_bias=bias)
    mlp = Plain(fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "gelu"), bias=True)
    layer = Layer(mixer, mlp, Norm("layer", fields.number("layer_norm_eps", default=1e-5), bias=True))
    parallel = fields.flag("use_parallel_residual", True)
    layers = fields.integer("num_hidden_layers")
    return ModelConfig(
        width=fields.integer("hidden_size"),
        vocab=fields.integer("vocab_size"),
        limit=limit,
        decoder=Stack(layers, {"L": layer}, norm_place="parallel_pair" if parallel else "pre"),
        tie=fields.flag("tie_word_embeddings"),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield rule("embed.tokens", "gpt_neox.embed_in")
    for i in range(config.stack.layers):
        ours, theirs = f"decoder.layers.{i}", f"gpt_neox.layers.{i}"
        by_head = grouped(config.stack.layer(i).mixer.heads)
        yield rule(tuple(f"{ours}.mixer.{part}" for part in "qkv"), f"{theirs}.attention.query_key_value", by_head)
        yield from rules_under(ours, theirs, _LAYER)
    yield rule("decoder.norm", "gpt_neox.final_layer_norm")
    yield rule("head", "embed_out")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: Layer = one_kind(config, "gpt_neox")
    position = rotary(layer.mixer.position, "gpt_neox")
    fields = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab,
        "max_position_embeddings": config.limit,
        "hidden_size": config.width,
        "num_hidden_layers": config.stack.layers,
        "num_attention_heads": layer.mixer.heads,
        "attention_bias": layer.mixer.bias,
        "intermediate_size": layer.mlp.hidden,
        "hidden_act": their_activation(layer.mlp.activation),
        "layer_norm_eps": layer.norm.eps,
        "use_parallel_residual": config.stack.norm_place == "parallel_pair",
        "rotary_pct": position.fraction,
        "rotary_emb_base": position.theta,
        "tie_word_embeddings": config.tie,
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
