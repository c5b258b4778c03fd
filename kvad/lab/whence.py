"""Where a row's tokens came from when it was seated, and where they went when it gave way: reasons and life lines.

Plain values in, sentences out; the recorder (``microscope.py``) asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from kvad.cache.deposits import Found
from kvad.engine.swaps import Swapped
from kvad.errors import counted
from kvad.lab.slide import Why

__all__ = ["Origin", "away", "begun", "fell", "kept_of", "left_why", "seated"]

TIERS = {"ram": "the RAM tier", "packed": "packed RAM (a tier)", "disk": "the disk tier"}
PARKED = {"ram": "RAM", "disk": "disk", None: "RAM, beyond its bound"}
NO_MORE = {
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


class Origin(NamedTuple):
    """Of the first ``tokens``, with which a row was seated at ``step``.  ``way``: "found" (in the pool's
    prefixes, and in the tiers: ``tiers`` has the place by group and block), "restored" (left by an earlier request,
    ``session`` in words), "back" (its own copy, from ``place``) or "shared" (with the sample it was forked from)."""

    step: int
    way: str = "found"
    tokens: int = 0
    size: int = 1  # of a block
    place: str = ""
    session: str = ""
    tiers: Mapping[tuple[int, int], str] = {}

    def why(self, group: int, at: int, length: int, lower: str) -> Why:
        """Why token ``at`` is there, in the state ``lower`` where it is held there in another way."""
        when, form = f"at step {self.step}", f", {lower}" if lower else ""
        if self.way == "restored":
            return Why("restored", f"restored {when} from {self.session}{form}", length, source="session")
        if self.way == "back":
            return Why("back", f"back {when}, from {PARKED[self.place]}{form}", length, source=self.place)
        place = self.tiers.get((group, at // self.size))
        if place is not None:
            return Why("tier", f"read back from {TIERS[place]} {when}", length, source=place)
        return Why("hit", f"found {when} in the prefix cache, in the pool", length, source="pool")


def kept_of(found: Found | None) -> dict[tuple[int, int], str]:
    """(group, block of the row) -> the place from which it was read back."""
    came = () if found is None else found.came
    return {(group, each.depth - 1): each.place for each in came for group in each.groups}


# ---------------------------------------------------------------- a row's life


def seated(origin: Origin, found: Found | None, nbytes: int, missed: str) -> str:
    """``nbytes``: of what was restored, or of the copy that came back, where known; ``missed``: why what an earlier
    request left was of no use."""
    known = counted(origin.tokens, "token")
    size = f" ({nbytes:,} bytes)" if nbytes else ""
    if origin.way == "shared":
        return f", {known} shared with sample 0"
    if origin.way == "restored":
        return f", {known} restored from {origin.session}{size}"
    if origin.way == "back":
        return f", {known} back from {PARKED[origin.place]}{size}"
    told = f", {known} found in the prefix cache: {_places(origin, found)}" if origin.tokens else ""
    if found is not None and found.why:
        told += f"; {NO_MORE.get(found.why, 'the tiers gave no more of it')} ({found.why})"
    return told + (f"; {origin.session} is of no use: {missed}" if missed else "")


def _places(origin: Origin, found: Found | None) -> str:
    """How many of the tokens were where."""
    blocks, nbytes = Counter[str](), Counter[str]()
    for each in () if found is None else found.came:
        blocks[each.place] += 1
        nbytes[each.place] += each.nbytes
    if found is not None and found.passed:
        blocks[found.came[0].place] += found.passed  # whatever brought the rest made these free
    pool = origin.tokens - sum(blocks.values()) * origin.size
    told = [f"{pool} in the pool"] if pool or not blocks else []
    for place, count in blocks.items():
        told.append(f"{count * origin.size} read back from {TIERS[place]} ({nbytes[place]:,} bytes)")
    return ", ".join(told)


def away(swapped: Swapped, held: int) -> tuple[str, str]:
    """(cause, life line) of a row of ``held`` tokens that gave way."""
    if swapped.what == "out":
        return (
            "parked",
            f"parked: {counted(held, 'token')}, {swapped.nbytes:,} bytes, swapped to {PARKED[swapped.place]}",
        )
    return "preempted", f"preempted: given back, its {counted(held, 'token')} are to be computed again"


def fell(swapped: Swapped) -> str:
    """What became of a copy that will not come back."""
    if swapped.what == "lost":
        return f"its copy is lost: {swapped.why}"
    return "its copy is dropped: enough of it is in the prefix cache by now, the rest is computed again"


def begun(swapped: Swapped | None, forked: bool) -> str:
    """The way in which a row was seated."""
    if swapped is not None:
        return "restored" if swapped.place is None else "back"
    return "shared" if forked else "found"


def left_why(origin: Origin, length: int) -> Why:
    """Why a token of the past is not there of which nothing else says why."""
    when = f"at step {origin.step}"
    if origin.way == "restored":
        return Why("restored", f"not held by {origin.session} any more, {when}", length, source="session")
    return Why("fork", f"not held any more by the sample that this row was forked from, {when}", length)
