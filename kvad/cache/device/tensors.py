"""Tensors of one layer's keys or values in their format, and access to them by blocks.

Every array is ``[blocks, K, block_size or 1, width]``: the data of a slot, and scales per slot or per block. ``write``
and ``read`` encode and decode; all other operations copy raw bytes, array by array. Values are read as they were
stored: a step sees its own tokens as any later step does.

A format is decoded for the blocks of one sub-batch and one layer at a time, never for the pool. A sequence has many
blocks (paged) or one (contiguous).

Arrays are stored head by head (``allocate_head_major``), so consecutive blocks are one contiguous range of each
head and are read as a view, for one or several sequences. Other blocks are gathered. A slot is ``block * block_size +
offset``. Positions are stored elsewhere and decide visibility.

    block_size 4, table [[2, 5]]  ->  slots 8 9 10 11 20 21 22 23
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvad import ops
from kvad.cache.quantization import get_format

Device = torch.device | str
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
FEW_BLOCKS = 4  # that are cleared one by one, as in decoding


def allocate_head_major(
    num_blocks: int,
    num_heads: int,
    *shape: int,
    dtype: torch.dtype,
    fill: float = 0,
    device: Device,
    memory: ops.runtime.HostMemory | None = None,
) -> Tensor:
    """Allocate [blocks, K, *shape] stored as [K, blocks, *shape]; zeros on a CPU are taken from ``memory``."""
    sizes = num_heads, num_blocks, *shape
    if fill or torch.device(device).type != "cpu":
        return torch.full(sizes, fill, dtype=dtype, device=device).transpose(0, 1)
    raw = (memory or ops.runtime.HostMemory()).take(math.prod(sizes) * dtype.itemsize)
    return raw.view(dtype).view(sizes).transpose(0, 1)


class BlockTable:
    """Blocks [R, P] of one sub-batch; ``first`` is the first block if all are consecutive.

    Args:
        blocks: Block ids [R, P].
        block_size: Slots of a block.
        slots: Slots to read of each sequence, if it has one block.
    """

    def __init__(self, blocks: Tensor, block_size: int, slots: int) -> None:
        self.rows, self.per_row = blocks.shape
        self.block_size = block_size
        self.slots = min(slots, block_size) if self.per_row == 1 else self.per_row * block_size
        self.blocks, self.flat = blocks, blocks.reshape(-1)
        self.first: int | None = None
        if self.flat.device.type == "cpu" and len(self.flat):  # On a GPU that would wait for the device.
            first, last, count = int(self.flat[0]), int(self.flat[-1]), len(self.flat)
            if last - first == count - 1 and (count <= 2 or bool((self.flat.diff() == 1).all())):
                self.first = first
        self._row_index: dict[tuple[int, int], Tensor] = {}

    @cached_property
    def ids(self) -> list[int]:
        """Blocks of sequences that have one each; on a GPU, the first use waits for the device."""
        return self.flat.tolist() if self.per_row == 1 else []

    def row_index(self, blocks: int, heads: int) -> Tensor:
        """Return the lines of each sequence, head and block in a store [K * blocks, block_size * D].

        Shape [R * K * P]. 8 blocks, 2 heads, table [[2, 5]]  ->  2 5 10 13
        """
        if (blocks, heads) not in self._row_index:
            first = torch.arange(0, heads * blocks, blocks, device=self.flat.device).view(1, -1, 1)
            self._row_index[blocks, heads] = (self.flat.view(self.rows, 1, self.per_row) + first).reshape(-1)
        return self._row_index[blocks, heads]


def split_slots(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Split slots [T] into blocks [T] and offsets [T]."""
    return slots // block_size, slots % block_size


