"""BERT's descendants: classes of transformers with the heads of tasks.

Files of one class differ in their tensors: a base model may have no pooler, and files of sentence-transformers name
*ForMaskedLM* for a base model.  ``EncoderClass.resolve`` reads what is stored; a pooler or a next-sentence head that
the task does not use is left out, as in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

from torch import Tensor

from kvad import config as cfg
from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, TensorTransform, tensor_rule
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families._hf_class import HFClass
from kvad.config import ModelConfig

TaskHead = cfg.LanguageHeadConfig | cfg.ClassificationHeadConfig | cfg.PoolingHeadConfig
TensorLookup = Callable[[str], Tensor | None]
POOLER = cfg.PoolingHeadConfig("first", transform=cfg.HeadTransformConfig("tanh"))
# In files converted from TensorFlow.
LEGACY_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
# problem_type -> activation of the scores; None: sigmoid of one label, softmax of several
_PROBLEM_TYPES: Mapping[str, Literal["sigmoid", "none"] | None] = {
    "regression": "none",
    "multi_label_classification": "sigmoid",
    "single_label_classification": None,
}
_CROSS_ENCODER_ACTIVATIONS = {
    f"torch.nn.modules.{name}": activation
    for name, activation in (("linear.Identity", "none"), ("activation.Sigmoid", "sigmoid"))
}
_BOTH = TensorTransform(lambda tensors, shapes: tensors[:1], lambda tensors, shapes: [tensors[0], tensors[0].clone()])


class HeadNames(NamedTuple):
    """Names of the heads' tensors."""

    dense: str  # transform of the language head
    norm: str  # of the transform
    decoder: str  # matrix of the language head
    bias: str | None  # of the language head; None: it is named after the matrix
    classifier_dense: str | None = None  # transform of a classifier; None: it uses the pooler
    sequence: str = "classifier"  # matrix of a sequence classifier
    pooler: str = "pooler.dense"  # matrix of the base model's pooler


def encoder_only(fields: HFConfigReader) -> None:
    """Raise CheckpointError for options that make the tensors another model."""
    fields.require_one_of("is_decoder", False, reason="kvad reads it as a bidirectional encoder.")
    fields.require_one_of("is_encoder_decoder", False)
    fields.require_one_of("add_cross_attention", False)
    reason = "Relative keys (Shaw et al. 2018) are not supported."
    fields.require_one_of("position_embedding_type", "absolute", reason=reason)
    fields.require_one_of("pruned_heads", {}, reason="Save the pruned model with its reduced number of heads.")


def read_labels(fields: HFConfigReader) -> tuple[str, ...]:
    """Return the class names in order, or transformers' default names."""
    names = fields.get("id2label")
    if names is None or "Classification" not in fields.architecture:
        return tuple(f"LABEL_{i}" for i in range(fields.integer("num_labels", default=2)))
    if not isinstance(names, Mapping) or sorted(names, key=str) != sorted(map(str, range(len(names)))):
        raise fields.error(f"id2label: must name 0, 1, 2, ..., got {names!r}")
    return tuple(str(names[str(i)]) for i in range(len(names)))


def read_activation(fields: HFConfigReader, num_labels: int) -> Literal["softmax", "sigmoid", "none"] | None:
    """Return the function of a sequence classifier's scores, as transformers' text-classification pipeline does.

    A cross-encoder of sentence-transformers names the function in the config.
    """
    cross_encoder = fields.part("sentence_transformers")
    if "activation_fn" in cross_encoder:
        activation: Literal["sigmoid", "none"] = cross_encoder.choice("activation_fn", _CROSS_ENCODER_ACTIVATIONS)
        return None if activation == "sigmoid" and num_labels == 1 else activation
    reason = "It decides how scores become probabilities."
    fields.require_one_of(
        "problem_type", "regression", "single_label_classification", "multi_label_classification", reason=reason
    )
    named = _PROBLEM_TYPES[fields.get("problem_type", "single_label_classification")]
    return None if named == "sigmoid" and num_labels == 1 else named


