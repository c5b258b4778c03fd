"""The cache trace as one plain value, and as JSON (``trace_text.py``: as text).

A :class:`Slide` is of one run.  In each of its rows every position is, in each line (layers that keep the same tokens,
or one kv head of a layer where heads keep others), in exactly one *state* at a time:

==  ==============  ================================================================================
#   ``hot``         held as it was computed, by this row alone
=   ``shared``      the same, in a block that other rows count on, or that was found in the prefix cache
o   ``quantized``   held in the formats of a tiered policy's quantized level
~   ``summarized``  one of several tokens that one slot stands for
s   ``offloaded``   held as it was computed, in host memory or on disk
x   ``swapped``     not in the pool: the row was preempted (copied out, or recomputed later)
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
    "quantized": "o",
    "summarized": "~",
    "offloaded": "s",
    "swapped": "x",
    "evicted": ".",
    "unwritten": "-",
}


class Reason(NamedTuple):
    """Reason of a change: ``cause``, ``text``, and ``length`` of the sequence at that time.

    ==============================  =========================================================================
    written, own                    computed; in a block that no other sequence references any more
    hit, shared, fork               in the pool's prefix cache; shared with later sequences; copied from the parent
    sample prefix-cache                    read from a block store, ``source``: "ram", "packed" (in RAM) or "disk"
    restored                        as an earlier request left it (``source`` "session"), evictions included window,
    score, dropped          evicted by a policy: by position, by score, at the end of the last level quantized,
    summarized,          moved to another level offloaded swapped-out, preempted          preempted: copied out
    (``source``: to "ram" or "disk"), or dropped swapped-in, recomputed          returned: its copy (``source``: from
    where), or recomputed lost                            without a reason: a bug ==============================
    =========================================================================

    For ``score``: the token's ``score``, its ``rank`` among the ``num_candidates`` held tokens (1: the best), and
    ``lowest_score``, the lowest that stayed (None: the others would have stayed anyway). ``source`` of a hit: "pool".
    """

    cause: str
    text: str
    length: int
    score: float | None = None
    rank: int | None = None
    num_candidates: int | None = None
    lowest_score: float | None = None
    source: str | None = None


class StateChange(NamedTuple):
    """A change: at ``step`` the positions ``first .. last`` got ``state``."""

    step: int
    first: int
    last: int
    state: str
    why: Reason


class GroupTrace(NamedTuple):
    """The trace of layers; ``head`` None: all kv heads retain the same.

    ``states``: final signs, one per position.
    """

    group: int
    layers: tuple[int, ...]
    head: int | None
    states: str
    changes: tuple[StateChange, ...]


class BlockUse(NamedTuple):
    """A block that the sequence could read at its end.

    ``tokens`` in it, between ``first`` and ``last`` (of a summary: those it represents; if heads differ: of all heads);
    ``rows``: sequences that reference it; ``published``: a later sequence with the same tokens finds it; ``share``: by
    layer, share of the sequence's attention that its present tokens received.
    """

    group: int
    block: int
    tokens: int
    first: int
    last: int
    rows: int
    published: bool
    share: tuple[float, ...]


class SequenceEventRecord(NamedTuple):
    """An event of a sequence: admitted, preempted, swapped."""

    step: int
    text: str


class SequenceReport(NamedTuple):
    """One sample of one request.

    ``tokens`` and ``pieces``: prompt and generated; ``num_prefix_hits``: tokens found in the prefix cache (block stores
    included), ``restored``: those that an earlier request left; ``attention_mass`` [layers][K][positions]: sum of the
    attention from this sequence's queries.
    """

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
    """A cache group.

    ``state``: hot, quantized, summarized or offloaded; ``policy``: of its layers; ``stored``: its formats; ``blocks``
    that sequences can own; ``bytes`` of the pool.
    """

    state: str
    layers: tuple[int, ...]
    kv_heads: int
    policy: str
    stored: str
    block_size: int
    blocks: int
    bytes: int


class StepSpan(NamedTuple):
    """Tokens ``start .. start + count - 1`` of sequence number ``row``."""

    row: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count


class TraceStep(NamedTuple):
    """One step; ``used``: referenced blocks of each group."""

    step: int
    spans: tuple[StepSpan, ...]
    used: tuple[int, ...]


class StorageReport(NamedTuple):
    """Storage used at the end of a run: pool, RAM store, disk store, offload, swap space.

    ``bytes`` in use (``limit`` None: no known bound), in ``blocks`` of ``of`` (None: not in blocks); ``peak``: maximum
    of bytes, if known; ``text``: a description.
    """

    location: str
    bytes: int
    limit: int | None
    blocks: int | None
    of: int | None
    peak: int | None
    text: str


class TraceReport(NamedTuple):
    """The cache trace of a run."""

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
    """Build plain objects, lists, numbers and texts (schema: docs/kv-cache.md).

    Numbers are rounded to 6 digits.
    """
    names = "model", "policy", "layout", "layers"
    return {
        "schema": SCHEMA,
        **{name: getattr(slide, name) for name in names},
        "states": STATES,
        "storage": [place._asdict() for place in slide.storage],
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
        "attention_mass": [[[_short(x) for x in head] for head in layer] for layer in row.attention_mass],
        "events": [each._asdict() for each in row.events],
    }


def _line_json(line: GroupTrace) -> dict[str, object]:
    changes = [{**change._asdict(), "why": _why_json(change.why)} for change in line.changes]
    return {**line._asdict(), "layers": list(line.layers), "changes": changes}


def _why_json(why: Reason) -> dict[str, object]:
    fields = {name: value for name, value in why._asdict().items() if value is not None}
    return {name: _short(value) if isinstance(value, float) else value for name, value in fields.items()}


def _short(x: float) -> float | None:
    return float(f"{x:.6g}") if math.isfinite(x) else None


def count_states(row: SequenceReport, lines: Sequence[GroupTrace] | None = None) -> Mapping[str, int]:
    """Count positions in each state, over all layers and kv heads."""
    signs: Counter[str] = Counter()
    for line in row.lines if lines is None else lines:
        times = (
            len(line.layers) if line.head is not None else sum(len(row.attention_mass[layer]) for layer in line.layers)
        )
        for sign, number in Counter(line.states).items():
            signs[sign] += number * times
    return {state: signs[sign] for state, sign in STATES.items()}
