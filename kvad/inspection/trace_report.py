"""What the cache microscope saw, as one plain value, and the same as JSON (``drawslide.py``: as text).

A :class:`Slide` is of one run.  In each of its rows every position is, in each line (layers that keep the same tokens,
or one kv head of a layer where heads keep others), in exactly one *state* at a time:

==  ==============  ================================================================================
#   ``hot``         held as it was computed, by this row alone
=   ``shared``      the same, in a block that other rows count on, or that was found in the prefix cache
o   ``packed``      held in the formats of a hierarchy's packed level
~   ``summarised``  one of several tokens that one slot stands for
s   ``spilled``     held as it was computed, in host memory or on disk
x   ``away``        not in the pool: the row was preempted (parked, or computed again later)
.   ``evicted``     no later token of this row will see it
-   ``unwritten``   not computed: the last sampled token never is
==  ==============  ================================================================================

No torch.  ``SCHEMA`` grows when a key of the JSON changes its meaning or goes; new keys may come at any time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SCHEMA = 1
STATES = {
    "hot": "#",
    "shared": "=",
    "packed": "o",
    "summarised": "~",
    "spilled": "s",
    "away": "x",
    "evicted": ".",
    "unwritten": "-",
}


class Reason(NamedTuple):
    """``cause``, ``text``: a sentence, and ``length``: the row's, at which it happened.

    ==============================  =========================================================================
    written, own                    computed; in a block that no other row counts on any more
    hit, shared, fork               in the prefix cache's pool; with rows that came later; as the sample it is of
    tier                            read back from a tier, ``source``: "ram", "packed" (in RAM) or "disk"
    restored                        as an earlier request left it (``source`` "session"), gone included
    window, rank, gone              let go by a policy: by position, by rank, a level's end
    packed, summary, spilled        moved on to another level
    parked, preempted               gave way: copied out (``source``: where to, "ram" or "disk"), or given back
    back, again                     came back: its copy (``source``: from where), or computed again
    lost                            nothing says why: a bug
    ==============================  =========================================================================

    Of a rank: the token's ``score``, its ``place`` among the ``of`` tokens that were held (1: the best), and ``least``,
    the lowest score that stayed (None: whatever stayed would have stayed anyway).  ``source`` of a hit: "pool"."""

    cause: str
    text: str
    length: int
    score: float | None = None
    rank: int | None = None
    num_candidates: int | None = None
    lowest_score: float | None = None
    source: str | None = None


class StateChange(NamedTuple):
    """At ``step`` the positions ``first .. last`` came into ``state``."""

    step: int
    first: int
    last: int
    state: str
    why: Reason


class GroupTrace(NamedTuple):
    """``head`` None: all kv heads of these layers keep the same.  ``states``: one sign per position, at the end."""

    group: int
    layers: tuple[int, ...]
    head: int | None
    states: str
    changes: tuple[StateChange, ...]


class BlockUse(NamedTuple):
    """A block that the row could read at its end.  ``tokens`` held there, between ``first`` and ``last`` (of a summary:
    those it stands for; of heads that keep others: of all heads).  ``rows`` count on it; ``published``: a later row
    with the same tokens finds it.  ``share``: by layer, of the attention that the row's queries gave, what its present
    tokens got."""

    group: int
    block: int
    tokens: int
    first: int
    last: int
    rows: int
    published: bool
    share: tuple[float, ...]


class SequenceEventRecord(NamedTuple):
    step: int
    text: str


class SequenceReport(NamedTuple):
    """One sample of one request.  ``tokens`` and ``pieces``: prompt and generated; ``claimed``: tokens found in the
    prefix cache (its tiers included), ``restored``: those that an earlier request left.  ``mass``
    [layers][K][positions]: the attention that each got from this row's queries, summed."""

    request: int
    sample: int
    prompt: int
    num_prefix_hits: int
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    finish: str | None
    error: str | None
    lines: tuple[GroupTrace, ...]
    blocks: tuple[BlockUse, ...]
    attention_mass: tuple[tuple[tuple[float, ...], ...], ...]
    events: tuple[SequenceEventRecord, ...]
    restored: int = 0


