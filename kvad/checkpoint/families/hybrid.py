"""Decoders in which only some layers have attention; the others read a state of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader, TensorRule, TensorTransform, prefix_rules, tensor_rule
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families import _hf_class as base
from kvad.checkpoint.families._hf_class import HFClass, LayerTypes, decoder_family
from kvad.checkpoint.families.experts import EXPERTS, W123, dense_first, sparse_layers, stacked_rules
from kvad.checkpoint.families.gemma import HIDDEN_ACTIVATION
from kvad.config import ModelConfig
from kvad.errors import CheckpointError

# Conv1d stores [channels, 1, kernel size]; its bias is unchanged.
CHANNEL_CONV = TensorTransform(
    lambda tensors, shapes: [tensor.flatten(1) if tensor.dim() == 3 else tensor for tensor in tensors],
    lambda tensors, shapes: [tensor.unsqueeze(1) if tensor.dim() == 2 else tensor for tensor in tensors],
)


def layer_pattern(fields: HFConfigReader, types: list[str], letters: Mapping[str, str]) -> str:
    """Return the letter of each layer from a list of names."""
    layers = fields.integer("num_hidden_layers")
    if len(types) != layers or not set(types) <= letters.keys():
        hint = f"It must have {layers} of {' or '.join(letters)}."
        raise fields.error(f"layer_types {types!r} is not supported", hint)
    return "".join(letters[kind] for kind in types)


def _mixer_rules(
    conv_name: str, attention: Mapping[str, str], other: Mapping[str, str]
) -> Callable[[ModelConfig, str, str], Iterator[TensorRule]]:
    """Build the rules of a layer's mixer: names with attention, and names and convolution of the other mixer."""

    def rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
        layer = config.stack.layer_config(int(kvad_prefix.rpartition(".")[2]))
        if isinstance(layer.attention, cfg.AttentionConfig):
            yield from prefix_rules(kvad_prefix, hf_prefix, attention)
        else:
            yield from prefix_rules(kvad_prefix, hf_prefix, other)
            yield tensor_rule(f"{kvad_prefix}.attention.conv", f"{hf_prefix}.{conv_name}", CHANNEL_CONV)

    return rules


# ---------------------------------------------------------------- LFM2

_LFM2_TYPES = {"conv": "C", "full_attention": "A"}


def _read_lfm2_rope(fields: HFConfigReader) -> cfg.RopeConfig:
    theta = fields.number("theta", default=1000000.0)  # of the first files
    return hf.read_full_rope(fields, theta=theta)


def _read_lfm2_size(fields: HFConfigReader) -> int:
    size = fields.integer("block_ff_dim", "intermediate_size", default=12288)
    factor, multiple = fields.number("block_ffn_dim_multiplier", default=1.0), fields.integer("block_multiple_of")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


def _read_lfm2_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    types, layers = fields.get("layer_types"), range(fields.integer("num_hidden_layers"))
    full = fields.get("full_attn_idxs", list(layers))
    if types is None:
        types = ["full_attention" if index in full else "conv" for index in layers]
    conv = cfg.ShortConvConfig(fields.integer("conv_L_cache", default=3), fields.flag("conv_bias"))
    letters = layer_pattern(fields, types, _LFM2_TYPES)
    return {"A": layer, "C": cfg.LayerConfig(conv, layer.mlp, layer.norm)}, letters


def _write_lfm2_layers(config: ModelConfig) -> dict[str, Any]:
    mixers = [layer.attention for layer in config.stack.layer_configs]
    conv = next((mixer for mixer in mixers if isinstance(mixer, cfg.ShortConvConfig)), cfg.ShortConvConfig())
    types = ["conv" if isinstance(mixer, cfg.ShortConvConfig) else "full_attention" for mixer in mixers]
    return {"layer_types": types, "conv_L_cache": conv.kernel_size, "conv_bias": conv.bias}


_LFM2_LAYERS = LayerTypes(_read_lfm2_layers, _write_lfm2_layers)
_lfm2_rules = _mixer_rules(
    "conv.conv",
    {
        **{f"attention.{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")},
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
    },
    {"attention.input": "conv.in_proj", "attention.out": "conv.out_proj"},
)

