"""Tagging files: a word and its tag on every line, a blank line between sentences.

::

    Angela<tab>PROPN        words as they stand between spaces: "Angela spoke"
    spoke<tab>VERB
                            the sentence is over

A word may become several tokens; its first one carries the tag, the others none (as Devlin et al. 2018, sec. 5.3, and
as ``kvad tag`` reads them).  A sentence is encoded word by word, each with the space before it, so that no token has
parts of two words.  No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvad.errors import DataError
from kvad.text.base import Tokenizer
from kvad.train.columns import EncodedColumns
from kvad.train.examples import Example, ExampleCorpus, collect_labels, example_framing, scan_examples
from kvad.train.pairs import PairPaths, read_lines

__all__ = ["NO_LABEL", "Sentence", "TagCorpus", "word_separator", "open_tagging", "read_sentences"]

NO_LABEL = -1


class Sentence(NamedTuple):
    """Words and the tag of each; word i stands on the line ``first + i``."""

    first_line: int
    words: tuple[str, ...]
    tags: tuple[str, ...]


@dataclass(frozen=True)
class TagCorpus(ExampleCorpus[Sentence]):
    """``labels``: the tags, sorted; a label's number is its place."""

    labels: tuple[str, ...] = field(default=())

    noun = "sentence"
    columns = {"labels": "int32"}  # noqa: RUF012  (never written)

    def read(self, path: Path) -> Iterator[Example[Sentence] | None]:
        return read_sentences(path, self.errors)

    def tokenizer_texts(self, content: Sentence) -> Iterable[str]:
        return [" ".join(content.words)]

    def encode_batch(
        self, tokenizer: Tokenizer, many: list[tuple[Path, Example[Sentence]]]
    ) -> Iterator[EncodedColumns]:
        number = {label: place for place, label in enumerate(self.labels)}
        sentences = [example.content for _, example in many]
        gap = word_separator(tokenizer, next((each.words for each in sentences if len(each.words) > 1), ("a", "b")))
        spelled = (f"{gap if place else ''}{word}" for each in sentences for place, word in enumerate(each.words))
        pieces = iter(tokenizer.encode_batch(spelled))
        before, after = example_framing(tokenizer)
        for sentence in sentences:
            ids, labels = list(before), [NO_LABEL] * len(before)
            for tag, piece in zip(sentence.tags, pieces, strict=False):
                ids += piece
                labels += [number[tag], *[NO_LABEL] * (len(piece) - 1)][: len(piece)]
            yield [*ids, *after], {"labels": labels + [NO_LABEL] * len(after)}

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "labels": list(self.labels)}


def word_separator(tokenizer: Tokenizer, words: tuple[str, ...]) -> str:
    """What stands before a word that is encoded alone, so that its tokens are those of the whole sentence.

    A space for byte-level BPE and for characters; nothing for WordPiece, which has none, and for SentencePiece, which
    puts one before every text.
    """
    whole = tokenizer.encode(" ".join(words))
    for gap in (" ", ""):
        apart = tokenizer.encode_batch([words[0], *(gap + word for word in words[1:])])
        if [token for piece in apart for token in piece] == whole:
            return gap
    return " "


def open_tagging(paths: PairPaths, errors: str, validation: float) -> TagCorpus:
    """Raises DataError naming file and line: of one that is not WORD<tab>TAG, and of a tag that a file held out has and
    training has not."""
    found = scan_examples(paths, lambda path: read_sentences(path, errors), TagCorpus.noun, validation)
    corpus = TagCorpus(found, errors)
    seen = (
        (path, [(each.content.first_line + place, tag) for place, tag in enumerate(each.content.tags)])
        for path, each in corpus.examples()
    )
    found, tags = collect_labels(seen, found, "tag")
    return TagCorpus(found, errors, tags)


def read_sentences(path: Path, errors: str) -> Iterator[Example[Sentence]]:
    """Of one file.  Raises DataError naming file and line."""
    words: list[str] = []
    tags: list[str] = []
    number = 0
    for number, line in enumerate(read_lines(path, errors), 1):
        if line.strip():
            word, tag = _columns(path, number, line)
            words.append(word)
            tags.append(tag)
        elif words:
            first = number - len(words)
            yield Example(first, Sentence(first, tuple(words), tuple(tags)))
            words, tags = [], []
    if words:
        first = number + 1 - len(words)
        yield Example(first, Sentence(first, tuple(words), tuple(tags)))


def _columns(path: Path, number: int, line: str) -> tuple[str, str]:
    columns = line.split("\t")
    if len(columns) != 2:
        found = "one column" if len(columns) == 1 else f"{len(columns)} columns"
        hint = "a blank line ends a sentence" if len(columns) == 1 else "keep the word and its tag: cut -f1,2"
        raise DataError(f"{path}, line {number}: {found}, and a tagging file has WORD<tab>TAG", hint)
    word, tag = (column.strip() for column in columns)
    for name, value in (("word", word), ("tag", tag)):
        if not value:
            raise DataError(f"{path}, line {number}: the {name} is empty, and a tagging file has WORD<tab>TAG")
    return word, tag
