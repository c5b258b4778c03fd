"""Shared parts of BERT's descendants: task heads, names, resolution by stored tensors.

Files of one class differ in their tensors: a base model may have no pooler, and files of sentence-transformers name
*ForMaskedLM* for a base model.  ``head_resolver`` reads what is stored; a pooler or a next-sentence head that the
task does not use is left out, as in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader
from kvad.config import ModelConfig
from kvad.errors import CheckpointError

TaskHead = cfg.LanguageHeadConfig | cfg.ClassificationHeadConfig | cfg.PoolingHeadConfig
POOLER = cfg.PoolingHeadConfig("first", transform=cfg.HeadTransformConfig("tanh"))

LEGACY_NORMS = {
    "LayerNorm.weight": "LayerNorm.gamma",
    "LayerNorm.bias": "LayerNorm.beta",
}  # in files converted from TensorFlow

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


def read_pooler(fields: HFConfigReader) -> cfg.PoolingHeadConfig:
    """Return the head of a base model.

    ``add_pooling_layer`` is an argument of transformers' classes, not of their configs; kvad writes it for a model
    without a pooler, which ``head_resolver`` detects in the file.
    """
    return POOLER if fields.flag("add_pooling_layer", True) else cfg.PoolingHeadConfig()


def task_heads(fields: HFConfigReader, language: cfg.LanguageHeadConfig, sequence: str) -> dict[str, TaskHead]:
    """Return the heads by the suffix of the class name.

    ``sequence`` is the activation of a sequence classifier's transform.
    """
    names = read_labels(fields)
    transform = cfg.HeadTransformConfig(sequence)  # type: ignore[arg-type]
    return {
        "ForMaskedLM": language,
        "ForTokenClassification": cfg.ClassificationHeadConfig(names),
        "ForSequenceClassification": cfg.ClassificationHeadConfig(names, "row", transform=transform),
        "Model": cfg.PoolingHeadConfig(),
    }


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
    """Return the inverse of ``read_task_head`` and ``read_labels``."""
    head = config.head
    if isinstance(head, cfg.ClassificationHeadConfig):
        ending = "ForTokenClassification" if head.level == "token" else "ForSequenceClassification"
        id2label = {str(i): name for i, name in enumerate(head.labels)}
        label2id = {name: i for i, name in enumerate(head.labels)}
        return {"architectures": [stem + ending], "id2label": id2label, "label2id": label2id}
    return {"architectures": [stem + ("ForMaskedLM" if isinstance(head, cfg.LanguageHeadConfig) else "Model")]}


# ---------------------------------------------------------------- tensors


TensorLookup = Callable[[str], Tensor | None]


def head_resolver(masked: str, pooler: str | None = None) -> Callable[[ModelConfig, TensorLookup], ModelConfig]:
    """Build a function that selects the head by the stored tensors.

    Every language head has the tensor ``masked``, a base model with a pooler the tensor ``pooler``.
    """

    def resolve(config: ModelConfig, lookup: TensorLookup) -> ModelConfig:
        head = config.head
        if isinstance(head, cfg.PoolingHeadConfig) or (
            isinstance(head, cfg.LanguageHeadConfig) and lookup(masked) is None
        ):
            head = cfg.PoolingHeadConfig() if pooler is None or lookup(pooler) is None else POOLER
        return replace(config, head=head)

    return resolve


def tables_equal(stored: Tensor, computed: Tensor) -> bool:
    """Return True if a stored table equals the computed one, up to the rounding of its dtype."""
    if stored.shape != computed.shape:
        return False
    rounding = max(1e-5, torch.finfo(stored.dtype).eps)
    return bool((stored.float() - computed).abs().max() <= rounding)
