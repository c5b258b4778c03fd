"""Examples: tagged sentences and labeled texts from files; the common part of their readers.

The last examples are held out: those of named validation files, or a fraction of all. Of a fraction, an example whose
label no earlier example has stays in training, after the others there. No torch.

Tagging files: a word and its tag on every line, a blank line between sentences::

    Angela<tab>PROPN        words separated by spaces: "Angela spoke"
    spoke<tab>VERB
                            end of the sentence

A word may become several tokens; its first one has the tag, the others none (as in Devlin et al. 2018, sec. 5.3, and as
``kvad tag`` reads them). A sentence is encoded word by word, each with the space before it, so that no token spans two
words.

Labeled texts: one label per text, one text per line. A file of JSON lines (by its name, ``formats.py``) has objects
with a text and a label (text or integer) in the fields that ``[objective]`` names; any other file has lines of
``LABEL<tab>TEXT``. Empty texts are skipped and counted. The label belongs to the text's first token.
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

TEXT = -7  # placeholder of a text; no token has this id
ENCODE_BATCH = 1024  # examples encoded at a time

T = TypeVar("T")


class Example(NamedTuple, Generic[T]):
    """Content of an example and its first line."""

    line: int
    content: T


ExampleReader = Callable[[Path], Iterator[Example[T] | None]]  # None: skipped example without a target


class ExampleSplit(NamedTuple):
    """Counts of a scan over files, and the validation split."""

    files: tuple[CorpusFile, ...]
    num_texts: int
    num_held_out: int  # the last ones
    skipped: int
    held_out_files: bool = False  # the held-out examples have their own files
    train_files: tuple[int, ...] = ()  # indices within the held-out range that stay in training


@dataclass(frozen=True)
class ExampleCorpus(ABC, Generic[T]):
    """Examples of files; ``read`` reads a file's examples again."""

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
        """Yield the examples of a file, in order; DataErrors name file and line."""

    @abstractmethod
    def tokenizer_texts(self, content: T) -> Iterable[str]:
        """Return the texts that a tokenizer is trained on."""

    @abstractmethod
    def encode_batch(self, tokenizer: Tokenizer, many: list[tuple[Path, Example[T]]]) -> Iterator[EncodedColumns]: ...

    def examples(self) -> Iterator[tuple[Path, Example[T]]]:
        """Yield examples in file order, held-out ones last."""
        training = set(self.found.train_files)
        if not training:
            yield from self._in_file_order()
            return
        first = self._first
        yield from (item for index, item in enumerate(self._in_file_order()) if index < first or index in training)
        yield from (
            item for index, item in enumerate(self._in_file_order()) if index >= first and index not in training
        )

    def file_index(self, index: int) -> int:
        """Return the index in the files of training example ``index``."""
        return index if index < self._first else self.found.train_files[index - self._first]

    @property
    def _first(self) -> int:
        """Index in the files of the first example of the held-out range."""
        return self.found.num_texts - self.num_held_out - len(self.found.train_files)

    def _in_file_order(self) -> Iterator[tuple[Path, Example[T]]]:
        for source in self.found.files:
            yield from ((source.path, example) for example in self.read(source.path) if example is not None)

    def texts(self) -> Iterator[str]:
        for _, example in self.examples():
            yield from self.tokenizer_texts(example.content)

    def pieces(self) -> Iterator[TextPiece]:
        return map(TextPiece, self.texts())

    def encoded(
        self, tokenizer: Tokenizer, progress: Progress = lambda chars, tokens: None
    ) -> Iterator[EncodedColumns]:
        examples, chars, tokens = self.examples(), 0, 0
        while many := list(islice(examples, ENCODE_BATCH)):
            for text in self.encode_batch(tokenizer, many):
                tokens += len(text[0])
                yield text
            chars += sum(len(text) for _, example in many for text in self.tokenizer_texts(example.content))
            progress(chars, tokens)

    def framer(self, tokenizer: Tokenizer) -> FrameFn:
        """Return the tokenizer's frame, in which the model reads texts."""
        return lambda _number, ids: tokenizer.add_special_tokens(ids)

    def settings(self) -> dict[str, Any]:
        """Return everything that determines the texts and their framing."""
        sources = [source.manifest_entry() for source in self.sources]
        training = {"kept": list(self.found.train_files)} if self.found.train_files else {}
        return {"errors": self.errors, "sources": sources, self.noun: {"held": self.num_held_out, **training}}

    def summary(self) -> str:
        """Return one line about the corpus."""
        num_bytes = sum(source.num_bytes for source in self.sources)
        skipped = f"; {format_count(self.found.skipped, 'empty one')} left out" if self.found.skipped else ""
        files, num_rare = format_count(len(self.sources), "file"), len(self.found.train_files)
        rare = (
            f"; {format_count(num_rare, self.noun)} of them stay{'s' * (num_rare == 1)} in training, for a rare label"
        )
        return (
            f"corpus: {format_count(self.found.num_texts, self.noun)} in {files}, {num_bytes / 1e6:,.1f} MB, "
            f"{self.num_held_out:,} of them for validation{rare if num_rare else ''}{skipped}"
        )


