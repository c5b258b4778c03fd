"""ELECTRA (Clark et al. 2020): BERT's layers over a table of ``embedding_size``, projected to the model's width.

The generator is a masked language model whose head leads back to that size; the discriminator (``ForPreTraining``)
scores each token: above zero, it was replaced.  There is no pooler; a row's classes come through gelu.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.families import bert, encoders
from kvad.checkpoint.hf import Family, Fields, Rule, rule
from kvad.config import Classes, Head, ModelConfig, Plain, Pooled, Transform, table_width

__all__ = ["FAMILY"]

_REPLACED = ("replaced",)


def read(fields: Fields) -> ModelConfig:
    config, names = bert.read(encoders.as_base(fields)), encoders.labels(fields)
    size, mlp = fields.integer("embedding_size", default=128), config.stack.kinds["L"].mlp
    assert isinstance(mlp, Plain)
    narrow = None if size == config.width else size
    heads: dict[str, encoders.Task] = {
        "ForMaskedLM": Head(bias=True, transform=Transform("gelu", norm=config.embed.norm, width=narrow)),
        "ForPreTraining": Classes(_REPLACED, transform=Transform(mlp.activation)),
        "ForTokenClassification": Classes(names),
        "ForSequenceClassification": Classes(names, "row", transform=Transform("gelu")),
        "Model": Pooled(),
    }
    return replace(config, embed=replace(config.embed, width=narrow), head=encoders.task(fields, heads))


def rules(config: ModelConfig) -> Iterator[Rule]:
    head = config.head
    yield from encoders.bert_rules(config, "" if isinstance(head, Pooled) else "electra.")
    if isinstance(head, Head):
        yield rule("head.transform.dense", "generator_predictions.dense")
        yield rule("head.transform.norm", "generator_predictions.LayerNorm")
        yield rule("head", "generator_lm_head")
    elif isinstance(head, Classes) and head.labels == _REPLACED and head.per == "token":
        yield rule("head.transform.dense", "discriminator_predictions.dense")
        yield rule("head", "discriminator_predictions.dense_prediction")
    elif isinstance(head, Classes) and head.per == "row":
        yield rule("head.transform.dense", "classifier.dense")
        yield rule("head", "classifier.out_proj")
    else:
        yield rule("head", "classifier")


def write(config: ModelConfig) -> dict[str, Any]:
    fields = {**encoders.bert_fields(config, "electra", "Electra"), "embedding_size": table_width(config)}
    head = config.head
    if isinstance(head, Classes) and head.labels == _REPLACED and head.per == "token":
        fields = {**fields, "architectures": ["ElectraForPreTraining"], "id2label": None, "label2id": None}
    return fields


FAMILY = Family(
    ("electra",),
    read,
    rules,
    write,
    prefix="electra.",
    ignored=(r"embeddings\.position_ids", r"generator_lm_head\.weight"),
    head=("generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"),
    spellings=encoders.LEGACY_NORMS,
    settle=encoders.settling("generator_predictions.dense.weight"),
)
