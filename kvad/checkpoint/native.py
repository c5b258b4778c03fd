"""The checkpoints that kvad writes: self-describing folders of safetensors and JSON, in one of two layouts.

A checkpoint folder in kvad's own layout::

    config.json           {"kvad": version, "model": {...}}      written for people too: it may be edited
    model.safetensors     the model's state dict, by parameter name; a tied head has no tensor of its own
    tokenizer.json        absent where the model came without one
    manifest.json         {"kvad": version, "format": 1, "files": {name: {"bytes", "sha256"}}}
    training/             only where training can go on: state.json and state.safetensors

In Hugging Face's layout, which ``transformers`` loads as it is, config.json is a family's, model.safetensors has their
names and generation_config.json says how to generate (``theirs.py``); nothing of the model is said twice.  Training
saves so wherever a family can hold the model.  The rest of the folder is the same, and so is everything that reads.

A run folder (``kvad train --out runs/x``) holds ``checkpoints/step-00000200/`` and the like; everything here that
reads takes either.  The newest step *is* the run's model: there is no pointer that could disagree with it, a rename
is the moment of the commit (``atomic.py``), so ``load("runs/x")`` works at any moment after the first save.

Reading checks, in this order: the sizes of the tensor files (with ``verify=True`` also every sha256), the config, the
tensors' names and shapes.  Nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
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

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


ADAPTER = "adapter_config.json"
SAFETENSORS_METADATA = {"format": "pt"}  # what transformers asks of a tensor file

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
    beside: Sequence[Path] = (),
    files: Mapping[str, bytes] = MappingProxyType({}),
    origin: str | None = None,
    replaces: Sequence[Path] = (),
) -> None:
    """Write a checkpoint folder, in the place of what is there.

    ``layout``: Hugging Face's, of a family that holds ``config``; None is kvad's own, which also says ``origin``, the
    ``model_type`` that it came from.  ``generation``: what it says about generating; ``beside``: files that are copied
    as they are (a tokenizer's of several files, a chat template), ``files`` the same by their content; ``replaces``:
    sibling folders that give way in the same move.  Raises SaveError if the disk refuses; the checkpoint that was there
    before is then whole, as it is after a kill at any moment.
    """
    from kvad import __version__

    folder = Path(folder)
    with storage.atomic.new_folder(folder, replaces=replaces) as new:
        said = GenerationConfig() if generation is None else generation
        if layout is None:
            write_json(new / CONFIG, _content(config, said, origin))
            save_tensors(folder, new / MODEL, tensors)
        else:
            write_hf_config(new, layout, said, next(iter(tensors.values())).dtype)
            save_tensors(folder, new / MODEL, dict(write_tensors(layout.family, config, tensors)), SAFETENSORS_METADATA)
        for path in beside:
            shutil.copyfile(path, new / path.name)
        for name, content in files.items():
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_bytes(content)
        if tokenizer is not None:
            tokenizer.save(new)
        if training is not None:
            (new / TRAINING).mkdir()
            write_json(new / TRAINING / "state.json", training.state)
            save_tensors(folder, new / TRAINING / "state.safetensors", training.tensors)
        entries = {
            path.relative_to(new).as_posix(): file_digest(path) for path in sorted(new.rglob("*")) if path.is_file()
        }
        write_json(new / MANIFEST, {"kvad": __version__, "format": FORMAT, "files": entries})


def _content(config: ModelConfig, generation: GenerationConfig, origin: str | None) -> dict[str, Any]:
    """Of ``config.json`` in kvad's own layout."""
    from kvad import __version__

    content: dict[str, Any] = {"kvad": __version__, "model": config.to_dict()}
    if generation != GenerationConfig():
        content["generation"] = config_lib.serialization.to_dict(generation)
    return content if origin is None else {**content, "origin": origin}


def save_step(
    run: Path,
    step: int,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    training: TrainingState | None = None,
    *,
    layout: HFLayout | None = None,
    generation: GenerationConfig | None = None,
    files: Mapping[str, bytes] = MappingProxyType({}),
    origin: str | None = None,
    keep: int = 2,
    best: int | None = None,
    fresh: bool = False,
) -> Path:
    """Write ``run/checkpoints/step-N`` and then delete all but the newest ``keep`` and step ``best``, which the run's
    link of that name points at from then on (``kept.py``).

    ``fresh``: the first save of a new run: the steps of an old one give way in the same move.  Raises as :func:`save`.
    """
    folder = step_folder(run, step)
    storage.atomic.recover_interrupted(
        folder.parent
    )  # brings back what an overwriting process had set aside when it died
    earlier = list_steps(run) if fresh else ()
    save_checkpoint(
        folder,
        config,
        tensors,
        tokenizer,
        training,
        layout=layout,
        generation=generation,
        files=files,
        origin=origin,
        replaces=earlier,
    )
    prune_steps(run, keep, best)
    return folder


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def save_tensors(
    folder: Path, path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Raises SaveError, which names ``folder``, if the disk refuses."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, path, metadata)
    except SafetensorError as error:  # the library's name for what the disk says
        raise storage.atomic.disk_error(folder, OSError(str(error))) from error


# ---------------------------------------------------------------- reading


class NativeCheckpoint(CheckpointHandle):
    """A folder in kvad's layout."""

    @cached_property
    def config(self) -> ModelConfig:
        """Raises ConfigError naming the file and the key for one that cannot be."""
        return ModelConfig.load(self.path / CONFIG)

    @cached_property
    def generation(self) -> GenerationConfig:
        """Raises ConfigError as :attr:`config` does."""
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
        said = read_json(self.path / CONFIG).get("origin")
        return said if isinstance(said, str) else None

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the table of tokens."""
        table = self.tensors.get("embedding.tokens.weight")  # mapped, not read
        return torch.float32 if table is None else table.dtype

    @cached_property
    def tensors(self) -> LazyTensors:
        return LazyTensors(self.path / MODEL)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Both shapes are named where they differ."""
        _check_tensors(self.tensors, config_lib.parameter_shapes.weight_shapes(self.config))
        yield from self.tensors.items()


def open_folder(folder: Path, *, verify: Verify = False) -> CheckpointHandle:
    """Look at a checkpoint folder in either layout, or at the newest one of a run; no tensor is read.

    ``verify``: compare every file with its sha256; ``"tensors"``: only those, as text may be edited by hand.  Raises
    CheckpointError for a folder that is not a whole checkpoint.
    """
    path = locate(Path(folder))
    if (path / ADAPTER).is_file() and not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} is an adapter (LoRA), not a model", "name its base, or merge them: kvad merge")
    files = list_files(path)
    for name, entry in (files or {}).items():
        tensors = name.endswith(".safetensors")
        check_file(path / name, entry, verify=verify is True or (verify == "tensors" and tensors))
    return HFCheckpoint(path, files) if is_hf(path) else NativeCheckpoint(path, files)


def _check_tensors(found: LazyTensors, wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in wanted.items():
        if name not in found:
            raise CheckpointError(f"{found.path}: tensor {name} {list(shape)} is missing")
        if found.shape(name) != shape:
            raise CheckpointError(
                f"{found.path}: tensor {name} has shape {list(found.shape(name))}, the config says {list(shape)}"
            )
    for name in found:
        if name not in wanted:
            raise CheckpointError(
                f"{found.path}: tensor {name} {list(found.shape(name))} is extra", "the config has no place for it"
            )
