"""Labelled texts from files: words with tags in two columns, or lines of a text and its label.  No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvad.errors import DataError
from kvad.train.corpus import read_text

__all__ = ["Sentence", "read_labelled", "read_tagged"]

Sentence = tuple[list[str], list[str]]  # words, tags


def read_tagged(paths: Sequence[Path], errors: str = "strict") -> list[Sentence]:
    """``WORD<tab>TAG`` lines, an empty line between sentences.  Raises DataError naming file and line."""
    found: list[Sentence] = []
    for path in paths:
        words, tags = list[str](), list[str]()
        for number, line in enumerate([*_lines(path, errors), ""], 1):
            if line.strip():
                word, tag = _columns(path, number, line, "a line is WORD<tab>TAG")
                words.append(word)
                tags.append(tag)
            elif words:
                found.append((words, tags))
                words, tags = [], []
    if not found:
        raise DataError(f"no tagged words in {', '.join(map(str, paths))}")
    return found


def read_labelled(paths: Sequence[Path], errors: str = "strict") -> list[tuple[str, str]]:
    """``TEXT<tab>LABEL`` lines; empty ones are passed over.  Raises DataError naming file and line."""
    found = []
    for path in paths:
        for number, line in enumerate(_lines(path, errors), 1):
            if line.strip():
                found.append(_columns(path, number, line, "a line is TEXT<tab>LABEL"))
    if not found:
        raise DataError(f"no labelled texts in {', '.join(map(str, paths))}")
    return found


def _lines(path: Path, errors: str) -> Iterator[str]:
    yield from read_text(path, errors).replace("\r\n", "\n").split("\n")


def _columns(path: Path, number: int, line: str, form: str) -> tuple[str, str]:
    columns = line.split("\t")
    if len(columns) != 2 or not all(column.strip() for column in columns):
        found = "no tab" if len(columns) == 1 else f"{len(columns)} columns" if len(columns) > 2 else "an empty column"
        raise DataError(f"{path}, line {number}: {found}, and {form}")
    return columns[0], columns[1]