def gather_blocks(store: Tensor, table: BlockTable) -> Tensor:
    """Return the slots of a table, [R, K, S, D]; a view if the table allows it, else a copy.

    A store with one line per block, [blocks, K, 1, D], gives [R, K, P, D]. The store must be head-major.
    """
    blocks, heads, lines, width = store.shape
    num_read = 1 if lines == 1 and table.per_row == 1 else table.slots
    heads_first, slots = store.transpose(0, 1), table.per_row * lines
    if table.first is not None:
        run = heads_first[:, table.first : table.first + table.rows * table.per_row]
        return run.view(heads, table.rows, slots, width).transpose(0, 1)[:, :, :num_read]
    if table.ids and num_read < lines:  # A part of each block.
        return torch.stack([store[block, :, :num_read] for block in table.ids])
    # Whole lines are copied, because other orders take 10 to 60 times as long.
    gathered = heads_first.view(heads * blocks, lines * width).index_select(0, table.row_index(blocks, heads))
    return gathered.view(table.rows, heads, slots, width)[:, :, :num_read]


def gather_metadata(column: Tensor, table: BlockTable) -> Tensor:
    """Return the slots of a table from column [blocks, block_size]: [R, S]."""
    gathered = torch.index_select(column, 0, table.flat)
    return gathered.view(table.rows, table.per_row * table.block_size)[:, : table.slots]


class ArrayBlocks(NamedTuple):
    """One raw array of a cache group, and a sequence's blocks of it.

    ``name`` is "group.positions" or "group.layer.kind.number", such as "0.3.keys.0".
    """

    name: str
    array: Tensor  # [blocks, ...]
    blocks: Tensor  # [n]


class BlockArrays:
    """Arrays [blocks, ...] of one layer."""

    arrays: tuple[Tensor, ...]
    empty_values: Sequence[float]  # content of an empty slot, per array

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @cached_property
    def _host_arrays(self) -> list[NDArray[np.generic]] | None:
        """The arrays as integers of the same memory; None if they are not on the host, or empty values are not zero."""
        if any(array.device.type != "cpu" for array in self.arrays) or any(self.empty_values):
            return None
        return [array.view(_INTEGERS[array.itemsize]).numpy() for array in self.arrays]

    def clear(self, blocks: Sequence[int], index: Tensor | None = None) -> None:
        """Empty whole blocks; ``index``: the same blocks, on the device."""
        if len(blocks) <= FEW_BLOCKS and self._host_arrays is not None:
            for zeros in self._host_arrays:
                for block in blocks:
                    zeros[block] = 0
            return
        for array, value in zip(self.arrays, self.empty_values, strict=False):
            index = torch.tensor(blocks, dtype=torch.int64, device=array.device) if index is None else index
            array.index_fill_(0, index, value)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy whole blocks, one after the other.

        Args:
            copies: Source, target, and the number of slots that are visible in the target, the first ones.
        """
        for array in self.arrays:
            library = ops.native.load().library if array.device.type == "cpu" and array.dim() == 4 else None
            if library is not None and array.transpose(0, 1).is_contiguous():
                library.copy_blocks(array, copies)
                continue
            for source, target, _ in copies:
                array[target] = array[source]


class LayerTensor(BlockArrays):
    """Keys or values of one layer in one format.

    Args:
        name: Name of the cache format.
        blocks: Number of blocks.
        heads: Key-value heads.
        block_size: Slots of a block.
        dim: Numbers of a vector.
        device: Device of the tensors.
        memory: Where the arrays are allocated on a CPU; by default each is allocated alone.

    Raises:
        ConfigError: If torch does not support the format.
    """

    def __init__(
        self,
        name: str,
        blocks: int,
        heads: int,
        block_size: int,
        dim: int,
        device: torch.device | str = "cpu",
        memory: ops.runtime.HostMemory | None = None,
    ) -> None:
        self.format, self.dim = get_format(name), dim
        self.is_blockwise = self.format.is_blockwise  # every write reads it
        self._encode, self._decode = ops.quantize.get_codec(name, device)
        arrays = []
        for array in self.format.arrays(dim):
            lines = block_size if array.granularity == "slot" else 1
            dtype = getattr(torch, array.dtype)
            shape = blocks, heads, lines, array.width
            arrays.append(allocate_head_major(*shape, dtype=dtype, device=device, memory=memory))
        self.arrays, self.data = tuple(arrays), arrays[0]
        self.empty_values = [0] * len(arrays)  # Every format decodes zeros as zeros.

    @cached_property
    def paged(self) -> ops.gpu.PagedStore:
        """The arrays, for kernels that read and write blocks in place (``ops/gpu.py``)."""
        return ops.gpu.PagedStore(self.format.name, self.data, *self.arrays[1:2])

    def write(self, blocks: Tensor, offsets: Tensor, x: Tensor) -> None:
        """Write x [T, K, D] to slots ``offsets`` [T] of ``blocks`` [T]."""
        assert not self.is_blockwise, "a per-channel format requires write_blocks"
        assert x.shape[1] == self.data.shape[1], "one head would be copied to all"
        for array, part in zip(self.arrays, self._encode(x), strict=True):
            array[blocks, :, offsets] = part

    def write_blocks(self, blocks: Tensor, x: Tensor) -> None:
        """Write x [n, K, block_size, D] to whole ``blocks`` [n], in any format."""
        for array, part in zip(self.arrays, self._encode(x), strict=True):
            array[blocks] = part

    def read(self, table: BlockTable, dtype: torch.dtype) -> Tensor:
        """Return [R, K, S, D] in ``dtype``; a view if format and table allow it."""
        return self._decode([gather_blocks(array, table) for array in self.arrays], dtype)

    def read_per_head(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """Read separate blocks for each head, [R, K, n] -> [R, K, n * block_size, D]."""
        assert not self.is_blockwise, "a per-channel format is read by tables"
        num_seqs, num_heads, _ = blocks.shape
        num_blocks = len(self.data)
        first_lines = torch.arange(0, num_heads * num_blocks, num_blocks, device=blocks.device)
        index = (blocks + first_lines.view(1, -1, 1)).flatten()
        lines = [array.transpose(0, 1).flatten(0, 1).index_select(0, index) for array in self.arrays]
        raw = [line.view(num_seqs, num_heads, -1, line.shape[-1]) for line in lines]
        return self._decode(raw, dtype)

    def read_slots(self, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the vectors in slots ``offsets`` [n] of ``blocks`` [n]: [n, K, D]."""
        size = self.data.shape[2]
        raw = [array[blocks, :, offsets if array.shape[2] == size else 0].unsqueeze(2) for array in self.arrays]
        return self._decode(raw, dtype).squeeze(2)


