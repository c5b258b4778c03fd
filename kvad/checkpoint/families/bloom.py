"""BLOOM (BigScience 2022): ALiBi, a norm behind the embedding, q, k and v fused by head, an MLP four times as wide.

``apply_residual_connection_post_layernorm`` adds each half to its normalised input.  No field limits the length:
``seq_length``, which the published files have, is the length of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families.common import one_kind
from kvad.checkpoint.hf import Family, Fields, Rule, grouped, rule, rules_under
from kvad.config import Alibi, Attention, Embedding, Layer, ModelConfig, Norm, Plain, Stack

__all__ = ["FAMILY"]

_LAYER = {
    "mixer.out": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}


def read(fields: Fields) -> ModelConfig:
    width = fields.integer("n_embed", "hidden_size", default=64)
    norm = Norm("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=True)
    heads = fields.integer("n_head", "num_attention_heads", default=8)
    layer = Layer(
        Attention(heads, position=Alibi(), bias=True, out_bias=True),
        Plain(4 * width, "gelu_tanh", bias=True),
        norm,
    )
    normed = fields.flag("apply_residual_connection_post_layernorm")
    layers = fields.integer("n_layer", "num_hidden_layers", default=2)
    return ModelConfig(
        width=width,
        vocab=fields.integer("vocab_size"),
        limit=fields.integer("seq_length", default=2048),
        decoder=Stack(layers, {"L": layer}, norm_place="normed" if normed else "pre"),
        embed=Embedding(norm=norm),
        tie=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield rule("embed.tokens", "transformer.word_embeddings")
    yield rule("embed.norm", "transformer.word_embeddings_layernorm")
    for i in range(config.stack.layers):
        ours, theirs = f"decoder.layers.{i}", f"transformer.h.{i}"
        by_head = grouped(config.stack.layer(i).mixer.heads)
        qkv = tuple(f"{ours}.mixer.{part}" for part in "qkv")
        yield rule(qkv, f"{theirs}.self_attention.query_key_value", by_head)
        yield from rules_under(ours, theirs, _LAYER)
    yield rule("decoder.norm", "transformer.ln_f")
    yield rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: Layer = one_kind(config, "bloom")
    fields = {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": config.vocab,
        "seq_length": config.limit,
        "hidden_size": config.width,
        "n_layer": config.stack.layers,
        "n_head": layer.mixer.heads,
        "layer_norm_epsilon": layer.norm.eps,
        "apply_residual_connection_post_layernorm": config.stack.norm_place == "normed",
        "tie_word_embeddings": config.tie,
    }
    return fields


FAMILY = Family(
    ("bloom",),
    read,
    rules,
    write,
    prefix="transformer.",
    ignored=(r"lm_head\.weight",),
    head=("lm_head.weight", "transformer.word_embeddings.weight"),
)
