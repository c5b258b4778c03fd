"""SmolLM3 (Bakouch et al. 2025): Llama with no positions in every fourth layer (NoPE)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, require_rope, rope_fields
from kvad.checkpoint.families._decoder import (
    LAYER,
    attention_config,
    build_model_config,
    build_stack,
    decoder_family,
    decoder_rules,
    full_rope,
    optional_window_pattern,
    read_window,
    rms_norm,
    size_fields,
    with_defaults,
    write_layer_types,
)
from kvad.config import GatedMLPConfig, LayerConfig, ModelConfig
from kvad.errors import CheckpointError

_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 4, "no_rope_layer_interval": 4}
_NOPE = {"G": "N", "L": "M"}  # layer types without positions, full and with a window


def read(fields: HFConfigReader) -> ModelConfig:
    fields = with_defaults(fields, **_DEFAULTS)
    bias = fields.flag("attention_bias")
    mlp = GatedMLPConfig(
        fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "silu"), fields.flag("mlp_bias")
    )
    attention = attention_config(fields, position=full_rope(fields, theta=2000000.0), qkv_bias=bias, out_bias=bias)
    local, norm = replace(attention, window=read_window(fields)), rms_norm(fields)
    layer_types = {"G": LayerConfig(attention, mlp, norm), "L": LayerConfig(local, mlp, norm)}
    for letter, nope in _NOPE.items():
        layer_types[nope] = replace(
            layer_types[letter], attention=replace(layer_types[letter].attention, position=None)
        )
    return build_model_config(fields, build_stack(layer_types, _pattern(fields)), tie=True)


def _pattern(fields: HFConfigReader) -> str:
    layers, interval = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval")
    rotated = fields.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers:
        raise CheckpointError(
            f"{fields.where}: no_rope_layers {rotated!r} is not supported", f"It must have {layers} values 0 or 1."
        )
    window_letters = optional_window_pattern(fields, lambda index: not rotated[index])
    return "".join(letter if rope else _NOPE[letter] for letter, rope in zip(window_letters, rotated, strict=True))


def write(config: ModelConfig) -> dict[str, Any]:
    layers = [config.stack.layer_config(index) for index in range(config.stack.num_layers)]
    first, rotated = layers[0], [int(layer.attention.position is not None) for layer in layers]
    position = layers[rotated.index(1)].attention.position if any(rotated) else None
    types = write_layer_types(config)
    out = {
        **size_fields(config, "smollm3", "SmolLM3ForCausalLM"),
        "hidden_act": hf_activation(first.mlp.activation),
        "rms_norm_eps": first.norm.eps,
        "attention_bias": first.attention.qkv_bias,
        "mlp_bias": first.mlp.bias,
        **rope_fields(require_rope(position, "smollm3")),
        "no_rope_layers": rotated,
        "use_sliding_window": types["sliding_window"] is not None,
        **types,
    }
    return out


FAMILY = decoder_family(("smollm3",), read, decoder_rules(LAYER), write)