def scan_examples(paths: PairPaths, read: ExampleReader[Any], noun: str, validation: float) -> ExampleSplit:
    """Read every line once and hash the files.

    Args:
        paths: The files.
        read: Reads the examples of a file.
        noun: Noun for one example.
        validation: Fraction held out if there are no validation files.

    Raises:
        DataError: If a file cannot be read or there are too few examples.
        UsageError: If files of pairs are named.
    """
    files, counts, skipped = [], [0, 0], 0
    for is_held_out, items in enumerate((paths.files, paths.held_out)):
        for item in items:
            if len(item) != 1:
                raise UsageError(f"--pairs: must not be given, {noun}s are in single files", "Name the files alone.")
            if item[0].is_dir():
                raise DataError(f"{item[0]} is a folder, and {noun}s come from files", "Name the files.")
            files.append(source_info(item[0]))
            for example in read(item[0]):
                skipped += example is None
                counts[is_held_out] += example is not None
    if not files:
        raise DataError("no corpus was named", f"Name files of {noun}s.")
    num_held = counts[1] if paths.held_out else max(1, int(counts[0] * validation))
    num_train = max(0, sum(counts) - num_held)
    if not num_held or not num_train:
        raise DataError(
            f"too few {noun}s: {format_count(num_train, noun)} to train on and {num_held} for validation",
            f"{format_count(skipped, noun)} had no target" if skipped else "",
        )
    return ExampleSplit(tuple(files), sum(counts), num_held, skipped, bool(paths.held_out))


def collect_labels(
    examples: Iterable[tuple[Path, Iterable[tuple[int, str]]]], found: ExampleSplit, noun: str
) -> tuple[ExampleSplit, tuple[str, ...]]:
    """Return the split and the sorted labels of the training examples.

    A model cannot learn a label that only held-out examples have. If a fraction is held out, the first such example
    stays in training (``ExampleSplit.train_files``).

    Args:
        examples: For each example its file, and (line, label) of all its labels.
        found: The split.
        noun: Noun for a label.

    Raises:
        DataError: If such a label is in a validation file, or nothing is left to hold out.
    """
    known, training = set[str](), list[int]()
    first = found.num_texts - found.num_held_out
    for number, (path, labels) in enumerate(examples):
        for line, label in labels:
            if number < first or label in known:
                known.add(label)
            elif found.held_out_files:
                raise DataError(
                    f"{path}, line {line}: {noun} {label!r} is held out and does not occur in training",
                    "Hold out other examples, or name the training file that has it.",
                )
            else:
                known.add(label)
                training += [number] if number not in training[-1:] else []
    if len(training) == found.num_held_out:
        raise DataError(
            f"nothing is left to hold out: {format_count(found.num_held_out, 'example')} of this fraction, "
            f"and each has a {noun} that no earlier one has",
            "Hold out a larger fraction, or a file: --validation FILE",
        )
    return found._replace(num_held_out=found.num_held_out - len(training), train_files=tuple(training)), tuple(
        sorted(known)
    )


def example_framing(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer's frame puts before and after a text."""
    framed = tokenizer.add_special_tokens([TEXT])
    at = framed.index(TEXT)
    return framed[:at], framed[at + 1 :]


NO_LABEL = -1


class Sentence(NamedTuple):
    """Words and their tags; word i is on line ``first_line + i``."""

    first_line: int
    words: tuple[str, ...]
    tags: tuple[str, ...]


@dataclass(frozen=True)
class TagCorpus(ExampleCorpus[Sentence]):
    """Tagged sentences; a label's id is its index in ``labels``, which are sorted."""

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
        label_ids = {label: index for index, label in enumerate(self.labels)}
        sentences = [example.content for _, example in many]
        separator = word_separator(
            tokenizer, next((sentence.words for sentence in sentences if len(sentence.words) > 1), ("a", "b"))
        )
        words = (
            f"{separator if index else ''}{word}" for sentence in sentences for index, word in enumerate(sentence.words)
        )
        pieces = iter(tokenizer.encode_batch(words))
        before, after = example_framing(tokenizer)
        for sentence in sentences:
            ids, labels = list(before), [NO_LABEL] * len(before)
            for tag, piece in zip(sentence.tags, pieces, strict=False):
                ids += piece
                labels += [label_ids[tag], *[NO_LABEL] * (len(piece) - 1)][: len(piece)]
            yield [*ids, *after], {"labels": labels + [NO_LABEL] * len(after)}

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "labels": list(self.labels)}


