"""Which of a row's tokens a group holds, said in no layout: what is taken out of one ledger and laid into another.

A group holds the positions ``0 .. sunk - 1`` and ``first .. length - 1`` of a row (both whole where nothing left it:
``sunk == first == 0``), or, where a policy ranks, ``length - dropped`` slots in their order.  A ledger's blocks, sizes
and rings are one way of holding them; :func:`lay` finds another group's way, and :func:`slots_of` where each lies.

    a window of 6, blocks of 4, a row of 18:   gap 3, blocks [7, 3]       ->  sunk 0, first 12
    the same in a ring of 9 slots:             positions 12 .. 17         ->  slots 3 4 5 6 7 8
    with 3 sinks, blocks of 4, a row of 18:    blocks [5, 7, 3], gap 2    ->  sunk 4, first 12

Integers only, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.sequence_blocks import GroupBlocks, ring_offset
from kvad.model_input import AttentionPattern


class HeldRange(NamedTuple):
    """What a group holds of a row; ``dropped``, ``cut``: as of :class:`~kvad.cache.manager.sequence_blocks.GroupBlocks`."""

    num_sink_tokens: int = 0
    first_position: int = 0
    num_evicted: int = 0
    last_eviction_length: int = 0

    def slots(self, length: int) -> int:
        """How many there are."""
        return length - self.num_evicted if self.num_evicted else self.num_sink_tokens + length - self.first_position


class SequenceLayout(NamedTuple):
    """A row as a ledger holds it now.  Per group that takes tokens: (marks, gap, blocks); per level below: (slots that
    are filled, blocks); of cross-attention: the source's tokens, and its blocks per group."""

    length: int
    groups: tuple[tuple[HeldRange, int, tuple[int, ...]], ...]
    lower_levels: tuple[tuple[int, tuple[int, ...]], ...]
    encoder_tokens: tuple[int, ...] | None
    encoder_blocks: tuple[tuple[int, ...], ...]


class GroupLayout(NamedTuple):
    """How a group will hold a row: so many blocks behind a gap, and what of the marks lies in them.  ``whole``: every
    slot that the ledger takes for filled is, so that rows may be cut short and blocks be shared."""

    count: int  # type: ignore[assignment]  # hides tuple.count
    num_skipped_blocks: int
    held_range: HeldRange
    whole: bool


def held_range(group: CacheGroup, hold: GroupBlocks, length: int, reach: int) -> HeldRange:
    """What a seat's hold has of its row; ``reach``: the end of its furthest write."""
    if group.eviction_policy is not None:
        return HeldRange(num_evicted=hold.num_evicted_tokens, last_eviction_length=hold.last_eviction_length)
    size, sinks = group.block_size, _sinks(group)
    if _ring(group):
        first = reach - (size - sinks) if reach > size else 0
        return HeldRange(min(sinks, length), min(first, length)) if first else HeldRange()
    if not hold.num_skipped_blocks:
        return HeldRange(last_eviction_length=hold.last_eviction_length)
    blocks = _ceil(sinks, size)
    return HeldRange(
        min(blocks * size, length), min((hold.num_skipped_blocks + blocks) * size, length), 0, hold.last_eviction_length
    )


def is_reusable(group: CacheGroup, marks: HeldRange, length: int, wanted: int) -> bool:
    """Whether a row of ``length`` tokens can be taken for one of its first ``wanted``: what is ranked or has descended
    cannot, and a window must still hold what a query behind them needs."""
    if wanted == length:
        return True
    if group.eviction_policy is not None or group.demotion_policy is not None:
        return False
    reach = AttentionPattern.from_spec(group.spec)
    needed = reach.first_visible(wanted)
    sunk = marks.first_position == 0 or marks.num_sink_tokens >= min(reach.num_sinks, wanted)
    return sunk and (needed >= wanted or marks.first_position <= max(needed, marks.num_sink_tokens))


