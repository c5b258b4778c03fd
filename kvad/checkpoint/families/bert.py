"""BERT (Devlin et al. 2018).

Learned positions, token types, LayerNorm after each half of a layer.  The embedding ends in a norm.  The masked
language model's head has a transform before the tied table and a separate bias.  A base model's output is its
pooler's: a matrix and tanh on the first token; without a pooler in the file, the mean.  Old files name norms gamma
and beta, and have a next-sentence head that only ``BertForPreTraining`` reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, tensor_rule
from kvad.checkpoint.families import _encoder
from kvad.checkpoint.families._common import ACTIVATIONS, read_dropout
from kvad.config import (
    AttentionConfig,
    ClassificationHeadConfig,
    EmbeddingConfig,
    HeadTransformConfig,
    LanguageHeadConfig,
    LayerConfig,
    LearnedPositionsConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    PoolingHeadConfig,
    StackConfig,
)

_DECODER, _BIAS = "cls.predictions.decoder", "cls.predictions.bias"


def read(fields: HFConfigReader) -> ModelConfig:
    _encoder.encoder_only(fields)
    max_seq_len = fields.integer("max_position_embeddings", default=512)
    activation = fields.choice("hidden_act", ACTIVATIONS, "gelu")
    norm = NormConfig("layer", fields.number("layer_norm_eps", default=1e-12), bias=True)
    attention = AttentionConfig(
        fields.integer("num_attention_heads"), position=None, causal=False, qkv_bias=True, out_bias=True
    )
    layer = LayerConfig(attention, PlainMLPConfig(fields.integer("intermediate_size"), activation, bias=True), norm)
    names = _encoder.read_labels(fields)
    heads: dict[str, _encoder.TaskHead] = {
        "ForMaskedLM": LanguageHeadConfig(bias=True, transform=HeadTransformConfig(activation, norm=norm)),
        "ForTokenClassification": ClassificationHeadConfig(names),
        "ForSequenceClassification": ClassificationHeadConfig(names, "row", transform=HeadTransformConfig("tanh")),
        "Model": _encoder.read_pooler(fields),
    }
    return ModelConfig(
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=max_seq_len,
        encoder=StackConfig(fields.integer("num_hidden_layers"), {"L": layer}, norm_position="post", final_norm=False),
        embedding=EmbeddingConfig(
            LearnedPositionsConfig(max_seq_len), norm=norm, num_token_types=fields.integer("type_vocab_size", default=2)
        ),
        head=_encoder.read_task_head(fields, heads),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        dropout=read_dropout(fields, **_encoder.DROPOUT),
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    base = "" if isinstance(config.head, PoolingHeadConfig) else "bert."
    yield from _encoder.bert_rules(config, base)
    if isinstance(config.head, LanguageHeadConfig):
        yield tensor_rule("head.transform.dense", "cls.predictions.transform.dense")
        yield tensor_rule("head.transform.norm", "cls.predictions.transform.LayerNorm")
        yield from _encoder.head_bias(config, _DECODER, _BIAS)
    else:
        yield tensor_rule("head.transform.dense", f"{base}pooler.dense")
        yield tensor_rule("head", "classifier")


def write(config: ModelConfig) -> dict[str, Any]:
    return _encoder.bert_fields(config, "bert", "Bert")


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
    name_variants=_encoder.LEGACY_NORMS,
    resolve=_encoder.head_resolver("cls.predictions.transform.dense.weight", "bert.pooler.dense.weight"),
    copies=_encoder.bias_rules(_DECODER, _BIAS),
)
