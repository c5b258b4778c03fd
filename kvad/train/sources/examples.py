"""Files of examples: one text and what is to be said of it, again and again.  What their readers have in common.

The last examples are held out: those of the files that were named for it, or a share of all.  Of a share, an example
that has a label which no example before it has stays in training, behind the others there.  No torch.

Tagging files: a word and its tag on every line, a blank line between sentences.

::

    Angela<tab>PROPN        words as they stand between spaces: "Angela spoke"
    spoke<tab>VERB
                            the sentence is over

A word may become several tokens; its first one carries the tag, the others none (as Devlin et al. 2018, sec. 5.3, and
as ``kvad tag`` reads them).  A sentence is encoded word by word, each with the space before it, so that no token has
parts of two words.  No torch.

Labelled texts: what a model is to say of a whole text, one on every line.

A file of JSON lines (by its name, ``readers.py``) has objects with a text and a label (a text or a whole number), under
the names that ``[objective]`` gives; any other file has lines of ``LABEL<tab>TEXT``.  An empty text is left out and
counted.  The label lies on the text's first token.  No torch.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from kvad.errors import DataError, UsageError, format_count, suggest
from kvad.text import Tokenizer
from kvad.train.sources.columns import EncodedColumns
from kvad.train.sources.documents import CorpusFile, FrameFn, Progress
from kvad.train.sources.formats import TextPiece, detect_format, read_lines
from kvad.train.sources.pairs import PairPaths, source_info

TEXT = -7  # stands for a text: no token has this id
ENCODE_BATCH = 1024  # examples that are encoded at a time

T = TypeVar("T")


class Example(NamedTuple, Generic[T]):
    """``content`` as it was read, and the line that it begins at."""

    line: int
    content: T


ExampleReader = Callable[[Path], Iterator[Example[T] | None]]  # None: nothing to learn from, and left out


class ExampleSplit(NamedTuple):
    """What is in the files: examples in all, those held out (the last ones; ``files_held``: they are files of their
    own), and those left out.  ``kept``: numbers, in the order of the files and from 0, of those that lie among the ones
    held out and are not."""

    files: tuple[CorpusFile, ...]
    num_texts: int
    num_held_out: int
    skipped: int
    held_out_files: bool = False
    train_files: tuple[int, ...] = ()


@dataclass(frozen=True)
class ExampleCorpus(ABC, Generic[T]):
    """``found``: what was counted; ``read`` gives a file's examples again."""

    found: ExampleSplit
    errors: str

    noun: ClassVar[str]
    columns: ClassVar[Mapping[str, str]]

    @property
    def sources(self) -> tuple[CorpusFile, ...]:
        return self.found.files

    @property
    def num_held_out(self) -> int:
        return self.found.num_held_out

    @abstractmethod
    def read(self, path: Path) -> Iterator[Example[T] | None]:
        """The examples of a file, in order.  Raises DataError naming file and line."""

    @abstractmethod
    def tokenizer_texts(self, content: T) -> Iterable[str]:
        """What a tokenizer is to be trained on."""

    @abstractmethod
    def encode_batch(self, tokenizer: Tokenizer, many: list[tuple[Path, Example[T]]]) -> Iterator[EncodedColumns]: ...

    def examples(self) -> Iterator[tuple[Path, Example[T]]]:
        """In the order of the files, but those that are ``kept`` stand before all that are held out."""
        kept = set(self.found.train_files)
        if not kept:
            yield from self._file_index()
            return
        first = self._first
        yield from (each for number, each in enumerate(self._file_index()) if number < first or number in kept)
        yield from (each for number, each in enumerate(self._file_index()) if number >= first and number not in kept)

    def file_index(self, place: int) -> int:
        """The number in the files, from 0, of the training example that stands at ``place``."""
        return place if place < self._first else self.found.train_files[place - self._first]

    @property
    def _first(self) -> int:
        """The number in the files of the first one of those held out, and of those kept from among them."""
        return self.found.num_texts - self.num_held_out - len(self.found.train_files)

    def _file_index(self) -> Iterator[tuple[Path, Example[T]]]:
        for source in self.found.files:
            yield from ((source.path, each) for each in self.read(source.path) if each is not None)

    def texts(self) -> Iterator[str]:
        for _, example in self.examples():
            yield from self.tokenizer_texts(example.content)

    def pieces(self) -> Iterator[TextPiece]:
        return map(TextPiece, self.texts())

    def encoded(
        self, tokenizer: Tokenizer, progress: Progress = lambda chars, tokens: None
    ) -> Iterator[EncodedColumns]:
        every, chars, tokens = self.examples(), 0, 0
        while many := list(islice(every, ENCODE_BATCH)):
            for text in self.encode_batch(tokenizer, many):
                tokens += len(text[0])
                yield text
            chars += sum(len(text) for _, example in many for text in self.tokenizer_texts(example.content))
            progress(chars, tokens)

    def framer(self, tokenizer: Tokenizer) -> FrameFn:
        """Texts stand in the tokenizer's frame, as the model will read them."""
        return lambda _number, ids: tokenizer.add_special_tokens(ids)

    def settings(self) -> dict[str, Any]:
        """What decides the texts, and how they are framed."""
        sources = [source.manifest_entry() for source in self.sources]
        kept = {"kept": list(self.found.train_files)} if self.found.train_files else {}
        return {"errors": self.errors, "sources": sources, self.noun: {"held": self.num_held_out, **kept}}

    def summary(self) -> str:
        """One line about it."""
        num_bytes = sum(source.num_bytes for source in self.sources)
        skipped = f"; {format_count(self.found.skipped, 'empty one')} left out" if self.found.skipped else ""
        files, kept = format_count(len(self.sources), "file"), len(self.found.train_files)
        rare = f"; {format_count(kept, self.noun)} of that share stay{'s' * (kept == 1)} in training, for a rare label"
        return (
            f"corpus: {format_count(self.found.num_texts, self.noun)} in {files}, {num_bytes / 1e6:,.1f} MB, "
            f"{self.num_held_out:,} of them for validation{rare if kept else ''}{skipped}"
        )


