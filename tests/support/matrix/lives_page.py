"""The part of docs/reference/matrix.md on storage, and its short form in docs/explanation/kv-cache/verify.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvad.cache.policy_parser import POLICIES
from kvad.verify.round_trips import ROUND_TRIPS
from tests.support.matrix.cells import key
from tests.support.matrix.lives import MESHES, WAYS, sample

Cell = Callable[[str, Mapping[str, Any]], str]
Table = Callable[[Any, Any], str]
CHANNEL = "keys by channel"
BEGIN, END = "<!-- storage table: written by scripts/matrix -->", "<!-- until here -->"

HEAD = """All sequences of a line make the round trip in one batch (or stay offloaded), and their logits are compared
with those of sequences that never left the pool. The lines are a sample in which every policy meets every format,
every encoding and both topologies. "computed" after a result: nothing was transferred and the sequence was recomputed,
for the numbered reason, or because such sequences have no other way.

{ways}
"""


def pages(results: Mapping[str, Any], cell: Cell, table: Table) -> str:
    """Write both tables; ``cell`` formats a result, ``table`` a Markdown table."""
    lines = []
    for topology, encoding, policy, form in sample():
        each = (topology, encoding, policy, form)
        round_trips = [cell(policy, results["lives"].get(key(*each, way), {})) for way in WAYS]
        sharded = [cell(policy, results["shards"].get(key(*each, mesh), {})) for mesh in MESHES]
        lines.append((f"`{policy}`", f"`{form}`", encoding, topology, *round_trips, *sharded))
    head = ("policy", "format", "encoding", "topology", *WAYS, *(f"ranks {mesh}" for mesh in MESHES))
    return HEAD.format(ways=_ways()) + table(head, lines)


def _ways() -> str:
    result = [
        f"* {name}: {ROUND_TRIPS[each.way].description}{_changed(each.after or each.before)}"
        for name, each in WAYS.items()
    ]
    result.append("* ranks 2x1, 1x2: sharded by KV heads and by layers over two processes, compared with one process")
    return "\n".join(result) + "\n"


def _changed(fields: Mapping[str, Any]) -> str:
    return "".join(f" ({name.replace('_', ' ')}: {value})" for name, value in fields.items())


def short(results: Mapping[str, Any], table: Table) -> str:
    """Write one line per policy with the results of all of its cells."""
    lines = []
    for name in (*POLICIES, CHANNEL):
        policy_cells = [each for each in sample() if each[0] != "encoder" and name == _name(each)]
        round_trips = [[results["lives"].get(key(*each, way), {}) for each in policy_cells] for way in WAYS]
        sharded = [[results["shards"].get(key(*each, mesh), {}) for each in policy_cells] for mesh in MESHES]
        result = (" or ".join(dict.fromkeys(map(word, some))) for some in (*round_trips, *sharded))
        lines.append((name if name == CHANNEL else f"`{name}`", *result))
    return table(("policy", *WAYS, *(f"ranks {mesh}" for mesh in MESHES)), lines)


def _name(cell: tuple[str, str, str, str]) -> str:
    return CHANNEL if cell[3].endswith("-channel") else cell[2]


def word(result: Mapping[str, Any]) -> str:
    if not result:
        return "not measured"
    if "refused" in result:
        return "refused"
    if not result["structure"] <= 1e-10:
        return "**BROKEN**"
    computed = "recomputed" if result.get("moved") == 0 else ""
    return computed or ("own" if result.get("reference") == "solo" else "exact")


def with_table(text: str, results: Mapping[str, Any], table: Table) -> str:
    """Replace the short table between its markers in a page."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{short(results, table)}\n{END}{after}"
