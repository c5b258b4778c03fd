"""Where a row's tokens came from when it was seated, and where they went when it gave way: reasons and life lines.

Plain values in, sentences out; the recorder (``microscope.py``) asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from kvad.cache.deposits import PrefetchResult
from kvad.engine.swaps import PreemptionRecord
from kvad.errors import format_count
from kvad.lab.slide import Reason

__all__ = [
    "TokenOrigin",
    "preemption_reason",
    "start_kind",
    "loss_reason",
    "restored_locations",
    "missing_reason",
    "admission_origin",
]

PREFIX_CACHE_LOCATIONS = {"ram": "the RAM tier", "packed": "packed RAM (a tier)", "disk": "the disk tier"}
SWAP_LOCATIONS = {"ram": "RAM", "disk": "disk", None: "RAM, beyond its bound"}
MISSING_TEXT = {
    "unknown": "the tiers know no more of it",
    "torn": "the next block of it is damaged",
    "alien": "the next block of it is of another version",
    "other": "the next block of it is of another model",
    "collision": "the next block of it holds other tokens",
    "gone": "the next block of it had gone from the tiers",
    "missing": "the next block of it had gone from the tiers",
    "failed": "reading the next block of it failed",
    "withdrawn": "the next block of it was withdrawn",
    "moved": "the pool had lost more of it meanwhile",
    "no room": "the pool has no room for what the tiers know of it",
}


class TokenOrigin(NamedTuple):
    """Of the first ``tokens``, with which a row was seated at ``step``.  ``way``: "found" (in the pool's
    prefixes, and in the tiers: ``tiers`` has the place by group and block), "restored" (left by an earlier request,
    ``session`` in words), "back" (its own copy, from ``place``) or "shared" (with the sample it was forked from)."""

    step: int
    source: str = "found"
    tokens: int = 0
    size: int = 1  # of a block
    location: str = ""
    session: str = ""
    restored: Mapping[tuple[int, int], str] = {}

    def describe(self, group: int, at: int, length: int, lower: str) -> Reason:
        """Why token ``at`` is there, in the state ``lower`` where it is held there in another way."""
        when, form = f"at step {self.step}", f", {lower}" if lower else ""
        if self.source == "restored":
            return Reason("restored", f"restored {when} from {self.session}{form}", length, source="session")
        if self.source == "back":
            return Reason(
                "back", f"back {when}, from {SWAP_LOCATIONS[self.location]}{form}", length, source=self.location
            )
        place = self.restored.get((group, at // self.size))
        if place is not None:
            return Reason("tier", f"read back from {PREFIX_CACHE_LOCATIONS[place]} {when}", length, source=place)
        return Reason("hit", f"found {when} in the prefix cache, in the pool", length, source="pool")


def restored_locations(found: PrefetchResult | None) -> dict[tuple[int, int], str]:
    """(group, block of the row) -> the place from which it was read back."""
    came = () if found is None else found.blocks
    return {(group, each.depth - 1): each.location for each in came for group in each.groups}


# ---------------------------------------------------------------- a row's life


def admission_origin(origin: TokenOrigin, found: PrefetchResult | None, nbytes: int, missed: str) -> str:
    """``nbytes``: of what was restored, or of the copy that came back, where known; ``missed``: why what an earlier
    request left was of no use."""
    known = format_count(origin.tokens, "token")
    size = f" ({nbytes:,} bytes)" if nbytes else ""
    if origin.source == "shared":
        return f", {known} shared with sample 0"
    if origin.source == "restored":
        return f", {known} restored from {origin.session}{size}"
    if origin.source == "back":
        return f", {known} back from {SWAP_LOCATIONS[origin.location]}{size}"
    told = f", {known} found in the prefix cache: {_describe_locations(origin, found)}" if origin.tokens else ""
    if found is not None and found.miss_reason:
        told += f"; {MISSING_TEXT.get(found.miss_reason, 'the tiers gave no more of it')} ({found.miss_reason})"
    return told + (f"; {origin.session} is of no use: {missed}" if missed else "")


def _describe_locations(origin: TokenOrigin, found: PrefetchResult | None) -> str:
    """How many of the tokens were where."""
    blocks, nbytes = Counter[str](), Counter[str]()
    for each in () if found is None else found.blocks:
        blocks[each.location] += 1
        nbytes[each.location] += each.nbytes
    if found is not None and found.num_skipped:
        blocks[found.blocks[0].location] += found.num_skipped  # whatever brought the rest made these free
    pool = origin.tokens - sum(blocks.values()) * origin.size
    told = [f"{pool} in the pool"] if pool or not blocks else []
    for place, count in blocks.items():
        told.append(f"{count * origin.size} read back from {PREFIX_CACHE_LOCATIONS[place]} ({nbytes[place]:,} bytes)")
    return ", ".join(told)


def preemption_reason(swapped: PreemptionRecord, held: int) -> tuple[str, str]:
    """(cause, life line) of a row of ``held`` tokens that gave way."""
    if swapped.action == "out":
        return (
            "parked",
            f"parked: {format_count(held, 'token')}, {swapped.nbytes:,} bytes, swapped to {SWAP_LOCATIONS[swapped.location]}",
        )
    return "preempted", f"preempted: given back, its {format_count(held, 'token')} are to be computed again"


def loss_reason(swapped: PreemptionRecord) -> str:
    """What became of a copy that will not come back."""
    if swapped.action == "lost":
        return f"its copy is lost: {swapped.reason}"
    return "its copy is dropped: enough of it is in the prefix cache by now, the rest is computed again"


def start_kind(swapped: PreemptionRecord | None, forked: bool) -> str:
    """The way in which a row was seated."""
    if swapped is not None:
        return "restored" if swapped.location is None else "back"
    return "shared" if forked else "found"


def missing_reason(origin: TokenOrigin, length: int) -> Reason:
    """Why a token of the past is not there of which nothing else says why."""
    when = f"at step {origin.step}"
    if origin.source == "restored":
        return Reason("restored", f"not held by {origin.session} any more, {when}", length, source="session")
    return Reason("fork", f"not held any more by the sample that this row was forked from, {when}", length)
