"""Latent attention: DeepSeek-V2 (2024) and V3 (2024), GLM-4.7-Flash (2025).

The first layers are dense, the others have experts and an MLP for all tokens.
"""

from __future__ import annotations

import math
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families import _hf_class as base
from kvad.checkpoint.families._hf_class import HFClass, decoder_family
from kvad.checkpoint.families.experts import (
    EXPERTS,
    FIRST_DENSE,
    MLP_TYPES,
    SIGMOID_ROUTER,
    expert_rules,
    first_experts,
    shared_experts,
    sparse_layers,
)
from kvad.config import ModelConfig

_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_HEADS = ("attention.num_kv_heads", "attention.head_dim")  # determined by the latent


def _read_latent(fields: HFConfigReader) -> cfg.LatentConfig:
    """Read the sizes; the norms of latents have a constant epsilon."""
    sizes = {name: fields.integer(name) for name in _LATENT_SIZES}
    return cfg.LatentConfig(**sizes, q_lora_rank=fields.optional_integer("q_lora_rank"), norm=cfg.NormConfig(eps=1e-6))


def _write_latent(latent: cfg.LatentConfig, config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(latent, name) for name in (*_LATENT_SIZES, "q_lora_rank")}


def _read_softmax_scale(fields: HFConfigReader) -> Any:
    """Read the scale: YaRN's temperature for all dims, squared, multiplies it."""
    scaling = hf.read_full_rope(fields).scaling
    if not isinstance(scaling, cfg.YarnScalingConfig) or not scaling.mscale_all_dim or scaling.factor <= 1:
        return "default"
    temperature = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0
    return _read_latent(fields).qk_head_dim ** -0.5 * temperature * temperature


def _read_rope(fields: HFConfigReader) -> cfg.RopeConfig:
    return hf.read_full_rope(fields, interleaved=fields.flag("rope_interleave", True))


def _write_rope(position: object, config: ModelConfig) -> dict[str, Any]:
    return {**hf.rope_fields(position), "rope_interleave": hf.require_rope(position).interleaved}


_V3_EXPERTS: hf.FieldTable = {
    **EXPERTS,
    **SIGMOID_ROUTER,
    "num_experts": hf.integer("n_routed_experts"),
    "renormalize": hf.flag("norm_topk_prob", True),
    "routed_scale": hf.number("routed_scaling_factor"),
    "num_groups": hf.integer("n_group", default=8),
    "num_groups_per_token": hf.integer("topk_group", default=4),
    "shared_size": shared_experts("n_shared_experts"),
}


def _v2_groups(name: str) -> hf.HFField:
    """Build a number of groups, which the method "greedy" does not have."""
    methods = {"greedy": False, "group_limited_greedy": True}

    def read(fields: HFConfigReader) -> int:
        return fields.integer(name) if fields.choice("topk_method", methods, "greedy") else 1

    return hf.HFField(read, lambda number, config: {name: number})


def _write_v2_method(renormalize: bool, config: ModelConfig) -> dict[str, Any]:
    method = "greedy" if first_experts(config).num_groups == 1 else "group_limited_greedy"
    return {"topk_method": method, "norm_topk_prob": False}


_V2_EXPERTS: hf.FieldTable = {
    **_V3_EXPERTS,
    "router": "softmax",
    "selection_bias": False,
    "renormalize": hf.HFField(lambda fields: False, _write_v2_method),
    "num_groups": _v2_groups("n_group"),
    "num_groups_per_token": _v2_groups("topk_group"),
}


def _choose(config: ModelConfig) -> str:
    """Return the class: V3 routes by sigmoids; without experts it is V2, if its pairs are neighboring dims."""
    layers = config.stack.layer_configs
    mlp = next((layer.mlp for layer in layers if isinstance(layer.mlp, cfg.MoEConfig)), None)
    if mlp is None:
        return "deepseek_v2" if hf.require_rope(layers[0].attention.position).interleaved else "deepseek_v3"
    return "deepseek_v3" if mlp.router == "sigmoid" else "deepseek_v2"


def _check_heads(fields: HFConfigReader) -> None:
    fields.require_one_of("num_key_value_heads", fields.integer("num_attention_heads"), reason="All heads share one.")


def _check(fields: HFConfigReader) -> None:
    _check_heads(fields)
    fields.require_one_of("moe_layer_freq", 1, reason="Experts are read in all layers after the dense ones.")
    fields.require_one_of("scoring_func", "softmax" if fields.model_type == "deepseek_v2" else "sigmoid")


def _check_v2(fields: HFConfigReader) -> None:
    _check(fields)
    fields.require_one_of("norm_topk_prob", False, reason="transformers ignores it.")
    fields.require_one_of("mlp_bias", False, reason="Versions of transformers differ in the experts that have biases.")


def _check_v3(fields: HFConfigReader) -> None:
    _check(fields)
    fields.require_one_of("topk_method", "noaux_tc", reason="This class has one method.")


_V2 = HFClass(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    {
        **{name: base.SIZES[name] for name in base.SIZES if name not in _HEADS},
        "attention.num_heads": hf.HFField(
            lambda fields: fields.integer("num_attention_heads"),
            lambda heads, config: {"num_attention_heads": heads, "num_key_value_heads": heads},
        ),
        **hf.dropouts(attention="attention_dropout"),
        **hf.biases("attention_bias"),
        "attention.position": hf.rope(interleaved=True),
        "attention.latent": hf.HFField(_read_latent, _write_latent),
        "attention.softmax_scale": hf.HFField(_read_softmax_scale),
    },
    layer={
        "attention.q": "self_attn.q_proj",
        "attention.q_down": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.q_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
        "attention.out": "self_attn.o_proj",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
    },
    defaults={
        "max_position_embeddings": 2048,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
    },
    check=_check_v2,
    layer_types=sparse_layers(_V2_EXPERTS, FIRST_DENSE),
    layer_rules=expert_rules("gate", "gate.e_score_correction_bias", "shared_experts"),
    # Of V3's last layers, which predict further tokens; transformers ignores them too.
    ignored=(r".*rotary_emb\.inv_freq", r"layers\.61\..*"),
)
_V3 = _V2.variant(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    fields={**_V2.fields, "attention.position": hf.HFField(_read_rope, _write_rope)},
    defaults={
        **_V2.defaults,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
    },
    check=_check_v3,
    layer_types=sparse_layers(_V3_EXPERTS, FIRST_DENSE),
)

# Zhipu AI 2025.  DeepSeek-V3 with a list of the layers that have experts.
_GLM = _V3.variant(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    fields={**_V3.fields, "norm.eps": hf.number("rms_norm_eps", 1e-5)},
    defaults={
        **_V3.defaults,
        "max_position_embeddings": 202752,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
    },
    layer_types=sparse_layers(_V3_EXPERTS, MLP_TYPES),
)

# Tencent 2025.  DeepSeek-V3 without experts.
_YOUTU = _V3.variant(
    "youtu",
    "YoutuForCausalLM",
    fields={**_V3.fields, "tie_embeddings": hf.flag("tie_word_embeddings", True)},
    layer={**_V3.layer, **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}},
    defaults={name: _V3.defaults[name] for name in (*_LATENT_SIZES, "q_lora_rank")}
    | {"max_position_embeddings": 131072},
    check=_check_heads,
    layer_types=None,
    layer_rules=None,
    ignored=(r".*rotary_emb\.inv_freq",),
)

FAMILIES = (decoder_family(_V2, _V3, choose=_choose), decoder_family(_GLM), decoder_family(_YOUTU))
