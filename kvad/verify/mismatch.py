"""Comparison of one sequence in one layer and step with the reference, and the first index that differs.

``RecordingCache`` wraps any cache: its views pass every call on and report it to a listener.
``ExpectedLayout`` derives from the scheduler's output alone which position is in which slot, independently of
the cache's position tensors, so no fault of the cache can change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvad import cache as cache_lib
from kvad import ops
from kvad.cache import CacheGroup
from kvad.cache.device import KVCache
from kvad.config import AttentionSpec
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

CacheT = TypeVar("CacheT", bound=CacheProtocol)


class AttentionCall(NamedTuple):
    """One layer in one step: the model's tensors, not yet rotated."""

    layer: int
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, K, D]
    v: Tensor  # [T, K, D]
    params: AttentionParams
    seen: tuple[ops.sub_batch.AttentionTrace, ...]  # per sub-batch what the cache attended with


class RecordingCache(Generic[CacheT]):
    """A cache that reports its calls to ``listener``; ``build`` makes the inner cache from an attention hook."""

    def __init__(
        self, listener: Callable[[AttentionCall], None], build: Callable[[ops.sub_batch.AttentionHook], CacheT]
    ) -> None:
        self.listener = listener
        self.seen: list[ops.sub_batch.AttentionTrace] = []
        self.inner = build(self.seen.append)

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        return [_RecordingView(self, layer, view) for layer, view in enumerate(self.inner.open(model_input))]


class RecordingKVCache(RecordingCache[KVCache]):
    """The same for a KVCache; block operations are passed on."""

    def apply(self, block_ops: BlockOps) -> None:
        self.inner.apply(block_ops)

    def tensors(self) -> list[Tensor]:
        return self.inner.tensors()


class _RecordingView:
    def __init__(self, recorder: RecordingCache[Any], layer: int, view: CacheView) -> None:
        self._recorder, self._layer, self._view = recorder, layer, view

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        seen = self._recorder.seen
        seen.clear()
        out = self._view.attend(q, k, v, params)
        if k is not None and v is not None:
            self._recorder.listener(AttentionCall(self._layer, q, k, v, params, tuple(seen)))
        return out

    def write(self, k: Tensor, v: Tensor) -> None:
        self._view.write(k, v)


# ---------------------------------------------------------------- the reference


class RecordedLayer(NamedTuple):
    """One layer of one whole sequence of T tokens without a cache."""

    q: Tensor  # [T, H, D] rotated
    k: Tensor  # [K, T, D] rotated
    v: Tensor  # [K, T, Dv]
    raw_q: Tensor  # [T, H, D]
    raw_k: Tensor  # [K, T, D]
    scores: Tensor  # [H, T, T]
    out: Tensor  # [T, H, Dv]
    params: AttentionParams


def reference_layers(
    model: Transformer,
    stream: ReplayStream,
    sample: int,
    specs: Sequence[AttentionSpec] | None = None,
    exact: bool = False,
) -> list[RecordedLayer]:
    """Record every layer of one sequence without a cache; ``specs`` and ``exact`` as in ``NoCache``."""
    layers: list[RecordedLayer] = []

    def record(call: AttentionCall) -> None:
        (seen,) = call.seen
        raw_k = call.k.transpose(0, 1)
        layers.append(
            RecordedLayer(seen.q[0], seen.k[0], seen.v[0], call.q, raw_k, seen.scores[0], seen.out[0], call.params)
        )

    def build(hook: ops.sub_batch.AttentionHook) -> NoCache:
        return NoCache(model.config, specs=specs, exact_rope=exact, kernel="reference", attention_hook=hook)

    run_uncached(model, stream.tokens(sample), stream.limit, RecordingCache(record, build), stream.source)
    return layers


# ---------------------------------------------------------------- expected layout


