"""Decoders like Llama whose layers differ: by a window, or by whether they have positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader, TensorRule, TensorTransform, tensor_rule
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families import _hf_class as base
from kvad.checkpoint.families._hf_class import HFClass, LayerTypes, decoder_family
from kvad.config import ModelConfig

# ---------------------------------------------------------------- Qwen


def _read_qwen_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    pattern = base.optional_window_pattern(fields, lambda index: index >= fields.integer("max_window_layers"))
    return {"G": layer, "L": base.with_window(layer, fields)}, pattern


def _write_qwen_layers(config: ModelConfig) -> dict[str, Any]:
    content = base.write_layer_types(config)
    windows = [kind == "sliding_attention" for kind in content["layer_types"]]
    first_window = windows.index(True) if any(windows) else config.stack.num_layers
    return {"use_sliding_window": any(windows), "max_window_layers": first_window, **content}


# Yang et al. 2024, Qwen 2 and 2.5.  Llama with biases on q, k, v only.  Layers from ``max_window_layers`` on may have a
# window.
_QWEN2 = HFClass(
    "qwen2",
    "Qwen2ForCausalLM",
    {**base.SIZES, "attention.position": hf.rope(), "attention.qkv_bias": True},
    layer={**base.LAYER, **base.QK_NORM},
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    layer_types=LayerTypes(_read_qwen_layers, _write_qwen_layers),
)

# Yang et al. 2025.  RMSNorm on each head of q and k before the rotation.
_QWEN3 = _QWEN2.variant(
    "qwen3",
    "Qwen3ForCausalLM",
    fields={**base.SIZES, "attention.position": hf.rope(), **hf.biases("attention_bias"), "attention.qk_norm": "head"},
    defaults={**_QWEN2.defaults, "head_dim": 128},
)


def _choose_qwen(config: ModelConfig) -> str:
    return "qwen2" if config.stack.layer_config(0).attention.qk_norm == "none" else "qwen3"


# ---------------------------------------------------------------- SmolLM3

_NOPE = {"G": "N", "L": "M"}  # layer types without positions, full and with a window


def _read_smollm3_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    layers, interval = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval")
    rotated = fields.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers:
        raise fields.error(f"no_rope_layers {rotated!r} is not supported", f"It must have {layers} values 0 or 1.")
    letters = base.optional_window_pattern(fields, lambda index: not rotated[index])
    layer_types = {"G": layer, "L": base.with_window(layer, fields)}
    layer_types |= {nope: base.with_attention(layer_types[letter], position=None) for letter, nope in _NOPE.items()}
    pattern = (letter if has_rope else _NOPE[letter] for letter, has_rope in zip(letters, rotated, strict=True))
    return layer_types, "".join(pattern)


def _write_smollm3_layers(config: ModelConfig) -> dict[str, Any]:
    layers = config.stack.layer_configs
    content = base.write_layer_types(config)
    return {
        "no_rope_layers": [int(layer.attention.position is not None) for layer in layers],
        "use_sliding_window": content["sliding_window"] is not None,
        **content,
    }


# Bakouch et al. 2025.  Llama with no positions in every fourth layer (NoPE).
_SMOLLM3 = HFClass(
    "smollm3",
    "SmolLM3ForCausalLM",
    {
        **base.SIZES,
        "tie_embeddings": hf.flag("tie_word_embeddings", True),
        "attention.position": hf.rope(theta=2000000.0),
        **hf.biases("attention_bias"),
        "mlp.bias": hf.flag("mlp_bias"),
    },
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "no_rope_layer_interval": 4},
    layer_types=LayerTypes(_read_smollm3_layers, _write_smollm3_layers),
)


# ---------------------------------------------------------------- EXAONE 4, OLMo 3


def _read_exaone_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    if fields.optional_integer("sliding_window") is None:
        return {"G": layer}, "G" * fields.integer("num_hidden_layers")
    return _read_cohere2_layers(fields, layer)


EXAONE_LAYERS = LayerTypes(_read_exaone_layers, base.write_layer_types)


def _read_olmo3_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    part = fields.part("rope_parameters").get("sliding_attention", {})
    position = replace(hf.require_rope(layer.attention.position), scaling=None)
    if part and (part.get("rope_theta", position.theta), part.get("rope_type")) != (position.theta, "default"):
        raise fields.error("rope_parameters of layers with a window must be the unscaled ones")
    layer_types = {"G": layer, "L": base.with_window(layer, fields, position=position)}
    return layer_types, base.window_pattern(fields, lambda index: (index + 1) % 4 != 0)


def _read_olmo3_rope(fields: HFConfigReader) -> cfg.RopeConfig:
    nested = fields.part("rope_parameters").get("full_attention")
    content = fields.content if nested is None else {**fields.content, "rope_parameters": nested}
    return hf.read_full_rope(fields.derive(content))


def _write_olmo3_rope(_: object, config: ModelConfig) -> dict[str, Any]:
    layers = [layer.attention for layer in config.stack.layer_configs]
    content = hf.rope_fields(next((layer for layer in layers if layer.window is None), layers[0]).position)
    full = content["rope_parameters"]
    unscaled = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    return {**content, "rope_parameters": {"full_attention": full, "sliding_attention": unscaled}}


_AFTER = {**base.LAYER, **base.QK_NORM, "norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"}

# LG AI Research 2025.  A norm after each half of a layer; RMSNorm on each head of q and k; in models with windows, only
# these layers have positions.
_EXAONE4 = HFClass(
    "exaone4",
    "Exaone4ForCausalLM",
    {
        **base.SIZES,
        **hf.dropouts(attention="attention_dropout"),
        "attention.position": hf.rope(),
        "attention.qk_norm": "head",
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
        "stack.norm_position": "after",
    },
    layer=_AFTER,
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    layer_types=EXAONE_LAYERS,
)

# Ai2 2025.  OLMo 2 with a window in three layers of four, whose positions are not scaled.
_OLMO3 = HFClass(
    "olmo3",
    "Olmo3ForCausalLM",
    {
        **base.SIZES,
        **hf.dropouts(attention="attention_dropout"),
        "attention.position": hf.HFField(_read_olmo3_rope, _write_olmo3_rope),
        **hf.biases("attention_bias"),
        "attention.qk_norm": "full",
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
        "stack.norm_position": "after",
    },
    layer=_AFTER,
    defaults={"max_position_embeddings": 2048, "sliding_window": 4096},
    layer_types=LayerTypes(_read_olmo3_layers, base.write_layer_types),
)


# ---------------------------------------------------------------- GLM 4


# Zeng et al. 2024.  Rotary positions on neighboring dimensions of half a head, biases on q, k and v, fused gate and up.
_GLM = HFClass(
    "glm",
    "GlmForCausalLM",
    {
        **base.SIZES,
        **hf.dropouts(attention="attention_dropout"),
        "attention.position": hf.rope(partial=0.5, interleaved=True),
        "attention.qkv_bias": hf.flag("attention_bias", True),
        "norm.eps": hf.number("rms_norm_eps", 1.5625e-7),
    },
    layer={name: base.LAYER[name] for name in base.LAYER if name not in ("mlp.gate", "mlp.up")},
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128},
    layer_rules=base.fused_rules(gate_up="mlp.gate_up_proj"),
)

# Z.ai 2025, GLM-4-0414.  Norms before and after each half of a layer.
_GLM4 = _GLM.variant(
    "glm4",
    "Glm4ForCausalLM",
    fields={**_GLM.fields, "stack.norm_position": "sandwich"},
    layer={**_GLM.layer, "norm1_after": "post_self_attn_layernorm", "norm2_after": "post_mlp_layernorm"},
)


def _choose_glm(config: ModelConfig) -> str:
    return "glm4" if config.stack.norm_position == "sandwich" else "glm"


# ---------------------------------------------------------------- Cohere


def _check_cohere(fields: HFConfigReader) -> None:
    if fields.part("rope_parameters").get("rope_theta", fields.get("rope_theta")) is None:
        raise fields.error("rope_theta is missing", "The default is 10000 in transformers 4, 500000 in 5.")


def _read_cohere2_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    layer_types = {"L": base.with_window(layer, fields), "G": base.with_attention(layer, position=None)}
    return layer_types, base.interval_pattern(fields)


# Cohere 2024, Command R.  Rotary positions on neighboring dimensions (0, 1), (2, 3), ..., LayerNorm without bias,
# attention and MLP in parallel, logits times ``logit_scale``.  Some normalize q and k, each head with separate weights.
_COHERE = HFClass(
    "cohere",
    "CohereForCausalLM",
    {
        **base.SIZES,
        "tie_embeddings": hf.flag("tie_word_embeddings", True),
        "attention.position": hf.rope(interleaved=True, absent=cfg.RopeConfig()),
        **hf.biases("attention_bias"),
        "attention.qk_norm": hf.flag("use_qk_norm", values=("none", "each")),
        "norm.kind": "layer",
        "norm.eps": hf.number("layer_norm_eps", 1e-5),
        "stack.norm_position": "parallel",
        "head.logit_scale": hf.number("logit_scale", 0.0625),
    },
    layer={**base.LAYER, **base.QK_NORM},
    defaults={"max_position_embeddings": 8192},
    check=_check_cohere,
)

# Cohere 2025, Command A and R7B.  Three layers of four have a window, and only these have positions.
_COHERE2 = _COHERE.variant(
    "cohere2",
    "Cohere2ForCausalLM",
    fields={name: _COHERE.fields[name] for name in _COHERE.fields if name != "attention.qk_norm"},
    defaults={"max_position_embeddings": 8192, "sliding_window": 4096, "sliding_window_pattern": 4},
    check=lambda fields: fields.require_one_of("use_qk_norm", False, reason="transformers' class ignores it."),
    layer_types=LayerTypes(_read_cohere2_layers, base.write_layer_types),
)


def _choose_cohere(config: ModelConfig) -> str:
    attentions = [layer.attention for layer in config.stack.layer_configs]
    has_windows = any(attention.window is not None for attention in attentions)
    return "cohere2" if has_windows or attentions[0].position is None else "cohere"


# ---------------------------------------------------------------- gpt-oss


def _check_gpt_oss(fields: HFConfigReader) -> None:
    fields.require_one_of("hidden_act", "silu", reason="transformers' class ignores it.")
    hf.require_scaling(fields, "Null means no scaling in transformers 4, YaRN in 5.")


def _split_gate_up(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Split interleaved [experts, (in,) 2 hidden] into two [experts, hidden(, in)]."""
    (gate_up,) = tensors
    return [_transposed(gate_up[..., start::2]) for start in (0, 1)]


