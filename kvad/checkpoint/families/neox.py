"""Decoders of BigScience, EleutherAI, TII and MosaicML, whose layers have one matrix for q, k and v."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader, TensorRule, prefix_rules
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families._hf_class import HFClass, decoder_family, fused_rules, kv_heads
from kvad.config import ModelConfig
from kvad.errors import CheckpointError

_LAYER = {
    "attention.out": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}
_TENSORS = {
    "embedding.tokens": "transformer.word_embeddings",
    "embedding.norm": "transformer.word_embeddings_layernorm",
    "stack.layers": "transformer.h",
    "stack.norm": "transformer.ln_f",
    "head": "lm_head",
}
_COMMON: hf.FieldTable = {
    "vocab_size": hf.integer("vocab_size"),
    "tie_embeddings": hf.flag("tie_word_embeddings", True),
    **hf.layer_norm("layer_norm_epsilon"),
}


# ---------------------------------------------------------------- BLOOM

# BigScience 2022.  ALiBi, a norm after the embedding, q, k, v fused by head.  The MLP is four times as wide as the
# model.  ``apply_residual_connection_post_layernorm`` adds each half to its normalized input.  No field limits the
# length: ``seq_length``, which published files have, is the training length.
_BLOOM = HFClass(
    "bloom",
    "BloomForCausalLM",
    {
        **_COMMON,
        "hidden_size": hf.integer("n_embed", "hidden_size", default=64, write_as="hidden_size"),
        "max_seq_len": hf.integer("seq_length", default=2048),
        "stack.num_layers": hf.integer("n_layer", "num_hidden_layers", default=2),
        "stack.norm_position": hf.flag("apply_residual_connection_post_layernorm", values=("pre", "normed")),
        "attention.num_heads": hf.integer("n_head", "num_attention_heads", default=8),
        "attention.position": cfg.AlibiConfig(),
        **hf.ALL_BIASES,
        "mlp.intermediate_size": hf.HFField(lambda fields: 4 * fields.integer("n_embed", "hidden_size", default=64)),
        "mlp.activation": "gelu_tanh",
        "embedding.norm": hf.embedding_norm("layer_norm_epsilon"),
    },
    layer=_LAYER,
    tensors=_TENSORS,
    mlp=cfg.PlainMLPConfig,
    layer_rules=fused_rules("self_attention.query_key_value", groups=kv_heads),
    constants={},
    prefix="transformer.",
    ignored=(),
)


# ---------------------------------------------------------------- GPT-NeoX


def _read_neox_rope(fields: HFConfigReader) -> cfg.RopeConfig:
    theta, fraction = fields.number("rotary_emb_base", default=10000.0), fields.number("rotary_pct", default=0.25)
    if "rotary_emb_base" in fields:
        fields.require_one_of("rope_theta", theta, reason=f"rotary_emb_base is {theta}.")
    if "rotary_pct" in fields:
        fields.require_one_of("partial_rotary_factor", fraction, reason=f"rotary_pct is {fraction}.")
    max_seq_len = fields.integer("max_position_embeddings", default=2048)
    return hf.read_rope(fields, max_seq_len=max_seq_len, theta=theta, partial_rotary_factor=fraction)


def _write_neox_rope(position: object, config: ModelConfig) -> dict[str, Any]:
    rope = hf.require_rope(position)
    names = {"rotary_pct": rope.partial_rotary_factor, "rotary_emb_base": rope.theta}
    return {**names, **hf.rope_fields(rope, partial=True)}


# Black et al. 2022, and Pythia, Biderman et al. 2023.  Partial RoPE by halves, q, k, v fused by head.  The halves of a
# layer are in parallel with a norm for each (``use_parallel_residual``), or sequential. ``rotary_pct`` and
# ``rotary_emb_base`` are its names of ``partial_rotary_factor`` and ``rope_theta``, which newer files have too.
_NEOX = _BLOOM.variant(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    fields={
        **_COMMON,
        **hf.sizes(),
        "max_seq_len": hf.integer("max_position_embeddings", default=2048),
        "tie_embeddings": hf.flag("tie_word_embeddings"),
        "stack.norm_position": hf.flag("use_parallel_residual", True, values=("pre", "parallel_pair")),
        "attention.position": hf.HFField(_read_neox_rope, _write_neox_rope),
        **hf.biases("attention_bias", True),
        "mlp.activation": hf.activation("hidden_act", "gelu"),
        "mlp.bias": True,
        "norm.eps": hf.number("layer_norm_eps", 1e-5),
    },
    layer={**_LAYER, "attention.out": "attention.dense"},
    tensors={
        "embedding.tokens": "gpt_neox.embed_in",
        "stack.layers": "gpt_neox.layers",
        "stack.norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    layer_rules=fused_rules("attention.query_key_value", groups=kv_heads),
    prefix="gpt_neox.",
    ignored=(r".*\.attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
    name_variants={"embed_out.weight": "lm_head.weight"},
)


# ---------------------------------------------------------------- Falcon

_FALCON_NORMS = {
    "pre": {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
    "parallel": {"norm1": "input_layernorm"},
    "parallel_pair": {"norm1": "ln_attn", "norm2": "ln_mlp"},
}


def _read_falcon_kv_heads(fields: HFConfigReader) -> int:
    heads = fields.integer("num_attention_heads")
    if fields.flag("new_decoder_architecture"):
        return fields.integer("num_kv_heads", default=heads)
    if fields.flag("multi_query", True):
        return 1
    fields.require_one_of("num_kv_heads", heads, reason="Groups of heads need new_decoder_architecture.")
    return heads


def _read_falcon_norms(fields: HFConfigReader) -> str:
    """Return the norm positions that transformers' class can compute."""
    if fields.flag("new_decoder_architecture"):
        fields.require_one_of("parallel_attn", True, reason="The new architecture is parallel.")
        fields.require_one_of("num_ln_in_parallel_attn", 1, 2)
        return "parallel" if fields.get("num_ln_in_parallel_attn") == 1 else "parallel_pair"
    if not fields.flag("parallel_attn", True):
        return "pre"
    fields.require_one_of("num_ln_in_parallel_attn", 1, reason="Two norms need new_decoder_architecture.")
    return "parallel"


