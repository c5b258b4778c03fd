"""StableLM 2 and 3B (Stability AI 2023): Llama with LayerNorm and RoPE on part of each head; either half after half,
or both in parallel behind one norm; optionally q and k normalised per head, each by a weight of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, rope, rope_fields, rotary, their_activation
from kvad.checkpoint.families.decoders import LAYER, STACKED, attention, family, known, make, rules_of, sizes, stack
from kvad.checkpoint.hf import Fields, Rule, rule, rules_under
from kvad.config import Gated, Layer, ModelConfig, Norm

__all__ = ["FAMILY"]


def read(fields: Fields) -> ModelConfig:
    fields = known(fields, max_position_embeddings=4096, num_key_value_heads=32)
    fields.refuse("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    eps, normed = fields.number("layer_norm_eps", default=1e-5), fields.flag("qk_layernorm")
    mixer = attention(
        fields,
        position=rope(fields, limit=fields.integer("max_position_embeddings"), fraction=0.25),
        bias=fields.flag("use_qkv_bias"),
        qk_norm="each" if normed else "none",
        norm=Norm("layer", eps) if normed else None,
    )
    mlp = Gated(fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "silu"))
    layer = Layer(mixer, mlp, Norm("layer", eps, bias=True))
    place = "parallel" if fields.flag("use_parallel_residual") else "pre"
    return make(fields, stack({"L": layer}, "L" * fields.integer("num_hidden_layers"), norm_place=place))


def rules(config: ModelConfig) -> Iterator[Rule]:
    mixer = config.stack.layer(0).mixer

    def layer(ours: str, theirs: str) -> Iterator[Rule]:
        yield from rules_under(ours, theirs, LAYER)
        for part, heads in (("q", mixer.heads), ("k", mixer.kv_heads or mixer.heads)):
            norms = tuple(f"{theirs}.self_attn.{part}_layernorm.norms.{head}" for head in range(heads))
            yield rule(f"{ours}.mixer.{part}_norm", norms, STACKED)

    return rules_of(config, layer)


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer(0)
    fields = {
        **sizes(config, "stablelm", "StableLmForCausalLM"),
        "use_qkv_bias": layer.mixer.bias,
        "qk_layernorm": layer.mixer.qk_norm == "each",
        "hidden_act": their_activation(layer.mlp.activation),
        "layer_norm_eps": layer.norm.eps,
        "use_parallel_residual": config.stack.norm_place == "parallel",
        **rope_fields(rotary(layer.mixer.position, "stablelm"), partial=True),
    }
    return fields


FAMILY = family(("stablelm",), read, rules, write)
