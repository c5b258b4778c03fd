"""Which steps of a run stay: the newest few, and the best.

    RUN/checkpoints/step-00000400/  step-00000500/  step-00000600/
    RUN/best -> checkpoints/step-00000400                             relative, so that a run can be moved and copied

The link is a function of what the newest checkpoint's state says: a process that dies between a save and its link
leaves the link as it was, and the next save puts it right.  A new link is renamed into the place of the old one, and a
step is deleted only when nothing points at it any more: at every moment ``best`` is a whole checkpoint.
Standard library only.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvad.aside import temp_path
from kvad.checkpoint.atomic import disk_error, fsync_path, recover_interrupted, remove_folder
from kvad.checkpoint.folder import BEST_LINK, list_steps, step_folder
from kvad.errors import SaveError

__all__ = ["prune_steps"]


def prune_steps(run: Path, keep: int, best: int | None) -> None:
    """After a save: link ``best`` to the step of that number, then delete all but the newest ``keep`` and it.

    None, or one that is no longer there: the run has no best.  Raises SaveError; whole steps stay whole.
    """
    steps = list_steps(run)
    chosen = None if best is None else step_folder(run, best)
    if chosen not in steps:
        chosen = None
    try:
        _link(run, chosen)
    except OSError as error:
        raise SaveError(
            disk_error(run / BEST_LINK, error).message, "on a disk without links: train.keep_best=false"
        ) from error
    for old in steps[:-keep]:
        if old != chosen:
            remove_folder(old)


def _link(run: Path, step: Path | None) -> None:
    """What is no link is somebody else's, and stays."""
    link = run / BEST_LINK
    if link.exists() and not link.is_symlink():
        return
    if step is None:
        link.unlink(missing_ok=True)
        return
    target = step.relative_to(run)
    if link.is_symlink() and Path(os.readlink(link)) == target:
        return
    recover_interrupted(run)
    temporary = temp_path(link, "tmp")
    try:
        temporary.symlink_to(target)
        temporary.replace(link)
        fsync_path(run)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
