"""Export of a checkpoint to one GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvad import storage
from kvad.checkpoint.conversion import HFConfigReader, config_differences, write_tensors
from kvad.checkpoint.gguf import tokenizer
from kvad.checkpoint.gguf.architectures import ARCHITECTURES
from kvad.checkpoint.gguf.metadata import (
    Architecture,
    FileContents,
    config_json,
    inexpressible,
    metadata,
    rope_divisors,
)
from kvad.checkpoint.gguf.reader import tensor_locator
from kvad.checkpoint.handle import CheckpointHandle
from kvad.checkpoint.hf_layout import HFLayout, choose_family
from kvad.errors import CheckpointError

FILE_TYPES = {"float32": "ALL_F32", "bfloat16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


def export_gguf(handle: CheckpointHandle, out: Path, stored: str = "bfloat16") -> str:
    """Write a GGUF file, replacing ``out`` once the new one is complete.

    Matrices are stored in ``stored``, vectors in float32, as llama.cpp's converter does; a matrix whose rows are no
    multiple of 32 is stored in float16 instead of Q8_0.

    Returns:
        The name of the architecture.

    Raises:
        CheckpointError: If no architecture can express the model, which names the difference, or if llama.cpp has no
            tokenizer like its own.
    """
    import gguf

    layout, architecture, values = _choose(handle)
    values |= tokenizer.metadata(handle.tokenizer, handle.tokenizer_folder, handle.generation, handle.config.vocab_size)
    with storage.atomic.new_file(out) as temp_path:
        writer = gguf.GGUFWriter(temp_path, architecture.name)
        writer.add_name(out.stem)
        writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[stored]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, value in values.items():
            _add(writer, name, value)
        for name, tensor in _tensors(handle, layout, architecture):
            _add_tensor(writer, name, tensor, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return architecture.name


def _choose(handle: CheckpointHandle) -> tuple[HFLayout, Architecture, dict[str, Any]]:
    """Return the layout that has an architecture, and its metadata: the checkpoint's own family, or the first."""
    reasons = []
    for model_type in dict.fromkeys([handle.origin, *ARCHITECTURES]):
        if model_type in ARCHITECTURES:
            try:
                layout, architecture = choose_family(handle.config, model_type), ARCHITECTURES[model_type]
                values = metadata(architecture, layout.content, handle.config.vocab_size)
                _check_read_back(handle, layout, architecture, values)
                return layout, architecture, values
            except CheckpointError as error:
                reasons.append(error.message)
    raise CheckpointError("no architecture of GGUF can hold this model", f"The first one tried: {reasons[0]}.")


def _tensors(handle: CheckpointHandle, layout: HFLayout, architecture: Architecture) -> Any:
    """Yield the tensors in the layout of GGUF, by its names."""
    config = handle.config
    assert config.decoder is not None, config.kind
    locate = tensor_locator(architecture, config.decoder.num_layers, layout.content)
    experts = dict[str, list[Tensor]]()
    yield from rope_divisors(architecture, layout.content).items()
    for hf_name, tensor in write_tensors(layout.family, config, dict(handle.weights())):
        location = locate(hf_name)
        if location is None:
            raise CheckpointError(f"GGUF's {architecture.name} has no tensor like {hf_name}")
        name = location.names[0]
        if location.packing is not None:
            yield from zip(location.names, location.packing.write(tensor), strict=True)
        elif location.expert is None:
            yield name, architecture.convert(name, tensor, layout.content, write=True)
        else:
            assert location.expert == len(experts.setdefault(name, [])), hf_name
            experts[name].append(tensor)
            if len(experts[name]) == layout.content[architecture.keys["expert_count"]]:
                yield name, torch.stack(experts.pop(name))
    assert not experts, list(experts)


def _check_read_back(
    handle: CheckpointHandle, layout: HFLayout, architecture: Architecture, values: dict[str, Any]
) -> None:
    """Raise CheckpointError for the first part of the config that a reader of the file would see otherwise."""
    names, divisors = set(), rope_divisors(architecture, layout.content)
    tied = handle.config.tie_embeddings
    for rule in layout.family.tensor_rules(handle.config):
        names |= set(rule.hf_names)
    decoder = handle.config.decoder
    locate = tensor_locator(architecture, decoder.num_layers if decoder else 0, layout.content)
    written = {name for location in map(locate, names) if location is not None for name in location.names}
    written |= {*divisors} if tied else {*divisors, "output.weight"}
    contents = FileContents(values, frozenset(written), lambda name: divisors[name].tolist())
    content = config_json(architecture, contents, "GGUF")
    content["vocab_size"] = handle.config.vocab_size
    if divisors:
        content["rope_scaling"] = layout.content["rope_scaling"]
    read_back = layout.family.read(HFConfigReader(content, "GGUF"))
    for part, difference in config_differences(handle.config, read_back).items():
        if not part.startswith("dropout."):  # used in training only
            raise inexpressible(architecture.name, difference)


def _add(writer: Any, name: str, value: Any) -> None:
    """Add a value under a key, with the type that llama.cpp's converter uses."""
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _add_tensor(writer: Any, name: str, tensor: Tensor, stored: str) -> None:
    import gguf
    from gguf import quants

    values = tensor.detach().to(torch.float32).contiguous().numpy()
    if stored == "float32" or tensor.dim() < 2:
        writer.add_tensor(name, values)
        return
    kind = gguf.GGMLQuantizationType.BF16 if stored == "bfloat16" else gguf.GGMLQuantizationType.Q8_0
    if stored == "q8_0" and values.shape[-1] % 32:
        kind = gguf.GGMLQuantizationType.F16
    writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