def word_separator(tokenizer: Tokenizer, words: tuple[str, ...]) -> str:
    """Return the prefix with which separately encoded words equal the whole sentence.

    A space for byte-level BPE and for characters; "" for WordPiece, which has none, and for SentencePiece, which adds
    one to every text.
    """
    expected = tokenizer.encode(" ".join(words))
    for separator in (" ", ""):
        pieces = tokenizer.encode_batch([words[0], *(separator + word for word in words[1:])])
        if [token for piece in pieces for token in piece] == expected:
            return separator
    return " "


def open_tagging(paths: PairPaths, errors: str, validation: float) -> TagCorpus:
    """Open tagged sentences.

    Raises:
        DataError: Names file and line of one that is not WORD<tab>TAG, or whose tag only validation files have.
    """
    split = scan_examples(paths, lambda path: read_sentences(path, errors), TagCorpus.noun, validation)
    corpus = TagCorpus(split, errors)
    tags_by_line = (
        (path, [(example.content.first_line + index, tag) for index, tag in enumerate(example.content.tags)])
        for path, example in corpus.examples()
    )
    split, tags = collect_labels(tags_by_line, split, "tag")
    return TagCorpus(split, errors, tags)


def read_sentences(path: Path, errors: str) -> Iterator[Example[Sentence]]:
    """Yield the sentences of one file; DataErrors name file and line."""
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
        problem = "one column" if len(columns) == 1 else f"{len(columns)} columns"
        hint = "A blank line ends a sentence." if len(columns) == 1 else "Keep the word and its tag: cut -f1,2"
        raise DataError(f"{path}, line {number}: {problem}, and a tagging file has WORD<tab>TAG", hint)
    word, tag = (column.strip() for column in columns)
    for name, value in (("word", word), ("tag", tag)):
        if not value:
            raise DataError(f"{path}, line {number}: the {name} is empty, and a tagging file has WORD<tab>TAG")
    return word, tag


FORMAT_HINT = "a labeled text is LABEL<tab>TEXT"


class LabeledText(NamedTuple):
    """Text with one label."""

    label: str
    text: str


@dataclass(frozen=True)
class LabeledCorpus(ExampleCorpus[LabeledText]):
    """Labeled texts; ``labels`` are sorted."""

    text_field: str  # in JSONL
    label_field: str  # in JSONL
    labels: tuple[str, ...] = field(default=())

    noun = "labeled text"
    columns = {"labels": "int32"}  # noqa: RUF012  (never written)

    def read(self, path: Path) -> Iterator[Example[LabeledText] | None]:
        return read_labeled_lines(path, self.errors, self.text_field, self.label_field)

    def tokenizer_texts(self, content: LabeledText) -> Iterable[str]:
        return [content.text]

    def encode_batch(
        self, tokenizer: Tokenizer, many: list[tuple[Path, Example[LabeledText]]]
    ) -> Iterator[EncodedColumns]:
        label_ids = {label: index for index, label in enumerate(self.labels)}
        before, after = example_framing(tokenizer)
        rows = tokenizer.encode_batch(example.content.text for _, example in many)
        for (path, example), row in zip(many, rows, strict=True):
            ids = [*before, *row, *after]
            if not ids:
                raise DataError(f"{path}, line {example.line}: the text has no token in this vocabulary")
            yield ids, {"labels": [label_ids[example.content.label], *[NO_LABEL] * (len(ids) - 1)]}

    def settings(self) -> dict[str, Any]:
        fields = [self.text_field, self.label_field]
        return {**super().settings(), "labels": list(self.labels), "fields": fields}


def open_labeled(
    paths: PairPaths, errors: str, validation: float, text_field: str = "text", label_field: str = "label"
) -> LabeledCorpus:
    """Open labeled texts.

    Raises:
        DataError: Names file and line of one without label and text, or whose label only validation files have.
    """
    noun = LabeledCorpus.noun
    split = scan_examples(
        paths, lambda path: read_labeled_lines(path, errors, text_field, label_field), noun, validation
    )
    corpus = LabeledCorpus(split, errors, text_field, label_field)
    labels_by_line = ((path, [(example.line, example.content.label)]) for path, example in corpus.examples())
    split, labels = collect_labels(labels_by_line, split, "label")
    return LabeledCorpus(split, errors, text_field, label_field, labels)


def read_labeled_lines(
    path: Path, errors: str, text_field: str = "text", label_field: str = "label"
) -> Iterator[Example[LabeledText] | None]:
    """Yield the labeled texts of one file, None for empty ones; DataErrors name file and line."""
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
    """Yield (line number, object) of a JSONL file without empty lines; raises DataError."""
    for number, line in enumerate(read_lines(path, errors), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}, is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise DataError(f"{path}, line {number}: must be an object, got {type(content).__name__}")
        yield number, content


def _value(
    path: Path, number: int, content: dict[str, Any], name: str, kinds: tuple[type, ...], description: str
) -> Any:
    if name not in content:
        raise DataError(f"{path}, line {number}: no field {name!r}", suggest(name, content) if content else "")
    value = content[name]
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise DataError(f"{path}, line {number}: {name} must be {description}, got {json.dumps(value)[:40]}")
    return value
