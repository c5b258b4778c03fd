"""Gemma (Mesnard et al. 2024), Gemma 2 (Riviere et al. 2024), Gemma 3 (Kamath et al. 2025).

Embeddings times sqrt(hidden_size), RMSNorm by 1 + w, GeGLU with the tanh form of gelu, which ``gelu`` means in Gemma
1's files too.  Gemma 2 has norms before and after each half of a layer, soft caps on attention and output logits, and a
window in every other layer.  Gemma 3 has norms on q and k instead of the caps, windows in five layers of six, and for
those a separate rotary base (``rope_local_base_freq``; in transformers 5 ``rope_parameters`` by layer type).

Of Gemma 3 with vision (``gemma3``) only the text model is read; it is written as ``gemma3_text``.  The vision tower and
its projector are ignored by name: for text, the result equals the full model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, rope_fields
from kvad.checkpoint.families._decoder import (
    LAYER,
    QK_NORM,
    SIZES,
    DecoderClass,
    LayerTypes,
    decoder_family,
    read_window,
    window_layers,
    window_pattern,
    with_attention,
)
from kvad.config import ModelConfig
from kvad.errors import CheckpointError


def _check(fields: HFConfigReader) -> None:
    fields.require_one_of("use_bidirectional_attention", False, reason="kvad reads decoders only.")


def _read_activation(fields: HFConfigReader) -> Any:
    legacy = {**ACTIVATIONS, "gelu": "gelu_tanh"}
    activation = fields.choice("hidden_act", legacy, "gelu_pytorch_tanh")
    if fields.choice("hidden_activation", legacy, fields.get("hidden_act", "gelu_pytorch_tanh")) != activation:
        raise CheckpointError(f"{fields.where}: hidden_act and hidden_activation disagree")
    return activation


def write_activation(activation: str) -> str:
    return "gelu_pytorch_tanh" if activation == "gelu_tanh" else hf_activation(activation)


def write_scalar(scale: float) -> dict[str, float]:
    """Return ``query_pre_attn_scalar``, rounded to an integer if that gives the same scale."""
    scalar = scale**-2
    is_rounded = round(scalar) >= 1 and round(scalar) ** -0.5 == scale
    return {"query_pre_attn_scalar": round(scalar) if is_rounded else scalar}


def interval_pattern(fields: HFConfigReader) -> str:
    """Return a full layer in every n-th place, others with a window."""
    interval = fields.integer("sliding_window_pattern", default=2)
    return window_pattern(fields, lambda index: (index + 1) % interval != 0)


_GEMMA = DecoderClass(
    "gemma",
    "GemmaForCausalLM",
    {
        **SIZES,
        "tie_embeddings": hf.flag("tie_word_embeddings", True),
        "attention.position": hf.rope(),
        **hf.biases("attention_bias"),
        "mlp.activation": hf.HFField(
            _read_activation, lambda activation, config: {"hidden_act": write_activation(activation)}
        ),
        "norm.unit_offset": True,
        "embedding.scale": hf.HFField(lambda fields: fields.integer("hidden_size") ** 0.5),
    },
    defaults={"head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8192},
    check=_check,
)
_GEMMA2_LAYERS = window_layers(interval_pattern, requires_window=True)
GEMMA2 = _GEMMA.variant(
    "gemma2",
    "Gemma2ForCausalLM",
    fields={
        **_GEMMA.fields,
        "attention.softmax_scale": hf.softmax_scale(
            lambda fields: fields.number("query_pre_attn_scalar") ** -0.5, write_scalar
        ),
        "attention.logit_softcap": hf.optional_number("attn_logit_softcapping"),
        "mlp.activation": hf.HFField(
            lambda fields: fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
            lambda activation, config: {"hidden_activation": write_activation(activation)},
        ),
        "stack.norm_position": "sandwich",
        "head.logit_softcap": hf.optional_number("final_logit_softcapping"),
    },
    layer={
        **LAYER,
        **QK_NORM,
        "norm1_after": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "norm2_after": "post_feedforward_layernorm",
    },
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    layer_types=_GEMMA2_LAYERS,
)


# ---------------------------------------------------------------- Gemma 3


def _check_gemma3(fields: HFConfigReader) -> None:
    _check(fields)
    fields.require_one_of("attn_logit_softcapping", reason="transformers' class ignores it.")
    rope_parameters = fields.part("rope_parameters").content
    if rope_parameters and not {"full_attention", "sliding_attention"} & set(rope_parameters):
        raise CheckpointError(f"{fields.where}: rope_parameters without layer types is not supported")


def _read_rope(fields: HFConfigReader, kind: str) -> cfg.RopeConfig:
    """Read the positions of one layer type.  In the older format only full layers are scaled."""
    is_full = kind == "full_attention"
    rope_content = {
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rope_parameters": fields.part("rope_parameters").get(kind),
        "rope_scaling": fields.get("rope_scaling") if is_full else None,
        "rope_theta": fields.get("rope_theta" if is_full else "rope_local_base_freq"),
    }
    return hf.read_full_rope(HFConfigReader(rope_content, fields.where), theta=1000000.0 if is_full else 10000.0)


def _read_gemma3_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    local = with_attention(layer, position=_read_rope(fields, "sliding_attention"), window=read_window(fields))
    return {"G": layer, "L": local}, interval_pattern(fields)


def _write_gemma3_rope(_: object, config: ModelConfig) -> dict[str, Any]:
    attentions = [layer.attention for layer in config.stack.layer_types.values()]
    full = next((attention for attention in attentions if attention.window is None), attentions[0])
    local = next((attention for attention in attentions if attention.window is not None), attentions[0])
    fields, local_fields = (rope_fields(hf.require_rope(attention.position)) for attention in (full, local))
    nested = {"full_attention": fields["rope_parameters"], "sliding_attention": local_fields["rope_parameters"]}
    return {**fields, "rope_parameters": nested, "rope_local_base_freq": local_fields["rope_theta"]}


_GEMMA3 = GEMMA2.variant(
    "gemma3_text",
    "Gemma3ForCausalLM",
    fields={
        **{name: entry for name, entry in GEMMA2.fields.items() if name != "attention.logit_softcap"},
        "attention.position": hf.HFField(lambda fields: _read_rope(fields, "full_attention"), _write_gemma3_rope),
        "attention.qk_norm": "head",
    },
    defaults={  # files on the hub omit most of them
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    },
    check=_check_gemma3,
    layer_types=LayerTypes(_read_gemma3_layers, _GEMMA2_LAYERS.write),
    constants={"attn_logit_softcapping": None, "pad_token_id": None},
)


def _choose(config: ModelConfig) -> str:
    if config.stack.norm_position == "pre":
        return "gemma"
    return "gemma2" if config.stack.layer_config(0).attention.qk_norm == "none" else "gemma3_text"


_TEXT = decoder_family(_GEMMA, GEMMA2, _GEMMA3, choose=_choose)


def _read_multimodal(fields: HFConfigReader) -> ModelConfig:
    if fields.model_type == "gemma3_text":  # as kvad writes it
        return _TEXT.read(fields)
    fields.require_one_of("quantization_config", reason="Convert the weights to bfloat16 first.")
    text = fields.part("text_config")
    tie = fields.content.get("tie_word_embeddings")
    text_content = {
        "model_type": "gemma3_text",
        **({} if tie is None else {"tie_word_embeddings": tie}),
        **text.content,
    }
    return _TEXT.read(HFConfigReader(text_content, text.where))


FAMILIES = (
    _TEXT,
    replace(
        _TEXT,
        types=("gemma3",),
        read=_read_multimodal,
        prefix="language_model.",
        ignored=(r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*", r"lm_head\.weight"),
    ),
)
