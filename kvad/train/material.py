"""What a run is trained on, by the kind of its model: a decoder on documents, an encoder-decoder on pairs.

Everything else about training is the same for both; where they differ, it is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvad.checkpoint.generation import Generation
from kvad.errors import ConfigError, UsageError
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from kvad.train.config import RunConfig
from kvad.train.corpus import Corpus, open_corpus
from kvad.train.data import DocumentData, TrainingData
from kvad.train.pair_data import PairData
from kvad.train.pairs import ROLES, PairCorpus, PairPaths, generation_of, open_pairs
from kvad.train.reports import Sample
from kvad.train.samples import greedy
from kvad.train.store import TokenStore, open_store, store_key

__all__ = ["Material", "Named", "as_json", "from_json", "named_for"]

Named = Sequence[Path] | PairPaths  # what a user names: files and folders of documents, or files of pairs
EXAMPLES = 3  # held-out sources that are answered at every evaluation


def named_for(kind: str, corpus: Named) -> Named:
    """What is named, as a model of this kind reads it: paths alone are TSV files for an encoder-decoder.

    Raises UsageError for pairs that a decoder is to read, ConfigError for an encoder alone.
    """
    if kind == "encoder":
        raise ConfigError("an encoder alone cannot be trained yet", "train a decoder or an encoder-decoder")
    if kind == "encoder-decoder":
        return corpus if isinstance(corpus, PairPaths) else PairPaths(tuple((path,) for path in corpus))
    if isinstance(corpus, PairPaths):
        raise UsageError(
            "pairs are for an encoder-decoder, and this model is a decoder",
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

    store: TokenStore
    data: TrainingData

    def __init__(
        self, config: RunConfig, named: Named, tell: Callable[[str], None], said: Generation | None = None
    ) -> None:
        """``said``: what the model already says about generating, if it was trained before.  Raises DataError for what
        cannot be read."""
        self._config, self._tell, self._said = config, tell, said
        self.texts: Corpus | PairCorpus
        if isinstance(named, PairPaths):
            if config.data.suffixes:
                raise ConfigError("data.suffixes: pairs come from files that are named", "leave --suffix out")
            if config.data.documents == "lines":
                raise ConfigError("data.documents: pairs are lines anyway", "leave it out")
            self.texts = replace(open_pairs(named, config.data.errors), said=said)
        else:
            lines = config.data.documents == "lines"
            self.texts = open_corpus(named, suffixes=config.data.suffixes, errors=config.data.errors, lines=lines)
        tell(self.texts.told())

    def make_tokenizer(self) -> Tokenizer:
        """The one that is named, or one trained on all texts (of pairs, on both sides)."""
        wanted = self._config.tokenizer
        if wanted.path is not None:
            return load_tokenizer(Path(wanted.path))
        self._tell(f"tokenizer: training {wanted.kind}")
        usual = ROLES if isinstance(self.texts, PairCorpus) else None
        return train_tokenizer(
            wanted.kind,
            self.texts.texts(),
            vocab_size=wanted.vocab_size,
            min_freq=wanted.min_freq,
            lower=wanted.lower,
            specials=wanted.specials if wanted.specials is not None else usual,
            closed=wanted.specials is None and usual is not None,
        )

    def key(self, tokenizer: Tokenizer) -> str:
        """The ``fingerprint`` of the store that these texts make."""
        return store_key(self.texts, tokenizer)

    def open(self, folder: Path, tokenizer: Tokenizer) -> None:
        """The texts as tokens in ``folder``.  DataError, and nothing written, where they are too few to train on."""
        self._tell(f"tokens: {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}")

        def read(store: TokenStore) -> None:
            if isinstance(self.texts, PairCorpus):
                self.data = PairData(store, self._config, self.texts.num_held, tokenizer.specials.pad or 0)
            else:
                self.data = DocumentData(store, self._config)

        self.store, found = open_store(folder, self.texts, tokenizer, accept=read)
        first, *more = self.data.told()
        for line in (first + (", found on disk" if found else ""), *more):
            self._tell(line)

    def generation(self, tokenizer: Tokenizer) -> Generation:
        """What a checkpoint says about generating."""
        if self._said is not None:
            return self._said
        return generation_of(tokenizer) if isinstance(self.texts, PairCorpus) else Generation()

    def sampler(self, model: Transformer, tokenizer: Tokenizer) -> Callable[[], tuple[Sample, ...]] | None:
        """What the model makes of the first held-out sources, whenever it is called; None of documents."""
        if not isinstance(self.data, PairData):
            return None
        examples, said = self.data.examples(EXAMPLES), self.generation(tokenizer)
        sources = [source for source, _ in examples]
        most = min(self._config.data.context - 1, 8 + 2 * max(map(len, sources)))

        def sample() -> tuple[Sample, ...]:
            found = greedy(model, sources, said, most)
            rows = zip(examples, found, strict=True)
            return tuple(Sample(*map(tokenizer.decode, (source, target, ids))) for (source, target), ids in rows)

        return sample
