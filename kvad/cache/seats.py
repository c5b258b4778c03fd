"""What a ledger keeps of one row: its blocks in every group, and how positions become slots.  Integers only."""

from __future__ import annotations

from typing import NamedTuple

from kvad.cache.blocks import Prefix
from kvad.cache.sources import Source

__all__ = ["NEVER", "Below", "Hold", "Known", "Parked", "Seat", "in_ring", "place_of"]

NEVER = 1 << 62


class Hold:
    """One row's blocks in one group."""

    __slots__ = ("base", "blocks", "cut", "dropped", "gap")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.clear()

    def clear(self) -> None:
        self.blocks = []
        self.gap = 0  # logical blocks that are held no more
        self.dropped = 0  # tokens that cuts have dropped
        self.cut = 0  # the length of the last cut
        self.base = 0  # position + base = slot, within the block that is being written


class Below:
    """One row's blocks in a group that its tokens descend to; ``used``: slots that are filled, of the blocks held."""

    __slots__ = ("blocks", "used")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.used = 0


class Known(NamedTuple):
    """What a row had published, and the tokens behind it; of no use when ``epoch`` has passed (``drop_prefixes``)."""

    root: Prefix
    tip: Prefix | None
    tail: tuple[int, ...]
    epoch: int


class Parked(NamedTuple):
    """A row that gave its blocks back and will have them again: ``key`` names what the device copied out.  Per group
    that takes tokens: (blocks, gap, dropped, cut); per level below: (blocks, used).  ``known`` None: it will publish
    nothing; ``floor``: as of :class:`Seat`; ``source``: that of cross-attention was copied, too."""

    key: int
    length: int
    holds: tuple[tuple[int, int, int, int], ...]
    below: tuple[tuple[int, int], ...]
    known: Known | None = None
    floor: int = 0
    source: bool = False


class Seat:
    """One row.  ``length``: committed tokens.  ``tip``, ``tail``: the last full block's Prefix and the tokens after
    it (tip None: this row publishes nothing).  ``reach``: the end of the furthest write, committed or not.  One token
    at a position in ``since .. fast - 1`` is written at ``position + base`` in every group, with nothing else to do.
    ``again``: it was woken, and what it had published is to be found in its new blocks, once they are filled;
    ``floor``: blocks have holes that only queries from there on do not look into (a row from elsewhere)."""

    __slots__ = (
        "again",
        "below",
        "fast",
        "floor",
        "holds",
        "length",
        "reach",
        "root",
        "since",
        "source",
        "tail",
        "tip",
    )

    def __init__(self, num_groups: int, num_levels: int, root: Prefix | None) -> None:
        self.source: Source | None = None
        self.holds = tuple(Hold() for _ in range(num_groups))
        self.below = tuple(Below() for _ in range(num_levels))
        self.root = root
        self.restart()

    @property
    def every(self) -> tuple[Hold | Below, ...]:
        """In the order of groups."""
        return *self.holds, *self.below

    def restart(self) -> None:
        self.length = self.reach = self.fast = self.floor = 0
        self.since = NEVER
        self.again = False
        self.tip = self.root
        self.tail: list[int] = []
        for hold in self.holds:
            hold.clear()
        for below in self.below:
            below.blocks, below.used = [], 0


def place_of(logical: int, sinks: int, gap: int) -> int | None:
    """Where a logical block stands among those of its row; None where it is held no more."""
    if logical < sinks:
        return logical
    return None if logical < sinks + gap else logical - gap


def in_ring(block: int, size: int, sinks: int, at: int) -> tuple[int, int]:
    """(base, stop): positions from ``at`` to ``stop`` lie at ``base + position`` of a row of one block.

    size 8, 2 sinks: 0 1 | 2 3 4 5 6 7, then 8..13 where 2..7 were
    """
    if at < sinks:
        return block * size, size
    turn = size - sinks
    rounds = (at - sinks) // turn
    return block * size - rounds * turn, sinks + (rounds + 1) * turn
