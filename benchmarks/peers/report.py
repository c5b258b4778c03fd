"""Tables of result lines: values by engine, kvad's ratio to each, and the bars that were set."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.scenarios import DEFAULT, SCENARIOS, Cell, cells, needs_of
from benchmarks.peers.shapes import SHAPES

Line = dict[str, Any]
Lines = dict[tuple[str, str, str, str], Line]  # by shape, scenario, precision and engine
ENGINES = ("kvad", "llama.cpp", "openvino", "transformers", "ctranslate2")
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
SPARE_RSS = 350e6  # bytes that a process may have in addition to weights and cache
MIN_TURNS_OF_SPREAD = 3
TURNS = 5  # that a measurement should have
MAX_OTHERS_CPU = 0.05  # fraction of the cores that other processes may use
NOT_MEASURED = "not measured"
LOW_LIMIT = "limit measured too low"


def latest(lines: Sequence[Line]) -> Lines:
    """Return the last line of each shape, scenario, precision and engine, in the order of their first lines."""
    return {(line["shape"], line["scenario"], line["precision"], line["engine"]): line for line in lines}


def ratio(kvad: Line, peer: Line) -> float:
    """Return kvad's speed relative to a peer's; above 1 kvad is faster.

    It is the median of the rounds' ratios, because the machine's speed changes between rounds; the ratio of the medians
    if they are of different runs, or one failed in a round.
    """
    own, other = kvad["values"], peer["values"]
    if len(own) != len(other) or kvad["date"] != peer["date"]:
        own, other = [kvad["median"]], [peer["median"]]
    quotient = statistics.median(a / b for a, b in zip(own, other, strict=True))
    return float(1 / quotient if kvad["unit"] == "seconds" else quotient)


@dataclass(frozen=True)
class Bar:
    """A ratio that kvad must reach in one scenario.

    ``peer`` is an engine, "best" for the fastest other one with the same precision, "roofline" for the share of the
    least time, or "rss" for the resident bytes that are allowed, divided by those of kvad.
    """

    shape: str
    scenario: str
    precision: str
    peer: str
    factor: float
    peer_precision: str = ""  # default: that of kvad

    def lines(self, found: Lines) -> list[Line]:
        """Return kvad's line and those it is compared with; [] if one is missing."""
        own = found.get((self.shape, self.scenario, self.precision, "kvad"))
        if own is None:
            return []
        if self.peer in ("roofline", "rss"):
            return [own]
        place = self.shape, self.scenario, self.peer_precision or self.precision
        peers = [line for key, line in found.items() if key[:3] == place and key[3] == self.peer]
        if self.peer == "best":
            peers = [line for key, line in found.items() if key[:3] == place and key[3] != "kvad"]
        return [own, *peers] if peers else []

    def value(self, found: Lines) -> float | None:
        """Return the measured ratio; None if a line is missing."""
        lines = self.lines(found)
        if not lines:
            return None
        own, *peers = lines
        if self.peer == "roofline":
            return float(own["of_roofline"])
        if self.peer == "rss":
            return float(self._allowed_rss() / own["peak_rss"])
        return min(ratio(own, line) for line in peers)

    def verdict(self, found: Lines) -> str:
        """Return whether the ratio is reached; a share of the roofline above 1 says nothing."""
        value = self.value(found)
        if value is None:
            return NOT_MEASURED
        if self.peer == "roofline" and value > 1:
            return LOW_LIMIT
        return "yes" if value >= self.factor else "no"

    def _allowed_rss(self) -> float:
        shape = SHAPES[self.shape]
        tokens = needs_of([SCENARIOS[self.scenario]])["tokens"]
        return shape.file_bytes + tokens * shape.cache_bytes(self.precision) + SPARE_RSS


