"""Qwen decoders with Gated DeltaNet: three layers with a matrix as state, then one with gated attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvad import config as cfg
from kvad.checkpoint import conversion
from kvad.checkpoint.conversion import HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families import _hf_class as base
from kvad.checkpoint.families import experts
from kvad.checkpoint.families._hf_class import HFClass, LayerTypes, decoder_family, multimodal_family
from kvad.checkpoint.families.hybrid import CHANNEL_CONV, layer_pattern
from kvad.config import ModelConfig

_TYPES = {"linear_attention": "S", "full_attention": "A"}
_SIZES = {  # of a linear layer, kvad -> Hugging Face
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel_size": "linear_conv_kernel_dim",
}
_ATTENTION = {  # of a layer with attention, besides its queries
    **{f"attention.{part}": f"self_attn.{part}_proj" for part in "kv"},
    "attention.out": "self_attn.o_proj",
    **base.QK_NORM,
}
_DELTA = {  # of a linear layer, besides its projections
    "attention.decay_bias": "linear_attn.dt_bias",
    "attention.log_rate": "linear_attn.A_log",
    "attention.norm": "linear_attn.norm",
    "attention.out": "linear_attn.out_proj",
}
_NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
_DEFAULTS = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}


def _read_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    interval, num_layers = fields.integer("full_attention_interval"), fields.integer("num_hidden_layers")
    types = fields.get("layer_types")
    if types is None:
        types = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(num_layers)]
    sizes: dict[str, Any] = {name: fields.integer(hf_name) for name, hf_name in _SIZES.items()}
    activation = fields.choice("hidden_act", hf.ACTIVATIONS, "silu")
    mixer = cfg.GatedDeltaConfig(**sizes, activation=activation, norm_eps=layer.norm.eps)
    return {"A": layer, "S": replace(layer, attention=mixer)}, layer_pattern(fields, types, _TYPES)


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    mixers = [layer.attention for layer in config.stack.layer_configs]
    mixer = next((mixer for mixer in mixers if isinstance(mixer, cfg.GatedDeltaConfig)), None)
    types = ["linear_attention" if isinstance(each, cfg.GatedDeltaConfig) else "full_attention" for each in mixers]
    sizes = {} if mixer is None else {hf_name: getattr(mixer, name) for name, hf_name in _SIZES.items()}
    return {"layer_types": types, **sizes}


_LAYERS = LayerTypes(_read_layers, _write_layers)


def _mixer_rules(
    projections: Callable[[cfg.GatedDeltaConfig, str, str], Iterator[TensorRule]],
) -> Callable[[ModelConfig, str, str], Iterator[TensorRule]]:
    """Build the rules of a layer's mixer; ``projections`` yields those of a linear layer's inputs."""

    def rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
        mixer = config.stack.layer_config(int(kvad_prefix.rpartition(".")[2])).attention
        if isinstance(mixer, cfg.GatedDeltaConfig):
            yield from projections(mixer, f"{kvad_prefix}.attention", f"{hf_prefix}.linear_attn")
            yield tensor_rule(f"{kvad_prefix}.attention.conv", f"{hf_prefix}.linear_attn.conv1d", CHANNEL_CONV)
            yield from prefix_rules(kvad_prefix, hf_prefix, _DELTA)
            return
        queries = f"{kvad_prefix}.attention.q", f"{kvad_prefix}.attention.gate"
        yield tensor_rule(queries, f"{hf_prefix}.self_attn.q_proj", conversion.grouped_transform(mixer.num_heads))
        yield from prefix_rules(kvad_prefix, hf_prefix, _ATTENTION)

    return rules


def _fields(partial: float) -> hf.FieldTable:
    return {
        **base.SIZES,
        **hf.dropouts(attention="attention_dropout"),
        "attention.position": hf.rope(partial=partial),
        **hf.biases("attention_bias"),
        "attention.qk_norm": "head",
        "attention.output_gate": True,
        "norm.unit_offset": True,
    }


# ---------------------------------------------------------------- Qwen3-Next


def _grouped_projections(mixer: cfg.GatedDeltaConfig, kvad_name: str, hf_name: str) -> Iterator[TensorRule]:
    transform = conversion.grouped_transform(mixer.num_key_heads)
    for parts, name in ((("q", "k", "v", "gate"), "in_proj_qkvz"), (("beta", "decay"), "in_proj_ba")):
        yield tensor_rule(tuple(f"{kvad_name}.{part}" for part in parts), f"{hf_name}.{name}", transform)


_next_mixer_rules = _mixer_rules(_grouped_projections)
_next_mlp_rules = experts.expert_rules("gate", "", "shared_expert", "shared_expert_gate")


def _next_rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
    yield from _next_mixer_rules(config, kvad_prefix, hf_prefix)
    yield from _next_mlp_rules(config, kvad_prefix, hf_prefix)


# Qwen 2025.  Experts as in Qwen2-MoE; projections of linear layers are grouped by key head.
_QWEN3_NEXT = HFClass(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _fields(0.25),
    layer=_NORMS,
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    layer_types=base.combined_layers(_LAYERS, experts.QWEN2_LAYERS, {"AD": "D", "AE": "E", "SD": "S", "SE": "F"}),
    layer_rules=_next_rules,
    constants={"pad_token_id": None, "decoder_sparse_step": 1},
    ignored=(r".*rotary_emb\.inv_freq", r"(.*\.)?mtp\..*"),  # layers that predict further tokens
)


# ---------------------------------------------------------------- Qwen3.5, dense


def _separate_projections(mixer: cfg.GatedDeltaConfig, kvad_name: str, hf_name: str) -> Iterator[TensorRule]:
    joined = tuple(f"{kvad_name}.{part}" for part in "qkv")
    yield tensor_rule(joined, f"{hf_name}.in_proj_qkv", conversion.STACKED)
    others = {"gate": "in_proj_z", "beta": "in_proj_b", "decay": "in_proj_a"}
    yield from prefix_rules(kvad_name, hf_name, others)


# Qwen 2026.  Text positions have three equal parts (mrope), which is plain RoPE.
_QWEN3_5 = HFClass(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _fields(0.25),
    layer={**_NORMS, **{name: base.LAYER[name] for name in base.LAYER if name.startswith("mlp.")}},
    defaults={**_DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 12288},
    check=lambda fields: fields.require_one_of(
        "attn_output_gate", True, reason="Attention without a gate is not read."
    ),
    layer_types=_LAYERS,
    layer_rules=_mixer_rules(_separate_projections),
    ignored=_QWEN3_NEXT.ignored,
)
_TEXT = decoder_family(_QWEN3_5)


FAMILIES = (
    decoder_family(_QWEN3_NEXT),
    _TEXT,
    multimodal_family(
        _TEXT, "qwen3_5", "qwen3_5_text", (*_QWEN3_5.ignored, r"(model\.)?visual\..*", r"lm_head\.weight")
    ),
)
