"""[data] and [tokenizer] of a run file: which texts are learned from, in what rows, and how they become tokens.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvad.train.config.optim import require


@dataclass(frozen=True)
class SourceConfig:
    """One of a mixture: ``paths`` are files, folders, or one folder of ``kvad data prepare``; ``weight``: its share of
    the rows, in any unit."""

    paths: tuple[str, ...]
    weight: float = 1.0

    def __post_init__(self) -> None:
        require(len(self.paths) > 0, "data.sources.paths", list(self.paths), "at least one")
        require(self.weight > 0, "data.sources.weight", self.weight, "above 0")


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

    seq_len: int = 256
    file_suffixes: tuple[str, ...] = ()
    document_unit: Literal["files", "lines"] = "files"
    encoding_errors: Literal["strict", "replace"] = "strict"
    validation_fraction: float = 0.1
    order: Literal["epochs", "windows", "sequential", "stream"] = "epochs"
    packing: Literal["auto", "split", "first-fit", "best-fit"] = "auto"
    reset_positions: bool = True
    isolate_documents: bool = True
    format: Literal["auto", "text", "lines", "jsonl", "pairs"] = "auto"
    text_field: str = "text"
    source_field: str = "source"
    target_field: str = "target"
    shuffle_buffer: int = 1024
    sources: tuple[SourceConfig, ...] = ()

    def __post_init__(self) -> None:
        require(self.seq_len >= 1, "data.seq_len", self.seq_len, "at least 1")
        require(
            0 < self.validation_fraction < 1, "data.validation_fraction", self.validation_fraction, "between 0 and 1"
        )
        require(self.shuffle_buffer >= 1, "data.shuffle_buffer", self.shuffle_buffer, "at least 1")


@dataclass(frozen=True)
class TokenizerConfig:
    """``path``: a tokenizer to load; otherwise one of ``kind`` is trained on the corpus (see kvad.text.tokenizer)."""

    kind: Literal["bpe", "byte", "char", "word"] = "bpe"
    path: str | None = None
    vocab_size: int = 4096
    min_frequency: int = 1
    lowercase: bool = False
    special_tokens: tuple[str, ...] | None = None
