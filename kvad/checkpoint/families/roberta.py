"""RoBERTa (Liu et al. 2019), XLM-R (Conneau et al. 2020), CamemBERT (Martin et al. 2020).

They have BERT's layers.  Positions count from ``pad_token_id + 1``, so that a table of 514 rows has room for 512
tokens.  The language head's activation is always gelu; the classes of a sequence are computed from its first token
through a separate matrix and tanh.  All three are written as ``roberta``: they differ only in their tokenizers.
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
    LearnedPositionsConfig,
    ModelConfig,
    PoolingHeadConfig,
)
from kvad.errors import CheckpointError


def read(fields: HFConfigReader) -> ModelConfig:
    offset, config = fields.integer("pad_token_id", default=1) + 1, bert.read(_encoder.base_model_config(fields))
    if not 0 <= offset < config.max_seq_len:
        raise CheckpointError(f"{fields.where}: pad_token_id {offset - 1} leaves no positions of {config.max_seq_len}")
    names, norm = _encoder.read_labels(fields), config.embedding.norm
    heads: dict[str, _encoder.TaskHead] = {
        "ForMaskedLM": LanguageHeadConfig(bias=True, transform=HeadTransformConfig("gelu", norm=norm)),
        "ForTokenClassification": ClassificationHeadConfig(names),
        "ForSequenceClassification": ClassificationHeadConfig(names, "row", transform=HeadTransformConfig("tanh")),
        "Model": _encoder.read_pooler(fields),
    }
    positions = LearnedPositionsConfig(config.max_seq_len, offset=offset)
    return replace(
        config,
        max_seq_len=config.max_seq_len - offset,
        embedding=replace(config.embedding, position=positions),
        head=_encoder.read_task_head(fields, heads),
    )


def head_rules(config: ModelConfig, base: str) -> Iterator[TensorRule]:
    """Yield the rules of the heads by RoBERTa's names; ``base`` is the prefix of the base model."""
    if isinstance(config.head, LanguageHeadConfig):
        yield tensor_rule("head.transform.dense", "lm_head.dense")
        yield tensor_rule("head.transform.norm", "lm_head.layer_norm")
        yield from _encoder.head_bias(config, "lm_head.decoder", "lm_head.bias")
    elif isinstance(config.head, PoolingHeadConfig):
        yield tensor_rule("head.transform.dense", f"{base}pooler.dense")
    elif config.head.level == "row":
        yield tensor_rule("head.transform.dense", "classifier.dense")
        yield tensor_rule("head", "classifier.out_proj")
    else:
        yield tensor_rule("head", "classifier")


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    base = "" if isinstance(config.head, PoolingHeadConfig) else "roberta."
    yield from _encoder.bert_rules(config, base)
    yield from head_rules(config, base)


def offset_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the size of the position table, and the padding id that its offset follows from."""
    position = config.embedding.position
    if not isinstance(position, LearnedPositionsConfig):
        raise CheckpointError("roberta cannot express this model: its positions are not learned")
    return {"max_position_embeddings": position.num_positions, "pad_token_id": position.offset - 1}


def write(config: ModelConfig) -> dict[str, Any]:
    return {**_encoder.bert_fields(config, "roberta", "Roberta"), **offset_fields(config)}


def family(types: tuple[str, ...], base: str, read: Any, rules: Any, write: Any) -> Family:
    """Build a family whose heads have RoBERTa's names; ``base`` is the prefix of the base model."""
    return Family(
        types,
        read,
        rules,
        write,
        prefix=base,
        ignored=(r"embeddings\.position_ids", r"pooler\..*", r"lm_head\.decoder\.weight"),
        head=("lm_head.decoder.weight", f"{base}embeddings.word_embeddings.weight"),
        name_variants=_encoder.LEGACY_NORMS,
        resolve=_encoder.head_resolver("lm_head.dense.weight", f"{base}pooler.dense.weight"),
        copies=_encoder.bias_rules("lm_head.decoder", "lm_head.bias"),
    )


FAMILY = family(("roberta", "xlm-roberta", "camembert"), "roberta.", read, rules, write)