def _join_gate_up(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [torch.stack([_transposed(tensor) for tensor in tensors], dim=-1).flatten(-2)]


def _transposed(tensor: Tensor) -> Tensor:
    """Transpose each expert's matrix; a bias per expert is returned unchanged."""
    return tensor.transpose(1, 2).contiguous() if tensor.dim() == 3 else tensor.contiguous()


_GATE_UP = TensorTransform(_split_gate_up, _join_gate_up)
_DOWN = TensorTransform(
    lambda tensors, shapes: [_transposed(tensors[0])], lambda tensors, shapes: [_transposed(tensors[0])]
)


def _gpt_oss_rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
    for suffix in ("", "_bias"):
        gate_up = (f"{kvad_prefix}.mlp.gate{suffix}", f"{kvad_prefix}.mlp.up{suffix}")
        yield tensor_rule(gate_up, f"{hf_prefix}.mlp.experts.gate_up_proj{suffix}", _GATE_UP)
        yield tensor_rule(f"{kvad_prefix}.mlp.down{suffix}", f"{hf_prefix}.mlp.experts.down_proj{suffix}", _DOWN)


# OpenAI 2025.  Experts with biases, a sink logit per head, a window in every other layer, unrounded YaRN.  An expert
# computes (up + 1) * gate * sigmoid(1.702 gate), clipped at 7; gate and up are interleaved in one matrix stored as
# [in, out].  The hub's files have them in MXFP4 (``quantized``).
_GPT_OSS = HFClass(
    "gpt_oss",
    "GptOssForCausalLM",
    {
        **{name: base.SIZES[name] for name in base.SIZES if name != "mlp.activation"},
        "attention.position": hf.rope(theta=150000.0),
        **hf.biases("attention_bias", True),
        "attention.sink_logits": True,
        "mlp.num_experts": hf.integer("num_local_experts"),
        "mlp.num_experts_per_token": hf.integer("num_experts_per_tok"),
        "mlp.bias": True,
        "mlp.router_bias": True,
        "mlp.swiglu_alpha": hf.number("swiglu_alpha"),
        "mlp.swiglu_limit": hf.number("swiglu_limit"),
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
    },
    layer={**base.ATTENTION, "mlp.router": "mlp.router", "attention.sink_logits": "self_attn.sinks"},
    mlp=cfg.MoEConfig,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    check=_check_gpt_oss,
    layer_types=base.window_layers(base.alternating_pattern),
    layer_rules=_gpt_oss_rules,
    constants={"hidden_act": "silu", "pad_token_id": None},
)

FAMILIES = (
    decoder_family(_QWEN2, _QWEN3, choose=_choose_qwen),
    decoder_family(_SMOLLM3),
    decoder_family(_EXAONE4),
    decoder_family(_OLMO3),
    decoder_family(_GLM, _GLM4, choose=_choose_glm),
    decoder_family(_COHERE, _COHERE2, choose=_choose_cohere),
    decoder_family(_GPT_OSS),
)
