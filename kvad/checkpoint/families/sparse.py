"""Mixtures of experts with a dense MLP in some layers, or with windows; and Granite with windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families import _hf_class as base
from kvad.checkpoint.families import experts
from kvad.checkpoint.families._hf_class import HFClass, LayerTypes, decoder_family
from kvad.checkpoint.families.windowed import EXAONE_LAYERS
from kvad.config import ModelConfig

_NORMED = {**base.ATTENTION, **base.QK_NORM}
_DROPOUT = hf.dropouts(attention="attention_dropout")
_LETTERS = {"GE": "G", "LE": "L", "GD": "D", "LD": "W"}  # attention (full, window) and MLP (experts, dense)
_FIELDS: hf.FieldTable = {**base.SIZES, **_DROPOUT, "attention.position": hf.rope(), "attention.qk_norm": "head"}


# ---------------------------------------------------------------- Qwen3-MoE, Mellum

# Yang et al. 2025.  Qwen 3 with experts.
_QWEN3_MOE = HFClass(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {**_FIELDS, **hf.biases("attention_bias")},
    layer=_NORMED,
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    check=lambda fields: fields.require_one_of(
        "use_sliding_window", False, reason="Windows are read for dense Qwen 3 models."
    ),
    layer_types=experts.sparse_layers(experts.EXPERTS, experts.QWEN2_PLACES),
    layer_rules=experts.expert_rules("gate", "", ""),
    constants={"pad_token_id": None, "decoder_sparse_step": 1, "use_sliding_window": False},
)

_MELLUM_THETAS = {"full_attention": 500000.0, "sliding_attention": 10000.0}


def _read_mellum_rope(fields: HFConfigReader, layer_type: str = "full_attention") -> cfg.RopeConfig:
    limit, theta = fields.integer("max_position_embeddings"), _MELLUM_THETAS[layer_type]
    return hf.read_rope(fields, max_seq_len=limit, layer_type=layer_type, theta=theta)


def _read_mellum_windows(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    window = base.with_window(layer, fields, position=_read_mellum_rope(fields, "sliding_attention"))
    return {"G": layer, "L": window}, base.window_pattern(fields, lambda index: False)


def _write_mellum_windows(config: ModelConfig) -> dict[str, Any]:
    ropes = {name: {"rope_type": "default", "rope_theta": theta} for name, theta in _MELLUM_THETAS.items()}
    for layer in config.stack.layer_configs:
        name = "full_attention" if layer.attention.window is None else "sliding_attention"
        ropes[name] = hf.rope_fields(layer.attention.position)["rope_parameters"]
    return {**base.write_layer_types(config), "rope_parameters": ropes}


# JetBrains 2026, Mellum 2.  Qwen3-MoE with windows, whose rotation has another base.
_MELLUM = _QWEN3_MOE.variant(
    "mellum",
    "MellumForCausalLM",
    fields={**_QWEN3_MOE.fields, "attention.position": hf.HFField(_read_mellum_rope)},
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 7168,
        "moe_intermediate_size": 896,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "sliding_window": 1024,
        "first_k_dense_replace": 0,
    },
    check=None,
    layer_types=base.combined_layers(
        LayerTypes(_read_mellum_windows, _write_mellum_windows),
        experts.sparse_layers(experts.EXPERTS, experts.MLP_TYPES),
        _LETTERS,
    ),
    constants={"pad_token_id": None},
    ignored=(r".*rotary_emb\.inv_freq", r"mtp\..*"),  # layers that predict further tokens
)


# ---------------------------------------------------------------- K-EXAONE, Hunyuan 3


def _routed_scale(name: str) -> hf.HFField:
    """Build the factor of the experts' weights, written as ``name``."""
    return hf.HFField(
        lambda fields: fields.number("router_scaling_factor", default=fields.number("routed_scaling_factor")),
        lambda scale, config: {name: scale},
    )


_EXAONE_EXPERTS: hf.FieldTable = {
    **experts.EXPERTS,
    **experts.SIGMOID_ROUTER,
    "renormalize": hf.flag("norm_topk_prob", True),
    "routed_scale": _routed_scale("routed_scaling_factor"),
    "shared_size": experts.shared_experts("num_shared_experts"),
}
_HUNYUAN_EXPERTS: hf.FieldTable = {
    **_EXAONE_EXPERTS,
    # Read, but not written: the class has no such fields.
    **{name: hf.HFField(_EXAONE_EXPERTS[name].read) for name in ("renormalize", "num_groups", "num_groups_per_token")},
    "routed_scale": _routed_scale("router_scaling_factor"),
}


