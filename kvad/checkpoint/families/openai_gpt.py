"""GPT (Radford et al. 2018): learned positions, LayerNorm after each half and none at the end, weights as [in, out].

What its config calls ``gelu`` is the tanh approximation; the MLP is always four times as wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families.common import one_kind
from kvad.checkpoint.families.gpt2 import layer_rules
from kvad.checkpoint.hf import Family, Fields, Rule, rule
from kvad.config import Attention, Embedding, Layer, LearnedPositions, ModelConfig, Norm, Plain, Stack

__all__ = ["FAMILY"]

_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}  # theirs -> ours


def read(fields: Fields) -> ModelConfig:
    width, limit = fields.integer("n_embd", default=768), fields.integer("n_positions", default=512)
    mixer = Attention(fields.integer("n_head", default=12), position=None, bias=True, out_bias=True)
    mlp = Plain(4 * width, fields.choice("afn", _ACTIVATIONS, "gelu"), bias=True)
    layer = Layer(mixer, mlp, Norm("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=True))
    layers = fields.integer("n_layer", default=12)
    return ModelConfig(
        width=width,
        vocab=fields.integer("vocab_size", default=40478),
        limit=limit,
        decoder=Stack(layers, {"L": layer}, norm_place="post", final_norm=False),
        embed=Embedding(LearnedPositions(limit)),
        tie=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield rule("embed.tokens", "transformer.tokens_embed")
    yield rule("embed.positions", "transformer.positions_embed")
    yield from layer_rules(config)
    yield rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: Layer = one_kind(config, "openai-gpt")
    activation = layer.mlp.activation
    fields = {
        "architectures": ["OpenAIGPTLMHeadModel"],
        "model_type": "openai-gpt",
        "vocab_size": config.vocab,
        "n_positions": config.limit,
        "n_embd": config.width,
        "n_layer": config.stack.layers,
        "n_head": layer.mixer.heads,
        "afn": "gelu" if activation == "gelu_tanh" else activation,
        "layer_norm_epsilon": layer.norm.eps,
        "tie_word_embeddings": config.tie,
    }
    return fields


FAMILY = Family(
    ("openai-gpt",),
    read,
    rules,
    write,
    prefix="transformer.",
    ignored=(r"position_ids", r".*\.attn\.bias", r"lm_head\.weight"),
    head=("lm_head.weight", "transformer.tokens_embed.weight"),
)
