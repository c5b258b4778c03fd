"""Labelled texts: what a model is to say of a whole text, one on every line.

A file of JSON lines (by its name, ``readers.py``) has objects with a text and a label (a text or a whole number), under
the names that ``[objective]`` gives; any other file has lines of ``LABEL<tab>TEXT``.  An empty text is left out and
counted.  The label lies on the text's first token.  No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvad.errors import DataError, nearest
from kvad.text.base import Tokenizer
from kvad.train.columns import Encoded
from kvad.train.examples import Example, ExampleCorpus, find, framing, labels_of
from kvad.train.pairs import PairPaths, lines_of
from kvad.train.readers import format_of
from kvad.train.tagging import NO_LABEL

__all__ = ["Labelled", "LabelledCorpus", "labelled_of", "objects_of", "open_labelled"]

FORM = "a labelled text is LABEL<tab>TEXT"


class Labelled(NamedTuple):
    label: str
    text: str


@dataclass(frozen=True)
class LabelledCorpus(ExampleCorpus[Labelled]):
    """``text_field``, ``label_field``: names in JSONL; ``labels``: the labels, sorted."""

    text_field: str
    label_field: str
    labels: tuple[str, ...] = field(default=())

    noun = "labelled text"
    columns = {"labels": "int32"}  # noqa: RUF012  (never written)

    def read(self, path: Path) -> Iterator[Example[Labelled] | None]:
        return labelled_of(path, self.errors, self.text_field, self.label_field)

    def texts_of(self, content: Labelled) -> Iterable[str]:
        return [content.text]

    def encoded_many(self, tokenizer: Tokenizer, many: list[tuple[Path, Example[Labelled]]]) -> Iterator[Encoded]:
        number = {label: place for place, label in enumerate(self.labels)}
        before, after = framing(tokenizer)
        rows = tokenizer.encode_batch(example.content.text for _, example in many)
        for (path, example), row in zip(many, rows, strict=True):
            ids = [*before, *row, *after]
            if not ids:
                raise DataError(f"{path}, line {example.line}: the text has no token in this vocabulary")
            yield ids, {"labels": [number[example.content.label], *[NO_LABEL] * (len(ids) - 1)]}

    def settings(self) -> dict[str, Any]:
        fields = [self.text_field, self.label_field]
        return {**super().settings(), "labels": list(self.labels), "fields": fields}


def open_labelled(
    paths: PairPaths, errors: str, validation: float, text_field: str = "text", label_field: str = "label"
) -> LabelledCorpus:
    """Raises DataError naming file and line: of one that is no labelled text, and of a label that a file held out has
    and training has not."""
    noun = LabelledCorpus.noun
    found = find(paths, lambda path: labelled_of(path, errors, text_field, label_field), noun, validation)
    corpus = LabelledCorpus(found, errors, text_field, label_field)
    seen = ((path, [(each.line, each.content.label)]) for path, each in corpus.examples())
    found, labels = labels_of(seen, found, "label")
    return LabelledCorpus(found, errors, text_field, label_field, labels)


def labelled_of(
    path: Path, errors: str, text_field: str = "text", label_field: str = "label"
) -> Iterator[Example[Labelled] | None]:
    """Of one file; None for an empty text.  Raises DataError naming file and line."""
    if format_of(path, "auto") == "jsonl":
        for number, content in objects_of(path, errors):
            text = _value(path, number, content, text_field, (str,), "a text")
            label = _value(path, number, content, label_field, (str, int), "a text or a whole number")
            yield Example(number, Labelled(str(label), str(text))) if str(text).strip() else None
        return
    for number, line in enumerate(lines_of(path, errors), 1):
        if not line.strip():
            continue
        label, tab, text = line.partition("\t")
        if not tab or "\t" in text:
            raise DataError(f"{path}, line {number}: {'two tabs or more' if tab else 'no tab'}, and {FORM}")
        if not label.strip():
            raise DataError(f"{path}, line {number}: the label is empty, and {FORM}")
        yield Example(number, Labelled(label.strip(), text)) if text.strip() else None


def objects_of(path: Path, errors: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with the numbers of their lines; empty lines are left out.  Raises DataError."""
    for number, line in enumerate(lines_of(path, errors), 1):
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
        raise DataError(f"{path}, line {number}: no field {name!r}", nearest(name, content) if content else "")
    value = content[name]
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise DataError(f"{path}, line {number}: {name} must be {what}, found {json.dumps(value)[:40]}")
    return value