@dataclass(frozen=True, kw_only=True)
class EncoderClass(HFClass):
    """A class of encoders; ``architecture`` is the stem of the names of its tasks' classes.

    ``tensors`` and ``layer`` are names below ``prefix``, which a file of the base model lacks.
    """

    names: HeadNames
    also: tuple[str, ...] = ()  # further ``model_type`` values; the class's own is written
    check: Callable[[HFConfigReader], None] | None = encoder_only
    language_activation: cfg.layers.Activation | None = "gelu"  # of the language head's transform; None: the MLP's
    sequence_activation: cfg.layers.Activation | None = "tanh"  # of a sequence classifier's transform; None: the MLP's
    has_pooler: bool = False  # a file of the base model may have a pooler
    name_variants: Mapping[str, str] = field(default_factory=lambda: LEGACY_NORMS)

    @classmethod
    def like(cls, other: EncoderClass, **changes: Any) -> Self:
        """Return a class of this type that differs from ``other`` in ``changes``."""
        return cls(**{**vars(other), **changes})

    # ---------------------------------------------------------------- configs

    def read_head(self, fields: HFConfigReader, values: hf.FieldValues) -> TaskHead:
        """Return the head by the suffix of the class name (default: masked language modeling)."""
        heads, name = self.task_heads(fields, values), fields.architecture
        match = re.search(r"(For[A-Z]\w*|LMHeadModel|Model)$", name)
        if not name:
            return heads["ForMaskedLM"]
        if match is None or match[1] not in heads:
            hint = f"Supported classes end in {', '.join(heads)}."
            raise fields.error(f"architectures {name!r} is not supported", hint)
        head = heads[match[1]]
        if isinstance(head, cfg.ClassificationHeadConfig) and head.level == "row":
            return replace(head, activation=read_activation(fields, len(head.labels)))
        return head

    def task_heads(self, fields: HFConfigReader, values: hf.FieldValues) -> dict[str, TaskHead]:
        """Return the heads by the suffix of the class name."""
        labels, activation, embedding = read_labels(fields), values["mlp"]["activation"], values["embedding"]
        norm = embedding.get("norm") or cfg.NormConfig(**values["norm"])
        size = embedding.get("embedding_size")
        masked = cfg.HeadTransformConfig(self.language_activation or activation, norm=norm, output_size=size)
        sequence = cfg.HeadTransformConfig(self.sequence_activation or activation)
        return {
            "ForMaskedLM": cfg.LanguageHeadConfig(bias=True, transform=masked),
            "ForTokenClassification": cfg.ClassificationHeadConfig(labels),
            "ForSequenceClassification": cfg.ClassificationHeadConfig(labels, "row", transform=sequence),
            "Model": POOLER if self.has_pooler and values["head"]["transform"] else cfg.PoolingHeadConfig(),
        }

    def write(self, config: ModelConfig) -> dict[str, Any]:
        if self.layer_types is None:
            hf.require_single_layer_type(config.stack, self.model_type)
        content, head = super().write(config), config.head
        if isinstance(head, cfg.ClassificationHeadConfig):
            ending = "ForTokenClassification" if head.level == "token" else "ForSequenceClassification"
            content["id2label"] = {str(i): name for i, name in enumerate(head.labels)}
            content["label2id"] = {name: i for i, name in enumerate(head.labels)}
            problem_types = [name for name, activation in _PROBLEM_TYPES.items() if activation == head.activation]
            content |= {"problem_type": problem_types[0]} if head.activation and problem_types else {}
        else:
            ending = "ForMaskedLM" if isinstance(head, cfg.LanguageHeadConfig) else "Model"
        return {**content, "architectures": [self.architecture + ending]}

    # ---------------------------------------------------------------- tensors

    def base(self, config: ModelConfig) -> str:
        """Return the prefix of the base model's tensors."""
        return "" if isinstance(config.head, cfg.PoolingHeadConfig) else self.prefix

    def all_rules(self, config: ModelConfig) -> Iterator[TensorRule]:
        """Yield the rules of the base model and of the head.

        A language head's bias may be stored apart from its matrix.  For an untied head transformers 5 then reads
        ``decoder.bias``, 4.57 either name.
        """
        names, head, base = self.names, config.head, self.base(config)
        is_language = isinstance(head, cfg.LanguageHeadConfig)
        dense = names.dense if is_language else f"{base}{names.pooler}"
        if isinstance(head, cfg.ClassificationHeadConfig):
            dense = names.classifier_dense or dense
        yield from self.rules(config, base)
        yield tensor_rule("head.transform.dense", dense)
        yield tensor_rule("head.transform.norm", names.norm)
        if not is_language:
            is_tagger = isinstance(head, cfg.ClassificationHeadConfig) and head.level == "token"
            yield tensor_rule("head", "classifier" if is_tagger else names.sequence)
            return
        bias = f"{names.decoder}.bias"
        yield tensor_rule("head.weight", f"{names.decoder}.weight")
        if names.bias is None or config.tie_embeddings:
            yield tensor_rule("head.bias", names.bias or bias)
        else:
            yield TensorRule(("head.bias",), (bias, names.bias), _BOTH)

    def table(self, config: ModelConfig) -> Iterable[tuple[str, Tensor]]:
        """Return tensors that kvad computes and a file stores (see ``Family.extra``)."""
        return ()

    def resolve(self, config: ModelConfig, lookup: TensorLookup) -> ModelConfig:
        """Select the head by the stored tensors: every language head has a transform, some base models a pooler."""
        head = config.head
        if isinstance(head, cfg.PoolingHeadConfig) or (
            isinstance(head, cfg.LanguageHeadConfig) and lookup(f"{self.names.dense}.weight") is None
        ):
            stored = self.has_pooler and lookup(f"{self.prefix}{self.names.pooler}.weight") is not None
            head = POOLER if stored else cfg.PoolingHeadConfig()
        return replace(config, head=head)

    def family(self) -> Family:
        """Build the family of this class."""
        matrix, bias, other = f"{self.names.decoder}.weight", f"{self.names.decoder}.bias", self.names.bias
        pooler = (r"pooler\..*",) if self.has_pooler else ()
        return Family(
            (self.model_type, *self.also),
            self.read,
            self.all_rules,
            self.write,
            prefix=self.prefix,
            ignored=(*self.ignored, *pooler, matrix.replace(".", r"\.")),
            extra=self.table,
            head=(matrix, f"{self.prefix}{self.tensors['embedding.tokens']}.weight"),
            name_variants=self.name_variants,
            resolve=self.resolve,
            copies={} if other is None else {other: (bias,), bias: (other,)},  # a file has either or both
        )
