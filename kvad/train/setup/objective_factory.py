"""Which objective a model can have, what each reads, and the head that each needs.

==============  ================  =======================================================================
kind            of                read
==============  ================  =======================================================================
``next-token``  a decoder         documents (``data.py``)
``chat``        a decoder         conversations; the assistant's tokens are learned (``chats.py``)
``seq2seq``     encoder-decoder   pairs (``pair_data.py``)
``spans``       encoder-decoder   documents with spans cut out (``spans.py``)
``masked``      an encoder        documents with tokens hidden (``masking.py``)
``tag``         an encoder        tagging files (``tagging.py``); a score for each tag at a word's first token
``classify``    an encoder        labelled texts (``labelled.py``); a score for each label of the whole text
``compress``    a decoder         documents; what is trained is no model (``distil.py``)
==============  ================  =======================================================================
"""

from __future__ import annotations

from dataclasses import fields, replace

from kvad import config as config_lib
from kvad.config import ClassificationHeadConfig, HeadTransformConfig, LanguageHeadConfig, ModelConfig
from kvad.errors import ConfigError, with_article
from kvad.model import Transformer
from kvad.train import objectives
from kvad.train.config import ObjectiveConfig, RunConfig
from kvad.train.objectives import Autocast, Objective

OBJECTIVE_TOPOLOGY = {
    "next-token": "decoder",
    "chat": "decoder",
    "compress": "decoder",
    "seq2seq": "encoder-decoder",
    "spans": "encoder-decoder",
    "masked": "encoder",
    "tag": "encoder",
    "classify": "encoder",
}
DEFAULT_OBJECTIVE = {"decoder": "next-token", "encoder-decoder": "seq2seq", "encoder": "masked"}
EXAMPLE_OBJECTIVES = ("tag", "classify", "chat")  # read from files of examples, not from documents or pairs
TOPOLOGY_PRESETS = {"decoder": "small", "encoder-decoder": "transformer-tiny", "encoder": "encoder-tiny"}
OBJECTIVE_KEYS = {  # which kinds a key is for; others refuse it
    "label_smoothing": ("next-token", "chat", "seq2seq", "spans", "masked", "tag", "classify"),
    "noise_density": ("masked", "spans"),
    "mean_span_length": ("spans",),
    "scheduled_sampling": ("seq2seq",),
    "scheduled_sampling_schedule": ("seq2seq",),
    "scheduled_sampling_steps": ("seq2seq",),
    "chat_template": ("chat",),
    "text_field": ("classify",),
    "label_field": ("classify",),
    "input_mask_ratio": ("tag", "classify"),
}


def resolve_objective(config: RunConfig, topology: str) -> RunConfig:
    """The configuration with ``auto`` said.  ConfigError for a kind that a model of this topology cannot have, and for
    a key that the kind does not use."""
    wanted = config.objective
    kind = DEFAULT_OBJECTIVE[topology] if wanted.kind == "auto" else wanted.kind
    if OBJECTIVE_TOPOLOGY[kind] != topology:
        able = ", ".join(name for name, of in OBJECTIVE_TOPOLOGY.items() if of == topology and name != "compress")
        needed = OBJECTIVE_TOPOLOGY[kind]
        raise ConfigError(
            f"objective.kind: {kind} needs {with_article(needed)}, and this model is {with_article(topology)}",
            f"{with_article(topology)} learns {able}; --preset {TOPOLOGY_PRESETS[needed]} is {with_article(needed)}",
        )
    for field in fields(ObjectiveConfig):
        if (
            field.name != "kind"
            and kind not in OBJECTIVE_KEYS[field.name]
            and getattr(wanted, field.name) != field.default
        ):
            raise ConfigError(
                f"objective.{field.name}: objective {kind} has no use for it",
                f"it is for {', '.join(OBJECTIVE_KEYS[field.name])}; leave it out",
            )
    if not wanted.scheduled_sampling and (
        wanted.scheduled_sampling_steps is not None or wanted.scheduled_sampling_schedule != "linear"
    ):
        raise ConfigError(
            "objective.scheduled_sampling is 0: nothing is sampled",
            "say the share, as in objective.scheduled_sampling=0.25",
        )
    return replace(
        config,
        objective=config_lib.serialization.from_dict(
            ObjectiveConfig, {**config_lib.serialization.to_dict(wanted), "kind": kind}
        ),
    )


def with_head(model: ModelConfig, kind: str, labels: tuple[str, ...]) -> ModelConfig:
    """The model with the head that objective ``kind`` needs; ``labels``: those of the data.

    A head of classes that the model names itself stays, where it has all labels.  Raises ConfigError.
    """
    if kind not in ("tag", "classify"):
        if not isinstance(model.head, LanguageHeadConfig):
            raise ConfigError(f"model.head.kind: objective {kind} needs a language head, found {model.head.kind}")
        return model
    per = "token" if kind == "tag" else "row"
    if isinstance(model.head, ClassificationHeadConfig):
        if model.head.level != per:
            raise ConfigError(f"model.head.level: objective {kind} needs labels per {per}, found {model.head.level}")
        if unknown := [label for label in labels if label not in model.head.labels]:
            raise ConfigError(f"model.head.labels: the data has {unknown[0]!r}, which is none of them")
        return model
    if kind == "tag":
        return replace(model, head=ClassificationHeadConfig(labels))
    return replace(
        model, head=ClassificationHeadConfig(labels, "row", transform=HeadTransformConfig("tanh"))
    )  # BERT's pooler, then the classes


def build_objective(config: RunConfig, model: Transformer, autocast: Autocast) -> Objective:
    """What the loop trains ``model`` by; ``config`` has been through :func:`fitting`."""
    wanted = config.objective
    chosen = (
        objectives.scheduled_sampling.ScheduledSamplingObjective
        if wanted.scheduled_sampling
        else objectives.cross_entropy.CrossEntropyObjective
    )
    return chosen(model, autocast, wanted.label_smoothing)
