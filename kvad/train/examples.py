"""Files of examples: one text and what is to be said of it, again and again.  What their readers have in common.

The last examples are held out: those of the files that were named for it, or a share of all.  Of a share, an example
that has a label which no example before it has stays in training, behind the others there.  No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from kvad.errors import DataError, UsageError, format_count
from kvad.text.base import Tokenizer
from kvad.train.columns import EncodedColumns
from kvad.train.corpus import CorpusFile, FrameFn, Progress
from kvad.train.pairs import PairPaths, source_info
from kvad.train.readers import TextPiece

__all__ = ["Example", "ExampleCorpus", "ExampleSplit", "scan_examples", "example_framing", "collect_labels"]

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
