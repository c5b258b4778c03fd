"""One door for every checkpoint: kvad's folders and runs, Hugging Face folders, and names on the hub.

model, opened = load_model("runs/demo")
model, opened = load_model("HuggingFaceTB/SmolLM2-135M", dtype="bfloat16")
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kvad.checkpoint.adapter import find_adapter, open_adapted
from kvad.checkpoint.handle import CheckpointHandle
from kvad.checkpoint.hub import resolve_model_path
from kvad.checkpoint.native import DTYPES, Verify, open_folder
from kvad.errors import UsageError, suggest
from kvad.model import Transformer


def open_checkpoint(
    where: str | Path, *, verify: Verify = False, revision: str | None = None, token: str | None = None
) -> CheckpointHandle:
    """Look at a folder, a run, or a name on the hub (``revision`` and ``token``: of the hub).

    An adapter's folder is the model that it and the base that it names are together.  Raises CheckpointError for what
    is no whole checkpoint, with the way out.
    """
    folder = resolve_model_path(where, revision=revision, token=token, adapters=True)
    return open_folder(folder, verify=verify) if find_adapter(folder) is None else open_adapted(folder)


def load_model(
    where: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    *,
    verify: Verify = False,
    revision: str | None = None,
    token: str | None = None,
) -> tuple[Transformer, CheckpointHandle]:
    """The model of a checkpoint, and the checkpoint.  Raises as :func:`open_checkpoint` and :func:`model_of` do."""
    parse_dtype(dtype, torch.device(device))  # before anything is downloaded
    opened = open_checkpoint(where, verify=verify, revision=revision, token=token)
    return load_weights(opened, dtype, device), opened


def load_weights(
    opened: CheckpointHandle,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Transformer:
    """Its model, on ``device``, in ``dtype``, for inference: eval mode, no gradients.

    ``dtype`` None: as it is stored, but float16 is widened to float32 on the CPU, which cannot compute in it.  On the
    CPU and without a change of dtype weights stay mapped from the file.  Raises UsageError for a dtype that cannot be,
    and CheckpointError for a tensor that is missing, extra, or of another shape.
    """
    target = parse_dtype(dtype, torch.device(device))
    on_cpu = torch.device(device).type == "cpu"
    config = opened.config  # which may look at tensors, that are not to be on meta
    with torch.device("meta"):
        model = Transformer(config)
    wide = torch.float32 if on_cpu and opened.stored_dtype == torch.float16 else None
    loaded: dict[str, Tensor] = {}
    for name, tensor in opened.weights_as(target or wide):
        widened = torch.float32 if on_cpu and tensor.dtype == torch.float16 else None
        loaded[name] = tensor.to(device=device, dtype=widened)
    model.load_state_dict(loaded, assign=True)
    return model.eval().requires_grad_(False)


def parse_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | None:
    """By name or as torch's own; UsageError for one that is unknown, or that a device cannot compute in."""
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", suggest(dtype, DTYPES))
    chosen = DTYPES[dtype] if isinstance(dtype, str) else dtype
    if chosen == torch.float16 and device.type == "cpu":
        raise UsageError(
            "float16 is for storage only on a CPU: its matrix products stall there for minutes",
            "compute in bfloat16 or float32",
        )
    return chosen
