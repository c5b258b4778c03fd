"""Compressors on disk: what ``kvad train --objective compress`` writes, and what a cache is given.

A folder of its own, beside the model and not in it::

    compressor.json          {"kvad": version, "format": 1, "model": fingerprint, "ratio", "hidden", "recent", "sinks"}
    compressor.safetensors   what was learned, by layer
    manifest.json            as of a checkpoint (``native.py``)
    training/                where training can go on

It belongs to one model and is refused for another: ``model`` names config and weights (:func:`model_fingerprint`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from kvad import storage
from kvad.checkpoint.folder import (
    MANIFEST,
    NAME,
    SUMMARIZER_FORMAT,
    TENSORS,
    TRAINING,
    file_digest,
    list_steps,
    prune_steps,
    read_summarizer_folder,
    step_folder,
)
from kvad.checkpoint.handle import CheckpointHandle, LazyTensors, TrainingState, read_training_state
from kvad.checkpoint.native import save_tensors, write_json
from kvad.config import attention_specs, canonical_config
from kvad.errors import CheckpointError
from kvad.model import Summarizer

SAMPLED_ELEMENTS = 64  # numbers of each tensor


def sampled_fingerprint(opened: CheckpointHandle) -> str:
    """Names a model whatever the layout that it is stored in: its config, and numbers from all over each tensor."""
    digest = hashlib.blake2b(json.dumps(canonical_config(opened.config), sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted(opened.weights()):
        flat = tensor.reshape(-1)
        some = flat[:: max(1, len(flat) // SAMPLED_ELEMENTS)][:SAMPLED_ELEMENTS].double()
        digest.update(name.encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()


def save_summarizer_step(
    run: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    model: str,
    settings: dict[str, Any],
    training: TrainingState,
    *,
    keep: int = 2,
    best: int | None = None,
    fresh: bool = False,
) -> Path:
    """Write ``run/checkpoints/step-N``, whole or not at all; the rest as ``native.save_step``.

    ``model``: the fingerprint of the one that it is for; ``settings``: what else compressor.json says, ratio and hidden
    among it.  Raises SaveError.
    """
    from kvad import __version__

    folder = step_folder(run, step)
    storage.atomic.recover_interrupted(folder.parent)
    with storage.atomic.new_folder(folder, replaces=list_steps(run) if fresh else ()) as new:
        write_json(new / NAME, {"kvad": __version__, "format": SUMMARIZER_FORMAT, "model": model, **settings})
        save_tensors(folder, new / TENSORS, tensors)
        (new / TRAINING).mkdir()
        write_json(new / TRAINING / "state.json", training.state)
        save_tensors(folder, new / TRAINING / "state.safetensors", training.tensors)
        files = {
            path.relative_to(new).as_posix(): file_digest(path) for path in sorted(new.rglob("*")) if path.is_file()
        }
        write_json(new / MANIFEST, {"kvad": __version__, "format": SUMMARIZER_FORMAT, "files": files})
    prune_steps(run, keep, best)
    return folder


@dataclass(frozen=True)
class StoredSummarizer:
    """A folder that has been looked at; ``content``: of its compressor.json."""

    path: Path
    content: dict[str, Any]

    @property
    def model(self) -> str:
        """The fingerprint of the model that it was trained for."""
        return str(self.content["model"])

    @cached_property
    def training(self) -> TrainingState | None:
        return read_training_state(self.path)

    def load(self, opened: CheckpointHandle) -> Summarizer:
        """For this model.  CheckpointError for another one, and for tensors that are missing or of another shape."""
        if sampled_fingerprint(opened) != self.model:
            raise CheckpointError(
                f"{self.path}: this compressor was trained for another model than {opened.path}",
                "train one for it: kvad train --objective compress --init MODEL",
            )
        compressor = Summarizer(attention_specs(opened.config), self.content["ratio"], self.content["hidden"])
        found, wanted = LazyTensors(self.path / TENSORS), compressor.state_dict()
        for name in sorted({*found, *wanted}):
            if name not in found or name not in wanted or found.shape(name) != tuple(wanted[name].shape):
                raise CheckpointError(f"{found.path}: tensor {name} is missing, extra, or of another shape")
        compressor.load_state_dict(dict(found))  # copied: what is mapped may be trained further
        return compressor.eval().requires_grad_(False)


def open_summarizer(path: Path) -> StoredSummarizer:
    """A folder, or the newest of a run.  Raises CheckpointError for what is no whole compressor."""
    return StoredSummarizer(*read_summarizer_folder(path))


def load_summarizer(path: Path, opened: CheckpointHandle) -> Summarizer:
    """The compressor in ``path``, for this model.  Raises CheckpointError, also for another model's."""
    return open_summarizer(path).load(opened)
