"""Tensors of a quantized folder: one matrix in place of its packed parts, dequantized when it is read."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvad import ops
from kvad.checkpoint.conversion import Family, TensorRule, find_stored_name
from kvad.checkpoint.quantized.layouts import LAYOUTS, Layout, LayoutError, is_quantized_dtype
from kvad.checkpoint.quantized.scheme import QuantizationScheme
from kvad.checkpoint.safetensors_io import LazyTensors, ShardedTensors
from kvad.errors import CheckpointError

# Scales of activations and of the cache, which kvad does not quantize by a file's numbers.
_DROPPED = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale")
_HINT = "The file is damaged, or of another layout. Download it again, or use the model that it was made from."


class _Packed(NamedTuple):
    """A quantized matrix."""

    module: str
    layout: Layout
    names: Mapping[str, str]  # suffix -> name in the file


class DequantizedTensors(LazyTensors):
    """Tensors of a folder by name; quantized ones are float32 when they are read.

    Args:
        stored: Tensors of the file.
        scheme: How they are quantized.
        dtype: Dtype of the config, which ``dtype`` returns for quantized tensors.
        expected: Names of the model's tensors. A bias of zeros that the model lacks is dropped: GPTQ writers add them.
    """

    def __init__(
        self, stored: ShardedTensors, scheme: QuantizationScheme, dtype: torch.dtype, expected: Collection[str]
    ) -> None:
        self.path, self._stored, self._scheme, self._dtype = stored.path, stored, scheme, dtype
        packed = [found for found in map(self._find, stored) if found is not None]
        parts = {name for each in packed for name in each.names.values()}
        names = (name for name in stored if name not in parts and name.rpartition(".")[2] not in _DROPPED)
        self._entries: dict[str, _Packed | None] = dict.fromkeys(names)  # None: stored under this name
        for each in packed:
            bias = f"{each.module}.bias"
            is_expected = any(name.endswith(bias) or bias.endswith(name) for name in expected)
            if bias in stored and not is_expected and not stored[bias].any():
                del self._entries[bias]
            self._entries[f"{each.module}{each.layout.name}"] = each

    def _find(self, name: str) -> _Packed | None:
        """Return the matrix whose first part is this tensor, or None."""
        for layout in LAYOUTS[self._scheme.method]:
            first = layout.suffixes[0]
            joint = "" if first.startswith("_") else "."
            if not name.endswith(joint + first):
                continue
            if first == "weight" and not is_quantized_dtype(self._stored.dtype(name)):
                continue
            module = name.removesuffix(joint + first)
            if self._scheme.is_ignored(module):
                message = "is quantized, but quantization_config lists it as not quantized"
                raise CheckpointError(f"{self.path}: {module} {message}", _HINT)
            suffixes = (*layout.suffixes, *layout.optional)
            names = {suffix: f"{module}{joint}{suffix}" for suffix in suffixes}
            present = {suffix: part for suffix, part in names.items() if part in self._stored}
            missing = next((names[suffix] for suffix in layout.suffixes if suffix not in present), None)
            if missing is not None:
                raise CheckpointError(f"{self.path}: tensor {missing} is missing", _HINT)
            return _Packed(module, layout, present)
        return None

    def __getitem__(self, name: str) -> Tensor:
        packed = self._entries[name]
        if packed is None:
            return self._stored[name]
        parts = {suffix: self._stored[part] for suffix, part in packed.names.items()}
        try:
            return packed.layout.dequantize(parts, self._scheme).contiguous()
        except (LayoutError, RuntimeError, IndexError) as error:
            raise self._error(packed, error) from error

    def block_matrices(self, rule: TensorRule, family: Family) -> dict[str, ops.block_matrix.BlockMatrix]:
        """Return the matrices in MXFP4 of a rule, as they are stored, by kvad's names; {} if there are none.

        Rows are found by converting their numbers, [experts, 1, rows], as the weights [experts, in, rows] are.
        """
        if self._scheme.method != "mxfp4" or len(rule.hf_names) > 1:
            return {}
        stored = find_stored_name(family, rule.hf_names[0], self)
        packed = None if stored is None else self._entries[stored]
        if packed is None:
            return {}
        experts, inputs, outputs = self.shape(packed.module)
        blocks, scales = (self._stored[packed.names[part]] for part in ("_blocks", "_scales"))
        if scales.shape != blocks.shape[:-1] or scales.dtype != torch.uint8 or blocks.shape[-1] != 16:
            return {}  # reading it reports the error
        numbers = torch.arange(experts * outputs).view(experts, 1, outputs)
        orders = rule.transform.read([numbers], [(*shape[:-1], 1) for shape in rule.shapes])
        if [(*order.shape[:-1], inputs) for order in orders] != list(rule.shapes):
            return {}  # this too
        matrix = ops.block_matrix.BlockMatrix(blocks.flatten(0, 1), None, "MXFP4 pairs", scales.flatten(0, 1))
        return {name: matrix.select(order.flatten()) for name, order in zip(rule.kvad_names, orders, strict=True)}

    def contents(self) -> dict[Path, mmap.mmap]:
        """Return the mapped content of the files, by path."""
        return self._stored.contents()

    def _error(self, packed: _Packed, error: Exception) -> CheckpointError:
        reason = str(error).partition("\n")[0]
        return CheckpointError(f"{self.path}: {packed.module} cannot be dequantized: {reason}", _HINT)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a matrix; only its ``weight_shape``, if any, is read."""
        packed = self._entries[name]
        if packed is None:
            return self._stored.shape(name)
        parts = {suffix: self._stored[part] for suffix, part in packed.names.items()}
        try:
            return packed.layout.shape(parts, self._scheme)
        except (LayoutError, RuntimeError, ValueError) as error:
            raise self._error(packed, error) from error

    def dtype(self, name: str) -> torch.dtype:
        return self._stored.dtype(name) if self._entries[name] is None else self._dtype

    def map_files(self) -> None:
        """Map every file now; no tensor is read."""
        self._stored.map_files()

    def bytes(self, name: str) -> int:
        """Return the size in the file."""
        packed = self._entries[name]
        return sum(map(self._stored.bytes, (name,) if packed is None else packed.names.values()))
