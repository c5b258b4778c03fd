"""Gemma 4 (Google 2026), the dense models without per-layer embeddings: text only.

Gemma 3 with RMSNorm by w, a norm on v, a learned scale of each layer's output and other head sizes in full layers, of
whose pairs a part is rotated (``proportional``) and whose values may be their keys before the norm.  The models with
experts, and E2B and E4B with per-layer embeddings and layers that read the cache of another layer, are refused.

Of the model with vision and audio (``gemma4``) only the text model is read; it is written as ``gemma4_text``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families import _hf_class as base
from kvad.checkpoint.families import gemma
from kvad.checkpoint.families._hf_class import HFClass, LayerTypes, decoder_family, multimodal_family
from kvad.config import ModelConfig, attention_dims
from kvad.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULT_ROPES: Mapping[str, Mapping[str, Any]] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_SIZES = ("head_dim", "num_key_value_heads")


def _check(fields: HFConfigReader) -> None:
    fields.require_one_of("use_bidirectional_attention", "vision", reason="kvad reads decoders only.")
    fields.require_one_of("enable_moe_block", False, reason="Experts beside a dense MLP are not supported.")
    fields.require_one_of("num_kv_shared_layers", 0, reason="Layers that read another layer's cache are not supported.")
    if fields.integer("hidden_size_per_layer_input", default=256) != 0:
        raise fields.error(
            "hidden_size_per_layer_input: must be 0", "Per-layer embeddings (E2B, E4B) are not supported."
        )


def _read_rope(fields: HFConfigReader, kind: str) -> cfg.RopeConfig:
    """Read the positions of one layer type."""
    ropes = fields.part("rope_parameters")
    part = ropes.part(kind) if kind in ropes else fields.derive(_DEFAULT_ROPES[kind])
    rope_type = part.get("rope_type", "default")
    if rope_type not in ("default", "proportional"):
        raise part.error(f"rope_type {rope_type!r} is not supported", "Supported: default, proportional.")
    theta = part.number("rope_theta", default=_DEFAULT_ROPES[kind]["rope_theta"])
    if rope_type == "default":
        part.require_one_of("partial_rotary_factor", 1.0)
        return cfg.RopeConfig(theta)
    fraction, factor = part.number("partial_rotary_factor", default=1.0), part.number("factor", default=1.0)
    return cfg.RopeConfig(theta, scaling=cfg.ProportionalScalingConfig(fraction, factor))


def _rope_content(position: object) -> dict[str, Any]:
    rope = hf.require_rope(position)
    content: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if isinstance(rope.scaling, cfg.ProportionalScalingConfig):
        scaling = {"partial_rotary_factor": rope.scaling.fraction, "factor": rope.scaling.factor}
        content |= {"rope_type": "proportional", **scaling}
    elif rope.scaling is not None:
        raise CheckpointError(f"its positions have {rope.scaling.kind} scaling")
    return content


def _full_sizes(fields: HFConfigReader, pattern: str) -> dict[str, int]:
    """Return the head dim and the number of key-value heads of full layers, which newer files have by layer."""
    shares = fields.flag("attention_k_eq_v")
    heads, full_heads = fields.integer("num_key_value_heads"), fields.optional_integer("num_global_key_value_heads")
    sizes = {"head_dim": fields.integer("global_head_dim", default=512)}
    sizes["num_key_value_heads"] = full_heads if shares and full_heads is not None else heads
    by_layer = fields.get("per_layer_config")
    if by_layer is None:
        return sizes
    full = [str(index) for index, letter in enumerate(pattern) if letter == "G"]
    contents = list(by_layer.values()) if isinstance(by_layer, Mapping) else []
    if sorted(by_layer, key=int) != full or any(each != contents[0] or set(each) - set(_SIZES) for each in contents):
        hint = f"It must have equal {' and '.join(_SIZES)} for each full layer, and no others."
        raise fields.error("per_layer_config is not supported", hint)
    own = HFConfigReader(contents[0] if contents else {}, f"{fields.where}: per_layer_config")
    return {
        "head_dim": own.integer("head_dim", default=fields.integer("head_dim")),
        "num_key_value_heads": own.integer("num_key_value_heads", default=heads),
    }


def _read_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    pattern = base.window_pattern(fields, lambda index: (index + 1) % 6 != 0)
    if pattern[-1] != "G":
        raise fields.error("layer_types: the last layer must be full_attention")
    layer, sizes = replace(layer, output_scale=True), _full_sizes(fields, pattern)
    full = base.with_attention(
        layer,
        head_dim=sizes["head_dim"],
        num_kv_heads=sizes["num_key_value_heads"],
        position=_read_rope(fields, _FULL),
        values_from_keys=fields.flag("attention_k_eq_v"),
    )
    return {"G": full, "L": base.with_window(layer, fields)}, pattern


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    mixers = (layer.attention for layer in config.stack.layer_configs)
    layers = [mixer for mixer in mixers if isinstance(mixer, cfg.AttentionConfig)]
    full = next((layer for layer in layers if layer.window is None), layers[0])
    local = next((layer for layer in layers if layer.window is not None), full)
    full_dims, local_dims = attention_dims(config, full), attention_dims(config, local)
    sizes = {"head_dim": full_dims.head_dim, "num_key_value_heads": full_dims.num_kv_heads}
    local_position = local.position if local is not full else cfg.RopeConfig()
    return {
        **base.write_layer_types(config),
        "head_dim": local_dims.head_dim,
        "num_key_value_heads": local_dims.num_kv_heads,
        "attention_k_eq_v": full.values_from_keys,
        "per_layer_config": {str(i): sizes for i, layer in enumerate(layers) if layer.window is None},
        "rope_parameters": {_FULL: _rope_content(full.position), _SLIDING: _rope_content(local_position)},
    }


_GEMMA4 = HFClass(
    "gemma4_text",
    "Gemma4ForCausalLM",
    {
        **{name: base.SIZES[name] for name in base.SIZES if name != "mlp.activation"},
        "tie_embeddings": hf.flag("tie_word_embeddings", True),
        "attention.position": hf.HFField(lambda fields: _read_rope(fields, _SLIDING)),
        **hf.biases("attention_bias"),
        "attention.qk_norm": "head",
        "attention.value_norm": True,
        "attention.softmax_scale": "none",
        "mlp.activation": gemma.HIDDEN_ACTIVATION,
        "embedding.scale": hf.HFField(lambda fields: fields.integer("hidden_size") ** 0.5),
        "stack.norm_position": "sandwich",
        "head.logit_softcap": hf.optional_number("final_logit_softcapping"),
    },
    layer={**gemma.SANDWICH_LAYER, "output_scale": "layer_scalar"},
    defaults={"head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 131072, "sliding_window": 512},
    check=_check,
    layer_types=LayerTypes(_read_layers, _write_layers),
    constants={"hidden_size_per_layer_input": 0, "pad_token_id": None},
)
_TEXT = decoder_family(_GEMMA4)


FAMILIES = (
    _TEXT,
    multimodal_family(
        _TEXT,
        "gemma4",
        "gemma4_text",
        (r"(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\..*", r"lm_head\.weight"),
    ),
)
