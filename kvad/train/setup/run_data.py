"""What a run is trained on, by its objective: documents, pairs, or examples of what is to be said of a text.

Everything else about training is the same for all; where they differ, it is said here.
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
from kvad.train.setup.objective_factory import EXAMPLE_OBJECTIVES as OF_EXAMPLES
from kvad.train.setup.objective_factory import resolve_objective, with_head
from kvad.train.setup.prepared import PreparedData, tokenizer_matches
from kvad.train.sources import ChatCorpus, PairPaths, open_corpus, open_pairs

FRAMED_OBJECTIVES = ("masked", "spans")  # objectives that read documents in a frame of their own
AnyTexts = (
    sources_lib.documents.DocumentCorpus
    | sources_lib.pairs.PairCorpus
    | PreparedData
    | FramedDocuments
    | sources_lib.examples.ExampleCorpus[Any]
)
CorpusArgument = Sequence[Path] | PairPaths  # what a user names: files and folders of documents, or files of pairs
MAX_NAMED_TEXTS = 8  # texts that a message names
PREPARE_HINT = "kvad data prepare RUN.toml TEXTS --out DIR"
NUM_SAMPLES = 3  # held-out sources that are answered at every evaluation


def resolve_corpus(objective: str, corpus: CorpusArgument) -> CorpusArgument:
    """What is named, as this objective reads it: paths alone are TSV files for seq2seq, and files of examples for tag,
    classify and chat, beside which others may be held out.

    Raises UsageError for pairs that are to be read as documents.
    """
    if objective == "seq2seq" or objective in OF_EXAMPLES:
        return corpus if isinstance(corpus, PairPaths) else PairPaths(tuple((path,) for path in corpus))
    if isinstance(corpus, PairPaths):
        raise UsageError(
            f"pairs are for an encoder-decoder, and objective {objective} reads documents",
            "--preset transformer-tiny is one; name documents for a decoder, and --validation as a share",
        )
    return corpus


def corpus_to_json(corpus: CorpusArgument) -> Any:
    """For :func:`from_json`, with absolute paths."""
    return corpus.to_dict() if isinstance(corpus, PairPaths) else [str(path.resolve()) for path in corpus]


def corpus_from_json(content: Any) -> CorpusArgument:
    return PairPaths.from_dict(content) if isinstance(content, dict) else [Path(name) for name in content]


class RunData:
    """The texts of a run; after :meth:`open`, its tokens and its data.  ``tell`` is given a line about each."""

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
        """``named`` is empty where ``data.sources`` names a mixture.  ``start``: what the run began with, if it was
        trained before; ``template``: of chat, the folder of the run's own checkpoint, whose template it goes on in.

        Raises DataError for what cannot be read, UsageError and ConfigError for what cannot be meant.
        """
        if config.objective.kind == "auto":  # nobody has asked the model: what is named says it
            config = resolve_objective(config, "encoder-decoder" if isinstance(named, PairPaths) else "decoder")
        self._config, self._log = config, log
        self._said, self._start = None if start is None else generation_config_from(start), start
        kind = config.objective.kind
        self.pairs = isinstance(named, PairPaths) and kind not in OF_EXAMPLES
        self._alone: FramedDocuments | sources_lib.examples.ExampleCorpus[Any] | PreparedData | None = None
        if kind in OF_EXAMPLES or kind in FRAMED_OBJECTIVES:
            _check_alone(config)
            self._alone = self._open_alone(named, template, start)
            self._weights, self._groups = [1.0], list[list[AnyTexts]]([[self._alone]])
        else:
            groups = _groups(config, named)
            self._weights = [weight for _, weight in groups]
            self._groups = [self._opened(group) for group, _ in groups]
        for texts in self._all:
            log(texts.summary())

    def _open_alone(
        self, named: CorpusArgument, template: Path | None, start: CheckpointHandle | None
    ) -> FramedDocuments | sources_lib.examples.ExampleCorpus[Any] | PreparedData:
        """The one corpus of an objective that asks other things than the next token."""
        config, data = self._config, self._config.data
        paths = [path for item in named.files for path in item] if isinstance(named, PairPaths) else list(named)
        if any(map(data_lib.token_store.is_prepared, paths)):
            held = named.held_out if isinstance(named, PairPaths) else ()
            if len(paths) > 1 or held:
                raise UsageError(
                    f"{next(filter(data_lib.token_store.is_prepared, paths))} is prepared, and objective {config.objective.kind} reads one "
                    "corpus",
                    "name it alone; files held out are named when it is prepared",
                )
            prepared = PreparedData(paths[0])
            prepared.check_kind(config.objective.kind)
            prepared.check_validation_split(data)
            return prepared
        if config.objective.kind in OF_EXAMPLES:
            assert isinstance(named, PairPaths), "named_for has looked"
            if data.file_suffixes:
                raise ConfigError("data.file_suffixes: examples come from files that are named", "leave --suffix out")
            if data.document_unit == "lines":
                raise ConfigError("data.document_unit: examples are lines anyway", "leave it out")
            return open_examples(config, named, template, start)
        assert not isinstance(named, PairPaths), "named_for has looked"
        return FramedDocuments(self._open_corpus(named, hashed=True), config.objective.kind == "spans")

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
        """The texts, where they are one corpus that is not prepared; else UsageError."""
        (texts,) = self._all if len(self._all) == 1 else (None,)
        if texts is None or isinstance(texts, PreparedData):
            raise UsageError("prepared data is among what is named, and only texts can be prepared", "leave it out")
        return texts

    def find_corrupt(self) -> list[Path]:
        """Files of prepared data that are not what their manifest says; reads all of them."""
        return [
            p.folder / name
            for p in self._prepared
            for name in data_lib.token_store.find_corrupt_files(p.folder, p.manifest)
        ]

    def make_tokenizer(self) -> Tokenizer:
        """The one that is named, or that prepared data came with, or one trained on all texts (of pairs, on both
        sides)."""
        wanted = self._config.tokenizer
        if self._prepared:
            return self._prepared_tokenizer(self._prepared)
        if wanted.path is not None:
            return load_tokenizer_from(wanted.path)
        self._log(f"tokenizer: training {wanted.kind}")
        usual = special_tokens_for(self._config.objective.kind)
        return train_tokenizer(
            wanted.kind,
            (text for texts in self._all for text in _tokenizer_texts(texts)),
            vocab_size=wanted.vocab_size,
            min_freq=wanted.min_frequency,
            lower=wanted.lowercase,
            specials=wanted.special_tokens if wanted.special_tokens is not None else usual,
            closed=wanted.special_tokens is None and usual is not None,
        )

    def tokens_fingerprint(self, tokenizer: Tokenizer) -> str:
        """The ``fingerprint`` of the tokens that these texts make."""
        keys = [
            t.store.fingerprint if isinstance(t, PreparedData) else data_lib.token_store.store_fingerprint(t, tokenizer)
            for t in self._all
        ]
        return data_lib.token_store.combined_fingerprint(keys)

    def changed_sources(self, folder: Path) -> list[str]:
        """Names of what is no longer what a run's tokens in ``folder`` were made of."""
        found = []
        for number, texts in enumerate(self._all):
            if isinstance(texts, PreparedData):
                continue
            found += data_lib.token_store.find_changed_sources(self._folder(folder, number), texts)
        return found

    def open(self, folder: Path, tokenizer: Tokenizer) -> None:
        """The texts as tokens in ``folder``, but for those that are prepared and those that are streamed.

        DataError, and nothing written, where they are too few to train on, or prepared by another tokenizer.
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
            self.data = self._sequential(units, pad, "tokens: made while the texts are read, none on the disk")
        elif self._alone is not None:
            note = self._open_fed(folder, self._alone, tokenizer)
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
        """As ``open_store``, telling how far it is."""
        return data_lib.token_store.open_store(
            folder, texts, tokenizer, accept=accept, progress=monitoring.console.ProgressMeter(self._log)
        )

    def _open_fed(
        self,
        folder: Path,
        texts: FramedDocuments | sources_lib.examples.ExampleCorpus[Any] | PreparedData,
        tokenizer: Tokenizer,
    ) -> str:
        held, noun = (0, "") if isinstance(texts, FramedDocuments) else (texts.num_held_out, texts.noun)

        def read(store: TokenStore) -> None:
            self.data = build_dataset(store, self._config, tokenizer, held=held, noun=noun)

        if isinstance(texts, PreparedData):
            read(texts.store)
            return ""
        return ", found on disk" if self._store(folder, texts, tokenizer, read)[1] else ""

    def describe_rows(self, numbers: range) -> str:
        """The texts of these rows of the run, and their files where every file is one: "document 3 (b.txt)"; "" of
        data that cannot tell."""
        found = sorted({text for number in numbers for text in data_lib.collate.row_provenance(self.data, number)})
        if not found:
            return ""
        noun = "pair" if self.pairs else "document"
        noun = self._alone.noun if isinstance(self._alone, (sources_lib.examples.ExampleCorpus, PreparedData)) else noun
        if isinstance(self._alone, sources_lib.examples.ExampleCorpus):
            found = [self._alone.file_index(text) for text in found]
        names = [str(text + 1) for text in found]
        (texts,) = self._all if len(self._all) == 1 else (None,)
        corpus = texts.documents if isinstance(texts, FramedDocuments) else texts
        if isinstance(corpus, sources_lib.documents.DocumentCorpus) and corpus.whole_files:
            names = [f"{text + 1} ({corpus.sources[text].name})" for text in found]
        return f"{noun}{'s' * (len(names) > 1)} {', '.join(names[:MAX_NAMED_TEXTS])}{', ...' * (len(names) > MAX_NAMED_TEXTS)}"

    def stream_position(self) -> list[list[int]] | None:
        """Where data that is read in its order stands; a checkpoint keeps it for :meth:`seek`."""
        return self.data.position() if isinstance(self.data, data_lib.streaming.StreamingDataset) else None

    def seek(self, position: Sequence[Sequence[int]] | None) -> None:
        if position is not None and isinstance(self.data, data_lib.streaming.StreamingDataset):
            self.data.seek(position)

    def generation(self, tokenizer: Tokenizer) -> GenerationConfig:
        """What a checkpoint says about generating; a model that goes on to talk also ends with what ends its turns."""
        if self._said is not None:
            ends = generation_config_for(self.data, tokenizer).eos_token_ids if self.is_chat else ()
            return replace(
                self._said,
                eos_token_ids=(
                    *self._said.eos_token_ids,
                    *(end for end in ends if end not in self._said.eos_token_ids),
                ),
            )
        return (
            sources_lib.pairs.pair_generation_config(tokenizer)
            if self.pairs
            else generation_config_for(self.data, tokenizer)
        )

    @property
    def is_chat(self) -> bool:
        """Whether a model that goes on is trained in another chat template than its own."""
        if self._config.objective.kind != "chat" or self._start is None:
            return False
        given = isinstance(self._alone, PreparedData) or self._config.objective.chat_template is not None
        return given or text_lib.chat_template.ChatTemplate.load(self._start.tokenizer_folder) is None

    @property
    def labels(self) -> tuple[str, ...]:
        """What a text, or a word of it, may be called; () of what has no labels."""
        return tuple(getattr(self._alone, "labels", ()))

    def extra_files(self, tokenizer: Tokenizer) -> dict[str, bytes]:
        """What lies in a checkpoint beside the model, by its name: the chat template."""
        if isinstance(self._alone, PreparedData):
            return self._alone.template_files()
        texts = self._alone.template_files(tokenizer) if isinstance(self._alone, ChatCorpus) else {}
        return {name: text.encode() for name, text in texts.items()}

    def with_objective_head(self, model: ModelConfig) -> ModelConfig:
        """The model with the head that this objective needs.  Raises ConfigError."""
        return with_head(model, self._config.objective.kind, self.labels)

    def sampler(
        self, model: Transformer, tokenizer: Tokenizer
    ) -> Callable[[], tuple[monitoring.callbacks.TextSample, ...]] | None:
        """What the model makes of the first held-out sources, whenever it is called; None of documents."""
        if not self.pairs or not isinstance(self.data, (PairDataset, data_lib.streaming.StreamingDataset)):
            return None
        examples, said = self.data.examples(NUM_SAMPLES), self.generation(tokenizer)
        sources = [source for source, _ in examples]
        most = min(self._config.data.seq_len - 1, 8 + 2 * max(map(len, sources)))

        def sample() -> tuple[monitoring.callbacks.TextSample, ...]:
            found = greedy_decode(model, sources, said, most)
            rows = zip(examples, found, strict=True)
            return tuple(
                monitoring.callbacks.TextSample(*map(tokenizer.decode, (source, target, ids)))
                for (source, target), ids in rows
            )

        return sample

    def _opened(self, group: CorpusArgument) -> list[AnyTexts]:
        """A group's prepared folders, and the rest of it as one corpus."""
        data = self._config.data
        stream = data.order == "stream"
        paths = [item[0] for item in group.files if len(item) == 1] if isinstance(group, PairPaths) else list(group)
        folders = [path for path in paths if data_lib.token_store.is_prepared(path)]
        if stream and folders:
            raise ConfigError(f"data.order: {folders[0]} is prepared, and a stream reads texts", 'order = "sequential"')
        found: list[AnyTexts] = []
        for folder in folders:
            prepared = PreparedData(folder)
            prepared.check_kind(self._config.objective.kind)
            if self.pairs:
                _check_framed(prepared, self._said)
            found.append(prepared)
        if isinstance(group, PairPaths):
            rest = PairPaths(tuple(item for item in group.files if item[0] not in folders), group.held_out)
            if stream and rest.held_out:
                raise ConfigError("data.order: a stream holds out a share of its own", "leave --validation a share")
            if rest.files or not found:
                found.append(self._open_pairs(rest, hashed=not stream))
        elif len(folders) < len(paths) or not found:
            found.append(self._open_corpus([path for path in paths if path not in folders], hashed=not stream))
        return found

    def _open_pairs(self, paths: PairPaths, *, hashed: bool) -> sources_lib.pairs.PairCorpus:
        data = self._config.data
        if data.file_suffixes:
            raise ConfigError("data.file_suffixes: pairs come from files that are named", "leave --suffix out")
        if data.document_unit == "lines":
            raise ConfigError("data.document_unit: pairs are lines anyway", "leave it out")
        if data.format not in ("auto", "pairs", "jsonl"):
            raise ConfigError(f"data.format: {data.format} is of documents, and this model reads pairs", '"pairs"')
        if data.format == "jsonl" and all(len(item) > 1 for item in (*paths.files, *paths.held_out)):
            raise ConfigError("data.format: parallel files are read by lines", '"auto"')
        fields = (data.source_field, data.target_field)
        format = "jsonl" if data.format == "jsonl" else "auto"
        found = open_pairs(paths, data.encoding_errors, fields, format=format, hashed=hashed)
        return replace(found, generation=self._said)

    def _open_corpus(self, paths: Sequence[Path], *, hashed: bool) -> sources_lib.documents.DocumentCorpus:
        data = self._config.data
        if data.format == "pairs":
            raise ConfigError("data.format: pairs are for an encoder-decoder, and this model reads documents", '"auto"')
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
                f"{tables[0]}{more} is read as a document: --objective seq2seq reads pairs, tag WORD<tab>TAG, "
                "classify LABEL<tab>TEXT"
            )
        return found

    def _folder(self, folder: Path, number: int) -> Path:
        return folder if len(self._all) == 1 else folder / str(number)

    def _prepared_tokenizer(self, prepared: Sequence[PreparedData]) -> Tokenizer:
        first, wanted = prepared[0], self._config.tokenizer
        if wanted.path is not None:
            first.check(load_tokenizer_from(wanted.path), f"{wanted.path} is", wanted.path)
        elif not tokenizer_matches(first, wanted):
            raise ConfigError(
                f"[tokenizer]: the tokens of {first.folder} are made already, by {first.tokenizer.kind} with "
                f"{format_count(first.tokenizer.vocab_size, 'token')}",
                f"leave the table out, or prepare the texts with the run file: {PREPARE_HINT}",
            )
        for other in prepared[1:]:
            other.check(first.tokenizer, f"{first.folder / 'tokenizer'} is", first.folder)
        return first.tokenizer

    def _read(self, stores: Sequence[TokenStore], pad: int) -> None:
        """The data of a run on these stores, those of a group one behind the other."""
        config, store = self._config, TokenStore.concat(stores)
        counts = iter([each.num_documents for each in stores])
        parts, low = list[data_lib.document_dataset.MixtureSource](), 0
        for group, weight in zip(self._groups, self._weights, strict=True):
            high = low + sum(next(counts) for _ in group)
            per = 2 if self.pairs else 1
            parts.append(
                data_lib.document_dataset.MixtureSource(low // per, high // per, weight, self._num_held_out(group))
            )
            low = high
        if config.data.order == "sequential":
            spans = [(part.first, part.last) if not self.pairs else (2 * part.first, 2 * part.last) for part in parts]
            units = [data_lib.streaming.stream_store(store, *span, pairs=self.pairs) for span in spans]
            count = format_count(store.num_documents // (2 if self.pairs else 1), "pair" if self.pairs else "document")
            self.data = self._sequential(units, pad, f"tokens: {store.num_tokens:,} in {count}")
        elif self.pairs:
            kind = (
                objectives.scheduled_sampling.SampledPairDataset if config.objective.scheduled_sampling else PairDataset
            )
            self.data = kind(store, config, 0, pad, parts, self._vocab)
        else:
            self.data = data_lib.document_dataset.DocumentDataset(store, config, parts, self._vocab)

    def _num_held_out(self, group: Sequence[AnyTexts]) -> int:
        held = [
            texts.num_held_out for texts in group if isinstance(texts, (sources_lib.pairs.PairCorpus, PreparedData))
        ]
        if len(held) > 1 and any(held):
            raise DataError("one of several sources of pairs has validation files of its own", "name it alone")
        if any(held) and self._config.data.order == "sequential":
            raise ConfigError("data.order: sequential holds out a share of its own", 'order = "epochs"')
        return held[0] if held else 0

    def _sequential(
        self, units: Sequence[data_lib.streaming.StreamItems], pad: int, what: str
    ) -> data_lib.streaming.StreamingDataset:
        sources = list(zip(units, self._weights, strict=True))
        return data_lib.streaming.StreamingDataset(
            sources, self._config, pad, pairs=self.pairs, what=what, vocab=self._vocab
        )


def _check_framed(prepared: PreparedData, said: GenerationConfig | None) -> None:
    """DataError where targets open, or a side ends, with other tokens than those of the model that goes on (``said``),
    or of one that begins."""
    usual = sources_lib.pairs.framing_tokens(sources_lib.pairs.pair_generation_config(prepared.tokenizer))
    if prepared.manifest.get("framed", usual) != (usual if said is None else sources_lib.pairs.framing_tokens(said)):
        raise DataError(
            f"{prepared.folder} frames its pairs for another model: other tokens open and end them",
            f"prepare them with the run file: {PREPARE_HINT}",
        )


def _is_raw(texts: AnyTexts) -> TypeGuard[sources_lib.documents.DocumentCorpus | sources_lib.pairs.PairCorpus]:
    return isinstance(texts, (sources_lib.documents.DocumentCorpus, sources_lib.pairs.PairCorpus))


def _tokenizer_texts(texts: AnyTexts) -> Iterator[str]:
    """What a tokenizer is trained on."""
    if isinstance(texts, sources_lib.examples.ExampleCorpus):
        yield from texts.texts()
    elif not isinstance(texts, PreparedData):
        yield from (piece.text for piece in texts.pieces())


def _check_alone(config: RunConfig) -> None:
    """ConfigError for what only documents and pairs can have."""
    data, kind = config.data, config.objective.kind
    if data.sources:
        raise ConfigError(f"data.sources: objective {kind} reads one corpus", "leave the mixture out")
    if data.order not in ("epochs", "windows"):
        raise ConfigError(f"data.order: {data.order} is for next-token and seq2seq", 'order = "epochs"')
    examples = kind in OF_EXAMPLES
    if (examples or kind == "spans") and not (data.reset_positions and data.isolate_documents):
        name = "isolate" if data.reset_positions else "reset"
        raise ConfigError(f"data.{name}: objective {kind} reads each text by itself", "leave it out")
    if examples and data.packing not in ("auto", "first-fit"):
        raise ConfigError(f"data.packing: {data.packing} is for documents and pairs", "whole texts go by first-fit")
    if examples and data.format != "auto":
        raise ConfigError(f"data.format: objective {kind} has a form of its own", "leave it out")
    for key, usual in (("text_field", "text"), ("source_field", "source"), ("target_field", "target")):
        if examples and getattr(data, key) != usual:
            hint = "objective.text_field and objective.label_field" if kind == "classify" else "leave it out"
            raise ConfigError(f"data.{key}: objective {kind} has no use for it", hint)


def _groups(config: RunConfig, named: CorpusArgument) -> list[tuple[CorpusArgument, float]]:
    """What is named, or the sources of the mixture with their weights."""
    pairs = isinstance(named, PairPaths)
    given = bool(named.files) if isinstance(named, PairPaths) else bool(named)
    if not config.data.sources:
        return [(named, 1.0)]
    if given:
        raise UsageError("data.sources names the texts already", "leave out what is named beside the run file")
    held = named.held_out if isinstance(named, PairPaths) else ()
    if held:
        raise UsageError("validation files are not for a mixture", "each of data.sources holds out a share of its own")
    groups: list[tuple[CorpusArgument, float]] = []
    for source in config.data.sources:
        paths = [Path(path) for path in source.paths]
        groups.append((PairPaths(tuple((path,) for path in paths)) if pairs else paths, source.weight))
    return groups
