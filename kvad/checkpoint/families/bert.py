"""BERT (Devlin et al. 2018): learned positions, token types and a norm in the embedding, LayerNorm after each half.

The masked language model's head transforms before the tied table and has a bias of its own.  A base model's answer for
a row is its pooler's: a matrix and tanh on the first token; without one in the file, the mean.  Old files say gamma and
beta of norms, and hold a next-sentence head that no class but ``BertForPreTraining`` reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families import encoders
from kvad.checkpoint.families.common import ACTIVATIONS, dropout_of
from kvad.checkpoint.hf import Family, Fields, Rule, rule
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
    Stack,
    Transform,
)

__all__ = ["FAMILY"]

_DECODER, _BIAS = "cls.predictions.decoder", "cls.predictions.bias"


def read(fields: Fields) -> ModelConfig:
    encoders.encoder_only(fields)
    limit = fields.integer("max_position_embeddings", default=512)
    activation = fields.choice("hidden_act", ACTIVATIONS, "gelu")
    norm = Norm("layer", fields.number("layer_norm_eps", default=1e-12), bias=True)
    mixer = Attention(fields.integer("num_attention_heads"), position=None, causal=False, bias=True, out_bias=True)
    layer = Layer(mixer, Plain(fields.integer("intermediate_size"), activation, bias=True), norm)
    names = encoders.labels(fields)
    heads: dict[str, encoders.Task] = {
        "ForMaskedLM": Head(bias=True, transform=Transform(activation, norm=norm)),
        "ForTokenClassification": Classes(names),
        "ForSequenceClassification": Classes(names, "row", transform=Transform("tanh")),
        "Model": encoders.pooler(fields),
    }
    return ModelConfig(
        width=fields.integer("hidden_size"),
        vocab=fields.integer("vocab_size"),
        limit=limit,
        encoder=Stack(fields.integer("num_hidden_layers"), {"L": layer}, norm_place="post", final_norm=False),
        embed=Embedding(LearnedPositions(limit), norm=norm, segments=fields.integer("type_vocab_size", default=2)),
        head=encoders.task(fields, heads),
        tie=fields.flag("tie_word_embeddings", True),
        dropout=dropout_of(fields, **encoders.DROPOUT),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    base = "" if isinstance(config.head, Pooled) else "bert."
    yield from encoders.bert_rules(config, base)
    if isinstance(config.head, Head):
        yield rule("head.transform.dense", "cls.predictions.transform.dense")
        yield rule("head.transform.norm", "cls.predictions.transform.LayerNorm")
        yield from encoders.head_bias(config, _DECODER, _BIAS)
    else:
        yield rule("head.transform.dense", f"{base}pooler.dense")
        yield rule("head", "classifier")


def write(config: ModelConfig) -> dict[str, Any]:
    return encoders.bert_fields(config, "bert", "Bert")


FAMILY = Family(
    ("bert",),
    read,
    rules,
    write,
    prefix="bert.",
    ignored=(
        r"embeddings\.position_ids",
        r"pooler\..*",
        r"cls\.seq_relationship\..*",
        r"cls\.predictions\.decoder\.weight",
    ),
    head=(f"{_DECODER}.weight", "bert.embeddings.word_embeddings.weight"),
    spellings=encoders.LEGACY_NORMS,
    settle=encoders.settling("cls.predictions.transform.dense.weight", "bert.pooler.dense.weight"),
    copies=encoders.one_bias(_DECODER, _BIAS),
)
