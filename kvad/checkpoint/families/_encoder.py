"""Shared parts of BERT's descendants: task heads, names, resolution by stored tensors.

Files of one class differ in their tensors: a base model may have no pooler, and files of sentence-transformers name
*ForMaskedLM* for a base model.  :func:`head_resolver` reads what is stored; a pooler or a next-sentence head that the
task does not use is left out, as in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvad.checkpoint.conversion import HFConfigReader, TensorRule, TensorTransform, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import dropout_fields, hf_activation, single_layer_type
from kvad.config import (
    ClassificationHeadConfig,
    HeadTransformConfig,
    LanguageHeadConfig,
    ModelConfig,
    PoolingHeadConfig,
)
from kvad.errors import CheckpointError

TaskHead = LanguageHeadConfig | ClassificationHeadConfig | PoolingHeadConfig
DROPOUT = {  # dropout of a task head is not supported
    "embedding": "hidden_dropout_prob",
    "residual": "hidden_dropout_prob",
    "attention": "attention_probs_dropout_prob",
}
POOLER = PoolingHeadConfig("first", transform=HeadTransformConfig("tanh"))

BERT_LAYER = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.out": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "norm2": "output.LayerNorm",
}
_EMBEDDING = {
    "embedding.tokens": "embeddings.word_embeddings",
    "embedding.positions": "embeddings.position_embeddings",
    "embedding.token_types": "embeddings.token_type_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
    "embedding.projection": "embeddings_project",
}
LEGACY_NORMS = {
    "LayerNorm.weight": "LayerNorm.gamma",
    "LayerNorm.bias": "LayerNorm.beta",
}  # in files converted from TensorFlow

_BOTH = TensorTransform(lambda tensors, shapes: tensors[:1], lambda tensors, shapes: [tensors[0], tensors[0].clone()])


# ---------------------------------------------------------------- configs


def encoder_only(fields: HFConfigReader) -> None:
    """Raise CheckpointError for options that make the tensors another model."""
    fields.require_one_of("is_decoder", False, reason="kvad reads it as a bidirectional encoder.")
    fields.require_one_of("is_encoder_decoder", False)
    fields.require_one_of("add_cross_attention", False)
    fields.require_one_of(
        "position_embedding_type", "absolute", reason="Relative keys (Shaw et al. 2018) are not supported."
    )
    fields.require_one_of("pruned_heads", {}, reason="Save the pruned model with its reduced number of heads.")


def base_model_config(fields: HFConfigReader, **changes: Any) -> HFConfigReader:
    """Return the config of the base model, for a family that reads its heads itself."""
    return with_changes(fields, architectures=["BertModel"], **changes)


def with_changes(fields: HFConfigReader, **changes: Any) -> HFConfigReader:
    """Return the fields with those that a family decides replaced."""
    return HFConfigReader({**fields.content, **changes}, fields.where)


def read_labels(fields: HFConfigReader) -> tuple[str, ...]:
    """Return the class names in order, or transformers' default names."""
    names = fields.get("id2label")
    if names is None or "Classification" not in fields.architecture:
        return tuple(f"LABEL_{i}" for i in range(fields.integer("num_labels", default=2)))
    if not isinstance(names, Mapping) or sorted(names, key=str) != sorted(map(str, range(len(names)))):
        raise CheckpointError(f"{fields.where}: id2label: must name 0, 1, 2, ..., got {names!r}")
    return tuple(str(names[str(i)]) for i in range(len(names)))


def read_pooler(fields: HFConfigReader) -> PoolingHeadConfig:
    """Return the head of a base model.

    ``add_pooling_layer`` is an argument of transformers' classes, not of their configs; kvad writes it for a model
    without a pooler, which :func:`head_resolver` detects in the file.
    """
    return POOLER if fields.flag("add_pooling_layer", True) else PoolingHeadConfig()


def read_task_head(fields: HFConfigReader, heads: Mapping[str, TaskHead]) -> TaskHead:
    """Return the head by the suffix of the class name (default: masked language modeling)."""
    name = fields.architecture
    match = re.search(r"(For[A-Z]\w*|LMHeadModel|Model)$", name)
    if not name:
        return heads["ForMaskedLM"]
    if match is None or match[1] not in heads:
        raise CheckpointError(
            f"{fields.where}: architectures {name!r} is not supported", f"Supported classes end in {', '.join(heads)}."
        )
    return heads[match[1]]


