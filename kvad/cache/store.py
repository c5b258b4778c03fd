"""One layer's keys or values: the raw arrays of their format, and the moves over them.

Every array is ``[blocks, K, block_size or 1, width]``: the data of a slot, and scales per slot or per block.  ``write``
and ``read`` encode and decode; every other move copies raw bytes, array by array, and knows no format.  What is read is
what any later step will read: a step sees its own tokens as they were stored.

A format is decoded for the blocks of one lane and one layer at a time, never for the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvad.cache.formats import get_format
from kvad.cache.layout import BlockTable, allocate_head_major, gather_blocks
from kvad.ops.quantize import get_codec

__all__ = ["LayerTensor"]


class LayerTensor:
    """``blocks`` blocks of ``block_size`` slots, each ``heads`` vectors of ``dim`` numbers, in the format ``name``.

    ConfigError where torch lacks the format.  ``data`` is the first of ``arrays``.
    """

    __slots__ = ("_decode", "_encode", "arrays", "data", "dim", "format")

    def __init__(
        self, name: str, blocks: int, heads: int, block_size: int, dim: int, device: torch.device | str = "cpu"
    ) -> None:
        self.format, self.dim = get_format(name), dim
        self._encode, self._decode = get_codec(name, device)
        arrays = []
        for array in self.format.arrays(dim):
            lines = block_size if array.granularity == "slot" else 1
            dtype = getattr(torch, array.dtype)
            arrays.append(allocate_head_major(blocks, heads, lines, array.width, dtype=dtype, device=device))
        self.arrays, self.data = tuple(arrays), arrays[0]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    # ------------------------------------------------------------ numbers in, numbers out

    def write(self, blocks: Tensor, offsets: Tensor, x: Tensor) -> None:
        """x [T, K, D] into slots ``offsets`` [T] of ``blocks`` [T]."""
        assert not self.format.is_blockwise, "a format by channel takes whole blocks: pack"
        for array, part in zip(self.arrays, self._encode(x), strict=True):
            array[blocks, :, offsets] = part

    def write_blocks(self, blocks: Tensor, x: Tensor) -> None:
        """x [n, K, block_size, D] into whole ``blocks`` [n], in any format."""
        for array, part in zip(self.arrays, self._encode(x), strict=True):
            array[blocks] = part

    def read(self, table: BlockTable, dtype: torch.dtype) -> Tensor:
        """-> [R, K, S, D] in ``dtype``; a view where the format is that dtype and the table allows it."""
        return self._decode([gather_blocks(array, table) for array in self.arrays], dtype)

    def read_tiles(self, table: BlockTable, dtype: torch.dtype, slots: int) -> Iterator[Tensor]:
        """What :meth:`read` gives, [R, K, n, D] at a time in the order of slots; n is ``slots`` in whole blocks (one at
        least) and less at the end.  Each is decoded when it is asked for."""
        for piece in table.tiles(slots):
            yield self.read(piece, dtype)

    def read_per_head(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """Blocks of each head's own, [R, K, n] -> [R, K, n * block_size, D]; per-token formats only."""
        assert not self.format.is_blockwise, "a format by channel is read by tables"
        rows, heads, _ = blocks.shape
        every = len(self.data)
        at = (blocks + torch.arange(0, heads * every, every, device=blocks.device).view(1, -1, 1)).flatten()
        lines = [array.transpose(0, 1).flatten(0, 1).index_select(0, at) for array in self.arrays]
        raw = [line.view(rows, heads, -1, line.shape[-1]) for line in lines]
        return self._decode(raw, dtype)

    def read_slots(self, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers in slots ``offsets`` [n] of ``blocks`` [n]: [n, K, D]."""
        raw = [
            array[blocks, :, offsets if array.shape[2] == self.data.shape[2] else 0].unsqueeze(2)
            for array in self.arrays
        ]
        return self._decode(raw, dtype).squeeze(2)

    # ------------------------------------------------------------ raw moves

    def clear(self, blocks: Tensor) -> None:
        """Zero everywhere, which every format reads as zeros."""
        for array in self.arrays:
            array.index_fill_(0, blocks, 0)

    def copy(self, source: int, target: int) -> None:
        """A whole block; which of its slots are visible is a matter of positions."""
        for array in self.arrays:
            array[target] = array[source]

    def take_slots(self, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        """Raw slots, each [n, K, width]; per-token formats only."""
        assert not self.format.is_blockwise, "a slot of a sealed block means nothing without its block"
        return tuple(array[blocks, :, offsets] for array in self.arrays)

    def put_slots(self, blocks: Tensor, offsets: Tensor, raw: Sequence[Tensor]) -> None:
        """The inverse of :meth:`take`, of a store of the same format."""
        assert not self.format.is_blockwise, "a slot of a sealed block means nothing without its block"
        for array, part in zip(self.arrays, raw, strict=True):
            array[blocks, :, offsets] = part

    def take_blocks(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Raw blocks, each [n, K, block_size or 1, width]."""
        return tuple(array[blocks] for array in self.arrays)

    def put_blocks(self, blocks: Tensor, raw: Sequence[Tensor]) -> None:
        """The inverse of :meth:`take_blocks`, of a store of the same format."""
        for array, part in zip(self.arrays, raw, strict=True):
            array[blocks] = part
