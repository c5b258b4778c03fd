"""Layout-independent description of a sequence's cached tokens, to move a sequence between caches.

A group holds the positions ``0 .. num_sink_tokens - 1`` and ``first_position .. length - 1`` of a sequence (both are 0
if nothing was freed), or, under an eviction policy, ``length - num_evicted`` slots in their order. The blocks, block
sizes and rings of one cache are one way to store them; ``fit_layout`` computes the layout in another group, and
``held_slots`` the slot of each token.

    window 6, block size 4, 18 tokens:          3 skipped blocks, blocks [7, 3]     ->  num_sink_tokens 0, first 12
    the same in a ring of 9 slots:              positions 12 .. 17                  ->  slots 3 4 5 6 7 8
    with 3 sinks, block size 4, 18 tokens:      blocks [5, 7, 3], 2 skipped blocks  ->  num_sink_tokens 4, first 12

No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.prefix_index import PrefixNode
from kvad.cache.manager.sequence_blocks import BlockMapping, GroupBlocks, SequenceBlocks, num_sinks
from kvad.model_input import NULL_BLOCK


class HeldRange(NamedTuple):
    """Tokens that a group holds of a sequence.

    ``num_evicted`` and ``last_eviction_length`` are those of ``kvad.cache.manager.sequence_blocks.GroupBlocks``.
    """

    num_sink_tokens: int = 0
    first_position: int = 0
    num_evicted: int = 0
    last_eviction_length: int = 0

    def slots(self, length: int) -> int:
        """Return the number of filled slots of a sequence of ``length`` tokens."""
        return length - self.num_evicted if self.num_evicted else self.num_sink_tokens + length - self.first_position


class SequenceLayout(NamedTuple):
    """Blocks of a sequence as a KVCacheManager holds them now."""

    length: int
    groups: tuple[tuple[HeldRange, int, tuple[int, ...]], ...]  # token groups: (held range, skipped blocks, blocks)
    lower_levels: tuple[tuple[int, tuple[int, ...]], ...]  # per lower group: (filled slots, blocks)
    encoder_tokens: tuple[int, ...] | None  # of cross-attention
    encoder_blocks: tuple[tuple[int, ...], ...]  # per cross-attention group


class GroupLayout(NamedTuple):
    """Layout of a sequence in a group that will import it."""

    count: int  # type: ignore[assignment]  # number of blocks; hides tuple.count
    num_skipped_blocks: int
    held_range: HeldRange  # the part of the held tokens that these blocks store
    whole: bool  # every slot counted as filled is filled: the sequence may be truncated, its blocks shared


def held_range(group: CacheGroup, group_blocks: GroupBlocks, length: int, num_written: int) -> HeldRange:
    """Return the tokens that a group holds of a sequence; ``num_written`` is the end of its furthest write."""
    if group.eviction_policy is not None:
        return HeldRange(0, 0, group_blocks.num_evicted_tokens, group_blocks.last_eviction_length)
    size, sinks = group.block_size, num_sinks(group)
    if group.max_blocks_per_seq == 1:
        first = num_written - (size - sinks) if num_written > size else 0
        return HeldRange(min(sinks, length), min(first, length)) if first else HeldRange()
    num_sink_tokens = first = 0
    if group_blocks.num_skipped_blocks:
        num_sink_tokens = -(-sinks // size) * size
        first = num_sink_tokens + group_blocks.num_skipped_blocks * size
    return HeldRange(min(num_sink_tokens, length), min(first, length), 0, group_blocks.last_eviction_length)


def describe_layout(groups: Sequence[CacheGroup], sequence: SequenceBlocks) -> SequenceLayout:
    """Return the blocks of a running sequence; ``groups`` are those that take tokens."""
    layouts = []
    for group, group_blocks in zip(groups, sequence.groups, strict=True):
        held = held_range(group, group_blocks, sequence.length, sequence.num_written)
        layouts.append((held, group_blocks.num_skipped_blocks, tuple(group_blocks.blocks)))
    lower_levels = tuple((level.num_used_slots, tuple(level.blocks)) for level in sequence.lower_levels)
    encoder = sequence.encoder_sequence
    encoder_blocks = () if encoder is None else tuple(map(tuple, encoder.blocks))
    encoder_tokens = None if encoder is None else encoder.tokens
    return SequenceLayout(sequence.length, tuple(layouts), lower_levels, encoder_tokens, encoder_blocks)


def blocks_to_import(
    tokens: Sequence[int],
    root: PrefixNode | None,
    layouts: Sequence[GroupLayout],
    lower_levels: Sequence[tuple[int, int]],
) -> SequenceBlocks:
    """Return the record of an imported sequence, whose blocks are not allocated yet; ``root`` is its prefix root."""
    is_whole = all(layout.whole for layout in layouts)
    sequence = SequenceBlocks(len(layouts), len(lower_levels), root if is_whole else None)
    sequence.length = len(tokens)
    sequence.min_truncate_length = 0 if is_whole else len(tokens)
    sequence.tail_tokens = list(tokens)
    for group_blocks, (count, num_skipped, held, _) in zip(sequence.groups, layouts, strict=True):
        group_blocks.blocks, group_blocks.num_skipped_blocks = [NULL_BLOCK] * count, num_skipped
        group_blocks.num_evicted_tokens, group_blocks.last_eviction_length = held.num_evicted, held.last_eviction_length
    for level, (count, num_used_slots) in zip(sequence.lower_levels, lower_levels, strict=True):
        level.blocks, level.num_used_slots = [NULL_BLOCK] * count, num_used_slots
    return sequence


def is_reusable(group: CacheGroup, held: HeldRange, length: int, new_length: int) -> bool:
    """Return True if the cached state of ``length`` tokens can serve its first ``new_length`` tokens.

    A state under an eviction or tiered policy cannot, and a window must still hold the keys that the next query needs.
    """
    if new_length == length:
        return True
    if group.eviction_policy is not None or group.demotion_policy is not None:
        return False
    pattern = group.spec.pattern
    needed = pattern.first_visible(new_length)
    has_sinks = held.first_position == 0 or held.num_sink_tokens >= min(pattern.num_sinks, new_length)
    return has_sinks and (needed >= new_length or held.first_position <= max(needed, held.num_sink_tokens))


def fit_layout(group: CacheGroup, held: HeldRange, length: int) -> GroupLayout | None:
    """Compute how ``group`` stores a sequence of ``length`` tokens of which ``held`` exist; None if it cannot."""
    size = group.block_size
    if group.eviction_policy is not None:
        return _check_capacity(group, GroupLayout(-(-(length - held.num_evicted) // size), 0, held, True))
    sinks = num_sinks(group)
    if group.max_blocks_per_seq == 1:
        return _fit_ring(group, held, length, sinks)
    blocks, stop = -(-sinks // size), -(-length // size)
    first = held.first_position
    if group.demotion_policy is None:
        first = group.spec.pattern.first_visible(length)
    first = max(first // size, blocks)
    is_complete = held.first_position <= held.num_sink_tokens
    count, num_skipped = min(blocks, stop) + max(0, stop - first), first - blocks
    if count <= blocks:
        num_skipped = max(0, length // size - blocks)
    if not num_skipped:
        num_sink_tokens, first_position = min(held.num_sink_tokens, length), min(held.first_position, length)
        is_whole = is_complete
    else:
        max_sink_tokens = min(blocks * size, length)
        num_sink_tokens = max_sink_tokens if is_complete else min(held.num_sink_tokens, max_sink_tokens)
        first_position = min(max(held.first_position, first * size), length)
        is_whole = num_sink_tokens == max_sink_tokens and first_position == min(first * size, length)
    new_range = held._replace(num_sink_tokens=num_sink_tokens, first_position=first_position)
    return _check_capacity(group, GroupLayout(count, num_skipped, new_range, is_whole))


def held_positions(held: HeldRange, length: int) -> tuple[range, range]:
    """Return the held positions (under an eviction policy: slots) in the order in which they are stored."""
    if held.num_evicted:
        return range(0), range(length - held.num_evicted)
    return range(held.num_sink_tokens), range(held.first_position, length)


def held_slots(group: CacheGroup, blocks: Sequence[int], num_skipped: int, held: HeldRange, length: int) -> list[int]:
    """Return the slots of the held positions in that order: block * block_size + offset."""
    mapping, group_blocks, slots = BlockMapping(group), GroupBlocks(list(blocks), num_skipped), list[int]()
    for span in held_positions(held, length):
        mapping.append_slots(group_blocks, span.start, span.stop, slots)
    return slots


def _fit_ring(group: CacheGroup, held: HeldRange, length: int, sinks: int) -> GroupLayout | None:
    size = group.block_size
    if length <= size:
        return GroupLayout(bool(length), 0, held, held.first_position <= held.num_sink_tokens)
    if group.spec.window is None:
        return None  # All tokens must be kept, and the ring is too small.
    first = length - (size - sinks)
    new_range = held._replace(
        num_sink_tokens=sinks if held.first_position <= held.num_sink_tokens else min(sinks, held.num_sink_tokens),
        first_position=max(first, held.first_position),
    )
    return GroupLayout(1, 0, new_range, new_range.num_sink_tokens == sinks and new_range.first_position == first)


def _check_capacity(group: CacheGroup, layout: GroupLayout) -> GroupLayout | None:
    return layout if layout.count <= min(group.num_usable_blocks, group.max_blocks_per_seq) else None
