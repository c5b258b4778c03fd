"""Memories that are broken on purpose, each in one way: what ``kvad verify --break`` puts in place of the real one.

Every fault is made from outside, through what Memory already shows (its groups, its stores, the step it opens, the
views it gives), so that nothing in ``kvad.cache`` knows of faults.  A fault is a mistake that people make, not noise:
its name, and what causes it in real life, are in :data:`kvad.lab.findings.FAULTS`.

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

from kvad.cache.memory import Memory
from kvad.cache.sizing import CacheConfig, Group, groups
from kvad.config import ModelConfig, Rope, mixers
from kvad.errors import UsageError, nearest
from kvad.lab.findings import FAULTS, UNKNOWN
from kvad.model.transformer import Transformer
from kvad.ops.lanes import Probe, lane_spans
from kvad.ops.rotary import Angles
from kvad.step import EMPTY_BLOCK, Lane, Place, Score, Step, View

__all__ = ["check_fault", "hurt_memory", "hurt_model"]

LOWER = {"float64": "float32", "float32": "bfloat16", "float16": "bfloat16"}


def check_fault(fault: str, config: ModelConfig, cache: CacheConfig) -> None:
    """UsageError: no such fault, or one that this model or cache cannot have."""
    known = [name for name in FAULTS if name != UNKNOWN]
    if fault not in known:
        raise UsageError(f"no fault is called {fault!r}", nearest(fault, known))
    if config.decoder is None:
        raise UsageError("an encoder keeps nothing: it has no cache to break")
    layers = [config.stack.layer(i).mixer for i in range(config.stack.layers)]
    if fault == "rotation" and not any(isinstance(mixer.position, Rope) for mixer in layers):
        raise UsageError("--break rotation: no layer of this model rotates its keys", "try --break position")
    if fault == "position" and config.embed.position is None and all(mixer.position is None for mixer in layers):
        raise UsageError("--break position: this model has no positions to be wrong", "try --break cursor")
    if fault == "mask" and cache.chunk == 1:
        raise UsageError("--break mask: with --chunk 1 no key lies ahead of a query", "give --chunk 2 or more")
    if fault == "layer" and _aliased(groups(mixers(config), cache)) is None:
        raise UsageError("--break layer: no two layers of this model share a cache group", "try --break table")


def hurt_memory(
    fault: str | None,
    placed: Sequence[Group],
    probe: Probe | None = None,
    *,
    rotate: Literal["write", "read"] = "write",
    exact: bool = False,
) -> Memory:
    """A real Memory, or one with ``fault``; ``position`` leaves it whole, see :func:`hurt_model`."""
    make = partial(Memory, probe=probe, rotate=rotate, exact=exact)
    if fault == "mask":
        seeing = [group._replace(mixer=group.mixer._replace(causal=False)) for group in placed]
        return make(seeing)
    if fault == "dtype" and all(group.keys in LOWER for group in placed):
        lower = {name: LOWER.get(name, name) for group in placed for name in (group.keys, group.values)}
        return make([g._replace(keys=lower[g.keys], values=lower[g.values]) for g in placed])
    if fault in STEPS:
        return _Misplacing(STEPS[fault], placed, probe=probe, rotate=rotate, exact=exact)
    if fault in VIEWS:
        return _Miscounting(VIEWS[fault], placed, probe=probe, rotate=rotate, exact=exact)
    memory = make(placed)
    if fault == "layer":
        pair = _aliased(placed)
        assert pair is not None
        memory.keys[pair[1]], memory.values[pair[1]] = memory.keys[pair[0]], memory.values[pair[0]]
    return memory


@contextmanager
def hurt_model(fault: str | None, model: Transformer) -> Iterator[None]:
    """``position``: while this is open, tokens that follow cached ones come at one position too early."""
    if fault != "position":
        yield
        return
    hook = model.register_forward_pre_hook(_too_early)
    try:
        yield
    finally:
        hook.remove()


def _too_early(_model: nn.Module, inputs: tuple[Step, object]) -> tuple[Step, object]:
    step, memory = inputs
    positions = step.positions.clone()
    for low, high in _row_spans(step.lanes):
        if step.places and positions[low] > 0:
            positions[low:high] -= 1
    return step._replace(positions=positions), memory


def _aliased(placed: Sequence[Group]) -> tuple[int, int] | None:
    """The first two layers that lie in one group."""
    return next(((group.layers[0], group.layers[1]) for group in placed if len(group.layers) > 1), None)


def _row_spans(lanes: Sequence[Lane]) -> list[tuple[int, int]]:
    """(first, last + 1) of every row's new tokens in the flat ones."""
    spans = []
    for lane, (low, high) in zip(lanes, lane_spans(lanes), strict=True):
        spans += [(at, at + lane.new) for at in range(low, high, lane.new)]
    return spans


