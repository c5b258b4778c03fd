"""Where a checkpoint is, its small files, and whether its files are those that were saved: what needs no torch.

A *checkpoint* is a folder with a ``config.json``; a *run* is a folder with ``checkpoints/step-N/`` in it, and stands
for its newest step; ``best`` in it is a link to the one with the lowest validation loss (``kept.py``).  ``locate``
takes any of these.  The manifest says of every file how long it is and its sha256.  Standard library only.

Which steps of a run stay: the newest few, and the best.

    RUN/checkpoints/step-00000400/  step-00000500/  step-00000600/
    RUN/best -> checkpoints/step-00000400                             relative, so that a run can be moved and copied

The link is a function of what the newest checkpoint's state says: a process that dies between a save and its link
leaves the link as it was, and the next save puts it right.  A new link is renamed into the place of the old one, and a
step is deleted only when nothing points at it any more: at every moment ``best`` is a whole checkpoint.
Standard library only.

What a compressor's folder says of itself, its tensors apart (``compressor.py`` has these).  No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvad import config, storage
from kvad.errors import CheckpointError, SaveError

CONFIG, MANIFEST, MODEL, TRAINING = "config.json", "manifest.json", "model.safetensors", "training"
BEST_LINK = "best"
FORMAT = 1  # of the manifest

_STEP = re.compile(r"step-\d+")


def locate(path: Path) -> Path:
    """The checkpoint folder that ``path`` stands for: itself, or the newest step of the run.

    Raises CheckpointError that says what is missing.
    """
    path = resolve_best_link(path)
    if (path / CONFIG).is_file():
        return path
    if steps := list_steps(path):
        return steps[-1]
    if (left := storage.atomic.find_interrupted(path)) is not None:  # killed between the two renames of a replacement
        return left
    if not path.exists():
        raise CheckpointError(f"no such folder: {path}", "kvad demo trains a model, kvad train one of your own")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file", "name the checkpoint's folder")
    if (path / "checkpoints").is_dir():
        raise CheckpointError(f"{path} holds no checkpoint yet", "its training was stopped before its first save")
    raise CheckpointError(f"{path} is not a checkpoint: it has no {CONFIG}")


def resolve_best_link(path: Path) -> Path:
    """The step that a run's ``best`` stands for, so that a new best does not change what has been opened; any other
    path is itself."""
    if path.name != BEST_LINK or not path.is_symlink():
        return path
    target = path.parent / os.readlink(path)
    return target if _STEP.fullmatch(target.name) else path


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def list_steps(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; ``[]`` for a folder that is no run.

    One that was being replaced when a process died, or that gave way to a step that was never finished, is among them.
    """
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    steps = {left.name: left.path for left in storage.temp_paths.interrupted_writes(folder) if left.path.is_dir()}
    steps |= {path.name: path for path in folder.iterdir() if path.is_dir()}
    return [steps[name] for name in sorted(steps) if _STEP.fullmatch(name)]


def is_run(path: Path) -> bool:
    return bool(list_steps(path))


def is_hf(path: Path) -> bool:
    """Whether a folder has Hugging Face's layout rather than kvad's: its config names a ``model_type``, or no model."""
    content = _content(path / CONFIG)
    return content is not None and "kvad" not in content and ("model_type" in content or "model" not in content)


def _content(path: Path) -> dict[str, Any] | None:
    """Of a JSON file that may not be there, or be none: whoever needs it says so."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


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


# ---------------------------------------------------------------- the manifest


def file_digest(path: Path) -> dict[str, Any]:
    """What the manifest says of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def is_native(path: Path) -> bool:
    """Whether kvad wrote a folder, in whichever layout: then it has a manifest, or should have.  Others may have a
    ``manifest.json`` of their own."""
    return not is_hf(path) or (path / TRAINING).is_dir() or "kvad" in (_content(path / MANIFEST) or {})


def list_files(path: Path) -> dict[str, dict[str, Any]] | None:
    """:func:`read_manifest` of a folder that kvad wrote, None of another."""
    return read_manifest(path) if is_native(path) else None


