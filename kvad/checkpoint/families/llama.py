"""Decoders of equal layers that differ from Llama in a few fields and names.

The base is Llama 1 to 3.x (Touvron et al. 2023): RoPE by halves, RMSNorm before each half of a layer, SwiGLU; grouped
keys and values since Llama 2 70B.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader, TensorRule, tensor_rule
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families import _hf_class as base
from kvad.checkpoint.families._hf_class import HFClass, decoder_family
from kvad.checkpoint.families.experts import ERNIE_FIELDS, EXPERTS, W123, stacked_rules
from kvad.config import ModelConfig

_DROPOUT = hf.dropouts(attention="attention_dropout")
_WINDOW = {"attention.window": hf.optional_integer("sliding_window")}


# ---------------------------------------------------------------- Llama, Mistral, Granite

_LLAMA = HFClass(
    "llama",
    "LlamaForCausalLM",
    {
        **base.SIZES,
        **_DROPOUT,
        "attention.position": hf.rope(),
        **hf.biases("attention_bias"),
        "mlp.bias": hf.flag("mlp_bias"),
    },
    defaults={"max_position_embeddings": 2048},
)

# Jiang et al. 2023.  The class ignores the flags for biases.
_MISTRAL = _LLAMA.variant(
    "mistral",
    "MistralForCausalLM",
    fields={**base.SIZES, **_DROPOUT, **_WINDOW, "attention.position": hf.rope()},
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
)


# IBM 2024.  Scales the embeddings, each half's output, the attention logits and the output logits.
_GRANITE = _LLAMA.variant("granite", "GraniteForCausalLM", fields={**_LLAMA.fields, **hf.GRANITE_SCALES})


def _choose_llama(config: ModelConfig) -> str:
    attention = config.stack.layer_config(0).attention
    scales = config.embedding.scale, config.stack.residual_scale, getattr(config.head, "logit_scale", 1.0)
    if attention.softmax_scale != "default" or scales != (1.0, 1.0, 1.0):
        return "granite"
    return "llama" if attention.window is None else "mistral"


# ByteDance 2025.  Llama with biases on q, k and v.
_SEED_OSS = _LLAMA.variant(
    "seed_oss",
    "SeedOssForCausalLM",
    fields={
        **base.SIZES,
        **hf.dropouts(attention="attention_dropout", residual="residual_dropout"),
        "attention.position": hf.rope(),
        "attention.qkv_bias": hf.flag("attention_bias", True),
        "attention.out_bias": hf.flag("attention_out_bias"),
        "mlp.bias": hf.flag("mlp_bias"),
    },
    defaults={
        "max_position_embeddings": 524288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
)

# Baidu 2025.  Llama with rotary positions on neighboring dimensions.
_ERNIE = _LLAMA.variant(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    fields=ERNIE_FIELDS,
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128},
)


# ---------------------------------------------------------------- Mixtures of experts

# Jiang et al. 2024.  Mistral with a mixture of experts as MLP, two of eight for each token.  An expert is
# w2(silu(w1 x) * w3 x), stored as separate tensors: transformers 5 joins them when it reads and splits them when it
# writes.
_MIXTRAL = HFClass(
    "mixtral",
    "MixtralForCausalLM",
    {
        **base.SIZES,
        **_WINDOW,
        "attention.position": hf.rope(theta=1000000.0),
        "mlp.num_experts": hf.integer("num_local_experts"),
        "mlp.num_experts_per_token": hf.integer("num_experts_per_tok"),
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
    },
    layer={**base.ATTENTION, "mlp.router": "block_sparse_moe.gate"},
    mlp=cfg.MoEConfig,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    layer_rules=stacked_rules("block_sparse_moe", W123),
    name_variants={  # of ``save_original_format=False``, here and in the other classes
        f"block_sparse_moe.{name}": f"mlp.{name}" for name in ("gate.weight", "e_score_correction_bias")
    },
)


# Muennighoff et al. 2024.  Llama with experts; normalizes all of q and all of k.
_OLMOE = HFClass(
    "olmoe",
    "OlmoeForCausalLM",
    {
        **base.SIZES,
        **_DROPOUT,
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
        "attention.position": hf.rope(),
        **hf.biases("attention_bias"),
        "attention.qk_norm": "full",
        "mlp.num_experts": EXPERTS["num_experts"],
        "mlp.num_experts_per_token": hf.integer("num_experts_per_tok"),
        "mlp.renormalize": EXPERTS["renormalize"],
    },
    layer={**base.ATTENTION, **base.QK_NORM, "mlp.router": "mlp.gate"},
    mlp=cfg.MoEConfig,
    defaults={"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
    check=lambda fields: fields.require_one_of("clip_qkv", reason="This class clips after the norms of q and k."),
    layer_rules=stacked_rules("mlp"),
)


# Shi et al. 2025.  OLMo 2 with experts that were trained apart.
_FLEX_OLMO = _OLMOE.variant(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    fields={
        **_OLMOE.fields,
        "norm.eps": hf.number("rms_norm_eps", 1e-6),
        "attention.position": hf.rope(theta=500000.0),
        "stack.norm_position": "after",
    },
    layer={**_OLMOE.layer, "norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"},
    defaults={"max_position_embeddings": 4096, "num_experts": 7, "num_experts_per_tok": 5},
    check=None,
)

_MINIMAX_ROPE = hf.rope(theta=5000000.0, partial=1.0)


def _read_minimax_rope(fields: HFConfigReader) -> cfg.RopeConfig:
    """Read the part of a head that is rotated, which published files give as ``rotary_dim``."""
    rotary_dim, part = fields.optional_integer("rotary_dim"), fields.part("rope_parameters")
    if rotary_dim is not None and "partial_rotary_factor" not in part:
        fraction = rotary_dim / fields.integer("head_dim")
        fields = fields.derive({"partial_rotary_factor": fraction, **fields.content})
    position: cfg.RopeConfig = _MINIMAX_ROPE.read(fields)
    return position


# MiniMax 2025.  Normalizes all of q and all of k, partial RoPE; the router has sigmoids and a bias for the selection.
_MINIMAX_M2 = _MIXTRAL.variant(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    fields={
        **{name: _MIXTRAL.fields[name] for name in _MIXTRAL.fields if name != "attention.window"},
        **_DROPOUT,
        "attention.position": hf.HFField(_read_minimax_rope, _MINIMAX_ROPE.write),
        "attention.qk_norm": "full",
        "mlp.router": "sigmoid",
        "mlp.selection_bias": True,
        "norm.eps": hf.number("rms_norm_eps", 1e-6),
    },
    layer={**_MIXTRAL.layer, **base.QK_NORM, "mlp.selection_bias": "block_sparse_moe.e_score_correction_bias"},
    defaults={
        "max_position_embeddings": 196608,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
)


# ---------------------------------------------------------------- OLMo

# Groeneveld et al. 2024.  LayerNorm without weights; may clip q, k and v to [-clip_qkv, clip_qkv].
_OLMO = HFClass(
    "olmo",
    "OlmoForCausalLM",
    {
        **{name: base.SIZES[name] for name in base.SIZES if name != "norm.eps"},
        "norm.kind": "layer",
        "norm.weight": False,
        "attention.position": hf.rope(scaling_fields=("factor",)),
        **hf.biases("attention_bias"),
        "attention.clip_qkv": hf.optional_number("clip_qkv"),
    },
    layer={**base.LAYER, **base.QK_NORM, "norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"},
    defaults={"max_position_embeddings": 2048},
)

# Walsh et al. 2024.  A norm after each half of a layer instead of before it; normalizes all of q and all of k.
_OLMO2 = _OLMO.variant(
    "olmo2",
    "Olmo2ForCausalLM",
    fields={
        **{name: _OLMO.fields[name] for name in _OLMO.fields if not name.startswith(("norm.", "attention.clip"))},
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
        "attention.qk_norm": "full",
        "stack.norm_position": "after",
    },
)


def _choose_olmo(config: ModelConfig) -> str:
    return "olmo" if config.stack.layer_config(0).norm.kind == "layer" else "olmo2"


# ---------------------------------------------------------------- StarCoder 2, StableLM, Phi

# Lozhkov et al. 2024.  LayerNorm and MLP with biases, grouped keys, a sliding window.
_STARCODER2 = HFClass(
    "starcoder2",
    "Starcoder2ForCausalLM",
    {
        **base.SIZES,
        **_WINDOW,
        "tie_embeddings": hf.flag("tie_word_embeddings", True),
        "attention.position": hf.rope(),
        **hf.biases("use_bias", True),
        "mlp.activation": hf.activation("hidden_act", "gelu_pytorch_tanh"),
        "mlp.bias": hf.flag("use_bias", True),
        **hf.layer_norm("norm_epsilon"),
    },
    layer={**base.LAYER, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    mlp=cfg.PlainMLPConfig,
    defaults={"max_position_embeddings": 4096, "num_key_value_heads": 2},
)


def _check_head_dim(fields: HFConfigReader) -> None:
    fields.require_one_of("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))


def _stablelm_rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
    attention = config.stack.layer_config(0).attention
    for part, heads in (("q", attention.num_heads), ("k", base.kv_heads(attention))):
        norms = tuple(f"{hf_prefix}.self_attn.{part}_layernorm.norms.{head}" for head in range(heads))
        yield tensor_rule(f"{kvad_prefix}.attention.{part}_norm", norms, base.STACKED)


# Stability AI 2023, StableLM 2 and 3B.  LayerNorm and partial RoPE.  The halves of a layer are sequential, or in
# parallel after one norm; q and k are optionally normalized per head, with separate weights.
_STABLELM = HFClass(
    "stablelm",
    "StableLmForCausalLM",
    {
        **base.SIZES,
        "attention.position": hf.rope(partial=0.25),
        "attention.qkv_bias": hf.flag("use_qkv_bias"),
        "attention.qk_norm": hf.flag("qk_layernorm", values=("none", "each")),
        "attention.qk_norm_config": hf.HFField(
            lambda fields: (
                cfg.NormConfig("layer", fields.number("layer_norm_eps", default=1e-5))
                if fields.flag("qk_layernorm")
                else None
            )
        ),
        **hf.layer_norm("layer_norm_eps"),
        "stack.norm_position": hf.flag("use_parallel_residual", values=("pre", "parallel")),
    },
    defaults={"max_position_embeddings": 4096, "num_key_value_heads": 32},
    check=_check_head_dim,
    layer_rules=_stablelm_rules,
)

# Gunasekar et al. 2023, Phi-1, 1.5 and 2.  Parallel halves after one norm, partial RoPE by halves, biases everywhere,
# in the head too; q and k are optionally normalized per head.
_PHI = HFClass(
    "phi",
    "PhiForCausalLM",
    {
        **base.SIZES,
        "attention.position": hf.rope(partial=0.5),
        "attention.qkv_bias": True,
        "attention.out_bias": True,
        "attention.qk_norm": hf.flag("qk_layernorm", values=("none", "head")),
        "mlp.activation": hf.activation("hidden_act", "gelu_new"),
        "mlp.bias": True,
        **hf.layer_norm("layer_norm_eps"),
        "stack.norm_position": "parallel",
        "head.bias": True,
    },
    layer={
        **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkv"},
        "attention.out": "self_attn.dense",
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
        "norm1": "input_layernorm",
    },
    tensors={**base.TENSORS, "stack.norm": "model.final_layernorm"},
    mlp=cfg.PlainMLPConfig,
    defaults={"max_position_embeddings": 2048},
    check=_check_head_dim,
)

_PHI3_ROPE = hf.rope(partial=1.0, scaling_fields=("short_factor", "long_factor"))


def _read_phi3_rope(fields: HFConfigReader) -> cfg.RopeConfig:
    return hf.require_longrope(fields, _PHI3_ROPE.read(fields))


def _write_phi3_rope(position: Any, config: ModelConfig) -> dict[str, Any]:
    scaling = hf.require_rope(position).scaling
    original = scaling.original_max_seq_len if isinstance(scaling, cfg.LongRopeScalingConfig) else config.max_seq_len
    return {**_PHI3_ROPE.write(position, config), "original_max_position_embeddings": original}


# Abdin et al. 2024, Phi-3, 3.5 and 4-mini.  Fused q, k, v and fused gate, up; LongRoPE.
_PHI3 = HFClass(
    "phi3",
    "Phi3ForCausalLM",
    {
        **base.SIZES,
        **_WINDOW,
        "attention.position": hf.HFField(_read_phi3_rope, _write_phi3_rope),
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
    },
    layer={name: base.LAYER[name] for name in ("attention.out", "mlp.down", "norm1", "norm2")},
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    layer_rules=base.fused_rules("self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
)

FAMILIES = (
    decoder_family(_LLAMA, _MISTRAL, _GRANITE, choose=_choose_llama),
    decoder_family(_SEED_OSS),
    decoder_family(_ERNIE),
    decoder_family(_MIXTRAL),
    decoder_family(_MINIMAX_M2),
    decoder_family(_OLMOE),
    decoder_family(_FLEX_OLMO),
    decoder_family(_OLMO, _OLMO2, choose=_choose_olmo),
    decoder_family(_STARCODER2),
    decoder_family(_STABLELM),
    decoder_family(_PHI),
    decoder_family(_PHI3),
)
