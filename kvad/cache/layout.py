"""How bytes lie: a store is ``[blocks, K, block_size, D]``, whether a row has many blocks (paged) or one (contiguous).

A slot is ``block * block_size + offset``.  Rows whose single blocks stand side by side are read as a view; anything
else is gathered.  Nothing here knows positions: what is visible follows from columns.

    block_size 4, table [[2, 5]]  ->  slots 8 9 10 11 20 21 22 23
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Table", "read", "read_column", "split"]


class Table:
    """One lane's blocks [R, P], and how to read them: ``first`` is set where a read can be a view.

    ``start``: of rows of one block, the first slot that is read.
    """

    def __init__(self, blocks: Tensor, block_size: int, slots: int, start: int = 0) -> None:
        rows, per_row = blocks.shape
        self.rows, self.per_row, self.block_size, self.start = rows, per_row, block_size, start
        self.slots = min(slots, block_size - start) if per_row == 1 else per_row * block_size
        self.flat = blocks.reshape(-1)
        self.ids: list[int] = self.flat.tolist() if per_row == 1 else []
        self.first = _run(self.ids)
        self._lines: dict[int, Tensor] = {}
        self._pieces: dict[int, list[Table]] = {}

    def pieces(self, slots: int) -> list[Table]:
        """The same, cut into tables of ``slots`` slots: in whole blocks, one at least, where a row has many."""
        if slots not in self._pieces:
            size, per_row = self.block_size, self.per_row
            blocks = self.flat.view(self.rows, per_row)
            if per_row == 1:
                first, end = self.start, self.start + self.slots
                cut = [Table(blocks, size, min(slots, end - at), at) for at in range(first, end, slots)]
            else:
                many = max(1, slots // size)
                cut = [Table(blocks[:, at : at + many], size, many * size) for at in range(0, per_row, many)]
            self._pieces[slots] = cut
        return self._pieces[slots]

    def lines(self, heads: int) -> Tensor:
        """[R * K * P]: where row r's head k keeps its blocks, among the store's lines [blocks * K, block_size * D].

        heads 2, table [[2, 5]]  ->  4 10 5 11
        """
        if heads not in self._lines:
            blocks = self.flat.view(self.rows, 1, self.per_row) * heads
            self._lines[heads] = (blocks + torch.arange(heads, device=blocks.device).view(1, -1, 1)).reshape(-1)
        return self._lines[heads]


def _run(ids: Sequence[int]) -> int | None:
    """The first block where they ascend by one, else None."""
    return ids[0] if ids and all(b == ids[0] + i for i, b in enumerate(ids)) else None


def split(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """slots [T] -> (block [T], offset [T])."""
    return slots // block_size, slots % block_size


def read(store: Tensor, table: Table) -> Tensor:
    """-> [R, K, S, D]; a view where the table allows it, else one gathered copy.

    A store of one line per block, [blocks, K, 1, D], gives [R, K, P, D].
    """
    blocks, heads, lines, width = store.shape
    low, high = (0, 1) if lines == 1 and table.per_row == 1 else (table.start, table.start + table.slots)
    if table.first is not None:
        return store[table.first : table.first + table.rows, :, low:high]
    if table.ids and high - low < lines:  # a part of each row
        return torch.stack([store[block, :, low:high] for block in table.ids])
    # Whole lines are copied: other orders cost 10 to 60 times as much.
    gathered = store.view(blocks * heads, lines * width).index_select(0, table.lines(heads))
    return gathered.view(table.rows, heads, table.per_row * lines, width)[:, :, low:high]


def read_column(column: Tensor, table: Table) -> Tensor:
    """column [blocks, block_size] -> [R, S]."""
    gathered = torch.index_select(column, 0, table.flat)
    return gathered.view(table.rows, table.per_row * table.block_size)[:, table.start : table.start + table.slots]
