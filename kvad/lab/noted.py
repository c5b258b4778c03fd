"""What the cache microscope notes of one row, and how it reads slots as positions.  (``microscope.py`` asks; tensors on
the host.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvad.cache.cuts import EvictionEvent
from kvad.cache.sizing import CacheGroup
from kvad.engine.row import TokenSequence
from kvad.lab.slide import STATES, BlockUse, Reason, SequenceEventRecord, StateChange
from kvad.lab.whence import TokenOrigin

__all__ = [
    "NAMES",
    "SequenceTrace",
    "ReadableBlocks",
    "readable_blocks",
    "evicted_positions",
    "states_by_position",
    "scatter_by_position",
    "spread_summaries",
]
__all__ += ["SWAPPED", "EVICTED", "HOT", "QUANTIZED", "SHARED", "OFFLOADED", "SUMMARIZED", "UNWRITTEN"]

NAMES = tuple(STATES)  # a state's code is its place here
HOT, SHARED, QUANTIZED, SUMMARIZED, OFFLOADED, SWAPPED, EVICTED, UNWRITTEN = range(len(NAMES))


class ReadableBlocks(NamedTuple):
    """What a row could read of a group: its blocks, how many rows count on each, and the positions in their slots
    ([S]; by layer [K, S] where heads differ)."""

    blocks: tuple[int, ...]
    refs: tuple[int, ...]
    held: Tensor | dict[int, Tensor]


class SequenceTrace:
    """One row.  ``codes``: per own group, [lines, positions] of states, ``before``: as they were when the row gave way
    last; ``changes``: per line of it.  ``origin``: of what it was seated with last."""

    def __init__(self, number: int, row: TokenSequence, origin: TokenOrigin, lines: Sequence[int]) -> None:
        self.number, self.row, self.origin = number, row, origin
        self.claimed = origin.tokens if origin.source == "found" else 0
        self.restored = origin.tokens if origin.source == "restored" else 0
        self.codes = [torch.empty((count, 0), dtype=torch.uint8) for count in lines]
        self.before = self.codes
        self.changes: list[list[list[StateChange]]] = [[[] for _ in range(count)] for count in lines]
        self.mass: dict[int, Tensor] = {}
        self.tables: list[ReadableBlocks] = []
        self.published: set[tuple[int, int]] = set()
        self.life: list[SequenceEventRecord] = []
        self.swapped, self.known = False, 0
        self.finish: str | None = None
        self.error: str | None = None

    def grow(self, index: int, length: int) -> Tensor:
        codes = self.codes[index]
        if codes.shape[1] < length:
            more = codes.new_full((codes.shape[0], length - codes.shape[1]), UNWRITTEN)
            codes = self.codes[index] = torch.cat((codes, more), dim=1)
        return codes

    def record(self, index: int, line: int, change: StateChange) -> None:
        """Neighbours that change alike are one change."""
        changes = self.changes[index][line]
        before = changes[-1] if changes else None
        if before is not None and before == change._replace(first=before.first, last=change.first - 1):
            changes[-1] = before._replace(last=change.last)
        else:
            changes.append(change)


def scatter_by_position(held: Tensor, mass: Tensor, end: int) -> Tensor:
    """mass [K, S] of slots that hold positions [K, S] -> [K, end] by position."""
    known = (held >= 0) & (held < end)
    got = mass.new_zeros(mass.shape[0], end + 1)
    return got.scatter_add_(1, held.masked_fill(~known, end), mass * known)[:, :end]


def spread_summaries(got: Tensor, positions: Tensor, ratio: int) -> None:
    """What a summary got is shared out evenly among the tokens that it stands for.  ``positions``: of summaries."""
    if ratio == 1:
        return
    for middle in positions[positions >= 0].tolist():
        first = middle // ratio * ratio
        got[:, first : first + ratio] = got[:, middle : middle + 1].clone() / ratio


def states_by_position(held: Tensor, states: Tensor, end: int) -> Tensor:
    """States [n, S] of slots that hold positions [n, S] -> [n, end] by position; evicted where no slot has it."""
    known = (held >= 0) & (held < end)
    codes = torch.full((held.shape[0], end + 1), EVICTED, dtype=torch.uint8)
    return codes.scatter_(1, held.masked_fill(~known, end), states)[:, :end]


def evicted_positions(cut: EvictionEvent, head: int, policy: str, step: int) -> dict[int, Reason]:
    """By position."""
    ranks, positions, stays = cut.scores[head], cut.positions[head].tolist(), set(cut.order[head].tolist())
    places = {slot: place for place, slot in enumerate(ranks.sort(descending=True, stable=True).indices.tolist(), 1)}
    scores, length, held = ranks.tolist(), cut.op.length, len(positions)
    judged = [scores[slot] for slot in stays if scores[slot] != float("inf")]
    least = min(judged) if judged else None
    told = {}
    for slot, at in enumerate(positions):
        if slot in stays:
            continue
        place = places[slot]
        ranked = f"score {scores[slot]:.4g}, rank {place} of {held} ({place / held:.0%})"
        stayed = "only sinks and recent ones stayed" if least is None else f"the last that stayed has {least:.4g}"
        text = f"dropped at step {step} by {policy} at length {length}: {ranked}; {stayed}"
        told[at] = Reason("rank", text, length, scores[slot], place, held, least)
    return told


def _attention_share(held: Tensor, mass: Tensor, known: int, ratio: int) -> tuple[float, set[int]]:
    """What the tokens in these slots ([S], or [K, S]) got of a layer's attention [K, T], and which they are."""
    got, found = 0.0, set[int]()
    for head, total in enumerate(mass.tolist()):
        here = held[head] if held.dim() == 2 else held
        first = [at // ratio * ratio for at in here.tolist() if 0 <= at < known]
        tokens = [at + more for at in first for more in range(ratio)]
        got += sum(total[at] for at in tokens)
        found.update(tokens)
    whole = float(mass.sum())
    return (got / whole if whole else 0.0), found


def readable_blocks(row: SequenceTrace, groups: Sequence[CacheGroup]) -> list[BlockUse]:
    """What the row could read after its last step."""
    made = []
    for index, table in enumerate(row.tables):
        group = groups[index]
        ratio, size = 1 if group.lower_level is None else group.lower_level.ratio, group.block_size
        for place, (block, refs) in enumerate(zip(table.blocks, table.refs, strict=True)):
            here = slice(place * size, (place + 1) * size)
            shares, every = [], set[int]()
            for layer in group.layers:
                held = table.held[layer][:, here] if isinstance(table.held, dict) else table.held[here]
                share, found = _attention_share(held, row.mass[layer], row.known, ratio)
                shares.append(share)
                every |= found
            ends = (min(every), max(every)) if every else (-1, -1)
            published = (index, block) in row.published
            taken = int((held >= 0).any(0).sum()) if held.dim() == 2 else int((held >= 0).sum()) * ratio
            made.append(BlockUse(index, block, taken, *ends, refs, published, tuple(shares)))
    return made
