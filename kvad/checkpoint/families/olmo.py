"""OLMo (Groeneveld et al. 2024) and OLMo 2 (Walsh et al. 2024).

The first is Llama with LayerNorm without weights, and may cut q, k and v to [-clip_qkv, clip_qkv].  The second has no
norm before a half of a layer but one on its output, and normalises the whole of q and of k.
"""

from __future__ import annotations

from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, optional, rope_fields, rotary, their_activation
from kvad.checkpoint.families.decoders import (
    LAYER,
    QK_NORM,
    attention,
    family,
    full_rope,
    known,
    make,
    rms,
    rules,
    sizes,
    stack,
    with_type,
)
from kvad.checkpoint.hf import Fields
from kvad.config import Gated, Layer, ModelConfig, Norm

__all__ = ["FAMILY"]

_CLASSES = {"olmo": "OlmoForCausalLM", "olmo2": "Olmo2ForCausalLM"}
_NORMS = {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"}  # the first has no weights


def read(fields: Fields) -> ModelConfig:
    second = fields.model_type == "olmo2"
    fields = known(fields, max_position_embeddings=2048)
    bias = fields.flag("attention_bias")
    mixer = attention(
        fields,
        position=full_rope(fields),
        bias=bias,
        out_bias=bias,
        qk_norm="full" if second else "none",
        clip=None if second else optional(fields, "clip_qkv"),
    )
    mlp = Gated(fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "silu"))
    norm = rms(fields, 1e-5) if second else Norm("layer", 1e-5, weight=False)
    place = "after" if second else "pre"
    layers = fields.integer("num_hidden_layers")
    return make(fields, stack({"L": Layer(mixer, mlp, norm)}, "L" * layers, norm_place=place))


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer(0)
    name = "olmo" if layer.norm.kind == "layer" else "olmo2"
    own = {"clip_qkv": layer.mixer.clip} if name == "olmo" else {"rms_norm_eps": layer.norm.eps}
    out = {
        **sizes(config, name, _CLASSES[name]),
        "hidden_act": their_activation(layer.mlp.activation),
        "attention_bias": layer.mixer.bias,
        **with_type(rope_fields(rotary(layer.mixer.position, name)), "factor"),
        **own,
    }
    return out


FAMILY = family(("olmo", "olmo2"), read, rules({**LAYER, **QK_NORM, **_NORMS}), write)
