"""What a run is trained on, by its objective: documents, pairs, or examples of what is to be said of a text.

Everything else about training is the same for all; where they differ, it is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvad.checkpoint.generation import Generation
from kvad.checkpoint.opened import Opened
from kvad.config import ModelConfig
from kvad.errors import ConfigError, UsageError
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from kvad.train.chats import ChatCorpus
from kvad.train.config import RunConfig
from kvad.train.corpus import Corpus, open_corpus
from kvad.train.data import TrainingData
from kvad.train.examples import ExampleCorpus
from kvad.train.feeds import FramedCorpus, feed, generation_for, open_examples, roles_for
from kvad.train.objectives import EXAMPLES as OF_EXAMPLES
from kvad.train.objectives import headed
from kvad.train.pair_data import PairData
from kvad.train.pairs import PairCorpus, PairPaths, open_pairs
from kvad.train.reports import Sample
from kvad.train.samples import greedy
from kvad.train.start import said_by
from kvad.train.store import TokenStore, open_store, store_key

__all__ = ["Material", "Named", "as_json", "from_json", "named_for"]

Named = Sequence[Path] | PairPaths  # what a user names: files and folders of documents, or files of pairs
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

    store: TokenStore
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
        """``start``: what the run began with, if it was trained before; ``template``: of chat, the folder of a
        checkpoint that has the chat template, if that is another.  Raises DataError for what cannot be read."""
        self._config, self._tell = config, tell
        self._said = None if start is None else said_by(start)
        self.texts: Corpus | FramedCorpus | PairCorpus | ExampleCorpus[Any]
        kind = config.objective.kind
        template = start.path if template is None and start is not None else template
        if isinstance(named, PairPaths):
            if config.data.suffixes:
                raise ConfigError("data.suffixes: pairs come from files that are named", "leave --suffix out")
            if config.data.documents == "lines":
                raise ConfigError("data.documents: pairs are lines anyway", "leave it out")
            if kind in OF_EXAMPLES:
                self.texts = open_examples(config, named, template)
            else:
                self.texts = replace(open_pairs(named, config.data.errors), said=self._said)
        else:
            lines = config.data.documents == "lines"
            found = open_corpus(named, suffixes=config.data.suffixes, errors=config.data.errors, lines=lines)
            self.texts = FramedCorpus(found, kind == "spans") if kind in ("masked", "spans") else found
        tell(self.texts.told())

    def make_tokenizer(self) -> Tokenizer:
        """The one that is named, or one trained on all texts (of pairs, on both sides)."""
        wanted = self._config.tokenizer
        if wanted.path is not None:
            return load_tokenizer(Path(wanted.path))
        self._tell(f"tokenizer: training {wanted.kind}")
        usual = roles_for(self._config.objective.kind)
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
            self.data = feed(store, self._config, self.texts, tokenizer)

        self.store, found = open_store(folder, self.texts, tokenizer, accept=read)
        first, *more = self.data.told()
        for line in (first + (", found on disk" if found else ""), *more):
            self._tell(line)

    def generation(self, tokenizer: Tokenizer) -> Generation:
        """What a checkpoint says about generating."""
        return generation_for(self.data, tokenizer) if self._said is None else self._said

    @property
    def labels(self) -> tuple[str, ...]:
        """What a text, or a word of it, may be called; () of what has no labels."""
        return tuple(getattr(self.texts, "labels", ()))

    def files(self, tokenizer: Tokenizer) -> dict[str, bytes]:
        """What lies in a checkpoint beside the model, by its name: the chat template."""
        texts = self.texts.template_files(tokenizer) if isinstance(self.texts, ChatCorpus) else {}
        return {name: text.encode() for name, text in texts.items()}

    def shaped(self, model: ModelConfig) -> ModelConfig:
        """The model with the head that this objective needs.  Raises ConfigError."""
        return headed(model, self._config.objective.kind, self.labels)

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
