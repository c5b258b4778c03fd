"""StarCoder 2 (Lozhkov et al. 2024): LayerNorm with biases, a plain MLP with biases, grouped keys, a sliding window."""

from __future__ import annotations

from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, rope_fields, rotary, their_activation
from kvad.checkpoint.families.decoders import (
    LAYER,
    attention,
    family,
    full_rope,
    known,
    make,
    rules,
    sizes,
    stack,
    window,
)
from kvad.checkpoint.hf import Fields
from kvad.config import Layer, ModelConfig, Norm, Plain

__all__ = ["FAMILY"]

_DEFAULTS = {"max_position_embeddings": 4096, "num_key_value_heads": 2}
_NAMES = {**LAYER, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}


def read(fields: Fields) -> ModelConfig:
    fields = known(fields, **_DEFAULTS)
    bias = fields.flag("use_bias", True)
    mixer = attention(fields, position=full_rope(fields), window=window(fields), bias=bias, out_bias=bias)
    activation = fields.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
    mlp = Plain(fields.integer("intermediate_size"), activation, bias)
    layer = Layer(mixer, mlp, Norm("layer", fields.number("norm_epsilon", default=1e-5), bias=True))
    return make(fields, stack({"L": layer}, "L" * fields.integer("num_hidden_layers")), tie=True)


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer(0)
    out = {
        **sizes(config, "starcoder2", "Starcoder2ForCausalLM"),
        "hidden_act": their_activation(layer.mlp.activation),
        "norm_epsilon": layer.norm.eps,
        "use_bias": layer.mixer.bias,
        "sliding_window": layer.mixer.window,
        **rope_fields(rotary(layer.mixer.position, "starcoder2")),
    }
    return out


FAMILY = family(("starcoder2",), read, rules(_NAMES), write)
