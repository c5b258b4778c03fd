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

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from kvad.errors import DataError, UsageError, format_count
from kvad.text import Tokenizer
from kvad.train.sources.documents import Corpus, CorpusFile, Progress, describe_files
from kvad.train.sources.formats import detect_format, json_field, read_json_objects, read_lines
from kvad.train.sources.pairs import PairPaths, source_info

TEXT = -7  # placeholder of a text; no token has this id
NO_LABEL = -1
ENCODE_BATCH = 1024  # examples encoded at a time

T = TypeVar("T")
EncodedColumns = tuple[list[int], Mapping[str, list[int]]]  # ids of a text, and a value per token for each column


class Example(NamedTuple, Generic[T]):
    """Content of an example and its first line."""

    line: int
    content: T


ExampleBatch = list[tuple[Path, Example[T]]]  # with their files


@dataclass(frozen=True, kw_only=True)
class ExampleCorpus(Corpus, Generic[T]):
    """Examples of files; ``read`` reads a file's examples again."""

    errors: str
    # Set by ``open``:
    sources: tuple[CorpusFile, ...] = ()
    num_texts: int = 0
    num_held_out: int = 0  # the last ones
    skipped: int = 0  # examples without a target
    has_held_out_files: bool = False  # the held-out examples have their own files
    train_files: tuple[int, ...] = ()  # indices within the held-out range that stay in training

    columns: ClassVar[Mapping[str, str]]  # values for every token: name -> numpy type

    def open(self, paths: PairPaths, validation: float) -> Self:
        """Return the corpus of these files, scanned once; ``validation`` is held out if there are no held-out files.

        Raises:
            DataError: Names file and line of a wrong example, or there are too few.
            UsageError: If files of pairs are named.
        """
        noun, files, counts, skipped = self.noun, list[CorpusFile](), [0, 0], 0
        for is_held_out, items in enumerate((paths.files, paths.held_out)):
            for item in items:
                if len(item) != 1:
                    raise UsageError(
                        f"--pairs: must not be given, {noun}s are in single files", "Name the files alone."
                    )
                if item[0].is_dir():
                    raise DataError(f"{item[0]} is a folder, and {noun}s come from files", "Name the files.")
                files.append(source_info(item[0]))
                for example in self.read(item[0]):
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
        corpus = replace(self, sources=tuple(files), num_texts=sum(counts), num_held_out=num_held, skipped=skipped)
        return replace(corpus, has_held_out_files=bool(paths.held_out))

    @abstractmethod
    def read(self, path: Path) -> Iterator[Example[T] | None]:
        """Yield the examples of a file, in order, None for one without a target; DataErrors name file and line."""

    @abstractmethod
    def tokenizer_texts(self, content: T) -> Iterable[str]:
        """Return the texts that a tokenizer is trained on."""

    @abstractmethod
    def encode_batch(self, tokenizer: Tokenizer, many: ExampleBatch[T]) -> Iterator[EncodedColumns]: ...

    def examples(self) -> Iterator[tuple[Path, Example[T]]]:
        """Yield examples in file order, held-out ones last."""
        training = set(self.train_files)
        if not training:
            yield from self._in_file_order()
            return
        first = self._first
        yield from (item for at, item in enumerate(self._in_file_order()) if at < first or at in training)
        yield from (item for at, item in enumerate(self._in_file_order()) if at >= first and at not in training)

    def file_index(self, index: int) -> int:
        """Return the index in the files of training example ``index``."""
        return index if index < self._first else self.train_files[index - self._first]

    @property
    def _first(self) -> int:
        """Index in the files of the first example of the held-out range."""
        return self.num_texts - self.num_held_out - len(self.train_files)

    def _in_file_order(self) -> Iterator[tuple[Path, Example[T]]]:
        for source in self.sources:
            yield from ((source.path, example) for example in self.read(source.path) if example is not None)

    def texts(self) -> Iterator[str]:
        for _, example in self.examples():
            yield from self.tokenizer_texts(example.content)

    def encoded(self, tokenizer: Tokenizer, progress: Progress = lambda *_: None) -> Iterator[EncodedColumns]:
        examples, chars, tokens = self.examples(), 0, 0
        while many := list(islice(examples, ENCODE_BATCH)):
            for text in self.encode_batch(tokenizer, many):
                tokens += len(text[0])
                yield text
            chars += sum(len(text) for _, example in many for text in self.tokenizer_texts(example.content))
            progress(chars, tokens)

    def settings(self) -> dict[str, Any]:
        training = {"kept": list(self.train_files)} if self.train_files else {}
        return {**super().settings(), self.noun: {"held": self.num_held_out, **training}}

    def summary(self) -> str:
        skipped = f"; {format_count(self.skipped, 'empty one')} left out" if self.skipped else ""
        count = len(self.train_files)
        rare = f"; {format_count(count, self.noun)} of them stay{'s' * (count == 1)} in training, for a rare label"
        corpus = f"corpus: {format_count(self.num_texts, self.noun)} in {describe_files(self.sources)}"
        return f"{corpus}, {self.num_held_out:,} of them for validation{rare if count else ''}{skipped}"


