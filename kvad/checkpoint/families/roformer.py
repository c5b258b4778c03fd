"""RoFormer (Su et al. 2021).

BERT's layers with interleaved rotary positions instead of learned ones.  Files have the table of sines and cosines
(``embed_positions``) as a tensor, which is checked and written.  The embedding may be narrower than the model.
``RoFormerForCausalLM`` with ``is_decoder`` is a decoder of the same layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvad import model
from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, tensor_rule
from kvad.checkpoint.families import _encoder, bert
from kvad.config import (
    ClassificationHeadConfig,
    HeadTransformConfig,
    LanguageHeadConfig,
    ModelConfig,
    PlainMLPConfig,
    PoolingHeadConfig,
    RopeConfig,
    SinusoidalPositionsConfig,
    embedding_size,
    head_dim,
)
from kvad.errors import CheckpointError

_DECODER, _BIAS = "cls.predictions.decoder", "cls.predictions.bias"
_TABLE = "encoder.embed_positions.weight"


def read(fields: HFConfigReader) -> ModelConfig:
    fields.require_one_of("rotary_value", False, reason="Rotated values are not supported.")
    causal = fields.flag("is_decoder")
    if causal != fields.architecture.endswith("ForCausalLM"):
        raise CheckpointError(
            f"{fields.where}: is_decoder {causal} with {fields.architecture} is not supported",
            "RoFormerForCausalLM is a decoder, all other classes are encoders.",
        )
    config = bert.read(
        _encoder.base_model_config(fields, is_decoder=False, max_position_embeddings=_max_seq_len(fields))
    )
    layer, names = config.stack.layer_types["L"], _encoder.read_labels(fields)
    assert isinstance(layer.mlp, PlainMLPConfig)
    size, activation = fields.integer("embedding_size", default=config.hidden_size), layer.mlp.activation
    narrow = None if size == config.hidden_size else size
    language = LanguageHeadConfig(
        bias=True, transform=HeadTransformConfig(activation, norm=layer.norm, output_size=narrow)
    )
    heads: dict[str, _encoder.TaskHead] = {
        "ForMaskedLM": language,
        "ForCausalLM": language,
        "ForTokenClassification": ClassificationHeadConfig(names),
        "ForSequenceClassification": ClassificationHeadConfig(names, "row", transform=HeadTransformConfig(activation)),
        "Model": PoolingHeadConfig(),
    }
    attention = replace(layer.attention, position=RopeConfig(interleaved=True), causal=causal)
    stack = replace(config.stack, layer_types={"L": replace(layer, attention=attention)})
    return replace(
        config,
        encoder=None if causal else stack,
        decoder=stack if causal else None,
        embedding=replace(config.embedding, position=None, embedding_size=narrow),
        head=_encoder.read_task_head(fields, heads),
    )


def _max_seq_len(fields: HFConfigReader) -> int:
    return fields.integer("max_position_embeddings", default=1536)


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    base = "" if isinstance(config.head, PoolingHeadConfig) else "roformer."
    yield from _encoder.bert_rules(config, base, "encoder" if config.decoder is None else "decoder")
    if isinstance(config.head, LanguageHeadConfig):
        yield tensor_rule("head.transform.dense", "cls.predictions.transform.dense")
        yield tensor_rule("head.transform.norm", "cls.predictions.transform.LayerNorm")
        yield from _encoder.head_bias(config, _DECODER, _BIAS)
    elif isinstance(config.head, ClassificationHeadConfig) and config.head.level == "row":
        yield tensor_rule("head.transform.dense", "classifier.dense")
        yield tensor_rule("head", "classifier.out_proj")
    else:
        yield tensor_rule("head", "classifier")


def write(config: ModelConfig) -> dict[str, Any]:
    fields = {
        **_encoder.bert_fields(config, "roformer", "RoFormer"),
        "embedding_size": embedding_size(config),
        "rotary_value": False,
        "is_decoder": config.decoder is not None,
    }
    if config.decoder is not None:
        fields["architectures"] = ["RoFormerForCausalLM"]
    return fields


def table(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the table [max_seq_len, D]: the sines of all angles, then their cosines."""
    dim = head_dim(config, config.stack.layer_config(0).attention)
    base = "" if isinstance(config.head, PoolingHeadConfig) else "roformer."
    yield (
        base + _TABLE,
        model.positions.sinusoidal_embedding(
            torch.arange(config.max_seq_len), dim, SinusoidalPositionsConfig(form="concat")
        ),
    )


_heads = _encoder.head_resolver("cls.predictions.transform.dense.weight")


def resolve(config: ModelConfig, lookup: Callable[[str], Tensor | None]) -> ModelConfig:
    """Select the head by the stored tensors; a decoder always has a language head."""
    return config if config.decoder is not None else _heads(config, lookup)


FAMILY = Family(
    ("roformer",),
    read,
    rules,
    write,
    prefix="roformer.",
    ignored=(r"encoder\.embed_positions\.weight", r"cls\.predictions\.decoder\.weight"),
    extra=table,
    head=(f"{_DECODER}.weight", "roformer.embeddings.word_embeddings.weight"),
    name_variants=_encoder.LEGACY_NORMS,
    resolve=resolve,
    copies=_encoder.bias_rules(_DECODER, _BIAS),
)