def scan_examples(paths: PairPaths, read: ExampleReader[Any], noun: str, validation: float) -> ExampleSplit:
    """Read every line once and hash the files.  ``validation``: the share held out where no files are.

    Raises DataError for what cannot be read and for too few examples, UsageError for files of pairs.
    """
    files, counts, skipped = [], [0, 0], 0
    for held, items in enumerate((paths.files, paths.held_out)):
        for item in items:
            if len(item) != 1:
                raise UsageError(f"--pairs: {noun}s lie in single files", "name the files alone")
            if item[0].is_dir():
                raise DataError(f"{item[0]} is a folder, and {noun}s come from files", "name the files")
            files.append(source_info(item[0]))
            for example in read(item[0]):
                skipped += example is None
                counts[held] += example is not None
    if not files:
        raise DataError("no corpus was named", f"name files of {noun}s")
    num_held = counts[1] if paths.held_out else max(1, int(counts[0] * validation))
    left = max(0, sum(counts) - num_held)
    if not num_held or not left:
        raise DataError(
            f"too few {noun}s: {format_count(left, noun)} to train on and {num_held} for validation",
            f"{format_count(skipped, noun)} had nothing to learn from" if skipped else "",
        )
    return ExampleSplit(tuple(files), sum(counts), num_held, skipped, bool(paths.held_out))


def collect_labels(
    examples: Iterable[tuple[Path, Iterable[tuple[int, str]]]], found: ExampleSplit, noun: str
) -> tuple[ExampleSplit, tuple[str, ...]]:
    """What is held out, and the labels of the training examples, sorted.  ``examples``: of each its file, and (line,
    label) of all it has.

    A label that only examples held out have, no model could learn.  Where a share is held out, the first of them stays
    in training (``found.kept``).  DataError, naming file and line, where it is in a file that was named for it; and
    where nothing would be left to hold out.
    """
    known, kept = set[str](), list[int]()
    first = found.num_texts - found.num_held_out
    for number, (path, labels) in enumerate(examples):
        for line, label in labels:
            if number < first or label in known:
                known.add(label)
            elif found.held_out_files:
                raise DataError(
                    f"{path}, line {line}: {noun} {label!r} is held out and does not occur in training",
                    "hold out other examples, or name the file to train on that has it",
                )
            else:
                known.add(label)
                kept += [number] if number not in kept[-1:] else []
    if len(kept) == found.num_held_out:
        raise DataError(
            f"nothing is left to hold out: {format_count(found.num_held_out, 'example')} of this share, and each has a {noun} "
            "that none before it has",
            "hold out a larger share, or a file: --validation FILE",
        )
    return found._replace(num_held_out=found.num_held_out - len(kept), train_files=tuple(kept)), tuple(sorted(known))


