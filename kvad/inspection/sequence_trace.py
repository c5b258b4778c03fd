"""Trace of one sequence while it runs: states by position, changes, attention and readable blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvad.cache import CacheGroup
from kvad.cache.device import EvictionEvent
from kvad.engine import scheduling
from kvad.inspection.provenance import TokenOrigin
from kvad.inspection.trace_report import STATES, BlockUse, Reason, SequenceEventRecord, StateChange

NAMES = tuple(STATES)  # a state's code is its index here
SIGNS = "".join(STATES.values())
HOT, SHARED, QUANTIZED, SUMMARIZED, OFFLOADED, SWAPPED, EVICTED, UNWRITTEN = range(len(NAMES))


class ReadableBlocks(NamedTuple):
    """Blocks of a group that a sequence can read."""

    blocks: tuple[int, ...]
    refs: tuple[int, ...]  # number of sequences that reference each
    held: Tensor | dict[int, Tensor]  # positions in their slots [S]; by layer [K, S] if heads differ


class SequenceTrace:
    """Trace of one sequence; lists are per token group, with a line per layer and head if heads differ."""

    def __init__(
        self, number: int, sequence: scheduling.sequence.TokenSequence, origin: TokenOrigin, lines: Sequence[int]
    ) -> None:
        self.number, self.sequence = number, sequence
        self.origin = origin  # of the last admission
        self.num_prefix_hits = origin.tokens if origin.source == "found" else 0
        self.restored = origin.tokens if origin.source == "restored" else 0
        self.codes = [torch.empty((count, 0), dtype=torch.uint8) for count in lines]  # [lines, positions]
        self.preempted_codes = self.codes  # at the last preemption
        self.changes: list[list[list[StateChange]]] = [[[] for _ in range(count)] for count in lines]
        self.mass: dict[int, Tensor] = {}  # layer -> attention [K, positions]
        self.tables: list[ReadableBlocks] = []
        self.published: set[tuple[int, int]] = set()  # (group, block)
        self.events: list[SequenceEventRecord] = []
        self.is_swapped, self.length = False, 0
        self.finish: str | None = None
        self.error: str | None = None

    def grow(self, index: int, length: int) -> Tensor:
        """Return a group's codes of at least ``length`` positions."""
        codes = self.codes[index]
        more = max(0, length - codes.shape[1])
        codes = self.codes[index] = torch.cat((codes, codes.new_full((codes.shape[0], more), UNWRITTEN)), dim=1)
        return codes

    def record(self, index: int, line: int, change: StateChange) -> None:
        """Record a change; equal changes of neighboring positions are merged."""
        changes = self.changes[index][line]
        before = changes[-1] if changes else None
        if before is not None and before == change._replace(first=before.first, last=change.first - 1):
            changes[-1] = before._replace(last=change.last)
        else:
            changes.append(change)

    def block_uses(self, groups: Sequence[CacheGroup]) -> list[BlockUse]:
        """Return the blocks that the sequence could read after its last step."""
        uses = []
        for index, (table, group) in enumerate(zip(self.tables, groups, strict=False)):
            ratio, size = ratio_of(group), group.block_size
            for place, (block, refs) in enumerate(zip(table.blocks, table.refs, strict=True)):
                here = slice(place * size, (place + 1) * size)
                shares, tokens = [], set[int]()
                for layer in group.layers:
                    held = table.held[layer][:, here] if isinstance(table.held, dict) else table.held[here]
                    share, positions = _attention_share(held, self.mass[layer], self.length, ratio)
                    shares.append(share)
                    tokens |= positions
                ends = (min(tokens), max(tokens)) if tokens else (-1, -1)
                used = int((held >= 0).any(0).sum()) if held.dim() == 2 else int((held >= 0).sum()) * ratio
                published = (index, block) in self.published
                uses.append(BlockUse(index, block, used, *ends, refs, published, tuple(shares)))
        return uses


def ratio_of(group: CacheGroup) -> int:
    return 1 if group.lower_level is None else group.lower_level.ratio


def level_state(group: CacheGroup) -> int:
    """Return the state of tokens in this group, if no other sequence shares their block."""
    if group.lower_level is None:
        return HOT
    if group.lower_level.is_offloaded:
        return OFFLOADED
    return QUANTIZED if group.lower_level.ratio == 1 else SUMMARIZED


def _attention_share(held: Tensor, mass: Tensor, known: int, ratio: int) -> tuple[float, set[int]]:
    """Return the share of a layer's attention [K, T] of the tokens in these slots ([S] or [K, S]), and the tokens."""
    share, positions = 0.0, set[int]()
    for head, total in enumerate(mass.tolist()):
        in_slots = held[head] if held.dim() == 2 else held
        first = [at // ratio * ratio for at in in_slots.tolist() if 0 <= at < known]
        tokens = [at + more for at in first for more in range(ratio)]
        share += sum(total[at] for at in tokens)
        positions.update(tokens)
    whole = float(mass.sum())
    return (share / whole if whole else 0.0), positions


def scatter_by_position(held: Tensor, values: Tensor, end: int, empty: int = 0) -> Tensor:
    """Scatter values [n, S] of slots that hold positions [n, S] -> [n, end]; ``empty`` where no slot has the position.

    Values of slots that hold the same position are added, if ``empty`` is 0.
    """
    known = (held >= 0) & (held < end)
    index, out = held.masked_fill(~known, end), values.new_full((held.shape[0], end + 1), empty)
    return (out.scatter_(1, index, values) if empty else out.scatter_add_(1, index, values * known))[:, :end]


def spread_summaries(mass: Tensor, positions: Tensor, ratio: int) -> None:
    """Distribute the attention of each summary (at ``positions``) evenly over its tokens, in place."""
    for middle in positions[positions >= 0].tolist() if ratio > 1 else ():
        first = middle // ratio * ratio
        mass[:, first : first + ratio] = mass[:, middle : middle + 1].clone() / ratio


def eviction_reasons(event: EvictionEvent, head: int, policy: str, step: int) -> dict[int, Reason]:
    """Return the reasons of an eviction by position."""
    scores, positions, stays = event.scores[head], event.positions[head].tolist(), set(event.order[head].tolist())
    order = scores.sort(descending=True, stable=True).indices.tolist()
    ranks = {slot: rank for rank, slot in enumerate(order, 1)}
    values, length, count = scores.tolist(), event.op.length, len(positions)
    ranked = [values[slot] for slot in stays if values[slot] != float("inf")]
    least = min(ranked) if ranked else None
    retained = "only sinks and recent ones stayed" if least is None else f"the lowest that stayed has {least:.4g}"
    reasons = {}
    for slot, position in enumerate(positions):
        if slot not in stays:
            rank = f"rank {ranks[slot]} of {count} ({ranks[slot] / count:.0%})"
            score = f"score {values[slot]:.4g}, {rank}; {retained}"
            text = f"dropped at step {step} by {policy} at length {length}: {score}"
            reasons[position] = Reason("score", text, length, values[slot], ranks[slot], count, least)
    return reasons
