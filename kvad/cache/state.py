"""What a row leaves in a cache, on the host: its keys and values in the row's own order, in the formats they lie in.

:func:`take` copies it out of a memory; :class:`Laid` writes it into another one of the same model and policy, with
other blocks, another layout or on another device.  Nothing is decoded, so nothing is rounded: what comes back is, bit
for bit, what was there.  Of groups that take tokens, and of sources, the arrays are by slot ([m, K, width]; positions
[m]); of levels they are whole blocks, for blocks were packed and summed up whole, and so they need the same block size.
Bounds of blocks (``quest.py``) are made anew.

Never: a guess.  :func:`fit` says why a state cannot be used, or how much of it can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad.cache.memory import Memory
from kvad.cache.sizing import Group
from kvad.cache.standing import Laid as Lay
from kvad.cache.standing import Marks, Standing, lay, positions_of, reusable, slots_of
from kvad.step import Reach, Rotary

__all__ = ["Fitted", "Laid", "Part", "State", "about", "agreeing", "fit", "shapes", "take"]


class Part(NamedTuple):
    """One group's share.  ``about``: which group (:func:`about`); ``marks``: what it has of the row, where it takes
    tokens; ``used``: slots that are filled, of a level's blocks; ``arrays``: by "layer.kind.number" and "positions"."""

    about: Mapping[str, Any]
    marks: Marks
    used: int
    arrays: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class State:
    """``tokens``: those whose keys and values are here; ``source``: what the encoder read, where there is one.
    ``regime`` and ``salt``: as of ``cache/identity.py``.  ``home``: the engine that it was made in, or compared with.
    ``rotaries``: how the keys of layers that make summaries are rotated."""

    tokens: tuple[int, ...]
    source: tuple[int, ...] | None
    regime: str
    salt: str
    parts: tuple[Part, ...]
    rotaries: Mapping[int, Rotary]
    home: object = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for part in self.parts for array in part.arrays.values())


class Fitted(NamedTuple):
    """The first ``length`` tokens of a state as a ledger would hold them: per group that takes tokens how, and per
    level (blocks, slots that are filled)."""

    length: int
    lays: tuple[Lay, ...]
    below: tuple[tuple[int, int], ...]


def about(groups: Sequence[Group], number: int) -> dict[str, Any]:
    """What has to be equal of two groups, in words: their layers, what they see, and how they keep it.  ``blocks``: the
    size of a block, where that decides what is kept or read."""
    group = groups[number]
    mixer, level = group.mixer, group.level
    owner = group if level is None else groups[level.of]
    policy = owner.scored or owner.levels or group.chooses
    by_blocks = owner.levels is not None or group.chooses is not None
    role = "source" if mixer.cross else "tokens" if level is None else f"level {level.ratio}"
    return {
        "role": role,
        "layers": list(group.layers),
        "heads": [mixer.kv_heads, mixer.head_dim, mixer.value_dim],
        "sees": str(Reach.of(mixer)),
        "policy": "" if policy is None else str(policy),
        "formats": [group.keys, group.values],
        "blocks": group.block_size if by_blocks else 0,
    }


# ---------------------------------------------------------------- out of a memory


@torch.inference_mode()
def take(memory: Memory, standing: Standing, tokens: Sequence[int], *, regime: str, salt: str, home: object) -> State:
    """Copy a row out.  Its blocks may be handed on afterwards."""
    groups = memory.whole
    blocks = [*(where for _, _, where in standing.holds), *(where for _, where in standing.below), *standing.crossed]
    slots = [_slots_held(groups, number, standing) for number in range(len(blocks))]
    arrays: list[dict[str, Tensor]] = [{} for _ in blocks]
    for name, array in memory.copy_out(blocks, slots).items():
        number, _, kind = name.partition(".")
        arrays[int(number)][kind] = array
    marks = [each for each, _, _ in standing.holds] + [Marks()] * (len(blocks) - len(standing.holds))
    used = [0] * len(standing.holds) + [each for each, _ in standing.below] + [0] * len(standing.crossed)
    parts = tuple(Part(about(groups, i), marks[i], used[i], arrays[i]) for i in range(len(blocks)))
    return State(tuple(tokens), standing.source, regime, salt, parts, memory.folding(), home)


def _slots_held(groups: Sequence[Group], number: int, standing: Standing) -> Tensor | None:
    """Slots of a group in the order of a state; None: whole blocks."""
    group = groups[number]
    if group.level is not None:
        return None
    if group.mixer.cross:
        where = standing.crossed[number - len(standing.holds) - len(standing.below)]
        assert standing.source is not None
        return torch.tensor(_source_slots(group, where, len(standing.source)), dtype=torch.int64)
    marks, gap, blocks = standing.holds[number]
    return torch.tensor(slots_of(group, blocks, gap, marks, standing.length), dtype=torch.int64)


