"""Objectives: the topology, the data and the model head that each needs.

===================  ================  =====================================================================
kind                 topology          data
===================  ================  =====================================================================
``next-token``       decoder           documents (``data/document_packer.py``)
``chat``             decoder           conversations; the assistant's tokens are targets (``sources/chat.py``)
``seq2seq``          encoder-decoder   pairs (``data/text_packer.py``)
``span-corruption``  encoder-decoder   documents with spans cut out (``objectives/span_corruption.py``)
``masked-lm``        encoder           documents with hidden tokens (``objectives/masked_lm.py``)
``tag``              encoder           tagged words; a score for each tag at a word's first token
``classify``         encoder           labeled texts (``sources/examples.py``); a score per label of the text
``summarizer``       decoder           documents; a summarizer is trained (``objectives/summary_distillation.py``)
===================  ================  =====================================================================
"""

from __future__ import annotations

from dataclasses import fields, replace

from kvad import config as cfg
from kvad.config import ModelConfig
from kvad.errors import ConfigError, with_article
from kvad.model import Transformer
from kvad.train import objectives
from kvad.train.config import ObjectiveConfig, RunConfig
from kvad.train.objectives import Autocast, Objective

OBJECTIVE_TOPOLOGY = {
    "next-token": "decoder",
    "chat": "decoder",
    "summarizer": "decoder",
    "seq2seq": "encoder-decoder",
    "span-corruption": "encoder-decoder",
    "masked-lm": "encoder",
    "tag": "encoder",
    "classify": "encoder",
}
DEFAULT_OBJECTIVE = {"decoder": "next-token", "encoder-decoder": "seq2seq", "encoder": "masked-lm"}
EXAMPLE_OBJECTIVES = ("tag", "classify", "chat")  # objectives that read files of examples
TOPOLOGY_PRESETS = {"decoder": "small", "encoder-decoder": "transformer-tiny", "encoder": "encoder-tiny"}
OBJECTIVE_KEYS = {  # kinds that accept a key; others refuse it
    "label_smoothing": ("next-token", "chat", "seq2seq", "span-corruption", "masked-lm", "tag", "classify"),
    "noise_density": ("masked-lm", "span-corruption"),
    "mean_span_length": ("span-corruption",),
    "scheduled_sampling": ("seq2seq",),
    "scheduled_sampling_schedule": ("seq2seq",),
    "scheduled_sampling_steps": ("seq2seq",),
    "chat_template": ("chat",),
    "text_field": ("classify",),
    "label_field": ("classify",),
    "input_mask_ratio": ("tag", "classify"),
}


def resolve_objective(config: RunConfig, topology: str) -> RunConfig:
    """Replace ``auto`` by the objective of the model's topology.

    Raises:
        ConfigError: If a model of this topology cannot have the kind, or the kind has no use for a key.
    """
    objective = config.objective
    kind = DEFAULT_OBJECTIVE[topology] if objective.kind == "auto" else objective.kind
    if OBJECTIVE_TOPOLOGY[kind] != topology:
        models = {name: required for name, required in OBJECTIVE_TOPOLOGY.items() if name != "summarizer"}
        kinds = ", ".join(name for name, required in models.items() if required == topology)
        needed = OBJECTIVE_TOPOLOGY[kind]
        raise ConfigError(
            f"objective.kind: {kind} needs {with_article(needed)}, and this model is {with_article(topology)}",
            f"{with_article(topology)} learns {kinds}; --preset {TOPOLOGY_PRESETS[needed]} is {with_article(needed)}",
        )
    for field in fields(ObjectiveConfig):
        is_default = field.name == "kind" or getattr(objective, field.name) == field.default
        if not is_default and kind not in OBJECTIVE_KEYS[field.name]:
            raise ConfigError(
                f"objective.{field.name}: objective {kind} has no use for it",
                f"it is for {', '.join(OBJECTIVE_KEYS[field.name])}; leave it out",
            )
    if not objective.scheduled_sampling and (
        objective.scheduled_sampling_steps is not None or objective.scheduled_sampling_schedule != "linear"
    ):
        raise ConfigError(
            "objective.scheduled_sampling: must be above 0 with scheduled_sampling_steps or _schedule, got 0",
            "For example: objective.scheduled_sampling=0.25",
        )
    options = {**cfg.serialization.to_dict(objective), "kind": kind}
    return replace(config, objective=cfg.serialization.from_dict(ObjectiveConfig, options))


def with_head(model: ModelConfig, kind: str, labels: tuple[str, ...]) -> ModelConfig:
    """Return the model config with the head that objective ``kind`` needs.

    A classification head of the config itself stays if it has all ``labels`` of the data.

    Raises:
        ConfigError: If the model's own head cannot serve the objective.
    """
    if kind not in ("tag", "classify"):
        if not isinstance(model.head, cfg.LanguageHeadConfig):
            raise ConfigError(f"model.head.kind: must be a language head for objective {kind}, got {model.head.kind}")
        return model
    level = "token" if kind == "tag" else "row"
    if isinstance(model.head, cfg.ClassificationHeadConfig):
        if model.head.level != level:
            raise ConfigError(f"model.head.level: must be {level!r} for objective {kind}, got {model.head.level!r}")
        if unknown := [label for label in labels if label not in model.head.labels]:
            raise ConfigError(f"model.head.labels: must contain every label of the data, {unknown[0]!r} is missing")
        return model
    if kind == "tag":
        return replace(model, head=cfg.ClassificationHeadConfig(labels))
    return replace(
        model, head=cfg.ClassificationHeadConfig(labels, "row", transform=cfg.HeadTransformConfig("tanh"))
    )  # BERT's pooler before the classifier


def build_objective(config: RunConfig, model: Transformer, autocast: Autocast) -> Objective:
    """Build the objective of ``model``; ``config`` comes from ``resolve_objective``."""
    options = config.objective
    objective_class = (
        objectives.scheduled_sampling.ScheduledSamplingObjective
        if options.scheduled_sampling
        else objectives.cross_entropy.CrossEntropyObjective
    )
    return objective_class(model, autocast, options.label_smoothing)
