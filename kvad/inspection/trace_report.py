"""The cache trace as one plain value, and as JSON (``trace_renderer.py``: as text).

In every line of a sequence (layers that retain the same tokens, or one kv head of a layer if heads differ), every
position is in exactly one *state* at a time:

==  ==============  ================================================================================
#   ``hot``         held as it was computed, by this sequence alone
=   ``shared``      the same, in a block that other sequences reference, or found in the prefix cache
o   ``quantized``   held in the formats of a tiered policy's quantized level
~   ``summarized``  one of several tokens that share one slot
s   ``offloaded``   held as it was computed, in host memory or on disk
x   ``swapped``     not in the pool: the sequence was preempted (copied out, or recomputed later)
.   ``evicted``     not visible to any later token of this sequence
-   ``unwritten``   not computed: the last sampled token never is
==  ==============  ================================================================================

No torch. ``SCHEMA`` grows when a key of the JSON is removed or changes its meaning; new keys may be added any time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    """Reason of a change.

    ===========================  ==================================================================================
    written, own                 computed; in a block that no other sequence references any more
    hit, shared, fork            in the pool's prefix cache; shared with later sequences; copied from the parent sample
    prefix-cache                 read from a block store, ``source``: "ram", "packed" (in RAM) or "disk"
    restored                     as an earlier request left it (``source`` "session"), evictions included
    window, score, dropped       evicted by a policy: by position, by score, at the end of the last level
    quantized, summarized        moved to another level, as is offloaded
    swapped-out, preempted       preempted: copied out (``source``: to "ram" or "disk"), or dropped
    swapped-in, recomputed       returned: its copy (``source``: from where), or recomputed
    lost                         without a reason: a bug
    ===========================  ==================================================================================
    """

    cause: str
    text: str
    length: int  # of the sequence at that time
    score: float | None = None  # of a ranking policy
    rank: int | None = None  # among the held tokens; 1 is the best
    num_candidates: int | None = None  # held tokens
    lowest_score: float | None = None  # that stayed; None: the others would have stayed anyway
    source: str | None = None  # "pool" for a hit


class StateChange(NamedTuple):
    """A change: at ``step`` the positions ``first .. last`` got ``state``."""

    step: int
    first: int
    last: int
    state: str
    why: Reason


class GroupTrace(NamedTuple):
    """The trace of layers, or of one kv head."""

    group: int
    layers: tuple[int, ...]
    head: int | None  # None: all kv heads retain the same tokens
    states: str  # final signs, one per position
    changes: tuple[StateChange, ...]


class BlockUse(NamedTuple):
    """A block that the sequence could read at its end."""

    group: int
    block: int
    tokens: int  # in it, between first and last (of a summary: those it represents; if heads differ: of all heads)
    first: int
    last: int
    rows: int  # sequences that reference it
    published: bool  # a later sequence with the same tokens finds it
    share: tuple[float, ...]  # by layer: share of the sequence's attention that its present tokens received


class SequenceEventRecord(NamedTuple):
    """An event of a sequence: admitted, preempted, swapped."""

    step: int
    text: str


class SequenceReport(NamedTuple):
    """One sample of one request."""

    request: int
    sample: int
    prompt: int  # number of tokens
    num_prefix_hits: int  # tokens found in the prefix cache, block stores included
    tokens: tuple[int, ...]  # prompt and generated
    pieces: tuple[str, ...]
    finish: str | None
    error: str | None
    lines: tuple[GroupTrace, ...]
    blocks: tuple[BlockUse, ...]
    attention_mass: tuple[tuple[tuple[float, ...], ...], ...]  # [layers][K][positions], summed over the queries
    events: tuple[SequenceEventRecord, ...]
    restored: int = 0  # tokens that an earlier request left


class GroupReport(NamedTuple):
    """A cache group."""

    state: str  # of its tokens: hot, quantized, summarized or offloaded
    layers: tuple[int, ...]
    kv_heads: int
    policy: str
    stored: str  # formats
    block_size: int
    blocks: int  # that sequences can own
    bytes: int  # of the pool


class StepSpan(NamedTuple):
    """Tokens ``start .. start + count - 1`` of sequence ``row`` were computed."""

    row: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count


class BlockChange(NamedTuple):
    """A block of a group's pool from a step on."""

    group: int
    block: int
    references: int  # sequences that reference it
    is_cached: bool  # in the prefix cache: a later sequence with the same tokens finds it


class TableChange(NamedTuple):
    """The block table of sequence ``row`` in a group from a step on: as before up to index ``start``, then ``entries``.

    An entry is (block, filled slots, first position, last position); -1, -1 if the block is empty.
    """

    row: int
    group: int
    start: int
    entries: tuple[tuple[int, int, int, int], ...]


class TraceStep(NamedTuple):
    """One step, and what it changed in the pools and the block tables."""

    step: int
    spans: tuple[StepSpan, ...]
    used: tuple[int, ...]  # referenced blocks of each group
    pool: tuple[BlockChange, ...] = ()
    tables: tuple[TableChange, ...] = ()


class StorageReport(NamedTuple):
    """Storage used at the end of a run: pool, RAM store, disk store, offload or swap space."""

    location: str
    bytes: int
    limit: int | None  # in bytes; None: no known bound
    blocks: int | None = None  # None: not in blocks
    of: int | None = None
    peak: int | None = None  # maximum of bytes, if known
    text: str = ""


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
    end: tuple[BlockChange, ...] = ()  # blocks that changed when the last sequences ended, which frees their tables


def trace_to_json(report: TraceReport) -> dict[str, Any]:
    """Build plain values, numbers rounded to 6 digits (schema: docs/explanation/kv-cache/inspect.md)."""
    plain: dict[str, Any] = {"schema": SCHEMA, "states": STATES, **_plain(report)}
    for row, fields in zip(report.rows, plain["rows"], strict=True):
        fields["counts"] = dict(count_states(row))
    return plain


def _plain(value: Any) -> Any:
    """Convert records to objects and tuples to lists; fields of a Reason that do not apply are omitted."""
    if isinstance(value, Reason):
        return {name: _plain(field) for name, field in value._asdict().items() if field is not None}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(field) for name, field in value._asdict().items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def count_states(row: SequenceReport, lines: Sequence[GroupTrace] | None = None) -> Mapping[str, int]:
    """Count positions in each state, over all layers and kv heads."""
    signs: Counter[str] = Counter()
    for line in row.lines if lines is None else lines:
        all_heads = sum(len(row.attention_mass[layer]) for layer in line.layers)
        for sign, number in Counter(line.states).items():
            signs[sign] += number * (all_heads if line.head is None else len(line.layers))
    return {state: signs[sign] for state, sign in STATES.items()}
