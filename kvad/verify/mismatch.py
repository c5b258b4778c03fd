"""One row in one layer of one step: the memory's numbers beside the judge's, and the first place where they differ.

What every attention layer was given and saw, beside what the host meant it to see.

:class:`Watched` stands between a model and any memory; its views hand every call on and show it to a listener.
:class:`Books` keeps, from the plans alone, which position lies in which slot: a second opinion on the memory's
columns that no fault of the memory can touch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvad import cache, ops
from kvad.cache import CacheGroup
from kvad.cache.device import KVCache
from kvad.config import AttentionSpec
from kvad.engine.execution import ManagedCache
from kvad.engine.scheduling import SchedulerOutput
from kvad.model import NoCache, Transformer
from kvad.model_input import (
    NULL_BLOCK,
    AttentionParams,
    AttentionPattern,
    BlockOps,
    CacheProtocol,
    CacheView,
    ModelInput,
    TokenPositions,
)
from kvad.verify.replay import ReplayStream, SequenceKey, run_uncached, sequence_key


class AttentionCall(NamedTuple):
    """One layer in one step: ``q`` [T, H, D], ``k`` [T, K, D] and ``v`` as the model gave them, not yet rotated, and
    per lane what the memory attended with."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    score: AttentionParams
    seen: tuple[ops.sub_batch.AttentionTrace, ...]


CallListener = Callable[[AttentionCall], None]


class RecordingCache:
    """A memory whose calls are shown to ``listener``.  Its maker must let the memory's probe be :meth:`probe`."""

    def __init__(self, listener: CallListener) -> None:
        self.inner: CacheProtocol | None = None
        self.listener = listener
        self._seen: list[ops.sub_batch.AttentionTrace] = []

    def attention_hook(self, seen: ops.sub_batch.AttentionTrace) -> None:
        self._seen.append(seen)

    def open(self, step: ModelInput) -> Sequence[CacheView]:
        assert self.inner is not None
        return [_RecordingView(self, layer, view) for layer, view in enumerate(self.inner.open(step))]

    def call(
        self, layer: int, view: CacheView, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams
    ) -> Tensor:
        self._seen.clear()
        out = view.attend(q, k, v, score)
        if k is not None and v is not None:
            self.listener(AttentionCall(layer, q, k, v, score, tuple(self._seen)))
        return out


class RecordingKVCache(RecordingCache):
    """The same around a cache, whose moves go through."""

    def __init__(self, listener: CallListener) -> None:
        super().__init__(listener)
        self.cache: ManagedCache | None = None

    def attach(self, cache: ManagedCache) -> RecordingKVCache:
        self.inner = self.cache = cache
        return self

    def apply(self, moves: BlockOps) -> None:
        assert self.cache is not None
        self.cache.apply(moves)

    def tensors(self) -> list[Tensor]:
        return [] if self.cache is None else self.cache.tensors()


class _RecordingView:
    def __init__(self, watched: RecordingCache, layer: int, view: CacheView) -> None:
        self._watched, self._layer, self._view = watched, layer, view

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams) -> Tensor:
        return self._watched.call(self._layer, self._view, q, k, v, score)

    def write(self, k: Tensor, v: Tensor) -> None:
        self._view.write(k, v)


# ---------------------------------------------------------------- the judge


