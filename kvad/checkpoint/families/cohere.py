"""Command R (Cohere 2024) and Command A, R7B (Cohere 2025, ``cohere2``).

Rotary positions on neighbours (0, 1), (2, 3), ..., LayerNorm without biases, attention and MLP side by side, logits
times ``logit_scale``; some normalise q and k, each head with its own weights.  In the second kind three layers of four
see a window, and only these have positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, rope_fields, rotary, their_activation
from kvad.checkpoint.families.decoders import (
    LAYER,
    QK_NORM,
    attention,
    family,
    full_rope,
    known,
    language_head,
    layer_types,
    letters,
    make,
    rules,
    sizes,
    stack,
    window,
)
from kvad.checkpoint.hf import Fields
from kvad.config import Attention, Gated, Head, Layer, ModelConfig, Norm, Rope
from kvad.errors import CheckpointError

__all__ = ["FAMILY"]

_CLASSES = {"cohere": "CohereForCausalLM", "cohere2": "Cohere2ForCausalLM"}


def read(fields: Fields) -> ModelConfig:
    second = fields.model_type == "cohere2"
    fields = known(fields, max_position_embeddings=8192, **({"sliding_window": 4096} if second else {}))
    if second:
        pattern = letters(fields, lambda index: (index + 1) % fields.integer("sliding_window_pattern", default=4) != 0)
    else:
        pattern = "L" * fields.integer("num_hidden_layers")
    mlp = Gated(fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "silu"))
    norm = Norm("layer", fields.number("layer_norm_eps", default=1e-5))
    kinds = {letter: Layer(mixer, mlp, norm) for letter, mixer in _mixers(fields).items()}
    head = Head(scale=fields.number("logit_scale", default=0.0625))
    return make(fields, stack(kinds, pattern, norm_place="parallel"), tie=True, head=head)


def _mixers(fields: Fields) -> dict[str, Attention]:
    bias = fields.flag("attention_bias")
    mixer = attention(fields, position=full_rope(fields, interleaved=True), bias=bias, out_bias=bias)
    if fields.model_type == "cohere2":
        fields.refuse("use_qk_norm", False, why="transformers' class ignores it")
        return {"L": replace(mixer, window=window(fields)), "G": replace(mixer, position=None)}
    theta = fields.part("rope_parameters").get("rope_theta", fields.get("rope_theta"))
    if theta is None:
        raise CheckpointError(f"{fields.where}: rope_theta is missing", "transformers 4 means 10000, 5 means 500000")
    return {"L": replace(mixer, qk_norm="each" if fields.flag("use_qk_norm") else "none")}


def write(config: ModelConfig) -> dict[str, Any]:
    layers = [config.stack.layer(index) for index in range(config.stack.layers)]
    windows = [layer.mixer.window is not None for layer in layers]
    second = any(windows) or layers[0].mixer.position is None
    first, name = layers[windows.index(True)] if any(windows) else layers[0], "cohere2" if second else "cohere"
    out = {
        **sizes(config, name, _CLASSES[name]),
        "hidden_act": their_activation(first.mlp.activation),
        "layer_norm_eps": first.norm.eps,
        "attention_bias": first.mixer.bias,
        "logit_scale": language_head(config).scale,
        **rope_fields(rotary(first.mixer.position or Rope(), name)),
        **(layer_types(config) if second else {"use_qk_norm": first.mixer.qk_norm == "each"}),
    }
    return out


FAMILY = family(("cohere", "cohere2"), read, rules({**LAYER, **QK_NORM}), write)
