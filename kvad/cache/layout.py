"""How bytes lie: a store is ``[blocks, K, block_size, D]``, whether a row has many blocks (paged) or one (contiguous).

A slot is ``block * block_size + offset``.  Rows whose single blocks stand side by side are read as a view; anything
else is gathered.  Nothing here knows positions: what is visible follows from columns.

    block_size 4, table [[2, 5]]  ->  slots 8 9 10 11 20 21 22 23
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Table", "read", "read_column", "split", "write"]


class Table:
    """One lane's blocks [R, P], and how to read them: ``first`` is set where a read can be a view."""

    def __init__(self, blocks: Tensor, block_size: int, slots: int) -> None:
        rows, per_row = blocks.shape
        self.rows, self.per_row, self.block_size = rows, per_row, block_size
        self.slots = min(slots, block_size) if per_row == 1 else per_row * block_size
        self.flat = blocks.reshape(-1)
        self.first = _run(self.flat) if per_row == 1 else None
        self._lines: dict[int, Tensor] = {}

    def lines(self, heads: int) -> Tensor:
        """[R * K * P]: where row r's head k keeps its blocks, among the store's lines [blocks * K, block_size * D].

        heads 2, table [[2, 5]]  ->  4 10 5 11
        """
        if heads not in self._lines:
            blocks = self.flat.view(self.rows, 1, self.per_row) * heads
            self._lines[heads] = (blocks + torch.arange(heads, device=blocks.device).view(1, -1, 1)).reshape(-1)
        return self._lines[heads]


def _run(blocks: Tensor) -> int | None:
    """The first block where they ascend by one, else None."""
    ids = blocks.tolist()
    return ids[0] if all(b == ids[0] + i for i, b in enumerate(ids)) else None


def split(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """slots [T] -> (block [T], offset [T])."""
    return slots // block_size, slots % block_size


def write(store: Tensor, blocks: Tensor, offsets: Tensor, x: Tensor) -> None:
    """x [T, K, D] into store [blocks, K, block_size, D], in the store's dtype."""
    store[blocks, :, offsets] = x.to(store.dtype)


def read(store: Tensor, table: Table) -> Tensor:
    """-> [R, K, S, D]; a view where the table allows it, else one gathered copy."""
    if table.first is not None:
        return store[table.first : table.first + table.rows, :, : table.slots]
    blocks, heads, block_size, width = store.shape  # whole lines are copied: other orders cost 10 to 60 times as much
    gathered = store.view(blocks * heads, block_size * width).index_select(0, table.lines(heads))
    return gathered.view(table.rows, heads, table.per_row * block_size, width)[:, :, : table.slots]


def read_column(column: Tensor, table: Table) -> Tensor:
    """column [blocks, block_size] -> [R, S]."""
    gathered = torch.index_select(column, 0, table.flat)
    return gathered.view(table.rows, table.per_row * table.block_size)[:, : table.slots]
