"""MPNet (Song et al. 2020).

BERT's layers with learned positions and T5's bucketed bias, shared by all layers.  Positions count from 2 whatever
the padding is.  There are 32 buckets up to a distance of 128: the table's size is a config field, but transformers
computes with these.  There are no token types.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.conversion import HFConfigReader, TensorRule, tensor_rule
from kvad.checkpoint.families import _encoder, roberta
from kvad.config import ModelConfig, PoolingHeadConfig, T5BiasConfig

_ATTENTION = {"attention.q": "attn.q", "attention.k": "attn.k", "attention.v": "attn.v", "attention.out": "attn.o"}
_NAMES = {kvad_name: f"attention.{hf_name}" for kvad_name, hf_name in {**_ATTENTION, "norm1": "LayerNorm"}.items()}
_LAYER = {**_encoder.BERT_LAYER, **_NAMES}


def read(fields: HFConfigReader) -> ModelConfig:
    fields.require_one_of(
        "relative_attention_num_buckets", 32, reason="transformers computes 32 buckets whatever the table's size."
    )
    config = roberta.read(_encoder.with_changes(fields, pad_token_id=1, type_vocab_size=0))
    layer = config.stack.layer_types["L"]
    attention = replace(layer.attention, position=T5BiasConfig(32, 128, bidirectional=True))
    return replace(config, encoder=replace(config.stack, layer_types={"L": replace(layer, attention=attention)}))


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    base = "" if isinstance(config.head, PoolingHeadConfig) else "mpnet."
    yield from _encoder.bert_rules(config, base, layer=_LAYER)
    yield tensor_rule("encoder.relative_bias.L", f"{base}encoder.relative_attention_bias.weight")
    yield from roberta.head_rules(config, base)


def write(config: ModelConfig) -> dict[str, Any]:
    fields = {**_encoder.bert_fields(config, "mpnet", "MPNet"), **roberta.offset_fields(config)}
    buckets = {"relative_attention_num_buckets": 32}
    return {**fields, **buckets}


FAMILY = roberta.family(("mpnet",), "mpnet.", read, rules, write)
