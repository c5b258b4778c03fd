"""Opening of checkpoints: kvad's folders and runs, Hugging Face folders, names on the hub.

model, handle = load_model("runs/demo")
model, handle = load_model("HuggingFaceTB/SmolLM2-135M", dtype="bfloat16")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad import ops, storage
from kvad.checkpoint import families
from kvad.checkpoint.adapter import find_adapter, open_adapted
from kvad.checkpoint.gguf import GGUFCheckpoint
from kvad.checkpoint.handle import CheckpointHandle
from kvad.checkpoint.hub import resolve_model_path
from kvad.checkpoint.native import DTYPES, open_folder
from kvad.checkpoint.quantized import DequantizedTensors
from kvad.checkpoint.safetensors_io import ShardedTensors
from kvad.errors import ConfigError, UsageError, suggest
from kvad.model import Transformer


def open_checkpoint(
    where: str | Path,
    *,
    verify: bool = False,
    revision: str | None = None,
    token: str | None = None,
    rope_scaling: str | None = None,
) -> CheckpointHandle:
    """Open a folder, a run, a GGUF file, or a name on the hub; no tensor is read.

    An adapter's folder is opened as its base model with the adapter merged in.  ``verify`` is that of
    ``open_folder``; ``revision`` and ``token`` are the hub's, ``rope_scaling`` is that of ``scale_rope``.
    """
    folder = resolve_model_path(where, revision=revision, token=token, adapters=True)
    if folder.is_file():
        handle: CheckpointHandle = GGUFCheckpoint(folder)
    else:
        handle = open_folder(folder, verify=verify) if find_adapter(folder) is None else open_adapted(folder)
    if rope_scaling is not None:
        scale_rope(handle, rope_scaling)
    return handle


def scale_rope(handle: CheckpointHandle, scaling: str | Mapping[str, Any]) -> None:
    """Replace the RoPE scaling of a checkpoint and extend its limit, before its weights are loaded.

    Args:
        handle: The checkpoint; one that was scaled before is scaled from its stored config.
        scaling: transformers' ``rope_scaling``, as an object, as JSON, or as ``yarn,factor=4,original=4096``.

    Raises:
        ConfigError: If the text is not a scaling, or the model has no RoPE.
        CheckpointError: If a value of the scaling is missing or invalid.
    """
    values = parse_rope_scaling(scaling) if isinstance(scaling, str) else dict(scaling)
    scaled = families.scale_rope(handle.stored_config, values)
    if values.get("rope_type") == "yarn" and not {"factor", "original_max_position_embeddings"} & set(values):
        raise ConfigError("rope_scaling: yarn must have a factor, got none", "Write it like yarn,factor=4.")
    handle.override_config(scaled)


def parse_rope_scaling(text: str) -> dict[str, Any]:
    """Parse JSON, or a kind and its numbers: ``yarn,factor=4,original=4096``."""
    try:
        if text.lstrip().startswith("{"):
            content: dict[str, Any] = storage.strict_json.loads(text)
            return content
        kind, *numbers = text.split(",")
        pairs = [number.split("=") for number in numbers]
        values = {name.strip(): storage.strict_json.loads(value) for name, value in pairs}
    except ValueError:
        hint = "Write it like yarn,factor=4,original=4096 or as JSON."
        raise ConfigError(f"rope_scaling: {text!r} is not a scaling", hint) from None
    names = {"original": "original_max_position_embeddings"}
    return {"rope_type": kind.strip(), **{names.get(name, name): value for name, value in values.items()}}


def load_model(
    where: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    *,
    verify: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> tuple[Transformer, CheckpointHandle]:
    """Load the model of a checkpoint; see ``open_checkpoint``, ``load_weights``."""
    parse_dtype(dtype, torch.device(device))  # reports a wrong dtype before anything is downloaded
    handle = open_checkpoint(where, verify=verify, revision=revision, token=token)
    return load_weights(handle, dtype, device), handle


def load_weights(
    handle: CheckpointHandle,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    activation_bits: int | None = None,
) -> Transformer:
    """Load the model of an opened checkpoint for inference: eval mode, no gradients.

    On the CPU and in the stored dtype, weights remain memory-mapped.  With ``dtype`` None they have the stored dtype,
    but float16 becomes float32 on the CPU, which cannot compute in float16. Experts that are stored one by one stay so
    (``Transformer.separate_experts``). ``activation_bits`` is that of ``Transformer.round_activations``.
    """
    target_dtype = parse_dtype(dtype, torch.device(device))
    on_cpu = torch.device(device).type == "cpu"
    model = _model_without_weights(handle)
    if activation_bits is not None:
        model.round_activations(activation_bits)
    tensors = dict(_loaded_tensors(handle, target_dtype, device))
    model.separate_experts(tensors)
    model.load_state_dict(tensors, assign=True)
    if on_cpu:
        model.packed_weights = ops.native.PackedWeights(ops.native.PackedStore.create(handle.weight_files()))
    return model.eval().requires_grad_(False)


class ModelOutline(NamedTuple):
    """A model as ``load_weights`` loads it to the CPU, on the meta device."""

    model: Transformer
    copied: frozenset[str]  # names of tensors that would not be mapped from a file


def outline_model(handle: CheckpointHandle, dtype: str | torch.dtype | None = None) -> ModelOutline:
    """Return the outline of ``load_weights``; tensors that it converts are in memory one at a time."""
    model = _model_without_weights(handle)
    if isinstance(handle.tensors, ShardedTensors | DequantizedTensors):
        handle.tensors.map_files()
    else:
        handle.weight_files()
    mappings, state_dict, copied = ops.native.FileMappings(), dict[str, Tensor](), set[str]()
    for name, tensor in _loaded_tensors(handle, parse_dtype(dtype, torch.device("cpu")), "cpu"):
        if not mappings.contain(tensor):
            copied.add(name)
        state_dict[name] = tensor.to("meta")
    model.separate_experts(state_dict)
    model.load_state_dict(state_dict, assign=True)
    return ModelOutline(model.eval().requires_grad_(False), frozenset(copied))


def _model_without_weights(handle: CheckpointHandle) -> Transformer:
    config = handle.config  # may read tensors, so it is evaluated outside the meta device
    with torch.device("meta"):
        model = Transformer(config)
    model.use_quantized(handle.quantized_matrices)
    return model


def _loaded_tensors(
    handle: CheckpointHandle, dtype: torch.dtype | None, device: str | torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model on a device; ``dtype`` None: the stored one, on a CPU not float16."""
    on_cpu = torch.device(device).type == "cpu"
    cpu_dtype = torch.float32 if on_cpu and handle.stored_dtype == torch.float16 else None
    for layer, matrix in handle.quantized_matrices.items():
        yield from ((f"{layer}.{part}", tensor.to(device)) for part, tensor in matrix.tensors().items())
    for name, tensor in handle.unquantized_weights_as(dtype or cpu_dtype):
        tensor_dtype = torch.float32 if on_cpu and tensor.dtype == torch.float16 else None
        yield name, tensor.to(device=device, dtype=tensor_dtype)


def parse_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | None:
    """Return a torch dtype; raise UsageError if it is unknown or the device cannot compute in it."""
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", suggest(dtype, DTYPES))
    parsed = DTYPES[dtype] if isinstance(dtype, str) else dtype
    if parsed == torch.float16 and device.type == "cpu":
        message = "dtype: float16 is for storage only on a CPU, where its matrix products take minutes"
        raise UsageError(message, "Use bfloat16 or float32.")
    return parsed
