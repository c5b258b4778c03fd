"""Conversion between kvad's layout and Hugging Face folders that ``transformers`` loads.

A model that was imported from a family is exported to that family; for any other model all families are tried
(``hf_layout.py``).  A model trained by kvad is already in Hugging Face's layout if a family can express it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvad import config, ops, storage, text
from kvad import model as model_lib
from kvad.checkpoint.adapter import AdaptedCheckpoint
from kvad.checkpoint.conversion import write_tensors
from kvad.checkpoint.folder import CONFIG, WeightQuantization, write_json
from kvad.checkpoint.generation_config import GENERATION_FILE, write_embedding
from kvad.checkpoint.handle import CheckpointHandle, quantizable, read_tokenizer_files
from kvad.checkpoint.hf_layout import HFCheckpoint, choose_family, write_hf_config
from kvad.checkpoint.native import save_checkpoint
from kvad.checkpoint.safetensors_io import write_sharded
from kvad.errors import ConfigError
from kvad.text import HFTokenizer

Progress = Callable[[str, int], None]


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
        tensors = write_tensors(layout.family, handle.config, dict(handle.weights_as(dtype)))
        casts = ((name, tensor.to(dtype=dtype) if _is_cast(name, tensor) else tensor) for name, tensor in tensors)
        write_sharded(temp_folder, casts)
        write_embedding(temp_folder, handle.generation, handle.config.hidden_size)
        _copy_tokenizer(handle, temp_folder)
    return layout.hf_class


def _is_cast(name: str, tensor: Tensor) -> bool:
    """Return True if a tensor is stored in the chosen dtype."""
    return tensor.is_floating_point() and not config.parameter_shapes.is_float32(name)


def _copy_tokenizer(handle: CheckpointHandle, folder: Path) -> None:
    """Copy the tokenizer's files, and add the file that names its class if it is missing.

    kvad's own byte, character and word tokenizers have no equivalent in transformers and are left out.
    """
    files = read_tokenizer_files(handle.path)
    if text.base.FILE_NAME in files and text.hf_config.CONFIG_NAME not in files:
        if isinstance(handle.tokenizer, HFTokenizer):
            handle.tokenizer.save(folder)
        del files[text.base.FILE_NAME]
    for name, content in files.items():
        (folder / name).write_bytes(content)


def import_hf(
    handle: CheckpointHandle,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    files: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint in kvad's layout with ``files`` (default: the tokenizer's, unchanged)."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in handle.weights_as(dtype):
        tensors[name] = tensor
        if progress is not None:
            progress(name, tensor.nbytes)
    files = read_tokenizer_files(handle.tokenizer_folder) if files is None else files
    save_checkpoint(out, handle.config, tensors, None, generation=handle.generation, files=files, origin=handle.origin)


def write_merged(adapted: AdaptedCheckpoint, out: Path, dtype: torch.dtype | None = None) -> None:
    """Write the merged model in its base's layout, with the base's other files and the adapter's chat files.

    ``dtype`` is the dtype of the stored weights (default: the base's).
    """
    base = adapted.base
    files = read_tokenizer_files(base.path)
    chat_files = read_tokenizer_files(adapted.path)
    files |= {name: content for name, content in chat_files.items() if name == "chat_template.jinja"}
    if not isinstance(base, HFCheckpoint):
        import_hf(adapted, out, dtype=dtype, files=files)
        return
    for folder in (base.path, adapted.path):
        if (folder / GENERATION_FILE).is_file():
            files[GENERATION_FILE] = (folder / GENERATION_FILE).read_bytes()
    tensors = dict(adapted.weights_as(dtype))
    with storage.atomic.new_folder(out) as temp_folder:
        dtype_name = str(dtype or base.stored_dtype).removeprefix("torch.")
        write_json(temp_folder / CONFIG, {**base.fields.content, "dtype": dtype_name, "torch_dtype": dtype_name})
        write_sharded(temp_folder, write_tensors(base.family, base.config, tensors))
        for name, content in files.items():
            (temp_folder / name).write_bytes(content)
        write_embedding(temp_folder, base.generation, base.config.hidden_size)


class QuantizationResult(NamedTuple):
    """Sizes before and after, in bytes, and which matrices were quantized."""

    bytes_before: int
    bytes_after: int
    quantized: int  # matrices; each expert has three
    left: tuple[str, ...]  # matrices of the layers whose width the groups do not divide
    max_error: float  # largest error of a weight, as a share of the largest weight of its matrix
    head_bits: int  # 0: the head was left
    head_copy: int  # bytes of a tied head's copy of the token table


def quantize_checkpoint(
    handle: CheckpointHandle, out: Path, form: WeightQuantization, progress: Progress | None = None
) -> QuantizationResult:
    """Write a checkpoint in kvad's layout with quantized matrices (``native.py``), completely or not at all.

    A tied head gets a quantized copy of the token table. The head is left if its groups do not divide its width, or if
    it has no logits over the vocabulary.

    Raises:
        ConfigError: If the checkpoint is quantized, or has no matrix that can be.
    """
    if handle.quantization is not None:
        raise ConfigError(f"{handle.path} is quantized already ({handle.quantization})", "Quantize the original.")
    with torch.device("meta"):
        model = model_lib.Transformer(handle.config)
    known, shapes = dict(quantizable(model)), config.parameter_shapes.weight_shapes(handle.config)
    left = tuple(name for name, inputs in known.items() if not _fits(inputs, form.bits, form.group_size))
    if len(left) == len(known):
        raise ConfigError(f"group_size: {form.group_size} divides the inputs of no matrix", "Use a smaller one, as 32.")
    formats = {
        config.parameter_shapes.quantized_parameter(shapes, name): (name, form.bits, form.group_size)
        for name in known
        if name not in left
    }
    is_language, is_tied = isinstance(model.head, model_lib.heads.LanguageHead), handle.config.tie_embeddings
    has_fit = is_language and _fits(config.head_input_size(handle.config), form.head_bits, form.head_group_size)
    if has_fit:
        source = "embedding.tokens.weight" if is_tied else "head.weight"
        formats[source] = (config.parameter_shapes.QUANTIZED_HEAD, form.head_bits, form.head_group_size)
    else:
        form = form._replace(head_bits=0, head_group_size=0)
    tensors, before, quantized, worst, head_copy = dict[str, Tensor](), 0, 0, 0.0, 0
    for name, tensor in handle.weights():
        before += tensor.nbytes
        is_copied = is_tied and name == "embedding.tokens.weight"
        if name in formats:
            module, bits, group_size = formats[name]
            matrix, error = _quantize(tensor, bits, group_size or tensor.shape[-1])
            quantized += tensor.shape[:-2].numel()
            worst = max(worst, error)
            parts = matrix.tensors().items()
            tensors |= {f"{module}.{part}": value.view(*tensor.shape[:-1], -1) for part, value in parts}
            head_copy += matrix.num_bytes if is_copied else 0
        if name not in formats or is_copied:
            tensors[name] = tensor
        if progress is not None:
            progress(name, tensor.nbytes)
    save_checkpoint(
        out,
        handle.config,
        tensors,
        None,
        generation=handle.generation,
        files=read_tokenizer_files(handle.tokenizer_folder),
        origin=handle.origin,
        quantization=form._asdict(),
    )
    after = sum(tensor.nbytes for tensor in tensors.values())
    return QuantizationResult(before, after, quantized, left, worst, form.head_bits, head_copy)


def _quantize(tensor: Tensor, bits: int, group_size: int) -> tuple[ops.quantized_linear.QuantizedMatrix, float]:
    """Quantize a matrix [out, in], or experts [experts, out, in] one at a time.

    Returns:
        The matrix, with the rows of one expert after another; the largest error of a weight as a share of the largest
        one of its matrix.
    """
    experts = (tensor,) if tensor.dim() == 2 else tensor.unbind()
    each = [ops.quantized_linear.quantize_matrix(expert, bits, group_size) for expert in experts]
    parts = {part: torch.cat([matrix.tensors()[part] for matrix in each]) for part in each[0].tensors()}
    matrix = ops.quantized_linear.QuantizedMatrix(
        parts["data"], parts["scale"], parts.get("minimum"), bits, group_size
    ).with_half_scales()
    worst, rows = 0.0, tensor.shape[-2]
    for index, expert in enumerate(experts):
        numbers = matrix.dequantize(torch.float32, slice(index * rows, (index + 1) * rows))
        error = numbers.sub_(expert).abs().max()
        worst = max(worst, float(error / expert.abs().max().clamp_min(1e-30)))
    return matrix, worst


def _fits(width: int, bits: int, group_size: int) -> bool:
    try:
        ops.quantized_linear.check_groups(width, bits, group_size or width)
    except ConfigError:
        return False
    return group_size <= width
