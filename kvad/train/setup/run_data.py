"""Training data of a run: corpora, tokenizer, tokens and dataset, for every objective.

The differences between objectives are concentrated here; the rest of training is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from kvad import text as text_lib
from kvad.checkpoint import CheckpointHandle, GenerationConfig
from kvad.config import ModelConfig
from kvad.errors import ConfigError, DataError, UsageError, format_count
from kvad.model import Transformer
from kvad.text import Tokenizer, train_tokenizer
from kvad.train import data as data_lib
from kvad.train import monitoring, objectives
from kvad.train import sources as sources_lib
from kvad.train.config import RunConfig
from kvad.train.data import PairDataset, TokenStore, TrainingData
from kvad.train.monitoring import greedy_decode
from kvad.train.setup.dataset_factory import (
    FramedDocuments,
    build_dataset,
    generation_config_for,
    open_examples,
    special_tokens_for,
)
from kvad.train.setup.initialize import generation_config_from, load_tokenizer_from
from kvad.train.setup.objective_factory import EXAMPLE_OBJECTIVES, resolve_objective, with_head
from kvad.train.setup.prepared import PreparedData, tokenizer_matches
from kvad.train.sources import ChatCorpus, PairPaths, open_corpus, open_pairs

FRAMED_OBJECTIVES = ("masked-lm", "span-corruption")  # objectives that frame documents differently
AnyTexts = (
    sources_lib.documents.DocumentCorpus
    | sources_lib.pairs.PairCorpus
    | PreparedData
    | FramedDocuments
    | sources_lib.examples.ExampleCorpus[Any]
)
CorpusArgument = Sequence[Path] | PairPaths  # files and folders of documents, or files of pairs
MAX_NAMED_TEXTS = 8  # maximum number of texts in a message
PREPARE_HINT = "kvad data prepare RUN.toml TEXTS --out DIR"
NUM_SAMPLES = 3  # held-out sources decoded at every evaluation


def resolve_corpus(objective: str, corpus: CorpusArgument) -> CorpusArgument:
    """Interpret the named paths by objective.

    Paths alone are TSV files for seq2seq, and files of examples, whose validation files may be named too, for tag,
    classify and chat.

    Raises:
        UsageError: If pairs are named for an objective that reads documents.
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
    """Return the corpus as JSON for :func:`corpus_from_json`, with absolute paths."""
    return corpus.to_dict() if isinstance(corpus, PairPaths) else [str(path.resolve()) for path in corpus]


def corpus_from_json(content: Any) -> CorpusArgument:
    """Return the corpus from JSON."""
    return PairPaths.from_dict(content) if isinstance(content, dict) else [Path(name) for name in content]


