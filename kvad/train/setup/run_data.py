"""Training data of a run: corpora, tokenizer, tokens and dataset, for every objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvad import config as config_lib
from kvad.checkpoint import CheckpointHandle, GenerationConfig
from kvad.errors import ConfigError, DataError, UsageError, format_count
from kvad.model import Transformer
from kvad.text import Tokenizer, train_tokenizer
from kvad.train import data as data_lib
from kvad.train import monitoring
from kvad.train import sources as sources_lib
from kvad.train.config import RunConfig, TokenizerConfig
from kvad.train.data import MixtureSource, PackedDataset, TokenStore
from kvad.train.monitoring import greedy_decode
from kvad.train.setup import corpora, objective_factory
from kvad.train.setup.prepared import PreparedData
from kvad.train.sources import Corpus, PairPaths

MAX_NAMED_TEXTS = 8  # maximum number of texts in a message
NUM_SAMPLES = 3  # held-out sources decoded at every evaluation


class RunData:
    """Texts of a run; after ``open``, its tokens and its dataset."""

    data: PackedDataset

    def __init__(
        self,
        config: RunConfig,
        named: corpora.CorpusArgument,
        log: Callable[[str], None],
        *,
        start: CheckpointHandle | None = None,
        template: Path | None = None,
    ) -> None:
        """Open the corpora, as ``CorpusOpener``; ``named`` is empty if ``data.sources`` is a mixture."""
        if config.objective.kind == "auto":  # no model is known yet: the named texts decide
            config = objective_factory.resolve_objective(
                config, "encoder-decoder" if isinstance(named, PairPaths) else "decoder"
            )
        self._config, self._log = config, log
        self._generation, self._start = None if start is None else corpora.generation_config_from(start), start
        self.pairs = isinstance(named, PairPaths) and config.objective.kind not in objective_factory.EXAMPLE_OBJECTIVES
        sources = corpora.CorpusOpener(config, log, start, template).open(named)
        self._sources, self._weights = [texts for texts, _ in sources], [weight for _, weight in sources]
        self._all = [texts for source in self._sources for texts in source]
        self._single = self._all[0] if len(self._all) == 1 else None  # the texts if they are one corpus
        self._prepared = [texts for texts in self._all if isinstance(texts, PreparedData)]
        self._corpora = [texts for texts in self._all if isinstance(texts, Corpus)]
        for texts in self._all:
            log(texts.summary())

    def single_corpus(self) -> Corpus:
        """Return the texts if they are one corpus that is not prepared; else raise UsageError."""
        texts = self._single
        if not isinstance(texts, Corpus):
            raise UsageError("only texts can be prepared, but prepared data is among the named paths", "Leave it out.")
        return texts

    def find_corrupt(self) -> list[Path]:
        """Return files of prepared data whose hashes differ from the manifest; reads all of them."""
        find = data_lib.token_store.find_corrupt_files
        return [data.folder / name for data in self._prepared for name in find(data.folder, data.hashes)]

    def make_tokenizer(self) -> Tokenizer:
        """Return the named tokenizer, that of prepared data, or one trained on all texts (both sides of pairs)."""
        options = self._config.tokenizer
        if self._prepared:
            return self._prepared_tokenizer(self._prepared)
        if options.path is not None:
            return corpora.load_tokenizer_from(options.path)
        self._log(f"tokenizer: training {options.kind}")
        default_tokens = objective_factory.SPECIAL_TOKENS.get(self._config.objective.kind)
        return train_tokenizer(
            options.kind,
            (piece.text for texts in self._corpora for piece in texts.pieces()),
            vocab_size=options.vocab_size,
            min_freq=options.min_frequency,
            lower=options.lowercase,
            specials=options.special_tokens if options.special_tokens is not None else default_tokens,
            closed=options.special_tokens is None and default_tokens is not None,
        )

    def tokens_fingerprint(self, tokenizer: Tokenizer) -> str:
        """Return the fingerprint of the tokens that these texts make."""
        fingerprint = data_lib.token_store.store_fingerprint
        keys = [t.store.fingerprint if isinstance(t, PreparedData) else fingerprint(t, tokenizer) for t in self._all]
        return data_lib.token_store.combined_fingerprint(keys)

    def changed_sources(self, folder: Path) -> list[str]:
        """Return names of texts that changed since a run's tokens in ``folder`` were made."""
        numbered = ((part, texts) for part, texts in zip(self._folders(folder), self._all, strict=True))
        find = data_lib.token_store.find_changed_sources
        return [name for part, texts in numbered if isinstance(texts, Corpus) for name in find(part, texts)]

    def _folders(self, folder: Path) -> list[Path]:
        """Return the folder of each corpus below ``folder``."""
        return [folder] if self._single is not None else [folder / str(number) for number in range(len(self._all))]

    def open(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Encode texts into ``folder`` unless prepared or streamed; build the dataset.

        Raises:
            DataError: If there are too few tokens, or another tokenizer prepared them; nothing is written.
        """
        for prepared in self._prepared:
            named = self._config.init or self._config.tokenizer.path or "RUN"
            prepared.check(tokenizer, "the run's tokenizer is", named)
            prepared.check_files()
        self.fingerprint, note = self.tokens_fingerprint(tokenizer), ""
        self._log(f"tokens: {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}")
        single = self._single
        if self._config.data.order == "stream":
            items = [data_lib.streaming.stream_texts(texts, tokenizer) for texts in self._corpora]
            self._read_stream(items, tokenizer, "tokens: encoded while the texts are read, not stored on disk")
        elif isinstance(single, Corpus):
            _, is_stored = self._store(folder, single, tokenizer, lambda store: self._read([store], tokenizer))
            note = ", found on disk" if is_stored else ""
        else:
            stores = [
                texts.store if isinstance(texts, PreparedData) else self._store(part, texts, tokenizer)[0]
                for part, texts in zip(self._folders(folder), self._all, strict=True)
            ]
            self._read(stores, tokenizer)
        first, *more = self.data.summary()
        for line in (first + note, *more):
            self._log(line)

    def _store(
        self, folder: Path, texts: Corpus, tokenizer: Tokenizer, accept: Callable[[TokenStore], None] = lambda _: None
    ) -> tuple[TokenStore, bool]:
        """Open or write a store, reporting progress."""
        progress = monitoring.console.ProgressMeter(self._log)
        return data_lib.token_store.open_store(folder, texts, tokenizer, accept=accept, progress=progress)

    def describe_rows(self, rows: range) -> str:
        """Name the texts of rows, such as "document 3 (b.txt)"; "" if the data has no provenance."""
        found = sorted({text for row in rows for text in self.data.packer.source.provenance(row)})
        if not found:
            return ""
        texts = self._single
        if isinstance(texts, sources_lib.examples.ExampleCorpus):
            found = [texts.file_index(text) for text in found]
        names = [str(text + 1) for text in found]
        if isinstance(texts, sources_lib.documents.DocumentCorpus) and texts.whole_files:
            names = [f"{text + 1} ({texts.sources[text].name})" for text in found]
        more = ", ..." * (len(names) > MAX_NAMED_TEXTS)
        return f"{self._all[0].noun}{'s' * (len(names) > 1)} {', '.join(names[:MAX_NAMED_TEXTS])}{more}"

    def stream_position(self) -> list[list[int]] | None:
        """Return the position of sequential data, which a checkpoint stores for ``seek``."""
        packer = self.data.packer
        return packer.position() if isinstance(packer, data_lib.streaming.StreamPacker) else None

    def seek(self, position: Sequence[Sequence[int]] | None) -> None:
        if position is not None and isinstance(self.data.packer, data_lib.streaming.StreamPacker):
            self.data.packer.seek(position)

    def generation(self, tokenizer: Tokenizer) -> GenerationConfig:
        """Return the generation settings of the run's checkpoints.

        A model that learns another chat template also stops at the tokens that end its turns.
        """
        if self._generation is not None:
            own = self._generation.eos_token_ids
            ends = objective_factory.generation_config_for(self.data, tokenizer).eos_token_ids if self.is_chat else ()
            return replace(self._generation, eos_token_ids=tuple(dict.fromkeys((*own, *ends))))
        if self.pairs:
            return sources_lib.pairs.pair_generation_config(tokenizer)
        return objective_factory.generation_config_for(self.data, tokenizer)

    @property
    def is_chat(self) -> bool:
        """True if a pretrained model is trained with another chat template than its own."""
        if self._config.objective.kind != "chat" or self._start is None:
            return False
        is_given = isinstance(self._single, PreparedData) or self._config.objective.chat_template is not None
        return is_given or sources_lib.chat.ChatTemplate.load(self._start.tokenizer_folder) is None

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of tags or texts; () for data without labels."""
        return () if self._single is None else self._single.labels

    def extra_files(self, tokenizer: Tokenizer) -> dict[str, bytes]:
        """Return the files stored next to the model in a checkpoint: the chat template."""
        return {} if self._single is None else self._single.template_files(tokenizer)

    def sampler(
        self, model: Transformer, tokenizer: Tokenizer
    ) -> Callable[[], tuple[monitoring.callbacks.TextSample, ...]] | None:
        """Return a function that decodes the first held-out sources; None unless the data is pairs."""
        if not self.pairs:
            return None
        examples, generation_config = self.data.packer.examples(NUM_SAMPLES), self.generation(tokenizer)
        sources = [source for source, _ in examples]
        max_tokens = min(self._config.data.seq_len - 1, 8 + 2 * max(map(len, sources)))

        def sample() -> tuple[monitoring.callbacks.TextSample, ...]:
            outputs = greedy_decode(model, sources, generation_config, max_tokens)
            texts = ((*example, ids) for example, ids in zip(examples, outputs, strict=True))
            return tuple(monitoring.callbacks.TextSample(*map(tokenizer.decode, text)) for text in texts)

        return sample

    def _prepared_tokenizer(self, prepared: Sequence[PreparedData]) -> Tokenizer:
        first, options, to_dict = prepared[0], self._config.tokenizer, config_lib.serialization.to_dict
        if options.path is not None:
            first.check(corpora.load_tokenizer_from(options.path), f"{options.path} is", options.path)
        elif to_dict(options) not in (to_dict(TokenizerConfig()), first.manifest["tokenizer_config"]):
            raise ConfigError(
                f"[tokenizer]: the tokens of {first.folder} were made by {first.tokenizer.kind} with "
                f"{format_count(first.tokenizer.vocab_size, 'token')}",
                f"Leave the table out, or prepare the texts with the run file: {corpora.PREPARE_HINT}",
            )
        for other in prepared[1:]:
            other.check(first.tokenizer, f"{first.folder / 'tokenizer'} is", first.folder)
        return first.tokenizer

    def _read(self, stores: Sequence[TokenStore], tokenizer: Tokenizer) -> None:
        """Build the dataset on these stores, those of a source one after the other."""
        config, store = self._config, TokenStore.concat(stores)
        counts = iter([part.num_documents for part in stores])
        parts, low, texts_per_item = list[MixtureSource](), 0, 2 if self.pairs else 1
        for source, weight in zip(self._sources, self._weights, strict=True):
            high = low + sum(next(counts) for _ in source)
            first, last = low // texts_per_item, high // texts_per_item
            parts.append(MixtureSource(first, last, weight, self._num_held_out(source)))
            low = high
        if config.data.order != "sequential":
            self.data = objective_factory.build_dataset(store, config, tokenizer, parts, self._all[0].noun)
            return
        spans = [(texts_per_item * part.first, texts_per_item * part.last) for part in parts]
        items = [data_lib.streaming.stream_store(store, *span, pairs=self.pairs) for span in spans]
        count = format_count(store.num_documents // texts_per_item, self._all[0].noun)
        self._read_stream(items, tokenizer, f"tokens: {store.num_tokens:,} in {count}")

    def _read_stream(self, items: Sequence[data_lib.streaming.StreamItems], tokenizer: Tokenizer, summary: str) -> None:
        """Build the dataset on the items of each source, in corpus order."""
        sources = list(zip(items, self._weights, strict=True))
        packer = data_lib.streaming.StreamPacker(sources, self._config, pairs=self.pairs, description=summary)
        pad = tokenizer.special_tokens.pad or 0
        shape = data_lib.collate.CollateConfig.of_run(self._config, pad, tokenizer.vocab_size)
        self.data = PackedDataset(packer, self._config, None, shape)

    def _num_held_out(self, source: Sequence[corpora.AnyTexts]) -> int:
        held_out = [texts.num_held_out for texts in source]
        if len(held_out) > 1 and any(held_out):
            raise DataError("one of several sources of pairs has its own validation files", "Name only that source.")
        if any(held_out) and self._config.data.order == "sequential":
            raise ConfigError("data.order: 'sequential' holds out a fraction of its own", 'Use order = "epochs".')
        return held_out[0] if held_out else 0
