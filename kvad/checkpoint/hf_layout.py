"""Hugging Face's layout: the family that can hold a model, its JSON files, and its folders.

A family can hold a model if it writes a config that it reads back as the same model (``Family.write``).  No code in a
folder is executed: ``auto_map`` is ignored, and of a pickle only tensors are read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad import config as config_lib
from kvad import ops
from kvad.checkpoint import generation_config
from kvad.checkpoint.conversion import Family, HFConfigReader, read_tensors, resolve_config
from kvad.checkpoint.families import FAMILIES, find_family
from kvad.checkpoint.folder import CONFIG, check_quantization, check_readable_weights, check_text, read_json, write_json
from kvad.checkpoint.generation_config import GENERATION_FILE, DenseModule, GenerationConfig
from kvad.checkpoint.handle import CheckpointHandle, converted
from kvad.checkpoint.quantized import DequantizedTensors, QuantizationScheme, read_scheme
from kvad.checkpoint.safetensors_io import ShardedTensors, open_tensors
from kvad.config import ClassificationHeadConfig, ModelConfig
from kvad.errors import CheckpointError, TokenizerError, UsageError, suggest
from kvad.text import Tokenizer

# Tried in this order before all others: the simplest class that can hold a model.
PREFERRED_FAMILIES = {"decoder": ("llama", "gpt2"), "encoder": ("bert",), "encoder-decoder": ("marian", "bart", "t5")}

_CONV1D_FAMILIES = ("gpt2", "openai-gpt")  # their matrices are [in, out], those of a quantized file [out, in]

MAX_COMPARED_LAYERS = 200  # of an unknown config, whose tensors are compared with those of every family


class HFLayout(NamedTuple):
    """A family that can hold a model, and the config that it writes for it."""

    family: Family
    content: Mapping[str, Any]
    exact: bool = False  # the content came with the model and is written unchanged

    @property
    def hf_class(self) -> str:
        """Name of the transformers class that loads it."""
        return str(self.content["architectures"][0])


def choose_family(config: ModelConfig, requested: str | None = None) -> HFLayout:
    """Choose a family that can hold a model: the ``requested`` ``model_type``, else the first that can.

    A CheckpointError names the part that the family cannot express.
    """
    if requested is not None:
        if requested not in FAMILIES:
            raise UsageError(f"unknown family {requested!r}", suggest(requested, FAMILIES))
        return HFLayout(find_family(requested), find_family(requested).write(config))
    reasons = []
    for name in dict.fromkeys((*PREFERRED_FAMILIES[config.kind], *sorted(FAMILIES))):
        try:
            return HFLayout(find_family(name), find_family(name).write(config))
        except CheckpointError as error:
            reasons.append(error.message)
    raise CheckpointError("no class of transformers can hold this model", f"The first one tried: {reasons[0]}.")


def choose_layout(config: ModelConfig, generation: GenerationConfig, requested: str | None = None) -> HFLayout:
    """Choose a layout from which training can resume.

    A config read back from it has the same parameter names, by which the optimizer state is stored, and the same
    generation defaults.  A CheckpointError gives the reason why there is none.
    """
    layout = choose_family(config, requested)
    read_back = layout.family.read(HFConfigReader(layout.content, CONFIG))
    names, names_read_back = map(list, map(config_lib.parameter_shapes.weight_shapes, (config, read_back)))
    if names_read_back != names:
        raise CheckpointError(f"{layout.hf_class} would read it back with other parameter names")
    content = _content(layout, generation, torch.float32)
    if generation_config.read_generation_config(content, generation_config.generation_json(generation)) != generation:
        raise CheckpointError(f"{layout.hf_class} would read back other generation defaults")
    return layout


def write_hf_config(folder: Path, layout: HFLayout, generation: GenerationConfig, dtype: torch.dtype) -> None:
    """Write ``config.json``, and ``generation_config.json`` unless all fields are defaults."""
    write_json(folder / CONFIG, _content(layout, generation, dtype), indent=2)
    generation_content = None if layout.exact else generation_config.generation_json(generation)
    if generation_content is not None:
        write_json(folder / GENERATION_FILE, generation_content, indent=2)


def _content(layout: HFLayout, generation: GenerationConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Unknown token ids are null, because transformers' classes have default ids for absent fields.  A family's own
    padding id takes precedence, because it determines positions.
    """
    family_fields = {name: value for name, value in layout.content.items() if value is not None}
    fields = {} if layout.exact else {**generation_config.config_json_fields(generation), **family_fields}
    return {**layout.content, **fields, **dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch."))}


class HFConfig(NamedTuple):
    """The model in a ``config.json``."""

    config: ModelConfig
    dtype: str | None
    quantized_sizes: Mapping[str, int]  # bytes of the weights that are computed with as they are stored, by name


def read_hf_config(path: Path) -> HFConfig:
    """Read a ``config.json`` without looking at any weights."""
    check_quantization(path, str(path))
    fields, scheme = _split_quantization(HFConfigReader(read_json(path), str(path)))
    dtype, config, sizes = fields.get("dtype", fields.get("torch_dtype")), _family(fields).read_config(fields), {}
    if scheme is not None and scheme.method == "mxfp4":
        for name, shape in config_lib.parameter_shapes.weight_shapes(config).items():
            if len(shape) == 3:  # of experts
                blocks = torch.empty(shape[0] * shape[1], shape[2] // 32, 16, device="meta")
                sizes[name] = ops.block_matrix.BlockMatrix(blocks, None, "MXFP4 pairs").num_bytes
    return HFConfig(config, dtype if isinstance(dtype, str) else None, sizes)


def _split_quantization(fields: HFConfigReader) -> tuple[HFConfigReader, QuantizationScheme | None]:
    """Return a config without its quantization, and the quantization."""
    scheme = read_scheme(fields)
    if scheme is None:
        return fields, None
    if fields.model_type in _CONV1D_FAMILIES:
        message = f"a quantized {fields.model_type} is not supported: its matrices may be transposed"
        raise fields.error(message, "Use the model that it was made from.")
    content = {key: value for key, value in fields.content.items() if key != "quantization_config"}
    return fields.derive(content), scheme


def _family(fields: HFConfigReader, read_tensor_names: Callable[[], Collection[str]] = tuple) -> Family:
    """Return the family of a config; an error of an unknown one describes the nearest family."""
    try:
        return find_family(fields.model_type)
    except CheckpointError as error:
        remark = "; code of the repository is never run" if "auto_map" in fields else ""
        hints, names = [error.hint], tuple[str, ...]()
        if "is not known" in error.message:
            with suppress(CheckpointError):
                names = tuple(read_tensor_names())
            hints.append(describe_nearest_family(fields, names))
        raise CheckpointError(f"{fields.where}: {error.message}{remark}", " ".join(filter(None, hints))) from error


class _Difference(NamedTuple):
    """A family that can read an unknown config, and what differs."""

    name: str
    unused_keys: tuple[str, ...]  # of the config
    missing: list[str]  # tensors of the family that the files lack
    extra: list[str]  # the reverse

    @property
    def size(self) -> int:
        return len(self.unused_keys) + len(self.missing) + len(self.extra)


def describe_nearest_family(fields: HFConfigReader, tensors: Collection[str] = ()) -> str:
    """Describe the family that reads most of an unknown config, and what differs; empty if no family reads it.

    Among equal ones, the name decides if it is similar, else the simplest family.

    Args:
        fields: The config.
        tensors: Names of the tensors in the files, if they are available.
    """
    differences: list[_Difference] = []
    simplest = (name for names in PREFERRED_FAMILIES.values() for name in names)
    similar = difflib.get_close_matches(fields.model_type, FAMILIES, n=3, cutoff=0.6)
    for name in dict.fromkeys((*similar, *simplest, *sorted(FAMILIES))):
        reader = HFConfigReader({**fields.content, "model_type": name}, fields.where)
        with suppress(UsageError):
            family = find_family(name)
            config = family.read_config(reader)
            if reader.num_used_keys() > 2:
                missing, extra = _tensor_differences(family, config, tensors)
                differences.append(_Difference(name, reader.unused_keys(), missing, extra))
    if not differences:
        return ""
    nearest = min(differences, key=lambda each: each.size)
    parts = [
        f"{label} {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for label, names in (
            ("it does not read", nearest.unused_keys),
            ("it also has", nearest.missing),
            ("it lacks", nearest.extra),
        )
        if names
    ]
    return f"The nearest family is {nearest.name}: {'; '.join(parts) or 'it reads all keys, but the code may differ'}."


def _tensor_differences(family: Family, config: ModelConfig, tensors: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the tensors that a family has and the files lack, and the reverse; all layers count as one."""

    def names(values: Iterable[str]) -> set[str]:
        return {re.sub(r"\.\d+\.", ".N.", value.removeprefix(family.prefix)) for value in values}

    if not tensors or config.stack.num_layers > MAX_COMPARED_LAYERS:
        return [], []
    expected, stored = names(name for rule in family.tensor_rules(config) for name in rule.hf_names), names(tensors)
    return sorted(expected - stored), sorted(stored - expected)


class HFCheckpoint(CheckpointHandle):
    """A checkpoint in Hugging Face's layout, with tensors under kvad's names."""

    @cached_property
    def _fields_and_scheme(self) -> tuple[HFConfigReader, QuantizationScheme | None]:
        check_readable_weights(self.path)
        return _split_quantization(HFConfigReader(read_json(self.path / CONFIG), str(self.path / CONFIG)))

    @property
    def fields(self) -> HFConfigReader:
        """The ``config.json`` without its quantization."""
        return self._fields_and_scheme[0]

    @property
    def scheme(self) -> QuantizationScheme | None:
        """The quantization of the file, or None."""
        return self._fields_and_scheme[1]

    @property
    def quantization(self) -> str | None:
        return None if self.scheme is None else self.scheme.description

    @cached_property
    def family(self) -> Family:
        return _family(self.fields, lambda: tuple(self.tensors))

    @cached_property
    def config(self) -> ModelConfig:
        config, dense = self.transformer_config, self.dense
        if dense is None:
            return config
        if config.kind != "encoder" or dense.in_features != config.hidden_size:
            message = f"{dense.folder}: a Dense module must follow an encoder of width {dense.in_features}"
            raise CheckpointError(message, f"This is {config.kind} with width {config.hidden_size}.")
        transform = config_lib.HeadTransformConfig(dense.activation, dense.bias, output_size=dense.out_features)
        return replace(config, head=config_lib.PoolingHeadConfig(dense.pooling, transform=transform))

    @cached_property
    def dense(self) -> DenseModule | None:
        """The Dense module of a sentence-transformers folder; it is the head of ``config``."""
        return generation_config.read_dense(self.path)

    @cached_property
    def transformer_config(self) -> ModelConfig:
        """The config of the model in ``config.json``, without a Dense module."""
        config = self.family.read_config(self.fields)
        check_text(self.path, self.files)
        is_resolved = not config.tie_embeddings and self.family.resolve is None
        return config if is_resolved else resolve_config(self.family, config, self.tensors)

    @cached_property
    def generation(self) -> GenerationConfig:
        path = self.path / GENERATION_FILE
        generation = generation_config.read_generation_config(
            self.fields.content, read_json(path) if path.exists() else None
        )
        tokens = [(name, getattr(generation, name)) for name in ("forced_bos_token_id", "forced_eos_token_id")]
        for name, token in [*tokens, *(("bad_words_ids", token) for token in generation.suppress_tokens)]:
            if token is not None and not 0 <= token < self.config.vocab_size:
                raise CheckpointError(f"{path}: {name}: {token} is outside the vocabulary of {self.config.vocab_size}")
        takes_pairs = "sentence_transformers" in self.fields and isinstance(self.config.head, ClassificationHeadConfig)
        return replace(generation, takes_pairs=takes_pairs, **generation_config.read_embedding(self.path))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        tokenizer = super().tokenizer
        if tokenizer is not None and tokenizer.vocab_size > self.config.vocab_size:
            raise TokenizerError(
                f"{self.path}: the tokenizer has {tokenizer.vocab_size:,} ids, the model {self.config.vocab_size:,}",
                "Check that they belong together.",
            )
        return tokenizer

    @cached_property
    def tensors(self) -> ShardedTensors | DequantizedTensors:
        """Tensors by Hugging Face's names; quantized ones are dequantized when they are read."""
        stored = open_tensors(self.path)
        if self.scheme is None:
            return stored
        rules = self.family.tensor_rules(self.family.read_config(self.fields))
        expected = {name for rule in rules for name in rule.hf_names}
        return DequantizedTensors(stored, self.scheme, self._config_dtype, expected)

    @property
    def _config_dtype(self) -> torch.dtype:
        """The dtype in ``config.json`` of a quantized model, bfloat16 if it has none."""
        name = self.fields.get("dtype", self.fields.get("torch_dtype"))
        dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.float32)}
        return dtypes.get(name, torch.bfloat16) if isinstance(name, str) else torch.bfloat16

    @property
    def unused_keys(self) -> tuple[str, ...]:
        self.family.read_config(self.fields)
        return (*self.fields.unused_keys(), *(self.scheme.unused_keys if self.scheme is not None else ()))

    @property
    def origin(self) -> str:
        return self.fields.model_type

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the largest tensor, or of the config of a quantized model."""
        if self.scheme is not None:
            return self._config_dtype
        return self.tensors.dtype(max(self.tensors, key=self.tensors.bytes))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield kvad's tensors, mapped or computed one rule at a time."""
        return self._weights()

    def unquantized_weights_as(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors but those of ``quantized_matrices``; experts that are stored one by one stay so."""
        weights = self._weights(separate_experts=True, unread=self.quantized_matrices.keys())
        return converted(weights, self._loaded_dtype(dtype))

    @cached_property
    def quantized_matrices(self) -> Mapping[str, ops.block_matrix.BlockMatrix]:
        """The experts of a file in MXFP4, by their names; other quantized matrices are dequantized."""
        tensors = self.tensors
        if not isinstance(tensors, DequantizedTensors):
            return {}
        rules = self.family.tensor_rules(self.transformer_config)
        return {name: matrix for rule in rules for name, matrix in tensors.block_matrices(rule, self.family).items()}

    def _weights(self, *, separate_experts: bool = False, unread: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        self.check_weights()
        tensors = read_tensors(
            self.family, self.transformer_config, self.tensors, str(self.path),
            separate_experts=separate_experts, unread=unread,
        )  # fmt: skip
        if self.dense is None:
            yield from tensors
            return
        yield from ((name, tensor) for name, tensor in tensors if not name.startswith("head."))
        yield from self._dense_weights(self.dense)

    def _dense_weights(self, dense: DenseModule) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a Dense module by kvad's names."""
        stored = open_tensors(dense.folder)
        shapes: dict[str, tuple[int, ...]] = {"weight": (dense.out_features, dense.in_features)}
        shapes |= {"bias": (dense.out_features,)} if dense.bias else {}
        if {name: stored.shape(name) for name in stored} != {f"linear.{name}": shape for name, shape in shapes.items()}:
            raise CheckpointError(f"{dense.folder}: the tensors must be {shapes}, named linear.*")
        yield from ((f"head.transform.dense.{name}", stored[f"linear.{name}"]) for name in shapes)

    def weights_as(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors in ``dtype`` (None: as stored, or ``stored_dtype`` if they are quantized)."""
        return super().weights_as(self._loaded_dtype(dtype))

    def _loaded_dtype(self, dtype: torch.dtype | None) -> torch.dtype | None:
        return dtype if self.quantization is None else dtype or self.stored_dtype
