"""RoBERTa (Liu et al. 2019), XLM-RoBERTa (Conneau et al. 2020), CamemBERT (Martin et al. 2020): BERT's layers.

Positions count from ``pad_token_id + 1``, so that a table of 514 rows holds 512 tokens.  The language head's activation
is gelu whatever the layers' is; a row's classes are read from its first token through a matrix and tanh of their own.
All three are written as ``roberta``: they differ in their tokenizers alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.families import bert, encoders
from kvad.checkpoint.hf import Family, Fields, Rule, rule
from kvad.config import Classes, Head, LearnedPositions, ModelConfig, Pooled, Transform
from kvad.errors import CheckpointError

__all__ = ["FAMILY", "family", "head_rules", "offset_fields", "read"]


def read(fields: Fields) -> ModelConfig:
    offset, config = fields.integer("pad_token_id", default=1) + 1, bert.read(encoders.as_base(fields))
    if not 0 <= offset < config.limit:
        raise CheckpointError(f"{fields.where}: pad_token_id {offset - 1} leaves no positions of {config.limit}")
    names, norm = encoders.labels(fields), config.embed.norm
    heads: dict[str, encoders.Task] = {
        "ForMaskedLM": Head(bias=True, transform=Transform("gelu", norm=norm)),
        "ForTokenClassification": Classes(names),
        "ForSequenceClassification": Classes(names, "row", transform=Transform("tanh")),
        "Model": encoders.pooler(fields),
    }
    positions = LearnedPositions(config.limit, offset=offset)
    return replace(
        config,
        limit=config.limit - offset,
        embed=replace(config.embed, position=positions),
        head=encoders.task(fields, heads),
    )


def head_rules(config: ModelConfig, base: str) -> Iterator[Rule]:
    """The heads by RoBERTa's names; ``base``: of the model below them."""
    if isinstance(config.head, Head):
        yield rule("head.transform.dense", "lm_head.dense")
        yield rule("head.transform.norm", "lm_head.layer_norm")
        yield from encoders.head_bias(config, "lm_head.decoder", "lm_head.bias")
    elif isinstance(config.head, Pooled):
        yield rule("head.transform.dense", f"{base}pooler.dense")
    elif config.head.per == "row":
        yield rule("head.transform.dense", "classifier.dense")
        yield rule("head", "classifier.out_proj")
    else:
        yield rule("head", "classifier")


def rules(config: ModelConfig) -> Iterator[Rule]:
    base = "" if isinstance(config.head, Pooled) else "roberta."
    yield from encoders.bert_rules(config, base)
    yield from head_rules(config, base)


def offset_fields(config: ModelConfig) -> dict[str, Any]:
    """The size of the table of positions, and where they begin."""
    position = config.embed.position
    if not isinstance(position, LearnedPositions):
        raise CheckpointError("roberta cannot express this model: its positions are not learned")
    return {"max_position_embeddings": position.size, "pad_token_id": position.offset - 1}


def write(config: ModelConfig) -> dict[str, Any]:
    return {**encoders.bert_fields(config, "roberta", "Roberta"), **offset_fields(config)}


def family(types: tuple[str, ...], base: str, read: Any, rules: Any, write: Any) -> Family:
    """A family whose heads have RoBERTa's names; ``base``: of the model below them."""
    return Family(
        types,
        read,
        rules,
        write,
        prefix=base,
        ignored=(r"embeddings\.position_ids", r"pooler\..*", r"lm_head\.decoder\.weight"),
        head=("lm_head.decoder.weight", f"{base}embeddings.word_embeddings.weight"),
        spellings=encoders.LEGACY_NORMS,
        settle=encoders.settling("lm_head.dense.weight", f"{base}pooler.dense.weight"),
        copies=encoders.one_bias("lm_head.decoder", "lm_head.bias"),
    )


FAMILY = family(("roberta", "xlm-roberta", "camembert"), "roberta.", read, rules, write)