def _write_falcon_norms(norm_position: str, config: ModelConfig) -> dict[str, Any]:
    """Write the first architecture if it can express the model."""
    if norm_position not in _FALCON_NORMS:
        raise CheckpointError(f"norm_position is {norm_position}")
    attention = config.stack.layer_config(0).attention
    return {
        "new_decoder_architecture": norm_position == "parallel_pair"
        or kv_heads(attention) not in (1, attention.num_heads),
        "parallel_attn": norm_position != "pre",
        "num_ln_in_parallel_attn": 2 if norm_position == "parallel_pair" else 1,
    }


def _read_falcon_position(fields: HFConfigReader) -> cfg.AlibiConfig | cfg.RopeConfig:
    if not fields.flag("alibi"):
        return hf.read_rope(fields, max_seq_len=fields.integer("max_position_embeddings", default=2048))
    dim = fields.integer("n_embed", "hidden_size", default=4544) // fields.integer("num_attention_heads")
    return cfg.AlibiConfig(factor=dim**-0.5, round_to_bfloat16=True)


def _falcon_rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
    yield from fused_rules("self_attention.query_key_value", groups=kv_heads)(config, kvad_prefix, hf_prefix)
    yield from prefix_rules(kvad_prefix, hf_prefix, _FALCON_NORMS[config.stack.norm_position])


# Almazrouei et al. 2023.  RoPE or ALiBi, halves in parallel or not, q, k, v fused in three ways.  The first
# architecture has all heads (rows by head: q, k, v) or one key-value head (all q, then k, v), and one norm for both
# halves; ``new_decoder_architecture`` has groups of heads (q ..., k, v) and a norm for each half, or one.
#
# ALiBi is slope times position, rounded to bfloat16 and, unlike BLOOM's, added before the division by sqrt(head_dim).
# transformers adds it once, as kvad does, in its default attention (sdpa), and twice in ``eager``, for which no model
# was trained.
_FALCON = _BLOOM.variant(
    "falcon",
    "FalconForCausalLM",
    fields={
        **_COMMON,
        "hidden_size": hf.integer("n_embed", "hidden_size", default=4544, write_as="hidden_size"),
        "max_seq_len": hf.integer("max_position_embeddings", default=2048),
        "stack.num_layers": hf.integer("num_hidden_layers"),
        "stack.norm_position": hf.HFField(_read_falcon_norms, _write_falcon_norms),
        "attention.num_heads": hf.integer("num_attention_heads"),
        "attention.num_kv_heads": hf.HFField(
            _read_falcon_kv_heads, lambda value, config: {"num_kv_heads": value, "multi_query": value == 1}
        ),
        "attention.position": hf.HFField(
            _read_falcon_position,
            lambda position, config: {
                "alibi": isinstance(position, cfg.AlibiConfig),
                **(hf.rope_fields(position) if isinstance(position, cfg.RopeConfig) else {}),
            },
        ),
        **hf.biases("bias"),
        "mlp.intermediate_size": hf.integer(
            "ffn_hidden_size", default=lambda fields: 4 * fields.integer("n_embed", "hidden_size", default=4544)
        ),
        "mlp.activation": hf.activation("activation", "gelu"),
        "mlp.bias": hf.flag("bias"),
    },
    layer={name: hf_name for name, hf_name in _LAYER.items() if not name.startswith("norm")},
    tensors={name: hf_name for name, hf_name in _TENSORS.items() if name != "embedding.norm"},
    check=lambda fields: fields.require_one_of(
        "apply_residual_connection_post_layernorm", False, reason="transformers' class ignores it."
    ),
    layer_rules=_falcon_rules,
    ignored=(r".*rotary(_emb)?\.inv_freq", r".*maybe_rotary\.inv_freq"),
)


