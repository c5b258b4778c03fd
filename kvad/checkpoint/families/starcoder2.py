"""StarCoder 2 (Lozhkov et al. 2024).

LayerNorm and MLP with biases, grouped keys, a sliding window.
"""

from __future__ import annotations

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
    read_window,
    size_fields,
    with_defaults,
)
from kvad.config import LayerConfig, ModelConfig, NormConfig, PlainMLPConfig

_DEFAULTS = {"max_position_embeddings": 4096, "num_key_value_heads": 2}
_NAMES = {**LAYER, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}


def read(fields: HFConfigReader) -> ModelConfig:
    fields = with_defaults(fields, **_DEFAULTS)
    bias = fields.flag("use_bias", True)
    attention = attention_config(
        fields, position=full_rope(fields), window=read_window(fields), qkv_bias=bias, out_bias=bias
    )
    activation = fields.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
    mlp = PlainMLPConfig(fields.integer("intermediate_size"), activation, bias)
    layer = LayerConfig(attention, mlp, NormConfig("layer", fields.number("norm_epsilon", default=1e-5), bias=True))
    return build_model_config(fields, build_stack({"L": layer}, "L" * fields.integer("num_hidden_layers")), tie=True)


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer_config(0)
    out = {
        **size_fields(config, "starcoder2", "Starcoder2ForCausalLM"),
        "hidden_act": hf_activation(layer.mlp.activation),
        "norm_epsilon": layer.norm.eps,
        "use_bias": layer.attention.qkv_bias,
        "sliding_window": layer.attention.window,
        **rope_fields(require_rope(layer.attention.position, "starcoder2")),
    }
    return out


FAMILY = decoder_family(("starcoder2",), read, decoder_rules(_NAMES), write)
