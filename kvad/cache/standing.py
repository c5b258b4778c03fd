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

from kvad.cache.seats import Hold, in_ring
from kvad.cache.sizing import Group
from kvad.step import Reach

__all__ = ["Laid", "Marks", "Standing", "lay", "marks_of", "positions_of", "reusable", "slots_of"]


class Marks(NamedTuple):
    """What a group holds of a row; ``dropped``, ``cut``: as of :class:`~kvad.cache.seats.Hold`."""

    sunk: int = 0
    first: int = 0
    dropped: int = 0
    cut: int = 0

    def slots(self, length: int) -> int:
        """How many there are."""
        return length - self.dropped if self.dropped else self.sunk + length - self.first


class Standing(NamedTuple):
    """A row as a ledger holds it now.  Per group that takes tokens: (marks, gap, blocks); per level below: (slots that
    are filled, blocks); of cross-attention: the source's tokens, and its blocks per group."""

    length: int
    holds: tuple[tuple[Marks, int, tuple[int, ...]], ...]
    below: tuple[tuple[int, tuple[int, ...]], ...]
    source: tuple[int, ...] | None
    crossed: tuple[tuple[int, ...], ...]


class Laid(NamedTuple):
    """How a group will hold a row: so many blocks behind a gap, and what of the marks lies in them.  ``whole``: every
    slot that the ledger takes for filled is, so that rows may be cut short and blocks be shared."""

    count: int  # type: ignore[assignment]  # hides tuple.count
    gap: int
    marks: Marks
    whole: bool


def marks_of(group: Group, hold: Hold, length: int, reach: int) -> Marks:
    """What a seat's hold has of its row; ``reach``: the end of its furthest write."""
    if group.scored is not None:
        return Marks(dropped=hold.dropped, cut=hold.cut)
    size, sinks = group.block_size, _sinks(group)
    if _ring(group):
        first = reach - (size - sinks) if reach > size else 0
        return Marks(min(sinks, length), min(first, length)) if first else Marks()
    if not hold.gap:
        return Marks(cut=hold.cut)
    blocks = _ceil(sinks, size)
    return Marks(min(blocks * size, length), min((hold.gap + blocks) * size, length), 0, hold.cut)


def reusable(group: Group, marks: Marks, length: int, wanted: int) -> bool:
    """Whether a row of ``length`` tokens can be taken for one of its first ``wanted``: what is ranked or has descended
    cannot, and a window must still hold what a query behind them needs."""
    if wanted == length:
        return True
    if group.scored is not None or group.levels is not None:
        return False
    reach = Reach.of(group.mixer)
    needed = reach.oldest(wanted)
    sunk = marks.first == 0 or marks.sunk >= min(reach.sinks, wanted)
    return sunk and (needed >= wanted or marks.first <= max(needed, marks.sunk))


def lay(group: Group, marks: Marks, length: int) -> Laid | None:
    """How ``group`` holds a row of ``length`` tokens of which there is what ``marks`` say; None: it cannot."""
    size = group.block_size
    if group.scored is not None:
        return _fitting(group, Laid(_ceil(length - marks.dropped, size), 0, marks, True))
    sinks = _sinks(group)
    if _ring(group):
        return _lay_ring(group, marks, length, sinks)
    blocks, stop = _ceil(sinks, size), _ceil(length, size)
    first = max(marks.first // size if group.levels is not None else _first_needed(group, length), blocks)
    count, gap = min(blocks, stop) + max(0, stop - first), first - blocks
    if count <= blocks:
        gap = max(0, length // size - blocks)
    if not gap:
        kept = marks._replace(sunk=min(marks.sunk, length), first=min(marks.first, length))
        return _fitting(group, Laid(count, 0, kept, marks.first <= marks.sunk))
    front = min(blocks * size, length)
    sunk = front if marks.first <= marks.sunk else min(marks.sunk, front)
    kept = marks._replace(sunk=sunk, first=min(max(marks.first, first * size), length))
    return _fitting(group, Laid(count, gap, kept, sunk == front and kept.first == min(first * size, length)))


def positions_of(marks: Marks, length: int) -> tuple[range, range]:
    """Positions (of a row that a policy ranks: slots) in the order in which they are kept."""
    if marks.dropped:
        return range(0), range(length - marks.dropped)
    return range(marks.sunk), range(marks.first, length)


def slots_of(group: Group, blocks: Sequence[int], gap: int, marks: Marks, length: int) -> list[int]:
    """Where they lie in ``blocks``, in that order: block * block_size + offset."""
    size, sinks = group.block_size, _sinks(group)
    ranked, ring, front = group.scored is not None, _ring(group), _ceil(sinks, size)
    slots: list[int] = []
    for span in positions_of(marks, length):
        at, end = span.start, span.stop
        while at < end:
            if ring and not ranked:
                base, stop = in_ring(blocks[0], size, sinks, at)
            else:
                logical = at // size
                place = logical if ranked or logical < front else logical - gap
                base, stop = (blocks[place] - logical) * size, (logical + 1) * size
            stop = min(stop, end)
            slots.extend(range(base + at, base + stop))
            at = stop
    return slots


def _lay_ring(group: Group, marks: Marks, length: int, sinks: int) -> Laid | None:
    size = group.block_size
    if length <= size:
        return Laid(bool(length), 0, marks, marks.first <= marks.sunk)
    if group.mixer.window is None:
        return None  # everything stays, and it has no room for it
    first = length - (size - sinks)
    kept = marks._replace(
        sunk=sinks if marks.first <= marks.sunk else min(sinks, marks.sunk), first=max(first, marks.first)
    )
    return Laid(1, 0, kept, kept.sunk == sinks and kept.first == first)


def _fitting(group: Group, laid: Laid) -> Laid | None:
    return laid if laid.count <= min(group.usable, group.blocks_per_row) else None


def _first_needed(group: Group, length: int) -> int:
    return Reach.of(group.mixer).oldest(length) // group.block_size


def _ring(group: Group) -> bool:
    return group.blocks_per_row == 1


def _sinks(group: Group) -> int:
    """Tokens that stay in front."""
    return Reach.of(group.mixer).sinks if group.levels is None else group.levels.sinks


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
