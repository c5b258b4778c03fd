"""The part of docs/matrix.md on where a cache lives, and its short form in docs/kv-cache/verify.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvad.cache.policy_parser import POLICIES
from kvad.verify.round_trips import ROUND_TRIPS as HOW
from tests.support.matrix.cells import key
from tests.support.matrix.lives import MESHES, WAYS, sample

Cell = Callable[[str, Mapping[str, Any]], str]
Table = Callable[[Any, Any], str]
CHANNEL = "keys by channel"
BEGIN, END = "<!-- where it lives: written by scripts/matrix -->", "<!-- until here -->"

HEAD = """Of each line, all rows are sent that way and come back (or stay there, spilled), in company, and what they
say then is held against what a row says that never left. A line is a sample: in all of them every policy meets every
format, every encoding and both topologies. "computed" after a word: nothing went that way, and the row was computed
again, for the reason whose number follows, or because no other way is known for such rows.

{ways}
"""


def pages(results: Mapping[str, Any], cell: Cell, table: Table) -> str:
    """Both tables; ``cell`` says a result in a word, ``table`` is GitHub's."""
    lines = []
    for topology, encoding, policy, form in sample():
        each = (topology, encoding, policy, form)
        lives = [cell(policy, results["lives"].get(key(*each, way), {})) for way in WAYS]
        cut = [cell(policy, results["shards"].get(key(*each, mesh), {})) for mesh in MESHES]
        lines.append((f"`{policy}`", f"`{form}`", encoding, topology, *lives, *cut))
    head = ("policy", "format", "encoding", "topology", *WAYS, *(f"ranks {mesh}" for mesh in MESHES))
    return HEAD.format(ways=_ways()) + table(head, lines)


def _ways() -> str:
    said = [f"* {name}: {HOW[each.way].description}{_changed(each.then or each.first)}" for name, each in WAYS.items()]
    said.append("* ranks 2x1, 1x2: by kv heads, and by layers, over two processes, against one process")
    return "\n".join(said) + "\n"


def _changed(fields: Mapping[str, Any]) -> str:
    return "".join(f" ({name.replace('_', ' ')}: {value})" for name, value in fields.items())


def short(results: Mapping[str, Any], table: Table) -> str:
    """A line per policy: what all of its cells say."""
    lines = []
    for name in (*POLICIES, CHANNEL):
        every = [each for each in sample() if each[0] != "encoder" and name == _name(each)]
        lives = [[results["lives"].get(key(*each, way), {}) for each in every] for way in WAYS]
        cut = [[results["shards"].get(key(*each, mesh), {}) for each in every] for mesh in MESHES]
        said = (" or ".join(dict.fromkeys(map(word, some))) for some in (*lives, *cut))
        lines.append((name if name == CHANNEL else f"`{name}`", *said))
    return table(("policy", *WAYS, *(f"ranks {mesh}" for mesh in MESHES)), lines)


def _name(cell: tuple[str, str, str, str]) -> str:
    return CHANNEL if cell[3].endswith("-channel") else cell[2]


def word(said: Mapping[str, Any]) -> str:
    if not said:
        return "not measured"
    if "refused" in said:
        return "refused"
    if not said["structure"] <= 1e-10:
        return "**BROKEN**"
    computed = "computed again" if said.get("moved") == 0 else ""
    return computed or ("own" if said.get("judge") == "own" else "exact")


def placed(text: str, results: Mapping[str, Any], table: Table) -> str:
    """A page with the short table between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{short(results, table)}\n{END}{after}"
