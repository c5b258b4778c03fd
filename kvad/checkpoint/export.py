"""From a checkpoint of kvad's to a Hugging Face folder that ``transformers`` loads, and from theirs to ours.

A model that came from a family goes back to it; of any other, the families are asked (``theirs.py``).  What kvad
trained lies in their layout already, where a family can hold it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from kvad import storage, text
from kvad.checkpoint.conversion import write_tensors
from kvad.checkpoint.generation_config import write_pooling
from kvad.checkpoint.handle import CheckpointHandle
from kvad.checkpoint.hf_layout import choose_family, write_hf_config
from kvad.checkpoint.native import save_checkpoint
from kvad.checkpoint.safetensors_io import write_sharded
from kvad.text import HFTokenizer

# Files that belong to a tokenizer or a chat and are copied as they are.
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
)
Progress = Callable[[str, int], None]


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Name -> content of the files there that belong to a tokenizer or a chat."""
    return {name: (folder / name).read_bytes() for name in COMPANION_FILES if (folder / name).is_file()}


def export_hf(
    opened: CheckpointHandle, out: Path, *, family: str | None = None, dtype: torch.dtype | None = None
) -> str:
    """Write a Hugging Face folder; returns the class of theirs that reads it.

    The old folder, if any, gives way when the new one is whole.  Raises CheckpointError, SaveError.
    """
    layout = choose_family(opened.config, family or opened.origin)
    with storage.atomic.new_folder(out) as new:
        write_hf_config(new, layout, opened.generation, dtype or opened.stored_dtype)
        ours = dict(opened.weights())
        write_sharded(new, _cast(write_tensors(layout.family, opened.config, ours), dtype))
        write_pooling(new, opened.generation, opened.config.hidden_size)
        _copy_tokenizer(opened, new)
    return layout.hf_class


def import_hf(
    opened: CheckpointHandle, out: Path, *, dtype: torch.dtype | None = None, progress: Progress | None = None
) -> None:
    """Write a checkpoint of kvad's, with the tokenizer's files as they are."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in opened.weights():
        tensors[name] = tensor if dtype is None else tensor.to(dtype)
        if progress is not None:
            progress(name, tensors[name].nbytes)
    beside = [opened.path / name for name in COMPANION_FILES if (opened.path / name).is_file()]
    save_checkpoint(
        out, opened.config, tensors, None, generation=opened.generation, beside=beside, origin=opened.origin
    )


def _cast(tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _copy_tokenizer(opened: CheckpointHandle, new: Path) -> None:
    """Its files, with the one that names its class where it came without; kvad's own tables of bytes, characters and
    words are no format of theirs and are left out."""
    for name in COMPANION_FILES:
        if (opened.path / name).is_file():
            shutil.copyfile(opened.path / name, new / name)
    if not (new / text.base.FILE_NAME).is_file() or (new / text.hf_config.CONFIG_NAME).is_file():
        return
    if isinstance(opened.tokenizer, HFTokenizer):
        opened.tokenizer.save(new)
    else:
        (new / text.base.FILE_NAME).unlink()