# Liquid AI 2025.  Most layers are gated short convolutions; q and k are normalized per head.
_LFM2 = HFClass(
    "lfm2",
    "Lfm2ForCausalLM",
    {
        **{name: base.SIZES[name] for name in base.SIZES if name not in ("mlp.activation", "norm.eps")},
        "tie_embeddings": hf.HFField(
            lambda fields: fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True)),
            lambda value, config: {"tie_word_embeddings": value},
        ),
        "norm.eps": hf.number("norm_eps", 1e-5),
        "attention.position": hf.HFField(_read_lfm2_rope, lambda position, config: hf.rope_fields(position)),
        "attention.qk_norm": "head",
        "mlp.intermediate_size": hf.HFField(
            _read_lfm2_size, lambda size, config: {"intermediate_size": size, "block_auto_adjust_ff_dim": False}
        ),
    },
    layer={
        **{f"mlp.{part}": f"feed_forward.{name}" for part, name in W123.items()},
        "norm1": "operator_norm",
        "norm2": "ffn_norm",
    },
    tensors={**base.TENSORS, "stack.norm": "model.embedding_norm"},
    defaults={"max_position_embeddings": 128000, "num_key_value_heads": 8, "block_multiple_of": 256},
    layer_types=_LFM2_LAYERS,
    layer_rules=_lfm2_rules,
)


# ---------------------------------------------------------------- LFM2-MoE


_LFM2_EXPERTS = sparse_layers(
    {
        **EXPERTS,
        "num_experts": hf.integer("num_experts"),
        "router": "sigmoid",
        "renormalize": hf.flag("norm_topk_prob", True),
        "routed_scale": hf.number("routed_scaling_factor", 1.0),
        "selection_bias": hf.flag("use_expert_bias", True),
    },
    dense_first("num_dense_layers"),
)


_LFM2_MOE_LAYERS = base.combined_layers(_LFM2_LAYERS, _LFM2_EXPERTS, {"AD": "A", "CD": "C", "AE": "E", "CE": "F"})


def _write_lfm2_moe_layers(config: ModelConfig) -> dict[str, Any]:
    if not any(isinstance(layer.mlp, cfg.MoEConfig) for layer in config.stack.layer_configs):
        raise CheckpointError("no layer has experts")
    return _LFM2_MOE_LAYERS.write(config)


def _lfm2_moe_rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
    yield from _lfm2_rules(config, kvad_prefix, hf_prefix)
    mlp = config.stack.layer_config(int(kvad_prefix.rpartition(".")[2])).mlp
    if not isinstance(mlp, cfg.MoEConfig):
        yield from prefix_rules(f"{kvad_prefix}.mlp", f"{hf_prefix}.feed_forward", W123)
        return
    yield tensor_rule(f"{kvad_prefix}.mlp.router", f"{hf_prefix}.feed_forward.gate")
    yield tensor_rule(f"{kvad_prefix}.mlp.selection_bias", f"{hf_prefix}.feed_forward.expert_bias")
    yield from stacked_rules("feed_forward", W123)(config, kvad_prefix, hf_prefix)


# Liquid AI 2025.  LFM2 with experts behind its first layers, chosen by sigmoids and a bias that balances them.
_LFM2_MOE = _LFM2.variant(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    fields={**_LFM2.fields, "mlp.intermediate_size": hf.integer("intermediate_size", default=7168)},
    layer={"norm1": "operator_norm", "norm2": "ffn_norm"},
    defaults={
        "max_position_embeddings": 128000,
        "num_key_value_heads": 8,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_dense_layers": 2,
    },
    layer_types=_LFM2_MOE_LAYERS._replace(write=_write_lfm2_moe_layers),
    layer_rules=_lfm2_moe_rules,
)


# ---------------------------------------------------------------- RecurrentGemma

_GEMMA_BLOCKS = {"recurrent": "R", "attention": "A"}


