"""Phi-3, 3.5 and 4-mini (Abdin et al. 2024).

Llama with fused q, k, v and fused gate, up; LongRoPE.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import STACKED, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, read_rope, require_rope, rope_fields
from kvad.checkpoint.families._decoder import (
    LAYER,
    attention_config,
    build_model_config,
    build_stack,
    decoder_family,
    layer_rules,
    read_window,
    rms_norm,
    size_fields,
    with_defaults,
    with_rope_type,
)
from kvad.config import GatedMLPConfig, LayerConfig, LongRopeScalingConfig, ModelConfig
from kvad.errors import CheckpointError

_DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
_NAMES = {kvad_name: LAYER[kvad_name] for kvad_name in ("attention.out", "mlp.down", "norm1", "norm2")}


def read(fields: HFConfigReader) -> ModelConfig:
    fields = with_defaults(fields, **_DEFAULTS)
    position = read_rope(fields, max_seq_len=fields.integer("max_position_embeddings"))
    if not isinstance(position.scaling, LongRopeScalingConfig | None):
        raise CheckpointError(
            f"{fields.where}: rope_type {position.scaling.kind!r} is not supported", "Supported: longrope."
        )
    attention = attention_config(fields, position=position, window=read_window(fields))
    mlp = GatedMLPConfig(fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "silu"))
    return build_model_config(
        fields,
        build_stack(
            {"L": LayerConfig(attention, mlp, rms_norm(fields, 1e-5))}, "L" * fields.integer("num_hidden_layers")
        ),
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    def layer(kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
        yield tensor_rule(
            tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv"), f"{hf_prefix}.self_attn.qkv_proj", STACKED
        )
        yield tensor_rule(
            (f"{kvad_prefix}.mlp.gate", f"{kvad_prefix}.mlp.up"), f"{hf_prefix}.mlp.gate_up_proj", STACKED
        )
        yield from prefix_rules(kvad_prefix, hf_prefix, _NAMES)

    return layer_rules(config, layer)


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer_config(0)
    position = require_rope(layer.attention.position, "phi3")
    scaling = position.scaling
    out = {
        **size_fields(config, "phi3", "Phi3ForCausalLM"),
        "hidden_act": hf_activation(layer.mlp.activation),
        "rms_norm_eps": layer.norm.eps,
        "sliding_window": layer.attention.window,
        **with_rope_type(rope_fields(position, partial=True), "short_factor", "long_factor"),
        "original_max_position_embeddings": scaling.original_max_seq_len
        if isinstance(scaling, LongRopeScalingConfig)
        else config.max_seq_len,
    }
    return out


FAMILY = decoder_family(("phi3",), read, rules, write)
