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

from kvad.cache import manager
from kvad.cache.device import KVCache
from kvad.cache.groups import CacheGroup
from kvad.model_input import AttentionPattern, Rotary


class GroupState(NamedTuple):
    """One group's share.  ``about``: which group (:func:`about`); ``marks``: what it has of the row, where it takes
    tokens; ``used``: slots that are filled, of a level's blocks; ``arrays``: by "layer.kind.number" and "positions"."""

    signature: Mapping[str, Any]
    held_range: manager.portable_layout.HeldRange
    num_used_slots: int
    arrays: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class SequenceState:
    """``tokens``: those whose keys and values are here; ``source``: what the encoder read, where there is one.
    ``regime`` and ``salt``: as of ``cache/identity.py``.  ``home``: the engine that it was made in, or compared with.
    ``rotaries``: how the keys of layers that make summaries are rotated."""

    tokens: tuple[int, ...]
    encoder_tokens: tuple[int, ...] | None
    regime: str
    salt: str
    groups: tuple[GroupState, ...]
    rotaries: Mapping[int, Rotary]
    engine_id: object = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for part in self.groups for array in part.arrays.values())


class FittedState(NamedTuple):
    """The first ``length`` tokens of a state as a ledger would hold them: per group that takes tokens how, and per
    level (blocks, slots that are filled)."""

    length: int
    layouts: tuple[manager.portable_layout.GroupLayout, ...]
    lower_levels: tuple[tuple[int, int], ...]


def group_signature(groups: Sequence[CacheGroup], number: int) -> dict[str, Any]:
    """What has to be equal of two groups, in words: their layers, what they see, and how they keep it.  ``blocks``: the
    size of a block, where that decides what is kept or read."""
    group = groups[number]
    mixer, level = group.spec, group.lower_level
    owner = group if level is None else groups[level.token_group]
    policy = owner.eviction_policy or owner.demotion_policy or group.sparse_read_policy
    by_blocks = owner.demotion_policy is not None or group.sparse_read_policy is not None
    role = "source" if mixer.is_cross_attention else "tokens" if level is None else f"level {level.ratio}"
    return {
        "role": role,
        "layers": list(group.layers),
        "heads": [mixer.num_kv_heads, mixer.head_dim, mixer.value_dim],
        "sees": str(AttentionPattern.from_spec(mixer)),
        "policy": "" if policy is None else str(policy),
        "formats": [group.key_format, group.value_format],
        "blocks": group.block_size if by_blocks else 0,
    }


# ---------------------------------------------------------------- out of a memory


@torch.inference_mode()
def capture(
    memory: KVCache,
    standing: manager.portable_layout.SequenceLayout,
    tokens: Sequence[int],
    *,
    regime: str,
    salt: str,
    home: object,
) -> SequenceState:
    """Copy a row out.  Its blocks may be handed on afterwards."""
    groups = memory.all_groups
    blocks = [
        *(where for _, _, where in standing.groups),
        *(where for _, where in standing.lower_levels),
        *standing.encoder_blocks,
    ]
    slots = [_slots_held(groups, number, standing) for number in range(len(blocks))]
    arrays: list[dict[str, Tensor]] = [{} for _ in blocks]
    for name, array in memory.copy_out(blocks, slots).items():
        number, _, kind = name.partition(".")
        arrays[int(number)][kind] = array
    marks = [each for each, _, _ in standing.groups] + [manager.portable_layout.HeldRange()] * (
        len(blocks) - len(standing.groups)
    )
    used = [0] * len(standing.groups) + [each for each, _ in standing.lower_levels] + [0] * len(standing.encoder_blocks)
    parts = tuple(GroupState(group_signature(groups, i), marks[i], used[i], arrays[i]) for i in range(len(blocks)))
    return SequenceState(tuple(tokens), standing.encoder_tokens, regime, salt, parts, memory.summary_rotaries(), home)


def _slots_held(
    groups: Sequence[CacheGroup], number: int, standing: manager.portable_layout.SequenceLayout
) -> Tensor | None:
    """Slots of a group in the order of a state; None: whole blocks."""
    group = groups[number]
    if group.lower_level is not None:
        return None
    if group.spec.is_cross_attention:
        where = standing.encoder_blocks[number - len(standing.groups) - len(standing.lower_levels)]
        assert standing.encoder_tokens is not None
        return torch.tensor(_source_slots(group, where, len(standing.encoder_tokens)), dtype=torch.int64)
    marks, gap, blocks = standing.groups[number]
    return torch.tensor(
        manager.portable_layout.held_slots(group, blocks, gap, marks, standing.length), dtype=torch.int64
    )


