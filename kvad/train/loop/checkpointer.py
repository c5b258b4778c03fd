"""Checkpoints written beside training: what is saved is copied between two steps, and a thread writes the copy.

    trainer    step 499, 500 | copy | 501, 502, 503, 504, ...
    thread                          | flush, hash, rename: step-00000500 is there | on_save

At most one save is in flight; the next waits for it.  What the disk refuses is raised where training asks next, as the
thread's own SaveError.  What is written is what would have been written at once, so a resume goes on to the bit
whichever of the two steps a kill has left.  The copies' memory is kept for the next ones: new memory costs more than
copying into it.

Nothing is saved of weights that are not finite: the newest checkpoint is one that can be trained on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvad import checkpoint
from kvad.errors import NumericalError


def checkpoint_status(there: bool) -> str:
    """What a run that fails has, in words; ``there``: whether it has a checkpoint."""
    return "the last checkpoint is whole" if there else "there is no checkpoint yet"


class AsyncCheckpointer:
    """``take`` gives the run as it stands, nothing copied; ``write`` makes a checkpoint of it and returns its folder.

    ``beside``: written by a thread, from a copy; else at once.  ``there``: whether the run has a checkpoint.
    """

    def __init__(
        self,
        snapshot: Callable[[], checkpoint.handle.CheckpointSnapshot],
        write: Callable[[checkpoint.handle.CheckpointSnapshot], Path],
        *,
        async_save: bool,
        has_checkpoint: bool = False,
    ) -> None:
        self.has_checkpoint = has_checkpoint
        self._snapshot, self._write, self._async_save = snapshot, write, async_save
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written: list[tuple[Path, int]] = []

    def save(self) -> None:
        """Begin a checkpoint of this moment.  Raises SaveError of the one before, or of this one where it is written at
        once; NumericalError for weights that are not finite."""
        self.wait()
        moment = self._snapshot()
        _check_finite(moment)
        if not self._async_save:
            self._keep(self._write(moment), moment.step)
            return
        copied = self._copied(moment)
        self._thread = threading.Thread(target=self._run, args=(copied,), name="kvad-save", daemon=True)
        self._thread.start()

    def finished(self) -> list[tuple[Path, int]]:
        """Folders and steps that were written since the last call.  Raises what the thread met."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        written, self._written = self._written, []
        return written

    def wait(self) -> None:
        """Until nothing is in flight.  Raises what the thread met."""
        self.close()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Until nothing is in flight; an error of its own is not raised beside another one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, moment: checkpoint.handle.CheckpointSnapshot) -> None:
        try:
            self._keep(self._write(moment), moment.step)
        except BaseException as error:  # raised again by wait
            self._error = error

    def _keep(self, folder: Path, step: int) -> None:
        self.has_checkpoint = True
        self._written.append((folder, step))

    def _copied(self, moment: checkpoint.handle.CheckpointSnapshot) -> checkpoint.handle.CheckpointSnapshot:
        training = checkpoint.handle.TrainingState(
            self._copy("training", moment.training.tensors), moment.training.state
        )
        return moment._replace(weights=self._copy("weights", moment.weights), training=training)

    @torch.no_grad()
    def _copy(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Into the host's memory, where the last one of this name and size was."""
        found = {}
        for name, tensor in tensors.items():
            key, there = f"{group}.{name}", self._copies.get(f"{group}.{name}")
            if there is None or there.shape != tensor.shape or there.dtype != tensor.dtype:
                there = self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
            found[name] = there.copy_(tensor)
        return found


def _check_finite(moment: checkpoint.handle.CheckpointSnapshot) -> None:
    """Of what is evaluated, and of what is trained where that is another."""
    raw = {name: tensor for name, tensor in moment.training.tensors.items() if name.startswith("raw.")}
    for name, tensor in {**raw, **moment.weights}.items():
        # A sum may overflow where no element does: then each is looked at.
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
            raise NumericalError(
                f"step {moment.step}: {name.removeprefix('raw.')} is not finite any more, and is not saved"
            )
