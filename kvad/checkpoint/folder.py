"""Where a checkpoint is, and the small files in it: what can be asked without torch.

A *checkpoint* is a folder with a ``config.json``; a *run* is a folder with ``checkpoints/step-N/`` in it, and stands
for its newest step.  ``locate`` takes either.  Standard library only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kvad.checkpoint.atomic import survivor
from kvad.errors import CheckpointError

__all__ = ["CONFIG", "MANIFEST", "MODEL", "TRAINING", "is_run", "locate", "read_json", "steps_of"]

CONFIG, MANIFEST, MODEL, TRAINING = "config.json", "manifest.json", "model.safetensors", "training"

_STEP = re.compile(r"step-\d+")
_REPLACED = re.compile(r"\.step-\d+\.\d+\.[0-9a-f]{8}\.old")


def locate(path: Path) -> Path:
    """The checkpoint folder that ``path`` stands for: itself, or the newest step of the run.

    Raises CheckpointError that says what is missing.
    """
    if (path / CONFIG).is_file():
        return path
    if steps := steps_of(path):
        return steps[-1]
    if (left := survivor(path)) is not None:  # killed between the two renames of a replacement
        return left
    if not path.exists():
        raise CheckpointError(f"no such folder: {path}", "kvad demo trains a model, kvad train one of your own")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file", "name the checkpoint's folder")
    if (path / "checkpoints").is_dir():
        raise CheckpointError(f"{path} holds no checkpoint yet", "its training was stopped before its first save")
    raise CheckpointError(f"{path} is not a checkpoint: it has no {CONFIG}")


def steps_of(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; ``[]`` for a folder that is no run.

    If all of them were being replaced when a process died, the ones set aside are they.
    """
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    names = [path for path in folder.iterdir() if path.is_dir()]
    whole = [path for path in names if _STEP.fullmatch(path.name)]
    return sorted(whole or [path for path in names if _REPLACED.fullmatch(path.name)], key=lambda path: path.name)


def is_run(path: Path) -> bool:
    return bool(steps_of(path))


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError naming the file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", "the checkpoint is not whole: copy it again") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected an object, found a {type(content).__name__}")
    return content
