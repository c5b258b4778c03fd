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

from kvad.errors import DataError, UsageError, counted
from kvad.text.base import Tokenizer
from kvad.train.columns import Encoded
from kvad.train.corpus import Framer, Progress, Source
from kvad.train.pairs import PairPaths, look
from kvad.train.readers import Piece

__all__ = ["Example", "ExampleCorpus", "Found", "find", "framing", "labels_of"]

TEXT = -7  # stands for a text: no token has this id
TOGETHER = 1024  # examples that are encoded at a time

T = TypeVar("T")


class Example(NamedTuple, Generic[T]):
    """``content`` as it was read, and the line that it begins at."""

    line: int
    content: T


Reader = Callable[[Path], Iterator[Example[T] | None]]  # None: nothing to learn from, and left out


class Found(NamedTuple):
    """What is in the files: examples in all, those held out (the last ones; ``files_held``: they are files of their
    own), and those left out.  ``kept``: numbers, in the order of the files and from 0, of those that lie among the ones
    held out and are not."""

    files: tuple[Source, ...]
    num_texts: int
    num_held: int
    skipped: int
    files_held: bool = False
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class ExampleCorpus(ABC, Generic[T]):
    """``found``: what was counted; ``read`` gives a file's examples again."""

    found: Found
    errors: str

    noun: ClassVar[str]
    columns: ClassVar[Mapping[str, str]]

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.found.files

    @property
    def num_held(self) -> int:
        return self.found.num_held

    @abstractmethod
    def read(self, path: Path) -> Iterator[Example[T] | None]:
        """The examples of a file, in order.  Raises DataError naming file and line."""

    @abstractmethod
    def texts_of(self, content: T) -> Iterable[str]:
        """What a tokenizer is to be trained on."""

    @abstractmethod
    def encoded_many(self, tokenizer: Tokenizer, many: list[tuple[Path, Example[T]]]) -> Iterator[Encoded]: ...

    def examples(self) -> Iterator[tuple[Path, Example[T]]]:
        """In the order of the files, but those that are ``kept`` stand before all that are held out."""
        kept = set(self.found.kept)
        if not kept:
            yield from self._in_files()
            return
        first = self._first
        yield from (each for number, each in enumerate(self._in_files()) if number < first or number in kept)
        yield from (each for number, each in enumerate(self._in_files()) if number >= first and number not in kept)

    def in_files(self, place: int) -> int:
        """The number in the files, from 0, of the training example that stands at ``place``."""
        return place if place < self._first else self.found.kept[place - self._first]

    @property
    def _first(self) -> int:
        """The number in the files of the first one of those held out, and of those kept from among them."""
        return self.found.num_texts - self.num_held - len(self.found.kept)

    def _in_files(self) -> Iterator[tuple[Path, Example[T]]]:
        for source in self.found.files:
            yield from ((source.path, each) for each in self.read(source.path) if each is not None)

    def texts(self) -> Iterator[str]:
        for _, example in self.examples():
            yield from self.texts_of(example.content)

    def pieces(self) -> Iterator[Piece]:
        return map(Piece, self.texts())

    def encoded(self, tokenizer: Tokenizer, progress: Progress = lambda chars, tokens: None) -> Iterator[Encoded]:
        every, chars, tokens = self.examples(), 0, 0
        while many := list(islice(every, TOGETHER)):
            for text in self.encoded_many(tokenizer, many):
                tokens += len(text[0])
                yield text
            chars += sum(len(text) for _, example in many for text in self.texts_of(example.content))
            progress(chars, tokens)

    def framer(self, tokenizer: Tokenizer) -> Framer:
        """Texts stand in the tokenizer's frame, as the model will read them."""
        return lambda _number, ids: tokenizer.frame(ids)

    def settings(self) -> dict[str, Any]:
        """What decides the texts, and how they are framed."""
        sources = [source.entry() for source in self.sources]
        kept = {"kept": list(self.found.kept)} if self.found.kept else {}
        return {"errors": self.errors, "sources": sources, self.noun: {"held": self.num_held, **kept}}

    def told(self) -> str:
        """One line about it."""
        num_bytes = sum(source.num_bytes for source in self.sources)
        skipped = f"; {counted(self.found.skipped, 'empty one')} left out" if self.found.skipped else ""
        files, kept = counted(len(self.sources), "file"), len(self.found.kept)
        rare = f"; {counted(kept, self.noun)} of that share stay{'s' * (kept == 1)} in training, for a rare label"
        return (
            f"corpus: {counted(self.found.num_texts, self.noun)} in {files}, {num_bytes / 1e6:,.1f} MB, "
            f"{self.num_held:,} of them for validation{rare if kept else ''}{skipped}"
        )


def find(paths: PairPaths, read: Reader[Any], noun: str, validation: float) -> Found:
    """Read every line once and hash the files.  ``validation``: the share held out where no files are.

    Raises DataError for what cannot be read and for too few examples, UsageError for files of pairs.
    """
    files, counts, skipped = [], [0, 0], 0
    for held, items in enumerate((paths.files, paths.held)):
        for item in items:
            if len(item) != 1:
                raise UsageError(f"--pairs: {noun}s lie in single files", "name the files alone")
            if item[0].is_dir():
                raise DataError(f"{item[0]} is a folder, and {noun}s come from files", "name the files")
            files.append(look(item[0]))
            for example in read(item[0]):
                skipped += example is None
                counts[held] += example is not None
    if not files:
        raise DataError("no corpus was named", f"name files of {noun}s")
    num_held = counts[1] if paths.held else max(1, int(counts[0] * validation))
    left = max(0, sum(counts) - num_held)
    if not num_held or not left:
        raise DataError(
            f"too few {noun}s: {counted(left, noun)} to train on and {num_held} for validation",
            f"{counted(skipped, noun)} had nothing to learn from" if skipped else "",
        )
    return Found(tuple(files), sum(counts), num_held, skipped, bool(paths.held))


def labels_of(
    examples: Iterable[tuple[Path, Iterable[tuple[int, str]]]], found: Found, noun: str
) -> tuple[Found, tuple[str, ...]]:
    """What is held out, and the labels of the training examples, sorted.  ``examples``: of each its file, and (line,
    label) of all it has.

    A label that only examples held out have, no model could learn.  Where a share is held out, the first of them stays
    in training (``found.kept``).  DataError, naming file and line, where it is in a file that was named for it; and
    where nothing would be left to hold out.
    """
    known, kept = set[str](), list[int]()
    first = found.num_texts - found.num_held
    for number, (path, labels) in enumerate(examples):
        for line, label in labels:
            if number < first or label in known:
                known.add(label)
            elif found.files_held:
                raise DataError(
                    f"{path}, line {line}: {noun} {label!r} is held out and does not occur in training",
                    "hold out other examples, or name the file to train on that has it",
                )
            else:
                known.add(label)
                kept += [number] if number not in kept[-1:] else []
    if len(kept) == found.num_held:
        raise DataError(
            f"nothing is left to hold out: {counted(found.num_held, 'example')} of this share, and each has a {noun} "
            "that none before it has",
            "hold out a larger share, or a file: --validation FILE",
        )
    return found._replace(num_held=found.num_held - len(kept), kept=tuple(kept)), tuple(sorted(known))


def framing(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's frame puts before and after a text."""
    around = tokenizer.frame([TEXT])
    at = around.index(TEXT)
    return around[:at], around[at + 1 :]
