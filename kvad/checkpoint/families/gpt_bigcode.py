"""GPT-BigCode, the first StarCoder (Li et al. 2023): GPT-2 with one key-value head for all queries.

Weights are stored as [out, in]: all q, then k, then v; without ``multi_query``, by head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, one_kind, their_activation
from kvad.checkpoint.hf import Family, Fields, Rule, grouped, rule, rules_under
from kvad.config import Attention, Embedding, Layer, LearnedPositions, ModelConfig, Norm, Plain, Stack

__all__ = ["FAMILY"]

_LAYER = {"mixer.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj", "norm1": "ln_1", "norm2": "ln_2"}


def read(fields: Fields) -> ModelConfig:
    fields.refuse("add_cross_attention", False, why="a decoder of an encoder-decoder is read with its encoder")
    width, heads = fields.integer("n_embd"), fields.integer("n_head")
    limit = fields.integer("n_positions", default=1024)
    mixer = Attention(
        heads,
        1 if fields.flag("multi_query", True) else heads,
        position=None,
        bias=True,
        out_bias=True,
        scale="default" if fields.flag("scale_attn_weights", True) else "none",
    )
    activation = fields.choice("activation_function", ACTIVATIONS, "gelu_pytorch_tanh")
    mlp = Plain(fields.integer("n_inner", default=4 * width), activation, bias=True)
    layer = Layer(mixer, mlp, Norm("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=True))
    return ModelConfig(
        width=width,
        vocab=fields.integer("vocab_size"),
        limit=limit,
        decoder=Stack(fields.integer("n_layer"), {"L": layer}),
        embed=Embedding(LearnedPositions(limit)),
        tie=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield rule("embed.tokens", "transformer.wte")
    yield rule("embed.positions", "transformer.wpe")
    for i in range(config.stack.layers):
        ours, theirs = f"decoder.layers.{i}", f"transformer.h.{i}"
        mixer = config.stack.layer(i).mixer
        qkv = tuple(f"{ours}.mixer.{part}" for part in "qkv")
        yield rule(qkv, f"{theirs}.attn.c_attn", grouped(mixer.kv_heads or mixer.heads))
        yield from rules_under(ours, theirs, _LAYER)
    yield rule("decoder.norm", "transformer.ln_f")
    yield rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: Layer = one_kind(config, "gpt_bigcode")
    fields = {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "vocab_size": config.vocab,
        "n_positions": config.limit,
        "n_embd": config.width,
        "n_layer": config.stack.layers,
        "n_head": layer.mixer.heads,
        "multi_query": layer.mixer.kv_heads == 1,
        "n_inner": layer.mlp.hidden,
        "activation_function": their_activation(layer.mlp.activation),
        "layer_norm_epsilon": layer.norm.eps,
        "scale_attn_weights": layer.mixer.scale not in ("none", 1.0),
        "tie_word_embeddings": config.tie,
    }
    return fields


FAMILY = Family(
    ("gpt_bigcode",),
    read,
    rules,
    write,
    prefix="transformer.",
    ignored=(r".*\.attn\.(masked_)?bias", r"lm_head\.weight"),
    head=("lm_head.weight", "transformer.wte.weight"),
)
