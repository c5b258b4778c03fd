"""[data] and [tokenizer] of a run file: which texts are learned from, in what rows, and how they become tokens.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvad.train.optim_config import check

__all__ = ["DataConfig", "SourceConfig", "TokenizerConfig"]


@dataclass(frozen=True)
class SourceConfig:
    """One of a mixture: ``paths`` are files, folders, or one folder of ``kvad data prepare``; ``weight``: its share of
    the rows, in any unit."""

    paths: tuple[str, ...]
    weight: float = 1.0

    def __post_init__(self) -> None:
        check(len(self.paths) > 0, "data.sources.paths", list(self.paths), "at least one")
        check(self.weight > 0, "data.sources.weight", self.weight, "above 0")


@dataclass(frozen=True)
class DataConfig:
    """``context``: tokens of a training row.  ``suffixes``: which files of a folder (none: all that are text).

    ``documents``: whether every file is one, or every line that is not empty.

    ``errors``: what to do with bytes that are not UTF-8.  ``validation``: share of the tokens held out.  ``order``:
    ``epochs`` cuts the corpus into rows, each seen once per epoch, at a new offset every epoch; ``windows`` draws the
    start of every row at random (nanoGPT's way); ``sequential`` reads the corpus in its order and mixes ``shuffle``
    rows at a time; ``stream`` does that without writing tokens to the disk first (``stream.py``).

    ``packing``: how documents share rows, ``split``, ``first-fit`` or ``best-fit`` (``packing.py``; auto: documents are
    split, pairs go by first fit).  ``reset``: positions restart in every document; ``isolate``: documents do not see
    each other (``rows.py``).

    ``format``: how files are read (``readers.py``; auto: by their names); of JSON lines, ``field`` is the text, or
    ``source_field`` and ``target_field`` are a pair.  ``sources``: a mixture, in the place of what is named.
    """

    context: int = 256
    suffixes: tuple[str, ...] = ()
    documents: Literal["files", "lines"] = "files"
    errors: Literal["strict", "replace"] = "strict"
    validation: float = 0.1
    order: Literal["epochs", "windows", "sequential", "stream"] = "epochs"
    packing: Literal["auto", "split", "first-fit", "best-fit"] = "auto"
    reset: bool = True
    isolate: bool = True
    format: Literal["auto", "text", "lines", "jsonl", "pairs"] = "auto"
    field: str = "text"
    source_field: str = "source"
    target_field: str = "target"
    shuffle: int = 1024
    sources: tuple[SourceConfig, ...] = ()

    def __post_init__(self) -> None:
        check(self.context >= 1, "data.context", self.context, "at least 1")
        check(0 < self.validation < 1, "data.validation", self.validation, "between 0 and 1")
        check(self.shuffle >= 1, "data.shuffle", self.shuffle, "at least 1")


@dataclass(frozen=True)
class TokenizerConfig:
    """``path``: a tokenizer to load; otherwise one of ``kind`` is trained on the corpus (see kvad.text.tokenizer)."""

    kind: Literal["bpe", "byte", "char", "word"] = "bpe"
    path: str | None = None
    vocab_size: int = 4096
    min_freq: int = 1
    lower: bool = False
    specials: tuple[str, ...] | None = None
