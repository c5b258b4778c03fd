"""Memories that are broken on purpose, each in one way: what ``kvad verify --break`` puts in place of the real one.

Every fault is made from outside, through what Memory already shows (its groups, its stores, the step it opens, the
views it gives), so that nothing in ``kvad.cache`` knows of faults.  A fault is a mistake that people make, not noise:
its name, and what causes it in real life, are in :data:`kvad.verify.report.FAULTS`.

Some mistakes are none here: blocks in another order, or all slots of a block shifted alike, change nothing, because a
slot's position is written beside it.  The faults below are those that this does not forgive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvad import ops
from kvad.cache import CacheConfig, CacheGroup, build_groups
from kvad.cache.device import KVCache
from kvad.config import ModelConfig, RopeConfig, attention_specs
from kvad.errors import UsageError, suggest
from kvad.model import Transformer
from kvad.model_input import NULL_BLOCK, AttentionParams, CacheView, ModelInput, SlotMapping, SubBatch
from kvad.verify.report import FAULTS, UNKNOWN_FAULT

LOWER_LEVEL_FAULTS = {"float64": "float32", "float32": "bfloat16", "float16": "bfloat16"}


def check_fault_name(fault: str, config: ModelConfig, cache: CacheConfig) -> None:
    """UsageError: no such fault, or one that this model or cache cannot have."""
    known = [name for name in FAULTS if name != UNKNOWN_FAULT]
    if fault not in known:
        raise UsageError(f"no fault is called {fault!r}", suggest(fault, known))
    if config.decoder is None:
        raise UsageError("an encoder keeps nothing: it has no cache to break")
    layers = [config.stack.layer_config(i).attention for i in range(config.stack.num_layers)]
    if fault == "rotation" and not any(isinstance(mixer.position, RopeConfig) for mixer in layers):
        raise UsageError("--break rotation: no layer of this model rotates its keys", "try --break position")
    if fault == "position" and config.embedding.position is None and all(mixer.position is None for mixer in layers):
        raise UsageError("--break position: this model has no positions to be wrong", "try --break cursor")
    if fault == "mask" and cache.prefill_chunk_size == 1:
        raise UsageError("--break mask: with --chunk 1 no key lies ahead of a query", "give --chunk 2 or more")
    if fault == "layer" and _first_shared_layers(build_groups(attention_specs(config), cache)) is None:
        raise UsageError("--break layer: no two layers of this model share a cache group", "try --break table")


def inject_cache_fault(
    fault: str | None,
    placed: Sequence[CacheGroup],
    probe: ops.sub_batch.AttentionHook | None = None,
    *,
    rotate: Literal["write", "read"] = "write",
    exact: bool = False,
) -> KVCache:
    """A real Memory, or one with ``fault``; ``position`` leaves it whole, see :func:`hurt_model`."""
    make = partial(KVCache, attention_hook=probe, rope_at=rotate, exact_rope=exact)
    if fault == "mask":
        seeing = [group._replace(spec=group.spec._replace(causal=False)) for group in placed]
        return make(seeing)
    if fault == "dtype" and all(group.key_format in LOWER_LEVEL_FAULTS for group in placed):
        lower = {
            name: LOWER_LEVEL_FAULTS.get(name, name)
            for group in placed
            for name in (group.key_format, group.value_format)
        }
        return make([g._replace(key_format=lower[g.key_format], value_format=lower[g.value_format]) for g in placed])
    if fault in OP_FAULTS:
        return _MisplacingKVCache(OP_FAULTS[fault], placed, probe=probe, rotate=rotate, exact=exact)
    if fault in VIEW_FAULTS:
        return _ModifiedInputsKVCache(VIEW_FAULTS[fault], placed, probe=probe, rotate=rotate, exact=exact)
    memory = make(placed)
    if fault == "layer":
        pair = _first_shared_layers(placed)
        assert pair is not None
        memory.keys[pair[1]], memory.values[pair[1]] = memory.keys[pair[0]], memory.values[pair[0]]
    return memory


@contextmanager
def inject_model_fault(fault: str | None, model: Transformer) -> Iterator[None]:
    """``position``: while this is open, tokens that follow cached ones come at one position too early."""
    if fault != "position":
        yield
        return
    hook = model.register_forward_pre_hook(_shift_positions)
    try:
        yield
    finally:
        hook.remove()


def _shift_positions(_model: nn.Module, inputs: tuple[ModelInput, object]) -> tuple[ModelInput, object]:
    step, memory = inputs
    positions = step.positions.clone()
    for low, high in _row_spans(step.sub_batches):
        if step.slot_mappings and positions[low] > 0:
            positions[low:high] -= 1
    return step._replace(positions=positions), memory


def _first_shared_layers(placed: Sequence[CacheGroup]) -> tuple[int, int] | None:
    """The first two layers that lie in one group."""
    return next(((group.layers[0], group.layers[1]) for group in placed if len(group.layers) > 1), None)


def _row_spans(lanes: Sequence[SubBatch]) -> list[tuple[int, int]]:
    """(first, last + 1) of every row's new tokens in the flat ones."""
    spans = []
    for lane, (low, high) in zip(lanes, ops.sub_batch.sub_batch_spans(lanes), strict=True):
        spans += [(at, at + lane.num_new_tokens) for at in range(low, high, lane.num_new_tokens)]
    return spans


