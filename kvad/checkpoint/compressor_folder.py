"""What a compressor's folder says of itself, its tensors apart (``compressor.py`` has these).  No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvad.cache.weights import SummarizerShape
from kvad.checkpoint.folder import check_file, list_steps, read_json, read_manifest, resolve_best_link
from kvad.errors import CheckpointError

__all__ = ["SUMMARIZER_FORMAT", "NAME", "TENSORS", "read_summarizer_folder", "read_summarizer_shape"]

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


def read_summarizer_shape(path: Path) -> SummarizerShape:
    """What its summaries are made by.  CheckpointError as :func:`read_compressor`."""
    _, content = read_summarizer_folder(path)
    return SummarizerShape(content["ratio"], content["hidden"])
