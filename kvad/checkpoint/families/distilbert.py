"""DistilBERT (Sanh et al. 2019): BERT's layers, half as many, without token types and pooler; epsilons are 1e-12.

``sinusoidal_pos_embds``: the positions are the paper's sines and cosines, which their files hold as a tensor like any
learned table.  If it holds other values (transformers reads what is there), the positions are learned ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvad.checkpoint.families import encoders
from kvad.checkpoint.families.common import ACTIVATIONS, one_kind, their_activation
from kvad.checkpoint.hf import Family, Fields, Rule, rule, rules_under
from kvad.config import (
    Attention,
    Classes,
    Embedding,
    Head,
    Layer,
    LearnedPositions,
    ModelConfig,
    Norm,
    Plain,
    Pooled,
    SinusoidalPositions,
    Stack,
    Transform,
)
from kvad.model.positions import sinusoid

__all__ = ["FAMILY"]

_NORM = Norm("layer", 1e-12, bias=True)
_TABLE = "embeddings.position_embeddings.weight"
_EMBEDDING = {
    "embed.tokens": "embeddings.word_embeddings",
    "embed.positions": "embeddings.position_embeddings",
    "embed.norm": "embeddings.LayerNorm",
}
_LAYER = {
    "mixer.q": "attention.q_lin",
    "mixer.k": "attention.k_lin",
    "mixer.v": "attention.v_lin",
    "mixer.out": "attention.out_lin",
    "norm1": "sa_layer_norm",
    "mlp.up": "ffn.lin1",
    "mlp.down": "ffn.lin2",
    "norm2": "output_layer_norm",
}


def read(fields: Fields) -> ModelConfig:
    encoders.encoder_only(fields)
    limit = fields.integer("max_position_embeddings", default=512)
    activation = fields.choice("activation", ACTIVATIONS, "gelu")
    mixer = Attention(fields.integer("n_heads"), position=None, causal=False, bias=True, out_bias=True)
    layer = Layer(mixer, Plain(fields.integer("hidden_dim"), activation, bias=True), _NORM)
    names = encoders.labels(fields)
    heads: dict[str, encoders.Task] = {
        "ForMaskedLM": Head(bias=True, transform=Transform(activation, norm=_NORM)),
        "ForTokenClassification": Classes(names),
        "ForSequenceClassification": Classes(names, "row", transform=Transform("relu")),
        "Model": Pooled(),
    }
    sines = fields.flag("sinusoidal_pos_embds")
    return ModelConfig(
        width=fields.integer("dim"),
        vocab=fields.integer("vocab_size"),
        limit=limit,
        encoder=Stack(fields.integer("n_layers"), {"L": layer}, norm_place="post", final_norm=False),
        embed=Embedding(SinusoidalPositions() if sines else LearnedPositions(limit), norm=_NORM),
        head=encoders.task(fields, heads),
        tie=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    base = _base(config)
    for mine, other in _EMBEDDING.items():
        yield rule(mine, base + other)
    for i in range(config.stack.layers):
        yield from rules_under(f"encoder.layers.{i}", f"{base}transformer.layer.{i}", _LAYER)
    if isinstance(config.head, Head):
        yield rule("head.transform.dense", "vocab_transform")
        yield rule("head.transform.norm", "vocab_layer_norm")
        yield rule("head", "vocab_projector")
    else:
        yield rule("head.transform.dense", "pre_classifier")
        yield rule("head", "classifier")


def _base(config: ModelConfig) -> str:
    return "" if isinstance(config.head, Pooled) else "distilbert."


def write(config: ModelConfig) -> dict[str, Any]:
    layer = one_kind(config, "distilbert")
    fields = {
        **encoders.task_fields(config, "DistilBert"),
        "model_type": "distilbert",
        "vocab_size": config.vocab,
        "dim": config.width,
        "hidden_dim": layer.mlp.hidden,
        "n_layers": config.stack.layers,
        "n_heads": layer.mixer.heads,
        "activation": their_activation(layer.mlp.activation),
        "max_position_embeddings": config.limit,
        "sinusoidal_pos_embds": isinstance(config.embed.position, SinusoidalPositions),
        "tie_word_embeddings": config.tie,
    }
    return fields


def table(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The sinusoidal positions [limit, E] as their files hold them."""
    if isinstance(config.embed.position, SinusoidalPositions):
        yield _base(config) + _TABLE, sinusoid(torch.arange(config.limit), config.width, config.embed.position)


_heads = encoders.settling("vocab_transform.weight")


def settle(config: ModelConfig, look: Callable[[str], Tensor | None]) -> ModelConfig:
    found = look(f"distilbert.{_TABLE}")
    for _, ours in table(config):
        if found is not None and not encoders.same_table(found, ours):
            config = replace(config, embed=replace(config.embed, position=LearnedPositions(config.limit)))
    return _heads(config, look)


FAMILY = Family(
    ("distilbert",),
    read,
    rules,
    write,
    prefix="distilbert.",
    ignored=(r"embeddings\.position_(ids|embeddings\.weight)", r"vocab_projector\.weight"),
    extra=table,
    head=("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
    spellings=encoders.LEGACY_NORMS,
    settle=settle,
)