_SHARED_DEFAULTS = {"num_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 8}

# LG AI Research 2025, K-EXAONE.  The attention of EXAONE 4 after norms, and the experts of DeepSeek-V3.
_EXAONE_MOE = HFClass(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    {**_FIELDS, "norm.eps": hf.number("rms_norm_eps", 1e-5)},
    layer=_NORMED,
    defaults={
        **_SHARED_DEFAULTS,
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "routed_scaling_factor": 2.5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    layer_types=base.combined_layers(
        EXAONE_LAYERS, experts.sparse_layers(_EXAONE_EXPERTS, experts.MLP_TYPES), _LETTERS
    ),
    layer_rules=experts.expert_rules("gate", "e_score_correction_bias", "shared_experts"),
    ignored=(r".*rotary_emb\.inv_freq", r"mtp.*"),
    name_variants={"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
)

# Tencent 2026.  Qwen 3's attention and the experts of DeepSeek-V3, without groups.
_HUNYUAN3 = HFClass(
    "hy_v3",
    "HYV3ForCausalLM",
    {
        **_FIELDS,
        **hf.biases("attention_bias"),
        "attention.position": hf.rope(theta=11158840.0),
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
    },
    layer=_NORMED,
    defaults={
        **_SHARED_DEFAULTS,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "moe_intermediate_size": 1536,
        "num_experts": 192,
        "routed_scaling_factor": 2.826,
    },
    check=lambda fields: fields.require_one_of("mlp_bias", False, reason="transformers' class ignores it."),
    layer_types=experts.sparse_layers(_HUNYUAN_EXPERTS, experts.MLP_TYPES),
    layer_rules=experts.expert_rules("router.gate", "expert_bias", "shared_mlp"),
    ignored=(r".*rotary_emb\.inv_freq", r"layers\.80\..*"),
    name_variants={
        "mlp.router.gate.weight": "mlp.gate.weight",
        "mlp.expert_bias": "mlp.e_score_correction_bias",
        **{f"shared_mlp.{part}_proj.weight": f"shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")},
    },
)


# ---------------------------------------------------------------- Granite with windows


def _read_granite_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    """Return layers by their window and the base of their rotation; a base of 0 means no positions."""
    position = hf.require_rope(layer.attention.position)
    letters = base.window_pattern(fields, lambda index: index % 4 != 0)
    thetas = fields.get("layer_rope_theta", [position.theta] * len(letters))
    if not isinstance(thetas, list) or len(thetas) != len(letters):
        raise fields.error(f"layer_rope_theta: must have {len(letters)} numbers")
    kinds, types = list(dict.fromkeys(zip(letters, thetas, strict=True))), {}
    for index, (letter, theta) in enumerate(kinds):
        rope = replace(position, theta=float(theta)) if theta else None
        changed = base.with_attention(layer, position=rope)
        types[chr(ord("A") + index)] = base.with_window(changed, fields) if letter == "L" else changed
    pattern = (chr(ord("A") + kinds.index(kind)) for kind in zip(letters, thetas, strict=True))
    return types, "".join(pattern)


def _write_granite_layers(config: ModelConfig) -> dict[str, Any]:
    positions = [layer.attention.position for layer in config.stack.layer_configs]
    thetas = [0.0 if position is None else hf.require_rope(position).theta for position in positions]
    content = base.write_layer_types(config)
    return {**content, "sliding_window": content["sliding_window"] or 128, "layer_rope_theta": thetas}


# IBM 2026.  Granite with a window in three layers of four, and a sink logit per head.
_GRANITE_SWA = HFClass(
    "granite_swa",
    "GraniteSWAForCausalLM",
    {
        **base.SIZES,
        **_DROPOUT,
        "tie_embeddings": hf.flag("tie_word_embeddings", True),
        "attention.position": hf.rope(),
        **hf.biases("attention_bias"),
        "attention.sink_logits": True,
        "mlp.bias": hf.flag("mlp_bias"),
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
        **hf.GRANITE_SCALES,
    },
    layer={**base.LAYER, "attention.sink_logits": "self_attn.sinks"},
    defaults={"max_position_embeddings": 8192, "num_key_value_heads": 4, "sliding_window": 128},
    layer_types=LayerTypes(_read_granite_layers, _write_granite_layers),
)

FAMILIES = tuple(map(decoder_family, (_QWEN3_MOE, _MELLUM, _EXAONE_MOE, _HUNYUAN3, _GRANITE_SWA)))