@dataclass(frozen=True, kw_only=True)
class LabelCorpus(ExampleCorpus[T]):
    """Examples with labels; a label's id is its index in ``labels``, which are sorted."""

    labels: tuple[str, ...] = ()  # of the training examples

    label_noun: ClassVar[str]
    columns = {"labels": "int32"}  # noqa: RUF012  (never written)

    @abstractmethod
    def labels_by_line(self, example: Example[T]) -> Iterable[tuple[int, str]]:
        """Yield line and label of every label of an example."""

    def open(self, paths: PairPaths, validation: float) -> Self:
        """Return the corpus of these files with the labels of the training examples.

        A model cannot learn a label that only held-out examples have. If a fraction is held out, the first such example
        stays in training (``train_files``); DataError if it is in a validation file.
        """
        corpus = super().open(paths, validation)
        labels, training = set[str](), list[int]()
        first = corpus.num_texts - corpus.num_held_out
        for number, (path, example) in enumerate(corpus.examples()):
            for line, label in corpus.labels_by_line(example):
                if number >= first and label not in labels:
                    if corpus.has_held_out_files:
                        raise DataError(
                            f"{path}, line {line}: {self.label_noun} {label!r} is held out and does not occur in "
                            "training",
                            "Hold out other examples, or name the training file that has it.",
                        )
                    training += [number] if number not in training[-1:] else []
                labels.add(label)
        if len(training) == corpus.num_held_out:
            raise DataError(
                f"nothing is left to hold out: {format_count(corpus.num_held_out, 'example')} of this fraction, "
                f"and each has a {self.label_noun} that no earlier one has",
                "Hold out a larger fraction, or a file: --validation FILE",
            )
        num_held_out = corpus.num_held_out - len(training)
        return replace(corpus, num_held_out=num_held_out, train_files=tuple(training), labels=tuple(sorted(labels)))

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "labels": list(self.labels)}


def example_framing(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer's frame puts before and after a text."""
    framed = tokenizer.add_special_tokens([TEXT])
    at = framed.index(TEXT)
    return framed[:at], framed[at + 1 :]


class Sentence(NamedTuple):
    """Words and their tags, one on every line."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


class TagCorpus(LabelCorpus[Sentence]):
    """Tagged sentences."""

    noun, label_noun = "sentence", "tag"

    def read(self, path: Path) -> Iterator[Example[Sentence]]:
        words, tags = list[str](), list[str]()
        for number, line in enumerate(chain(read_lines(path, self.errors), [""]), 1):
            if line.strip():
                word, tag = _columns(path, number, line)
                words.append(word)
                tags.append(tag)
            elif words:
                yield Example(number - len(words), Sentence(tuple(words), tuple(tags)))
                words, tags = [], []

    def labels_by_line(self, example: Example[Sentence]) -> Iterable[tuple[int, str]]:
        return enumerate(example.content.tags, example.line)

    def tokenizer_texts(self, content: Sentence) -> Iterable[str]:
        return [" ".join(content.words)]

    def encode_batch(self, tokenizer: Tokenizer, many: ExampleBatch[Sentence]) -> Iterator[EncodedColumns]:
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


class LabeledText(NamedTuple):
    """Text with one label."""

    label: str
    text: str


@dataclass(frozen=True, kw_only=True)
class LabeledCorpus(LabelCorpus[LabeledText]):
    """Texts with one label each."""

    text_field: str = "text"  # in JSONL
    label_field: str = "label"  # in JSONL

    noun, label_noun = "labeled text", "label"

    def read(self, path: Path) -> Iterator[Example[LabeledText] | None]:
        if detect_format(path, "auto") == "jsonl":
            for number, content in read_json_objects(path, self.errors):
                where = f"{path}, line {number}"
                text = json_field(where, content, self.text_field)
                label = json_field(where, content, self.label_field, (str, int))
                yield Example(number, LabeledText(str(label), text)) if text.strip() else None
            return
        for number, line in enumerate(read_lines(path, self.errors), 1):
            if not line.strip():
                continue
            label, tab, text = line.partition("\t")
            if not tab or "\t" in text or not label.strip():
                problem = "no tab" if not tab else "two tabs or more" if "\t" in text else "the label is empty"
                raise DataError(f"{path}, line {number}: {problem}, and a labeled text is LABEL<tab>TEXT")
            yield Example(number, LabeledText(label.strip(), text)) if text.strip() else None

    def labels_by_line(self, example: Example[LabeledText]) -> Iterable[tuple[int, str]]:
        return [(example.line, example.content.label)]

    def tokenizer_texts(self, content: LabeledText) -> Iterable[str]:
        return [content.text]

    def encode_batch(self, tokenizer: Tokenizer, many: ExampleBatch[LabeledText]) -> Iterator[EncodedColumns]:
        label_ids = {label: index for index, label in enumerate(self.labels)}
        before, after = example_framing(tokenizer)
        rows = tokenizer.encode_batch(example.content.text for _, example in many)
        for (path, example), row in zip(many, rows, strict=True):
            ids = [*before, *row, *after]
            if not ids:
                raise DataError(f"{path}, line {example.line}: the text has no token in this vocabulary")
            yield ids, {"labels": [label_ids[example.content.label], *[NO_LABEL] * (len(ids) - 1)]}

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "fields": [self.text_field, self.label_field]}
