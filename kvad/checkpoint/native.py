"""kvad's own checkpoints: self-describing folders of safetensors and JSON.

A checkpoint folder::

    config.json           {"kvad": version, "model": {...}}      written for people too: it may be edited
    model.safetensors     the model's state dict, by parameter name; a tied head has no tensor of its own
    tokenizer.json        absent where the model came without one
    manifest.json         {"kvad": version, "format": 1, "files": {name: {"bytes", "sha256"}}}
    training/             only where training can go on: state.json and state.safetensors

A run folder (``kvad train --out runs/x``) holds ``checkpoints/step-00000200/`` and the like; everything here that
reads takes either.  The newest step *is* the run's model: there is no pointer that could disagree with it, a rename
is the moment of the commit (``atomic.py``), so ``load("runs/x")`` works at any moment after the first save.

Reading checks, in this order: the config, the sizes of the tensor files, the tensors' names and shapes; with
``verify=True`` also every sha256.  Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvad.cache.weights import weight_shapes
from kvad.checkpoint.atomic import discard, new_folder, refused, sweep
from kvad.checkpoint.folder import (
    CONFIG,
    FORMAT,
    MANIFEST,
    MODEL,
    TRAINING,
    check_file,
    entry_of,
    locate,
    read_json,
    read_manifest,
    steps_of,
)
from kvad.checkpoint.generation import Generation
from kvad.config import ModelConfig, from_dict, to_dict
from kvad.errors import CheckpointError, ConfigError
from kvad.text.base import FILE_NAME as TOKENIZER
from kvad.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["DTYPES", "Checkpoint", "Tensors", "Training", "Verify", "check_tensors", "load", "save", "save_step"]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Training(NamedTuple):
    """What training needs to go on: tensors by name, and JSON values."""

    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


# ---------------------------------------------------------------- writing


def save(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    training: Training | None = None,
    *,
    generation: Generation | None = None,
    beside: Sequence[Path] = (),
    origin: str | None = None,
    replaces: Sequence[Path] = (),
) -> None:
    """Write a checkpoint folder, in the place of what is there.

    ``generation``: what it says about generating; ``beside``: files that are copied as they are (a tokenizer's of
    several files, a chat template); ``origin``: the ``model_type`` that it came from.  ``replaces``: sibling folders
    that give way in the same move.  Raises SaveError if the disk refuses; the checkpoint that was there before is then
    whole, as it is after a kill at any moment.
    """
    from kvad import __version__

    folder = Path(folder)
    with new_folder(folder, replaces=replaces) as new:
        content: dict[str, Any] = {"kvad": __version__, "model": config.to_dict()}
        if generation is not None and generation != Generation():
            content["generation"] = to_dict(generation)
        if origin is not None:
            content["origin"] = origin
        _write_json(new / CONFIG, content)
        for path in beside:
            shutil.copyfile(path, new / path.name)
        _write_tensors(folder, new / MODEL, tensors)
        if tokenizer is not None:
            tokenizer.save(new)
        if training is not None:
            (new / TRAINING).mkdir()
            _write_json(new / TRAINING / "state.json", training.state)
            _write_tensors(folder, new / TRAINING / "state.safetensors", training.tensors)
        files = {path.relative_to(new).as_posix(): entry_of(path) for path in sorted(new.rglob("*")) if path.is_file()}
        _write_json(new / MANIFEST, {"kvad": __version__, "format": FORMAT, "files": files})


def save_step(
    run: Path,
    step: int,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    training: Training | None = None,
    *,
    generation: Generation | None = None,
    keep: int = 2,
    fresh: bool = False,
) -> Path:
    """Write ``run/checkpoints/step-N`` and then delete all but the newest ``keep``.

    ``fresh``: the first save of a new run: the steps of an old one give way in the same move.  Raises as :func:`save`.
    """
    folder = run / "checkpoints" / f"step-{step:08d}"
    sweep(folder.parent)  # brings back what an overwriting process had set aside when it died
    save(folder, config, tensors, tokenizer, training, generation=generation, replaces=steps_of(run) if fresh else ())
    for old in steps_of(run)[:-keep]:
        discard(old)
    return folder


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _write_tensors(folder: Path, path: Path, tensors: Mapping[str, Tensor]) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, path)
    except SafetensorError as error:  # the library's name for what the disk says
        raise refused(folder, OSError(str(error))) from error


# ---------------------------------------------------------------- reading


class Tensors(Mapping[str, Tensor]):
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


@dataclass(frozen=True)
class Checkpoint:
    """A folder that has been looked at; what is in it is read when it is asked for."""

    path: Path
    config: ModelConfig
    files: Mapping[str, Mapping[str, Any]]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None where the checkpoint has none.  Raises TokenizerError naming the file."""
        known = (TOKENIZER, "tokenizer_config.json", "vocab.json", "vocab.txt")
        return load_tokenizer(self.path) if any(name in self.files for name in known) else None

    @cached_property
    def generation(self) -> Generation:
        """What it says about generating.  Raises ConfigError naming the key."""
        content = read_json(self.path / CONFIG).get("generation")
        try:
            return Generation() if content is None else from_dict(Generation, content, "generation")
        except ConfigError as error:
            raise ConfigError(f"{self.path / CONFIG}: {error.message}", error.hint) from error

    @cached_property
    def origin(self) -> str | None:
        """The ``model_type`` that it was imported from."""
        said = read_json(self.path / CONFIG).get("origin")
        return said if isinstance(said, str) else None

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the table of tokens."""
        table = self.tensors.get("embed.tokens.weight")  # mapped, not read
        return torch.float32 if table is None else table.dtype

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Raises CheckpointError for a tensor that is missing, extra, or of another shape (both shapes are named)."""
        check_tensors(self.tensors, weight_shapes(self.config))
        yield from self.tensors.items()

    @cached_property
    def tensors(self) -> Tensors:
        return Tensors(self.path / MODEL)

    @cached_property
    def training(self) -> Training | None:
        """None where the checkpoint holds no training state."""
        folder = self.path / TRAINING
        if f"{TRAINING}/state.json" not in self.files:
            return None
        return Training(Tensors(folder / "state.safetensors"), read_json(folder / "state.json"))

    def fingerprint(self) -> str:
        """sha256 (hex) of the model: its config and tokenizer as they are now, its weights as the manifest has them."""
        digest = hashlib.sha256(str(self.files[MODEL]["sha256"]).encode())
        digest.update(json.dumps(self.config.to_dict(), sort_keys=True).encode())
        if self.tokenizer is not None:
            digest.update(self.tokenizer.fingerprint().encode())
        return digest.hexdigest()


Verify = bool | Literal["tensors"]


def load(folder: Path, *, verify: Verify = False) -> Checkpoint:
    """Look at a checkpoint folder, or at the newest one of a run; no tensor is read.

    ``verify``: compare every file with its sha256; ``"tensors"``: only those, as text may be edited by hand.  Raises
    CheckpointError for a folder that is not a whole checkpoint, ConfigError naming the file and the key for a config
    that cannot be.
    """
    path = locate(Path(folder))
    try:
        config = ModelConfig.load(path / CONFIG)
    except ConfigError as error:
        where = "" if str(path) in error.message else f"{path / CONFIG}: "
        raise ConfigError(where + error.message, error.hint) from error
    files = read_manifest(path)
    for name, entry in files.items():
        tensors = name.endswith(".safetensors")
        check_file(path / name, entry, verify=verify is True or (verify == "tensors" and tensors))
    return Checkpoint(path, config, files)


def check_tensors(found: Tensors, wanted: Mapping[str, tuple[int, ...]]) -> None:
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
