"""Objectives: the topology, the data, the special tokens and the model head that each needs.

===================  ================  =====================================================================
kind                 topology          data
===================  ================  =====================================================================
``next-token``       decoder           documents (``data/packers.py``)
``chat``             decoder           conversations; the assistant's tokens are targets (``sources/chat.py``)
``seq2seq``          encoder-decoder   pairs (``data/packers.py``)
``span-corruption``  encoder-decoder   documents with spans cut out (``objectives/denoising.py``)
``masked-lm``        encoder           documents with hidden tokens (``objectives/denoising.py``)
``tag``              encoder           tagged words; a score for each tag at a word's first token
``classify``         encoder           labeled texts (``sources/examples.py``); a score per label of the text
``summarizer``       decoder           documents; a summarizer is trained (``objectives/summary_distillation.py``)
===================  ================  =====================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Literal

from kvad import config as cfg
from kvad.checkpoint import GenerationConfig
from kvad.config import ModelConfig
from kvad.errors import ConfigError, with_article
from kvad.model import Transformer
from kvad.text import Tokenizer
from kvad.train import data as data_lib
from kvad.train import objectives, sources
from kvad.train.config import ObjectiveConfig, RunConfig
from kvad.train.data import DocumentPacker, MixtureSource, PackedDataset, TokenStore
from kvad.train.objectives import Autocast, Objective

OBJECTIVE_TOPOLOGY = {
    **dict.fromkeys(("next-token", "chat", "summarizer"), "decoder"),
    **dict.fromkeys(("seq2seq", "span-corruption"), "encoder-decoder"),
    **dict.fromkeys(("masked-lm", "tag", "classify"), "encoder"),
}
DEFAULT_OBJECTIVE = {"decoder": "next-token", "encoder-decoder": "seq2seq", "encoder": "masked-lm"}
EXAMPLE_OBJECTIVES = ("tag", "classify", "chat")  # objectives that read files of examples
TOPOLOGY_PRESETS = {"decoder": "small", "encoder-decoder": "transformer-tiny", "encoder": "encoder-tiny"}
_TARGETS = ("next-token", "chat", "seq2seq", "span-corruption", "masked-lm", "tag", "classify")
OBJECTIVE_KEYS = {  # kinds that accept a key; others refuse it
    **dict.fromkeys(("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate"), _TARGETS),
    "label_smoothing": _TARGETS,
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
SPECIAL_TOKENS = {  # of a new tokenizer; other objectives have the default ones
    "seq2seq": sources.pairs.ROLES,
    "span-corruption": ("eos", "pad", "unk", *objectives.denoising.SENTINELS),
    "chat": ("pad", "unk", *sources.chat.CHATML_TOKENS),
    **dict.fromkeys(("masked-lm", "tag", "classify"), ("pad", "unk", "cls", "sep", "mask")),
}


def resolve_objective(config: RunConfig, topology: str) -> RunConfig:
    """Replace ``auto`` by the objective of the model's topology.

    Raises ConfigError if a model of this topology cannot have the kind, or the kind has no use for a key.
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

    A classification head of the config itself stays if it has all ``labels`` of the data. Raises ConfigError if the
    model's own head cannot serve the objective.
    """
    if kind not in ("tag", "classify"):
        if not isinstance(model.head, cfg.LanguageHeadConfig):
            raise ConfigError(f"model.head.kind: must be a language head for objective {kind}, got {model.head.kind}")
        return model
    level: Literal["token", "row"] = "token" if kind == "tag" else "row"
    if isinstance(model.head, cfg.ClassificationHeadConfig):
        if model.head.level != level:
            raise ConfigError(f"model.head.level: must be {level!r} for objective {kind}, got {model.head.level!r}")
        if unknown := [label for label in labels if label not in model.head.labels]:
            raise ConfigError(f"model.head.labels: must contain every label of the data, {unknown[0]!r} is missing")
        return model
    pooler = None if kind == "tag" else cfg.HeadTransformConfig("tanh")  # BERT's, before the classifier
    return replace(model, head=cfg.ClassificationHeadConfig(labels, level, transform=pooler))


def build_objective(config: RunConfig, model: Transformer, autocast: Autocast) -> Objective:
    """Build the objective of ``model``; ``config`` comes from ``resolve_objective``."""
    losses, options = objectives.cross_entropy, config.objective
    objective = losses.ScheduledSamplingObjective if options.scheduled_sampling else losses.CrossEntropyObjective
    _check_balancing(config, model.config)
    experts = objectives.ExpertBalancer(model, options) if _mixtures(model.config) else None
    return objective(model, autocast, options.label_smoothing, experts=experts)


def _mixtures(model: ModelConfig) -> list[cfg.MoEConfig]:
    """Return the experts of all layers that have some."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    return [layer.mlp for stack in stacks for layer in stack.layer_configs if isinstance(layer.mlp, cfg.MoEConfig)]


