"""RoFormer (Su et al. 2021): BERT's layers with interleaved rotary positions on queries and keys, and none learned.

Their files hold the table of sines and cosines (``embed_positions``) as a tensor; it is checked, and written.  The
embedding may be narrower than the model.  ``RoFormerForCausalLM`` with ``is_decoder`` is a decoder of the same layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvad.checkpoint.families import bert, encoders
from kvad.checkpoint.hf import Family, Fields, Rule, rule
from kvad.config import (
    Classes,
    Head,
    ModelConfig,
    Plain,
    Pooled,
    Rope,
    SinusoidalPositions,
    Transform,
    head_dim,
    table_width,
)
from kvad.errors import CheckpointError
from kvad.model.positions import sinusoid

__all__ = ["FAMILY"]

_DECODER, _BIAS = "cls.predictions.decoder", "cls.predictions.bias"
_TABLE = "encoder.embed_positions.weight"


def read(fields: Fields) -> ModelConfig:
    fields.refuse("rotary_value", False, why="rotated values are not known")
    causal = fields.flag("is_decoder")
    if causal != fields.architecture.endswith("ForCausalLM"):
        raise CheckpointError(
            f"{fields.where}: is_decoder {causal} of {fields.architecture} is not supported",
            "RoFormerForCausalLM is a decoder, the other classes are encoders",
        )
    config = bert.read(encoders.as_base(fields, is_decoder=False, max_position_embeddings=_limit(fields)))
    layer, names = config.stack.kinds["L"], encoders.labels(fields)
    assert isinstance(layer.mlp, Plain)
    size, activation = fields.integer("embedding_size", default=config.width), layer.mlp.activation
    narrow = None if size == config.width else size
    language = Head(bias=True, transform=Transform(activation, norm=layer.norm, width=narrow))
    heads: dict[str, encoders.Task] = {
        "ForMaskedLM": language,
        "ForCausalLM": language,
        "ForTokenClassification": Classes(names),
        "ForSequenceClassification": Classes(names, "row", transform=Transform(activation)),
        "Model": Pooled(),
    }
    mixer = replace(layer.mixer, position=Rope(interleaved=True), causal=causal)
    stack = replace(config.stack, kinds={"L": replace(layer, mixer=mixer)})
    return replace(
        config,
        encoder=None if causal else stack,
        decoder=stack if causal else None,
        embed=replace(config.embed, position=None, width=narrow),
        head=encoders.task(fields, heads),
    )


def _limit(fields: Fields) -> int:
    return fields.integer("max_position_embeddings", default=1536)


def rules(config: ModelConfig) -> Iterator[Rule]:
    base = "" if isinstance(config.head, Pooled) else "roformer."
    yield from encoders.bert_rules(config, base, "encoder" if config.decoder is None else "decoder")
    if isinstance(config.head, Head):
        yield rule("head.transform.dense", "cls.predictions.transform.dense")
        yield rule("head.transform.norm", "cls.predictions.transform.LayerNorm")
        yield from encoders.head_bias(config, _DECODER, _BIAS)
    elif isinstance(config.head, Classes) and config.head.per == "row":
        yield rule("head.transform.dense", "classifier.dense")
        yield rule("head", "classifier.out_proj")
    else:
        yield rule("head", "classifier")


def write(config: ModelConfig) -> dict[str, Any]:
    fields = {
        **encoders.bert_fields(config, "roformer", "RoFormer"),
        "embedding_size": table_width(config),
        "rotary_value": False,
        "is_decoder": config.decoder is not None,
    }
    if config.decoder is not None:
        fields["architectures"] = ["RoFormerForCausalLM"]
    return fields


def table(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """[limit, D]: the sines of all angles, then their cosines."""
    dim = head_dim(config, config.stack.layer(0).mixer)
    base = "" if isinstance(config.head, Pooled) else "roformer."
    yield base + _TABLE, sinusoid(torch.arange(config.limit), dim, SinusoidalPositions(form="concat"))


_heads = encoders.settling("cls.predictions.transform.dense.weight")


def settle(config: ModelConfig, look: Callable[[str], Tensor | None]) -> ModelConfig:
    """A decoder has a head."""
    return config if config.decoder is not None else _heads(config, look)


FAMILY = Family(
    ("roformer",),
    read,
    rules,
    write,
    prefix="roformer.",
    ignored=(r"encoder\.embed_positions\.weight", r"cls\.predictions\.decoder\.weight"),
    extra=table,
    head=(f"{_DECODER}.weight", "roformer.embeddings.word_embeddings.weight"),
    spellings=encoders.LEGACY_NORMS,
    settle=settle,
    copies=encoders.one_bias(_DECODER, _BIAS),
)
