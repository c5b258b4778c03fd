"""Decoders of 2024 and later with Llama's layers that differ in names, scales, windows or the scale of queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import Family, HFConfigReader
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families import _hf_class as base
from kvad.checkpoint.families import llama
from kvad.checkpoint.families._hf_class import HFClass, decoder_family
from kvad.config import ModelConfig

_FIELDS = {**base.SIZES, **hf.dropouts(attention="attention_dropout"), "attention.position": hf.rope()}

# ---------------------------------------------------------------- InternLM 3, IQuest-Coder


def _bias(name: str, other_name: str) -> hf.HFField:
    """Build the flag for biases, whose name in older files is ``other_name``."""
    return hf.HFField(lambda fields: fields.flag(name, fields.flag(other_name)), lambda value, config: {name: value})


def _check_internlm3(fields: HFConfigReader) -> None:
    attention = fields.flag("attention_bias", fields.flag("qkv_bias"))
    if fields.flag("mlp_bias", fields.flag("bias")) != attention:
        raise fields.error("qkv_bias and bias differ", "transformers reads equal values only.")


# Shanghai AI Laboratory 2025.  transformers computes it with the class of Llama.
_INTERNLM3 = HFClass(
    "internlm3",
    "LlamaForCausalLM",
    {
        **_FIELDS,
        **dict.fromkeys(("attention.qkv_bias", "attention.out_bias"), _bias("attention_bias", "qkv_bias")),
        "mlp.bias": _bias("mlp_bias", "bias"),
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
    },
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 2, "head_dim": 128},
    check=_check_internlm3,
)


def _check_iquestcoder(fields: HFConfigReader) -> None:
    reason = "No published model uses it, and transformers refuses it."
    fields.require_one_of("clip_qkv", reason=reason)
    fields.require_one_of("use_sliding_window", False, reason=reason)


# IQuest 2025.  As InternLM 3.
_IQUESTCODER = _INTERNLM3.variant(
    "iquestcoder",
    "LlamaForCausalLM",
    fields={**_INTERNLM3.fields, **hf.biases("attention_bias"), "mlp.bias": hf.flag("mlp_bias")},
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128},
    check=_check_iquestcoder,
)


# ---------------------------------------------------------------- Helium


def _check_helium(fields: HFConfigReader) -> None:
    heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if heads * (head_dim := fields.integer("head_dim", default=128)) != hidden_size:
        raise fields.error(
            f"num_attention_heads * head_dim: must equal hidden_size {hidden_size}, got {heads * head_dim}"
        )


# Kyutai 2025.  Rotary positions on neighboring dimensions; biases on q, k and v only.
_HELIUM = HFClass(
    "helium",
    "HeliumForCausalLM",
    {
        **_FIELDS,
        "attention.position": hf.rope(theta=100000.0, interleaved=True),
        "attention.qkv_bias": hf.flag("attention_bias"),
        "mlp.bias": hf.flag("mlp_bias"),
        "norm.eps": hf.number("rms_norm_eps", 1e-8),
    },
    defaults={"max_position_embeddings": 4096, "num_key_value_heads": 20, "head_dim": 128},
    check=_check_helium,
)


# ---------------------------------------------------------------- HyperCLOVA X


def _attention_multiplier(fields: HFConfigReader) -> float:
    head_dim = fields.optional_integer("head_dim")
    head_dim = head_dim or fields.integer("hidden_size") // fields.integer("num_attention_heads")
    return fields.number("attention_multiplier", default=head_dim**-0.5)


# NAVER 2025.  Granite's scales, with logits multiplied instead of divided, and optionally norms after each half of a
# layer.
_HYPERCLOVAX = HFClass(
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    {
        **_FIELDS,
        **hf.biases("attention_bias"),
        "attention.softmax_scale": hf.softmax_scale(
            _attention_multiplier, lambda scale: {"attention_multiplier": scale}
        ),
        "mlp.bias": hf.flag("mlp_bias"),
        "embedding.scale": hf.number("embedding_multiplier", 1.0),
        "stack.residual_scale": hf.number("residual_multiplier", 1.0),
        "stack.norm_position": hf.flag("use_post_norm", True, values=("pre", "sandwich")),
        "head.logit_scale": hf.number("logits_scaling", 1.0),
    },
    layer={**base.LAYER, "norm1_after": "post_norm1", "norm2_after": "post_norm2"},
    defaults={"max_position_embeddings": 2048},
)


# ---------------------------------------------------------------- Layers with a window


# Mistral AI 2024, Ministral 8B.  Mistral with a window in some layers.
_MINISTRAL = HFClass(
    "ministral",
    "MinistralForCausalLM",
    _FIELDS,
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    layer_types=base.window_layers(
        lambda fields: base.window_pattern(fields, lambda index: "sliding_window" in fields)
    ),
)


# Meta 2025, Code World Model.  Llama with a window in three layers of four, after a full one.
_CWM = HFClass(
    "cwm",
    "CwmForCausalLM",
    {
        **_FIELDS,
        "attention.position": hf.rope(theta=1000000.0),
        "mlp.bias": hf.flag("mlp_bias"),
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
    },
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192},
    check=lambda fields: hf.require_scaling(fields, "Null means llama3 scaling by 16 in transformers."),
    layer_types=base.window_layers(lambda fields: base.window_pattern(fields, lambda index: index % 4 != 0)),
)


# ---------------------------------------------------------------- Ministral 3


def _read_ministral3_rope(fields: HFConfigReader) -> cfg.RopeConfig:
    limit = fields.integer("max_position_embeddings")
    fields.part("rope_parameters").require_one_of("max_position_embeddings", limit, reason="It must be the model's.")
    return hf.read_full_rope(fields)


def _read_query_scaling(fields: HFConfigReader) -> cfg.QueryScalingConfig:
    part = fields.part("rope_parameters")
    original = part.integer("original_max_position_embeddings")
    return cfg.QueryScalingConfig(part.number("llama_4_scaling_beta"), original)


def _write_ministral3_rope(position: Any, config: ModelConfig) -> Mapping[str, Any]:
    content, scaling = hf.rope_fields(position), config.stack.layer_config(0).attention.query_scaling
    if scaling is not None:
        content["rope_parameters"] |= {
            "llama_4_scaling_beta": scaling.beta,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return content


# Mistral AI 2025.  Mistral whose queries grow with the logarithm of their position, as in Llama 4.
_MINISTRAL3 = HFClass(
    "ministral3",
    "Ministral3ForCausalLM",
    {
        **_FIELDS,
        "attention.position": hf.HFField(_read_ministral3_rope, _write_ministral3_rope),
        "attention.query_scaling": hf.HFField(_read_query_scaling),
        "attention.window": hf.optional_integer("sliding_window"),
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
    },
    defaults={"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128},
)

_MINISTRAL3_FAMILY = decoder_family(_MINISTRAL3)


def _text_family(config: ModelConfig) -> Family:
    """Return the family of a text model of Mistral 3: Mistral, or Ministral 3."""
    scaling = config.stack.layer_config(0).attention.query_scaling
    return llama.FAMILIES[0] if scaling is None else _MINISTRAL3_FAMILY


def _read_mistral3(fields: HFConfigReader) -> ModelConfig:
    if fields.model_type != "mistral3":  # as kvad writes it
        return (_MINISTRAL3_FAMILY if fields.model_type == "ministral3" else llama.FAMILIES[0]).read(fields)
    text = fields.part("text_config")
    text.require_one_of("model_type", "mistral", "ministral3", reason="It is the class of the text model.")
    tied = fields.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    text = text.derive({"model_type": "mistral", **text.content, "tie_word_embeddings": tied})
    return (_MINISTRAL3_FAMILY if text.model_type == "ministral3" else llama.FAMILIES[0]).read(text)


# Mistral AI 2025, Mistral Small 3.1 and Ministral 3 with vision: the text model only.
_MISTRAL3 = replace(
    _MINISTRAL3_FAMILY,
    types=("mistral3",),
    read=_read_mistral3,
    rules=lambda config: _text_family(config).rules(config),
    write_fields=lambda config: _text_family(config).write_fields(config),
    prefix="language_model.",
    ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*", r"lm_head\.weight"),
)

FAMILIES = (
    decoder_family(_INTERNLM3),
    decoder_family(_IQUESTCODER),
    decoder_family(_HELIUM),
    decoder_family(_HYPERCLOVAX),
    decoder_family(_MINISTRAL),
    decoder_family(_CWM),
    _MINISTRAL3_FAMILY,
    _MISTRAL3,
)