class GroupReport(NamedTuple):
    """A cache group.  ``form``: the state of what it holds: hot, packed, summarised or spilled; ``policy``: of its
    layers, in words; ``stored``: its formats; ``blocks`` that rows can own; ``bytes`` of the pool."""

    state: str
    layers: tuple[int, ...]
    kv_heads: int
    policy: str
    stored: str
    block_size: int
    blocks: int
    bytes: int


class StepSpan(NamedTuple):
    """Tokens ``start .. start + count - 1`` of row number ``row``."""

    row: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count


class TraceStep(NamedTuple):
    """``used``: blocks of each group that rows counted on."""

    step: int
    spans: tuple[StepSpan, ...]
    used: tuple[int, ...]


class StorageReport(NamedTuple):
    """Where a cache lives, at the run's end: "pool", "tier RAM", "tier disk", "spilled RAM", "spilled disk", "parked
    RAM", "parked disk".  ``bytes`` in use (``limit`` None: without a bound that is known here), in ``blocks`` ``of`` so
    many (None: not by blocks); ``peak``: the most bytes at once, where known.  ``text``: all of it, and more, in
    words."""

    location: str
    bytes: int
    limit: int | None
    blocks: int | None
    of: int | None
    peak: int | None
    text: str


class TraceReport(NamedTuple):
    model: str
    policy: str
    layout: str
    layers: int
    groups: tuple[GroupReport, ...]
    steps: tuple[TraceStep, ...]
    rows: tuple[SequenceReport, ...]
    storage: tuple[StorageReport, ...] = ()


# ---------------------------------------------------------------- JSON


def trace_to_json(slide: TraceReport) -> dict[str, object]:
    """Plain objects, lists, numbers and texts; docs/kv-cache.md has the schema.  Numbers are rounded to 6 digits."""
    names = "model", "policy", "layout", "layers"
    return {
        "schema": SCHEMA,
        **{name: getattr(slide, name) for name in names},
        "states": STATES,
        "places": [place._asdict() for place in slide.storage],
        "groups": [{**group._asdict(), "layers": list(group.layers)} for group in slide.groups],
        "steps": [
            {"step": step.step, "spans": [span._asdict() for span in step.spans], "used": list(step.used)}
            for step in slide.steps
        ],
        "rows": [_row_json(row) for row in slide.rows],
    }


def _row_json(row: SequenceReport) -> dict[str, object]:
    return {
        **row._asdict(),
        "tokens": list(row.tokens),
        "pieces": list(row.pieces),
        "counts": dict(count_states(row)),
        "lines": [_line_json(line) for line in row.lines],
        "blocks": [{**block._asdict(), "share": [_short(x) for x in block.share]} for block in row.blocks],
        "mass": [[[_short(x) for x in head] for head in layer] for layer in row.attention_mass],
        "life": [each._asdict() for each in row.events],
    }


def _line_json(line: GroupTrace) -> dict[str, object]:
    changes = [{**change._asdict(), "why": _why_json(change.why)} for change in line.changes]
    return {**line._asdict(), "layers": list(line.layers), "changes": changes}


def _why_json(why: Reason) -> dict[str, object]:
    said = {name: value for name, value in why._asdict().items() if value is not None}
    return {name: _short(value) if isinstance(value, float) else value for name, value in said.items()}


def _short(x: float) -> float | None:
    return float(f"{x:.6g}") if math.isfinite(x) else None


def count_states(row: SequenceReport, lines: Sequence[GroupTrace] | None = None) -> Mapping[str, int]:
    """Positions in each state, every layer and kv head counted."""
    signs: Counter[str] = Counter()
    for line in row.lines if lines is None else lines:
        times = (
            len(line.layers) if line.head is not None else sum(len(row.attention_mass[layer]) for layer in line.layers)
        )
        for sign, number in Counter(line.states).items():
            signs[sign] += number * times
    return {state: signs[sign] for state, sign in STATES.items()}