# ---------------------------------------------------------------- MPT


def _check_mpt(fields: HFConfigReader) -> None:
    reason = "transformers' class ignores it."
    fields.require_one_of("no_bias", True, reason=reason)
    fields.require_one_of("logit_scale", reason=reason)
    fields.require_one_of("norm_type", "low_precision_layernorm", "layernorm", reason=reason)
    attention_fields = fields.part("attn_config")
    attention_fields.require_one_of("attn_type", "multihead_attention", reason=reason)
    attention_fields.require_one_of("alibi", True, reason=reason)
    attention_fields.require_one_of("alibi_bias_max", 8, reason=reason)
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        attention_fields.require_one_of(name, False, reason=reason)


def _write_mpt_attention(clip_qkv: float | None, config: ModelConfig) -> dict[str, Any]:
    scale = config.stack.layer_config(0).attention.softmax_scale
    scale_value = {"default": None, "none": 1.0}.get(str(scale), scale)
    return {"attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": clip_qkv, "softmax_scale": scale_value}}


# MosaicML 2023.  ALiBi, no biases, q, k and v clipped to [-clip_qkv, clip_qkv].  transformers' class ignores parts of
# the config: the MLP is always four times as wide (``expansion_ratio`` has no effect) and ALiBi is always used (it
# overrides ``learned_pos_emb``).  kvad does the same, and refuses options for which the original code would compute
# something else.
_MPT = _BLOOM.variant(
    "mpt",
    "MptForCausalLM",
    fields={
        "hidden_size": hf.integer("d_model", "hidden_size", default=2048),
        "vocab_size": hf.integer("vocab_size", default=50368),
        "max_seq_len": hf.integer("max_seq_len", default=2048),
        "tie_embeddings": hf.flag("tie_word_embeddings", True),
        "stack.num_layers": hf.integer("n_layers", "num_hidden_layers", default=24),
        "attention.num_heads": hf.integer("n_heads", "num_attention_heads", default=16),
        "attention.position": cfg.AlibiConfig(),
        "attention.clip_qkv": hf.HFField(
            lambda fields: fields.part("attn_config").number("clip_qkv", default=0.0) or None, _write_mpt_attention
        ),
        "attention.softmax_scale": hf.HFField(
            lambda fields: fields.part("attn_config").optional_number("softmax_scale") or "default"
        ),
        "mlp.intermediate_size": hf.HFField(lambda fields: 4 * fields.integer("d_model", "hidden_size", default=2048)),
        "norm.kind": "layer",
        "norm.eps": hf.number("layer_norm_epsilon", 1e-5),
    },
    layer={
        "attention.out": "attn.out_proj",
        "mlp.up": "ffn.up_proj",
        "mlp.down": "ffn.down_proj",
        "norm1": "norm_1",
        "norm2": "norm_2",
    },
    tensors={
        "embedding.tokens": "transformer.wte",
        "stack.layers": "transformer.blocks",
        "stack.norm": "transformer.norm_f",
        "head": "lm_head",
    },
    check=_check_mpt,
    layer_rules=fused_rules("attn.Wqkv"),
    constants={"expansion_ratio": 4, "no_bias": True, "learned_pos_emb": False},
)

FAMILIES = tuple(map(decoder_family, (_BLOOM, _NEOX, _FALCON, _MPT)))
