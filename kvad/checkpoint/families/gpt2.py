"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each half, weights stored as [in, out]."""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, cannot_express, dropout_fields, dropout_of, their_activation
from kvad.checkpoint.hf import STACKED_COLUMNS, TRANSPOSED, Family, Fields, Rule, rule, rules_under
from kvad.config import Attention, Embedding, Layer, LearnedPositions, ModelConfig, Norm, Plain, Stack
from kvad.errors import CheckpointError

__all__ = ["FAMILY", "layer_rules"]


_DROPOUT = {"embedding": "embd_pdrop", "residual": "resid_pdrop", "attention": "attn_pdrop"}


def read(fields: Fields) -> ModelConfig:
    fields.refuse("add_cross_attention", False, why="a decoder of an encoder-decoder is read with its encoder")
    fields.refuse("reorder_and_upcast_attn", False, True)  # an order of rounding
    width, heads, layers = fields.integer("n_embd"), fields.integer("n_head"), fields.integer("n_layer")
    limit = fields.integer("n_positions", default=1024)
    norm = Norm("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=True)
    mlp = Plain(fields.integer("n_inner", default=4 * width), _activation(fields), bias=True)
    scaled = fields.flag("scale_attn_weights", True)

    def layer(depth: int) -> Layer:
        scale = (width // heads) ** -0.5 if scaled else 1.0
        mixer = Attention(heads, position=None, bias=True, out_bias=True)
        return Layer(mixer if scaled and depth == 1 else replace(mixer, scale=scale / depth), mlp, norm)

    if not fields.flag("scale_attn_by_inverse_layer_idx"):
        stack = Stack(layers, {"L": layer(1)})
    elif layers > len(string.ascii_letters):
        raise CheckpointError(f"{fields.where}: scale_attn_by_inverse_layer_idx with {layers} layers is not supported")
    else:
        pattern = string.ascii_letters[:layers]
        stack = Stack(layers, {letter: layer(i + 1) for i, letter in enumerate(pattern)}, pattern)
    return ModelConfig(
        width=width,
        vocab=fields.integer("vocab_size"),
        limit=limit,
        decoder=stack,
        embed=Embedding(LearnedPositions(limit)),
        tie=fields.flag("tie_word_embeddings", True),
        dropout=dropout_of(fields, **_DROPOUT),
    )


def _activation(fields: Fields) -> Any:
    return fields.choice("activation_function", ACTIVATIONS, "gelu_new")


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield rule("embed.tokens", "transformer.wte")
    yield rule("embed.positions", "transformer.wpe")
    yield from layer_rules(config)
    yield rule("decoder.norm", "transformer.ln_f")
    yield rule("head", "lm_head")


def layer_rules(config: ModelConfig) -> Iterator[Rule]:
    """The layers of GPT and GPT-2, which name them alike."""
    for i in range(config.stack.layers):
        ours, theirs = f"decoder.layers.{i}", f"transformer.h.{i}"
        yield rule(tuple(f"{ours}.mixer.{part}" for part in "qkv"), f"{theirs}.attn.c_attn", STACKED_COLUMNS)
        products = {"mixer.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
        yield from rules_under(ours, theirs, products, TRANSPOSED)
        yield from rules_under(ours, theirs, {"norm1": "ln_1", "norm2": "ln_2"})


def write(config: ModelConfig) -> dict[str, Any]:
    kinds = list(config.stack.kinds.values())
    first, position = kinds[0], config.embed.position
    mixer, mlp, width = first.mixer, first.mlp, config.width
    same = {(layer.mixer.heads, layer.mlp, layer.norm) for layer in kinds}
    plain = Attention(mixer.heads, position=None, bias=True, out_bias=True, scale=mixer.scale)
    cannot_express(
        "gpt2",
        another_mixer=mixer != plain or len(same) != 1,
        another_mlp=not isinstance(mlp, Plain) or not mlp.bias,
        another_norm=first.norm != Norm("layer", first.norm.eps, bias=True) or config.stack.norm_place != "pre",
        another_embedding=config.embed != Embedding(LearnedPositions(config.limit)),
    )
    assert isinstance(position, LearnedPositions) and isinstance(mlp, Plain)
    by_depth = len(kinds) > 1
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab,
        "n_positions": position.size,
        "n_embd": width,
        "n_layer": config.stack.layers,
        "n_head": mixer.heads,
        "n_inner": mlp.hidden,
        "activation_function": their_activation(mlp.activation),
        "layer_norm_epsilon": first.norm.eps,
        "scale_attn_weights": mixer.scale == "default" or mixer.scale != 1.0,
        "scale_attn_by_inverse_layer_idx": by_depth,
        "tie_word_embeddings": config.tie,
        **dropout_fields(config, **_DROPOUT),
    }


FAMILY = Family(
    ("gpt2",),
    read,
    rules,
    write,
    prefix="transformer.",
    ignored=(r".*attn\.(masked_)?bias", r"lm_head\.weight"),
    head=("lm_head.weight", "transformer.wte.weight"),
)
