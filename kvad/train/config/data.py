"""[data] and [tokenizer] of a run file: texts, rows and tokenizer. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvad.train.config.optim import require


@dataclass(frozen=True)
class SourceConfig:
    """Source of a mixture."""

    paths: tuple[str, ...]  # files, folders, or one folder of `kvad data prepare`
    weight: float = 1.0  # share of the rows, in any unit

    def __post_init__(self) -> None:
        require(len(self.paths) > 0, "data.sources.paths", list(self.paths), "at least one")
        require(self.weight > 0, "data.sources.weight", self.weight, "above 0")


@dataclass(frozen=True)
class DataConfig:
    """Texts of a run and how they become rows.

    ``order``: ``epochs`` cuts the corpus into rows, each used once per epoch, at a new offset every epoch; ``windows``
    starts every row at random (as nanoGPT does); ``sequential`` reads the corpus in order and shuffles
    ``shuffle_buffer`` rows at a time; ``stream`` does so without writing tokens to disk first (``data/streaming.py``).
    """

    seq_len: int = 256  # tokens of a training row
    file_suffixes: tuple[str, ...] = ()  # files to read of a folder; () for all text files
    document_unit: Literal["files", "lines"] = "files"  # a document per file or per non-empty line
    encoding_errors: Literal["strict", "replace"] = "strict"  # for bytes that are not UTF-8
    validation_fraction: float = 0.1  # of the tokens
    order: Literal["epochs", "windows", "sequential", "stream"] = "epochs"
    # `data/packing.py`; auto: documents are split, pairs use first-fit
    packing: Literal["auto", "split", "first-fit", "best-fit"] = "auto"
    reset_positions: bool = True  # positions restart in every document (`data/collate.py`)
    isolate_documents: bool = True  # documents do not attend to each other
    format: Literal["auto", "text", "lines", "jsonl", "pairs"] = "auto"  # `sources/formats.py`; auto: by file name
    text_field: str = "text"  # of JSON lines
    source_field: str = "source"  # of JSON lines with pairs
    target_field: str = "target"
    shuffle_buffer: int = 1024  # rows
    sources: tuple[SourceConfig, ...] = ()  # a mixture, instead of named texts

    def __post_init__(self) -> None:
        require(self.seq_len >= 1, "data.seq_len", self.seq_len, "at least 1")
        require(
            0 < self.validation_fraction < 1, "data.validation_fraction", self.validation_fraction, "between 0 and 1"
        )
        require(self.shuffle_buffer >= 1, "data.shuffle_buffer", self.shuffle_buffer, "at least 1")


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer to load from ``path``, or to train on the corpus."""

    kind: Literal["bpe", "byte", "char", "word"] = "bpe"
    path: str | None = None
    vocab_size: int = 4096
    min_frequency: int = 1
    lowercase: bool = False
    special_tokens: tuple[str, ...] | None = None