# ---------------------------------------------------------------- faults of where things lie


class _MisplacingKVCache(KVCache):
    """Opens every step with its places changed."""

    def __init__(
        self,
        change: Callable[[SlotMapping, CacheGroup, ModelInput], SlotMapping],
        placed: Sequence[CacheGroup],
        **how: Any,
    ) -> None:
        super().__init__(placed, **how)
        self._change = change

    def open(self, step: ModelInput) -> Sequence[CacheView]:
        places = tuple(
            self._change(place, group, step) if place.slots is not None else place
            for place, group in zip(step.slot_mappings, self.groups, strict=False)  # a source alone has none of these
        )
        return super().open(step._replace(slot_mappings=places))


def _write_one_slot_early(place: SlotMapping, group: CacheGroup, step: ModelInput) -> SlotMapping:
    """``cursor``: what follows cached tokens is written one slot early, over the last of them."""
    if place.slots is None:
        return place
    slots, size = place.slots.clone(), group.block_size
    tables = [table for lane in place.block_tables for table in lane.tolist()]
    for (low, high), table in zip(_row_spans(step.sub_batches), tables, strict=True):
        block, offset = divmod(int(slots[low]), size)
        before = table.index(block) - 1
        if step.positions[low] == 0 or (offset == 0 and before < 0 and group.max_blocks_per_seq > 1):
            continue
        last = slots[low:high].clone()
        slots[low] = block * size + offset - 1 if offset else table[before] * size + size - 1
        slots[low + 1 : high] = last[:-1]
    return place._replace(slots=slots)


def _wrong_block(place: SlotMapping, group: CacheGroup, _step: ModelInput) -> SlotMapping:
    """``table``: the first block is read from the last one's place; a row of one block reads the empty one."""
    tables = []
    for lane in place.block_tables:
        lane = lane.clone()
        for row in lane:
            count = int((row != NULL_BLOCK).sum())
            if count > 1:
                row[0] = row[count - 1]
            elif group.max_blocks_per_seq == 1:
                row[0] = NULL_BLOCK
        tables.append(lane)
    return place._replace(block_tables=tuple(tables))


def _next_rows_block(place: SlotMapping, _group: CacheGroup, _step: ModelInput) -> SlotMapping:
    """``neighbour``: the first block is read from the table of the next row of the step."""
    rows = [row for lane in place.block_tables for row in lane.tolist()]
    tables = tuple(lane.clone() for lane in place.block_tables)
    targets = [row for lane in tables for row in lane]
    for number, target in enumerate(targets):
        for other in (*rows[number + 1 :], *rows[:number]):
            if other[0] not in rows[number]:
                target[0] = other[0]
                break
    return place._replace(block_tables=tables)


# ---------------------------------------------------------------- faults of arithmetic


FaultFn = Callable[[Tensor, Tensor, AttentionParams, ModelInput], tuple[Tensor, Tensor, AttentionParams]]


class _ModifiedInputsKVCache(KVCache):
    """Changes q, k and the score on their way into every view."""

    def __init__(
        self,
        change: FaultFn,
        placed: Sequence[CacheGroup],
        **how: Any,
    ) -> None:
        super().__init__(placed, **how)
        self._change = change

    def open(self, step: ModelInput) -> Sequence[CacheView]:
        return [_ModifiedInputsView(view, step, self._change) for view in super().open(step)]


class _ModifiedInputsView:
    def __init__(self, view: CacheView, step: ModelInput, change: FaultFn) -> None:
        self._view, self._step, self._change = view, step, change

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams) -> Tensor:
        if k is not None:
            q, k, score = self._change(q, k, score, self._step)
        return self._view.attend(q, k, v, score)

    def write(self, k: Tensor, v: Tensor) -> None:
        self._view.write(k, v)


def _skip_key_rope(
    q: Tensor, k: Tensor, score: AttentionParams, step: ModelInput
) -> tuple[Tensor, Tensor, AttentionParams]:
    """``rotation``: queries are turned, keys are stored as the model gave them."""
    if score.rotary is None:
        return q, k, score
    return ops.rotary.RotaryCache(step.positions).rotate(q, score.rotary), k, score._replace(rotary=None)


def _scale_twice(
    q: Tensor, k: Tensor, score: AttentionParams, _step: ModelInput
) -> tuple[Tensor, Tensor, AttentionParams]:
    """``scale``: divided by sqrt(head dim) once more."""
    return q, k, score._replace(scale=score.scale / max(k.shape[-1], 2) ** 0.5)


def _round_keys_to_8_bits(
    q: Tensor, k: Tensor, score: AttentionParams, _step: ModelInput
) -> tuple[Tensor, Tensor, AttentionParams]:
    """``dtype`` where no store is coarser: keys through eight bits."""
    return q, k.to(torch.float8_e5m2).to(k.dtype), score


OP_FAULTS = {"cursor": _write_one_slot_early, "table": _wrong_block, "neighbour": _next_rows_block}
VIEW_FAULTS = {"rotation": _skip_key_rope, "scale": _scale_twice, "dtype": _round_keys_to_8_bits}
