"""Qwen 2 and 2.5 (Yang et al. 2024) and Qwen 3 (Yang et al. 2025).

Llama with biases on q, k and v alone (2), or with RMSNorm on each head of q and k before they are rotated (3).  Layers
from ``max_window_layers`` on may see a window only.
"""

from __future__ import annotations

from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, rope_fields, rotary, their_activation
from kvad.checkpoint.families.decoders import (
    LAYER,
    QK_NORM,
    attention,
    chosen_letters,
    family,
    full_rope,
    known,
    layer_types,
    make,
    rms,
    rules,
    sizes,
    stack,
    window,
)
from kvad.checkpoint.hf import Fields
from kvad.config import Gated, Layer, ModelConfig, head_dim

__all__ = ["FAMILY"]

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def read(fields: Fields) -> ModelConfig:
    third = fields.model_type == "qwen3"
    fields = known(fields, **_DEFAULTS, **({"head_dim": 128} if third else {}))
    bias = third and fields.flag("attention_bias")
    position, mlp = full_rope(fields), Gated(fields.integer("intermediate_size"), _activation(fields))
    pattern = _pattern(fields)
    kinds = {}
    for letter in set(pattern):
        mixer = attention(
            fields,
            position=position,
            window=window(fields) if letter == "L" else None,
            bias=bias if third else True,
            out_bias=bias,
            qk_norm="head" if third else "none",
        )
        kinds[letter] = Layer(mixer, mlp, rms(fields))
    return make(fields, stack(kinds, pattern))


def _activation(fields: Fields) -> Any:
    return fields.choice("hidden_act", ACTIVATIONS, "silu")


def _pattern(fields: Fields) -> str:
    return chosen_letters(fields, lambda index: index >= fields.integer("max_window_layers"))


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer(0)
    name = "qwen2" if layer.mixer.qk_norm == "none" else "qwen3"
    types = layer_types(config)
    windows = [kind == "sliding_attention" for kind in types["layer_types"]]
    out = {
        **sizes(config, name, _CLASSES[name]),
        "hidden_act": their_activation(layer.mlp.activation),
        "rms_norm_eps": layer.norm.eps,
        **rope_fields(rotary(layer.mixer.position, name)),
        "use_sliding_window": any(windows),
        "max_window_layers": windows.index(True) if any(windows) else config.stack.layers,
        **types,
    }
    if name == "qwen3":
        out |= {"attention_bias": layer.mixer.bias, "head_dim": head_dim(config, layer.mixer)}
    return out


FAMILY = family(("qwen2", "qwen3"), read, rules({**LAYER, **QK_NORM}), write)
