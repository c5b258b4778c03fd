"""GPT-J (Wang & Komatsuzaki 2021).

Parallel halves after one norm, no biases in attention, one in the head.  RoPE rotates neighboring pairs of the first
``rotary_dim`` dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, require_rope, single_layer_type
from kvad.config import (
    AttentionConfig,
    LanguageHeadConfig,
    LayerConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    RopeConfig,
    StackConfig,
    head_dim,
)

_LAYER = {"attention.out": "attn.out_proj", "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out", "norm1": "ln_1"}


def read(fields: HFConfigReader) -> ModelConfig:
    for name in ("rotary", "scale_attn_weights"):
        fields.require_one_of(name, True, reason="transformers' class ignores it.")
    hidden_size, heads = fields.integer("n_embd"), fields.integer("n_head")
    position = RopeConfig(partial_rotary_factor=fields.integer("rotary_dim") / (hidden_size // heads), interleaved=True)
    hidden = fields.integer("n_inner", default=4 * hidden_size)
    mlp = PlainMLPConfig(hidden, fields.choice("activation_function", ACTIVATIONS, "gelu_new"), bias=True)
    norm = NormConfig("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=True)
    layer = LayerConfig(AttentionConfig(heads, position=position), mlp, norm)
    return ModelConfig(
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=fields.integer("n_positions", default=2048),
        decoder=StackConfig(fields.integer("n_layer"), {"L": layer}, norm_position="parallel"),
        head=LanguageHeadConfig(bias=True),
        tie_embeddings=fields.flag("tie_word_embeddings"),
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    for i in range(config.stack.num_layers):
        names = {f"attention.{part}": f"attn.{part}_proj" for part in "qkv"}
        yield from prefix_rules(f"decoder.layers.{i}", f"transformer.h.{i}", names)
    yield from rules_but_qkv(config)


def rules_but_qkv(config: ModelConfig) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", "transformer.wte")
    for i in range(config.stack.num_layers):
        yield from prefix_rules(f"decoder.layers.{i}", f"transformer.h.{i}", _LAYER)
    yield tensor_rule("decoder.norm", "transformer.ln_f")
    yield tensor_rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: LayerConfig = single_layer_type(config, "gptj")
    fields = {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_embd": config.hidden_size,
        "n_layer": config.stack.num_layers,
        "n_head": layer.attention.num_heads,
        "n_inner": layer.mlp.intermediate_size,
        "rotary_dim": int(
            head_dim(config, layer.attention) * require_rope(layer.attention.position, "gptj").partial_rotary_factor
        ),
        "activation_function": hf_activation(layer.mlp.activation),
        "layer_norm_epsilon": layer.norm.eps,
        "tie_word_embeddings": config.tie_embeddings,
    }
    return fields


FAMILY = Family(
    ("gptj",),
    read,
    rules,
    write,
    prefix="transformer.",
    ignored=(r".*\.attn\.(masked_)?bias", r".*\.attn\.embed_positions", r"lm_head\.weight"),
    head=("lm_head.weight", "transformer.wte.weight"),
)
