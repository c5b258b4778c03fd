"""A GGUF file, opened as the Hugging Face checkpoint that it was made from."""

from __future__ import annotations

import atexit
import math
import mmap
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvad import config as config_lib
from kvad import model as model_lib
from kvad import ops, storage
from kvad.checkpoint.conversion import HFConfigReader, TensorRule, read_tensors
from kvad.checkpoint.gguf import tokenizer
from kvad.checkpoint.gguf.architectures import find_architecture
from kvad.checkpoint.gguf.metadata import DIVISORS, Architecture, FileContents, Packing, config_json
from kvad.checkpoint.handle import converted, quantizable
from kvad.checkpoint.hf_layout import HFCheckpoint
from kvad.checkpoint.safetensors_io import LazyTensors
from kvad.errors import CheckpointError
from kvad.text import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import gguf

_LAYER = re.compile(r"\w+\.(layers|h)\.(?P<layer>\d+)\.(?P<part>.+)")
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?P<expert>\d+)\.")
_PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFCheckpoint(HFCheckpoint):
    """A GGUF file; matrices of attention, MLPs and experts are computed with as they are, if their format allows it.

    Other quantized tensors are dequantized one at a time, and stored as bfloat16 by default.
    """

    @cached_property
    def _reader(self) -> gguf.GGUFReader:
        import gguf

        with storage.filesystem.open_regular(self.path) as file:  # refuses a FIFO or a device
            start = file.read(4)
        hint = "The file is damaged or incomplete. Download or copy it again."
        if start != b"GGUF":
            raise CheckpointError(f"{self.path} cannot be read as GGUF: it starts with {start!r}", hint)
        try:
            with np.errstate(over="raise"):  # an offset of a tensor beyond 64 bits
                return gguf.GGUFReader(self.path)
        except Exception as error:  # the package raises ValueError, IndexError, KeyError and others
            raise CheckpointError(
                f"{self.path} cannot be read as GGUF: its header or tensors are invalid", hint
            ) from error

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The file's keys and values; a float is the shortest decimal that rounds to it."""
        try:
            values = {name: field.contents() for name, field in self._reader.fields.items()}
        except (IndexError, KeyError, UnicodeDecodeError, ValueError) as error:
            raise CheckpointError(f"{self.path}: the metadata cannot be read: {error}", "Download it again.") from error
        if int(values.get("split.count", 1)) > 1:
            raise CheckpointError(f"{self.path} is one of {values['split.count']} parts", "Merge them with gguf-split.")
        return {name: _shortest(v) if isinstance(v, float) else v for name, v in values.items()}

    @cached_property
    def architecture(self) -> Architecture:
        return find_architecture(self.metadata, str(self.path))

    @cached_property
    def _fields_and_scheme(self) -> tuple[HFConfigReader, None]:
        """The equivalent ``config.json``."""
        raw = RawTensors(self.path, self._reader)
        contents = FileContents(self.metadata, frozenset(raw), lambda name: [_shortest(v) for v in raw[name].tolist()])
        content = config_json(self.architecture, contents, str(self.path))
        if "token_embd.weight" not in raw:
            raise CheckpointError(f"{self.path}: tensor token_embd.weight is missing")
        content["vocab_size"] = raw.shape("token_embd.weight")[0]
        return HFConfigReader({**content, **tokenizer.token_ids(self.metadata)}, str(self.path)), None

    @property
    def quantization(self) -> str | None:
        """The types of the quantized tensors, the one with the most bytes first."""
        sizes: dict[str, int] = {}
        for tensor in self._reader.tensors:
            if (kind := tensor.tensor_type.name) not in _PLAIN:
                sizes[kind] = sizes.get(kind, 0) + int(tensor.n_bytes)
        return f"GGUF, {', '.join(sorted(sizes, key=sizes.__getitem__, reverse=True))}" if sizes else None

    @cached_property
    def tensors(self) -> GGUFTensors:  # type: ignore[override]
        """Tensors by Hugging Face's names."""
        return GGUFTensors(self)

    @cached_property
    def tokenizer_folder(self) -> Path:
        """A temporary folder with the tokenizer's files, deleted at exit."""
        has_tokenizer = tokenizer.has_tokenizer(self.metadata)
        files = tokenizer.tokenizer_files(self.metadata, str(self.path)) if has_tokenizer else {}
        folder = Path(tempfile.mkdtemp(prefix="kvad-gguf-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name, text in files.items():
            (folder / name).write_text(text, "utf-8")
        return folder

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in the metadata, or None."""
        return load_tokenizer(self.tokenizer_folder) if tokenizer.has_tokenizer(self.metadata) else None

    def weights_as(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors in ``dtype`` (None: ``stored_dtype``)."""
        yield from super().weights_as(dtype or self.stored_dtype)

    @cached_property
    def content(self) -> mmap.mmap:
        """The mapped file; writes stay in this process."""
        with storage.filesystem.open_regular(self.path) as file:
            return storage.filesystem.map_privately(file.fileno())

    def weight_files(self) -> list[ops.native.WeightFile]:
        """Return the file, which has no checksum."""
        return [ops.native.WeightFile.create(self.path, np.frombuffer(self.content, np.uint8), None)]

    @cached_property
    def quantized_matrices(self) -> Mapping[str, ops.block_matrix.BlockMatrix]:
        """The matrices of attention, MLPs and experts in a block format (``ops/block_matrix.py``), by their layers.

        Raises:
            CheckpointError: If a scale is NaN or infinite.
        """
        with torch.device("meta"):
            model = model_lib.Transformer(self.config)
        shapes = config_lib.parameter_shapes.weight_shapes(self.config)
        names = {config_lib.parameter_shapes.quantized_parameter(shapes, name): name for name, _ in quantizable(model)}
        return {
            names[parameter]: matrix
            for rule in self.family.tensor_rules(self.transformer_config)
            if any(name in names for name in rule.kvad_names)
            for parameter, matrix in self.tensors.block_matrices(rule).items()
            if parameter in names
        }

    def unquantized_weights_as(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors but those of ``quantized_matrices``; no other is dequantized."""
        quantized = self.quantized_bytes()[0]
        where = str(self.path)
        weights = read_tensors(self.family, self.transformer_config, self.tensors, where, unread=quantized.keys())
        yield from converted(weights, dtype or self.stored_dtype)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the largest tensor, bfloat16 if it is quantized."""
        return self.tensors.dtype(max(self.tensors, key=self.tensors.bytes))


def _shortest(value: float) -> float:
    """Return the shortest decimal that rounds to the same float32."""
    return float(str(np.float32(value)))


class RawTensors(LazyTensors):
    """Tensors of a GGUF file by its own names, dequantized."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self.path = path
        self._entries = {tensor.name: tensor for tensor in reader.tensors}

    def __getitem__(self, name: str) -> Tensor:
        return self.part(name)

    def part(self, name: str, expert: int | None = None) -> Tensor:
        """Return a tensor, or one expert's part of it; no other part is dequantized."""
        from gguf import quants

        tensor = self._entries[name]
        plain = _PLAIN.get(tensor.tensor_type.name)
        try:
            data = tensor.data if expert is None else tensor.data[expert]
            shape = self.shape(name) if expert is None else self.shape(name)[1:]
            if plain is not None:
                return torch.from_numpy(np.array(data)).view(plain).view(shape)
            with np.errstate(all="ignore"):
                values = torch.from_numpy(quants.dequantize(data, tensor.tensor_type)).view(shape)
        except (NotImplementedError, RuntimeError, ValueError, IndexError) as error:
            message = f"{self.path}: tensor {name} ({tensor.tensor_type.name}) cannot be dequantized: {error}"
            raise CheckpointError(message) from error
        if not torch.isfinite(values).all():
            raise self._nonfinite(name)
        return values

    def _nonfinite(self, name: str) -> CheckpointError:
        message = f"{self.path}: tensor {name} ({self.kind(name)}) has a block of NaN or infinite values"
        return CheckpointError(message, "The file is damaged. Download or copy it again.")

    def kind(self, name: str) -> str:
        """Return the type of a tensor."""
        return str(self._entries[name].tensor_type.name)

    def blocks(self, name: str, content: mmap.mmap) -> Tensor | None:
        """Return the blocks [rows, blocks of a row, bytes] of a tensor, mapped; None if its format is another one."""
        tensor, known = self._entries[name], ops.block_matrix.BLOCK_FORMATS.get(self.kind(name))
        *rows, width = self.shape(name)
        if known is None or width % known.size:
            return None
        start, size = int(tensor.data_offset), int(tensor.n_bytes)
        if start + size > len(content):
            raise CheckpointError(f"{self.path} is truncated in tensor {name}", "Download or copy it again.")
        raw = torch.frombuffer(content, dtype=torch.uint8, count=size, offset=start)
        blocks: Tensor = raw.view(math.prod(rows), width // known.size, known.num_bytes)
        if not ops.block_matrix.BlockMatrix(blocks, None, self.kind(name)).is_finite:
            raise self._nonfinite(name)
        return blocks

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._entries[name].shape))

    def dtype(self, name: str) -> torch.dtype:
        return _PLAIN.get(self._entries[name].tensor_type.name, torch.bfloat16)

    def bytes(self, name: str) -> int:
        return int(self._entries[name].n_bytes)


class GGUFTensors(LazyTensors):
    """Tensors of a GGUF file by Hugging Face's names, in its layout; one without such a name has its own."""

    def __init__(self, checkpoint: GGUFCheckpoint) -> None:
        self._raw, self._checkpoint = RawTensors(checkpoint.path, checkpoint._reader), checkpoint
        self._architecture, self._content = checkpoint.architecture, checkpoint.fields.content
        family, config = checkpoint.family, checkpoint.family.read(checkpoint.fields)
        num_layers = config.decoder.num_layers if config.decoder else 0
        locate = tensor_locator(checkpoint.architecture, num_layers, self._content, self._raw)
        hf_names = [name for rule in family.tensor_rules(config) for name in rule.hf_names]
        locations = {name: locate(name) for name in (*hf_names, *(family.head or ()))}
        self._entries: dict[str, TensorLocation] = {
            name: location
            for name, location in locations.items()
            if location is not None and all(part in self._raw for part in location.names)
        }
        experts = Counter(each.names[0] for each in self._entries.values() if each.expert is not None)
        for part, count in experts.items():
            if self._raw.shape(part)[0] != count:
                message = f"tensor {part} has {self._raw.shape(part)[0]} experts, the config {count}"
                raise CheckpointError(f"{checkpoint.path}: {message}")
        used = {part for location in self._entries.values() for part in location.names}
        has_more = bool(self._content.get("num_nextn_predict_layers"))  # layers that predict further tokens
        others = (name for name in self._raw if name not in used and name not in DIVISORS)
        self._entries |= {
            name: TensorLocation((name,))
            for name in others
            if not (has_more and (block := _BLOCK.match(name)) and int(block["layer"]) >= num_layers)
        }

    def __getitem__(self, name: str) -> Tensor:
        location = self._entries[name]
        return self._convert(location, [self._raw.part(part, location.expert) for part in location.names])

    def _convert(self, location: TensorLocation, parts: list[Tensor]) -> Tensor:
        if location.packing is not None:
            return location.packing.read(parts)
        return self._architecture.convert(location.names[0], parts[0], self._content)

    def block_matrices(self, rule: TensorRule) -> dict[str, ops.block_matrix.BlockMatrix]:
        """Return the matrices of a rule, by kvad's names, whose rows are those of one tensor in a block format.

        Tensors of two columns, the number of a tensor and that of a row, are converted as the weights are. Example: q
        of a head with 4 rows that are stored for rotary pairs has the rows 0, 2, 1, 3.
        """
        locations = [self._entries[name] for name in rule.hf_names if name in self._entries]
        names = list(dict.fromkeys(name for location in locations for name in location.names))
        blocks = [self._raw.blocks(name, self._checkpoint.content) for name in names]
        if len(locations) < len(rule.hf_names) or all(part is None for part in blocks):
            return {}
        numbers = {}
        for index, name in enumerate(names):
            rows = self._raw.shape(name)[:-1]
            numbers[name] = torch.stack([torch.full(rows, index), torch.arange(math.prod(rows)).view(rows)], -1)
        try:
            parts = [
                self._convert(each, [numbers[name][... if each.expert is None else each.expert] for name in each.names])
                for each in locations
            ]
            converted = rule.transform.read(parts, [(*shape[:-1], 2) for shape in rule.shapes])
        except (IndexError, RuntimeError):  # the rows are others, as those of transposed matrices
            return {}
        matrices = {}
        for parameter, shape, pairs in zip(rule.kvad_names, rule.shapes, converted, strict=True):
            index = int(pairs.flatten()[0])
            if (
                pairs.shape != (*shape[:-1], 2)
                or index not in range(len(names))
                or bool((pairs[..., 0] != index).any())
            ):
                continue
            stored, order = blocks[index], pairs[..., 1].flatten()
            if stored is not None and self._raw.shape(names[index])[-1] == shape[-1]:
                matrix = ops.block_matrix.BlockMatrix(stored, None, self._raw.kind(names[index]))
                matrices[parameter] = matrix.select(order)
        return matrices

    def shape(self, name: str) -> tuple[int, ...]:
        location = self._entries[name]
        shapes = [self._raw.shape(part)[0 if location.expert is None else 1 :] for part in location.names]
        return tuple(self._convert(location, [torch.empty(shape, device="meta") for shape in shapes]).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._raw.dtype(self._entries[name].names[0])

    def bytes(self, name: str) -> int:
        location = self._entries[name]
        num_experts = 1 if location.expert is None else self._raw.shape(location.names[0])[0]
        return sum(map(self._raw.bytes, location.names)) // num_experts


class TensorLocation(NamedTuple):
    """Tensors of a GGUF file that one tensor of Hugging Face is made of."""

    names: tuple[str, ...]
    expert: int | None = None  # the tensor is this part of the stacked one
    packing: Packing | None = None


def tensor_locator(
    architecture: Architecture, num_layers: int, content: Mapping[str, Any], stored: Container[str] | None = None
) -> Callable[[str], TensorLocation | None]:
    """Return a function from a tensor's name in Hugging Face's files to its place in a GGUF file, or None.

    Args:
        architecture: That of the file.
        num_layers: Number of layers.
        content: The ``config.json``.
        stored: Names of a file that may have a packed tensor in one piece (default: it has none).
    """
    import gguf

    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names, packings = gguf.get_tensor_name_map(arch, num_layers), architecture.packings(content)

    def locate(name: str) -> TensorLocation | None:
        layer = _LAYER.match(name)
        packing = packings.get(layer["part"]) if layer is not None else None
        if layer is not None and packing is not None:
            parts = tuple(f"blk.{layer['layer']}.{part}" for part in packing.names)
            if stored is None or parts[0] in stored:
                return TensorLocation(parts, packing=packing)
        expert = _EXPERT.search(name)
        if expert is not None:
            name = name[: expert.start()] + ".experts." + name[expert.end() :]
        name = name.replace("correction_bias", "correction.bias")
        variants = name, name.removeprefix("transformer.")
        found = next(filter(None, (names.get_name(each, try_suffixes=(".weight", ".bias")) for each in variants)), None)
        return None if found is None else TensorLocation((found,), int(expert["expert"]) if expert else None)

    return locate
