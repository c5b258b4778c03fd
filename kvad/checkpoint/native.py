"""Checkpoints that kvad writes: folders of safetensors and JSON, in one of two layouts.

A checkpoint folder in kvad's layout::

    config.json           {"kvad": version, "model": {...}}      may be edited by hand
    model.safetensors     the model's state dict, by parameter name; a tied head has no separate tensor
    tokenizer.json        absent if the model has no tokenizer
    manifest.json         {"kvad": version, "format": 2, "files": {name: {"bytes", "sha256"}}}
    training/             state.json and state.safetensors, if training can be resumed

In Hugging Face's layout, which ``transformers`` loads unchanged, config.json is a family's, model.safetensors has its
tensor names, and generation_config.json has the generation defaults (``hf_layout.py``); nothing about the model is
stored twice.  Training uses this layout if a family can express the model.  All other files are the same in both.

A run folder (``kvad train --out runs/x``) has ``checkpoints/step-00000200/`` and so on; every reader here takes
either.  The newest step *is* the run's model: no pointer can disagree with it, and a rename commits a step
(``storage/atomic.py``), so ``load("runs/x")`` works at any time after the first save.

Reading checks, in this order: the sizes of the tensor files (with ``verify=True`` every sha256 too), the config, the
names and shapes of the tensors.  Nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kvad import config as config_lib
from kvad import storage
from kvad.checkpoint.conversion import write_tensors
from kvad.checkpoint.folder import (
    CONFIG,
    FORMAT,
    MANIFEST,
    MODEL,
    TRAINING,
    check_file,
    file_digest,
    is_hf,
    list_files,
    list_steps,
    locate,
    prune_steps,
    read_json,
    step_folder,
)
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.checkpoint.handle import CheckpointHandle, LazyTensors, TrainingState
from kvad.checkpoint.hf_layout import HFCheckpoint, HFLayout, write_hf_config
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, ConfigError
from kvad.text import Tokenizer

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


ADAPTER = "adapter_config.json"
SAFETENSORS_METADATA = {"format": "pt"}  # required by transformers

Verify = bool | Literal["tensors"]


# ---------------------------------------------------------------- writing


def save_checkpoint(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    training: TrainingState | None = None,
    *,
    layout: HFLayout | None = None,
    generation: GenerationConfig | None = None,
    extra_files: Sequence[Path] = (),
    files: Mapping[str, bytes] = MappingProxyType({}),
    origin: str | None = None,
    replaces: Sequence[Path] = (),
) -> None:
    """Write a checkpoint folder, replacing an existing one atomically.

    After a kill at any moment, either the old or the new checkpoint is complete.

    Args:
        folder: Folder to write.
        config, tensors, tokenizer: The model, its state dict by kvad's names, its tokenizer if any.
        training: Training state, if training can be resumed.
        layout, generation: Hugging Face layout for ``config`` (None is kvad's); generation defaults.
        extra_files, files: Files to copy unchanged; further files by name and content.
        origin: ``model_type`` of an imported model (kvad's layout).
        replaces: Sibling folders that are removed in the same move.
    """
    folder = Path(folder)
    with storage.atomic.new_folder(folder, replaces=replaces) as temp_folder:
        generation_config = GenerationConfig() if generation is None else generation
        if layout is None:
            write_json(temp_folder / CONFIG, _content(config, generation_config, origin))
            save_tensors(folder, temp_folder / MODEL, tensors)
        else:
            write_hf_config(temp_folder, layout, generation_config, next(iter(tensors.values())).dtype)
            save_tensors(
                folder, temp_folder / MODEL, dict(write_tensors(layout.family, config, tensors)), SAFETENSORS_METADATA
            )
        for path in extra_files:
            shutil.copyfile(path, temp_folder / path.name)
        for name, content in files.items():
            (temp_folder / name).parent.mkdir(exist_ok=True)
            (temp_folder / name).write_bytes(content)
        if tokenizer is not None:
            tokenizer.save(temp_folder)
        finish_folder(folder, temp_folder, training)


def finish_folder(folder: Path, temp_folder: Path, training: TrainingState | None) -> None:
    """Write the training state, if any, and the manifest into ``temp_folder``, which becomes ``folder``."""
    from kvad import __version__

    if training is not None:
        (temp_folder / TRAINING).mkdir()
        write_json(temp_folder / TRAINING / "state.json", training.state)
        save_tensors(folder, temp_folder / TRAINING / "state.safetensors", training.tensors)
    files = {
        path.relative_to(temp_folder).as_posix(): file_digest(path)
        for path in sorted(temp_folder.rglob("*"))
        if path.is_file()
    }
    write_json(temp_folder / MANIFEST, {"kvad": __version__, "format": FORMAT, "files": files})


def _content(config: ModelConfig, generation: GenerationConfig, origin: str | None) -> dict[str, Any]:
    """Return the content of ``config.json`` in kvad's layout."""
    from kvad import __version__

    content: dict[str, Any] = {"kvad": __version__, "model": config.to_dict()}
    if generation != GenerationConfig():
        content["generation"] = config_lib.serialization.to_dict(generation)
    return content if origin is None else {**content, "origin": origin}


@contextmanager
def new_step(
    run: Path, step: int, *, keep: int = 2, best: int | None = None, fresh: bool = False
) -> Iterator[tuple[Path, Sequence[Path]]]:
    """Yield the folder ``run/checkpoints/step-N`` and those that it replaces, then prune older steps.

    Args:
        run: Run folder.
        step: Number of the step.
        keep: Number of newest steps to retain.
        best: Number of the best step, if any; the run's ``best`` links to it.
        fresh: First save of a new run; the steps of an old one are replaced in the same move.
    """
    folder = step_folder(run, step)
    storage.atomic.recover_interrupted(folder.parent)  # restores folders that a killed process had set aside
    yield folder, list_steps(run) if fresh else ()
    prune_steps(run, keep, best)


def save_step(
    run: Path,
    step: int,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    training: TrainingState | None = None,
    *,
    keep: int = 2,
    best: int | None = None,
    fresh: bool = False,
    **options: Any,
) -> Path:
    """Write a step of a run and return its folder.

    ``keep``, ``best`` and ``fresh`` are those of ``new_step``, the others those of ``save_checkpoint``.
    """
    with new_step(run, step, keep=keep, best=best, fresh=fresh) as (folder, replaced):
        save_checkpoint(folder, config, tensors, tokenizer, training, replaces=replaced, **options)
    return folder


def write_json(path: Path, value: object) -> None:
    """Write a JSON file, indented by one space."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def save_tensors(
    folder: Path, path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file; a SaveError names ``folder``."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path, metadata)
    except SafetensorError as error:  # safetensors wraps the disk's error
        raise storage.atomic.disk_error(folder, OSError(str(error))) from error


# ---------------------------------------------------------------- reading


class NativeCheckpoint(CheckpointHandle):
    """A checkpoint in kvad's layout."""

    @cached_property
    def config(self) -> ModelConfig:
        """The model.  Raises ConfigError, which names file and key, if the config is invalid."""
        return ModelConfig.load(self.path / CONFIG)

    @cached_property
    def generation(self) -> GenerationConfig:
        """The generation defaults.  Raises ConfigError as ``config`` does."""
        content = read_json(self.path / CONFIG).get("generation")
        try:
            return (
                GenerationConfig()
                if content is None
                else config_lib.serialization.from_dict(GenerationConfig, content, "generation")
            )
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
    def tensors(self) -> LazyTensors:
        return LazyTensors(self.path / MODEL)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors.  A CheckpointError names both shapes if they differ."""
        _check_tensors(self.tensors, config_lib.parameter_shapes.weight_shapes(self.config))
        yield from self.tensors.items()


def open_folder(folder: Path, *, verify: Verify = False) -> CheckpointHandle:
    """Open a checkpoint folder in either layout, or the newest one of a run; no tensor is read.

    ``verify`` compares every file with its sha256; with "tensors" only tensor files, as text may be edited by hand.
    """
    path = locate(Path(folder))
    if (path / ADAPTER).is_file() and not (path / CONFIG).is_file():
        raise CheckpointError(
            f"{path} is an adapter (LoRA), not a model", "Give its base, or merge them with kvad merge."
        )
    files = list_files(path)
    for name, entry in (files or {}).items():
        is_tensor_file = name.endswith(".safetensors")
        check_file(path / name, entry, verify=verify is True or (verify == "tensors" and is_tensor_file))
    return HFCheckpoint(path, files) if is_hf(path) else NativeCheckpoint(path, files)


def _check_tensors(stored: LazyTensors, expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        if name not in stored:
            raise CheckpointError(f"{stored.path}: tensor {name} {list(shape)} is missing")
        if stored.shape(name) != shape:
            raise CheckpointError(
                f"{stored.path}: tensor {name} has shape {list(stored.shape(name))}, the config requires {list(shape)}"
            )
    for name in stored:
        if name not in expected:
            raise CheckpointError(
                f"{stored.path}: tensor {name} {list(stored.shape(name))} is extra", "The config has no such parameter."
            )
