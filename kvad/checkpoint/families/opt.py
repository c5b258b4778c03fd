"""OPT (Zhang et al. 2022): learned positions behind two unused rows, ReLU, LayerNorm with a fixed epsilon.

OPT-350M alone normalises after each half (``do_layer_norm_before`` false), has no final norm, and embeds in another
width, from which and to which a matrix leads.  ``_remove_final_layer_norm`` marks files made before that was mended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, FAIRSEQ_LAYER, one_kind, their_activation
from kvad.checkpoint.hf import Family, Fields, Rule, rule, rules_under
from kvad.config import (
    Attention,
    Embedding,
    Head,
    Layer,
    LearnedPositions,
    ModelConfig,
    Norm,
    Plain,
    Stack,
    Transform,
    table_width,
)

__all__ = ["FAMILY"]


def read(fields: Fields) -> ModelConfig:
    width, limit = fields.integer("hidden_size"), fields.integer("max_position_embeddings", default=2048)
    bias, affine = fields.flag("enable_bias", True), fields.flag("layer_norm_elementwise_affine", True)
    mixer = Attention(fields.integer("num_attention_heads"), position=None, bias=bias, out_bias=bias)
    mlp = Plain(fields.integer("ffn_dim"), fields.choice("activation_function", ACTIVATIONS, "relu"), bias)
    layer = Layer(mixer, mlp, Norm("layer", 1e-5, bias=affine, weight=affine))
    before = fields.flag("do_layer_norm_before", True)
    final = before and not fields.flag("_remove_final_layer_norm")
    table = fields.integer("word_embed_proj_dim", default=width)
    positions = LearnedPositions(limit + 2, offset=2)
    other = table != width
    return ModelConfig(
        width=width,
        vocab=fields.integer("vocab_size"),
        limit=limit,
        decoder=Stack(
            fields.integer("num_hidden_layers"), {"L": layer}, norm_place="pre" if before else "post", final_norm=final
        ),
        embed=Embedding(positions, width=table, project="start") if other else Embedding(positions),
        head=Head(transform=Transform(activation=None, bias=False, width=table)) if other else Head(),
        tie=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    names = {
        "embed.tokens": "embed_tokens",
        "embed.positions": "embed_positions",
        "embed.project": "project_in",
        "decoder.norm": "final_layer_norm",
        "head.transform.dense": "project_out",
    }
    for mine, other in names.items():
        yield rule(mine, f"model.decoder.{other}")
    for i in range(config.stack.layers):
        yield from rules_under(f"decoder.layers.{i}", f"model.decoder.layers.{i}", FAIRSEQ_LAYER)
    yield rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: Layer = one_kind(config, "opt")
    before = config.stack.norm_place == "pre"
    fields = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": config.vocab,
        "max_position_embeddings": config.limit,
        "hidden_size": config.width,
        "word_embed_proj_dim": table_width(config),
        "num_hidden_layers": config.stack.layers,
        "num_attention_heads": layer.mixer.heads,
        "ffn_dim": layer.mlp.hidden,
        "activation_function": their_activation(layer.mlp.activation),
        "enable_bias": layer.mixer.bias,
        "layer_norm_elementwise_affine": layer.norm.weight,
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and not config.stack.final_norm,
        "tie_word_embeddings": config.tie,
    }
    return fields


FAMILY = Family(
    ("opt",),
    read,
    rules,
    write,
    prefix="model.",
    ignored=(r"lm_head\.weight",),
    head=("lm_head.weight", "model.decoder.embed_tokens.weight"),
)