def _check_balancing(config: RunConfig, model: ModelConfig) -> None:
    """Raise ConfigError if an option of routers has no effect on the model."""
    mixtures = _mixtures(model)
    for key in ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate"):
        if getattr(config.objective, key) and not mixtures:
            raise ConfigError(f"objective.{key}: this model has no experts", "Leave it out.")
    if config.objective.router_bias_update_rate:
        key = "objective.router_bias_update_rate"
        if not any(mlp.selection_bias for mlp in mixtures):
            raise ConfigError(f"{key}: no router has a selection bias", "Give the experts selection_bias = true.")
        if config.lora is not None:
            raise ConfigError(f"{key}: must be 0 with [lora], whose model is frozen", "Leave it out.")


def build_dataset(
    store: TokenStore, config: RunConfig, tokenizer: Tokenizer, parts: Sequence[MixtureSource], noun: str
) -> PackedDataset:
    """Build the dataset of a run; ``noun`` is that of one text.

    Raises DataError if there are too few tokens, or the tokenizer lacks a special token.
    """
    objective, kind, pad = config.objective, config.objective.kind, tokenizer.special_tokens.pad or 0
    packer: data_lib.packed_dataset.Packer
    transform: data_lib.packed_dataset.RowTransform | None = None
    if kind in EXAMPLE_OBJECTIVES:
        packer = data_lib.packers.WholeTextPacker(data_lib.packers.ExampleTexts(store, noun), config, parts)
        if objective.input_mask_ratio:
            transform = objectives.denoising.InputMasking(tokenizer, objective.input_mask_ratio)
    elif kind == "span-corruption":
        raw = objectives.denoising.max_raw_length(config.data.seq_len, objective)
        packer = DocumentPacker(store, replace(config, data=replace(config.data, seq_len=raw)), parts)
        transform = corruption = objectives.denoising.SpanCorruption(tokenizer, objective, raw)
        pad = corruption.special_tokens.pad
    elif kind == "seq2seq":
        packer = data_lib.packers.WholeTextPacker(data_lib.packers.PairTexts(store), config, parts)
        if objective.scheduled_sampling:
            transform = objectives.cross_entropy.ScheduledSampling(config)
    else:
        packer, pad = DocumentPacker(store, config, parts), 0
        if kind == "masked-lm":
            transform = objectives.denoising.TokenMasking(tokenizer, objective.noise_density)
    keep_ids = kind in (*EXAMPLE_OBJECTIVES, "span-corruption")
    vocab = None if kind in ("tag", "classify") else tokenizer.vocab_size  # their targets are labels
    shape = data_lib.collate.CollateConfig.of_run(config, pad, vocab, keep_document_ids=keep_ids)
    return PackedDataset(packer, config, transform, shape)


def generation_config_for(data: PackedDataset, tokenizer: Tokenizer) -> GenerationConfig:
    """Return the generation settings stored in the run's checkpoints."""
    if isinstance(data.transform, objectives.denoising.SpanCorruption):
        return objectives.denoising.span_generation_config(data.transform.special_tokens)
    specials = tokenizer.special_tokens
    if isinstance(data.packer, data_lib.packers.WholeTextPacker):
        end, pad = data.packer.turn_end(), specials.pad
        ends: tuple[int, ...] = (end,) if end is not None and end in specials.names().values() else ()
    else:  # a decoder of documents; as in GPT-2, the token that ends them also pads
        ends = specials.end_ids if data.transform is None else ()
        pad = specials.pad if specials.pad is not None or not ends else ends[0]
    if not ends:
        return GenerationConfig()
    return GenerationConfig(eos_token_ids=ends, pad_token_id=pad, sampling={"temperature": 1.0})