def _source_slots(group: Group, blocks: Sequence[int], length: int) -> list[int]:
    size = group.block_size
    return [blocks[at // size] * size + at % size for at in range(length)]


# ---------------------------------------------------------------- into a memory


def agreeing(state: State, tokens: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    most = min(state.length, len(tokens))
    if state.tokens[:most] == tuple(tokens[:most]):
        return most
    return next(at for at in range(most) if state.tokens[at] != tokens[at])


def fit(state: State, groups: Sequence[Group], wanted: int) -> Fitted | str:
    """How these groups would hold the first ``wanted`` tokens of a state, or why they cannot."""
    if len(groups) != len(state.parts):
        return f"policy: {len(groups)} groups of layers here, {len(state.parts)} there"
    lays, below = [], []
    for number, (group, part) in enumerate(zip(groups, state.parts, strict=True)):
        other = _differs(about(groups, number), part.about)
        if other:
            return other
        if group.level is not None:
            count = len(part.arrays["positions"])
            if count > min(group.usable, group.blocks_per_row):
                return f"context: {count} blocks of a level there, room for {group.blocks_per_row} here"
            below.append((count, part.used))
        elif not group.mixer.cross:
            if not reusable(group, part.marks, state.length, wanted):
                return _short(group, state.length, wanted)
            laid = lay(group, part.marks, wanted)
            if laid is None:
                return f"context: {wanted} tokens there, no room for so many here"
            lays.append(laid)
    return Fitted(wanted, tuple(lays), tuple(below))


def _short(group: Group, length: int, wanted: int) -> str:
    if group.scored is not None or group.levels is not None:
        return f"tokens: they agree for {wanted} of {length}, and what {group.scored or group.levels} keeps is of all"
    return f"tokens: they agree for {wanted} of {length}, and the window before them is held no more"


def _differs(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    names = {"sees": "policy", "blocks": "block size", "role": "policy"}
    for name in here:
        if here[name] != there.get(name):
            return f"{names.get(name, name)}: {here[name]} here, {there.get(name)} there"
    return ""


@dataclass(frozen=True, eq=False)
class Laid:
    """A state on its way into a memory (``memory.Pieces``)."""

    state: State
    fitted: Fitted

    @torch.inference_mode()
    def put(self, memory: Memory, blocks: Sequence[Sequence[int]]) -> None:
        """Into ``blocks`` per group; those of sources are left out where theirs is known already."""
        memory.fold_with(self.state.rotaries)
        slots, arrays = [], {}
        for number, where in enumerate(blocks):
            at, picks = self._places(memory.whole, number, where)
            slots.append(at)
            for kind, kept in self.state.parts[number].arrays.items():
                arrays[f"{number}.{kind}"] = kept if at is None else _picked(kept, picks)
        memory.copy_in(blocks, slots, arrays)

    def _places(self, groups: Sequence[Group], number: int, blocks: Sequence[int]) -> tuple[Tensor | None, list[slice]]:
        """The slots of a group that are written, and which of the state's they get; None: whole blocks."""
        group, part = groups[number], self.state.parts[number]
        if group.level is not None:
            return None, []
        if group.mixer.cross:
            length = len(self.state.source or ())
            return torch.tensor(_source_slots(group, blocks, length), dtype=torch.int64), [slice(0, length)]
        laid = self.fitted.lays[number]
        at = slots_of(group, blocks, laid.gap, laid.marks, self.fitted.length)
        return torch.tensor(at, dtype=torch.int64), _picks(part.marks, laid.marks, self.fitted.length)


def _picks(state: Marks, laid: Marks, length: int) -> list[slice]:
    """Where the positions of ``laid`` lie among those of a state."""
    picks = []
    for span in positions_of(laid, length):
        if span:
            back = 0 if state.dropped or span.start < state.sunk else state.first - state.sunk
            picks.append(slice(span.start - back, span.stop - back))
    return picks


def _picked(kept: Tensor, picks: Sequence[slice]) -> Tensor:
    return kept[picks[0]] if len(picks) == 1 else torch.cat([kept[pick] for pick in picks]) if picks else kept[:0]


def shapes(memory: Memory, state: State, number: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every array that a state has of a group."""
    group, part = memory.whole[number], state.parts[number]
    slots = len(state.source or ()) if group.mixer.cross else part.marks.slots(state.length)
    count = len(part.arrays["positions"])
    found = {}
    for name, array in memory.shaped().items():
        which, _, kind = name.partition(".")
        if int(which) != number or kind.split(".")[1:2] == ["bounds"]:
            continue
        shape = array.shape
        if group.level is not None:
            found[kind] = (count, *shape[1:]), array.dtype
        else:
            found[kind] = (slots, *shape[1:2], *shape[3:]) if len(shape) > 2 else (slots,), array.dtype
    return found
