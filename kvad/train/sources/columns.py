"""Columns of a store: a value for every token, in a file of its own beside the tokens.

``labels.bin`` holds the label of each token (int32, -1: none), ``mask.bin`` whether it is one to learn to say (uint8);
value i belongs to token i of the stream, whichever shard holds it.  A manifest names them with their types::

    tokens    5  9  2  7  7  3        labels   0  -1   3   3  -1   1        "columns": {"labels": "int32"}

What makes such a store is a :class:`Columned` corpus: it gives the ids of its texts itself.  No torch.
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

EncodedColumns = tuple[list[int], Mapping[str, list[int]]]  # the ids of a text, and a value of each by column


@runtime_checkable
class HasColumns(Protocol):
    """A corpus that knows more of a token than its id: ``columns`` says what, and as which numpy type."""

    @property
    def columns(self) -> Mapping[str, str]: ...

    def encoded(self, tokenizer: Tokenizer, progress: Progress) -> Iterator[EncodedColumns]:
        """Every text, as the model is to read it."""
        ...


class ColumnFiles:
    """The columns of a store, by name."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        names: Mapping[str, str] = manifest.get("columns", {})
        self._maps = {name: np.memmap(folder / f"{name}.bin", np.dtype(kind), "r") for name, kind in names.items()}

    def take(self, name: str, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Values at stream positions ``at``, any shape, of the column ``name``."""
        found: npt.NDArray[np.int64] = self._maps[name][at].astype(np.int64)
        return found


def column_sizes(manifest: Mapping[str, Any]) -> dict[str, int]:
    """The files of the columns that a manifest names, and the bytes that each should have: a value for every token."""
    columns = manifest.get("columns", {}).items()
    return {f"{name}.bin": np.dtype(kind).itemsize * manifest["tokens"] for name, kind in columns}


def check_column_files(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether every column that the manifest names has a value for every token."""
    return all((folder / name).stat().st_size == size for name, size in column_sizes(manifest).items())


def write_columns(folder: Path, columns: Mapping[str, str], texts: Iterable[EncodedColumns]) -> Iterator[list[int]]:
    """The ids of each text, whose columns are written on the way."""
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in columns}
        for ids, values in texts:
            for name, kind in columns.items():
                assert len(values[name]) == len(ids), f"a value of {name} for every token"
                files[name].write(np.asarray(values[name], np.dtype(kind).newbyteorder("<")).tobytes())
            yield ids
