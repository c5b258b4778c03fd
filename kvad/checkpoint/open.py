"""One door for every checkpoint: kvad's own folders and runs, Hugging Face folders, and names on the hub.

model, opened = load_model("runs/demo")
model, opened = load_model("HuggingFaceTB/SmolLM2-135M", dtype="bfloat16")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvad.cache.weights import weight_shapes
from kvad.checkpoint.folder import locate
from kvad.checkpoint.generation import Generation
from kvad.checkpoint.hub import resolve
from kvad.checkpoint.imported import Imported, is_foreign
from kvad.checkpoint.native import DTYPES, Verify, load
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, UsageError, nearest
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import Tokenizer

__all__ = ["Opened", "load_model", "open_checkpoint"]


class Opened(Protocol):
    """A checkpoint that has been looked at; tensors are read when they are asked for."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def generation(self) -> Generation: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def origin(self) -> str | None:
        """The ``model_type`` that it came from; None for a model that kvad made."""
        ...

    @property
    def stored(self) -> torch.dtype:
        """What most of its weights are stored in."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...


def open_checkpoint(
    where: str | Path, *, verify: Verify = False, revision: str | None = None, token: str | None = None
) -> Opened:
    """Look at a folder, a run, or a name on the hub (``revision`` and ``token``: of the hub).

    Raises CheckpointError for what is no whole checkpoint, with the way out.
    """
    folder = resolve(where, revision=revision, token=token)
    if is_foreign(folder):
        return Imported(folder)
    return load(locate(folder), verify=verify)


def load_model(
    where: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    *,
    verify: Verify = False,
    progress: Callable[[str, int], None] | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> tuple[Transformer, Opened]:
    """The model of a checkpoint, on ``device``, in ``dtype``, for inference: eval mode, no gradients.

    ``dtype`` None: as it is stored, but float16 is widened to float32 on the CPU, which cannot compute in it.  On the
    CPU and without a change of dtype weights stay mapped from the file.  ``progress(name, bytes)`` is told each tensor.
    Raises as :func:`open_checkpoint` does, UsageError for a dtype that cannot be, and CheckpointError for a tensor that
    is missing, extra, or of another shape.
    """
    target = as_dtype(dtype, torch.device(device))
    opened = open_checkpoint(where, verify=verify, revision=revision, token=token)
    on_cpu = torch.device(device).type == "cpu"
    with torch.device("meta"):
        model = Transformer(opened.config)
    loaded: dict[str, Tensor] = {}
    for name, tensor in opened.weights():
        widened = torch.float32 if on_cpu and tensor.dtype == torch.float16 else None
        loaded[name] = tensor.to(device=device, dtype=target or widened)
        if progress is not None:
            progress(name, loaded[name].nbytes)
    wanted = weight_shapes(opened.config)
    missing = sorted(set(wanted) - set(loaded))
    if missing:
        raise CheckpointError(f"{opened.path}: tensor {missing[0]} {list(wanted[missing[0]])} is missing")
    model.load_state_dict(loaded, assign=True)
    return model.eval().requires_grad_(False), opened


def as_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | None:
    """By name or as torch's own; UsageError for one that is unknown, or that a device cannot compute in."""
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", nearest(dtype, DTYPES))
    chosen = DTYPES[dtype] if isinstance(dtype, str) else dtype
    if chosen == torch.float16 and device.type == "cpu":
        raise UsageError(
            "float16 is for storage only on a CPU: its matrix products stall there for minutes",
            "compute in bfloat16 or float32",
        )
    return chosen
