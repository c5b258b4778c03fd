"""A sequence's cache on the host: keys and values in token order, in their stored formats.

``capture`` copies it out of a KVCache; ``PendingRestore`` writes it into another one of the same model and
policy, with other blocks, another layout or on another device. Nothing is decoded, so nothing is rounded: a restored
state is equal bit for bit. Arrays of groups that take tokens, and of encoder inputs, are by slot ([m, K, width];
positions [m]). Arrays of lower levels are whole blocks, because blocks were quantized and merged whole, so they require
the same block size. Block bounds (``quest.py``) are recomputed.

``fit_state`` returns why a state cannot be used, or how much of it can.
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

portable_layout = manager.portable_layout


class GroupState(NamedTuple):
    """State of one cache group."""

    signature: Mapping[str, Any]  # identifies the group (``group_signature``)
    held_range: portable_layout.HeldRange  # cached positions, if the group takes tokens
    num_used_slots: int  # filled slots of a lower level's blocks
    arrays: dict[str, Tensor]  # by "layer.kind.number" and "positions"


@dataclass(frozen=True, eq=False)
class SequenceState:
    """Cached keys and values of a sequence, independent of blocks and layout."""

    tokens: tuple[int, ...]  # tokens whose keys and values are included
    encoder_tokens: tuple[int, ...] | None
    regime: str  # rotary regime (``fingerprint.py``)
    salt: str
    groups: tuple[GroupState, ...]
    rotaries: Mapping[int, Rotary]  # by layer: rotation of the keys of layers with summaries
    engine_id: object = None  # engine that made the state, or was compared with it

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for group in self.groups for array in group.arrays.values())


class FittedState(NamedTuple):
    """The layout of the first ``length`` tokens of a state in other cache groups."""

    length: int
    layouts: tuple[portable_layout.GroupLayout, ...]  # per group that takes tokens
    lower_levels: tuple[tuple[int, int], ...]  # per level: blocks, filled slots


def group_signature(groups: Sequence[CacheGroup], group_index: int) -> dict[str, Any]:
    """Return the properties that must be equal for a group to use another's state.

    They are its layers, its attention pattern and its cache configuration. ``blocks`` is the block size if it decides
    what is cached or read, else 0.
    """
    group = groups[group_index]
    spec, level = group.spec, group.lower_level
    owner = group if level is None else groups[level.token_group]
    policy = owner.eviction_policy or owner.demotion_policy or group.sparse_read_policy
    depends_on_blocks = owner.demotion_policy is not None or group.sparse_read_policy is not None
    role = "source" if spec.is_cross_attention else "tokens" if level is None else f"level {level.ratio}"
    return {
        "role": role,
        "layers": list(group.layers),
        "heads": [spec.num_kv_heads, spec.head_dim, spec.value_dim],
        "sees": str(AttentionPattern.from_spec(spec)),
        "policy": "" if policy is None else str(policy),
        "formats": [group.key_format, group.value_format],
        "blocks": group.block_size if depends_on_blocks else 0,
    }


@torch.inference_mode()
def capture(
    kv_cache: KVCache,
    layout: portable_layout.SequenceLayout,
    tokens: Sequence[int],
    *,
    regime: str,
    salt: str,
    engine_id: object,
) -> SequenceState:
    """Copy a sequence's cache to the host. Its blocks may be freed afterwards."""
    groups, nothing = kv_cache.all_groups, portable_layout.HeldRange()
    parts = [  # held range, filled slots of a lower level, blocks
        *((held, 0, block_ids) for held, _, block_ids in layout.groups),
        *((nothing, num_used_slots, block_ids) for num_used_slots, block_ids in layout.lower_levels),
        *((nothing, 0, block_ids) for block_ids in layout.encoder_blocks),
    ]
    group_states = tuple(
        GroupState(group_signature(groups, index), held, num_used_slots, {})
        for index, (held, num_used_slots, _) in enumerate(parts)
    )
    slots = [_held_slots(groups, group_index, layout) for group_index in range(len(parts))]
    for name, array in kv_cache.copy_out([block_ids for *_, block_ids in parts], slots).items():
        group_index, _, kind = name.partition(".")
        group_states[int(group_index)].arrays[kind] = array
    rotaries = kv_cache.summary_rotaries()
    return SequenceState(tuple(tokens), layout.encoder_tokens, regime, salt, group_states, rotaries, engine_id)


def _held_slots(
    groups: Sequence[CacheGroup], group_index: int, layout: portable_layout.SequenceLayout
) -> Tensor | None:
    """Return the slots of a group in the order of the state; None for whole blocks."""
    group = groups[group_index]
    if group.lower_level is not None:
        return None
    if group.spec.is_cross_attention:
        block_ids = layout.encoder_blocks[group_index - len(layout.groups) - len(layout.lower_levels)]
        assert layout.encoder_tokens is not None
        return _source_slots(group, block_ids, len(layout.encoder_tokens))
    held_range, num_skipped_blocks, blocks = layout.groups[group_index]
    slots = portable_layout.held_slots(group, blocks, num_skipped_blocks, held_range, layout.length)
    return torch.tensor(slots, dtype=torch.int64)


