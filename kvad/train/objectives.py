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

from kvad.config import Classes, Head, ModelConfig, Transform, from_dict, to_dict
from kvad.errors import ConfigError, a
from kvad.model.transformer import Transformer
from kvad.train.config import ObjectiveConfig, RunConfig
from kvad.train.objective import Autocast, NextToken, Objective
from kvad.train.sampling import Sampling

__all__ = ["EXAMPLES", "fitting", "headed", "make_objective"]

TOPOLOGY = {
    "next-token": "decoder",
    "chat": "decoder",
    "compress": "decoder",
    "seq2seq": "encoder-decoder",
    "spans": "encoder-decoder",
    "masked": "encoder",
    "tag": "encoder",
    "classify": "encoder",
}
USUAL = {"decoder": "next-token", "encoder-decoder": "seq2seq", "encoder": "masked"}
EXAMPLES = ("tag", "classify", "chat")  # read from files of examples, not from documents or pairs
PRESETS_OF = {"decoder": "small", "encoder-decoder": "transformer-tiny", "encoder": "encoder-tiny"}
KEYS = {  # which kinds a key is for; others refuse it
    "smoothing": ("next-token", "chat", "seq2seq", "spans", "masked", "tag", "classify"),
    "density": ("masked", "spans"),
    "mean_span": ("spans",),
    "sampling": ("seq2seq",),
    "sampling_schedule": ("seq2seq",),
    "sampling_steps": ("seq2seq",),
    "template": ("chat",),
    "text_field": ("classify",),
    "label_field": ("classify",),
    "hide": ("tag", "classify"),
}


def fitting(config: RunConfig, topology: str) -> RunConfig:
    """The configuration with ``auto`` said.  ConfigError for a kind that a model of this topology cannot have, and for
    a key that the kind does not use."""
    wanted = config.objective
    kind = USUAL[topology] if wanted.kind == "auto" else wanted.kind
    if TOPOLOGY[kind] != topology:
        able = ", ".join(name for name, of in TOPOLOGY.items() if of == topology and name != "compress")
        needed = TOPOLOGY[kind]
        raise ConfigError(
            f"objective.kind: {kind} needs {a(needed)}, and this model is {a(topology)}",
            f"{a(topology)} learns {able}; --preset {PRESETS_OF[needed]} is {a(needed)}",
        )
    for field in fields(ObjectiveConfig):
        if field.name != "kind" and kind not in KEYS[field.name] and getattr(wanted, field.name) != field.default:
            raise ConfigError(
                f"objective.{field.name}: objective {kind} has no use for it",
                f"it is for {', '.join(KEYS[field.name])}; leave it out",
            )
    if not wanted.sampling and (wanted.sampling_steps is not None or wanted.sampling_schedule != "linear"):
        raise ConfigError("objective.sampling is 0: nothing is sampled", "say the share, as in objective.sampling=0.25")
    return replace(config, objective=from_dict(ObjectiveConfig, {**to_dict(wanted), "kind": kind}))


def headed(model: ModelConfig, kind: str, labels: tuple[str, ...]) -> ModelConfig:
    """The model with the head that objective ``kind`` needs; ``labels``: those of the data.

    A head of classes that the model names itself stays, where it has all labels.  Raises ConfigError.
    """
    if kind not in ("tag", "classify"):
        if not isinstance(model.head, Head):
            raise ConfigError(f"model.head.kind: objective {kind} needs a language head, found {model.head.kind}")
        return model
    per = "token" if kind == "tag" else "row"
    if isinstance(model.head, Classes):
        if model.head.per != per:
            raise ConfigError(f"model.head.per: objective {kind} needs labels per {per}, found {model.head.per}")
        if unknown := [label for label in labels if label not in model.head.labels]:
            raise ConfigError(f"model.head.labels: the data has {unknown[0]!r}, which is none of them")
        return model
    if kind == "tag":
        return replace(model, head=Classes(labels))
    return replace(model, head=Classes(labels, "row", transform=Transform("tanh")))  # BERT's pooler, then the classes


def make_objective(config: RunConfig, model: Transformer, autocast: Autocast) -> Objective:
    """What the loop trains ``model`` by; ``config`` has been through :func:`fitting`."""
    wanted = config.objective
    chosen = Sampling if wanted.sampling else NextToken
    return chosen(model, autocast, wanted.smoothing)
