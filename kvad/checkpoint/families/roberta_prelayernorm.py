"""RoBERTa-PreLayerNorm: RoBERTa with LayerNorm before each half of a layer.

It is fairseq's ``--encoder-normalize-before``.  A final norm follows the last layer; the embedding's norm remains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.conversion import HFConfigReader, TensorRule, tensor_rule
from kvad.checkpoint.families import _encoder, roberta
from kvad.config import ModelConfig, PoolingHeadConfig

_BASE = "roberta_prelayernorm."
_LAYER = {**_encoder.BERT_LAYER, "norm1": "attention.LayerNorm", "norm2": "intermediate.LayerNorm"}


def read(fields: HFConfigReader) -> ModelConfig:
    config = roberta.read(fields)
    return replace(config, encoder=replace(config.stack, norm_position="pre", final_norm=True))


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    base = "" if isinstance(config.head, PoolingHeadConfig) else _BASE
    yield from _encoder.bert_rules(config, base, layer=_LAYER)
    yield tensor_rule("encoder.norm", f"{base}LayerNorm")
    yield from roberta.head_rules(config, base)


def write(config: ModelConfig) -> dict[str, Any]:
    fields = _encoder.bert_fields(config, "roberta-prelayernorm", "RobertaPreLayerNorm")
    return {**fields, **roberta.offset_fields(config)}


FAMILY = roberta.family(("roberta-prelayernorm",), _BASE, read, rules, write)
