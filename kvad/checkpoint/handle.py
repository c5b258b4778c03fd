"""A checkpoint that has been looked at, in whichever layout; what is in it is read when it is asked for."""

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

# A folder with one of these has a tokenizer, which must then be read.
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer_config.json", "*.model", "*.spm")


class TrainingState(NamedTuple):
    """What training needs to go on: tensors by name, and JSON values."""

    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of one safetensors file, mapped into memory: a tensor's bytes are read when they are used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt")
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
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
        """From the file's header: nothing is read."""
        return tuple(self._file.get_slice(name).get_shape())


def read_training_state(path: Path) -> TrainingState | None:
    """What a folder says of the training that goes on from it; None where it says nothing."""
    folder = path / TRAINING
    if not (folder / "state.json").is_file():
        return None
    return TrainingState(LazyTensors(folder / "state.safetensors"), read_json(folder / "state.json"))


@dataclass(frozen=True)
class CheckpointHandle(ABC):
    """``files``: name -> entry of its manifest; None of a folder that kvad did not write.

    The layouts are :class:`kvad.checkpoint.native.NativeCheckpoint` and :class:`kvad.checkpoint.hf_layout.HFCheckpoint`.
    """

    path: Path
    files: Mapping[str, Mapping[str, Any]] | None = None

    @property
    @abstractmethod
    def config(self) -> ModelConfig: ...

    @property
    @abstractmethod
    def generation(self) -> GenerationConfig:
        """What it says about generating."""

    @property
    @abstractmethod
    def origin(self) -> str | None:
        """The ``model_type`` that it came from, or is described by; None for a model that is kvad's alone."""

    @property
    @abstractmethod
    def stored_dtype(self) -> torch.dtype:
        """What most of its weights are stored in."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """By their names in the file, mapped."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """By our names, all of them: CheckpointError for one that is missing, extra, or of another shape."""

    def weights_as(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """The same in ``dtype`` (None: as they are stored)."""
        for name, tensor in self.weights():
            yield name, tensor if dtype is None else tensor.to(dtype)

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of its tokenizer and its chat template."""
        return self.path

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None where the folder has none at all.  Raises TokenizerError for one that cannot be read."""
        return self.read_tokenizer()

    def read_tokenizer(self) -> Tokenizer | None:
        there = any(True for pattern in TOKENIZER_FILES for _ in self.path.glob(pattern))
        return load_tokenizer(self.path) if there else None

    @cached_property
    def training(self) -> TrainingState | None:
        """None where the checkpoint holds no training state."""
        return read_training_state(self.path)

    def fingerprint(self) -> str:
        """sha256 (hex) of the model: its config and tokenizer as they are now, its weights as the manifest has them."""
        assert self.files is not None, "of what kvad wrote"
        digest = hashlib.sha256(str(self.files[MODEL]["sha256"]).encode())
        digest.update(json.dumps(self.config.to_dict(), sort_keys=True).encode())
        if self.tokenizer is not None:
            digest.update(self.tokenizer.fingerprint().encode())
        return digest.hexdigest()


class CheckpointSnapshot(NamedTuple):
    """A run between two steps: what a checkpoint is made of.  ``best``: the step that is the best so far, if any."""

    step: int
    weights: Mapping[str, Tensor]
    training: TrainingState
    best: int | None
