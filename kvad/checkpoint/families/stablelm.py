"""StableLM 2 and 3B (Stability AI 2023): Llama with LayerNorm and partial RoPE.

The halves of a layer are sequential, or in parallel after one norm; q and k are optionally normalized per head, with
separate weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, read_rope, require_rope, rope_fields
from kvad.checkpoint.families._decoder import (
    LAYER,
    STACKED,
    attention_config,
    build_model_config,
    build_stack,
    decoder_family,
    layer_rules,
    size_fields,
    with_defaults,
)
from kvad.config import GatedMLPConfig, LayerConfig, ModelConfig, NormConfig


def read(fields: HFConfigReader) -> ModelConfig:
    fields = with_defaults(fields, max_position_embeddings=4096, num_key_value_heads=32)
    fields.require_one_of("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    eps, normed = fields.number("layer_norm_eps", default=1e-5), fields.flag("qk_layernorm")
    attention = attention_config(
        fields,
        position=read_rope(fields, max_seq_len=fields.integer("max_position_embeddings"), partial_rotary_factor=0.25),
        qkv_bias=fields.flag("use_qkv_bias"),
        qk_norm="each" if normed else "none",
        qk_norm_config=NormConfig("layer", eps) if normed else None,
    )
    mlp = GatedMLPConfig(fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "silu"))
    layer = LayerConfig(attention, mlp, NormConfig("layer", eps, bias=True))
    norm_position = "parallel" if fields.flag("use_parallel_residual") else "pre"
    return build_model_config(
        fields, build_stack({"L": layer}, "L" * fields.integer("num_hidden_layers"), norm_position=norm_position)
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    attention = config.stack.layer_config(0).attention

    def layer(kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
        yield from prefix_rules(kvad_prefix, hf_prefix, LAYER)
        for part, heads in (("q", attention.num_heads), ("k", attention.num_kv_heads or attention.num_heads)):
            norms = tuple(f"{hf_prefix}.self_attn.{part}_layernorm.norms.{head}" for head in range(heads))
            yield tensor_rule(f"{kvad_prefix}.attention.{part}_norm", norms, STACKED)

    return layer_rules(config, layer)


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer_config(0)
    fields = {
        **size_fields(config, "stablelm", "StableLmForCausalLM"),
        "use_qkv_bias": layer.attention.qkv_bias,
        "qk_layernorm": layer.attention.qk_norm == "each",
        "hidden_act": hf_activation(layer.mlp.activation),
        "layer_norm_eps": layer.norm.eps,
        "use_parallel_residual": config.stack.norm_position == "parallel",
        **rope_fields(require_rope(layer.attention.position, "stablelm"), partial=True),
    }
    return fields


FAMILY = decoder_family(("stablelm",), read, rules, write)
