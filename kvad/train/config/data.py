"""[data] and [tokenizer] of a run file: texts, rows and tokenizer. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvad import config as cfg
from kvad.errors import ConfigError


@dataclass(frozen=True)
class SourceConfig:
    """Source of a mixture."""

    paths: tuple[str, ...]  # files, folders, or one folder of `kvad data prepare`
    weight: cfg.PositiveFloat = 1.0  # share of the rows, in any unit

    def __post_init__(self) -> None:
        cfg.check_fields(self, "data.sources")
        if not self.paths:
            raise ConfigError("data.sources.paths: must not be empty", "Name at least one file or folder.")


@dataclass(frozen=True)
class DataConfig:
    """Texts of a run and how they become rows.

    ``order``: ``epochs`` cuts the corpus into rows, each used once per epoch, at a new offset every epoch; ``windows``
    starts every row at random (as nanoGPT does); ``sequential`` reads the corpus in order and shuffles
    ``shuffle_buffer`` rows at a time; ``stream`` does so without writing tokens to disk first (``data/streaming.py``).
    """

    seq_len: cfg.PositiveInt = 256  # tokens of a training row
    file_suffixes: tuple[str, ...] = ()  # files to read of a folder; () for all text files
    document_unit: Literal["files", "lines"] = "files"  # a document per file or per non-empty line
    encoding_errors: Literal["strict", "replace"] = "strict"  # for bytes that are not UTF-8
    validation_fraction: cfg.OpenFraction = 0.1  # of the tokens
    order: Literal["epochs", "windows", "sequential", "stream"] = "epochs"
    # `data/packing.py`; auto: documents are split, pairs use first-fit
    packing: Literal["auto", "split", "first-fit", "best-fit"] = "auto"
    reset_positions: bool = True  # positions restart in every document (`data/collate.py`)
    isolate_documents: bool = True  # documents do not attend to each other
    format: Literal["auto", "text", "lines", "jsonl", "pairs"] = "auto"  # `sources/formats.py`; auto: by file name
    text_field: str = "text"  # of JSON lines
    source_field: str = "source"  # of JSON lines with pairs
    target_field: str = "target"
    shuffle_buffer: cfg.PositiveInt = 1024  # rows
    sources: tuple[SourceConfig, ...] = ()  # a mixture, instead of named texts

    def __post_init__(self) -> None:
        cfg.check_fields(self, "data")


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer to load from ``path``, or to train on the corpus."""

    kind: Literal["bpe", "byte", "char", "word"] = "bpe"
    path: str | None = None
    vocab_size: int = 4096
    min_frequency: int = 1
    lowercase: bool = False
    special_tokens: tuple[str, ...] | None = None
