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

from kvad.cache.sizing import CacheGroup
from kvad.config import AttentionSpec
from kvad.engine.runner import ManagedCache
from kvad.engine.scheduler import SchedulerOutput
from kvad.lab.replay import ReplayStream, SequenceKey, run_uncached, sequence_key
from kvad.model.fresh import NoCache
from kvad.model.transformer import Transformer
from kvad.ops.lanes import AttentionTrace
from kvad.step import NULL_BLOCK, AttentionParams, BlockOps, CacheProtocol, CacheView, ModelInput

__all__ = [
    "ExpectedLayout",
    "AttentionCall",
    "RecordedLayer",
    "ExpectedRow",
    "RecordingCache",
    "RecordingKVCache",
    "reference_layers",
    "expected_rows",
]


class AttentionCall(NamedTuple):
    """One layer in one step: ``q`` [T, H, D], ``k`` [T, K, D] and ``v`` as the model gave them, not yet rotated, and
    per lane what the memory attended with."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    score: AttentionParams
    seen: tuple[AttentionTrace, ...]


CallListener = Callable[[AttentionCall], None]


class RecordingCache:
    """A memory whose calls are shown to ``listener``.  Its maker must let the memory's probe be :meth:`probe`."""

    def __init__(self, listener: CallListener) -> None:
        self.inner: CacheProtocol | None = None
        self.listener = listener
        self._seen: list[AttentionTrace] = []

    def attention_hook(self, seen: AttentionTrace) -> None:
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
    seen: AttentionTrace
    slots: Tensor
    expected: Tensor


def expected_rows(
    plan: SchedulerOutput, books: ExpectedLayout, group: int, seen: Sequence[AttentionTrace]
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
