"""Qwen 2 and 2.5 (Yang et al. 2024) and Qwen 3 (Yang et al. 2025).

Llama with biases on q, k, v only (2), or with RMSNorm on each head of q and k before the rotation (3).  Layers from
``max_window_layers`` on may have a window.
"""

from __future__ import annotations

from typing import Any

from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, require_rope, rope_fields
from kvad.checkpoint.families._decoder import (
    LAYER,
    QK_NORM,
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
from kvad.config import GatedMLPConfig, LayerConfig, ModelConfig, head_dim

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def read(fields: HFConfigReader) -> ModelConfig:
    third = fields.model_type == "qwen3"
    fields = with_defaults(fields, **_DEFAULTS, **({"head_dim": 128} if third else {}))
    bias = third and fields.flag("attention_bias")
    position, mlp = full_rope(fields), GatedMLPConfig(fields.integer("intermediate_size"), _activation(fields))
    pattern = _pattern(fields)
    layer_types = {}
    for letter in set(pattern):
        attention = attention_config(
            fields,
            position=position,
            window=read_window(fields) if letter == "L" else None,
            qkv_bias=bias if third else True,
            out_bias=bias,
            qk_norm="head" if third else "none",
        )
        layer_types[letter] = LayerConfig(attention, mlp, rms_norm(fields))
    return build_model_config(fields, build_stack(layer_types, pattern))


def _activation(fields: HFConfigReader) -> Any:
    return fields.choice("hidden_act", ACTIVATIONS, "silu")


def _pattern(fields: HFConfigReader) -> str:
    return optional_window_pattern(fields, lambda index: index >= fields.integer("max_window_layers"))


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer_config(0)
    name = "qwen2" if layer.attention.qk_norm == "none" else "qwen3"
    types = write_layer_types(config)
    windows = [kind == "sliding_attention" for kind in types["layer_types"]]
    out = {
        **size_fields(config, name, _CLASSES[name]),
        "hidden_act": hf_activation(layer.mlp.activation),
        "rms_norm_eps": layer.norm.eps,
        **rope_fields(require_rope(layer.attention.position, name)),
        "use_sliding_window": any(windows),
        "max_window_layers": windows.index(True) if any(windows) else config.stack.num_layers,
        **types,
    }
    if name == "qwen3":
        out |= {"attention_bias": layer.attention.qkv_bias, "head_dim": head_dim(config, layer.attention)}
    return out


FAMILY = decoder_family(("qwen2", "qwen3"), read, decoder_rules({**LAYER, **QK_NORM}), write)