# ---------------------------------------------------------------- faults of where things lie


class _Misplacing(Memory):
    """Opens every step with its places changed."""

    def __init__(
        self,
        change: Callable[[Place, Group, Step], Place],
        placed: Sequence[Group],
        **how: Any,
    ) -> None:
        super().__init__(placed, **how)
        self._change = change

    def open(self, step: Step) -> Sequence[View]:
        places = tuple(
            self._change(place, group, step) if place.slots is not None else place
            for place, group in zip(step.places, self.groups, strict=False)  # a source alone has none of these
        )
        return super().open(step._replace(places=places))


def _lagging(place: Place, group: Group, step: Step) -> Place:
    """``cursor``: what follows cached tokens is written one slot early, over the last of them."""
    if place.slots is None:
        return place
    slots, size = place.slots.clone(), group.block_size
    tables = [table for lane in place.tables for table in lane.tolist()]
    for (low, high), table in zip(_row_spans(step.lanes), tables, strict=True):
        block, offset = divmod(int(slots[low]), size)
        before = table.index(block) - 1
        if step.positions[low] == 0 or (offset == 0 and before < 0 and group.blocks_per_row > 1):
            continue
        last = slots[low:high].clone()
        slots[low] = block * size + offset - 1 if offset else table[before] * size + size - 1
        slots[low + 1 : high] = last[:-1]
    return place._replace(slots=slots)


def _wrong_block(place: Place, group: Group, _step: Step) -> Place:
    """``table``: the first block is read from the last one's place; a row of one block reads the empty one."""
    tables = []
    for lane in place.tables:
        lane = lane.clone()
        for row in lane:
            count = int((row != EMPTY_BLOCK).sum())
            if count > 1:
                row[0] = row[count - 1]
            elif group.blocks_per_row == 1:
                row[0] = EMPTY_BLOCK
        tables.append(lane)
    return place._replace(tables=tuple(tables))


def _next_rows_block(place: Place, _group: Group, _step: Step) -> Place:
    """``neighbour``: the first block is read from the table of the next row of the step."""
    rows = [row for lane in place.tables for row in lane.tolist()]
    tables = tuple(lane.clone() for lane in place.tables)
    targets = [row for lane in tables for row in lane]
    for number, target in enumerate(targets):
        for other in (*rows[number + 1 :], *rows[:number]):
            if other[0] not in rows[number]:
                target[0] = other[0]
                break
    return place._replace(tables=tables)


# ---------------------------------------------------------------- faults of arithmetic


Change = Callable[[Tensor, Tensor, Score, Step], tuple[Tensor, Tensor, Score]]


class _Miscounting(Memory):
    """Changes q, k and the score on their way into every view."""

    def __init__(
        self,
        change: Change,
        placed: Sequence[Group],
        **how: Any,
    ) -> None:
        super().__init__(placed, **how)
        self._change = change

    def open(self, step: Step) -> Sequence[View]:
        return [_MiscountingView(view, step, self._change) for view in super().open(step)]


class _MiscountingView:
    def __init__(self, view: View, step: Step, change: Change) -> None:
        self._view, self._step, self._change = view, step, change

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: Score) -> Tensor:
        if k is not None:
            q, k, score = self._change(q, k, score, self._step)
        return self._view.attend(q, k, v, score)

    def write(self, k: Tensor, v: Tensor) -> None:
        self._view.write(k, v)


def _not_turned(q: Tensor, k: Tensor, score: Score, step: Step) -> tuple[Tensor, Tensor, Score]:
    """``rotation``: queries are turned, keys are stored as the model gave them."""
    if score.rotary is None:
        return q, k, score
    return Angles(step.positions).rotate(q, score.rotary), k, score._replace(rotary=None)


def _scaled_twice(q: Tensor, k: Tensor, score: Score, _step: Step) -> tuple[Tensor, Tensor, Score]:
    """``scale``: divided by sqrt(head dim) once more."""
    return q, k, score._replace(scale=score.scale / max(k.shape[-1], 2) ** 0.5)


def _rounded(q: Tensor, k: Tensor, score: Score, _step: Step) -> tuple[Tensor, Tensor, Score]:
    """``dtype`` where no store is coarser: keys through eight bits."""
    return q, k.to(torch.float8_e5m2).to(k.dtype), score


STEPS = {"cursor": _lagging, "table": _wrong_block, "neighbour": _next_rows_block}
VIEWS = {"rotation": _not_turned, "scale": _scaled_twice, "dtype": _rounded}
