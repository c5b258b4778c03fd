"""GPT-2 (Radford et al. 2019).

Learned positions, LayerNorm before each half, weights stored as [in, out].
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.conversion import (
    STACKED_COLUMNS,
    TRANSPOSED,
    Family,
    HFConfigReader,
    TensorRule,
    prefix_rules,
    tensor_rule,
)
from kvad.checkpoint.families._common import ACTIVATIONS, check_expressible, dropout_fields, hf_activation, read_dropout
from kvad.config import (
    AttentionConfig,
    EmbeddingConfig,
    LayerConfig,
    LearnedPositionsConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    StackConfig,
)
from kvad.errors import CheckpointError

_DROPOUT = {"embedding": "embd_pdrop", "residual": "resid_pdrop", "attention": "attn_pdrop"}


def read(fields: HFConfigReader) -> ModelConfig:
    fields.require_one_of(
        "add_cross_attention", False, reason="A decoder of an encoder-decoder is read with its encoder."
    )
    fields.require_one_of("reorder_and_upcast_attn", False, True)  # affects rounding only
    hidden_size, heads, layers = fields.integer("n_embd"), fields.integer("n_head"), fields.integer("n_layer")
    max_seq_len = fields.integer("n_positions", default=1024)
    norm = NormConfig("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=True)
    mlp = PlainMLPConfig(fields.integer("n_inner", default=4 * hidden_size), _activation(fields), bias=True)
    scaled = fields.flag("scale_attn_weights", True)

    def layer(depth: int) -> LayerConfig:
        scale = (hidden_size // heads) ** -0.5 if scaled else 1.0
        attention = AttentionConfig(heads, position=None, qkv_bias=True, out_bias=True)
        return LayerConfig(
            attention if scaled and depth == 1 else replace(attention, softmax_scale=scale / depth), mlp, norm
        )

    if not fields.flag("scale_attn_by_inverse_layer_idx"):
        stack = StackConfig(layers, {"L": layer(1)})
    elif layers > len(string.ascii_letters):
        raise CheckpointError(f"{fields.where}: scale_attn_by_inverse_layer_idx with {layers} layers is not supported")
    else:
        pattern = string.ascii_letters[:layers]
        stack = StackConfig(layers, {letter: layer(i + 1) for i, letter in enumerate(pattern)}, pattern)
    return ModelConfig(
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=max_seq_len,
        decoder=stack,
        embedding=EmbeddingConfig(LearnedPositionsConfig(max_seq_len)),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        dropout=read_dropout(fields, **_DROPOUT),
    )


def _activation(fields: HFConfigReader) -> Any:
    return fields.choice("activation_function", ACTIVATIONS, "gelu_new")


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", "transformer.wte")
    yield tensor_rule("embedding.positions", "transformer.wpe")
    yield from layer_rules(config)
    yield tensor_rule("decoder.norm", "transformer.ln_f")
    yield tensor_rule("head", "lm_head")


def layer_rules(config: ModelConfig) -> Iterator[TensorRule]:
    """Yield the rules of the layers, which have the same names in GPT and GPT-2."""
    for i in range(config.stack.num_layers):
        kvad_prefix, hf_prefix = f"decoder.layers.{i}", f"transformer.h.{i}"
        yield tensor_rule(
            tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv"), f"{hf_prefix}.attn.c_attn", STACKED_COLUMNS
        )
        products = {"attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
        yield from prefix_rules(kvad_prefix, hf_prefix, products, TRANSPOSED)
        yield from prefix_rules(kvad_prefix, hf_prefix, {"norm1": "ln_1", "norm2": "ln_2"})


def write(config: ModelConfig) -> dict[str, Any]:
    layer_types = list(config.stack.layer_types.values())
    first, position = layer_types[0], config.embedding.position
    attention, mlp, hidden_size = first.attention, first.mlp, config.hidden_size
    same = {(layer.attention.num_heads, layer.mlp, layer.norm) for layer in layer_types}
    plain = AttentionConfig(
        attention.num_heads, position=None, qkv_bias=True, out_bias=True, softmax_scale=attention.softmax_scale
    )
    check_expressible(
        "gpt2",
        another_attention=attention != plain or len(same) != 1,
        another_mlp=not isinstance(mlp, PlainMLPConfig) or not mlp.bias,
        another_norm=first.norm != NormConfig("layer", first.norm.eps, bias=True)
        or config.stack.norm_position != "pre",
        another_embedding=config.embedding != EmbeddingConfig(LearnedPositionsConfig(config.max_seq_len)),
    )
    assert isinstance(position, LearnedPositionsConfig) and isinstance(mlp, PlainMLPConfig)
    by_depth = len(layer_types) > 1
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": position.num_positions,
        "n_embd": hidden_size,
        "n_layer": config.stack.num_layers,
        "n_head": attention.num_heads,
        "n_inner": mlp.intermediate_size,
        "activation_function": hf_activation(mlp.activation),
        "layer_norm_epsilon": first.norm.eps,
        "scale_attn_weights": attention.softmax_scale == "default" or attention.softmax_scale != 1.0,
        "scale_attn_by_inverse_layer_idx": by_depth,
        "tie_word_embeddings": config.tie_embeddings,
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
