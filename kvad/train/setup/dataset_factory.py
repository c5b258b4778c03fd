"""What each objective reads: its corpus, the special tokens that it needs, its data, and how its model generates."""

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
    ("spans", ("eos", "pad", "unk", *objectives.span_corruption.SENTINELS)),
    ("chat", ("pad", "unk", *sources_lib.chat.CHATML_TOKENS)),
    *((kind, _ENCODER) for kind in ("masked", "tag", "classify")),
)


def special_tokens_for(kind: str) -> tuple[str, ...] | None:
    """Special tokens of a tokenizer that is trained for objective ``kind``; None: the usual ones."""
    return dict(_SPECIALS).get(kind)


@dataclass(frozen=True)
class FramedDocuments:
    """Documents that no separator opens: in the tokenizer's own frame ([CLS] x [SEP]), as encoders read them, or
    ``bare``, as spans are cut out of them."""

    documents: sources_lib.documents.DocumentCorpus
    bare: bool

    @property
    def sources(self) -> tuple[sources_lib.documents.CorpusFile, ...]:
        return self.documents.sources

    def texts(self) -> Iterator[str]:
        return self.documents.texts()

    def pieces(self) -> Iterator[sources_lib.formats.TextPiece]:
        """Documents whole: a frame stands around all of one."""
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
    """The examples of objective tag, classify or chat.  ``saved``: the folder of the run's own checkpoint, whose chat
    template it goes on in; ``start``: the model that a run begins with.

    Raises DataError naming file and line.
    """
    data, wanted = config.data, config.objective
    if wanted.kind == "tag":
        return sources_lib.examples.open_tagging(paths, data.encoding_errors, data.validation_fraction)
    if wanted.kind == "classify":
        return sources_lib.examples.open_labeled(
            paths, data.encoding_errors, data.validation_fraction, wanted.text_field, wanted.label_field
        )
    return sources_lib.chat.open_chats(
        paths, data.encoding_errors, data.validation_fraction, _template(config, saved, start)
    )


def _template(config: RunConfig, saved: Path | None, start: CheckpointHandle | None) -> text.chat_template.ChatTemplate:
    """Of the run that goes on, of the file that is named, of the model that it began with or of the tokenizer's folder,
    or ChatML."""
    found = None if saved is None else text.chat_template.ChatTemplate.load(saved)
    if found is not None:
        return found
    wanted, tokenizer = config.objective.chat_template, config.tokenizer.path
    if wanted is not None:
        try:
            return text.chat_template.ChatTemplate(Path(wanted).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"objective.chat_template: cannot read {wanted}: {error}") from error
    if start is not None:
        found = text.chat_template.ChatTemplate.load(start.tokenizer_folder)
        return text.chat_template.ChatTemplate(sources_lib.chat.chatml(start.tokenizer)) if found is None else found
    if tokenizer is None:
        return text.chat_template.ChatTemplate(sources_lib.chat.CHATML)
    beside = Path(tokenizer) / data_lib.token_store.TEMPLATE
    folder = (
        beside if data_lib.token_store.is_prepared(Path(tokenizer)) and beside.is_dir() else tokenizer_path(tokenizer)
    )
    found = text.chat_template.ChatTemplate.load(folder if folder.is_dir() else folder.parent)
    if found is None:
        raise ConfigError(
            f"there is no chat template beside {tokenizer}", "name one: --set objective.chat_template=FILE"
        )
    return found


def build_dataset(
    store: TokenStore, config: RunConfig, tokenizer: Tokenizer, *, held: int = 0, noun: str = ""
) -> TrainingData:
    """The tokens of a run as an objective other than the next token reads them.  ``held``: of examples, how many of the
    last ones are for validation; ``noun``: what one is called.

    DataError where they are too few, or of another tokenizer than the objective needs."""
    wanted, train = config.objective, config.train
    rows = train.batch_size * train.gradient_accumulation_steps
    if wanted.kind in EXAMPLE_OBJECTIVES:
        data = data_lib.example_dataset.ExampleDataset(store, config, held, tokenizer.special_tokens.pad or 0, noun)
        return (
            objectives.masked_lm.InputMaskingDataset(data, tokenizer, wanted.input_mask_ratio, train.seed, rows)
            if wanted.input_mask_ratio
            else data
        )
    if wanted.kind == "masked":
        objectives.masked_lm.require_mask_token(tokenizer)
        return objectives.masked_lm.MaskedLMDataset(
            data_lib.document_dataset.DocumentDataset(store, config), tokenizer, wanted.noise_density, train.seed, rows
        )
    assert wanted.kind == "spans", wanted.kind
    raw = objectives.span_corruption.max_raw_length(config.data.seq_len, wanted)
    documents = data_lib.document_dataset.DocumentDataset(
        store, replace(config, data=replace(config.data, seq_len=raw))
    )
    return objectives.span_corruption.SpanCorruptionDataset(
        documents, tokenizer, wanted, context=config.data.seq_len, raw=raw, seed=train.seed, step_rows=rows
    )


def generation_config_for(data: TrainingData, tokenizer: Tokenizer) -> GenerationConfig:
    """What a checkpoint says about generating."""
    if isinstance(data, objectives.span_corruption.SpanCorruptionDataset):
        return objectives.span_corruption.span_generation_config(data.speech)
    if (
        isinstance(data, data_lib.example_dataset.ExampleDataset)
        and (end := data.turn_end()) in tokenizer.special_tokens.names().values()
    ):
        assert end is not None
        return GenerationConfig(
            eos_token_ids=(end,), pad_token_id=tokenizer.special_tokens.pad, sampling={"temperature": 1.0}
        )
    return GenerationConfig()
