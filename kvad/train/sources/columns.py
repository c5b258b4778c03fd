"""Columns of a token store: a value for every token, in separate files.

``labels.bin`` holds the label of each token (int32, -1: none), ``mask.bin`` whether it is a target (uint8); value i
belongs to token i of the stream, in whichever shard it is. The manifest names columns and types::

    tokens    5  9  2  7  7  3        labels   0  -1   3   3  -1   1        "columns": {"labels": "int32"}

Such stores come from a :class:`HasColumns` corpus, which encodes its texts itself. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvad.text import Tokenizer
from kvad.train.sources.documents import Progress

EncodedColumns = tuple[list[int], Mapping[str, list[int]]]  # ids of a text, and their values by column


@runtime_checkable
class HasColumns(Protocol):
    """Corpus with values for every token; ``columns`` maps names to numpy types."""

    @property
    def columns(self) -> Mapping[str, str]: ...

    def encoded(self, tokenizer: Tokenizer, progress: Progress) -> Iterator[EncodedColumns]:
        """Yield every text as the model reads it."""
        ...


class ColumnFiles:
    """Columns of a store by name."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        names: Mapping[str, str] = manifest.get("columns", {})
        self._maps = {name: np.memmap(folder / f"{name}.bin", np.dtype(kind), "r") for name, kind in names.items()}

    def take(self, name: str, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the values of column ``name`` at stream positions ``at``, any shape."""
        values: npt.NDArray[np.int64] = self._maps[name][at].astype(np.int64)
        return values


def column_sizes(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Return the expected size in bytes of every column file."""
    columns = manifest.get("columns", {}).items()
    return {f"{name}.bin": np.dtype(kind).itemsize * manifest["tokens"] for name, kind in columns}


def check_column_files(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Return True if every column of the manifest has a value for every token."""
    return all((folder / name).stat().st_size == size for name, size in column_sizes(manifest).items())


def write_columns(folder: Path, columns: Mapping[str, str], texts: Iterable[EncodedColumns]) -> Iterator[list[int]]:
    """Write the columns of texts and yield the ids of each text."""
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in columns}
        for ids, values in texts:
            for name, kind in columns.items():
                assert len(values[name]) == len(ids), f"a value of {name} for every token"
                files[name].write(np.asarray(values[name], np.dtype(kind).newbyteorder("<")).tobytes())
            yield ids