def fit_layout(group: CacheGroup, marks: HeldRange, length: int) -> GroupLayout | None:
    """How ``group`` holds a row of ``length`` tokens of which there is what ``marks`` say; None: it cannot."""
    size = group.block_size
    if group.eviction_policy is not None:
        return _check_capacity(group, GroupLayout(_ceil(length - marks.num_evicted, size), 0, marks, True))
    sinks = _sinks(group)
    if _ring(group):
        return _fit_ring(group, marks, length, sinks)
    blocks, stop = _ceil(sinks, size), _ceil(length, size)
    first = max(
        marks.first_position // size if group.demotion_policy is not None else _first_needed(group, length), blocks
    )
    count, gap = min(blocks, stop) + max(0, stop - first), first - blocks
    if count <= blocks:
        gap = max(0, length // size - blocks)
    if not gap:
        kept = marks._replace(
            num_sink_tokens=min(marks.num_sink_tokens, length), first_position=min(marks.first_position, length)
        )
        return _check_capacity(group, GroupLayout(count, 0, kept, marks.first_position <= marks.num_sink_tokens))
    front = min(blocks * size, length)
    sunk = front if marks.first_position <= marks.num_sink_tokens else min(marks.num_sink_tokens, front)
    kept = marks._replace(num_sink_tokens=sunk, first_position=min(max(marks.first_position, first * size), length))
    return _check_capacity(
        group, GroupLayout(count, gap, kept, sunk == front and kept.first_position == min(first * size, length))
    )


def held_positions(marks: HeldRange, length: int) -> tuple[range, range]:
    """Positions (of a row that a policy ranks: slots) in the order in which they are kept."""
    if marks.num_evicted:
        return range(0), range(length - marks.num_evicted)
    return range(marks.num_sink_tokens), range(marks.first_position, length)


def held_slots(group: CacheGroup, blocks: Sequence[int], gap: int, marks: HeldRange, length: int) -> list[int]:
    """Where they lie in ``blocks``, in that order: block * block_size + offset."""
    size, sinks = group.block_size, _sinks(group)
    ranked, ring, front = group.eviction_policy is not None, _ring(group), _ceil(sinks, size)
    slots: list[int] = []
    for span in held_positions(marks, length):
        at, end = span.start, span.stop
        while at < end:
            if ring and not ranked:
                base, stop = ring_offset(blocks[0], size, sinks, at)
            else:
                logical = at // size
                place = logical if ranked or logical < front else logical - gap
                base, stop = (blocks[place] - logical) * size, (logical + 1) * size
            stop = min(stop, end)
            slots.extend(range(base + at, base + stop))
            at = stop
    return slots


def _fit_ring(group: CacheGroup, marks: HeldRange, length: int, sinks: int) -> GroupLayout | None:
    size = group.block_size
    if length <= size:
        return GroupLayout(bool(length), 0, marks, marks.first_position <= marks.num_sink_tokens)
    if group.spec.window is None:
        return None  # everything stays, and it has no room for it
    first = length - (size - sinks)
    kept = marks._replace(
        num_sink_tokens=sinks if marks.first_position <= marks.num_sink_tokens else min(sinks, marks.num_sink_tokens),
        first_position=max(first, marks.first_position),
    )
    return GroupLayout(1, 0, kept, kept.num_sink_tokens == sinks and kept.first_position == first)


def _check_capacity(group: CacheGroup, laid: GroupLayout) -> GroupLayout | None:
    return laid if laid.count <= min(group.num_usable_blocks, group.max_blocks_per_seq) else None


def _first_needed(group: CacheGroup, length: int) -> int:
    return AttentionPattern.from_spec(group.spec).first_visible(length) // group.block_size


def _ring(group: CacheGroup) -> bool:
    return group.max_blocks_per_seq == 1


def _sinks(group: CacheGroup) -> int:
    """Tokens that stay in front."""
    return (
        AttentionPattern.from_spec(group.spec).num_sinks
        if group.demotion_policy is None
        else group.demotion_policy.num_sinks
    )


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
