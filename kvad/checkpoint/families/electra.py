"""ELECTRA (Clark et al. 2020).

BERT's layers over an embedding of ``embedding_size``, projected to the model's.  The generator is a masked language
model whose head projects back to that size; the discriminator (``ForPreTraining``) scores each token: above zero, it
was replaced.  There is no pooler; the classes of a sequence use gelu.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, tensor_rule
from kvad.checkpoint.families import _encoder, bert
from kvad.config import (
    ClassificationHeadConfig,
    HeadTransformConfig,
    LanguageHeadConfig,
    ModelConfig,
    PlainMLPConfig,
    PoolingHeadConfig,
    embedding_size,
)

_REPLACED = ("replaced",)


def read(fields: HFConfigReader) -> ModelConfig:
    config, names = bert.read(_encoder.base_model_config(fields)), _encoder.read_labels(fields)
    size, mlp = fields.integer("embedding_size", default=128), config.stack.layer_types["L"].mlp
    assert isinstance(mlp, PlainMLPConfig)
    narrow = None if size == config.hidden_size else size
    heads: dict[str, _encoder.TaskHead] = {
        "ForMaskedLM": LanguageHeadConfig(
            bias=True, transform=HeadTransformConfig("gelu", norm=config.embedding.norm, output_size=narrow)
        ),
        "ForPreTraining": ClassificationHeadConfig(_REPLACED, transform=HeadTransformConfig(mlp.activation)),
        "ForTokenClassification": ClassificationHeadConfig(names),
        "ForSequenceClassification": ClassificationHeadConfig(names, "row", transform=HeadTransformConfig("gelu")),
        "Model": PoolingHeadConfig(),
    }
    return replace(
        config, embedding=replace(config.embedding, embedding_size=narrow), head=_encoder.read_task_head(fields, heads)
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    head = config.head
    yield from _encoder.bert_rules(config, "" if isinstance(head, PoolingHeadConfig) else "electra.")
    if isinstance(head, LanguageHeadConfig):
        yield tensor_rule("head.transform.dense", "generator_predictions.dense")
        yield tensor_rule("head.transform.norm", "generator_predictions.LayerNorm")
        yield tensor_rule("head", "generator_lm_head")
    elif isinstance(head, ClassificationHeadConfig) and head.labels == _REPLACED and head.level == "token":
        yield tensor_rule("head.transform.dense", "discriminator_predictions.dense")
        yield tensor_rule("head", "discriminator_predictions.dense_prediction")
    elif isinstance(head, ClassificationHeadConfig) and head.level == "row":
        yield tensor_rule("head.transform.dense", "classifier.dense")
        yield tensor_rule("head", "classifier.out_proj")
    else:
        yield tensor_rule("head", "classifier")


def write(config: ModelConfig) -> dict[str, Any]:
    fields = {**_encoder.bert_fields(config, "electra", "Electra"), "embedding_size": embedding_size(config)}
    head = config.head
    if isinstance(head, ClassificationHeadConfig) and head.labels == _REPLACED and head.level == "token":
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
    name_variants=_encoder.LEGACY_NORMS,
    resolve=_encoder.head_resolver("generator_predictions.dense.weight"),
)
