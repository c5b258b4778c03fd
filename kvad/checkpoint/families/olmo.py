"""OLMo (Groeneveld et al. 2024) and OLMo 2 (Walsh et al. 2024).

The first is Llama with LayerNorm without weights, and may clip q, k and v to [-clip_qkv, clip_qkv].  The second has a
norm after each half of a layer instead of before it, and normalizes all of q and all of k.
"""

from __future__ import annotations

from typing import Any

from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, optional, require_rope, rope_fields
from kvad.checkpoint.families._decoder import (
    LAYER,
    QK_NORM,
    attention_config,
    build_model_config,
    build_stack,
    decoder_family,
    decoder_rules,
    full_rope,
    rms_norm,
    size_fields,
    with_defaults,
    with_rope_type,
)
from kvad.config import GatedMLPConfig, LayerConfig, ModelConfig, NormConfig

_CLASSES = {"olmo": "OlmoForCausalLM", "olmo2": "Olmo2ForCausalLM"}
_NORMS = {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"}  # the first has no weights


def read(fields: HFConfigReader) -> ModelConfig:
    second = fields.model_type == "olmo2"
    fields = with_defaults(fields, max_position_embeddings=2048)
    bias = fields.flag("attention_bias")
    attention = attention_config(
        fields,
        position=full_rope(fields),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="full" if second else "none",
        clip_qkv=None if second else optional(fields, "clip_qkv"),
    )
    mlp = GatedMLPConfig(fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "silu"))
    norm = rms_norm(fields, 1e-5) if second else NormConfig("layer", 1e-5, weight=False)
    norm_position = "after" if second else "pre"
    layers = fields.integer("num_hidden_layers")
    return build_model_config(
        fields, build_stack({"L": LayerConfig(attention, mlp, norm)}, "L" * layers, norm_position=norm_position)
    )


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer_config(0)
    name = "olmo" if layer.norm.kind == "layer" else "olmo2"
    class_fields = {"clip_qkv": layer.attention.clip_qkv} if name == "olmo" else {"rms_norm_eps": layer.norm.eps}
    out = {
        **size_fields(config, name, _CLASSES[name]),
        "hidden_act": hf_activation(layer.mlp.activation),
        "attention_bias": layer.attention.qkv_bias,
        **with_rope_type(rope_fields(require_rope(layer.attention.position, name)), "factor"),
        **class_fields,
    }
    return out


FAMILY = decoder_family(("olmo", "olmo2"), read, decoder_rules({**LAYER, **QK_NORM, **_NORMS}), write)
