"""Command R (Cohere 2024) and Command A, R7B (Cohere 2025, ``cohere2``).

Rotary positions on neighboring dimensions (0, 1), (2, 3), ..., LayerNorm without bias, attention and MLP in parallel,
logits times ``logit_scale``.  Some normalize q and k, each head with separate weights.  In ``cohere2`` three layers of
four have a window, and only these have positions.
"""

from __future__ import annotations

from dataclasses import replace
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
    language_head,
    read_window,
    size_fields,
    window_pattern,
    with_defaults,
    write_layer_types,
)
from kvad.config import (
    AttentionConfig,
    GatedMLPConfig,
    LanguageHeadConfig,
    LayerConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)
from kvad.errors import CheckpointError

_CLASSES = {"cohere": "CohereForCausalLM", "cohere2": "Cohere2ForCausalLM"}


def read(fields: HFConfigReader) -> ModelConfig:
    second = fields.model_type == "cohere2"
    fields = with_defaults(fields, max_position_embeddings=8192, **({"sliding_window": 4096} if second else {}))
    if second:
        pattern = window_pattern(
            fields, lambda index: (index + 1) % fields.integer("sliding_window_pattern", default=4) != 0
        )
    else:
        pattern = "L" * fields.integer("num_hidden_layers")
    mlp = GatedMLPConfig(fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "silu"))
    norm = NormConfig("layer", fields.number("layer_norm_eps", default=1e-5))
    layer_types = {
        letter: LayerConfig(attention, mlp, norm) for letter, attention in _attention_configs(fields).items()
    }
    head = LanguageHeadConfig(logit_scale=fields.number("logit_scale", default=0.0625))
    return build_model_config(fields, build_stack(layer_types, pattern, norm_position="parallel"), tie=True, head=head)


def _attention_configs(fields: HFConfigReader) -> dict[str, AttentionConfig]:
    bias = fields.flag("attention_bias")
    attention = attention_config(fields, position=full_rope(fields, interleaved=True), qkv_bias=bias, out_bias=bias)
    if fields.model_type == "cohere2":
        fields.require_one_of("use_qk_norm", False, reason="transformers' class ignores it.")
        return {"L": replace(attention, window=read_window(fields)), "G": replace(attention, position=None)}
    theta = fields.part("rope_parameters").get("rope_theta", fields.get("rope_theta"))
    if theta is None:
        raise CheckpointError(
            f"{fields.where}: rope_theta is missing", "The default is 10000 in transformers 4, 500000 in 5."
        )
    return {"L": replace(attention, qk_norm="each" if fields.flag("use_qk_norm") else "none")}


def write(config: ModelConfig) -> dict[str, Any]:
    layers = [config.stack.layer_config(index) for index in range(config.stack.num_layers)]
    windows = [layer.attention.window is not None for layer in layers]
    second = any(windows) or layers[0].attention.position is None
    first, name = layers[windows.index(True)] if any(windows) else layers[0], "cohere2" if second else "cohere"
    out = {
        **size_fields(config, name, _CLASSES[name]),
        "hidden_act": hf_activation(first.mlp.activation),
        "layer_norm_eps": first.norm.eps,
        "attention_bias": first.attention.qkv_bias,
        "logit_scale": language_head(config).logit_scale,
        **rope_fields(require_rope(first.attention.position or RopeConfig(), name)),
        **(write_layer_types(config) if second else {"use_qk_norm": first.attention.qk_norm == "each"}),
    }
    return out


FAMILY = decoder_family(("cohere", "cohere2"), read, decoder_rules({**LAYER, **QK_NORM}), write)