def _read_gemma_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    layers, blocks = fields.integer("num_hidden_layers"), fields.get("block_types")
    if not isinstance(blocks, list) or not blocks:
        raise fields.error("block_types must be a list of blocks", f"Each is {' or '.join(_GEMMA_BLOCKS)}.")
    width = fields.integer("lru_width", default=fields.integer("hidden_size"))
    heads, kernel_size = fields.integer("num_attention_heads"), fields.integer("conv1d_width", default=4)
    activation = fields.choice("hidden_activation", hf.ACTIVATIONS, "gelu_pytorch_tanh")
    mixer = cfg.GatedRecurrenceConfig(width, heads, kernel_size, activation)
    types = [blocks[index % len(blocks)] for index in range(layers)]
    return {"A": layer, "R": replace(layer, attention=mixer)}, layer_pattern(fields, types, _GEMMA_BLOCKS)


def _write_gemma_layers(config: ModelConfig) -> dict[str, Any]:
    mixers = [layer.attention for layer in config.stack.layer_configs]
    mixer = next((mixer for mixer in mixers if isinstance(mixer, cfg.GatedRecurrenceConfig)), None)
    types = ["recurrent" if isinstance(mixer, cfg.GatedRecurrenceConfig) else "attention" for mixer in mixers]
    sizes = {} if mixer is None else {"lru_width": mixer.width, "conv1d_width": mixer.kernel_size}
    return {"block_types": types, **sizes}


def _embedding_scale(hidden_size: int) -> float:
    return float(torch.tensor(hidden_size**0.5, dtype=torch.bfloat16))  # for weights of every dtype


# De et al. 2024 (Griffin), Botev et al. 2024.  Two recurrent blocks, then one with a window of attention.
_RECURRENT_GEMMA = HFClass(
    "recurrent_gemma",
    "RecurrentGemmaForCausalLM",
    {
        **{name: base.SIZES[name] for name in base.SIZES if name != "attention.head_dim"},
        **hf.dropouts(attention="attention_dropout"),
        "tie_embeddings": hf.flag("tie_word_embeddings", True),
        "attention.position": hf.rope(partial=0.5),
        "attention.window": hf.integer("attention_window_size"),
        "attention.qkv_bias": hf.flag("attention_bias"),
        "attention.out_bias": True,
        "mlp.intermediate_size": hf.HFField(
            lambda fields: fields.integer("intermediate_size") // 2, lambda size, _: {"intermediate_size": 2 * size}
        ),
        "mlp.activation": HIDDEN_ACTIVATION,
        "mlp.bias": True,
        "norm.unit_offset": True,
        "embedding.scale": hf.HFField(lambda fields: _embedding_scale(fields.integer("hidden_size"))),
        "head.logit_softcap": hf.number("logits_soft_cap", 30.0),
    },
    layer={
        "mlp.gate": "mlp_block.gate_proj",
        "mlp.up": "mlp_block.up_proj",
        "mlp.down": "mlp_block.down_proj",
        "norm1": "temporal_pre_norm",
        "norm2": "channel_pre_norm",
    },
    tensors={**base.TENSORS, "stack.norm": "model.final_norm"},
    defaults={
        "max_position_embeddings": 8192,  # the class has no limit; the published models were trained with it
        "attention_window_size": 2048,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    layer_types=LayerTypes(_read_gemma_layers, _write_gemma_layers),
    layer_rules=_mixer_rules(
        "temporal_block.conv_1d",
        {f"attention.{part}": f"temporal_block.{part[0]}_proj" for part in ("q", "k", "v", "out")},
        {
            "attention.gate": "temporal_block.linear_y",
            "attention.input": "temporal_block.linear_x",
            "attention.out": "temporal_block.linear_out",
            "attention.decay": "temporal_block.rg_lru.recurrent_param",
            "attention.input_gate.weight": "temporal_block.rg_lru.input_gate_weight",
            "attention.input_gate.bias": "temporal_block.rg_lru.input_gate_bias",
            "attention.decay_gate.weight": "temporal_block.rg_lru.recurrent_gate_weight",
            "attention.decay_gate.bias": "temporal_block.rg_lru.recurrent_gate_bias",
        },
    ),
    ignored=(r".*rotary_emb\.inv_freq", "normalizer"),
)

FAMILIES = (decoder_family(_LFM2), decoder_family(_LFM2_MOE), decoder_family(_RECURRENT_GEMMA))
