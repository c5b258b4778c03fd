"""Corpus, special tokens, dataset and generation settings of each objective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvad import text
from kvad.checkpoint import CheckpointHandle, GenerationConfig
from kvad.errors import ConfigError
from kvad.text import Tokenizer
from kvad.train import data as data_lib
from kvad.train import objectives
from kvad.train import sources as sources_lib
from kvad.train.config import RunConfig
from kvad.train.data import TokenStore, TrainingData
from kvad.train.setup.initialize import tokenizer_path
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


@dataclass(frozen=True)
class FramedDocuments:
    """Documents that are not opened by a separator.

    They have the tokenizer's own frame ([CLS] x [SEP]), as encoders read them, or, if ``bare``, none, for span
    corruption.
    """

    documents: sources_lib.documents.DocumentCorpus
    bare: bool

    @property
    def sources(self) -> tuple[sources_lib.documents.CorpusFile, ...]:
        return self.documents.sources

    def texts(self) -> Iterator[str]:
        return self.documents.texts()

    def pieces(self) -> Iterator[sources_lib.formats.TextPiece]:
        """Return documents whole, because a frame encloses each of them."""
        return map(sources_lib.formats.TextPiece, self.texts())

    def settings(self) -> dict[str, Any]:
        return {**self.documents.settings(), "frame": "none" if self.bare else "tokenizer"}

    def framer(self, tokenizer: Tokenizer) -> sources_lib.documents.FrameFn:
        return lambda _number, ids: ids if self.bare else tokenizer.add_special_tokens(ids)

    def summary(self) -> str:
        return self.documents.summary()


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
    data, objective = config.data, config.objective
    if objective.kind == "tag":
        return sources_lib.examples.open_tagging(paths, data.encoding_errors, data.validation_fraction)
    if objective.kind == "classify":
        return sources_lib.examples.open_labeled(
            paths, data.encoding_errors, data.validation_fraction, objective.text_field, objective.label_field
        )
    return sources_lib.chat.open_chats(
        paths, data.encoding_errors, data.validation_fraction, _template(config, saved, start)
    )


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
    store: TokenStore, config: RunConfig, tokenizer: Tokenizer, *, num_held_out: int = 0, noun: str = ""
) -> TrainingData:
    """Build the dataset of an objective other than next-token and seq2seq.

    Args:
        store: The run's tokens.
        config: The run's configuration.
        tokenizer: Made the tokens.
        num_held_out: Number of examples at the end that are for validation.
        noun: Noun for one example.

    Raises:
        DataError: If there are too few tokens, or the tokenizer lacks a special token.
    """
    objective, train = config.objective, config.train
    rows = train.batch_size * train.gradient_accumulation_steps
    if objective.kind in EXAMPLE_OBJECTIVES:
        data = data_lib.example_dataset.ExampleDataset(
            store, config, num_held_out, tokenizer.special_tokens.pad or 0, noun
        )
        return (
            objectives.masked_lm.InputMaskingDataset(data, tokenizer, objective.input_mask_ratio, train.seed, rows)
            if objective.input_mask_ratio
            else data
        )
    if objective.kind == "masked-lm":
        objectives.masked_lm.require_mask_token(tokenizer)
        return objectives.masked_lm.MaskedLMDataset(
            data_lib.document_dataset.DocumentDataset(store, config),
            tokenizer,
            objective.noise_density,
            train.seed,
            rows,
        )
    assert objective.kind == "span-corruption", objective.kind
    raw = objectives.span_corruption.max_raw_length(config.data.seq_len, objective)
    documents = data_lib.document_dataset.DocumentDataset(
        store, replace(config, data=replace(config.data, seq_len=raw))
    )
    return objectives.span_corruption.SpanCorruptionDataset(
        documents, tokenizer, objective, context=config.data.seq_len, raw=raw, seed=train.seed, step_rows=rows
    )


def generation_config_for(data: TrainingData, tokenizer: Tokenizer) -> GenerationConfig:
    """Return the generation settings stored in the run's checkpoints."""
    if isinstance(data, objectives.span_corruption.SpanCorruptionDataset):
        return objectives.span_corruption.span_generation_config(data.special_tokens)
    if (
        isinstance(data, data_lib.example_dataset.ExampleDataset)
        and (end := data.turn_end()) in tokenizer.special_tokens.names().values()
    ):
        assert end is not None
        return GenerationConfig(
            eos_token_ids=(end,), pad_token_id=tokenizer.special_tokens.pad, sampling={"temperature": 1.0}
        )
    return GenerationConfig()
