"""What every attention layer was given and saw, beside what the host meant it to see.

:class:`Watched` stands between a model and any memory; its views hand every call on and show it to a listener.
:class:`Books` keeps, from the plans alone, which position lies in which slot: a second opinion on the memory's
columns that no fault of the memory can touch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvad.cache.sizing import Group
from kvad.config import MixerSpec
from kvad.engine.runner import Cache
from kvad.engine.scheduler import Plan
from kvad.lab.replay import Key, Stream, key_of, uncached
from kvad.model.fresh import Fresh
from kvad.model.transformer import Transformer
from kvad.ops.lanes import Seen
from kvad.step import EMPTY_BLOCK, Memory, Moves, Score, Step, View

__all__ = ["Books", "Call", "Layer", "Told", "Watched", "WatchedCache", "judge_layers", "told"]


class Call(NamedTuple):
    """One layer in one step: ``q`` [T, H, D], ``k`` [T, K, D] and ``v`` as the model gave them, not yet rotated, and
    per lane what the memory attended with."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    score: Score
    seen: tuple[Seen, ...]


Listener = Callable[[Call], None]


class Watched:
    """A memory whose calls are shown to ``listener``.  Its maker must let the memory's probe be :meth:`probe`."""

    def __init__(self, listener: Listener) -> None:
        self.inner: Memory | None = None
        self.listener = listener
        self._seen: list[Seen] = []

    def probe(self, seen: Seen) -> None:
        self._seen.append(seen)

    def open(self, step: Step) -> Sequence[View]:
        assert self.inner is not None
        return [_WatchedView(self, layer, view) for layer, view in enumerate(self.inner.open(step))]

    def call(self, layer: int, view: View, q: Tensor, k: Tensor | None, v: Tensor | None, score: Score) -> Tensor:
        self._seen.clear()
        out = view.attend(q, k, v, score)
        if k is not None and v is not None:
            self.listener(Call(layer, q, k, v, score, tuple(self._seen)))
        return out


class WatchedCache(Watched):
    """The same around a cache, whose moves go through."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener)
        self.cache: Cache | None = None

    def hold(self, cache: Cache) -> WatchedCache:
        self.inner = self.cache = cache
        return self

    def apply(self, moves: Moves) -> None:
        assert self.cache is not None
        self.cache.apply(moves)

    def leaves(self) -> list[Tensor]:
        return [] if self.cache is None else self.cache.leaves()


class _WatchedView:
    def __init__(self, watched: Watched, layer: int, view: View) -> None:
        self._watched, self._layer, self._view = watched, layer, view

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: Score) -> Tensor:
        return self._watched.call(self._layer, self._view, q, k, v, score)

    def write(self, k: Tensor, v: Tensor) -> None:
        self._view.write(k, v)


# ---------------------------------------------------------------- the judge


@dataclass(frozen=True)
class Layer:
    """One layer of one whole row without a cache.  T tokens: ``q`` [T, H, D], ``k`` [K, T, D] rotated, ``raw_q``
    [T, H, D], ``raw_k`` [K, T, D] not rotated, ``v`` [K, T, Dv], ``scores`` [H, T, T], ``out`` [T, H, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    raw_q: Tensor
    raw_k: Tensor
    scores: Tensor
    out: Tensor
    score: Score


def judge_layers(
    model: Transformer, stream: Stream, sample: int, specs: Sequence[MixerSpec] | None = None, exact: bool = False
) -> list[Layer]:
    """Every layer of one row, computed whole; ``specs`` and ``exact``: as :class:`Fresh` judges a cache's policy."""
    layers: list[Layer] = []

    def keep(call: Call) -> None:
        (seen,) = call.seen
        raw_k = call.k.transpose(0, 1)
        layers.append(Layer(seen.q[0], seen.k[0], seen.v[0], call.q, raw_k, seen.scores[0], seen.out[0], call.score))

    watched = Watched(keep)
    watched.inner = Fresh(model.config, specs=specs, exact=exact, kernel="reference", probe=watched.probe)
    uncached(model, stream.tokens(sample), stream.limit, watched, stream.source)
    return layers


# ---------------------------------------------------------------- the host's own books


class Books:
    """Per group of self-attention, the position that lies in every slot (-1: nothing), and the blocks of every row when
    last planned."""

    def __init__(self, placed: Sequence[Group]) -> None:
        self.groups = tuple(group for group in placed if not group.mixer.cross)
        self.positions = [torch.full((group.blocks, group.block_size), -1, dtype=torch.int64) for group in self.groups]
        self.blocks: list[dict[Key, list[int]]] = [{} for _ in self.groups]

    def enter(self, plan: Plan) -> None:
        """Write down a plan that is about to run."""
        where = torch.tensor([p for work in plan.work for p in range(work.start, work.start + work.count)])
        for number, column in enumerate(self.positions):
            for block in plan.placed.moves.clear[number]:
                column[block] = -1
            for source, target, kept in plan.placed.moves.copy[number]:
                column[target, :kept] = column[source, :kept]
                column[target, kept:] = -1
            column.view(-1)[torch.tensor(plan.placed.slots[number])] = where
            for work, table in zip(plan.work, plan.placed.tables[number], strict=True):
                self.blocks[number][key_of(work)] = list(table)


class Told(NamedTuple):
    """One row in one layer of one step: what it saw of a lane, and what the books say about it.

    ``start``, ``num_new``: its new tokens; ``place``: where they begin in the step's flat tokens; ``lane_row``: its row
    of the lane; ``group``: its cache group; ``slots`` [S]: the global slot read at every place of the lane's slots
    (block * block_size + offset); ``meant`` [S]: the position that lies there, by the books.
    """

    key: Key
    start: int
    num_new: int
    place: int
    lane_row: int
    group: int
    seen: Seen
    slots: Tensor
    meant: Tensor


def told(plan: Plan, books: Books, group: int, seen: Sequence[Seen]) -> list[Told]:
    """The rows of a plan in flat order, each with its share of what the lanes saw."""
    rows, at, place = [], 0, 0
    size = books.groups[group].block_size
    for lane, look in zip(plan.lanes, seen, strict=True):
        for lane_row in range(lane.rows):
            work, read = plan.work[at], look.positions.shape[-1]
            blocks = torch.tensor(books.blocks[group][key_of(work)], dtype=torch.int64)
            slots = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten()[:read]
            padding = slots.new_full((read - len(slots),), EMPTY_BLOCK * size)
            slots = torch.cat((slots, padding))
            meant = books.positions[group].view(-1)[slots]
            rows.append(Told(key_of(work), work.start, work.count, place, lane_row, group, look, slots, meant))
            at, place = at + 1, place + work.count
    return rows