def _rows_bars(shape: str, rows: int, bf16: float, int8: float) -> tuple[Bar, ...]:
    name = f"rows-{rows}"
    openvino = 1.2 if rows == 8 else 1.1
    return (
        Bar(shape, name, "bfloat16", "llama.cpp", bf16),
        Bar(shape, name, "int8", "llama.cpp", int8),
        Bar(shape, name, "bfloat16", "openvino", openvino),
        *((Bar(shape, name, "bfloat16", "transformers", 4.0),) if rows == 8 else ()),
        Bar(shape, f"mixed-{rows}", "bfloat16", "roofline", 0.7),
        Bar(shape, f"mixed-{rows}", "bfloat16", "best", 1.1),
    )


BARS = (
    Bar("135m", "decode-128", "bfloat16", "llama.cpp", 1.2),
    Bar("135m", "decode-128", "int8", "llama.cpp", 1.4),
    Bar("135m", "decode-128", "bfloat16", "transformers", 4.0),
    Bar("135m", "decode-128", "bfloat16", "ctranslate2", 2.5, "float32"),
    Bar("135m", "decode-128", "int8", "ctranslate2", 2.5),
    Bar("1.1b", "decode-128", "bfloat16", "llama.cpp", 0.95),
    Bar("1.1b", "decode-128", "int8", "llama.cpp", 1.05),
    Bar("1.1b", "decode-128", "int8", "ctranslate2", 2.0),
    Bar("135m", "decode-2k", "bfloat16", "llama.cpp", 1.5),
    Bar("135m", "decode-2k", "int8", "llama.cpp", 1.9),
    Bar("135m", "decode-8k", "bfloat16", "llama.cpp", 2.0),
    Bar("135m", "decode-8k", "int8", "llama.cpp", 2.5),
    Bar("135m", "decode-16k", "bfloat16", "roofline", 0.85),
    Bar("135m", "decode-16k", "int8-cache", "kvad", 1.3, "bfloat16"),
    *_rows_bars("135m", 8, 2.0, 3.0),
    *_rows_bars("1.1b", 8, 1.5, 2.3),
    *_rows_bars("135m", 32, 1.9, 2.8),
    *_rows_bars("1.1b", 32, 1.5, 2.5),
    *(Bar(shape, f"prefill-{n}", "bfloat16", "best", 1.0) for shape in ("135m", "1.1b") for n in (512, 2048)),
    *(
        Bar("marian", name, precision, "ctranslate2", 1.2)
        for name in ("translate-greedy", "translate-beam4")
        for precision in ("float32", "int8")
    ),
    Bar("1.1b", "load", "bfloat16", "roofline", 1 / 1.3),
    Bar("1.1b", "load", "bfloat16", "rss", 1.0),
)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows in columns of equal width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = (" ".join(cell.ljust(width + 1) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(row.rstrip() for row in cells)


def markdown(rows: Sequence[Sequence[str]], num_names: int) -> str:
    """Return the rows as a Markdown table whose columns after the first ``num_names`` are aligned on the right."""
    rule = ["---"] * num_names + ["--:"] * (len(rows[0]) - num_names)
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))


def agreement(line: Line) -> str:
    """Return the tokens that equal the reference's, and the gap of the logits at the first other one, if known."""
    if "agree" not in line:
        return ""
    gap = f", gap {line['gap']:.3f}" if line.get("gap") else ""
    return f"{line['agree']}/{line['count']}{gap}"


def table(lines: Sequence[Line]) -> str:
    """Return one row per measurement: median, spread, share of the roofline, agreement, and kvad's ratio to it.

    ``others`` is the share of the cores that other processes used meanwhile: beyond a few percent, measure again.
    """
    found = latest(lines)
    titles = "shape", "scenario", "precision", "engine", "median", "min - max", "unit", "roofline", "others"
    rows = [(*titles, "agree", "kvad is")]
    for (shape, scenario, precision, engine), line in found.items():
        own = found.get((shape, scenario, precision, "kvad"))
        factor = "" if own is None or engine == "kvad" else f"{ratio(own, line):.2f}x"
        spread = f"{line['min']:.4g} - {line['max']:.4g}"
        share = f"{line['of_roofline']:.0%}"
        name = shape, scenario, precision, engine, f"{line['median']:.4g}", spread, line["unit"]
        others = f"{line['others_cpu']:.0%}" if "others_cpu" in line else ""
        rows.append((*name, share, others, agreement(line), factor))
    return aligned(rows)


