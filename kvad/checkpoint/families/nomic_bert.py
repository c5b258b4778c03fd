"""Nomic BERT (Nussbaum et al. 2024): BERT's order of norms with rotary positions, SwiGLU and no biases in the layers.

The class of transformers 5.x and its config; in the file the names are those of the authors' own code (``emb_ln``,
``Wqkv``, ``fc11`` the up and ``fc12`` the gate).  Their older config (``n_embd``, ...) is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.families import bert, encoders
from kvad.checkpoint.families.common import rope, rope_fields, rotary
from kvad.checkpoint.hf import STACKED, Family, Fields, Rule, rule, rules_under
from kvad.config import Attention, Classes, Gated, Head, Layer, ModelConfig, Plain, Pooled, Transform, head_dim

__all__ = ["FAMILY"]

_DECODER, _BIAS = "cls.predictions.decoder", "cls.predictions.bias"
_EMBEDDING = {
    "embed.tokens": "embeddings.word_embeddings",
    "embed.segments": "embeddings.token_type_embeddings",
    "embed.norm": "emb_ln",
}
_LAYER = {
    "mixer.out": "attn.out_proj",
    "norm1": "norm1",
    "mlp.up": "mlp.fc11",
    "mlp.gate": "mlp.fc12",
    "mlp.down": "mlp.fc2",
    "norm2": "norm2",
}


def read(fields: Fields) -> ModelConfig:
    limit = fields.integer("max_position_embeddings", default=2048)
    activation = fields.get("hidden_act", "silu")
    config = bert.read(encoders.as_base(fields, max_position_embeddings=limit, hidden_act=activation))
    layer, names = config.stack.kinds["L"], encoders.labels(fields)
    assert isinstance(layer.mlp, Plain)
    heads: dict[str, encoders.Task] = {
        "ForMaskedLM": Head(bias=True, transform=Transform(layer.mlp.activation, norm=layer.norm)),
        "ForTokenClassification": Classes(names),
        "ForSequenceClassification": Classes(names, "row", transform=Transform("tanh")),
        "Model": Pooled(),
    }
    heads_wide, position = fields.get("head_dim"), rope(fields, limit=limit, theta=1000.0)
    size = None if heads_wide is None or heads_wide * layer.mixer.heads == config.width else heads_wide
    mixer = Attention(layer.mixer.heads, head_dim=size, position=position, causal=False)
    changed = Layer(mixer, Gated(layer.mlp.hidden, layer.mlp.activation), layer.norm)
    return replace(
        config,
        encoder=replace(config.stack, kinds={"L": changed}),
        embed=replace(config.embed, position=None),
        head=encoders.task(fields, heads),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    base = "" if isinstance(config.head, Pooled) else "nomic_bert."
    for mine, other in _EMBEDDING.items():
        yield rule(mine, base + other)
    for i in range(config.stack.layers):
        ours, theirs = f"encoder.layers.{i}", f"{base}encoder.layers.{i}"
        yield rule(tuple(f"{ours}.mixer.{part}" for part in "qkv"), f"{theirs}.attn.Wqkv", STACKED)
        yield from rules_under(ours, theirs, _LAYER)
    if isinstance(config.head, Head):
        yield rule("head.transform.dense", "cls.predictions.transform.dense")
        yield rule("head.transform.norm", "cls.predictions.transform.layer_norm")
        yield from encoders.head_bias(config, _DECODER, _BIAS)
    else:
        yield rule("head.transform.dense", f"{base}pooler.dense")
        yield rule("head", "classifier")


def write(config: ModelConfig) -> dict[str, Any]:
    mixer = config.stack.layer(0).mixer
    fields = {
        **encoders.bert_fields(config, "nomic_bert", "NomicBert"),
        "head_dim": head_dim(config, mixer),
        **rope_fields(rotary(mixer.position, "nomic_bert")),
    }
    return fields


FAMILY = Family(
    ("nomic_bert",),
    read,
    rules,
    write,
    prefix="nomic_bert.",
    ignored=(r"cls\.predictions\.decoder\.weight",),
    head=(f"{_DECODER}.weight", "nomic_bert.embeddings.word_embeddings.weight"),
    settle=encoders.settling("cls.predictions.transform.dense.weight"),
    copies=encoders.one_bias(_DECODER, _BIAS),
)