def read_manifest(path: Path, tensors: str = MODEL) -> dict[str, dict[str, Any]]:
    """Name -> entry of a checkpoint folder's files, ``tensors`` among them.  Raises CheckpointError for a manifest that
    is missing or none."""
    content = read_json(path / MANIFEST)
    files = content.get("files")
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST}: format {content.get('format')!r}, this kvad reads {FORMAT}")
    if not isinstance(files, dict) or tensors not in files or not all(map(_is_entry, files.values())):
        raise CheckpointError(f"{path / MANIFEST} does not list the checkpoint's files")
    return files


def _is_entry(value: object) -> bool:
    return isinstance(value, dict) and type(value.get("bytes")) is int and isinstance(value.get("sha256"), str)


def check_file(path: Path, entry: Mapping[str, Any], *, verify: bool = False) -> None:
    """Tensor files must have their size; text may have been edited by hand, unless ``verify`` asks.

    Raises CheckpointError that says whether the file is missing, cut off, or another than its manifest's.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", "the checkpoint is not whole: copy it again")
    size, saved = path.stat().st_size, entry["bytes"]
    if size != saved and (verify or path.suffix == ".safetensors"):
        if size < saved and path.suffix == ".safetensors" and _is_truncated(path, size):
            raise CheckpointError(
                f"{path} is truncated: {size:,} of {saved:,} bytes are there", _older_checkpoint_hint(path)
            )
        raise CheckpointError(
            f"{path} differs from its manifest: {size:,} bytes, not {saved:,}", _older_checkpoint_hint(path)
        )
    if verify and file_digest(path)["sha256"] != entry["sha256"]:
        raise CheckpointError(
            f"{path} differs from its manifest: the size is right, the sha256 is not", _older_checkpoint_hint(path)
        )


def _is_truncated(path: Path, size: int) -> bool:
    """Whether a safetensors file ends before its last tensor does (the format: ``lab/headers.py``)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            return True
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            return size < 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return False  # whole or not, it is another file


def _older_checkpoint_hint(path: Path) -> str:
    """The hint: older checkpoints of the same run, if there are any."""
    step = next((parent for parent in path.parents if parent.name.startswith("step-")), None)
    others = [other for other in list_steps(step.parent.parent) if other != step] if step is not None else []
    return f"an older one is {others[-1]}" if others else "copy it again"


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
            storage.atomic.disk_error(run / BEST_LINK, error).message, "on a disk without links: train.keep_best=false"
        ) from error
    for old in steps[:-keep]:
        if old != chosen:
            storage.atomic.remove_folder(old)


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
    storage.atomic.recover_interrupted(run)
    temporary = storage.temp_paths.temp_path(link, "tmp")
    try:
        temporary.symlink_to(target)
        temporary.replace(link)
        storage.atomic.fsync_path(run)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


NAME, TENSORS = "compressor.json", "compressor.safetensors"
SUMMARIZER_FORMAT = 1


def read_summarizer_folder(path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder (of a run its newest) and its compressor.json.  CheckpointError for what is no whole compressor."""
    path = resolve_best_link(Path(path))
    steps = list_steps(path)
    folder = path if (path / NAME).is_file() or not steps else steps[-1]
    if not (folder / NAME).is_file():
        what = "no such folder" if not path.exists() else f"it has no {NAME}"
        raise CheckpointError(f"{path} is not a compressor: {what}", "kvad train --objective compress makes one")
    for name, entry in read_manifest(folder, TENSORS).items():
        check_file(folder / name, entry, verify=name == TENSORS)
    content = read_json(folder / NAME)
    if content.get("format") != SUMMARIZER_FORMAT:
        raise CheckpointError(f"{folder / NAME}: format {content.get('format')!r}, this kvad reads {SUMMARIZER_FORMAT}")
    for key, kind in (("model", str), ("ratio", int), ("hidden", int)):
        if type(content.get(key)) is not kind:
            raise CheckpointError(f"{folder / NAME}: {key}: {content.get(key)!r}", "train it anew")
    return folder, content


def read_summarizer_shape(path: Path) -> config.parameter_shapes.SummarizerShape:
    """What its summaries are made by.  CheckpointError as :func:`read_compressor`."""
    _, content = read_summarizer_folder(path)
    return config.parameter_shapes.SummarizerShape(content["ratio"], content["hidden"])
