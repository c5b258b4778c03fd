"""Comparison of one sequence in one layer and step with the reference, and the first index that differs.

``RecordingCache`` wraps any cache: its views pass every call on and report it to a listener.
``ExpectedLayout`` derives from the scheduler's output alone which position is in which slot, independently of
the cache's position tensors, so no fault of the cache can change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad import cache as cache_lib
from kvad import ops
from kvad.cache import CacheGroup
from kvad.cache.device import KVCache
from kvad.config import AttentionSpec
from kvad.engine.scheduling import ScheduledSequence, SchedulerOutput, TokenSequence
from kvad.model import NoCache, Transformer
from kvad.model_input import NULL_BLOCK, AttentionParams, BlockOps, CacheView, ModelInput, TokenPositions, WrappedView
from kvad.verify.reference_model import ReferenceModel, WholeSequence
from kvad.verify.replay import ReplayStream, SequenceKey


class AttentionCall(NamedTuple):
    """One layer in one step: the model's tensors, not yet rotated; a convolution's inputs are its q, k and v."""

    layer: int
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, K, D]
    v: Tensor  # [T, K, Dv]
    params: AttentionParams
    seen: tuple[ops.sub_batch.AttentionTrace, ...]  # per sub-batch what the cache attended with


class RecordingCache:
    """A cache that reports the calls of ``inner``, whose attention hook must be ``seen.append``, to ``listener``."""

    def __init__(self, listener: Callable[[AttentionCall], None]) -> None:
        self.listener = listener
        self.seen: list[ops.sub_batch.AttentionTrace] = []
        self.inner: Any = None

    def wrap(self, inner: Any) -> RecordingCache:
        """Set the inner cache and return this one."""
        self.inner = inner
        return self

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        return [_RecordingView(self, layer, view) for layer, view in enumerate(self.inner.open(model_input))]

    def apply(self, block_ops: BlockOps) -> None:
        self.inner.apply(block_ops)

    def tensors(self) -> list[Tensor]:
        return list(self.inner.tensors())


@dataclass
class _RecordingView(WrappedView):
    recorder: RecordingCache
    layer: int
    view: CacheView

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        self.recorder.seen.clear()
        out = self.view.attend(q, k, v, params)
        if k is not None and v is not None:
            self.recorder.listener(_on_host(AttentionCall(self.layer, q, k, v, params, tuple(self.recorder.seen))))
        return out

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        self.recorder.seen.clear()
        out, inputs = self.view.convolve(x, kernel), x.unsqueeze(1)
        params, seen = AttentionParams(scale=1.0), tuple(self.recorder.seen)
        self.recorder.listener(_on_host(AttentionCall(self.layer, inputs, inputs, inputs, params, seen)))
        return out


def _on_host(value: Any) -> Any:
    """Copy the tensors of nested tuples to the host."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, tuple):
        parts = map(_on_host, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


class RecordedLayer(NamedTuple):
    """One layer of one whole sequence of T tokens without a cache."""

    q: Tensor  # [T, H, D] rotated
    k: Tensor  # [K, T, D] rotated
    v: Tensor  # [K, T, Dv]
    raw_q: Tensor  # [T, H, D]
    raw_k: Tensor  # [K, T, D]
    out: Tensor  # [T, H, Dv]
    params: AttentionParams


def reference_layers(
    model: ReferenceModel, stream: ReplayStream, sample: int, specs: Sequence[AttentionSpec], exact: bool
) -> list[RecordedLayer]:
    """Record every layer of one sequence without a cache; ``specs`` and ``exact`` as in ``NoCache``."""
    layers: list[RecordedLayer] = []

    def record(call: AttentionCall) -> None:
        (seen,) = call.seen
        raw_k = call.k.transpose(0, 1)
        layers.append(RecordedLayer(seen.q[0], seen.k[0], seen.v[0], call.q, raw_k, seen.out[0], call.params))

    recorder = RecordingCache(record)
    recorder.wrap(
        NoCache(model.config, specs=specs, exact_rope=exact, kernel="reference", attention_hook=recorder.seen.append)
    )
    model.whole_logits([WholeSequence(stream.tokens(sample), stream.source)], recorder, last_only=True)
    return layers


class ExpectedLayout:
    """Expected position of every slot per group (-1: empty), and the latest block tables by (stream, sample)."""

    def __init__(self, groups: Sequence[CacheGroup], key: Callable[[TokenSequence], SequenceKey]) -> None:
        self.key = key
        self.groups = tuple(group for group in groups if not group.spec.is_cross_attention)
        self.positions = [
            torch.full((group.num_blocks, group.block_size), -1, dtype=torch.int64) for group in self.groups
        ]
        self.blocks: list[dict[SequenceKey, list[int]]] = [{} for _ in self.groups]
        self.loaded: list[set[int]] = [set() for _ in self.groups]  # blocks that were read from the block store

    def apply(self, output: SchedulerOutput) -> None:
        """Apply a scheduler output that is about to run."""
        spans = (range(work.start, work.start + work.num_tokens) for work in output.scheduled)
        new_positions = torch.tensor([position for span in spans for position in span])
        for group, positions in enumerate(self.positions):
            self.loaded[group] -= set(output.allocation.block_ops.clear[group])
            for _, blocks in output.allocation.block_ops.load:
                self.loaded[group].update(blocks[group])
            for block in output.allocation.block_ops.clear[group]:
                positions[block] = -1
            for source, target, num_slots in output.allocation.block_ops.copy[group]:
                positions[target, :num_slots] = positions[source, :num_slots]
                positions[target, num_slots:] = -1
            positions.view(-1)[torch.tensor(output.allocation.slots[group])] = new_positions
            slots, size = iter(output.allocation.slots[group]), positions.shape[1]
            for scheduled, table in zip(output.scheduled, output.allocation.block_tables[group], strict=True):
                self.blocks[group][self.key(scheduled.sequence)] = list(table)
                first, *_ = (next(slots) for _ in range(scheduled.num_tokens))
                for index, block in enumerate(table):
                    if block in self.loaded[group]:  # tables of windowed groups begin at a later position
                        low = (scheduled.start // size + index - table.index(first // size)) * size
                        positions[block] = torch.arange(low, low + size)


GROSS_ERROR = 1e3  # times the largest element: only an overflow


class ComparisonContext(NamedTuple):
    """Everything that a mismatch is compared with."""

    model: Transformer
    reference_model: ReferenceModel
    streams: Sequence[ReplayStream]
    reference: Mapping[SequenceKey, list[RecordedLayer]]
    kv_cache: KVCache
    expected_layout: ExpectedLayout
    close: Sequence[float]  # per layer, tolerance relative to the reference's largest element
    stored: tuple[str, str]  # formats of keys and values
    lossy: bool  # ignore what follows from rounding to them


def first_difference(have: Tensor, true: Tensor, close: float, dim: int) -> tuple[int, float] | None:
    """Return (first index along ``dim`` that differs by more than ``close`` x true's max, largest |difference|)."""
    if not true.numel():
        return None
    finite = true[true.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    gap = (have - true).abs().masked_fill(have == true, 0.0).nan_to_num(nan=math.inf)
    others = [d for d in range(gap.dim()) if d != dim % gap.dim()]
    far = (gap.amax(dim=others) if others else gap) > close * max(scale, 1e-30)
    return (int(far.int().argmax()), float(gap.max())) if bool(far.any()) else None


def relative_gap(plain: RecordedLayer, reference: RecordedLayer) -> float:
    """Return the largest difference of a layer's q, k, v and output, relative to the reference's largest element."""
    pairs = zip((*plain[:3], plain.out), (*reference[:3], reference.out), strict=True)
    return max(float((have - true).abs().max() / true.abs().max().clamp(min=1e-30)) for have, true in pairs)


class Mismatch:
    """One sequence in one layer and step, cached and uncached.

    ``q`` [L, H, D], ``k`` [K, S, D], ``v``, ``positions`` [S], ``scores`` [H, L, S] and ``out`` are what the cache
    attended with; ``reference`` is the whole sequence without a cache. S' below are the visible slots: those that
    some query of this sequence may see by the expected layout.
    """

    def __init__(
        self,
        context: ComparisonContext,
        call: AttentionCall,
        scheduled: ScheduledSequence,
        seen: ops.sub_batch.AttentionTrace,
        r: int,
        first_token: int,
    ) -> None:
        """Compare row ``r`` of ``seen``, whose first new token is ``first_token`` in the step's flat tokens."""
        self.context, self.call, self.first_token = context, call, first_token
        self.key, self.start = context.expected_layout.key(scheduled.sequence), scheduled.start
        self.new = torch.arange(scheduled.start, scheduled.start + scheduled.num_tokens)
        self.kv_cache, self.close = context.kv_cache, context.close[call.layer]
        if context.lossy:
            coarsest = max(cache_lib.quantization.get_format(name).eps for name in context.stored)
            self.close = max(self.close, 2 * coarsest) if call.layer == 0 else GROSS_ERROR
        self.reference = context.reference[self.key][call.layer]
        self.q, self.k, self.v = seen.q[r], seen.k[r], seen.v[r]
        self.positions, self.scores, self.out = seen.positions[r], seen.scores[r], seen.out[r]
        layout = context.expected_layout
        self.group_index = next(index for index, group in enumerate(layout.groups) if call.layer in group.layers)
        self.group = layout.groups[self.group_index]
        size, blocks = self.group.block_size, torch.tensor(layout.blocks[self.group_index][self.key])
        slots = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten()[: len(self.positions)]
        num_padding = len(self.positions) - len(slots)
        self.slots = F.pad(slots, (0, num_padding), value=NULL_BLOCK * size)  # [S] block * block_size + offset
        self.expected = layout.positions[self.group_index].view(-1)[self.slots]  # [S] the position expected there
        self.pattern = self.group.spec.pattern
        self.allowed = self.pattern.visible(TokenPositions(self.new), TokenPositions(self.expected))  # [L, S]
        self.visible_slots = self.allowed.any(dim=0).nonzero().squeeze(-1)  # [S']
        self.visible_positions = self.expected[self.visible_slots]

    def same(self, have: Tensor, true: Tensor, dim: int) -> bool:
        return first_difference(have, true, self.close, dim) is None

    def first_difference(self) -> tuple[str, int, float] | None:
        """Return (tensor, position of the query, size) of the first difference, or None."""
        start, new = self.start, self.new
        query = None if self.context.lossy else first_difference(self.q, self.reference.q[new], self.close, 0)
        if query is not None:
            return "q", start + query[0], query[1]
        for tensor, have, true in (("k", self.k, self.reference.k), ("v", self.v, self.reference.v)):
            read, expected = have[:, self.visible_slots], true[:, self.visible_positions]
            difference = first_difference(read, expected, self.close, 1)
            if difference is not None:
                first_reader = self.allowed[:, self.visible_slots[difference[0]]].int().argmax()
                return tensor, start + int(first_reader), difference[1]
        if self.context.lossy:
            return None
        out = first_difference(self.out, self.reference.out[new], self.close, 0)
        if out is not None:
            return "the attention output", start + out[0], out[1]
        wrong = (self.visible() != self.allowed).any(dim=-1)
        if bool(wrong.any()) or self.missing() is not None:
            return "the set of visible keys", start + int(wrong.int().argmax()), 0.0
        return None

    def visible(self) -> Tensor:
        """Return [L, S]: which slots every query could see."""
        return (self.scores > -math.inf).any(dim=0)

    def missing(self) -> int | None:
        """Return a position that a query may see but no slot of the sequence's table holds, by the expected layout."""
        all_positions = torch.arange(self.start + len(self.new))
        seen = self.pattern.visible(TokenPositions(self.new), TokenPositions(all_positions)).any(dim=0)
        seen[self.visible_positions] = False
        return int(seen.int().argmax()) if bool(seen.any()) else None
