"""One row in one layer of one step: the memory's numbers beside the judge's, and the first place where they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvad.cache.formats import get_format
from kvad.cache.memory import KVCache
from kvad.lab.replay import ReplayStream, SequenceKey
from kvad.lab.watch import AttentionCall, ExpectedLayout, ExpectedRow, RecordedLayer
from kvad.model.transformer import Transformer
from kvad.step import AttentionPattern, TokenPositions

__all__ = ["Mismatch", "Difference", "ComparisonContext", "first_difference"]

GROSS_ERROR = 1e3  # times the largest element: nothing but an overflow


@dataclass(frozen=True)
class ComparisonContext:
    """What every case is held against.  ``close``: how far from the judge's largest element is still equal;
    ``stored``: the formats promised, of keys and values; ``lossy``: forgive what follows from rounding to them."""

    model: Transformer
    streams: Sequence[ReplayStream]
    reference: Mapping[SequenceKey, list[RecordedLayer]]
    memory: KVCache
    expected_layout: ExpectedLayout
    close: float
    stored: tuple[str, str]
    lossy: bool


@dataclass(frozen=True)
class Difference:
    """``at``: the first index along the dimension of interest; ``size``: the largest |difference|."""

    at: int
    size: float


def first_difference(have: Tensor, true: Tensor, close: float, dim: int) -> Difference | None:
    """First index along ``dim`` where ``have`` is further than ``close`` (relative to true's largest) from ``true``."""
    if not true.numel():
        return None
    finite = true[true.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    gap = (have - true).abs().masked_fill(have == true, 0.0).nan_to_num(nan=math.inf)
    others = [d for d in range(gap.dim()) if d != dim % gap.dim()]
    far = (gap.amax(dim=others) if others else gap) > close * max(scale, 1e-30)
    return Difference(int(far.int().argmax()), float(gap.max())) if bool(far.any()) else None


class Mismatch:
    """One row in one layer of one step: ``q`` [L, H, D], ``k`` [K, S, D], ``v``, ``columns`` [S],
    ``scores`` [H, L, S] and ``out`` are what the memory attended with; ``judge`` is the whole row without one.

    S' below are the visible places: those that some query of this row may see, by the host's books.
    """

    def __init__(self, world: ComparisonContext, call: AttentionCall, row: ExpectedRow) -> None:
        self.world, self.call, self.row = world, call, row
        self.memory, self.close = world.memory, world.close
        if world.lossy:
            coarsest = max(get_format(name).eps for name in world.stored)
            self.close = max(self.close, 2 * coarsest) if call.layer == 0 else GROSS_ERROR
        self.reference = world.reference[row.key][call.layer]
        seen, r = row.seen, row.sub_batch_row
        self.q, self.k, self.v = seen.q[r], seen.k[r], seen.v[r]
        self.positions, self.scores, self.out = seen.positions[r], seen.scores[r], seen.out[r]
        self.new = torch.arange(row.start, row.start + row.num_new)
        mixer = world.expected_layout.groups[row.group].spec
        self.allowed = AttentionPattern.from_spec(mixer).visible(
            TokenPositions(self.new), TokenPositions(row.expected)
        )  # [L, S]
        self.pattern = AttentionPattern.from_spec(mixer)
        self.block_table = self.allowed.any(dim=0).nonzero().squeeze(-1)  # [S']
        self.meant = row.expected[self.block_table]

    # ------------------------------------------------------------ the first difference

    def first_difference(self) -> tuple[str, int, float] | None:
        """(what, the query's position, how much), or None."""
        new, start = slice(self.row.start, self.row.start + self.row.num_new), self.row.start
        if not self.world.lossy:
            query = self._at_query(self.q, self.reference.q[new])
            if query is not None:
                return "q", query.at, query.size
        for what, have, true in (("k", self.k, self.reference.k), ("v", self.v, self.reference.v)):
            found = first_difference(have[:, self.block_table], true[:, self.meant], self.close, 1)
            if found is not None:
                return what, self._first_reader(found.at), found.size
        if self.world.lossy:
            return None
        out = self._at_query(self.out, self.reference.out[new])
        if out is not None:
            return "the attention output", out.at, out.size
        if not bool((self.visible() == self.allowed).all()) or self.missing() is not None:
            wrong = (self.visible() != self.allowed).any(dim=-1)
            return "the set of visible keys", start + int(wrong.int().argmax()), 0.0
        return None

    def _at_query(self, have: Tensor, true: Tensor) -> Difference | None:
        """[L, H, D] both; ``at`` becomes a position."""
        found = first_difference(have, true, self.close, 0)
        return None if found is None else Difference(found.at + self.row.start, found.size)

    def _first_reader(self, place: int) -> int:
        """The first query that may see S'[place]."""
        return self.row.start + int(self.allowed[:, self.block_table[place]].int().argmax())

    def visible(self) -> Tensor:
        """[L, S]: what the memory let every query see."""
        return (self.scores > -math.inf).any(dim=0)

    def missing(self) -> int | None:
        """A position that a query may see and no place of the row's table holds, by the books."""
        every = torch.arange(self.row.start + self.row.num_new)
        seen = self.pattern.visible(TokenPositions(self.new), TokenPositions(every)).any(dim=0)
        seen[self.meant] = False
        return int(seen.int().argmax()) if bool(seen.any()) else None
