"""Corpus, special tokens, dataset and generation settings of each objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvad import checkpoint, text
from kvad.checkpoint import CheckpointHandle, GenerationConfig
from kvad.errors import ConfigError
from kvad.text import Tokenizer, load_tokenizer
from kvad.train import data as data_lib
from kvad.train import objectives
from kvad.train import sources as sources_lib
from kvad.train.config import RunConfig
from kvad.train.data import DocumentPacker, MixtureSource, PackedDataset, TokenStore
from kvad.train.setup.objective_factory import EXAMPLE_OBJECTIVES
from kvad.train.sources import PairPaths

_ENCODER = ("pad", "unk", "cls", "sep", "mask")
_SPECIALS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("seq2seq", sources_lib.pairs.ROLES),
    ("span-corruption", ("eos", "pad", "unk", *objectives.span_corruption.SENTINELS)),
    ("chat", ("pad", "unk", *sources_lib.chat.CHATML_TOKENS)),
    *((kind, _ENCODER) for kind in ("masked-lm", "tag", "classify")),
)


def special_tokens_for(kind: str) -> tuple[str, ...] | None:
    """Return the special tokens of a new tokenizer for an objective; None for defaults."""
    return dict(_SPECIALS).get(kind)


def open_examples(
    config: RunConfig, paths: PairPaths, saved: Path | None = None, start: CheckpointHandle | None = None
) -> sources_lib.examples.ExampleCorpus[Any]:
    """Open the examples of objective tag, classify or chat.

    Args:
        config: The run's configuration.
        paths: Files of examples.
        saved: Folder of the run's own checkpoint, whose chat template is used if it has one.
        start: The model that the run starts from.

    Raises:
        DataError: Names file and line.
    """
    errors, objective = config.data.encoding_errors, config.objective
    corpus: sources_lib.examples.ExampleCorpus[Any]
    if objective.kind == "tag":
        corpus = sources_lib.examples.TagCorpus(errors=errors)
    elif objective.kind == "classify":
        corpus = sources_lib.examples.LabeledCorpus(
            errors=errors, text_field=objective.text_field, label_field=objective.label_field
        )
    else:
        corpus = sources_lib.chat.ChatCorpus(errors=errors, template=_template(config, saved, start))
    return corpus.open(paths, config.data.validation_fraction)


def _template(config: RunConfig, saved: Path | None, start: CheckpointHandle | None) -> text.chat_template.ChatTemplate:
    """Return the chat template of run, named file, initial model or tokenizer, or ChatML."""
    template = None if saved is None else text.chat_template.ChatTemplate.load(saved)
    if template is not None:
        return template
    template_file, tokenizer = config.objective.chat_template, config.tokenizer.path
    if template_file is not None:
        try:
            return text.chat_template.ChatTemplate(Path(template_file).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"objective.chat_template: cannot read {template_file}: {error}") from error
    if start is not None:
        template = text.chat_template.ChatTemplate.load(start.tokenizer_folder)
        return (
            text.chat_template.ChatTemplate(sources_lib.chat.chatml(start.tokenizer)) if template is None else template
        )
    if tokenizer is None:
        return text.chat_template.ChatTemplate(sources_lib.chat.CHATML)
    prepared_template = Path(tokenizer) / data_lib.token_store.TEMPLATE
    folder = (
        prepared_template
        if data_lib.token_store.is_prepared(Path(tokenizer)) and prepared_template.is_dir()
        else tokenizer_path(tokenizer)
    )
    template = text.chat_template.ChatTemplate.load(folder if folder.is_dir() else folder.parent)
    if template is None:
        raise ConfigError(
            f"objective.chat_template: {tokenizer} has no chat template", "Name one: --set objective.chat_template=FILE"
        )
    return template


def build_dataset(
    store: TokenStore, config: RunConfig, tokenizer: Tokenizer, parts: Sequence[MixtureSource], noun: str
) -> PackedDataset:
    """Build the dataset of a run.

    Args:
        store: The run's tokens.
        config: The run's configuration.
        tokenizer: Made the tokens.
        parts: Sources of the store.
        noun: Noun for one text.

    Raises:
        DataError: If there are too few tokens, or the tokenizer lacks a special token.
    """
    objective, kind, pad = config.objective, config.objective.kind, tokenizer.special_tokens.pad or 0
    packer: data_lib.packed_dataset.Packer
    transform: data_lib.packed_dataset.RowTransform | None = None
    if kind in EXAMPLE_OBJECTIVES:
        packer = data_lib.text_packer.WholeTextPacker(data_lib.text_packer.ExampleTexts(store, noun), config, parts)
        if objective.input_mask_ratio:
            transform = objectives.masked_lm.InputMasking(tokenizer, objective.input_mask_ratio)
    elif kind == "span-corruption":
        raw = objectives.span_corruption.max_raw_length(config.data.seq_len, objective)
        packer = DocumentPacker(store, replace(config, data=replace(config.data, seq_len=raw)), parts)
        transform = corruption = objectives.span_corruption.SpanCorruption(tokenizer, objective, raw)
        pad = corruption.special_tokens.pad
    elif kind == "seq2seq":
        packer = data_lib.text_packer.WholeTextPacker(data_lib.text_packer.PairTexts(store), config, parts)
        if objective.scheduled_sampling:
            transform = objectives.scheduled_sampling.ScheduledSampling(config)
    else:
        packer, pad = DocumentPacker(store, config, parts), 0
        if kind == "masked-lm":
            transform = objectives.masked_lm.TokenMasking(tokenizer, objective.noise_density)
    keep_ids = kind in (*EXAMPLE_OBJECTIVES, "span-corruption")
    vocab = None if kind in ("tag", "classify") else tokenizer.vocab_size  # their targets are labels
    shape = data_lib.collate.CollateConfig.of_run(config, pad, vocab, keep_document_ids=keep_ids)
    return PackedDataset(packer, config, transform, shape)


def generation_config_for(data: PackedDataset, tokenizer: Tokenizer) -> GenerationConfig:
    """Return the generation settings stored in the run's checkpoints."""
    if isinstance(data.transform, objectives.span_corruption.SpanCorruption):
        return objectives.span_corruption.span_generation_config(data.transform.special_tokens)
    end = data.packer.turn_end() if isinstance(data.packer, data_lib.text_packer.WholeTextPacker) else None
    if end is None or end not in tokenizer.special_tokens.names().values():
        return GenerationConfig()
    pad = tokenizer.special_tokens.pad
    return GenerationConfig(eos_token_ids=(end,), pad_token_id=pad, sampling={"temperature": 1.0})


def generation_config_from(opened: CheckpointHandle) -> GenerationConfig:
    """Return a checkpoint's generation settings.

    An encoder-decoder without a decoder start token uses its BOS token.
    """
    generation = opened.generation
    if generation.decoder_start_token_id is not None or opened.config.kind != "encoder-decoder":
        return generation
    return replace(generation, decoder_start_token_id=generation.bos_token_id)


def tokenizer_path(path: str | Path) -> Path:
    """Return the tokenizer's path, also for runs and prepared data."""
    if data_lib.token_store.is_prepared(Path(path)):
        return Path(path) / data_lib.token_store.TOKENIZER
    return checkpoint.folder.locate(Path(path)) if checkpoint.folder.is_run(Path(path)) else Path(path)


def load_tokenizer_from(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a file, a folder, a run or prepared data; raises TokenizerError."""
    return load_tokenizer(tokenizer_path(path))
