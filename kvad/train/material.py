"""What a run is trained on, by its objective: documents, pairs, or examples of what is to be said of a text.

Everything else about training is the same for all; where they differ, it is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from kvad.checkpoint.generation import Generation
from kvad.checkpoint.opened import Opened
from kvad.config import ModelConfig
from kvad.errors import ConfigError, DataError, UsageError, counted
from kvad.model.transformer import Transformer
from kvad.text.chat import ChatTemplate
from kvad.text.tokenizer import Tokenizer, train_tokenizer
from kvad.train.chats import ChatCorpus
from kvad.train.config import RunConfig
from kvad.train.corpus import Corpus, open_corpus
from kvad.train.data import DocumentData, Part, TrainingData
from kvad.train.examples import ExampleCorpus
from kvad.train.feeds import FramedCorpus, feed, generation_for, open_examples, roles_for
from kvad.train.objectives import EXAMPLES as OF_EXAMPLES
from kvad.train.objectives import fitting, headed
from kvad.train.pair_data import PairData
from kvad.train.pairs import PairCorpus, PairPaths, framed_by, generation_of, open_pairs
from kvad.train.prepared import Prepared, asked_for
from kvad.train.progress import Meter
from kvad.train.readers import bare_suffix
from kvad.train.reports import Sample
from kvad.train.rows import texts_of
from kvad.train.samples import greedy
from kvad.train.sampling import SampledPairs
from kvad.train.start import said_by, tokenizer_at
from kvad.train.store import (
    Texts,
    TokenStore,
    changed_sources,
    damaged_files,
    is_prepared,
    joined_key,
    open_store,
    store_key,
)
from kvad.train.stream import SequentialData, Units, units_of_store, units_of_texts

__all__ = ["Material", "Named", "as_json", "from_json", "named_for"]

FRAMED = ("masked", "spans")  # objectives that read documents in a frame of their own
AnyTexts = Corpus | PairCorpus | Prepared | FramedCorpus | ExampleCorpus[Any]
Named = Sequence[Path] | PairPaths  # what a user names: files and folders of documents, or files of pairs
NAMED = 8  # texts that a message names
BY_RUN_FILE = "kvad data prepare RUN.toml TEXTS --out DIR"
EXAMPLES = 3  # held-out sources that are answered at every evaluation


def named_for(objective: str, corpus: Named) -> Named:
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


def as_json(corpus: Named) -> Any:
    """For :func:`from_json`, with absolute paths."""
    return corpus.to_dict() if isinstance(corpus, PairPaths) else [str(path.resolve()) for path in corpus]


def from_json(content: Any) -> Named:
    return PairPaths.from_dict(content) if isinstance(content, dict) else [Path(name) for name in content]


class Material:
    """The texts of a run; after :meth:`open`, its tokens and its data.  ``tell`` is given a line about each."""

    data: TrainingData

    def __init__(
        self,
        config: RunConfig,
        named: Named,
        tell: Callable[[str], None],
        *,
        start: Opened | None = None,
        template: Path | None = None,
    ) -> None:
        """``named`` is empty where ``data.sources`` names a mixture.  ``start``: what the run began with, if it was
        trained before; ``template``: of chat, the folder of the run's own checkpoint, whose template it goes on in.

        Raises DataError for what cannot be read, UsageError and ConfigError for what cannot be meant.
        """
        if config.objective.kind == "auto":  # nobody has asked the model: what is named says it
            config = fitting(config, "encoder-decoder" if isinstance(named, PairPaths) else "decoder")
        self._config, self._tell = config, tell
        self._said, self._start = None if start is None else said_by(start), start
        kind = config.objective.kind
        self.pairs = isinstance(named, PairPaths) and kind not in OF_EXAMPLES
        self._alone: FramedCorpus | ExampleCorpus[Any] | Prepared | None = None
        if kind in OF_EXAMPLES or kind in FRAMED:
            _check_alone(config)
            self._alone = self._open_alone(named, template, start)
            self._weights, self._groups = [1.0], list[list[AnyTexts]]([[self._alone]])
        else:
            groups = _groups(config, named)
            self._weights = [weight for _, weight in groups]
            self._groups = [self._opened(group) for group, _ in groups]
        for texts in self._all:
            tell(texts.told())

    def _open_alone(
        self, named: Named, template: Path | None, start: Opened | None
    ) -> FramedCorpus | ExampleCorpus[Any] | Prepared:
        """The one corpus of an objective that asks other things than the next token."""
        config, data = self._config, self._config.data
        paths = [path for item in named.files for path in item] if isinstance(named, PairPaths) else list(named)
        if any(map(is_prepared, paths)):
            held = named.held if isinstance(named, PairPaths) else ()
            if len(paths) > 1 or held:
                raise UsageError(
                    f"{next(filter(is_prepared, paths))} is prepared, and objective {config.objective.kind} reads one "
                    "corpus",
                    "name it alone; files held out are named when it is prepared",
                )
            prepared = Prepared(paths[0])
            prepared.check_kind(config.objective.kind)
            prepared.check_held(data)
            return prepared
        if config.objective.kind in OF_EXAMPLES:
            assert isinstance(named, PairPaths), "named_for has looked"
            if data.suffixes:
                raise ConfigError("data.suffixes: examples come from files that are named", "leave --suffix out")
            if data.documents == "lines":
                raise ConfigError("data.documents: examples are lines anyway", "leave it out")
            return open_examples(config, named, template, start)
        assert not isinstance(named, PairPaths), "named_for has looked"
        return FramedCorpus(self._open_corpus(named, hashed=True), config.objective.kind == "spans")

    @property
    def _all(self) -> list[AnyTexts]:
        return [texts for group in self._groups for texts in group]

    @property
    def _prepared(self) -> list[Prepared]:
        return [texts for texts in self._all if isinstance(texts, Prepared)]

    def only(self) -> Corpus | PairCorpus | FramedCorpus | ExampleCorpus[Any]:
        """The texts, where they are one corpus that is not prepared; else UsageError."""
        (texts,) = self._all if len(self._all) == 1 else (None,)
        if texts is None or isinstance(texts, Prepared):
            raise UsageError("prepared data is among what is named, and only texts can be prepared", "leave it out")
        return texts

    def damaged(self) -> list[Path]:
        """Files of prepared data that are not what their manifest says; reads all of them."""
        return [p.folder / name for p in self._prepared for name in damaged_files(p.folder, p.manifest)]

    def make_tokenizer(self) -> Tokenizer:
        """The one that is named, or that prepared data came with, or one trained on all texts (of pairs, on both
        sides)."""
        wanted = self._config.tokenizer
        if self._prepared:
            return self._tokenizer_of(self._prepared)
        if wanted.path is not None:
            return tokenizer_at(wanted.path)
        self._tell(f"tokenizer: training {wanted.kind}")
        usual = roles_for(self._config.objective.kind)
        return train_tokenizer(
            wanted.kind,
            (text for texts in self._all for text in _texts_of(texts)),
            vocab_size=wanted.vocab_size,
            min_freq=wanted.min_freq,
            lower=wanted.lower,
            specials=wanted.specials if wanted.specials is not None else usual,
            closed=wanted.specials is None and usual is not None,
        )

    def key(self, tokenizer: Tokenizer) -> str:
        """The ``fingerprint`` of the tokens that these texts make."""
        keys = [t.store.fingerprint if isinstance(t, Prepared) else store_key(t, tokenizer) for t in self._all]
        return joined_key(keys)

    def changed(self, folder: Path) -> list[str]:
        """Names of what is no longer what a run's tokens in ``folder`` were made of."""
        found = []
        for number, texts in enumerate(self._all):
            if isinstance(texts, Prepared):
                continue
            found += changed_sources(self._folder(folder, number), texts)
        return found

    def open(self, folder: Path, tokenizer: Tokenizer) -> None:
        """The texts as tokens in ``folder``, but for those that are prepared and those that are streamed.

        DataError, and nothing written, where they are too few to train on, or prepared by another tokenizer.
        """
        for prepared in self._prepared:
            named = self._config.init or self._config.tokenizer.path or "RUN"
            prepared.check(tokenizer, "the run's tokenizer is", named)
            prepared.check_tokens()
        self.fingerprint, self._vocab = self.key(tokenizer), tokenizer.vocab_size
        self._tell(f"tokens: {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}")
        pad = tokenizer.specials.pad or 0
        note = ""
        if self._config.data.order == "stream":
            units = [units_of_texts(texts, tokenizer) for group in self._groups for texts in group if _is_raw(texts)]
            self.data = self._sequential(units, pad, "tokens: made while the texts are read, none on the disk")
        elif self._alone is not None:
            note = self._open_fed(folder, self._alone, tokenizer)
        elif len(self._all) == 1 and not self._prepared:
            (texts,) = self._all
            assert not isinstance(texts, Prepared)
            _, found = self._store(folder, texts, tokenizer, lambda store: self._read([store], pad))
            note = ", found on disk" if found else ""
        else:
            stores = []
            for number, texts in enumerate(self._all):
                if isinstance(texts, Prepared):
                    stores.append(texts.store)
                else:
                    stores.append(self._store(self._folder(folder, number), texts, tokenizer)[0])
            self._read(stores, pad)
        first, *more = self.data.told()
        for line in (first + note, *more):
            self._tell(line)

    def _store(
        self,
        folder: Path,
        texts: Texts,
        tokenizer: Tokenizer,
        accept: Callable[[TokenStore], None] = lambda store: None,
    ) -> tuple[TokenStore, bool]:
        """As ``open_store``, telling how far it is."""
        return open_store(folder, texts, tokenizer, accept=accept, progress=Meter(self._tell))

    def _open_fed(self, folder: Path, texts: FramedCorpus | ExampleCorpus[Any] | Prepared, tokenizer: Tokenizer) -> str:
        held, noun = (0, "") if isinstance(texts, FramedCorpus) else (texts.num_held, texts.noun)

        def read(store: TokenStore) -> None:
            self.data = feed(store, self._config, tokenizer, held=held, noun=noun)

        if isinstance(texts, Prepared):
            read(texts.store)
            return ""
        return ", found on disk" if self._store(folder, texts, tokenizer, read)[1] else ""

    def whence(self, numbers: range) -> str:
        """The texts of these rows of the run, and their files where every file is one: "document 3 (b.txt)"; "" of
        data that cannot tell."""
        found = sorted({text for number in numbers for text in texts_of(self.data, number)})
        if not found:
            return ""
        noun = "pair" if self.pairs else "document"
        noun = self._alone.noun if isinstance(self._alone, (ExampleCorpus, Prepared)) else noun
        if isinstance(self._alone, ExampleCorpus):
            found = [self._alone.in_files(text) for text in found]
        names = [str(text + 1) for text in found]
        (texts,) = self._all if len(self._all) == 1 else (None,)
        corpus = texts.documents if isinstance(texts, FramedCorpus) else texts
        if isinstance(corpus, Corpus) and corpus.whole_files:
            names = [f"{text + 1} ({corpus.sources[text].name})" for text in found]
        return f"{noun}{'s' * (len(names) > 1)} {', '.join(names[:NAMED])}{', ...' * (len(names) > NAMED)}"

    def position(self) -> list[list[int]] | None:
        """Where data that is read in its order stands; a checkpoint keeps it for :meth:`seek`."""
        return self.data.position() if isinstance(self.data, SequentialData) else None

    def seek(self, position: Sequence[Sequence[int]] | None) -> None:
        if position is not None and isinstance(self.data, SequentialData):
            self.data.seek(position)

    def generation(self, tokenizer: Tokenizer) -> Generation:
        """What a checkpoint says about generating; a model that goes on to talk also ends with what ends its turns."""
        if self._said is not None:
            ends = generation_for(self.data, tokenizer).stops if self.talks else ()
            return replace(self._said, stops=(*self._said.stops, *(end for end in ends if end not in self._said.stops)))
        return generation_of(tokenizer) if self.pairs else generation_for(self.data, tokenizer)

    @property
    def talks(self) -> bool:
        """Whether a model that goes on is trained in another chat template than its own."""
        if self._config.objective.kind != "chat" or self._start is None:
            return False
        given = isinstance(self._alone, Prepared) or self._config.objective.template is not None
        return given or ChatTemplate.load(self._start.words) is None

    @property
    def labels(self) -> tuple[str, ...]:
        """What a text, or a word of it, may be called; () of what has no labels."""
        return tuple(getattr(self._alone, "labels", ()))

    def files(self, tokenizer: Tokenizer) -> dict[str, bytes]:
        """What lies in a checkpoint beside the model, by its name: the chat template."""
        if isinstance(self._alone, Prepared):
            return self._alone.template_files()
        texts = self._alone.template_files(tokenizer) if isinstance(self._alone, ChatCorpus) else {}
        return {name: text.encode() for name, text in texts.items()}

    def shaped(self, model: ModelConfig) -> ModelConfig:
        """The model with the head that this objective needs.  Raises ConfigError."""
        return headed(model, self._config.objective.kind, self.labels)

    def sampler(self, model: Transformer, tokenizer: Tokenizer) -> Callable[[], tuple[Sample, ...]] | None:
        """What the model makes of the first held-out sources, whenever it is called; None of documents."""
        if not self.pairs or not isinstance(self.data, (PairData, SequentialData)):
            return None
        examples, said = self.data.examples(EXAMPLES), self.generation(tokenizer)
        sources = [source for source, _ in examples]
        most = min(self._config.data.context - 1, 8 + 2 * max(map(len, sources)))

        def sample() -> tuple[Sample, ...]:
            found = greedy(model, sources, said, most)
            rows = zip(examples, found, strict=True)
            return tuple(Sample(*map(tokenizer.decode, (source, target, ids))) for (source, target), ids in rows)

        return sample

    def _opened(self, group: Named) -> list[AnyTexts]:
        """A group's prepared folders, and the rest of it as one corpus."""
        data = self._config.data
        stream = data.order == "stream"
        paths = [item[0] for item in group.files if len(item) == 1] if isinstance(group, PairPaths) else list(group)
        folders = [path for path in paths if is_prepared(path)]
        if stream and folders:
            raise ConfigError(f"data.order: {folders[0]} is prepared, and a stream reads texts", 'order = "sequential"')
        found: list[AnyTexts] = []
        for folder in folders:
            prepared = Prepared(folder)
            prepared.check_kind(self._config.objective.kind)
            if self.pairs:
                _check_framed(prepared, self._said)
            found.append(prepared)
        if isinstance(group, PairPaths):
            rest = PairPaths(tuple(item for item in group.files if item[0] not in folders), group.held)
            if stream and rest.held:
                raise ConfigError("data.order: a stream holds out a share of its own", "leave --validation a share")
            if rest.files or not found:
                found.append(self._open_pairs(rest, hashed=not stream))
        elif len(folders) < len(paths) or not found:
            found.append(self._open_corpus([path for path in paths if path not in folders], hashed=not stream))
        return found

    def _open_pairs(self, paths: PairPaths, *, hashed: bool) -> PairCorpus:
        data = self._config.data
        if data.suffixes:
            raise ConfigError("data.suffixes: pairs come from files that are named", "leave --suffix out")
        if data.documents == "lines":
            raise ConfigError("data.documents: pairs are lines anyway", "leave it out")
        if data.format not in ("auto", "pairs", "jsonl"):
            raise ConfigError(f"data.format: {data.format} is of documents, and this model reads pairs", '"pairs"')
        if data.format == "jsonl" and all(len(item) > 1 for item in (*paths.files, *paths.held)):
            raise ConfigError("data.format: parallel files are read by lines", '"auto"')
        fields = (data.source_field, data.target_field)
        format = "jsonl" if data.format == "jsonl" else "auto"
        found = open_pairs(paths, data.errors, fields, format=format, hashed=hashed)
        return replace(found, said=self._said)

    def _open_corpus(self, paths: Sequence[Path], *, hashed: bool) -> Corpus:
        data = self._config.data
        if data.format == "pairs":
            raise ConfigError("data.format: pairs are for an encoder-decoder, and this model reads documents", '"auto"')
        found = open_corpus(
            paths,
            suffixes=data.suffixes,
            errors=data.errors,
            lines=data.documents == "lines",
            format=data.format,
            field=data.field,
            hashed=hashed,
        )
        tables = [source.path for source in found.sources if bare_suffix(source.path) == ".tsv"]
        if tables and data.format == "auto" and not found.lines:
            more = f" (and {len(tables) - 1:,} more)" if tables[1:] else ""
            self._tell(
                f"{tables[0]}{more} is read as a document: --objective seq2seq reads pairs, tag WORD<tab>TAG, "
                "classify LABEL<tab>TEXT"
            )
        return found

    def _folder(self, folder: Path, number: int) -> Path:
        return folder if len(self._all) == 1 else folder / str(number)

    def _tokenizer_of(self, prepared: Sequence[Prepared]) -> Tokenizer:
        first, wanted = prepared[0], self._config.tokenizer
        if wanted.path is not None:
            first.check(tokenizer_at(wanted.path), f"{wanted.path} is", wanted.path)
        elif not asked_for(first, wanted):
            raise ConfigError(
                f"[tokenizer]: the tokens of {first.folder} are made already, by {first.tokenizer.kind} with "
                f"{counted(first.tokenizer.vocab_size, 'token')}",
                f"leave the table out, or prepare the texts with the run file: {BY_RUN_FILE}",
            )
        for other in prepared[1:]:
            other.check(first.tokenizer, f"{first.folder / 'tokenizer'} is", first.folder)
        return first.tokenizer

    def _read(self, stores: Sequence[TokenStore], pad: int) -> None:
        """The data of a run on these stores, those of a group one behind the other."""
        config, store = self._config, TokenStore.joined(stores)
        counts = iter([each.num_documents for each in stores])
        parts, low = list[Part](), 0
        for group, weight in zip(self._groups, self._weights, strict=True):
            high = low + sum(next(counts) for _ in group)
            per = 2 if self.pairs else 1
            parts.append(Part(low // per, high // per, weight, self._held_of(group)))
            low = high
        if config.data.order == "sequential":
            spans = [(part.first, part.last) if not self.pairs else (2 * part.first, 2 * part.last) for part in parts]
            units = [units_of_store(store, *span, pairs=self.pairs) for span in spans]
            count = counted(store.num_documents // (2 if self.pairs else 1), "pair" if self.pairs else "document")
            self.data = self._sequential(units, pad, f"tokens: {store.num_tokens:,} in {count}")
        elif self.pairs:
            kind = SampledPairs if config.objective.sampling else PairData
            self.data = kind(store, config, 0, pad, parts, self._vocab)
        else:
            self.data = DocumentData(store, config, parts, self._vocab)

    def _held_of(self, group: Sequence[AnyTexts]) -> int:
        held = [texts.num_held for texts in group if isinstance(texts, (PairCorpus, Prepared))]
        if len(held) > 1 and any(held):
            raise DataError("one of several sources of pairs has validation files of its own", "name it alone")
        if any(held) and self._config.data.order == "sequential":
            raise ConfigError("data.order: sequential holds out a share of its own", 'order = "epochs"')
        return held[0] if held else 0

    def _sequential(self, units: Sequence[Units], pad: int, what: str) -> SequentialData:
        sources = list(zip(units, self._weights, strict=True))
        return SequentialData(sources, self._config, pad, pairs=self.pairs, what=what, vocab=self._vocab)


def _check_framed(prepared: Prepared, said: Generation | None) -> None:
    """DataError where targets open, or a side ends, with other tokens than those of the model that goes on (``said``),
    or of one that begins."""
    usual = framed_by(generation_of(prepared.tokenizer))
    if prepared.manifest.get("framed", usual) != (usual if said is None else framed_by(said)):
        raise DataError(
            f"{prepared.folder} frames its pairs for another model: other tokens open and end them",
            f"prepare them with the run file: {BY_RUN_FILE}",
        )


def _is_raw(texts: AnyTexts) -> TypeGuard[Corpus | PairCorpus]:
    return isinstance(texts, (Corpus, PairCorpus))


def _texts_of(texts: AnyTexts) -> Iterator[str]:
    """What a tokenizer is trained on."""
    if isinstance(texts, ExampleCorpus):
        yield from texts.texts()
    elif not isinstance(texts, Prepared):
        yield from (piece.text for piece in texts.pieces())


def _check_alone(config: RunConfig) -> None:
    """ConfigError for what only documents and pairs can have."""
    data, kind = config.data, config.objective.kind
    if data.sources:
        raise ConfigError(f"data.sources: objective {kind} reads one corpus", "leave the mixture out")
    if data.order not in ("epochs", "windows"):
        raise ConfigError(f"data.order: {data.order} is for next-token and seq2seq", 'order = "epochs"')
    examples = kind in OF_EXAMPLES
    if (examples or kind == "spans") and not (data.reset and data.isolate):
        name = "isolate" if data.reset else "reset"
        raise ConfigError(f"data.{name}: objective {kind} reads each text by itself", "leave it out")
    if examples and data.packing not in ("auto", "first-fit"):
        raise ConfigError(f"data.packing: {data.packing} is for documents and pairs", "whole texts go by first-fit")
    if examples and data.format != "auto":
        raise ConfigError(f"data.format: objective {kind} has a form of its own", "leave it out")
    for key, usual in (("field", "text"), ("source_field", "source"), ("target_field", "target")):
        if examples and getattr(data, key) != usual:
            hint = "objective.text_field and objective.label_field" if kind == "classify" else "leave it out"
            raise ConfigError(f"data.{key}: objective {kind} has no use for it", hint)


def _groups(config: RunConfig, named: Named) -> list[tuple[Named, float]]:
    """What is named, or the sources of the mixture with their weights."""
    pairs = isinstance(named, PairPaths)
    given = bool(named.files) if isinstance(named, PairPaths) else bool(named)
    if not config.data.sources:
        return [(named, 1.0)]
    if given:
        raise UsageError("data.sources names the texts already", "leave out what is named beside the run file")
    held = named.held if isinstance(named, PairPaths) else ()
    if held:
        raise UsageError("validation files are not for a mixture", "each of data.sources holds out a share of its own")
    groups: list[tuple[Named, float]] = []
    for source in config.data.sources:
        paths = [Path(path) for path in source.paths]
        groups.append((PairPaths(tuple((path,) for path in paths)) if pairs else paths, source.weight))
    return groups
