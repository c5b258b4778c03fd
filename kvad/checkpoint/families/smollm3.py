"""SmolLM3 (Bakouch et al. 2025): Llama in which every fourth layer has no positions at all (NoPE)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, rope_fields, rotary, their_activation
from kvad.checkpoint.families.decoders import (
    LAYER,
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
from kvad.config import Gated, Layer, ModelConfig
from kvad.errors import CheckpointError

__all__ = ["FAMILY"]

_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 4, "no_rope_layer_interval": 4}
_NOPE = {"G": "N", "L": "M"}  # the letters of layers without positions, whole and with a window


def read(fields: Fields) -> ModelConfig:
    fields = known(fields, **_DEFAULTS)
    bias = fields.flag("attention_bias")
    mlp = Gated(
        fields.integer("intermediate_size"),
        fields.choice("hidden_act", ACTIVATIONS, "silu"),
        fields.flag("mlp_bias"),
    )
    mixer = attention(fields, position=full_rope(fields, theta=2000000.0), bias=bias, out_bias=bias)
    local, norm = replace(mixer, window=window(fields)), rms(fields)
    kinds = {"G": Layer(mixer, mlp, norm), "L": Layer(local, mlp, norm)}
    for letter, nope in _NOPE.items():
        kinds[nope] = replace(kinds[letter], mixer=replace(kinds[letter].mixer, position=None))
    return make(fields, stack(kinds, _pattern(fields)), tie=True)


def _pattern(fields: Fields) -> str:
    layers, interval = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval")
    rotated = fields.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers:
        raise CheckpointError(f"{fields.where}: no_rope_layers {rotated!r} is not supported", f"{layers} of 0 and 1")
    seen = chosen_letters(fields, lambda index: not rotated[index])
    return "".join(letter if rope else _NOPE[letter] for letter, rope in zip(seen, rotated, strict=True))


def write(config: ModelConfig) -> dict[str, Any]:
    layers = [config.stack.layer(index) for index in range(config.stack.layers)]
    first, rotated = layers[0], [int(layer.mixer.position is not None) for layer in layers]
    position = layers[rotated.index(1)].mixer.position if any(rotated) else None
    types = layer_types(config)
    out = {
        **sizes(config, "smollm3", "SmolLM3ForCausalLM"),
        "hidden_act": their_activation(first.mlp.activation),
        "rms_norm_eps": first.norm.eps,
        "attention_bias": first.mixer.bias,
        "mlp_bias": first.mlp.bias,
        **rope_fields(rotary(position, "smollm3")),
        "no_rope_layers": rotated,
        "use_sliding_window": types["sliding_window"] is not None,
        **types,
    }
    return out


FAMILY = family(("smollm3",), read, rules(LAYER), write)
