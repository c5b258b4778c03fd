"""What a compressor's folder says of itself, its tensors apart (``compressor.py`` has these).  No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvad.cache.weights import Summaries
from kvad.checkpoint.folder import check_file, pointed, read_json, read_manifest, steps_of
from kvad.errors import CheckpointError

__all__ = ["FORMAT", "NAME", "TENSORS", "read_compressor", "read_summaries"]

NAME, TENSORS = "compressor.json", "compressor.safetensors"
FORMAT = 1


def read_compressor(path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder (of a run its newest) and its compressor.json.  CheckpointError for what is no whole compressor."""
    path = pointed(Path(path))
    steps = steps_of(path)
    folder = path if (path / NAME).is_file() or not steps else steps[-1]
    if not (folder / NAME).is_file():
        what = "no such folder" if not path.exists() else f"it has no {NAME}"
        raise CheckpointError(f"{path} is not a compressor: {what}", "kvad train --objective compress makes one")
    for name, entry in read_manifest(folder, TENSORS).items():
        check_file(folder / name, entry, verify=name == TENSORS)
    content = read_json(folder / NAME)
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{folder / NAME}: format {content.get('format')!r}, this kvad reads {FORMAT}")
    for key, kind in (("model", str), ("ratio", int), ("hidden", int)):
        if type(content.get(key)) is not kind:
            raise CheckpointError(f"{folder / NAME}: {key}: {content.get(key)!r}", "train it anew")
    return folder, content


def read_summaries(path: Path) -> Summaries:
    """What its summaries are made by.  CheckpointError as :func:`read_compressor`."""
    _, content = read_compressor(path)
    return Summaries(content["ratio"], content["hidden"])
