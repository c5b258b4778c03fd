"""What a ledger keeps of one row: its blocks in every group, and how positions become slots.  Integers only."""

from __future__ import annotations

from typing import NamedTuple

from kvad.cache.manager.block_pool import PrefixNode
from kvad.cache.manager.encoder_blocks import EncoderSequence

NEVER = 1 << 62


class GroupBlocks:
    """One row's blocks in one group."""

    __slots__ = ("blocks", "last_eviction_length", "num_evicted_tokens", "num_skipped_blocks", "slot_offset")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.clear()

    def clear(self) -> None:
        self.blocks = []
        self.num_skipped_blocks = 0  # logical blocks that are held no more
        self.num_evicted_tokens = 0  # tokens that cuts have dropped
        self.last_eviction_length = 0  # the length of the last cut
        self.slot_offset = 0  # position + base = slot, within the block that is being written


class LevelBlocks:
    """One row's blocks in a group that its tokens descend to; ``used``: slots that are filled, of the blocks held."""

    __slots__ = ("blocks", "num_used_slots")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.num_used_slots = 0


class PublishedPrefix(NamedTuple):
    """What a row had published, and the tokens behind it; of no use when ``epoch`` has passed (``drop_prefixes``)."""

    root: PrefixNode
    last_block: PrefixNode | None
    tail_tokens: tuple[int, ...]
    epoch: int


class SwappedSequence(NamedTuple):
    """A row that gave its blocks back and will have them again: ``key`` names what the device copied out.  Per group
    that takes tokens: (blocks, gap, dropped, cut); per level below: (blocks, used).  ``known`` None: it will publish
    nothing; ``floor``: as of :class:`Seat`; ``source``: that of cross-attention was copied, too."""

    key: int
    length: int
    groups: tuple[tuple[int, int, int, int], ...]
    lower_levels: tuple[tuple[int, int], ...]
    published: PublishedPrefix | None = None
    min_truncate_length: int = 0
    has_encoder_blocks: bool = False


class SequenceBlocks:
    """One row.  ``length``: committed tokens.  ``tip``, ``tail``: the last full block's Prefix and the tokens after
    it (tip None: this row publishes nothing).  ``reach``: the end of the furthest write, committed or not.  One token
    at a position in ``since .. fast - 1`` is written at ``position + base`` in every group, with nothing else to do.
    ``again``: it was woken, and what it had published is to be found in its new blocks, once they are filled;
    ``floor``: blocks have holes that only queries from there on do not look into (a row from elsewhere)."""

    __slots__ = (
        "encoder_sequence",
        "fast_path_end",
        "fast_path_start",
        "groups",
        "last_block",
        "length",
        "lower_levels",
        "min_truncate_length",
        "num_written",
        "republish",
        "root",
        "tail_tokens",
    )

    def __init__(self, num_groups: int, num_levels: int, root: PrefixNode | None) -> None:
        self.encoder_sequence: EncoderSequence | None = None
        self.groups = tuple(GroupBlocks() for _ in range(num_groups))
        self.lower_levels = tuple(LevelBlocks() for _ in range(num_levels))
        self.root = root
        self.reset()

    @property
    def all_groups(self) -> tuple[GroupBlocks | LevelBlocks, ...]:
        """In the order of groups."""
        return *self.groups, *self.lower_levels

    def reset(self) -> None:
        self.length = self.num_written = self.fast_path_end = self.min_truncate_length = 0
        self.fast_path_start = NEVER
        self.republish = False
        self.last_block = self.root
        self.tail_tokens: list[int] = []
        for hold in self.groups:
            hold.clear()
        for below in self.lower_levels:
            below.blocks, below.num_used_slots = [], 0


def block_index(logical: int, sinks: int, gap: int) -> int | None:
    """Where a logical block stands among those of its row; None where it is held no more."""
    if logical < sinks:
        return logical
    return None if logical < sinks + gap else logical - gap


def ring_offset(block: int, size: int, sinks: int, at: int) -> tuple[int, int]:
    """(base, stop): positions from ``at`` to ``stop`` lie at ``base + position`` of a row of one block.

    size 8, 2 sinks: 0 1 | 2 3 4 5 6 7, then 8..13 where 2..7 were
    """
    if at < sinks:
        return block * size, size
    turn = size - sinks
    rounds = (at - sinks) // turn
    return block * size - rounds * turn, sinks + (rounds + 1) * turn
