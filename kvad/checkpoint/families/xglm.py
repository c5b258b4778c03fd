"""XGLM (Lin et al. 2021): fairseq's sinusoids from position 2 on, embeddings times sqrt(width), LayerNorm before each
half with a fixed epsilon.  The sinusoids are no weight: old files may hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, FAIRSEQ_LAYER, one_kind, their_activation
from kvad.checkpoint.hf import Family, Fields, Rule, rule, rules_under
from kvad.config import Attention, Embedding, Layer, ModelConfig, Norm, Plain, SinusoidalPositions, Stack

__all__ = ["FAMILY"]


def read(fields: Fields) -> ModelConfig:
    fields.refuse("add_cross_attention", False, why="a decoder of an encoder-decoder is read with its encoder")
    width = fields.integer("d_model")
    mixer = Attention(fields.integer("attention_heads"), position=None, bias=True, out_bias=True)
    mlp = Plain(fields.integer("ffn_dim"), fields.choice("activation_function", ACTIVATIONS, "gelu"), bias=True)
    layer = Layer(mixer, mlp, Norm("layer", 1e-5, bias=True))
    scale = math.sqrt(width) if fields.flag("scale_embedding", True) else 1.0
    return ModelConfig(
        width=width,
        vocab=fields.integer("vocab_size"),
        limit=fields.integer("max_position_embeddings", default=2048),
        decoder=Stack(fields.integer("num_layers"), {"L": layer}),
        embed=Embedding(SinusoidalPositions(form="fairseq", offset=2), scale),
        tie=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield rule("embed.tokens", "model.embed_tokens")
    for i in range(config.stack.layers):
        yield from rules_under(f"decoder.layers.{i}", f"model.layers.{i}", FAIRSEQ_LAYER)
    yield rule("decoder.norm", "model.layer_norm")
    yield rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: Layer = one_kind(config, "xglm")
    fields = {
        "architectures": ["XGLMForCausalLM"],
        "model_type": "xglm",
        "vocab_size": config.vocab,
        "max_position_embeddings": config.limit,
        "d_model": config.width,
        "num_layers": config.stack.layers,
        "attention_heads": layer.mixer.heads,
        "ffn_dim": layer.mlp.hidden,
        "activation_function": their_activation(layer.mlp.activation),
        "scale_embedding": config.embed.scale != 1.0,
        "tie_word_embeddings": config.tie,
    }
    return fields


FAMILY = Family(
    ("xglm",),
    read,
    rules,
    write,
    prefix="model.",
    ignored=(r"embed_positions\.weights", r"lm_head\.weight"),
    head=("lm_head.weight", "model.embed_tokens.weight"),
)
