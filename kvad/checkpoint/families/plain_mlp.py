"""Decoders like Llama whose MLP has two matrices: squared ReLU (So et al. 2021), or xIELU (Huang & Schlag 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader, TensorRule, TensorTransform, prefix_rules
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families import _hf_class as base
from kvad.checkpoint.families._hf_class import HFClass, decoder_family
from kvad.config import ModelConfig

_LAYER = {name: base.LAYER[name] for name in base.LAYER if name != "mlp.gate"}
_FIELDS = {
    **base.SIZES,
    **hf.dropouts(attention="attention_dropout"),
    **hf.biases("attention_bias"),
    "attention.position": hf.rope(),
    "mlp.activation": hf.activation("hidden_act", "relu2"),
    "mlp.bias": hf.flag("mlp_bias"),
}

# Arcee AI 2025.
_ARCEE = HFClass(
    "arcee",
    "ArceeForCausalLM",
    {**_FIELDS, "norm.eps": hf.number("rms_norm_eps", 1e-5)},
    layer=_LAYER,
    mlp=cfg.PlainMLPConfig,
    defaults={"max_position_embeddings": 4096},
)

# Parmar et al. 2024.  LayerNorm whose weight is stored as w - 1 (LayerNorm1P), partial RoPE.
_NEMOTRON = _ARCEE.variant(
    "nemotron",
    "NemotronForCausalLM",
    fields={
        **_FIELDS,
        "attention.position": hf.rope(partial=0.5),
        **hf.layer_norm("norm_eps"),
        "norm.unit_offset": True,
    },
)

# MBZUAI 2025.  LayerNorm, biases.
_JAIS2 = _ARCEE.variant(
    "jais2",
    "Jais2ForCausalLM",
    fields={
        **_FIELDS,
        **hf.biases("attention_bias", True),
        "mlp.bias": hf.flag("mlp_bias", True),
        **hf.layer_norm("layer_norm_eps"),
    },
    defaults={"max_position_embeddings": 8192},
)


# ---------------------------------------------------------------- Apertus


def _xielu_constants(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the constants of xIELU, which transformers stores in every layer."""
    mlp = config.stack.layer_config(0).mlp
    for index in range(config.stack.num_layers if mlp.activation == "xielu" else 0):
        yield f"model.layers.{index}.mlp.act_fn.beta", torch.tensor(0.5)
        yield f"model.layers.{index}.mlp.act_fn.eps", torch.tensor(-1e-6)


# Swiss AI 2025.  xIELU, whose two slopes are learned; RMSNorm on each head of q and k.
_APERTUS = _ARCEE.variant(
    "apertus",
    "ApertusForCausalLM",
    fields={
        **{name: _FIELDS[name] for name in _FIELDS if name != "mlp.bias"},
        "attention.position": hf.rope(theta=12000000.0),
        "attention.qk_norm": "head",
        "mlp.activation": hf.HFField(
            lambda fields: fields.choice("hidden_act", {**hf.ACTIVATIONS, "xielu": "xielu"}, "xielu"),
            lambda activation, config: {"hidden_act": hf.hf_activation(activation)},
        ),
        "norm.eps": hf.number("rms_norm_eps", 1e-5),
    },
    layer={
        **_LAYER,
        **base.QK_NORM,
        "norm1": "attention_layernorm",
        "norm2": "feedforward_layernorm",
        "mlp.alpha_p": "mlp.act_fn.alpha_p",
        "mlp.alpha_n": "mlp.act_fn.alpha_n",
    },
    defaults={"max_position_embeddings": 65536},
    check=lambda fields: hf.require_scaling(fields, "Null means no scaling in transformers 4, llama3 in 5."),
    ignored=(*_ARCEE.ignored, r".*act_fn\.(beta|eps)"),
)


# ---------------------------------------------------------------- nanochat


def _read_nanochat_rope(fields: HFConfigReader) -> cfg.RopeConfig:
    position = hf.read_full_rope(fields)
    if isinstance(position.scaling, cfg.YarnScalingConfig | cfg.LongRopeScalingConfig):
        hint = "This class normalizes after the rotation, which removes the factor of cos and sin."
        raise fields.error(f"rope_type {position.scaling.kind!r} is not supported", hint)
    return position


def _swapped_halves(head_dim: int) -> TensorTransform:
    """Build a transform that swaps the halves of each head, its own inverse."""

    def swap(tensor: Tensor) -> Tensor:
        swapped: Tensor = tensor.unflatten(0, (-1, 2, head_dim // 2)).flip(1).flatten(0, 2)
        return swapped

    return TensorTransform(
        lambda tensors, shapes: [swap(tensors[0])], lambda tensors, shapes: [swap(tensors[0]).contiguous()]
    )


def _nanochat_rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
    """Yield the rules of q and k: a rotation by the opposite angle is that of the swapped halves."""
    names = {f"attention.{part}": base.LAYER[f"attention.{part}"] for part in "qk"}
    yield from prefix_rules(kvad_prefix, hf_prefix, names, _swapped_halves(hf.first_head_dim(config)))


# Karpathy 2025.  RMSNorm without weights, also after the embedding and on each head of q and k, which are rotated
# backwards; a soft cap on the logits.  The norm after the rotation equals the norm before it.
_NANOCHAT = _ARCEE.variant(
    "nanochat",
    "NanoChatForCausalLM",
    fields={
        **{name: _FIELDS[name] for name in _FIELDS if name != "mlp.bias"},
        "attention.position": hf.HFField(_read_nanochat_rope, lambda position, config: hf.rope_fields(position)),
        "attention.qk_norm": "head",
        "norm.weight": False,
        "embedding.norm": hf.HFField(
            lambda fields: cfg.NormConfig(eps=fields.number("rms_norm_eps", default=1e-6), weight=False)
        ),
        "head.logit_softcap": hf.optional_number("final_logit_softcapping"),
    },
    layer={
        "attention.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    },
    defaults={"max_position_embeddings": 2048, "final_logit_softcapping": 15.0},
    layer_rules=_nanochat_rules,
)

FAMILIES = (
    decoder_family(_ARCEE),
    decoder_family(_NEMOTRON),
    decoder_family(_JAIS2),
    replace(decoder_family(_APERTUS), extra=_xielu_constants),
    decoder_family(_NANOCHAT),
)