class ExpectedLayout:
    """Expected position of every slot per group (-1: empty), and the latest block tables."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.groups = tuple(group for group in groups if not group.spec.is_cross_attention)
        self.positions = [
            torch.full((group.num_blocks, group.block_size), -1, dtype=torch.int64) for group in self.groups
        ]
        self.blocks: list[dict[SequenceKey, list[int]]] = [{} for _ in self.groups]

    def apply(self, output: SchedulerOutput) -> None:
        """Apply a scheduler output that is about to run."""
        spans = (range(work.start, work.start + work.num_tokens) for work in output.scheduled)
        new_positions = torch.tensor([position for span in spans for position in span])
        for group, positions in enumerate(self.positions):
            for block in output.allocation.block_ops.clear[group]:
                positions[block] = -1
            for source, target, num_slots in output.allocation.block_ops.copy[group]:
                positions[target, :num_slots] = positions[source, :num_slots]
                positions[target, num_slots:] = -1
            positions.view(-1)[torch.tensor(output.allocation.slots[group])] = new_positions
            for scheduled, table in zip(output.scheduled, output.allocation.block_tables[group], strict=True):
                self.blocks[group][sequence_key(scheduled)] = list(table)


class ExpectedRow(NamedTuple):
    """One sequence in one layer and step: what it read, and what the expected layout contains."""

    key: SequenceKey
    start: int  # first new position
    num_new: int
    slot_index: int  # index of the first new token in the step's flat tokens
    sub_batch_row: int
    group: int
    seen: ops.sub_batch.AttentionTrace
    slots: Tensor  # [S] global slot (block * block_size + offset) of every slot that the sub-batch read
    expected: Tensor  # [S] the position expected there


def expected_rows(
    output: SchedulerOutput, layout: ExpectedLayout, group: int, seen: Sequence[ops.sub_batch.AttentionTrace]
) -> list[ExpectedRow]:
    """Build the rows of a scheduler output in flat order, each with its part of what the sub-batches read."""
    rows, at, slot_index = [], 0, 0
    size = layout.groups[group].block_size
    for sub_batch, trace in zip(output.sub_batches, seen, strict=True):
        num_read_slots = trace.positions.shape[-1]
        for sub_batch_row in range(sub_batch.num_seqs):
            key, start, num_new = (
                sequence_key(output.scheduled[at]),
                output.scheduled[at].start,
                sub_batch.num_new_tokens,
            )
            blocks = torch.tensor(layout.blocks[group][key], dtype=torch.int64)
            slots = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten()[:num_read_slots]
            padding = slots.new_full((num_read_slots - len(slots),), NULL_BLOCK * size)
            slots = torch.cat((slots, padding))
            expected = layout.positions[group].view(-1)[slots]
            rows.append(ExpectedRow(key, start, num_new, slot_index, sub_batch_row, group, trace, slots, expected))
            at, slot_index = at + 1, slot_index + num_new
    return rows


GROSS_ERROR = 1e3  # times the largest element: only an overflow


class ComparisonContext(NamedTuple):
    """Everything that a mismatch is compared with."""

    model: Transformer
    streams: Sequence[ReplayStream]
    reference: Mapping[SequenceKey, list[RecordedLayer]]
    kv_cache: KVCache
    expected_layout: ExpectedLayout
    close: float  # tolerance relative to the reference's largest element
    stored: tuple[str, str]  # formats of keys and values
    lossy: bool  # ignore what follows from rounding to them


class Difference(NamedTuple):
    """The first index along the compared dimension, and the largest |difference|."""

    at: int
    size: float


def first_difference(have: Tensor, true: Tensor, close: float, dim: int) -> Difference | None:
    """Find the first index along ``dim`` with a difference above ``close`` (relative to true's max)."""
    if not true.numel():
        return None
    finite = true[true.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    gap = (have - true).abs().masked_fill(have == true, 0.0).nan_to_num(nan=math.inf)
    others = [d for d in range(gap.dim()) if d != dim % gap.dim()]
    far = (gap.amax(dim=others) if others else gap) > close * max(scale, 1e-30)
    return Difference(int(far.int().argmax()), float(gap.max())) if bool(far.any()) else None


class Mismatch:
    """One sequence in one layer and step, cached and uncached.

    ``q`` [L, H, D], ``k`` [K, S, D], ``v``, ``positions`` [S], ``scores`` [H, L, S] and ``out`` are what the cache
    attended with; ``reference`` is the whole sequence without a cache. S' below are the visible slots: those that
    some query of this sequence may see by the expected layout.
    """

    def __init__(self, context: ComparisonContext, call: AttentionCall, row: ExpectedRow) -> None:
        self.context, self.call, self.row = context, call, row
        self.kv_cache, self.close = context.kv_cache, context.close
        if context.lossy:
            coarsest = max(cache_lib.quantization.get_format(name).eps for name in context.stored)
            self.close = max(self.close, 2 * coarsest) if call.layer == 0 else GROSS_ERROR
        self.reference = context.reference[row.key][call.layer]
        seen, r = row.seen, row.sub_batch_row
        self.q, self.k, self.v = seen.q[r], seen.k[r], seen.v[r]
        self.positions, self.scores, self.out = seen.positions[r], seen.scores[r], seen.out[r]
        self.new = torch.arange(row.start, row.start + row.num_new)
        self.group = context.expected_layout.groups[row.group]
        self.pattern = AttentionPattern.from_spec(self.group.spec)
        self.allowed = self.pattern.visible(TokenPositions(self.new), TokenPositions(row.expected))  # [L, S]
        self.visible_slots = self.allowed.any(dim=0).nonzero().squeeze(-1)  # [S']
        self.visible_positions = row.expected[self.visible_slots]

    def same(self, have: Tensor, true: Tensor, dim: int) -> bool:
        return first_difference(have, true, self.close, dim) is None

    # ------------------------------------------------------------ the first difference

    def first_difference(self) -> tuple[str, int, float] | None:
        """Return (tensor, position of the query, size) of the first difference, or None."""
        new, start = slice(self.row.start, self.row.start + self.row.num_new), self.row.start
        query = None if self.context.lossy else first_difference(self.q, self.reference.q[new], self.close, 0)
        if query is not None:
            return "q", start + query.at, query.size
        for tensor, have, true in (("k", self.k, self.reference.k), ("v", self.v, self.reference.v)):
            read, expected = have[:, self.visible_slots], true[:, self.visible_positions]
            difference = first_difference(read, expected, self.close, 1)
            if difference is not None:
                return tensor, self._first_reader(difference.at), difference.size
        if self.context.lossy:
            return None
        out = first_difference(self.out, self.reference.out[new], self.close, 0)
        if out is not None:
            return "the attention output", start + out.at, out.size
        wrong = (self.visible() != self.allowed).any(dim=-1)
        if bool(wrong.any()) or self.missing() is not None:
            return "the set of visible keys", start + int(wrong.int().argmax()), 0.0
        return None

    def _first_reader(self, index: int) -> int:
        """Return the first query that may see S'[index]."""
        return self.row.start + int(self.allowed[:, self.visible_slots[index]].int().argmax())

    def visible(self) -> Tensor:
        """Return [L, S]: which slots every query could see."""
        return (self.scores > -math.inf).any(dim=0)

    def missing(self) -> int | None:
        """Return a position that a query may see but no slot of the sequence's table holds, by the expected layout."""
        all_positions = torch.arange(self.row.start + self.row.num_new)
        seen = self.pattern.visible(TokenPositions(self.new), TokenPositions(all_positions)).any(dim=0)
        seen[self.visible_positions] = False
        return int(seen.int().argmax()) if bool(seen.any()) else None
