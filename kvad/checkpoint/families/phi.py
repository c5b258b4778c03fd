"""Phi-1, 1.5 and 2 (Gunasekar et al. 2023): both halves in parallel behind one norm, RoPE by halves on part of each
head, biases everywhere, the head's among them; optionally q and k normalised per head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, rope, rope_fields, rotary, their_activation
from kvad.checkpoint.families.decoders import attention, family, known, make, sizes, stack
from kvad.checkpoint.hf import Fields, Rule, rule, rules_under
from kvad.config import Head, Layer, ModelConfig, Norm, Plain

__all__ = ["FAMILY"]

_LAYER = {
    "mixer.q": "self_attn.q_proj",
    "mixer.k": "self_attn.k_proj",
    "mixer.v": "self_attn.v_proj",
    "mixer.out": "self_attn.dense",
    "mixer.q_norm": "self_attn.q_layernorm",
    "mixer.k_norm": "self_attn.k_layernorm",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
    "norm1": "input_layernorm",
}


def read(fields: Fields) -> ModelConfig:
    fields = known(fields, max_position_embeddings=2048)
    fields.refuse("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    mixer = attention(
        fields,
        position=rope(fields, limit=fields.integer("max_position_embeddings"), fraction=0.5),
        bias=True,
        out_bias=True,
        qk_norm="head" if fields.flag("qk_layernorm") else "none",
    )
    mlp = Plain(fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "gelu_new"), bias=True)
    layer = Layer(mixer, mlp, Norm("layer", fields.number("layer_norm_eps", default=1e-5), bias=True))
    decoder = stack({"L": layer}, "L" * fields.integer("num_hidden_layers"), norm_place="parallel")
    return make(fields, decoder, head=Head(bias=True))


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield rule("embed.tokens", "model.embed_tokens")
    for i in range(config.stack.layers):
        yield from rules_under(f"decoder.layers.{i}", f"model.layers.{i}", _LAYER)
    yield rule("decoder.norm", "model.final_layernorm")
    yield rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer(0)
    fields = {
        **sizes(config, "phi", "PhiForCausalLM"),
        "qk_layernorm": layer.mixer.qk_norm == "head",
        "hidden_act": their_activation(layer.mlp.activation),
        "layer_norm_eps": layer.norm.eps,
        **rope_fields(rotary(layer.mixer.position, "phi"), partial=True),
    }
    return fields


FAMILY = family(("phi",), read, rules, write)
