"""Llama 1 to 3.x (Touvron et al. 2023), Mistral (Jiang et al. 2023), Granite (IBM 2024).

RoPE by halves, RMSNorm before each half of a layer, SwiGLU; grouped keys and values since Llama 2 70B.  Mistral has a
sliding window.  Granite scales the embeddings, each half's output, the attention logits and the output logits.
"""

from __future__ import annotations

import math
from typing import Any

from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families._common import (
    ACTIVATIONS,
    dropout_fields,
    hf_activation,
    read_dropout,
    require_rope,
    rope_fields,
)
from kvad.checkpoint.families._decoder import (
    LAYER,
    attention_config,
    build_model_config,
    build_stack,
    decoder_family,
    decoder_rules,
    full_rope,
    language_head,
    read_window,
    rms_norm,
    size_fields,
    with_defaults,
)
from kvad.config import EmbeddingConfig, GatedMLPConfig, LanguageHeadConfig, LayerConfig, ModelConfig, head_dim

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "granite": {"max_position_embeddings": 2048},
}
_DROPOUT = {"attention": "attention_dropout"}
_CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "granite": "GraniteForCausalLM"}


def read(fields: HFConfigReader) -> ModelConfig:
    name = fields.model_type
    fields = with_defaults(fields, **_DEFAULTS[name])
    biased = name != "mistral"  # Mistral's class ignores the flags for biases
    bias = biased and fields.flag("attention_bias")
    attention = attention_config(
        fields,
        position=full_rope(fields),
        window=read_window(fields) if name == "mistral" else None,
        qkv_bias=bias,
        out_bias=bias,
        softmax_scale=fields.number("attention_multiplier", default=1.0) if name == "granite" else "default",
    )
    activation = fields.choice("hidden_act", ACTIVATIONS, "silu")
    mlp = GatedMLPConfig(fields.integer("intermediate_size"), activation, biased and fields.flag("mlp_bias"))
    layer_types, pattern = (
        {"L": LayerConfig(attention, mlp, rms_norm(fields))},
        "L" * fields.integer("num_hidden_layers"),
    )
    dropout = read_dropout(fields, **_DROPOUT)
    if name != "granite":
        return build_model_config(fields, build_stack(layer_types, pattern), dropout=dropout)
    return build_model_config(
        fields,
        build_stack(layer_types, pattern, residual_scale=fields.number("residual_multiplier", default=1.0)),
        embedding=EmbeddingConfig(scale=fields.number("embedding_multiplier", default=1.0)),
        dropout=dropout,
        head=LanguageHeadConfig(logit_scale=1 / fields.number("logits_scaling", default=1.0)),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    layer, name = config.stack.layer_config(0), _name(config)
    out = {
        **size_fields(config, name, _CLASSES[name]),
        "hidden_act": hf_activation(layer.mlp.activation),
        "rms_norm_eps": layer.norm.eps,
        **rope_fields(require_rope(layer.attention.position, name)),
        **dropout_fields(config, **_DROPOUT),
    }
    if name == "mistral":
        out |= {"sliding_window": layer.attention.window}
    else:
        out |= {"attention_bias": layer.attention.qkv_bias, "mlp_bias": layer.mlp.bias}
    if name == "granite":
        out |= {
            "embedding_multiplier": config.embedding.scale,
            "residual_multiplier": config.stack.residual_scale,
            "attention_multiplier": _multiplier(config),
            "logits_scaling": _inverse(language_head(config).logit_scale),
        }
    return out


def _name(config: ModelConfig) -> str:
    """Return the class that can express the model."""
    attention = config.stack.layer_config(0).attention
    scales = (config.embedding.scale, config.stack.residual_scale, language_head(config).logit_scale)
    if attention.softmax_scale != "default" or scales != (1.0, 1.0, 1.0):
        return "granite"
    return "llama" if attention.window is None else "mistral"


def _multiplier(config: ModelConfig) -> float:
    attention = config.stack.layer_config(0).attention
    if attention.softmax_scale == "default":
        return float(head_dim(config, attention) ** -0.5)
    return 1.0 if attention.softmax_scale == "none" else attention.softmax_scale


def _inverse(scale: float) -> float:
    """Return a number whose reciprocal is exactly ``scale``, if there is one."""
    near = 1 / scale
    return next((x for x in (near, math.nextafter(near, 0), math.nextafter(near, math.inf)) if 1 / x == scale), near)


FAMILY = decoder_family(("llama", "mistral", "granite"), read, decoder_rules(LAYER), write)
