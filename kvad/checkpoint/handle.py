"""Handles of opened checkpoints in either layout; contents are read on first use."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvad.checkpoint.folder import MODEL, TRAINING, read_json
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.config import ModelConfig
from kvad.errors import CheckpointError
from kvad.text import Tokenizer, load_tokenizer

# A folder that has one of these files has a tokenizer, which must be readable.
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer_config.json", "*.model", "*.spm")


class TrainingState(NamedTuple):
    """State that a resumed run needs: tensors by name, and JSON values."""

    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


class LazyTensors(Mapping[str, Tensor]):
    """Tensors of one memory-mapped safetensors file; bytes are read when they are used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt")
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error
        self._names = sorted(self._file.keys())  # type: ignore[no-untyped-call]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in the file's header; no data is read."""
        return tuple(self._file.get_slice(name).get_shape())


def read_training_state(path: Path) -> TrainingState | None:
    """Read the training state of a folder, or return None if it has none."""
    folder = path / TRAINING
    if not (folder / "state.json").is_file():
        return None
    return TrainingState(LazyTensors(folder / "state.safetensors"), read_json(folder / "state.json"))


@dataclass(frozen=True)
class CheckpointHandle(ABC):
    """An opened checkpoint in kvad's layout (``native.py``) or Hugging Face's (``hf_layout.py``)."""

    path: Path
    files: Mapping[str, Mapping[str, Any]] | None = None  # manifest entry by file name; None if kvad did not write it

    @property
    @abstractmethod
    def config(self) -> ModelConfig: ...

    @property
    @abstractmethod
    def generation(self) -> GenerationConfig:
        """The checkpoint's generation config."""

    @property
    @abstractmethod
    def origin(self) -> str | None:
        """The Hugging Face ``model_type``, or None for a model that has none."""

    @property
    @abstractmethod
    def stored_dtype(self) -> torch.dtype:
        """The dtype of most of the stored weights."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Memory-mapped tensors by their names in the file."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors by kvad's names; a CheckpointError names one that does not fit."""

    def weights_as(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors in ``dtype`` (None: as stored)."""
        for name, tensor in self.weights():
            yield name, tensor if dtype is None else tensor.to(dtype)

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer and the chat template."""
        return self.path

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None if the folder has none."""
        return self.read_tokenizer()

    def read_tokenizer(self) -> Tokenizer | None:
        """Read the tokenizer, or return None if the folder has none."""
        has_tokenizer = any(True for pattern in TOKENIZER_FILES for _ in self.path.glob(pattern))
        return load_tokenizer(self.path) if has_tokenizer else None

    @cached_property
    def training(self) -> TrainingState | None:
        """The training state, or None if the checkpoint has none."""
        return read_training_state(self.path)

    def fingerprint(self) -> str:
        """Return the sha256 (hex) of config and tokenizer, and of the weights by the manifest."""
        assert self.files is not None, "only checkpoints that kvad wrote have a manifest"
        digest = hashlib.sha256(str(self.files[MODEL]["sha256"]).encode())
        digest.update(json.dumps(self.config.to_dict(), sort_keys=True).encode())
        if self.tokenizer is not None:
            digest.update(self.tokenizer.fingerprint().encode())
        return digest.hexdigest()


class CheckpointSnapshot(NamedTuple):
    """Contents of one checkpoint of a run, taken between two steps."""

    step: int
    weights: Mapping[str, Tensor]
    training: TrainingState
    best: int | None  # best step so far, if any
