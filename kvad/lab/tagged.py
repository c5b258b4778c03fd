"""Labelled texts to judge by, from the files that training reads (``train/tagging.py``, ``train/labelled.py``).  No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvad.errors import DataError
from kvad.train.labelled import read_labeled_lines
from kvad.train.tagging import read_sentences

__all__ = ["Sentence", "read_labeled", "read_tagged"]

Sentence = tuple[list[str], list[str]]  # words, tags


def read_tagged(paths: Sequence[Path], errors: str = "strict") -> list[Sentence]:
    """``WORD<tab>TAG`` lines, an empty line between sentences.  Raises DataError naming file and line."""
    found = [each.content for path in paths for each in read_sentences(path, errors)]
    if not found:
        raise DataError(f"no tagged words in {', '.join(map(str, paths))}")
    return [(list(each.words), list(each.tags)) for each in found]


def read_labeled(paths: Sequence[Path], errors: str = "strict") -> list[tuple[str, str]]:
    """(text, label) of ``LABEL<tab>TEXT`` lines or of JSON lines.  Raises DataError naming file and line."""
    found = [each.content for path in paths for each in read_labeled_lines(path, errors) if each is not None]
    if not found:
        raise DataError(f"no labelled texts in {', '.join(map(str, paths))}")
    return [(each.text, each.label) for each in found]
