"""Summarizers on disk: written by ``kvad train --objective summarizer``, read by a cache.

A folder, separate from the model's::

    summarizer.json          {"kvad": version, "format": 2, "model": fingerprint, "ratio", "hidden_size", "recent",
                             "num_sinks"}
    summarizer.safetensors   trained weights by layer
    manifest.json            as in a checkpoint (``native.py``)
    training/                training state, if training can be resumed

A summarizer is refused for another model: ``model`` is the ``sampled_fingerprint`` of config and weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from kvad.checkpoint.folder import (
    SUMMARIZER_FILE,
    SUMMARIZER_FORMAT,
    SUMMARIZER_TENSORS,
    read_summarizer_folder,
    write_json,
)
from kvad.checkpoint.handle import CheckpointHandle, TrainingState, read_training_state
from kvad.checkpoint.native import check_tensors, new_checkpoint
from kvad.checkpoint.safetensors_io import open_file_tensors, save_tensors
from kvad.config import attention_specs, canonical_config, is_later_default
from kvad.errors import CheckpointError
from kvad.model import Summarizer

SAMPLED_ELEMENTS = 64  # per tensor


def sampled_fingerprint(handle: CheckpointHandle) -> str:
    """Fingerprint a model, independent of its layout, by config and sampled elements."""
    fields = canonical_config(handle.config).items()
    hashed = {name: value for name, value in fields if not is_later_default(name, value)}
    digest = hashlib.blake2b(json.dumps(hashed, sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted(handle.weights()):
        elements = tensor.reshape(-1)
        sample = elements[:: max(1, len(elements) // SAMPLED_ELEMENTS)][:SAMPLED_ELEMENTS].double()
        digest.update(name.encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def save_summarizer(
    folder: Path,
    tensors: Mapping[str, Tensor],
    model: str,
    settings: Mapping[str, Any],
    training: TrainingState | None = None,
    *,
    replaces: Sequence[Path] = (),
) -> None:
    """Write a summarizer's folder atomically.

    Args:
        folder: Folder to write.
        tensors: State dict of the summarizer.
        model: Fingerprint of the model that it was trained for.
        settings: Other fields of summarizer.json, with ratio and hidden_size among them.
        training: Training state, if training can be resumed.
        replaces: Sibling folders that are removed in the same move.
    """
    from kvad import __version__

    content = {"kvad": __version__, "format": SUMMARIZER_FORMAT, "model": model, **settings}
    with new_checkpoint(folder, training, replaces) as temp_folder:
        write_json(temp_folder / SUMMARIZER_FILE, content)
        save_tensors(folder, temp_folder / SUMMARIZER_TENSORS, tensors)


@dataclass(frozen=True)
class StoredSummarizer:
    """An opened summarizer folder."""

    path: Path
    content: dict[str, Any]  # of summarizer.json

    @property
    def model(self) -> str:
        """Fingerprint of the model that the summarizer was trained for."""
        return str(self.content["model"])

    @cached_property
    def training(self) -> TrainingState | None:
        """The training state, or None if there is none."""
        return read_training_state(self.path)

    def load(self, handle: CheckpointHandle) -> Summarizer:
        """Load the summarizer; raise CheckpointError if it was trained for another model."""
        if sampled_fingerprint(handle) != self.model:
            raise CheckpointError(
                f"{self.path}: this summarizer was trained for another model than {handle.path}",
                "Train one for it: kvad train --objective summarizer --init MODEL.",
            )
        summarizer = Summarizer(attention_specs(handle.config), self.content["ratio"], self.content["hidden_size"])
        stored = open_file_tensors(self.path / SUMMARIZER_TENSORS)
        check_tensors(stored, {name: tuple(tensor.shape) for name, tensor in summarizer.state_dict().items()})
        summarizer.load_state_dict(dict(stored))  # copies, so that training cannot write to the mapped file
        return summarizer.eval().requires_grad_(False)


def open_summarizer(path: Path) -> StoredSummarizer:
    """Open a summarizer's folder, or the newest of a run."""
    return StoredSummarizer(*read_summarizer_folder(path))


def load_summarizer(path: Path, handle: CheckpointHandle) -> Summarizer:
    """Load the summarizer in ``path``, which must be trained for this model."""
    return open_summarizer(path).load(handle)
