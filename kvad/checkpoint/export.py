"""Conversion between kvad's layout and Hugging Face folders that ``transformers`` loads.

A model that was imported from a family is exported to that family; for any other model all families are tried
(``hf_layout.py``).  A model trained by kvad is already in Hugging Face's layout if a family can express it.
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

# Files of a tokenizer or a chat template; they are copied unchanged.
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
    """Return the files of a folder that belong to a tokenizer or chat template, by name."""
    return {name: (folder / name).read_bytes() for name in COMPANION_FILES if (folder / name).is_file()}


def export_hf(
    handle: CheckpointHandle, out: Path, *, family: str | None = None, dtype: torch.dtype | None = None
) -> str:
    """Write a Hugging Face folder, replacing ``out`` once the new folder is complete.

    Args:
        handle: Checkpoint to export.
        out: Folder to write.
        family: ``model_type`` to write; by default the model's own, or the first that can express it.
        dtype: Dtype of the stored weights (default: unchanged).

    Returns:
        The name of the transformers class that loads it.
    """
    layout = choose_family(handle.config, family or handle.origin)
    with storage.atomic.new_folder(out) as temp_folder:
        write_hf_config(temp_folder, layout, handle.generation, dtype or handle.stored_dtype)
        weights = dict(handle.weights())
        write_sharded(temp_folder, _cast(write_tensors(layout.family, handle.config, weights), dtype))
        write_pooling(temp_folder, handle.generation, handle.config.hidden_size)
        _copy_tokenizer(handle, temp_folder)
    return layout.hf_class


def import_hf(
    handle: CheckpointHandle, out: Path, *, dtype: torch.dtype | None = None, progress: Progress | None = None
) -> None:
    """Write a checkpoint in kvad's layout, with the tokenizer's files unchanged."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in handle.weights():
        tensors[name] = tensor if dtype is None else tensor.to(dtype)
        if progress is not None:
            progress(name, tensors[name].nbytes)
    extra_files = [handle.path / name for name in COMPANION_FILES if (handle.path / name).is_file()]
    save_checkpoint(
        out, handle.config, tensors, None, generation=handle.generation, extra_files=extra_files, origin=handle.origin
    )


def _cast(tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _copy_tokenizer(handle: CheckpointHandle, folder: Path) -> None:
    """Copy the tokenizer's files, and add the file that names its class if it is missing.

    kvad's own byte, character and word tokenizers have no equivalent in transformers and are left out.
    """
    for name in COMPANION_FILES:
        if (handle.path / name).is_file():
            shutil.copyfile(handle.path / name, folder / name)
    if not (folder / text.base.FILE_NAME).is_file() or (folder / text.hf_config.CONFIG_NAME).is_file():
        return
    if isinstance(handle.tokenizer, HFTokenizer):
        handle.tokenizer.save(folder)
    else:
        (folder / text.base.FILE_NAME).unlink()
