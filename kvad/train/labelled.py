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

from kvad.errors import DataError, suggest
from kvad.text.base import Tokenizer
from kvad.train.columns import EncodedColumns
from kvad.train.examples import Example, ExampleCorpus, collect_labels, example_framing, scan_examples
from kvad.train.pairs import PairPaths, read_lines
from kvad.train.readers import detect_format
from kvad.train.tagging import NO_LABEL

__all__ = ["LabeledText", "LabeledCorpus", "read_labeled_lines", "read_json_objects", "open_labeled"]

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