def example_framing(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's frame puts before and after a text."""
    around = tokenizer.add_special_tokens([TEXT])
    at = around.index(TEXT)
    return around[:at], around[at + 1 :]


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


FORMAT_HINT = "a labelled text is LABEL<tab>TEXT"


class LabeledText(NamedTuple):
    label: str
    text: str


@dataclass(frozen=True)
class LabeledCorpus(ExampleCorpus[LabeledText]):
    """``text_field``, ``label_field``: names in JSONL; ``labels``: the labels, sorted."""

    text_field: str
    label_field: str
    labels: tuple[str, ...] = field(default=())

    noun = "labelled text"
    columns = {"labels": "int32"}  # noqa: RUF012  (never written)

    def read(self, path: Path) -> Iterator[Example[LabeledText] | None]:
        return read_labeled_lines(path, self.errors, self.text_field, self.label_field)

    def tokenizer_texts(self, content: LabeledText) -> Iterable[str]:
        return [content.text]

    def encode_batch(
        self, tokenizer: Tokenizer, many: list[tuple[Path, Example[LabeledText]]]
    ) -> Iterator[EncodedColumns]:
        number = {label: place for place, label in enumerate(self.labels)}
        before, after = example_framing(tokenizer)
        rows = tokenizer.encode_batch(example.content.text for _, example in many)
        for (path, example), row in zip(many, rows, strict=True):
            ids = [*before, *row, *after]
            if not ids:
                raise DataError(f"{path}, line {example.line}: the text has no token in this vocabulary")
            yield ids, {"labels": [number[example.content.label], *[NO_LABEL] * (len(ids) - 1)]}

    def settings(self) -> dict[str, Any]:
        fields = [self.text_field, self.label_field]
        return {**super().settings(), "labels": list(self.labels), "fields": fields}


def open_labeled(
    paths: PairPaths, errors: str, validation: float, text_field: str = "text", label_field: str = "label"
) -> LabeledCorpus:
    """Raises DataError naming file and line: of one that is no labelled text, and of a label that a file held out has
    and training has not."""
    noun = LabeledCorpus.noun
    found = scan_examples(
        paths, lambda path: read_labeled_lines(path, errors, text_field, label_field), noun, validation
    )
    corpus = LabeledCorpus(found, errors, text_field, label_field)
    seen = ((path, [(each.line, each.content.label)]) for path, each in corpus.examples())
    found, labels = collect_labels(seen, found, "label")
    return LabeledCorpus(found, errors, text_field, label_field, labels)


def read_labeled_lines(
    path: Path, errors: str, text_field: str = "text", label_field: str = "label"
) -> Iterator[Example[LabeledText] | None]:
    """Of one file; None for an empty text.  Raises DataError naming file and line."""
    if detect_format(path, "auto") == "jsonl":
        for number, content in read_json_objects(path, errors):
            text = _value(path, number, content, text_field, (str,), "a text")
            label = _value(path, number, content, label_field, (str, int), "a text or a whole number")
            yield Example(number, LabeledText(str(label), str(text))) if str(text).strip() else None
        return
    for number, line in enumerate(read_lines(path, errors), 1):
        if not line.strip():
            continue
        label, tab, text = line.partition("\t")
        if not tab or "\t" in text:
            raise DataError(f"{path}, line {number}: {'two tabs or more' if tab else 'no tab'}, and {FORMAT_HINT}")
        if not label.strip():
            raise DataError(f"{path}, line {number}: the label is empty, and {FORMAT_HINT}")
        yield Example(number, LabeledText(label.strip(), text)) if text.strip() else None


def read_json_objects(path: Path, errors: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with the numbers of their lines; empty lines are left out.  Raises DataError."""
    for number, line in enumerate(read_lines(path, errors), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}, is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise DataError(f"{path}, line {number}: expected an object, found {type(content).__name__}")
        yield number, content


def _value(path: Path, number: int, content: dict[str, Any], name: str, kinds: tuple[type, ...], what: str) -> Any:
    if name not in content:
        raise DataError(f"{path}, line {number}: no field {name!r}", suggest(name, content) if content else "")
    value = content[name]
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise DataError(f"{path}, line {number}: {name} must be {what}, found {json.dumps(value)[:40]}")
    return value
