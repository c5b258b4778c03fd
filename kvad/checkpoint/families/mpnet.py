"""MPNet (Song et al. 2020): BERT's layers, with T5's bucketed bias shared by all layers besides learned positions.

Positions count from 2 whatever the padding is.  The buckets are 32 up to a distance of 128: the table's size is a field
of the config, but transformers computes with these.  There are no token types.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.families import encoders, roberta
from kvad.checkpoint.hf import Fields, Rule, rule
from kvad.config import ModelConfig, Pooled, T5Bias

__all__ = ["FAMILY"]

_ATTENTION = {"mixer.q": "attn.q", "mixer.k": "attn.k", "mixer.v": "attn.v", "mixer.out": "attn.o"}
_NAMES = {mine: f"attention.{other}" for mine, other in {**_ATTENTION, "norm1": "LayerNorm"}.items()}
_LAYER = {**encoders.BERT_LAYER, **_NAMES}


def read(fields: Fields) -> ModelConfig:
    fields.refuse(
        "relative_attention_num_buckets", 32, why="transformers computes 32 buckets whatever the table's size"
    )
    config = roberta.read(encoders.changed(fields, pad_token_id=1, type_vocab_size=0))
    layer = config.stack.kinds["L"]
    mixer = replace(layer.mixer, position=T5Bias(32, 128, bidirectional=True))
    return replace(config, encoder=replace(config.stack, kinds={"L": replace(layer, mixer=mixer)}))


def rules(config: ModelConfig) -> Iterator[Rule]:
    base = "" if isinstance(config.head, Pooled) else "mpnet."
    yield from encoders.bert_rules(config, base, layer=_LAYER)
    yield rule("encoder.relative.L", f"{base}encoder.relative_attention_bias.weight")
    yield from roberta.head_rules(config, base)


def write(config: ModelConfig) -> dict[str, Any]:
    fields = {**encoders.bert_fields(config, "mpnet", "MPNet"), **roberta.offset_fields(config)}
    buckets = {"relative_attention_num_buckets": 32}
    return {**fields, **buckets}


FAMILY = roberta.family(("mpnet",), "mpnet.", read, rules, write)