def _source_slots(group: CacheGroup, blocks: Sequence[int], length: int) -> list[int]:
    size = group.block_size
    return [blocks[at // size] * size + at % size for at in range(length)]


# ---------------------------------------------------------------- into a memory


def common_prefix_length(state: SequenceState, tokens: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    most = min(state.length, len(tokens))
    if state.tokens[:most] == tuple(tokens[:most]):
        return most
    return next(at for at in range(most) if state.tokens[at] != tokens[at])


def fit_state(state: SequenceState, groups: Sequence[CacheGroup], wanted: int) -> FittedState | str:
    """How these groups would hold the first ``wanted`` tokens of a state, or why they cannot."""
    if len(groups) != len(state.groups):
        return f"policy: {len(groups)} groups of layers here, {len(state.groups)} there"
    lays, below = [], []
    for number, (group, part) in enumerate(zip(groups, state.groups, strict=True)):
        other = _differs(group_signature(groups, number), part.signature)
        if other:
            return other
        if group.lower_level is not None:
            count = len(part.arrays["positions"])
            if count > min(group.num_usable_blocks, group.max_blocks_per_seq):
                return f"context: {count} blocks of a level there, room for {group.max_blocks_per_seq} here"
            below.append((count, part.num_used_slots))
        elif not group.spec.is_cross_attention:
            if not manager.portable_layout.is_reusable(group, part.held_range, state.length, wanted):
                return _too_short(group, state.length, wanted)
            laid = manager.portable_layout.fit_layout(group, part.held_range, wanted)
            if laid is None:
                return f"context: {wanted} tokens there, no room for so many here"
            lays.append(laid)
    return FittedState(wanted, tuple(lays), tuple(below))


def _too_short(group: CacheGroup, length: int, wanted: int) -> str:
    if group.eviction_policy is not None or group.demotion_policy is not None:
        return f"tokens: they agree for {wanted} of {length}, and what {group.eviction_policy or group.demotion_policy} keeps is of all"
    return f"tokens: they agree for {wanted} of {length}, and the window before them is held no more"


def _differs(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    names = {"sees": "policy", "blocks": "block size", "role": "policy"}
    for name in here:
        if here[name] != there.get(name):
            return f"{names.get(name, name)}: {here[name]} here, {there.get(name)} there"
    return ""


@dataclass(frozen=True, eq=False)
class PendingRestore:
    """A state on its way into a memory (``memory.Pieces``)."""

    state: SequenceState
    fitted: FittedState

    @torch.inference_mode()
    def restore(self, memory: KVCache, blocks: Sequence[Sequence[int]]) -> None:
        """Into ``blocks`` per group; those of sources are left out where theirs is known already."""
        memory.set_summary_rotaries(self.state.rotaries)
        slots, arrays = [], {}
        for number, where in enumerate(blocks):
            at, picks = self._places(memory.all_groups, number, where)
            slots.append(at)
            for kind, kept in self.state.groups[number].arrays.items():
                arrays[f"{number}.{kind}"] = kept if at is None else _selected(kept, picks)
        memory.copy_in(blocks, slots, arrays)

    def _places(
        self, groups: Sequence[CacheGroup], number: int, blocks: Sequence[int]
    ) -> tuple[Tensor | None, list[slice]]:
        """The slots of a group that are written, and which of the state's they get; None: whole blocks."""
        group, part = groups[number], self.state.groups[number]
        if group.lower_level is not None:
            return None, []
        if group.spec.is_cross_attention:
            length = len(self.state.encoder_tokens or ())
            return torch.tensor(_source_slots(group, blocks, length), dtype=torch.int64), [slice(0, length)]
        laid = self.fitted.layouts[number]
        at = manager.portable_layout.held_slots(
            group, blocks, laid.num_skipped_blocks, laid.held_range, self.fitted.length
        )
        return torch.tensor(at, dtype=torch.int64), _select_slots(part.held_range, laid.held_range, self.fitted.length)


def _select_slots(
    state: manager.portable_layout.HeldRange, laid: manager.portable_layout.HeldRange, length: int
) -> list[slice]:
    """Where the positions of ``laid`` lie among those of a state."""
    picks = []
    for span in manager.portable_layout.held_positions(laid, length):
        if span:
            back = (
                0
                if state.num_evicted or span.start < state.num_sink_tokens
                else state.first_position - state.num_sink_tokens
            )
            picks.append(slice(span.start - back, span.stop - back))
    return picks


def _selected(kept: Tensor, picks: Sequence[slice]) -> Tensor:
    return kept[picks[0]] if len(picks) == 1 else torch.cat([kept[pick] for pick in picks]) if picks else kept[:0]


def state_shapes(memory: KVCache, state: SequenceState, number: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every array that a state has of a group."""
    group, part = memory.all_groups[number], state.groups[number]
    slots = len(state.encoder_tokens or ()) if group.spec.is_cross_attention else part.held_range.slots(state.length)
    count = len(part.arrays["positions"])
    found = {}
    for name, array in memory.array_specs().items():
        which, _, kind = name.partition(".")
        if int(which) != number or kind.split(".")[1:2] == ["bounds"]:
            continue
        shape = array.shape
        if group.lower_level is not None:
            found[kind] = (count, *shape[1:]), array.dtype
        else:
            found[kind] = (slots, *shape[1:2], *shape[3:]) if len(shape) > 2 else (slots,), array.dtype
    return found
