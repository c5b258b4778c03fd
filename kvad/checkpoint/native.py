"""Checkpoints that kvad writes: folders of safetensors and JSON, in one of two layouts.

A checkpoint folder in kvad's layout::

    config.json           {"kvad": version, "model": {...}}      edited by hand: kvad doctor --fix
    model.safetensors     the model's state dict, by parameter name; a tied head has no separate tensor
    tokenizer.json        absent if the model has no tokenizer
    manifest.json         {"kvad": version, "format": 2, "files": {name: {"bytes", "sha256", "crc32"}}}
    training/             state.json and state.safetensors, if training can be resumed

After ``kvad quantize``, config.json has ``"quantization": {"bits", "group_size", "head_bits", "head_group_size"}``
(sizes of 0: one scale for each row; head_bits 0: not quantized), and products of attention and MLPs have ``.data``,
``.scale`` and, with 4 bits, ``.minimum`` (``kvad.ops.quantized_linear``) instead of ``.weight``. Those of experts are
``mlp.gate.data`` [experts, out, ...] and so on instead of ``mlp.gate``. Those of the head are ``head.output.data`` and
so on instead of ``head.weight``; a tied head's are a copy of the token table, which remains.

In Hugging Face's layout, which ``transformers`` loads unchanged, config.json is a family's, model.safetensors has its
tensor names, and generation_config.json has the generation defaults (``hf_layout.py``); nothing about the model is
stored twice.  Training uses this layout if a family can express the model.  All other files are the same in both.

A run folder (``kvad train --out runs/x``) has ``checkpoints/step-00000200/`` and so on; every reader here takes
either.  The newest step *is* the run's model: no pointer can disagree with it, and a rename commits a step.

Reading checks, in this order: the sizes of the tensor files, the config, the sha256 of all text files, the crc32 of the
model's tensor files before the first tensor is used, the names and shapes of the tensors.  ``verify=True`` and
``kvad train --resume`` compare every sha256 first.  Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kvad import config as config_lib
from kvad import ops, storage
from kvad.checkpoint import folder as folder_lib
from kvad.checkpoint.conversion import write_tensors
from kvad.checkpoint.folder import CONFIG, MODEL, TRAINING, read_json, write_json
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.handle import CheckpointHandle, TrainingState, converted
from kvad.checkpoint.hf_layout import HFCheckpoint, HFLayout, write_hf_config
from kvad.checkpoint.safetensors_io import FILE_METADATA, ShardedTensors, open_file_tensors, save_tensors
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, ConfigError
from kvad.text import Tokenizer

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def save_checkpoint(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    training: TrainingState | None = None,
    *,
    layout: HFLayout | None = None,
    generation: GenerationConfig | None = None,
    files: Mapping[str, bytes] = MappingProxyType({}),
    origin: str | None = None,
    replaces: Sequence[Path] = (),
    quantization: Mapping[str, int] | None = None,
) -> None:
    """Write a checkpoint folder, replacing an existing one atomically.

    After a kill at any moment, either the old or the new checkpoint is complete.

    Args:
        folder: Folder to write.
        config, tensors, tokenizer: The model, its state dict by kvad's names, its tokenizer if any.
        training: Training state, if training can be resumed.
        layout, generation: Hugging Face layout for ``config`` (None is kvad's); generation defaults.
        files: Further files by name and content.
        origin: ``model_type`` of an imported model (kvad's layout).
        replaces: Sibling folders that are removed in the same move.
        quantization: Bits and group size of the matrices (kvad's layout).
    """
    generation_config = GenerationConfig() if generation is None else generation
    with new_checkpoint(folder, training, replaces) as temp_folder:
        if layout is None:
            fields = _content(config, generation_config, origin)
            write_json(temp_folder / CONFIG, fields | ({"quantization": dict(quantization)} if quantization else {}))
            save_tensors(folder, temp_folder / MODEL, tensors)
        else:
            write_hf_config(temp_folder, layout, generation_config, next(iter(tensors.values())).dtype)
            hf_tensors = dict(write_tensors(layout.family, config, tensors))
            save_tensors(folder, temp_folder / MODEL, hf_tensors, FILE_METADATA)
        for name, content in files.items():
            (temp_folder / name).parent.mkdir(exist_ok=True)
            (temp_folder / name).write_bytes(content)
        if tokenizer is not None:
            tokenizer.save(temp_folder)


def _content(config: ModelConfig, generation: GenerationConfig, origin: str | None) -> dict[str, Any]:
    """Return the content of ``config.json`` in kvad's layout."""
    from kvad import __version__

    content: dict[str, Any] = {"kvad": __version__, "model": config.to_dict()}
    if generation != GenerationConfig():
        content["generation"] = config_lib.serialization.to_dict(generation)
    return content if origin is None else {**content, "origin": origin}


@contextmanager
def new_checkpoint(folder: Path, training: TrainingState | None, replaces: Sequence[Path]) -> Iterator[Path]:
    """Yield a temporary folder that atomically becomes ``folder``, with training state, if any, and manifest."""
    from kvad import __version__

    with storage.atomic.new_folder(folder, replaces=replaces) as temp_folder:
        yield temp_folder
        if training is not None:
            (temp_folder / TRAINING).mkdir()
            write_json(temp_folder / TRAINING / "state.json", training.state)
            save_tensors(folder, temp_folder / TRAINING / "state.safetensors", training.tensors)
        paths = [path for path in sorted(temp_folder.rglob("*")) if path.is_file()]
        files = {path.relative_to(temp_folder).as_posix(): folder_lib.file_digest(path) for path in paths}
        content = {"kvad": __version__, "format": folder_lib.FORMAT, "files": files}
        write_json(temp_folder / folder_lib.MANIFEST, content)


@contextmanager
def new_step(
    run: Path, step: int, keep: int, best: int | None = None, fresh: bool = False
) -> Iterator[tuple[Path, Sequence[Path]]]:
    """Yield the folder ``run/checkpoints/step-N`` and those that it replaces, then prune older steps.

    Args:
        run: Run folder.
        step: Number of the step.
        keep: Number of newest steps to retain.
        best: Number of the best step, if any; the run's ``best`` links to it.
        fresh: First save of a new run; the steps of an old one are replaced in the same move.
    """
    folder = folder_lib.step_folder(run, step)
    storage.atomic.recover_interrupted(folder.parent)  # restores folders that a killed process had set aside
    yield folder, folder_lib.list_steps(run) if fresh else ()
    folder_lib.prune_steps(run, keep, best)


class NativeCheckpoint(CheckpointHandle):
    """A checkpoint in kvad's layout."""

    @cached_property
    def config(self) -> ModelConfig:
        """The model.  Raises ConfigError, which names file and key, if the config is invalid."""
        config = ModelConfig.load(self.path / CONFIG)
        folder_lib.check_text(self.path, self.files)
        return config

    @cached_property
    def generation(self) -> GenerationConfig:
        """The generation defaults.  Raises ConfigError as ``config`` does."""
        content = read_json(self.path / CONFIG).get("generation") or {}
        try:
            return config_lib.serialization.from_dict(GenerationConfig, content, "generation")
        except ConfigError as error:
            raise ConfigError(f"{self.path / CONFIG}: {error.message}", error.hint) from error

    @cached_property
    def origin(self) -> str | None:
        origin = read_json(self.path / CONFIG).get("origin")
        return origin if isinstance(origin, str) else None

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the token embedding."""
        embedding = self.tensors.get("embedding.tokens.weight")  # memory-mapped, not read
        return torch.float32 if embedding is None else embedding.dtype

    @cached_property
    def tensors(self) -> ShardedTensors:
        return open_file_tensors(self.path / MODEL)

    @cached_property
    def _quantization(self) -> folder_lib.WeightQuantization | None:
        return folder_lib.read_quantization(self.path)

    @property
    def quantization(self) -> str | None:
        return None if self._quantization is None else self._quantization.describe(self.config)

    @cached_property
    def quantized_matrices(self) -> Mapping[str, ops.quantized_linear.QuantizedMatrix]:
        if self._quantization is None:
            return {}
        bits, group_size, head_bits, head_group_size = self._quantization
        stored, matrices = self.tensors, dict[str, ops.quantized_linear.QuantizedMatrix]()
        shapes = config_lib.parameter_shapes.weight_shapes(self.config)
        for name, shape in shapes.items():
            module = name.removesuffix(".weight")
            if name not in stored and f"{module}.scale" in stored:
                matrices[module] = self._read_matrix(module, shape, bits, group_size)
        if head_bits:
            shape = shapes["embedding.tokens.weight" if self.config.tie_embeddings else "head.weight"]
            head = config_lib.parameter_shapes.QUANTIZED_HEAD
            matrices[head] = self._read_matrix(head, shape, head_bits, head_group_size)
        return matrices

    def _read_matrix(
        self, module: str, shape: tuple[int, ...], bits: int, group_size: int
    ) -> ops.quantized_linear.QuantizedMatrix:
        """Read a matrix or those of experts; a CheckpointError names a tensor that is missing or of another form."""
        stored, (*rows, width) = self.tensors, shape
        group_size = group_size or width
        expected = {"data": (*rows, width * bits // 8), "scale": (*rows, width // group_size)}
        expected |= {"minimum": expected["scale"]} if bits == 4 else {}
        dtypes = {"data": torch.int8 if bits == 8 else torch.uint8}
        for part, part_shape in expected.items():
            where = f"{stored.path}: tensor {module}.{part}"
            if f"{module}.{part}" not in stored:
                raise CheckpointError(f"{where} {list(part_shape)} is missing")
            tensor = stored[f"{module}.{part}"]
            known = (dtypes[part],) if part in dtypes else (torch.float16, torch.float32)
            if tuple(tensor.shape) != part_shape or tensor.dtype not in known:
                found = f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
                raise CheckpointError(f"{where} has shape {found}, the config requires {list(part_shape)}")
        parts = [stored[f"{module}.{part}"].flatten(0, -2) for part in expected]
        return ops.quantized_linear.QuantizedMatrix(
            parts[0], parts[1], parts[2] if bits == 4 else None, bits, group_size
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors; a tied head is the token table.  A CheckpointError names both shapes if they differ."""
        yield from self._unquantized_weights()
        shapes = config_lib.parameter_shapes.weight_shapes(self.config)
        for module, matrix in self.quantized_matrices.items():
            name = config_lib.parameter_shapes.quantized_parameter(shapes, module)
            if name is not None:
                weight = torch.empty(shapes[name], dtype=self.stored_dtype)
                rows = weight.shape[-2]
                for index, expert in enumerate(weight.view(-1, rows, weight.shape[-1])):
                    expert.copy_(matrix.dequantize(weight.dtype, slice(index * rows, (index + 1) * rows)))
                yield name, weight

    def unquantized_weights_as(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        return converted(self._unquantized_weights(), dtype)

    def _unquantized_weights(self) -> Iterator[tuple[str, Tensor]]:
        self.check_weights()
        matrices, expected = self.quantized_matrices, config_lib.parameter_shapes.weight_shapes(self.config)
        replaced = {config_lib.parameter_shapes.quantized_parameter(expected, name) for name in matrices}
        parts = {f"{name}.{part}" for name, matrix in matrices.items() for part in matrix.tensors()}
        shapes = {name: shape for name, shape in expected.items() if name not in replaced}
        check_tensors(self.tensors, shapes | {part: self.tensors.shape(part) for part in parts})
        yield from ((name, tensor) for name, tensor in self.tensors.items() if name not in parts)


def open_folder(folder: Path, *, verify: bool = False) -> CheckpointHandle:
    """Open a checkpoint folder in either layout, or the newest one of a run; no tensor is read.

    ``verify`` compares every file with its sha256 at once. Otherwise text files are compared when the config is read,
    and the model's tensor files when the weights are read (``CheckpointHandle.check_weights``).
    """
    path = folder_lib.locate(Path(folder))
    if folder_lib.is_adapter(path):
        hint = "Give its base, or merge them with kvad merge."
        raise CheckpointError(f"{path} is an adapter (LoRA), not a model", hint)
    files = folder_lib.list_files(path)
    for name, entry in (files or {}).items():
        folder_lib.check_file(path / name, entry, "sha256" if verify else "size")
    return HFCheckpoint(path, files) if folder_lib.is_hf(path) else NativeCheckpoint(path, files)


def check_tensors(stored: ShardedTensors, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for a tensor that is missing, extra, or of another shape."""
    for name, shape in expected.items():
        where, stored_shape = f"{stored.path}: tensor {name}", list(stored.shape(name)) if name in stored else None
        if stored_shape is None:
            raise CheckpointError(f"{where} {list(shape)} is missing")
        if stored_shape != list(shape):
            raise CheckpointError(f"{where} has shape {stored_shape}, the config requires {list(shape)}")
    for name in stored:
        if name not in expected:
            message = f"{stored.path}: tensor {name} {list(stored.shape(name))} is extra"
            raise CheckpointError(message, "The config has no such parameter.")
