"""One layer's keys or values: the raw arrays of their format, and the moves over them.

Every array is ``[blocks, K, block_size or 1, width]``: the data of a slot, and scales per slot or per block.  ``write``
and ``read`` encode and decode; every other move copies raw bytes, array by array, and knows no format.  What is read is
what any later step will read: a step sees its own tokens as they were stored.

A format is decoded for the blocks of one lane and one layer at a time, never for the pool.

How bytes lie: a store is ``[blocks, K, block_size, D]``, whether a row has many blocks (paged) or one (contiguous).

In memory it lies head by head (:func:`by_head`), so blocks that ascend by one are one stretch of each head: they are
read as a view, a row's or several rows' side by side.  Anything else is gathered.  A slot is ``block * block_size +
offset``.  Nothing here knows positions: what is visible follows from columns.

    block_size 4, table [[2, 5]]  ->  slots 8 9 10 11 20 21 22 23
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvad import ops
from kvad.cache.quantization import get_format

Device = torch.device | str


def allocate_head_major(
    blocks: int, heads: int, *of_each: int, dtype: torch.dtype, fill: float = 0, device: Device
) -> Tensor:
    """A new store, [blocks, K, *of_each], that lies in memory as [K, blocks, *of_each]."""
    return torch.full((heads, blocks, *of_each), fill, dtype=dtype, device=device).transpose(0, 1)


class BlockTable:
    """One lane's blocks [R, P], and how to read them: ``first`` is set where all of them ascend by one, row by row.

    ``start``: of rows of one block, the first slot that is read.
    """

    def __init__(self, blocks: Tensor, block_size: int, slots: int, start: int = 0) -> None:
        rows, per_row = blocks.shape
        self.rows, self.per_row, self.block_size, self.start = rows, per_row, block_size, start
        self.slots = min(slots, block_size - start) if per_row == 1 else per_row * block_size
        self.flat = blocks.reshape(-1)
        self.ids: list[int] = self.flat.tolist() if per_row == 1 else []
        self.first = _run(self.flat)
        self._row_index: dict[tuple[int, int], Tensor] = {}
        self._tiles: dict[int, list[BlockTable]] = {}

    def tiles(self, slots: int) -> list[BlockTable]:
        """The same, cut into tables of ``slots`` slots: in whole blocks, one at least, where a row has many."""
        if slots not in self._tiles:
            size, per_row = self.block_size, self.per_row
            blocks = self.flat.view(self.rows, per_row)
            if per_row == 1:
                first, end = self.start, self.start + self.slots
                cut = [BlockTable(blocks, size, min(slots, end - at), at) for at in range(first, end, slots)]
            else:
                many = max(1, slots // size)
                cut = [BlockTable(blocks[:, at : at + many], size, many * size) for at in range(0, per_row, many)]
            self._tiles[slots] = cut
        return self._tiles[slots]

    def row_index(self, blocks: int, heads: int) -> Tensor:
        """[R * K * P]: where row r's head k keeps its blocks, among the store's lines [K * blocks, block_size * D].

        8 blocks, 2 heads, table [[2, 5]]  ->  2 5 10 13
        """
        if (blocks, heads) not in self._row_index:
            first = torch.arange(0, heads * blocks, blocks, device=self.flat.device).view(1, -1, 1)
            self._row_index[blocks, heads] = (self.flat.view(self.rows, 1, self.per_row) + first).reshape(-1)
        return self._row_index[blocks, heads]


def _run(flat: Tensor) -> int | None:
    """The first block where they ascend by one, else None.  A device is not asked: that would be to wait for it."""
    if flat.device.type != "cpu" or not len(flat):
        return None
    first, last = int(flat[0]), int(flat[-1])
    ascends = last - first == len(flat) - 1 and (len(flat) <= 2 or bool((flat.diff() == 1).all()))
    return first if ascends else None


def split_slots(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """slots [T] -> (block [T], offset [T])."""
    return slots // block_size, slots % block_size


def gather_blocks(store: Tensor, table: BlockTable) -> Tensor:
    """-> [R, K, S, D]; a view where the table allows it, else one gathered copy.

    A store of one line per block, [blocks, K, 1, D], gives [R, K, P, D].  ``store`` lies head by head.
    """
    blocks, heads, lines, width = store.shape
    low, high = (0, 1) if lines == 1 and table.per_row == 1 else (table.start, table.start + table.slots)
    heads_first, slots = store.transpose(0, 1), table.per_row * lines
    if table.first is not None:
        run = heads_first[:, table.first : table.first + table.rows * table.per_row]
        return run.view(heads, table.rows, slots, width).transpose(0, 1)[:, :, low:high]
    if table.ids and high - low < lines:  # a part of each row
        return torch.stack([store[block, :, low:high] for block in table.ids])
    # Whole lines are copied: other orders cost 10 to 60 times as much.
    gathered = heads_first.view(heads * blocks, lines * width).index_select(0, table.row_index(blocks, heads))
    return gathered.view(table.rows, heads, slots, width)[:, :, low:high]


def gather_metadata(column: Tensor, table: BlockTable) -> Tensor:
    """column [blocks, block_size] -> [R, S]."""
    gathered = torch.index_select(column, 0, table.flat)
    return gathered.view(table.rows, table.per_row * table.block_size)[:, table.start : table.start + table.slots]


class LayerTensor:
    """``blocks`` blocks of ``block_size`` slots, each ``heads`` vectors of ``dim`` numbers, in the format ``name``.

    ConfigError where torch lacks the format.  ``data`` is the first of ``arrays``.
    """

    __slots__ = ("_decode", "_encode", "arrays", "data", "dim", "format")

    def __init__(
        self, name: str, blocks: int, heads: int, block_size: int, dim: int, device: torch.device | str = "cpu"
    ) -> None:
        self.format, self.dim = get_format(name), dim
        self._encode, self._decode = ops.quantize.get_codec(name, device)
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
