"""GPT-J (Wang & Komatsuzaki 2021): both halves in parallel behind one norm, no biases in attention, one in the head.

RoPE turns neighbouring pairs of the first ``rotary_dim`` dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, one_kind, rotary, their_activation
from kvad.checkpoint.hf import Family, Fields, Rule, rule, rules_under
from kvad.config import Attention, Head, Layer, ModelConfig, Norm, Plain, Rope, Stack, head_dim

__all__ = ["FAMILY", "rules_but_qkv"]

_LAYER = {"mixer.out": "attn.out_proj", "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out", "norm1": "ln_1"}


def read(fields: Fields) -> ModelConfig:
    for name in ("rotary", "scale_attn_weights"):
        fields.refuse(name, True, why="transformers' class ignores it")
    width, heads = fields.integer("n_embd"), fields.integer("n_head")
    position = Rope(fraction=fields.integer("rotary_dim") / (width // heads), interleaved=True)
    hidden = fields.integer("n_inner", default=4 * width)
    mlp = Plain(hidden, fields.choice("activation_function", ACTIVATIONS, "gelu_new"), bias=True)
    norm = Norm("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=True)
    layer = Layer(Attention(heads, position=position), mlp, norm)
    return ModelConfig(
        width=width,
        vocab=fields.integer("vocab_size"),
        limit=fields.integer("n_positions", default=2048),
        decoder=Stack(fields.integer("n_layer"), {"L": layer}, norm_place="parallel"),
        head=Head(bias=True),
        tie=fields.flag("tie_word_embeddings"),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    for i in range(config.stack.layers):
        names = {f"mixer.{part}": f"attn.{part}_proj" for part in "qkv"}
        yield from rules_under(f"decoder.layers.{i}", f"transformer.h.{i}", names)
    yield from rules_but_qkv(config)


def rules_but_qkv(config: ModelConfig) -> Iterator[Rule]:
    yield rule("embed.tokens", "transformer.wte")
    for i in range(config.stack.layers):
        yield from rules_under(f"decoder.layers.{i}", f"transformer.h.{i}", _LAYER)
    yield rule("decoder.norm", "transformer.ln_f")
    yield rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: Layer = one_kind(config, "gptj")
    fields = {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "vocab_size": config.vocab,
        "n_positions": config.limit,
        "n_embd": config.width,
        "n_layer": config.stack.layers,
        "n_head": layer.mixer.heads,
        "n_inner": layer.mlp.hidden,
        "rotary_dim": int(head_dim(config, layer.mixer) * rotary(layer.mixer.position, "gptj").fraction),
        "activation_function": their_activation(layer.mlp.activation),
        "layer_norm_epsilon": layer.norm.eps,
        "tie_word_embeddings": config.tie,
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