class RunData:
    """Texts of a run; after :meth:`open`, its tokens and its dataset."""

    data: TrainingData

    def __init__(
        self,
        config: RunConfig,
        named: CorpusArgument,
        log: Callable[[str], None],
        *,
        start: CheckpointHandle | None = None,
        template: Path | None = None,
    ) -> None:
        """Open the corpora.

        Args:
            config: The run's configuration.
            named: Named texts; empty if ``data.sources`` is a mixture.
            log: Receives one line per stage.
            start: Checkpoint that the run starts from, if any.
            template: Chat only: folder of the run's own checkpoint, whose template is used on resume.

        Raises:
            DataError: If texts cannot be read.
            UsageError, ConfigError: If texts and configuration contradict each other.
        """
        if config.objective.kind == "auto":  # no model is known yet: the named texts decide
            config = resolve_objective(config, "encoder-decoder" if isinstance(named, PairPaths) else "decoder")
        self._config, self._log = config, log
        self._generation, self._start = None if start is None else generation_config_from(start), start
        kind = config.objective.kind
        self.pairs = isinstance(named, PairPaths) and kind not in EXAMPLE_OBJECTIVES
        self._special_corpus: FramedDocuments | sources_lib.examples.ExampleCorpus[Any] | PreparedData | None = None
        if kind in EXAMPLE_OBJECTIVES or kind in FRAMED_OBJECTIVES:
            _check_special(config)
            self._special_corpus = self._open_special(named, template, start)
            self._weights, self._groups = [1.0], list[list[AnyTexts]]([[self._special_corpus]])
        else:
            groups = _groups(config, named)
            self._weights = [weight for _, weight in groups]
            self._groups = [self._open_group(group) for group, _ in groups]
        for texts in self._all:
            log(texts.summary())

    def _open_special(
        self, named: CorpusArgument, template: Path | None, start: CheckpointHandle | None
    ) -> FramedDocuments | sources_lib.examples.ExampleCorpus[Any] | PreparedData:
        """Open the one corpus of an objective other than next-token and seq2seq."""
        config, data = self._config, self._config.data
        paths = [path for item in named.files for path in item] if isinstance(named, PairPaths) else list(named)
        if any(map(data_lib.token_store.is_prepared, paths)):
            held = named.held_out if isinstance(named, PairPaths) else ()
            if len(paths) > 1 or held:
                raise UsageError(
                    f"{next(filter(data_lib.token_store.is_prepared, paths))} is prepared, "
                    f"and objective {config.objective.kind} reads one corpus",
                    "Name only that folder; name validation files when preparing it.",
                )
            prepared = PreparedData(paths[0])
            prepared.check_kind(config.objective.kind)
            prepared.check_validation_split(data)
            return prepared
        if config.objective.kind in EXAMPLE_OBJECTIVES:
            assert isinstance(named, PairPaths), "resolve_corpus returned it"
            if data.file_suffixes:
                raise ConfigError(
                    "data.file_suffixes: must be empty, examples come from named files", "Leave out --suffix."
                )
            if data.document_unit == "lines":
                raise ConfigError("data.document_unit: must not be 'lines' for examples", "Leave it out.")
            return open_examples(config, named, template, start)
        assert not isinstance(named, PairPaths), "resolve_corpus returned it"
        return FramedDocuments(self._open_corpus(named, hashed=True), config.objective.kind == "span-corruption")

    @property
    def _all(self) -> list[AnyTexts]:
        return [texts for group in self._groups for texts in group]

    @property
    def _prepared(self) -> list[PreparedData]:
        return [texts for texts in self._all if isinstance(texts, PreparedData)]

    def single_corpus(
        self,
    ) -> (
        sources_lib.documents.DocumentCorpus
        | sources_lib.pairs.PairCorpus
        | FramedDocuments
        | sources_lib.examples.ExampleCorpus[Any]
    ):
        """Return the texts if they are one corpus that is not prepared; else raise UsageError."""
        (texts,) = self._all if len(self._all) == 1 else (None,)
        if texts is None or isinstance(texts, PreparedData):
            raise UsageError("only texts can be prepared, but prepared data is among the named paths", "Leave it out.")
        return texts

    def find_corrupt(self) -> list[Path]:
        """Return files of prepared data whose hashes differ from the manifest; reads all of them."""
        return [
            p.folder / name
            for p in self._prepared
            for name in data_lib.token_store.find_corrupt_files(p.folder, p.manifest)
        ]

    def make_tokenizer(self) -> Tokenizer:
        """Return the named tokenizer, that of prepared data, or one trained on all texts.

        For pairs it is trained on both sides.
        """
        options = self._config.tokenizer
        if self._prepared:
            return self._prepared_tokenizer(self._prepared)
        if options.path is not None:
            return load_tokenizer_from(options.path)
        self._log(f"tokenizer: training {options.kind}")
        default_tokens = special_tokens_for(self._config.objective.kind)
        return train_tokenizer(
            options.kind,
            (text for texts in self._all for text in _tokenizer_texts(texts)),
            vocab_size=options.vocab_size,
            min_freq=options.min_frequency,
            lower=options.lowercase,
            specials=options.special_tokens if options.special_tokens is not None else default_tokens,
            closed=options.special_tokens is None and default_tokens is not None,
        )

    def tokens_fingerprint(self, tokenizer: Tokenizer) -> str:
        """Return the fingerprint of the tokens that these texts make."""
        keys = [
            t.store.fingerprint if isinstance(t, PreparedData) else data_lib.token_store.store_fingerprint(t, tokenizer)
            for t in self._all
        ]
        return data_lib.token_store.combined_fingerprint(keys)

    def changed_sources(self, folder: Path) -> list[str]:
        """Return names of texts that changed since a run's tokens in ``folder`` were made."""
        found = []
        for number, texts in enumerate(self._all):
            if isinstance(texts, PreparedData):
                continue
            found += data_lib.token_store.find_changed_sources(self._folder(folder, number), texts)
        return found

    def open(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Encode texts into ``folder`` unless prepared or streamed; build the dataset.

        Raises:
            DataError: If there are too few tokens, or another tokenizer prepared them; nothing is written.
        """
        for prepared in self._prepared:
            named = self._config.init or self._config.tokenizer.path or "RUN"
            prepared.check(tokenizer, "the run's tokenizer is", named)
            prepared.check_tokens()
        self.fingerprint, self._vocab = self.tokens_fingerprint(tokenizer), tokenizer.vocab_size
        self._log(f"tokens: {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}")
        pad = tokenizer.special_tokens.pad or 0
        note = ""
        if self._config.data.order == "stream":
            units = [
                data_lib.streaming.stream_texts(texts, tokenizer)
                for group in self._groups
                for texts in group
                if _is_raw(texts)
            ]
            self.data = self._sequential(units, pad, "tokens: encoded while the texts are read, not stored on disk")
        elif self._special_corpus is not None:
            note = self._open_special_store(folder, self._special_corpus, tokenizer)
        elif len(self._all) == 1 and not self._prepared:
            (texts,) = self._all
            assert not isinstance(texts, PreparedData)
            _, found = self._store(folder, texts, tokenizer, lambda store: self._read([store], pad))
            note = ", found on disk" if found else ""
        else:
            stores = []
            for number, texts in enumerate(self._all):
                if isinstance(texts, PreparedData):
                    stores.append(texts.store)
                else:
                    stores.append(self._store(self._folder(folder, number), texts, tokenizer)[0])
            self._read(stores, pad)
        first, *more = self.data.summary()
        for line in (first + note, *more):
            self._log(line)

    def _store(
        self,
        folder: Path,
        texts: data_lib.token_store.TextSource,
        tokenizer: Tokenizer,
        accept: Callable[[TokenStore], None] = lambda store: None,
    ) -> tuple[TokenStore, bool]:
        """Open or write a store, reporting progress."""
        return data_lib.token_store.open_store(
            folder, texts, tokenizer, accept=accept, progress=monitoring.console.ProgressMeter(self._log)
        )

    def _open_special_store(
        self,
        folder: Path,
        texts: FramedDocuments | sources_lib.examples.ExampleCorpus[Any] | PreparedData,
        tokenizer: Tokenizer,
    ) -> str:
        num_held_out, noun = (0, "") if isinstance(texts, FramedDocuments) else (texts.num_held_out, texts.noun)

        def read(store: TokenStore) -> None:
            self.data = build_dataset(store, self._config, tokenizer, num_held_out=num_held_out, noun=noun)

        if isinstance(texts, PreparedData):
            read(texts.store)
            return ""
        return ", found on disk" if self._store(folder, texts, tokenizer, read)[1] else ""

    def describe_rows(self, rows: range) -> str:
        """Name the texts of rows of the run, with their files if each file is one text.

        Returns:
            For example "document 3 (b.txt)"; "" if the data has no provenance.
        """
        found = sorted({text for row in rows for text in data_lib.collate.row_provenance(self.data, row)})
        if not found:
            return ""
        noun = "pair" if self.pairs else "document"
        noun = (
            self._special_corpus.noun
            if isinstance(self._special_corpus, (sources_lib.examples.ExampleCorpus, PreparedData))
            else noun
        )
        if isinstance(self._special_corpus, sources_lib.examples.ExampleCorpus):
            found = [self._special_corpus.file_index(text) for text in found]
        names = [str(text + 1) for text in found]
        (texts,) = self._all if len(self._all) == 1 else (None,)
        corpus = texts.documents if isinstance(texts, FramedDocuments) else texts
        if isinstance(corpus, sources_lib.documents.DocumentCorpus) and corpus.whole_files:
            names = [f"{text + 1} ({corpus.sources[text].name})" for text in found]
        more = ", ..." * (len(names) > MAX_NAMED_TEXTS)
        return f"{noun}{'s' * (len(names) > 1)} {', '.join(names[:MAX_NAMED_TEXTS])}{more}"

    def stream_position(self) -> list[list[int]] | None:
        """Return the position of sequential data, which a checkpoint stores for :meth:`seek`."""
        return self.data.position() if isinstance(self.data, data_lib.streaming.StreamingDataset) else None

    def seek(self, position: Sequence[Sequence[int]] | None) -> None:
        if position is not None and isinstance(self.data, data_lib.streaming.StreamingDataset):
            self.data.seek(position)

    def generation(self, tokenizer: Tokenizer) -> GenerationConfig:
        """Return the generation settings of the run's checkpoints.

        A model that learns another chat template also stops at the tokens that end its turns.
        """
        if self._generation is not None:
            ends = generation_config_for(self.data, tokenizer).eos_token_ids if self.is_chat else ()
            return replace(
                self._generation,
                eos_token_ids=(
                    *self._generation.eos_token_ids,
                    *(end for end in ends if end not in self._generation.eos_token_ids),
                ),
            )
        return (
            sources_lib.pairs.pair_generation_config(tokenizer)
            if self.pairs
            else generation_config_for(self.data, tokenizer)
        )

    @property
    def is_chat(self) -> bool:
        """True if a pretrained model is trained with another chat template than its own."""
        if self._config.objective.kind != "chat" or self._start is None:
            return False
        given = isinstance(self._special_corpus, PreparedData) or self._config.objective.chat_template is not None
        return given or text_lib.chat_template.ChatTemplate.load(self._start.tokenizer_folder) is None

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of tags or texts; () for data without labels."""
        return tuple(getattr(self._special_corpus, "labels", ()))

    def extra_files(self, tokenizer: Tokenizer) -> dict[str, bytes]:
        """Return the files stored next to the model in a checkpoint: the chat template."""
        if isinstance(self._special_corpus, PreparedData):
            return self._special_corpus.template_files()
        texts = self._special_corpus.template_files(tokenizer) if isinstance(self._special_corpus, ChatCorpus) else {}
        return {name: text.encode() for name, text in texts.items()}

    def with_objective_head(self, model: ModelConfig) -> ModelConfig:
        """Return the model config with the objective's head, or raise ConfigError."""
        return with_head(model, self._config.objective.kind, self.labels)

    def sampler(
        self, model: Transformer, tokenizer: Tokenizer
    ) -> Callable[[], tuple[monitoring.callbacks.TextSample, ...]] | None:
        """Return a function that decodes the first held-out sources; None unless the data is pairs."""
        if not self.pairs or not isinstance(self.data, (PairDataset, data_lib.streaming.StreamingDataset)):
            return None
        examples, generation_config = self.data.examples(NUM_SAMPLES), self.generation(tokenizer)
        sources = [source for source, _ in examples]
        max_tokens = min(self._config.data.seq_len - 1, 8 + 2 * max(map(len, sources)))

        def sample() -> tuple[monitoring.callbacks.TextSample, ...]:
            outputs = greedy_decode(model, sources, generation_config, max_tokens)
            rows = zip(examples, outputs, strict=True)
            return tuple(
                monitoring.callbacks.TextSample(*map(tokenizer.decode, (source, target, ids)))
                for (source, target), ids in rows
            )

        return sample

    def _open_group(self, group: CorpusArgument) -> list[AnyTexts]:
        """Open a group's prepared folders, and its other texts as one corpus."""
        data = self._config.data
        stream = data.order == "stream"
        paths = [item[0] for item in group.files if len(item) == 1] if isinstance(group, PairPaths) else list(group)
        folders = [path for path in paths if data_lib.token_store.is_prepared(path)]
        if stream and folders:
            raise ConfigError(
                f"data.order: 'stream' reads texts, but {folders[0]} is prepared", 'Use order = "sequential".'
            )
        texts: list[AnyTexts] = []
        for folder in folders:
            prepared = PreparedData(folder)
            prepared.check_kind(self._config.objective.kind)
            if self.pairs:
                _check_framed(prepared, self._generation)
            texts.append(prepared)
        if isinstance(group, PairPaths):
            rest = PairPaths(tuple(item for item in group.files if item[0] not in folders), group.held_out)
            if stream and rest.held_out:
                raise ConfigError(
                    "data.order: a stream holds out a fraction of its own", "Give --validation as a fraction."
                )
            if rest.files or not texts:
                texts.append(self._open_pairs(rest, hashed=not stream))
        elif len(folders) < len(paths) or not texts:
            texts.append(self._open_corpus([path for path in paths if path not in folders], hashed=not stream))
        return texts

    def _open_pairs(self, paths: PairPaths, *, hashed: bool) -> sources_lib.pairs.PairCorpus:
        data = self._config.data
        if data.file_suffixes:
            raise ConfigError("data.file_suffixes: must be empty, pairs come from named files", "Leave out --suffix.")
        if data.document_unit == "lines":
            raise ConfigError("data.document_unit: must not be 'lines' for pairs", "Leave it out.")
        if data.format not in ("auto", "pairs", "jsonl"):
            raise ConfigError(
                f"data.format: must be 'pairs', 'jsonl' or 'auto' for pairs, got {data.format!r}", 'Use "pairs".'
            )
        if data.format == "jsonl" and all(len(item) > 1 for item in (*paths.files, *paths.held_out)):
            raise ConfigError("data.format: must be 'auto' or 'pairs' for parallel files, got 'jsonl'", 'Use "auto".')
        fields = (data.source_field, data.target_field)
        format = "jsonl" if data.format == "jsonl" else "auto"
        found = open_pairs(paths, data.encoding_errors, fields, format=format, hashed=hashed)
        return replace(found, generation=self._generation)

    def _open_corpus(self, paths: Sequence[Path], *, hashed: bool) -> sources_lib.documents.DocumentCorpus:
        data = self._config.data
        if data.format == "pairs":
            raise ConfigError(
                "data.format: 'pairs' is for an encoder-decoder, but this model reads documents", 'Use "auto".'
            )
        found = open_corpus(
            paths,
            suffixes=data.file_suffixes,
            errors=data.encoding_errors,
            lines=data.document_unit == "lines",
            format=data.format,
            field=data.text_field,
            hashed=hashed,
        )
        tables = [source.path for source in found.sources if sources_lib.formats.bare_suffix(source.path) == ".tsv"]
        if tables and data.format == "auto" and not found.one_per_line:
            more = f" (and {len(tables) - 1:,} more)" if tables[1:] else ""
            self._log(
                f"{tables[0]}{more} is read as a document; --objective seq2seq reads pairs, tag WORD<tab>TAG, "
                "classify LABEL<tab>TEXT"
            )
        return found

    def _folder(self, folder: Path, number: int) -> Path:
        return folder if len(self._all) == 1 else folder / str(number)

    def _prepared_tokenizer(self, prepared: Sequence[PreparedData]) -> Tokenizer:
        first, options = prepared[0], self._config.tokenizer
        if options.path is not None:
            first.check(load_tokenizer_from(options.path), f"{options.path} is", options.path)
        elif not tokenizer_matches(first, options):
            raise ConfigError(
                f"[tokenizer]: the tokens of {first.folder} were made by {first.tokenizer.kind} with "
                f"{format_count(first.tokenizer.vocab_size, 'token')}",
                f"Leave the table out, or prepare the texts with the run file: {PREPARE_HINT}",
            )
        for other in prepared[1:]:
            other.check(first.tokenizer, f"{first.folder / 'tokenizer'} is", first.folder)
        return first.tokenizer

    def _read(self, stores: Sequence[TokenStore], pad: int) -> None:
        """Build the dataset on these stores, those of a group one after the other."""
        config, store = self._config, TokenStore.concat(stores)
        counts = iter([part.num_documents for part in stores])
        parts, low = list[data_lib.document_dataset.MixtureSource](), 0
        for group, weight in zip(self._groups, self._weights, strict=True):
            high = low + sum(next(counts) for _ in group)
            texts_per_item = 2 if self.pairs else 1
            parts.append(
                data_lib.document_dataset.MixtureSource(
                    low // texts_per_item, high // texts_per_item, weight, self._num_held_out(group)
                )
            )
            low = high
        if config.data.order == "sequential":
            spans = [(part.first, part.last) if not self.pairs else (2 * part.first, 2 * part.last) for part in parts]
            units = [data_lib.streaming.stream_store(store, *span, pairs=self.pairs) for span in spans]
            count = format_count(store.num_documents // (2 if self.pairs else 1), "pair" if self.pairs else "document")
            self.data = self._sequential(units, pad, f"tokens: {store.num_tokens:,} in {count}")
        elif self.pairs:
            dataset_class = (
                objectives.scheduled_sampling.SampledPairDataset if config.objective.scheduled_sampling else PairDataset
            )
            self.data = dataset_class(store, config, 0, pad, parts, self._vocab)
        else:
            self.data = data_lib.document_dataset.DocumentDataset(store, config, parts, self._vocab)

    def _num_held_out(self, group: Sequence[AnyTexts]) -> int:
        held_out = [
            texts.num_held_out for texts in group if isinstance(texts, (sources_lib.pairs.PairCorpus, PreparedData))
        ]
        if len(held_out) > 1 and any(held_out):
            raise DataError("one of several sources of pairs has its own validation files", "Name only that source.")
        if any(held_out) and self._config.data.order == "sequential":
            raise ConfigError("data.order: 'sequential' holds out a fraction of its own", 'Use order = "epochs".')
        return held_out[0] if held_out else 0

    def _sequential(
        self, units: Sequence[data_lib.streaming.StreamItems], pad: int, description: str
    ) -> data_lib.streaming.StreamingDataset:
        sources = list(zip(units, self._weights, strict=True))
        return data_lib.streaming.StreamingDataset(
            sources, self._config, pad, pairs=self.pairs, description=description, vocab=self._vocab
        )


def _check_framed(prepared: PreparedData, generation: GenerationConfig | None) -> None:
    """Raise DataError if pairs are framed with other tokens than the model's.

    ``generation`` is that of the checkpoint that the run starts from; None for a new model.
    """
    default_framing = sources_lib.pairs.framing_tokens(sources_lib.pairs.pair_generation_config(prepared.tokenizer))
    if prepared.manifest.get("framed", default_framing) != (
        default_framing if generation is None else sources_lib.pairs.framing_tokens(generation)
    ):
        raise DataError(
            f"{prepared.folder} frames its pairs with other tokens than this model",
            f"Prepare them with the run file: {PREPARE_HINT}",
        )


def _is_raw(texts: AnyTexts) -> TypeGuard[sources_lib.documents.DocumentCorpus | sources_lib.pairs.PairCorpus]:
    return isinstance(texts, (sources_lib.documents.DocumentCorpus, sources_lib.pairs.PairCorpus))


def _tokenizer_texts(texts: AnyTexts) -> Iterator[str]:
    """Yield the texts that a tokenizer is trained on."""
    if isinstance(texts, sources_lib.examples.ExampleCorpus):
        yield from texts.texts()
    elif not isinstance(texts, PreparedData):
        yield from (piece.text for piece in texts.pieces())


def _check_special(config: RunConfig) -> None:
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


def _groups(config: RunConfig, named: CorpusArgument) -> list[tuple[CorpusArgument, float]]:
    """Return the named texts, or the sources of the mixture, with weights."""
    pairs = isinstance(named, PairPaths)
    has_names = bool(named.files) if isinstance(named, PairPaths) else bool(named)
    if not config.data.sources:
        return [(named, 1.0)]
    if has_names:
        raise UsageError("data.sources: already names the texts", "Leave out the texts named on the command line.")
    held_out = named.held_out if isinstance(named, PairPaths) else ()
    if held_out:
        raise UsageError("a mixture has no validation files", "Each of data.sources holds out a fraction of its own.")
    groups: list[tuple[CorpusArgument, float]] = []
    for source in config.data.sources:
        paths = [Path(path) for path in source.paths]
        groups.append((PairPaths(tuple((path,) for path in paths)) if pairs else paths, source.weight))
    return groups