def bars_rows(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    """Return all bars: the measured ratio, whether it is reached, and the least number of turns of its lines."""
    found = latest(lines)
    titles = "shape", "scenario", "precision", "relative to", "bar", "measured", "reached", "turns"
    rows: list[tuple[str, ...]] = [titles]
    for bar in BARS:
        value, used = bar.value(found), bar.lines(found)
        name = bar.shape, bar.scenario, bar.precision, f"{bar.peer} {bar.peer_precision}".strip(), f"{bar.factor:.2f}"
        measured = "-" if value is None else f"{value:.2f}"
        turns = str(min(len(line["values"]) for line in used)) if used else "-"
        rows.append((*name, measured, bar.verdict(found), turns))
    return rows


def bars_summary(lines: Sequence[Line]) -> str:
    """Return how many bars are reached, missed and not measured."""
    verdicts = Counter(row[6] for row in bars_rows(lines)[1:])
    text = f"Of {len(BARS)} bars {verdicts['yes']} are reached, {verdicts['no']} are not"
    unknown = ", ".join(f"{verdicts[name]} {name}" for name in (LOW_LIMIT, NOT_MEASURED) if verdicts[name])
    return f"{text}; {unknown}." if unknown else f"{text}."


def bars_table(lines: Sequence[Line]) -> str:
    """Return the bars that were measured, and the numbers of all."""
    rows = [row for row in bars_rows(lines) if row[6] != NOT_MEASURED]
    return "\n\n".join([*([aligned(rows)] if len(rows) > 1 else []), bars_summary(lines)])


def engines_table(lines: Sequence[Line]) -> str:
    """Return a Markdown table of medians, a row per cell of ``DEFAULT`` and of the lines.

    A row has a column per engine, kvad's ratio to the fastest other one, turns, commit, and what makes it uncertain.
    """
    found = latest(lines)
    titles = "shape", "scenario", "precision", "unit", *ENGINES, "kvad / best", "kvad / roofline", "turns", "commit"
    rows: list[tuple[str, ...]] = [(*titles, "notes")]
    for place in dict.fromkeys([*cells(DEFAULT), *(key[:3] for key in found)]):
        rows.append((*place, *_engines_row(place, {key[3]: each for key, each in found.items() if key[:3] == place})))
    return markdown(rows, 4)


def _engines_row(place: Cell, by_engine: dict[str, Line]) -> tuple[str, ...]:
    """Return the columns after the cell's name."""
    unit = SCENARIOS[place[1]].unit
    if not by_engine:
        return (unit, *["-"] * (len(ENGINES) + 4), NOT_MEASURED)
    own = by_engine.get("kvad")
    peers = [line for name, line in by_engine.items() if name != "kvad"]
    best = "-" if own is None or not peers else f"{min(ratio(own, line) for line in peers):.2f}"
    share = "-" if own is None else f"{own['of_roofline']:.2f}"
    turns = sorted({len(line["values"]) for line in by_engine.values()})
    commits = sorted({_short(line["commit"]) for line in by_engine.values()})
    medians = (_median(by_engine.get(name)) for name in ENGINES)
    numbers = " to ".join(str(each) for each in dict.fromkeys((turns[0], turns[-1])))
    return (unit, *medians, best, share, numbers, ", ".join(commits), ", ".join(notes(by_engine)))


def notes(by_engine: dict[str, Line]) -> list[str]:
    """Return what makes the lines of one cell uncertain."""
    lines = list(by_engine.values())
    busy = [name for name, line in by_engine.items() if line.get("others_cpu", 0.0) > MAX_OTHERS_CPU]
    conditions = {
        "uncommitted changes": any(line["commit"].endswith("-dirty") for line in lines),
        "engines of different runs": len({(line["commit"], line.get("date")) for line in lines}) > 1,
        "tokens not compared": any("agree" not in line for line in lines),
        LOW_LIMIT: any(line["of_roofline"] > 1 for line in lines),
        f"other programs ran ({', '.join(busy)})": bool(busy),
    }
    return [text for text, holds in conditions.items() if holds]


def _short(commit: str) -> str:
    """Return 7 digits of a commit, with its mark of uncommitted changes."""
    digits, dash, mark = commit.partition("-")
    return f"{digits[:7]}{dash}{mark}" or "unknown"


def _median(line: Line | None) -> str:
    """Return the median with the larger distance to an extreme, such as 96.7 ± 2.1; without it for few runs."""
    if line is None:
        return "-"
    spread = max(line["max"] - line["median"], line["median"] - line["min"])
    median = line["median"]
    digits = 0 if median >= 100 else 1 if median >= 10 else 3
    if len(line["values"]) < MIN_TURNS_OF_SPREAD:
        return f"{median:,.{digits}f}"
    return f"{median:,.{digits}f} ± {spread:,.{digits}f}"


def with_tables(page: str, lines: Sequence[Line], sources: str) -> str:
    """Return a page whose part between the markers is written from the lines.

    Raises:
        ValueError: If the page does not have both markers once, in this order.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page must have {BEGIN} and, after it, {END}, once each")
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{section(lines, sources)}\n{END}{tail}"


def section(lines: Sequence[Line], sources: str) -> str:
    """Return the generated part of the page."""
    found = list(latest(lines).values())
    text = f"{_measurement(found, sources)}\n\n{_reliability(found)}"
    return f"{text}\n\n{engines_table(found)}\n\n{bars_summary(found)}\n\n{markdown(bars_rows(found), 4)}"


def _measurement(lines: Sequence[Line], sources: str) -> str:
    """Return machine, versions and limits of the lines."""
    machines = sorted({line["machine"] for line in lines})
    versions = {f"{name} {value}" for line in lines for name, value in line["versions"].items() if name != "kvad"}
    reads, products = ([line[name] for line in lines] for name in ("read_gb_per_second", "gflop_per_second"))
    return (
        f"Written by `python -m benchmarks.peers docs` from {sources}. Medians of the turns; ± is the larger distance "
        f"to an extreme, given with {MIN_TURNS_OF_SPREAD} turns or more. Ratios are medians of those of the rounds. "
        f"Machine: {'; '.join(machines)}. Versions: {', '.join(sorted(versions))}. "
        f"Measured by turns too: reading {min(reads):.0f} to {max(reads):.0f} GB/s "
        f"(of the bytes of one step: a small model is read from the processor's cache), products "
        f"{min(products):,.0f} to {max(products):,.0f} Gflop/s."
    )


def _reliability(lines: Sequence[Line]) -> str:
    """Return how many rows are complete, from how many commits, and how many tokens were compared."""
    found = latest(lines)
    rows = {place: [line for key, line in found.items() if key[:3] == place] for place in {key[:3] for key in found}}
    least = [min(len(line["values"]) for line in row) for row in rows.values()]
    commits = {line["commit"] for line in lines}
    total = len({*cells(DEFAULT), *rows})
    many, few = sum(each >= TURNS for each in least), sum(each < MIN_TURNS_OF_SPREAD for each in least)
    text = (
        f"Of {total} rows {len(rows)} were measured, {many} with {TURNS} turns or more and {few} with fewer than "
        f"{MIN_TURNS_OF_SPREAD}, at {len(commits)} commit{'s' * (len(commits) > 1)}"
    )
    if len(commits) > 1:
        text += ": compare engines within a row, and not two rows of different commits"
    old = sum(any("roofline_shares" not in line for line in row) for row in rows.values())
    if old:
        text += f". The roofline of {old} rows is that of the largest limits of their rounds"
    checked = [line for line in lines if "agree" in line and line["engine"] == "kvad"]
    agree, count = (sum(line[name] for line in checked) for name in ("agree", "count"))
    return (
        f"{text}. Of kvad's greedy tokens that were compared, {agree:,} of {count:,} are the most likely ones of the "
        "reference in float32; random weights have near ties."
    )