def _source_slots(group: CacheGroup, blocks: Sequence[int], length: int) -> Tensor:
    size, positions = group.block_size, torch.arange(length)
    return torch.tensor(blocks, dtype=torch.int64)[positions // size] * size + positions % size


def common_prefix_length(state: SequenceState, tokens: Sequence[int]) -> int:
    """Return the number of equal first tokens."""
    max_length = min(state.length, len(tokens))
    if state.tokens[:max_length] == tuple(tokens[:max_length]):
        return max_length
    return next(index for index in range(max_length) if state.tokens[index] != tokens[index])


def fit_state(state: SequenceState, groups: Sequence[CacheGroup], length: int) -> FittedState | str:
    """Return how these groups would store ``length`` tokens of a state, or why they cannot."""
    if len(groups) != len(state.groups):
        return f"policy: {len(groups)} cache groups here, {len(state.groups)} there"
    layouts, lower_levels = [], []
    for group_index, (group, group_state) in enumerate(zip(groups, state.groups, strict=True)):
        difference = _differs(group_signature(groups, group_index), group_state.signature)
        if difference:
            return difference
        if group.lower_level is not None:
            count = len(group_state.arrays["positions"])
            if count > min(group.num_usable_blocks, group.max_blocks_per_seq):
                return f"max_seq_len: {count} blocks of a level there, room for {group.max_blocks_per_seq} here"
            lower_levels.append((count, group_state.num_used_slots))
        elif not group.spec.is_cross_attention:
            if not portable_layout.is_reusable(group, group_state.held_range, state.length, length):
                return _too_short(group, state.length, length)
            layout = portable_layout.fit_layout(group, group_state.held_range, length)
            if layout is None:
                return f"max_seq_len: {length} tokens there, no room for them here"
            layouts.append(layout)
    return FittedState(length, tuple(layouts), tuple(lower_levels))


def _too_short(group: CacheGroup, length: int, num_common: int) -> str:
    if group.eviction_policy is not None or group.demotion_policy is not None:
        policy = group.eviction_policy or group.demotion_policy
        return f"tokens: equal for {num_common} of {length}, and {policy} depends on all tokens"
    return f"tokens: equal for {num_common} of {length}, and the window before them is no longer cached"


def _differs(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    names = {"sees": "policy", "blocks": "block size", "role": "policy"}
    for name in here:
        if here[name] != there.get(name):
            return f"{names.get(name, name)}: {here[name]} here, {there.get(name)} there"
    return ""


@dataclass(frozen=True, eq=False)
class PendingRestore:
    """A state that is written into a KVCache by the next BlockOps (a ``RestorableState``)."""

    state: SequenceState
    fitted: FittedState

    @torch.inference_mode()
    def restore(self, kv_cache: KVCache, blocks: Sequence[Sequence[int]]) -> None:
        """Write the state into ``blocks`` per group; shared encoder blocks are left out."""
        kv_cache.set_summary_rotaries(self.state.rotaries)
        slots, arrays = [], {}
        for group_index, block_ids in enumerate(blocks):
            group_slots, picks = self._target_slots(kv_cache.all_groups, group_index, block_ids)
            slots.append(group_slots)
            for kind, array in self.state.groups[group_index].arrays.items():
                arrays[f"{group_index}.{kind}"] = array if group_slots is None else _selected(array, picks)
        kv_cache.copy_in(blocks, slots, arrays)

    def _target_slots(
        self, groups: Sequence[CacheGroup], group_index: int, blocks: Sequence[int]
    ) -> tuple[Tensor | None, list[slice]]:
        """Return a group's slots to write and the state's slices for them; None for whole blocks."""
        group, group_state = groups[group_index], self.state.groups[group_index]
        if group.lower_level is not None:
            return None, []
        if group.spec.is_cross_attention:
            length = len(self.state.encoder_tokens or ())
            return _source_slots(group, blocks, length), [slice(0, length)]
        layout, length = self.fitted.layouts[group_index], self.fitted.length
        slots = portable_layout.held_slots(group, blocks, layout.num_skipped_blocks, layout.held_range, length)
        return torch.tensor(slots, dtype=torch.int64), _select_slots(group_state.held_range, layout.held_range, length)


def _select_slots(state: portable_layout.HeldRange, held_range: portable_layout.HeldRange, length: int) -> list[slice]:
    """Return where the positions of ``held_range`` are among those of a state."""
    picks = []
    for span in filter(None, portable_layout.held_positions(held_range, length)):
        is_in_front = state.num_evicted or span.start < state.num_sink_tokens
        offset = 0 if is_in_front else state.first_position - state.num_sink_tokens
        picks.append(slice(span.start - offset, span.stop - offset))
    return picks


def _selected(array: Tensor, picks: Sequence[slice]) -> Tensor:
    return array[picks[0]] if len(picks) == 1 else torch.cat([array[pick] for pick in picks]) if picks else array[:0]


def state_shapes(
    kv_cache: KVCache, state: SequenceState, group_index: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every array of a state's group."""
    group, group_state = kv_cache.all_groups[group_index], state.groups[group_index]
    is_source = group.spec.is_cross_attention
    num_slots = len(state.encoder_tokens or ()) if is_source else group_state.held_range.slots(state.length)
    num_blocks = len(group_state.arrays["positions"])
    shapes = {}
    for name, array in kv_cache.array_specs().items():
        index, _, kind = name.partition(".")
        if int(index) != group_index or kind.split(".")[1:2] == ["block_bounds"]:
            continue
        shape = array.shape
        if group.lower_level is not None:
            shapes[kind] = (num_blocks, *shape[1:]), array.dtype
        else:
            shapes[kind] = (num_slots, *shape[1:2], *shape[3:]) if len(shape) > 2 else (num_slots,), array.dtype
    return shapes