@dataclass(frozen=True)
class RecordedLayer:
    """One layer of one whole row without a cache.  T tokens: ``q`` [T, H, D], ``k`` [K, T, D] rotated, ``raw_q``
    [T, H, D], ``raw_k`` [K, T, D] not rotated, ``v`` [K, T, Dv], ``scores`` [H, T, T], ``out`` [T, H, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    raw_q: Tensor
    raw_k: Tensor
    scores: Tensor
    out: Tensor
    score: AttentionParams


def reference_layers(
    model: Transformer,
    stream: ReplayStream,
    sample: int,
    specs: Sequence[AttentionSpec] | None = None,
    exact: bool = False,
) -> list[RecordedLayer]:
    """Every layer of one row, computed whole; ``specs`` and ``exact``: as :class:`Fresh` judges a cache's policy."""
    layers: list[RecordedLayer] = []

    def keep(call: AttentionCall) -> None:
        (seen,) = call.seen
        raw_k = call.k.transpose(0, 1)
        layers.append(
            RecordedLayer(seen.q[0], seen.k[0], seen.v[0], call.q, raw_k, seen.scores[0], seen.out[0], call.score)
        )

    watched = RecordingCache(keep)
    watched.inner = NoCache(
        model.config, specs=specs, exact_rope=exact, kernel="reference", attention_hook=watched.attention_hook
    )
    run_uncached(model, stream.tokens(sample), stream.limit, watched, stream.source)
    return layers


# ---------------------------------------------------------------- the host's own books


class ExpectedLayout:
    """Per group of self-attention, the position that lies in every slot (-1: nothing), and the blocks of every row when
    last planned."""

    def __init__(self, placed: Sequence[CacheGroup]) -> None:
        self.groups = tuple(group for group in placed if not group.spec.is_cross_attention)
        self.positions = [
            torch.full((group.num_blocks, group.block_size), -1, dtype=torch.int64) for group in self.groups
        ]
        self.blocks: list[dict[SequenceKey, list[int]]] = [{} for _ in self.groups]

    def apply(self, plan: SchedulerOutput) -> None:
        """Write down a plan that is about to run."""
        where = torch.tensor([p for work in plan.scheduled for p in range(work.start, work.start + work.num_tokens)])
        for number, column in enumerate(self.positions):
            for block in plan.allocation.block_ops.clear[number]:
                column[block] = -1
            for source, target, kept in plan.allocation.block_ops.copy[number]:
                column[target, :kept] = column[source, :kept]
                column[target, kept:] = -1
            column.view(-1)[torch.tensor(plan.allocation.slots[number])] = where
            for work, table in zip(plan.scheduled, plan.allocation.block_tables[number], strict=True):
                self.blocks[number][sequence_key(work)] = list(table)


class ExpectedRow(NamedTuple):
    """One row in one layer of one step: what it saw of a lane, and what the books say about it.

    ``start``, ``num_new``: its new tokens; ``place``: where they begin in the step's flat tokens; ``lane_row``: its row
    of the lane; ``group``: its cache group; ``slots`` [S]: the global slot read at every place of the lane's slots
    (block * block_size + offset); ``meant`` [S]: the position that lies there, by the books.
    """

    key: SequenceKey
    start: int
    num_new: int
    slot_index: int
    sub_batch_row: int
    group: int
    seen: ops.sub_batch.AttentionTrace
    slots: Tensor
    expected: Tensor


def expected_rows(
    plan: SchedulerOutput, books: ExpectedLayout, group: int, seen: Sequence[ops.sub_batch.AttentionTrace]
) -> list[ExpectedRow]:
    """The rows of a plan in flat order, each with its share of what the lanes saw."""
    rows, at, place = [], 0, 0
    size = books.groups[group].block_size
    for lane, look in zip(plan.sub_batches, seen, strict=True):
        for lane_row in range(lane.num_seqs):
            work, read = plan.scheduled[at], look.positions.shape[-1]
            blocks = torch.tensor(books.blocks[group][sequence_key(work)], dtype=torch.int64)
            slots = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten()[:read]
            padding = slots.new_full((read - len(slots),), NULL_BLOCK * size)
            slots = torch.cat((slots, padding))
            meant = books.positions[group].view(-1)[slots]
            rows.append(
                ExpectedRow(sequence_key(work), work.start, work.num_tokens, place, lane_row, group, look, slots, meant)
            )
            at, place = at + 1, place + work.num_tokens
    return rows


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
            coarsest = max(cache.quantization.get_format(name).eps for name in world.stored)
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
