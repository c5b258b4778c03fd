"""Texts of a run: the named files, or the sources of a mixture, opened as corpora."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvad import checkpoint, storage
from kvad.checkpoint import CheckpointHandle, GenerationConfig
from kvad.errors import ConfigError, DataError, UsageError
from kvad.text import Tokenizer, load_tokenizer
from kvad.train import data as data_lib
from kvad.train import sources as sources_lib
from kvad.train.config import RunConfig
from kvad.train.setup.objective_factory import EXAMPLE_OBJECTIVES
from kvad.train.setup.prepared import PreparedData
from kvad.train.sources import ChatCorpus, Corpus, PairPaths, open_corpus, open_pairs

DOCUMENT_FRAMES: Mapping[str, Literal["tokenizer", "none"]] = {
    "masked-lm": "tokenizer",
    "span-corruption": "none",
}  # others: "separator"
SINGLE_CORPUS_OBJECTIVES = (*EXAMPLE_OBJECTIVES, *DOCUMENT_FRAMES)
AnyTexts = Corpus | PreparedData
CorpusArgument = Sequence[Path] | PairPaths  # files and folders of documents, or files of pairs
PREPARE_HINT = "kvad data prepare RUN.toml TEXTS --out DIR"


def resolve_corpus(objective: str, corpus: CorpusArgument) -> CorpusArgument:
    """Interpret the named paths by objective; raise UsageError for pairs if it reads documents.

    Paths alone are TSV files for seq2seq, and files of examples, whose validation files may be named too, for tag,
    classify and chat.
    """
    if objective == "seq2seq" or objective in EXAMPLE_OBJECTIVES:
        return corpus if isinstance(corpus, PairPaths) else PairPaths(tuple((path,) for path in corpus))
    if isinstance(corpus, PairPaths):
        raise UsageError(
            f"pairs are for an encoder-decoder, but objective {objective} reads documents",
            "Use --preset transformer-tiny, or name documents and give --validation as a fraction.",
        )
    return corpus


def corpus_to_json(corpus: CorpusArgument) -> Any:
    """Return the corpus as JSON for ``corpus_from_json``, with absolute paths."""
    return corpus.to_dict() if isinstance(corpus, PairPaths) else [str(path.resolve()) for path in corpus]


def corpus_from_json(content: Any) -> CorpusArgument:
    """Return the corpus from JSON."""
    return PairPaths.from_dict(content) if isinstance(content, dict) else [Path(name) for name in content]


@dataclass(frozen=True)
class CorpusOpener:
    """Opens the texts of a run."""

    config: RunConfig  # with a resolved objective
    log: Callable[[str], None]  # receives notes for the user
    start: CheckpointHandle | None = None  # checkpoint that the run starts from
    template: Path | None = None  # chat: folder of the run's own checkpoint, whose template is used on resume

    def open(self, named: CorpusArgument) -> list[tuple[list[AnyTexts], float]]:
        """Return the corpora of each source with its weight; a run without a mixture has one source.

        Raises:
            DataError: If texts cannot be read.
            UsageError, ConfigError: If texts and configuration contradict each other.
        """
        sources = [(named, 1.0)]
        if self.config.objective.kind in SINGLE_CORPUS_OBJECTIVES:
            _check_single(self.config)
        elif self.config.data.sources:
            sources = _mixture(self.config, named)
        return [(self._open_source(source), weight) for source, weight in sources]

    def _open_source(self, named: CorpusArgument) -> list[AnyTexts]:
        """Open a source's prepared folders, and its other texts as one corpus."""
        kind, data = self.config.objective.kind, self.config.data
        files = [item[0] for item in named.files if len(item) == 1] if isinstance(named, PairPaths) else list(named)
        store = data_lib.token_store
        folders = [path for path in files if store.is_prepared(path) or store.has_tokens(path)]
        if folders and data.order == "stream":
            raise ConfigError(
                f"data.order: 'stream' reads texts, but {folders[0]} is prepared", 'Use order = "sequential".'
            )
        has_others = len(files) > 1 or (isinstance(named, PairPaths) and named.held_out)
        if folders and has_others and kind in SINGLE_CORPUS_OBJECTIVES:
            raise UsageError(
                f"{folders[0]} is prepared, and objective {kind} reads one corpus",
                "Name only that folder; name validation files when preparing it.",
            )
        texts: list[AnyTexts] = []
        for folder in folders:
            prepared = PreparedData(folder)
            prepared.check_kind(kind)
            prepared.check_validation_split(data)
            if kind == "seq2seq":
                _check_framed(prepared, self._generation)
            texts.append(prepared)
        if isinstance(named, PairPaths):
            rest = PairPaths(tuple(item for item in named.files if item[0] not in folders), named.held_out)
            if rest.files or not texts:
                texts.append(self._open_examples(rest) if kind in EXAMPLE_OBJECTIVES else self._open_pairs(rest))
        elif len(folders) < len(files) or not texts:
            texts.append(self._open_documents([path for path in files if path not in folders]))
        return texts

    @property
    def _generation(self) -> GenerationConfig | None:
        return None if self.start is None else generation_config_from(self.start)

    def _check_named_files(self, noun: str) -> None:
        """Raise ConfigError for options that select files or split them into documents."""
        data = self.config.data
        if data.file_suffixes:
            raise ConfigError(f"data.file_suffixes: must be empty, {noun} come from named files", "Leave out --suffix.")
        if data.document_unit == "lines":
            raise ConfigError(f"data.document_unit: must not be 'lines' for {noun}", "Leave it out.")

    def _open_pairs(self, paths: PairPaths) -> sources_lib.pairs.PairCorpus:
        data = self.config.data
        if data.order == "stream" and paths.held_out:
            raise ConfigError(
                "data.order: a stream holds out a fraction of its own", "Give --validation as a fraction."
            )
        self._check_named_files("pairs")
        if data.format not in ("auto", "pairs", "jsonl"):
            raise ConfigError(
                f"data.format: must be 'pairs', 'jsonl' or 'auto' for pairs, got {data.format!r}", 'Use "pairs".'
            )
        if data.format == "jsonl" and all(len(item) > 1 for item in paths.items):
            raise ConfigError("data.format: must be 'auto' or 'pairs' for parallel files, got 'jsonl'", 'Use "auto".')
        fields = (data.source_field, data.target_field)
        format = "jsonl" if data.format == "jsonl" else "auto"
        corpus = open_pairs(paths, data.encoding_errors, fields, format=format, hashed=data.order != "stream")
        return replace(corpus, generation=self._generation)

    def _open_documents(self, paths: Sequence[Path]) -> sources_lib.documents.DocumentCorpus:
        data = self.config.data
        if data.format == "pairs":
            raise ConfigError(
                "data.format: 'pairs' is for an encoder-decoder, but this model reads documents", 'Use "auto".'
            )
        corpus = open_corpus(
            paths,
            suffixes=data.file_suffixes,
            errors=data.encoding_errors,
            lines=data.document_unit == "lines",
            format=data.format,
            field=data.text_field,
            hashed=data.order != "stream",
        )
        tables = [source.path for source in corpus.sources if sources_lib.formats.bare_suffix(source.path) == ".tsv"]
        if tables and data.format == "auto" and not corpus.one_per_line:
            more = f" (and {len(tables) - 1:,} more)" if tables[1:] else ""
            self.log(
                f"{tables[0]}{more} is read as a document; --objective seq2seq reads pairs, tag WORD<tab>TAG, "
                "classify LABEL<tab>TEXT"
            )
        return replace(corpus, frame=DOCUMENT_FRAMES.get(self.config.objective.kind, "separator"))

    def _open_examples(self, paths: PairPaths) -> sources_lib.examples.ExampleCorpus[Any]:
        """Open the examples of objective tag, classify or chat."""
        self._check_named_files("examples")
        examples = sources_lib.examples
        errors, objective = self.config.data.encoding_errors, self.config.objective
        corpus: examples.ExampleCorpus[Any]
        if objective.kind == "tag":
            corpus = examples.TagCorpus(errors=errors)
        elif objective.kind == "classify":
            text_field, label_field = objective.text_field, objective.label_field
            corpus = examples.LabeledCorpus(errors=errors, text_field=text_field, label_field=label_field)
        else:
            corpus = ChatCorpus(errors=errors, template=self._chat_template())
        return corpus.open(paths, self.config.data.validation_fraction)

    def _chat_template(self) -> sources_lib.chat.ChatTemplate:
        """Return the chat template of run, named file, initial model or tokenizer, or ChatML."""
        chat = sources_lib.chat
        if self.template is not None and (template := chat.ChatTemplate.load(self.template)) is not None:
            return template
        template_file, tokenizer = self.config.objective.chat_template, self.config.tokenizer.path
        if template_file is not None:
            try:
                return chat.ChatTemplate(storage.filesystem.read_text(Path(template_file)))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"objective.chat_template: cannot read {template_file}: {error}") from error
        if self.start is not None:
            own = chat.ChatTemplate.load(self.start.tokenizer_folder)
            return own or chat.ChatTemplate(chat.chatml(self.start.tokenizer))
        if tokenizer is None:
            return chat.ChatTemplate(chat.CHATML)
        folder = Path(tokenizer) / data_lib.token_store.TEMPLATE
        if not (data_lib.token_store.is_prepared(Path(tokenizer)) and folder.is_dir()):
            folder = tokenizer_path(tokenizer)
        template = chat.ChatTemplate.load(folder if folder.is_dir() else folder.parent)
        if template is None:
            raise ConfigError(
                f"objective.chat_template: {tokenizer} has no chat template",
                "Name one: --set objective.chat_template=FILE",
            )
        return template


