"""Records of one sequence's blocks in every cache group, and the mapping of positions to slots. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvad.cache.manager.block_pool import PrefixNode
from kvad.cache.manager.encoder_blocks import EncoderSequence

NEVER = 1 << 62


@dataclass(slots=True, eq=False)
class GroupBlocks:
    """Blocks of one sequence in one group that takes tokens."""

    blocks: list[int] = field(default_factory=list)
    num_skipped_blocks: int = 0  # logical blocks behind the sinks that were freed
    num_evicted_tokens: int = 0  # tokens that evictions dropped
    last_eviction_length: int = 0  # length of the sequence at the last eviction or demotion
    slot_offset: int = 0  # slot = position + slot_offset in the block that is being written


@dataclass(slots=True, eq=False)
class LevelBlocks:
    """Blocks of one sequence in a lower group, and the number of their filled slots."""

    blocks: list[int] = field(default_factory=list)
    num_used_slots: int = 0


class PublishedPrefix(NamedTuple):
    """Published prefix of a swapped sequence."""

    root: PrefixNode
    last_block: PrefixNode | None  # last full block
    tail_tokens: tuple[int, ...]  # tokens behind the last full block
    epoch: int  # number of prefix cache resets so far; the prefix is invalid after the next reset


class SwappedSequence(NamedTuple):
    """Block counts of a swapped-out sequence, from which it is restored."""

    key: int  # names the copy in the swap space
    length: int
    # Per group that takes tokens: (blocks, skipped blocks, evicted tokens, length at the last eviction).
    groups: tuple[tuple[int, int, int, int], ...]
    lower_levels: tuple[tuple[int, int], ...]  # per lower group: (blocks, filled slots)
    published: PublishedPrefix | None = None  # None: the sequence will publish nothing
    min_truncate_length: int = 0  # as in SequenceBlocks
    has_encoder_blocks: bool = False  # the cross-attention blocks were copied too


class SequenceBlocks:
    """Blocks of one running sequence.

    Attributes:
        length: Number of committed tokens.
        num_written: End of the furthest write, committed or not.
        last_block: Prefix of the last full block; None if the sequence publishes nothing.
        tail_tokens: Tokens behind the last full block.
        fast_path_start: A single token at a position in ``fast_path_start .. fast_path_end - 1`` is written at
            ``position + slot_offset`` in every group, and nothing else has to be done for it.
        republish: The sequence was swapped in; its published prefix is published again once its blocks are filled.
        min_truncate_length: Shortest length to truncate to. Blocks of an imported sequence have empty slots that
            only queries from this position on do not read.
    """

    def __init__(self, num_groups: int, num_levels: int, root: PrefixNode | None) -> None:
        self._num_groups, self._num_levels, self.root = num_groups, num_levels, root
        self.encoder_sequence: EncoderSequence | None = None
        self.reset()

    @property
    def all_groups(self) -> tuple[GroupBlocks | LevelBlocks, ...]:
        """Blocks in the order of the groups, lower groups last."""
        return *self.groups, *self.lower_levels

    def reset(self) -> None:
        """Make the sequence empty. The caller has freed its blocks."""
        self.length = self.num_written = self.fast_path_end = self.min_truncate_length = 0
        self.fast_path_start = NEVER
        self.republish = False
        self.last_block = self.root
        self.tail_tokens: list[int] = []
        self.groups = tuple(GroupBlocks() for _ in range(self._num_groups))
        self.lower_levels = tuple(LevelBlocks() for _ in range(self._num_levels))


def block_index(logical: int, num_sinks: int, num_skipped_blocks: int) -> int | None:
    """Return the index of a logical block in its sequence's list, or None if it was freed."""
    if logical < num_sinks:
        return logical
    return None if logical < num_sinks + num_skipped_blocks else logical - num_skipped_blocks


def ring_offset(block: int, block_size: int, num_sinks: int, position: int) -> tuple[int, int]:
    """Map positions to slots in a ring, the only block of a contiguous sequence.

        size 8, 2 sinks:  0 1 | 2 3 4 5 6 7, then 8..13 overwrite 2..7

    Returns:
        (offset, stop): positions from ``position`` to ``stop - 1`` are stored at ``offset + position``.
    """
    if position < num_sinks:
        return block * block_size, block_size
    ring_size = block_size - num_sinks
    rounds = (position - num_sinks) // ring_size
    return block * block_size - rounds * ring_size, num_sinks + (rounds + 1) * ring_size
