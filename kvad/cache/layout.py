"""How bytes lie: a store is ``[blocks, K, block_size, D]``, whether a row has many blocks (paged) or one (contiguous).

In memory it lies head by head (:func:`by_head`), so blocks that ascend by one are one stretch of each head: they are
read as a view, a row's or several rows' side by side.  Anything else is gathered.  A slot is ``block * block_size +
offset``.  Nothing here knows positions: what is visible follows from columns.

    block_size 4, table [[2, 5]]  ->  slots 8 9 10 11 20 21 22 23
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BlockTable", "allocate_head_major", "gather_blocks", "gather_metadata", "split_slots"]

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
