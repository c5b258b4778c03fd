"""What BERT's descendants share: task heads by ``architectures``, BERT's names, what a file says beyond its config.

Files of one class differ in what they hold: a base model may come without its pooler, and sentence-transformers' files
say *ForMaskedLM* of a base model.  :func:`settling` reads what is there; a pooler or a next-sentence head beside a task
that does not use it is left out, as transformers does.
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
DROPOUT = {  # theirs of a task's head is not known here
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
LEGACY_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}  # of files from TensorFlow

_BOTH = TensorTransform(lambda tensors, shapes: tensors[:1], lambda tensors, shapes: [tensors[0], tensors[0].clone()])


# ---------------------------------------------------------------- configs


def encoder_only(fields: HFConfigReader) -> None:
    """CheckpointError for what would make another model of the same tensors."""
    fields.require_one_of("is_decoder", False, why="it is read as an encoder, which sees both sides")
    fields.require_one_of("is_encoder_decoder", False)
    fields.require_one_of("add_cross_attention", False)
    fields.require_one_of("position_embedding_type", "absolute", why="relative keys (Shaw et al. 2018) are not known")
    fields.require_one_of("pruned_heads", {}, why="save the pruned model with its own number of heads")


def base_model_config(fields: HFConfigReader, **changes: Any) -> HFConfigReader:
    """The config of the base model below a class, for a family that reads its heads itself."""
    return with_changes(fields, architectures=["BertModel"], **changes)


def with_changes(fields: HFConfigReader, **changes: Any) -> HFConfigReader:
    """The same, but for what a family decides itself."""
    return HFConfigReader({**fields.content, **changes}, fields.where)


def read_labels(fields: HFConfigReader) -> tuple[str, ...]:
    """The classes in the order of their numbers; transformers' own names where the config has none, or no use."""
    names = fields.get("id2label")
    if names is None or "Classification" not in fields.architecture:
        return tuple(f"LABEL_{i}" for i in range(fields.integer("num_labels", default=2)))
    if not isinstance(names, Mapping) or sorted(names, key=str) != sorted(map(str, range(len(names)))):
        raise CheckpointError(f"{fields.where}: id2label: expected names of 0, 1, 2, ..., found {names!r}")
    return tuple(str(names[str(i)]) for i in range(len(names)))


def read_pooler(fields: HFConfigReader) -> PoolingHeadConfig:
    """A base model's answer for a row.  ``add_pooling_layer`` is an argument of their classes, not of their configs:
    kvad writes it of a model without a pooler, which :func:`settling` has seen in its file."""
    return POOLER if fields.flag("add_pooling_layer", True) else PoolingHeadConfig()


def read_task_head(fields: HFConfigReader, heads: Mapping[str, TaskHead]) -> TaskHead:
    """The head of the class that wrote the file, by how its name ends; a masked language model's where it is unsaid."""
    name = fields.architecture
    found = re.search(r"(For[A-Z]\w*|LMHeadModel|Model)$", name)
    if not name:
        return heads["ForMaskedLM"]
    if found is None or found[1] not in heads:
        raise CheckpointError(
            f"{fields.where}: architectures {name!r} is not supported", f"classes that end in {', '.join(heads)} are"
        )
    return heads[found[1]]


def task_fields(config: ModelConfig, stem: str) -> dict[str, Any]:
    """The inverse of :func:`task` and :func:`labels`."""
    head = config.head
    if isinstance(head, ClassificationHeadConfig):
        ending = "ForTokenClassification" if head.level == "token" else "ForSequenceClassification"
        numbered = {str(i): name for i, name in enumerate(head.labels)}
        back = {name: i for i, name in enumerate(head.labels)}
        return {"architectures": [stem + ending], "id2label": numbered, "label2id": back}
    return {"architectures": [stem + ("ForMaskedLM" if isinstance(head, LanguageHeadConfig) else "Model")]}


def bert_fields(config: ModelConfig, model_type: str, stem: str) -> dict[str, Any]:
    """The fields that BERT's descendants have in common."""
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
    """Embeddings and layers by BERT's names, below ``base``."""
    for mine, other in _EMBEDDING.items():
        yield tensor_rule(mine, base + other)
    for i in range(config.stack.num_layers):
        yield from prefix_rules(f"{side}.layers.{i}", f"{base}encoder.layer.{i}", layer)


def head_bias(config: ModelConfig, decoder: str, bias: str) -> Iterator[TensorRule]:
    """A language head whose bias stands beside its matrix.  Of an untied one transformers 5 reads ``decoder.bias``,
    4.57 either."""
    if not isinstance(config.head, LanguageHeadConfig):
        return
    yield tensor_rule("head.weight", f"{decoder}.weight")
    yield (
        tensor_rule("head.bias", bias)
        if config.tie_embeddings
        else TensorRule(("head.bias",), (f"{decoder}.bias", bias), _BOTH)
    )


def bias_rules(decoder: str, bias: str) -> dict[str, tuple[str, ...]]:
    """The two names of a language head's bias: a file has either, or both."""
    return {bias: (f"{decoder}.bias",), f"{decoder}.bias": (bias,)}


TensorLookup = Callable[[str], Tensor | None]


def head_resolver(masked: str, pooler: str | None = None) -> Callable[[ModelConfig, TensorLookup], ModelConfig]:
    """The head that a file holds.  ``masked``: the tensor without which there is no language head, ``pooler``: that of
    the base model, where it may have one."""

    def settle(config: ModelConfig, look: TensorLookup) -> ModelConfig:
        head = config.head
        if isinstance(head, PoolingHeadConfig) or (isinstance(head, LanguageHeadConfig) and look(masked) is None):
            head = PoolingHeadConfig() if pooler is None or look(pooler) is None else POOLER
        return replace(config, head=head)

    return settle


def tables_equal(found: Tensor, ours: Tensor) -> bool:
    """Whether a file's table is ours, up to the rounding of its dtype."""
    if found.shape != ours.shape:
        return False
    rounding = max(1e-5, torch.finfo(found.dtype).eps)
    return bool((found.float() - ours).abs().max() <= rounding)
