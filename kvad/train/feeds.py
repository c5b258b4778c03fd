"""What each objective reads: its corpus, the special tokens that it needs, its data, and how its model generates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvad.checkpoint.generation import Generation
from kvad.checkpoint.opened import Opened
from kvad.errors import ConfigError
from kvad.text.base import Tokenizer
from kvad.text.chat import ChatTemplate
from kvad.train import spans
from kvad.train.chats import CHATML, CHATML_TOKENS, chatml, open_chats
from kvad.train.config import RunConfig
from kvad.train.corpus import Corpus, Framer, Source
from kvad.train.data import DocumentData, TrainingData
from kvad.train.examples import ExampleCorpus
from kvad.train.labelled import open_labelled
from kvad.train.masking import HidingData, MaskedData, mask_token
from kvad.train.objectives import EXAMPLES
from kvad.train.pairs import ROLES, PairPaths
from kvad.train.readers import Piece
from kvad.train.spans import SpanData
from kvad.train.start import words_at
from kvad.train.store import TEMPLATE, TokenStore, is_prepared
from kvad.train.tagging import open_tagging
from kvad.train.text_data import TextData

__all__ = ["FramedCorpus", "feed", "generation_for", "open_examples", "roles_for"]

_ENCODER = ("pad", "unk", "cls", "sep", "mask")
_SPECIALS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("seq2seq", ROLES),
    ("spans", ("eos", "pad", "unk", *spans.SENTINELS)),
    ("chat", ("pad", "unk", *CHATML_TOKENS)),
    *((kind, _ENCODER) for kind in ("masked", "tag", "classify")),
)


def roles_for(kind: str) -> tuple[str, ...] | None:
    """Special tokens of a tokenizer that is trained for objective ``kind``; None: the usual ones."""
    return dict(_SPECIALS).get(kind)


@dataclass(frozen=True)
class FramedCorpus:
    """Documents that no separator opens: in the tokenizer's own frame ([CLS] x [SEP]), as encoders read them, or
    ``bare``, as spans are cut out of them."""

    documents: Corpus
    bare: bool

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.documents.sources

    def texts(self) -> Iterator[str]:
        return self.documents.texts()

    def pieces(self) -> Iterator[Piece]:
        """Documents whole: a frame stands around all of one."""
        return map(Piece, self.texts())

    def settings(self) -> dict[str, Any]:
        return {**self.documents.settings(), "frame": "none" if self.bare else "tokenizer"}

    def framer(self, tokenizer: Tokenizer) -> Framer:
        return lambda _number, ids: ids if self.bare else tokenizer.frame(ids)

    def told(self) -> str:
        return self.documents.told()


def open_examples(
    config: RunConfig, paths: PairPaths, saved: Path | None = None, start: Opened | None = None
) -> ExampleCorpus[Any]:
    """The examples of objective tag, classify or chat.  ``saved``: the folder of the run's own checkpoint, whose chat
    template it goes on in; ``start``: the model that a run begins with.

    Raises DataError naming file and line.
    """
    data, wanted = config.data, config.objective
    if wanted.kind == "tag":
        return open_tagging(paths, data.errors, data.validation)
    if wanted.kind == "classify":
        return open_labelled(paths, data.errors, data.validation, wanted.text_field, wanted.label_field)
    return open_chats(paths, data.errors, data.validation, _template(config, saved, start))


def _template(config: RunConfig, saved: Path | None, start: Opened | None) -> ChatTemplate:
    """Of the run that goes on, of the file that is named, of the model that it began with or of the tokenizer's folder,
    or ChatML."""
    found = None if saved is None else ChatTemplate.load(saved)
    if found is not None:
        return found
    wanted, tokenizer = config.objective.template, config.tokenizer.path
    if wanted is not None:
        try:
            return ChatTemplate(Path(wanted).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"objective.template: cannot read {wanted}: {error}") from error
    if start is not None:
        found = ChatTemplate.load(start.words)
        return ChatTemplate(chatml(start.tokenizer)) if found is None else found
    if tokenizer is None:
        return ChatTemplate(CHATML)
    beside = Path(tokenizer) / TEMPLATE
    folder = beside if is_prepared(Path(tokenizer)) and beside.is_dir() else words_at(tokenizer)
    found = ChatTemplate.load(folder if folder.is_dir() else folder.parent)
    if found is None:
        raise ConfigError(f"there is no chat template beside {tokenizer}", "name one: --set objective.template=FILE")
    return found


def feed(store: TokenStore, config: RunConfig, tokenizer: Tokenizer, *, held: int = 0, noun: str = "") -> TrainingData:
    """The tokens of a run as an objective other than the next token reads them.  ``held``: of examples, how many of the
    last ones are for validation; ``noun``: what one is called.

    DataError where they are too few, or of another tokenizer than the objective needs."""
    wanted, train = config.objective, config.train
    rows = train.batch * train.accumulate
    if wanted.kind in EXAMPLES:
        data = TextData(store, config, held, tokenizer.specials.pad or 0, noun)
        return HidingData(data, tokenizer, wanted.hide, train.seed, rows) if wanted.hide else data
    if wanted.kind == "masked":
        mask_token(tokenizer)
        return MaskedData(DocumentData(store, config), tokenizer, wanted.density, train.seed, rows)
    assert wanted.kind == "spans", wanted.kind
    raw = spans.raw_length(config.data.context, wanted)
    documents = DocumentData(store, replace(config, data=replace(config.data, context=raw)))
    return SpanData(documents, tokenizer, wanted, context=config.data.context, raw=raw, seed=train.seed, step_rows=rows)


def generation_for(data: TrainingData, tokenizer: Tokenizer) -> Generation:
    """What a checkpoint says about generating."""
    if isinstance(data, SpanData):
        return spans.generation_of(data.speech)
    if isinstance(data, TextData) and (end := data.turn_end()) in tokenizer.specials.names().values():
        assert end is not None
        return Generation(stops=(end,), pad=tokenizer.specials.pad, sampling={"temperature": 1.0})
    return Generation()