def task_fields(config: ModelConfig, stem: str) -> dict[str, Any]:
    """Return the inverse of :func:`read_task_head` and :func:`read_labels`."""
    head = config.head
    if isinstance(head, ClassificationHeadConfig):
        ending = "ForTokenClassification" if head.level == "token" else "ForSequenceClassification"
        id2label = {str(i): name for i, name in enumerate(head.labels)}
        label2id = {name: i for i, name in enumerate(head.labels)}
        return {"architectures": [stem + ending], "id2label": id2label, "label2id": label2id}
    return {"architectures": [stem + ("ForMaskedLM" if isinstance(head, LanguageHeadConfig) else "Model")]}


def bert_fields(config: ModelConfig, model_type: str, stem: str) -> dict[str, Any]:
    """Return the fields that BERT's descendants have in common."""
    layer = single_layer_type(config, model_type)
    return {
        **task_fields(config, stem),
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.stack.num_layers,
        "num_attention_heads": layer.attention.num_heads,
        "intermediate_size": layer.mlp.intermediate_size,
        "hidden_act": hf_activation(layer.mlp.activation),
        "max_position_embeddings": config.max_seq_len,
        "type_vocab_size": config.embedding.num_token_types,
        "layer_norm_eps": layer.norm.eps,
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": config.tie_embeddings,
        **dropout_fields(config, **DROPOUT),
        **(
            {"add_pooling_layer": False}
            if isinstance(config.head, PoolingHeadConfig) and not config.head.transform
            else {}
        ),
    }


# ---------------------------------------------------------------- tensors


def bert_rules(
    config: ModelConfig, base: str, side: str = "encoder", layer: Mapping[str, str] = BERT_LAYER
) -> Iterator[TensorRule]:
    """Yield embeddings and layers by BERT's names, below ``base``."""
    for kvad_name, hf_name in _EMBEDDING.items():
        yield tensor_rule(kvad_name, base + hf_name)
    for i in range(config.stack.num_layers):
        yield from prefix_rules(f"{side}.layers.{i}", f"{base}encoder.layer.{i}", layer)


def head_bias(config: ModelConfig, decoder: str, bias: str) -> Iterator[TensorRule]:
    """Yield the rules of a language head whose bias is stored apart from its matrix.

    For an untied head transformers 5 reads ``decoder.bias``, 4.57 either name.
    """
    if not isinstance(config.head, LanguageHeadConfig):
        return
    yield tensor_rule("head.weight", f"{decoder}.weight")
    yield (
        tensor_rule("head.bias", bias)
        if config.tie_embeddings
        else TensorRule(("head.bias",), (f"{decoder}.bias", bias), _BOTH)
    )


def bias_rules(decoder: str, bias: str) -> dict[str, tuple[str, ...]]:
    """Return the two names of a language head's bias: a file has either or both."""
    return {bias: (f"{decoder}.bias",), f"{decoder}.bias": (bias,)}


TensorLookup = Callable[[str], Tensor | None]


def head_resolver(masked: str, pooler: str | None = None) -> Callable[[ModelConfig, TensorLookup], ModelConfig]:
    """Build a function that selects the head by the stored tensors.

    Args:
        masked: Tensor that every language head has.
        pooler: Tensor of the base model's pooler, if it may have one.
    """

    def resolve(config: ModelConfig, lookup: TensorLookup) -> ModelConfig:
        head = config.head
        if isinstance(head, PoolingHeadConfig) or (isinstance(head, LanguageHeadConfig) and lookup(masked) is None):
            head = PoolingHeadConfig() if pooler is None or lookup(pooler) is None else POOLER
        return replace(config, head=head)

    return resolve


def tables_equal(stored: Tensor, computed: Tensor) -> bool:
    """Return True if a stored table equals the computed one, up to the rounding of its dtype."""
    if stored.shape != computed.shape:
        return False
    rounding = max(1e-5, torch.finfo(stored.dtype).eps)
    return bool((stored.float() - computed).abs().max() <= rounding)
