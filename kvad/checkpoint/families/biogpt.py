"""BioGPT (Luo et al. 2022): learned positions behind two unused rows, embeddings times sqrt(width), LayerNorm before
each half.  transformers' class normalises with epsilon 1e-5 whatever ``layer_norm_eps`` says; that is followed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, FAIRSEQ_LAYER, one_kind, their_activation
from kvad.checkpoint.hf import Family, Fields, Rule, rule, rules_under
from kvad.config import Attention, Embedding, Layer, LearnedPositions, ModelConfig, Norm, Plain, Stack

__all__ = ["FAMILY"]


def read(fields: Fields) -> ModelConfig:
    fields.refuse("add_cross_attention", False, why="a decoder of an encoder-decoder is read with its encoder")
    width, limit = fields.integer("hidden_size"), fields.integer("max_position_embeddings", default=1024)
    mixer = Attention(fields.integer("num_attention_heads"), position=None, bias=True, out_bias=True)
    mlp = Plain(fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "gelu"), bias=True)
    layer = Layer(mixer, mlp, Norm("layer", 1e-5, bias=True))
    scale = math.sqrt(width) if fields.flag("scale_embedding", True) else 1.0
    return ModelConfig(
        width=width,
        vocab=fields.integer("vocab_size"),
        limit=limit,
        decoder=Stack(fields.integer("num_hidden_layers"), {"L": layer}),
        embed=Embedding(LearnedPositions(limit + 2, offset=2), scale),
        tie=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield rule("embed.tokens", "biogpt.embed_tokens")
    yield rule("embed.positions", "biogpt.embed_positions")
    for i in range(config.stack.layers):
        yield from rules_under(f"decoder.layers.{i}", f"biogpt.layers.{i}", FAIRSEQ_LAYER)
    yield rule("decoder.norm", "biogpt.layer_norm")
    yield rule("head", "output_projection")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: Layer = one_kind(config, "biogpt")
    fields = {
        "architectures": ["BioGptForCausalLM"],
        "model_type": "biogpt",
        "vocab_size": config.vocab,
        "max_position_embeddings": config.limit,
        "hidden_size": config.width,
        "num_hidden_layers": config.stack.layers,
        "num_attention_heads": layer.mixer.heads,
        "intermediate_size": layer.mlp.hidden,
        "hidden_act": their_activation(layer.mlp.activation),
        "layer_norm_eps": layer.norm.eps,
        "scale_embedding": config.embed.scale != 1.0,
        "tie_word_embeddings": config.tie,
    }
    return fields


FAMILY = Family(
    ("biogpt",),
    read,
    rules,
    write,
    prefix="biogpt.",
    ignored=(r"output_projection\.weight",),
    head=("output_projection.weight", "biogpt.embed_tokens.weight"),
)
