"""Gemma (Mesnard et al. 2024), Gemma 2 (Riviere et al. 2024), Gemma 3 (Kamath et al. 2025), VaultGemma, T5Gemma.

Embeddings times sqrt(hidden_size), RMSNorm by 1 + w, GeGLU with the tanh form of gelu, which ``gelu`` means in Gemma
1's files too.  Gemma 2 has norms before and after each half of a layer, soft caps on attention and output logits, and a
window in every other layer.  Gemma 3 has norms on q and k instead of the caps, windows in five layers of six, and for
those a separate rotary base (``rope_local_base_freq``; in transformers 5 ``rope_parameters`` by layer type).

Of Gemma 3 with vision (``gemma3``) only the text model is read; it is written as ``gemma3_text``.  The vision tower and
its projector are ignored by name: for text, the result equals the full model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families import _hf_class as base
from kvad.checkpoint.families._hf_class import HFClass, LayerTypes, decoder_family, multimodal_family
from kvad.config import EncoderInputConfig, ModelConfig, encoder_hidden_size, head_dim
from kvad.errors import CheckpointError


def _check(fields: HFConfigReader) -> None:
    fields.require_one_of("use_bidirectional_attention", False, reason="kvad reads decoders only.")


def _read_activation(fields: HFConfigReader) -> Any:
    legacy = {**hf.ACTIVATIONS, "gelu": "gelu_tanh"}
    activation = fields.choice("hidden_act", legacy, "gelu_pytorch_tanh")
    if fields.choice("hidden_activation", legacy, fields.get("hidden_act", "gelu_pytorch_tanh")) != activation:
        raise fields.error("hidden_act and hidden_activation disagree")
    return activation


def _write_activation(activation: str) -> str:
    return "gelu_pytorch_tanh" if activation == "gelu_tanh" else hf.hf_activation(activation)


def _read_scale(fields: HFConfigReader) -> float:
    return float(fields.number("query_pre_attn_scalar") ** -0.5)


def _write_scale(scale: float) -> dict[str, float]:
    """Return ``query_pre_attn_scalar``, rounded to an integer if that gives the same scale."""
    scalar = scale**-2
    is_rounded = round(scalar) >= 1 and round(scalar) ** -0.5 == scale
    return {"query_pre_attn_scalar": round(scalar) if is_rounded else scalar}


_GEMMA = HFClass(
    "gemma",
    "GemmaForCausalLM",
    {
        **base.SIZES,
        "tie_embeddings": hf.flag("tie_word_embeddings", True),
        "attention.position": hf.rope(),
        **hf.biases("attention_bias"),
        "mlp.activation": hf.HFField(
            _read_activation, lambda activation, config: {"hidden_act": _write_activation(activation)}
        ),
        "norm.unit_offset": True,
        "embedding.scale": hf.HFField(lambda fields: fields.integer("hidden_size") ** 0.5),
    },
    defaults={"head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8192},
    check=_check,
)

HIDDEN_ACTIVATION = hf.HFField(
    lambda fields: fields.choice("hidden_activation", hf.ACTIVATIONS, "gelu_pytorch_tanh"),
    lambda activation, config: {"hidden_activation": _write_activation(activation)},
)
SANDWICH_LAYER = {
    **base.LAYER,
    **base.QK_NORM,
    "norm1_after": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "norm2_after": "post_feedforward_layernorm",
}
_GEMMA2_LAYERS = base.window_layers(base.interval_pattern)
_GEMMA2 = _GEMMA.variant(
    "gemma2",
    "Gemma2ForCausalLM",
    fields={
        **_GEMMA.fields,
        "attention.softmax_scale": hf.softmax_scale(_read_scale, _write_scale),
        "attention.logit_softcap": hf.optional_number("attn_logit_softcapping"),
        "mlp.activation": HIDDEN_ACTIVATION,
        "stack.norm_position": "sandwich",
        "head.logit_softcap": hf.optional_number("final_logit_softcapping"),
    },
    layer=SANDWICH_LAYER,
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    layer_types=_GEMMA2_LAYERS,
)

# Sinha et al. 2025.  Gemma 2 without the norms after each half of a layer, trained with differential privacy.
_VAULTGEMMA = _GEMMA2.variant(
    "vaultgemma",
    "VaultGemmaForCausalLM",
    fields={**_GEMMA2.fields, "stack.norm_position": "pre"},
    layer={**base.LAYER, "norm2": "pre_feedforward_layernorm"},
)


# ---------------------------------------------------------------- Gemma 3


def _check_gemma3(fields: HFConfigReader) -> None:
    _check(fields)
    fields.require_one_of("attn_logit_softcapping", reason="transformers' class ignores it.")
    rope_parameters = fields.part("rope_parameters").content
    if rope_parameters and not {"full_attention", "sliding_attention"} & set(rope_parameters):
        raise fields.error("rope_parameters without layer types is not supported")


def _read_rope(fields: HFConfigReader, kind: str) -> cfg.RopeConfig:
    """Read the positions of one layer type.  In the older format only full layers are scaled."""
    is_full = kind == "full_attention"
    rope_content = {
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rope_parameters": fields.part("rope_parameters").get(kind),
        "rope_scaling": fields.get("rope_scaling") if is_full else None,
        "rope_theta": fields.get("rope_theta" if is_full else "rope_local_base_freq"),
    }
    return hf.read_full_rope(fields.derive(rope_content), theta=1000000.0 if is_full else 10000.0)


def _read_gemma3_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    local = base.with_window(layer, fields, position=_read_rope(fields, "sliding_attention"))
    return {"G": layer, "L": local}, base.interval_pattern(fields)


def _write_gemma3_rope(_: object, config: ModelConfig) -> dict[str, Any]:
    attentions = [layer.attention for layer in config.stack.layer_types.values()]
    full = next((attention for attention in attentions if attention.window is None), attentions[0])
    local = next((attention for attention in attentions if attention.window is not None), attentions[0])
    fields, local_fields = (hf.rope_fields(attention.position) for attention in (full, local))
    nested = {"full_attention": fields["rope_parameters"], "sliding_attention": local_fields["rope_parameters"]}
    return {**fields, "rope_parameters": nested, "rope_local_base_freq": local_fields["rope_theta"]}


_GEMMA3 = _GEMMA2.variant(
    "gemma3_text",
    "Gemma3ForCausalLM",
    fields={
        **{name: entry for name, entry in _GEMMA2.fields.items() if name != "attention.logit_softcap"},
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


_TEXT = decoder_family(_GEMMA, _GEMMA2, _GEMMA3, choose=_choose)


# ---------------------------------------------------------------- T5Gemma

# Zhang et al. 2025.  A Gemma 2 as encoder and a Gemma 2 as decoder, of one size or two.  Norms precede and follow each
# branch, cross-attention included, which has neither positions nor windows.  In every other layer the encoder sees
# |q - k| < ``sliding_window``, as in transformers 4.57 and Gemma's own mask; transformers 5 lets it see one more token
# on either side for equal files.  Each side has a separate token table.
_T5_DEFAULTS = {**_GEMMA2.defaults, "vocab_size": 256000}
_T5_FIELDS = {  # the class requires an integer; reading it back detects a different scale
    **_GEMMA2.fields,
    "attention.softmax_scale": hf.softmax_scale(
        _read_scale, lambda scale: {"query_pre_attn_scalar": max(1, round(scale**-2))}
    ),
}
_T5_LAYER = {
    **base.LAYER,
    **{f"cross_attention.{part}": f"cross_attn.{part}_proj" for part in "qkv"},
    "cross_attention.out": "cross_attn.o_proj",
    "norm1": "pre_self_attn_layernorm",
    "norm1_after": "post_self_attn_layernorm",
    "norm_cross": "pre_cross_attn_layernorm",
    "norm_cross_after": "post_cross_attn_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "norm2_after": "post_feedforward_layernorm",
}


def _read_t5(fields: HFConfigReader) -> ModelConfig:
    if fields.architecture not in ("", "T5GemmaForConditionalGeneration", "T5GemmaModel"):
        hint = "Supported: T5GemmaForConditionalGeneration."
        raise fields.error(f"architectures {fields.architecture!r} is not supported", hint)
    fields.require_one_of("is_encoder_decoder", True, reason="Half of an encoder-decoder is another model.")
    encoder, decoder = (base.with_defaults(fields.part(side), **_T5_DEFAULTS) for side in ("encoder", "decoder"))
    encoder_size, max_source_len = encoder.integer("hidden_size"), encoder.integer("max_position_embeddings")
    decoder.require_one_of("cross_attention_hidden_size", encoder_size, reason="It must be the encoder's hidden_size.")
    values = hf.read_table(_T5_FIELDS, decoder)
    hidden_size = values[""]["hidden_size"]
    values[""]["tie_embeddings"] = fields.flag("tie_word_embeddings", True)
    return ModelConfig(
        **values[""],
        encoder=_read_t5_stack(encoder, causal=False),
        decoder=_read_t5_stack(decoder, causal=True),
        embedding=cfg.EmbeddingConfig(**values["embedding"]),
        encoder_input=EncoderInputConfig(
            max_source_len,
            cfg.EmbeddingConfig(scale=encoder_size**0.5),
            encoder.integer("vocab_size"),
            None if encoder_size == hidden_size else encoder_size,
        ),
        head=cfg.LanguageHeadConfig(**values["head"]),
    )


def _read_t5_stack(fields: HFConfigReader, *, causal: bool) -> cfg.StackConfig:
    """Build the stack of one side from G (full) and L (window) layers."""
    values = hf.read_table(_T5_FIELDS, fields)
    values["attention"]["causal"] = causal
    layer = base.build_layer(values, cfg.GatedMLPConfig, has_cross_attention=causal)
    return base.build_stack(
        {"G": layer, "L": base.with_window(layer, fields)}, base.alternating_pattern(fields), **values["stack"]
    )


def _write_t5(config: ModelConfig) -> dict[str, Any]:
    if config.encoder is None or config.decoder is None or config.encoder_input is None:
        raise CheckpointError("t5gemma cannot express this model: it must be an encoder-decoder")
    encoder_size, encoder_input = encoder_hidden_size(config), config.encoder_input
    encoder = {
        **_write_t5_side(config, config.encoder),
        "vocab_size": encoder_input.vocab_size or config.vocab_size,
        "hidden_size": encoder_size,
        "max_position_embeddings": encoder_input.max_seq_len,
        "is_decoder": False,
    }
    decoder = _write_t5_side(config, config.decoder) | {"cross_attention_hidden_size": encoder_size, "is_decoder": True}
    return {
        "architectures": ["T5GemmaForConditionalGeneration"],
        "model_type": "t5gemma",
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "encoder": encoder,
        "decoder": decoder,
    }


def _write_t5_side(config: ModelConfig, stack: cfg.StackConfig) -> dict[str, Any]:
    content = {
        **hf.write_table(_T5_FIELDS, config, stack),
        **base.write_layer_types(stack),
        "model_type": "t5_gemma_module",
    }
    content["head_dim"] = head_dim(config, stack.layer_config(0).attention)
    del content["tie_word_embeddings"]  # of the whole model
    return content


def _t5_rules(config: ModelConfig) -> Iterator[TensorRule]:
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        assert stack is not None
        embedding = "embedding" if side == "decoder" else "encoder_embedding"
        yield tensor_rule(f"{embedding}.tokens", f"model.{side}.embed_tokens")
        for i in range(stack.num_layers):
            yield from prefix_rules(f"{side}.layers.{i}", f"model.{side}.layers.{i}", _T5_LAYER)
        yield tensor_rule(f"{side}.norm", f"model.{side}.norm")
    yield tensor_rule("head", "lm_head.out_proj")


FAMILIES = (
    _TEXT,
    decoder_family(_VAULTGEMMA),
    multimodal_family(
        _TEXT,
        "gemma3",
        "gemma3_text",
        (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*", r"lm_head\.weight"),
    ),
    Family(
        ("t5gemma",),
        _read_t5,
        _t5_rules,
        _write_t5,
        prefix="model.",
        ignored=(r".*rotary_emb\.inv_freq", r"lm_head\.out_proj\.weight"),
        head=("lm_head.out_proj.weight", "model.decoder.embed_tokens.weight"),
    ),
)
