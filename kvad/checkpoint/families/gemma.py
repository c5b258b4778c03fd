"""Gemma (Mesnard et al. 2024), Gemma 2 (Riviere et al. 2024), Gemma 3 (Kamath et al. 2025).

Embeddings times sqrt(hidden_size), RMSNorm by 1 + w, GeGLU with the tanh form of gelu, which ``gelu`` means in Gemma
1's files too.  Gemma 2 has norms before and after each half of a layer, soft caps on attention and output logits, and a
window in every other layer.  Gemma 3 has norms on q and k instead of the caps, windows in five layers of six, and for
those a separate rotary base (``rope_local_base_freq``; in transformers 5 ``rope_parameters`` by layer type).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.conversion import HFConfigReader, TensorRule
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
    language_head,
    read_window,
    rms_norm,
    size_fields,
    window_pattern,
    with_defaults,
    write_layer_types,
)
from kvad.config import (
    AttentionConfig,
    EmbeddingConfig,
    GatedMLPConfig,
    LanguageHeadConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    head_dim,
)
from kvad.errors import CheckpointError

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"num_key_value_heads": 16, "max_position_embeddings": 8192},
    "gemma2": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {  # files on the hub omit most of them
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    },
}
_CLASSES = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
_SANDWICH = {
    "norm1_after": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "norm2_after": "post_feedforward_layernorm",
}


def read(fields: HFConfigReader) -> ModelConfig:
    name = fields.model_type
    fields = with_defaults(fields, head_dim=256, **_DEFAULTS[name])
    fields.require_one_of("use_bidirectional_attention", False, reason="kvad reads decoders only.")
    mlp = GatedMLPConfig(fields.integer("intermediate_size"), _activation(fields))
    norm = rms_norm(fields, unit_offset=True)
    layer_types = {
        letter: LayerConfig(attention, mlp, norm) for letter, attention in _attention_configs(fields).items()
    }
    return build_model_config(
        fields,
        build_stack(layer_types, _pattern(fields), norm_position="pre" if name == "gemma" else "sandwich"),
        tie=True,
        embedding=EmbeddingConfig(scale=fields.integer("hidden_size") ** 0.5),
        head=LanguageHeadConfig(logit_softcap=None if name == "gemma" else optional(fields, "final_logit_softcapping")),
    )


def _activation(fields: HFConfigReader) -> Any:
    if fields.model_type != "gemma":
        return fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    legacy = {**ACTIVATIONS, "gelu": "gelu_tanh"}
    activation = fields.choice("hidden_act", legacy, "gelu_pytorch_tanh")
    if fields.choice("hidden_activation", legacy, fields.get("hidden_act", "gelu_pytorch_tanh")) != activation:
        raise CheckpointError(f"{fields.where}: hidden_act and hidden_activation disagree")
    return activation


def _attention_configs(fields: HFConfigReader) -> dict[str, AttentionConfig]:
    """Return the attention of G (full) and L (window) layers."""
    bias, name = fields.flag("attention_bias"), fields.model_type
    full = attention_config(fields, qkv_bias=bias, out_bias=bias)
    if name == "gemma":
        return {"G": replace(full, position=full_rope(fields))}
    full = replace(full, softmax_scale=fields.number("query_pre_attn_scalar") ** -0.5)
    if name == "gemma2":
        full = replace(full, position=full_rope(fields), logit_softcap=optional(fields, "attn_logit_softcapping"))
        return {"G": full, "L": replace(full, window=read_window(fields))}
    fields.require_one_of("attn_logit_softcapping", reason="transformers' class ignores it.")
    full = replace(full, qk_norm="head")
    return {
        "G": replace(full, position=_read_rope(fields, "full_attention")),
        "L": replace(full, position=_read_rope(fields, "sliding_attention"), window=read_window(fields)),
    }


def _read_rope(fields: HFConfigReader, kind: str) -> RopeConfig:
    """Read Gemma 3's positions of one layer type.

    In the older format only full layers are scaled.
    """
    given = fields.part("rope_parameters")
    if given.content and not {"full_attention", "sliding_attention"} & set(given.content):
        raise CheckpointError(f"{fields.where}: rope_parameters without layer types is not supported")
    is_full = kind == "full_attention"
    rope_content = {
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rope_parameters": given.get(kind),
        "rope_scaling": fields.get("rope_scaling") if is_full else None,
        "rope_theta": fields.get("rope_theta" if is_full else "rope_local_base_freq"),
    }
    return full_rope(HFConfigReader(rope_content, fields.where), theta=1000000.0 if is_full else 10000.0)


def _pattern(fields: HFConfigReader) -> str:
    if fields.model_type == "gemma":
        return "G" * fields.integer("num_hidden_layers")
    interval = fields.integer("sliding_window_pattern", default=2)
    return window_pattern(fields, lambda index: (index + 1) % interval != 0)


def write(config: ModelConfig) -> dict[str, Any]:
    attention, name = config.stack.layer_config(0).attention, _name(config)
    out = {
        **size_fields(config, name, _CLASSES[name]),
        "head_dim": head_dim(config, attention),
        "rms_norm_eps": config.stack.layer_config(0).norm.eps,
        "attention_bias": attention.qkv_bias,
        **_activation_fields(config, name),
        **_rope_fields(config, name),
    }
    if name != "gemma":
        out |= {
            "query_pre_attn_scalar": _scalar(attention, head_dim(config, attention)),
            "attn_logit_softcapping": attention.logit_softcap,
            "final_logit_softcapping": language_head(config).logit_softcap,
            **write_layer_types(config),
        }
        out["sliding_window"] = out["sliding_window"] or config.max_seq_len  # the class requires a number
    return out


def _name(config: ModelConfig) -> str:
    if config.stack.norm_position == "pre":
        return "gemma"
    return "gemma2" if config.stack.layer_config(0).attention.qk_norm == "none" else "gemma3_text"


def _activation_fields(config: ModelConfig, name: str) -> dict[str, str]:
    kvad_activation = config.stack.layer_config(0).mlp.activation
    hf_name = "gelu_pytorch_tanh" if kvad_activation == "gelu_tanh" else hf_activation(kvad_activation)
    return {"hidden_act" if name == "gemma" else "hidden_activation": hf_name}


def _rope_fields(config: ModelConfig, name: str) -> dict[str, Any]:
    if name != "gemma3_text":
        return rope_fields(require_rope(config.stack.layer_config(0).attention.position, name))
    attentions = [layer.attention for layer in config.stack.layer_types.values()]
    full = next((attention for attention in attentions if attention.window is None), attentions[0])
    local = next((attention for attention in attentions if attention.window is not None), attentions[0])
    fields, local_fields = (rope_fields(require_rope(attention.position, name)) for attention in (full, local))
    nested = {"full_attention": fields["rope_parameters"], "sliding_attention": local_fields["rope_parameters"]}
    return {**fields, "rope_parameters": nested, "rope_local_base_freq": local_fields["rope_theta"]}


def _scalar(attention: AttentionConfig, dim: int) -> float:
    """Return ``query_pre_attn_scalar``, rounded to an integer if that gives the same scale."""
    if attention.softmax_scale == "default":
        return dim
    scale = 1.0 if attention.softmax_scale == "none" else float(attention.softmax_scale)
    scalar = scale**-2
    return round(scalar) if round(scalar) >= 1 and round(scalar) ** -0.5 == scale else scalar


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    """Yield the tensor rules; Gemma 1 has Llama's names for its norms."""
    return decoder_rules(LAYER if config.stack.norm_position == "pre" else {**LAYER, **QK_NORM, **_SANDWICH})(config)


FAMILY = decoder_family(("gemma", "gemma2", "gemma3_text"), read, rules, write)