def _check_framed(prepared: PreparedData, generation: GenerationConfig | None) -> None:
    """Raise DataError if pairs are framed with other tokens than those of ``generation`` (None: a new model)."""
    framing = sources_lib.pairs.framing_tokens(sources_lib.pairs.pair_generation_config(prepared.tokenizer))
    required = framing if generation is None else sources_lib.pairs.framing_tokens(generation)
    if prepared.manifest.get("framed", framing) != required:
        raise DataError(
            f"{prepared.folder} frames its pairs with other tokens than this model",
            f"Prepare them with the run file: {PREPARE_HINT}",
        )


def _check_single(config: RunConfig) -> None:
    """Raise ConfigError for options that only documents and pairs can have."""
    data, kind = config.data, config.objective.kind
    if data.sources:
        raise ConfigError(f"data.sources: must be empty, objective {kind} reads one corpus", "Leave the mixture out.")
    if data.order not in ("epochs", "windows"):
        raise ConfigError(f"data.order: {data.order!r} is for next-token and seq2seq only", 'Use order = "epochs".')
    examples = kind in EXAMPLE_OBJECTIVES
    if (examples or kind == "span-corruption") and not (data.reset_positions and data.isolate_documents):
        name = "isolate_documents" if data.reset_positions else "reset_positions"
        raise ConfigError(f"data.{name}: objective {kind} reads each text by itself", "Leave it out.")
    if examples and data.packing not in ("auto", "first-fit"):
        raise ConfigError(
            f"data.packing: {data.packing} is for documents and pairs", "Whole texts are packed by first-fit."
        )
    if examples and data.format != "auto":
        raise ConfigError(f"data.format: objective {kind} has its own format", "Leave it out.")
    for key, default in (("text_field", "text"), ("source_field", "source"), ("target_field", "target")):
        if examples and getattr(data, key) != default:
            hint = "Use objective.text_field and objective.label_field." if kind == "classify" else "Leave it out."
            raise ConfigError(f"data.{key}: objective {kind} has no use for it", hint)


def _mixture(config: RunConfig, named: CorpusArgument) -> list[tuple[CorpusArgument, float]]:
    """Return the sources of the mixture with weights; raise UsageError if texts are named too."""
    if named.files if isinstance(named, PairPaths) else named:
        raise UsageError("data.sources: already names the texts", "Leave out the texts named on the command line.")
    if isinstance(named, PairPaths) and named.held_out:
        raise UsageError("a mixture has no validation files", "Each of data.sources holds out a fraction of its own.")
    mixture, kind = config.data.sources, config.objective.kind
    return [(resolve_corpus(kind, [Path(path) for path in source.paths]), source.weight) for source in mixture]


def generation_config_from(opened: CheckpointHandle) -> GenerationConfig:
    """Return a checkpoint's generation settings; a missing decoder start token is the BOS token."""
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
    folder = tokenizer_path(path)
    if checkpoint.folder.is_model(folder):
        checkpoint.folder.check_text(folder, checkpoint.folder.list_files(folder))
    return load_tokenizer(folder)
