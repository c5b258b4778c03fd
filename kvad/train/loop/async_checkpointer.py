"""Asynchronous checkpoints, copied between two steps and written by a background thread.

    trainer    step 499, 500 | copy | 501, 502, 503, 504, ...
    thread                          | flush, hash, rename: step-00000500 exists | on_save

At most one save is in flight; the next one waits for it. Errors of the thread are raised as its SaveError at the
trainer's next call. The bytes are the same as those of a synchronous save, so a run resumes bit for bit from whichever
of the two steps a kill leaves. The buffers of the copies are reused, because allocating memory costs more than copying.

Weights that are not finite are never saved, so training can continue from the newest checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvad import checkpoint
from kvad.errors import NumericalError


def checkpoint_status(exists: bool) -> str:
    """Describe the checkpoints of a failed run; ``exists``: the run has one."""
    return "the last checkpoint is whole" if exists else "there is no checkpoint yet"


@dataclass
class AsyncCheckpointer:
    """Writes checkpoints, in a background thread if ``async_save`` is true, else at once."""

    # Returns the current state of the run without copying it.
    snapshot: Callable[[], checkpoint.handle.CheckpointSnapshot]
    write: Callable[[checkpoint.handle.CheckpointSnapshot], Path]  # writes a checkpoint and returns its folder
    _: KW_ONLY
    async_save: bool
    has_checkpoint: bool = False  # the run has one already

    def __post_init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written: list[tuple[Path, int]] = []

    def save(self) -> None:
        """Start a checkpoint; SaveError if the previous save failed, NumericalError if weights are not finite."""
        self.wait()
        snapshot = self.snapshot()
        _check_finite(snapshot)
        if not self.async_save:
            self._record(self.write(snapshot), snapshot.step)
            return
        training = snapshot.training._replace(tensors=self._copy("training", snapshot.training.tensors))
        copied = snapshot._replace(weights=self._copy("weights", snapshot.weights), training=training)
        self._thread = threading.Thread(target=self._run, args=(copied,), name="kvad-save", daemon=True)
        self._thread.start()

    def finished(self) -> list[tuple[Path, int]]:
        """Return folders and steps written since the last call; raise the thread's error, if any."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        written, self._written = self._written, []
        return written

    def wait(self) -> None:
        """Wait until no save is in flight; raise the thread's error, if any."""
        self.close()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait until no save is in flight, without raising the thread's error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, snapshot: checkpoint.handle.CheckpointSnapshot) -> None:
        try:
            self._record(self.write(snapshot), snapshot.step)
        except BaseException as error:  # raised again by wait
            self._error = error

    def _record(self, folder: Path, step: int) -> None:
        self.has_checkpoint = True
        self._written.append((folder, step))

    @torch.no_grad()
    def _copy(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors into the host buffers of the previous save where name and shape agree."""
        copies = {}
        for name, tensor in tensors.items():
            key, buffer = f"{group}.{name}", self._copies.get(f"{group}.{name}")
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
            copies[name] = buffer.copy_(tensor)
        return copies


def _check_finite(snapshot: checkpoint.handle.CheckpointSnapshot) -> None:
    """Check the weights to be evaluated and, where they differ, the weights being trained."""
    raw = {name: tensor for name, tensor in snapshot.training.tensors.items() if name.startswith("raw.")}
    for name, tensor in {**raw, **snapshot.weights}.items():
        # A sum may overflow although no element does, so check the elements before raising.
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
            raise NumericalError(
                f"step {snapshot.step}: {name.removeprefix('raw.')} is no longer finite; no checkpoint was saved"
            )