class BlockStates(BlockArrays):
    """State of one layer behind the last token of each full block, [blocks, numbers] (``AttentionSpec``)."""

    def __init__(self, blocks: int, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.data = torch.zeros(blocks, size, dtype=dtype, device=device)
        self.arrays, self.empty_values = (self.data,), (0,)


class LatentValues(LayerTensor):
    """Values that are the last ``dim`` numbers of the keys (``AttentionSpec.values_in_keys``): nothing is stored."""

    def __init__(self, keys: LayerTensor, dim: int) -> None:
        self.format, self.is_blockwise, self.dim, self.data = keys.format, keys.is_blockwise, dim, keys.data
        self.arrays, self.empty_values, self._keys = (), [], keys

    def of_keys(self, keys: Tensor) -> Tensor:
        """Return the values [..., Dv] of keys [..., D], rotated or not."""
        return keys[..., keys.shape[-1] - self.dim :]

    def write(self, blocks: Tensor, offsets: Tensor, x: Tensor) -> None:
        """Write nothing: the keys are written."""

    def write_blocks(self, blocks: Tensor, x: Tensor) -> None:
        """Write nothing: the keys are written."""

    def read(self, table: BlockTable, dtype: torch.dtype) -> Tensor:
        """Return [R, K, S, Dv] in ``dtype``."""
        return self.of_keys(self._keys.read(table, dtype))

    def read_per_head(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """Read separate blocks for each head, [R, K, n] -> [R, K, n * block_size, Dv]."""
        return self.of_keys(self._keys.read_per_head(blocks, dtype))

    def read_slots(self, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values in slots ``offsets`` [n] of ``blocks`` [n]: [n, K, Dv]."""
        return self.of_keys(self._keys.read_slots(blocks, offsets, dtype))


def read_pair(keys: LayerTensor, values: LayerTensor, read: Callable[[LayerTensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Read keys and values; keys that contain the values are decoded once."""
    k = read(keys)
    return k, values.of_keys(k) if isinstance(values, LatentValues) else read(values)
