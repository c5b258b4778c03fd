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

import numpy as np
import torch
from torch import Tensor

from kvad import config as config_lib
from kvad import model as model_lib
from kvad import ops
from kvad.checkpoint.folder import MODEL, TRAINING, check_file, read_json
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.quantized import DequantizedTensors
from kvad.checkpoint.safetensors_io import ShardedTensors, open_file_tensors
from kvad.config import ModelConfig
from kvad.text import Tokenizer, load_tokenizer

MODULES = (
    model_lib.attention.Attention,
    model_lib.layers.GatedMLP,
    model_lib.layers.PlainMLP,
)  # have quantized matrices
# A folder that has one of these files has a tokenizer, which must be readable.
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer_config.json", "*.model", "*.spm")
# Files of a tokenizer or a chat template; they are copied unchanged.
COMPANION_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm"),
)


class TrainingState(NamedTuple):
    """State that a resumed run needs: tensors by name, and JSON values."""

    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


def read_training_state(path: Path) -> TrainingState | None:
    """Read the training state of a folder, or return None if it has none."""
    folder = path / TRAINING
    if not (folder / "state.json").is_file():
        return None
    return TrainingState(open_file_tensors(folder / "state.safetensors"), read_json(folder / "state.json"))


def has_tokenizer(folder: Path) -> bool:
    return any(True for pattern in TOKENIZER_FILES for _ in folder.glob(pattern))


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder that belong to a tokenizer or chat template, by name."""
    return {name: (folder / name).read_bytes() for name in COMPANION_FILES if (folder / name).is_file()}


@dataclass(frozen=True)
class CheckpointHandle(ABC):
    """An opened checkpoint in kvad's layout (``native.py``) or Hugging Face's (``hf_layout.py``)."""

    path: Path
    files: Mapping[str, Mapping[str, Any]] | None = None  # manifest entry by file name; None if kvad did not write it

    @property
    @abstractmethod
    def config(self) -> ModelConfig: ...

    @property
    def stored_config(self) -> ModelConfig:
        """``config`` as it is stored, without the scaling of ``loader.scale_rope``."""
        stored: ModelConfig = vars(self).get("_stored_config", self.config)
        return stored

    def override_config(self, config: ModelConfig) -> None:
        """Use another config of the same weights; ``config`` must be a cached property."""
        vars(self).setdefault("_stored_config", self.config)
        vars(self)["config"] = config

    @property
    @abstractmethod
    def generation(self) -> GenerationConfig: ...

    @property
    @abstractmethod
    def origin(self) -> str | None:
        """The Hugging Face ``model_type``, or None for a model that has none."""

    @property
    @abstractmethod
    def stored_dtype(self) -> torch.dtype:
        """The dtype of most of the stored weights."""

    @property
    def quantization(self) -> str | None:
        """Description of the file's quantization, or None; ``weights`` dequantizes its matrices."""
        return None

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Memory-mapped tensors by their names in the file."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors by kvad's names; a CheckpointError names one that does not fit, or a changed file."""

    @property
    def quantized_matrices(self) -> Mapping[str, ops.quantized_linear.QuantizedMatrix | ops.block_matrix.BlockMatrix]:
        """Matrices, by the name of their layer, that are computed with as they are stored."""
        return {}

    def quantized_bytes(self) -> tuple[dict[str, int], int]:
        """Return the bytes of ``quantized_matrices``: by the parameter that one replaces, and of a tied head's copy."""
        shapes, sizes, head_copy = config_lib.parameter_shapes.weight_shapes(self.config), dict[str, int](), 0
        for module, matrix in self.quantized_matrices.items():
            parameter = config_lib.parameter_shapes.quantized_parameter(shapes, module)
            if parameter is None:
                head_copy = matrix.num_bytes
            else:
                sizes[parameter] = matrix.num_bytes
        return sizes, head_copy

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of the loaded weights, if those that are not quantized have a dtype."""
        sizes, head_copy = self.quantized_bytes()
        return head_copy + config_lib.parameter_shapes.weight_bytes(self.config, dtype, sizes)

    def weight_files(self) -> list[ops.native.WeightFile]:
        """Return the mapped files that ``weights`` yields tensors of, for ``ops.native.PackedStore``."""
        tensors, files = self.tensors, []
        contents = tensors.contents() if isinstance(tensors, ShardedTensors | DequantizedTensors) else {}
        for path, content in contents.items():
            entry = (self.files or {}).get(path.name)
            checksum = None if entry is None else _checksum(entry)
            files.append(ops.native.WeightFile.create(path, np.frombuffer(content, np.uint8), checksum))
        return files

    def check_weights(self) -> None:
        """Compare the model's tensor files with the manifest, if any.

        All their bytes are read, unless a large file was compared before and was not written since.
        """
        for name, entry in (self.files or {}).items():
            if name.endswith(".safetensors") and not name.startswith(f"{TRAINING}/"):
                verification = ops.native.Verification.of_weights(self.path / name, _checksum(entry))
                check_file(self.path / name, entry, "size" if verification.is_current else "crc32")
                verification.record()

    def weights_as(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors in ``dtype`` (None: as stored); some are never rounded below float32."""
        return converted(self.weights(), dtype)

    def unquantized_weights_as(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors but those of ``quantized_matrices``, as ``weights_as`` does.

        Experts that are stored one by one may be yielded so (``Transformer.separate_experts``).
        """
        return self.weights_as(dtype)

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer and the chat template."""
        return self.path

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None if the folder has none."""
        return load_tokenizer(self.path) if has_tokenizer(self.path) else None

    @cached_property
    def training(self) -> TrainingState | None:
        """The training state, or None if the checkpoint has none."""
        return read_training_state(self.path)

    @property
    def unused_keys(self) -> tuple[str, ...]:
        """Keys of config.json that kvad does not use and that may change the model; kvad's layout has none."""
        return ()

    def fingerprint(self) -> str:
        """Return the sha256 (hex) of config and tokenizer, and of the weights by the manifest."""
        assert self.files is not None, "only checkpoints that kvad wrote have a manifest"
        digest = hashlib.sha256(str(self.files[MODEL]["sha256"]).encode())
        digest.update(json.dumps(self.config.to_dict(), sort_keys=True).encode())
        if self.tokenizer is not None:
            digest.update(self.tokenizer.fingerprint().encode())
        return digest.hexdigest()


def quantizable(model: model_lib.Transformer) -> Iterator[tuple[str, int]]:
    """Yield the names of the matrices of attention, MLPs and experts, and the numbers of their inputs."""
    for name, module in model.named_modules():
        if isinstance(module, MODULES):
            for child, layer in module.named_children():
                if type(layer) is ops.linear.Linear:
                    yield f"{name}.{child}", layer.in_features
        elif isinstance(module, model_lib.layers.MixtureOfExperts):
            for child in module.PARTS:
                yield f"{name}.{child}", getattr(module, child).shape[-1]


def _checksum(entry: Mapping[str, Any]) -> str:
    return f"{entry.get('crc32')} {entry['sha256']}"


def converted(weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Convert tensors to a dtype; None: as they are."""
    for name, tensor in weights:
        is_stored = dtype is None or (config_lib.parameter_shapes.is_float32(name) and dtype.itemsize < 4)
        yield name, tensor if is_stored else tensor.to(dtype)


class CheckpointSnapshot(NamedTuple):
    """Contents of one checkpoint of a run, taken between two steps."""

    step: int
    weights: Mapping[str, Tensor]
    training: TrainingState
    best: int | None  # best step so far, if any
