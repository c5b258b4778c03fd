"""Result lines: what was measured of an engine, the least time of the machine, and the agreement of the tokens."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.scenarios import Scenario, cost_of
from benchmarks.peers.shapes import Shape

ROOT = Path(__file__).parents[2]
MEASURED_FILES = ("kvad", "benchmarks/peers", "hatch_build.py", ":!benchmarks/peers/report.py")  # what decides values
Line = dict[str, Any]


def code_commit() -> str:
    """Return the last commit that changed what is measured, ``-dirty`` with later changes; "" without git.

    Commits of results and pages do not change it, and a results file that grows does not make it dirty.
    """
    values = []
    for command in (["log", "-1", "--format=%h", "--abbrev=12"], ["status", "--porcelain"]):
        try:
            done = subprocess.run(
                ["git", "-C", str(ROOT), *command, "--", *MEASURED_FILES], capture_output=True, text=True, timeout=30
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if done.returncode:
            return ""
        values.append(done.stdout.strip())
    return values[0] + ("-dirty" if values[1] else "")


@dataclass(frozen=True)
class EarlierLines:
    """Lines that a file already has, to skip scenarios that were measured at this commit on this machine.

    A scenario is complete if every engine and precision has a line with enough timed runs, or with the time limit that
    ended them, or has refused it.
    """

    header: Mapping[str, Any]  # machine, threads and commit of the lines to come
    repeats: int
    max_seconds: float
    lines: Sequence[Line] = ()

    def complete(self, keys: Iterable[tuple[str, str, str, str]]) -> bool:
        """Return whether all of these shapes, scenarios, engines and precisions were measured."""
        if not self.header["commit"] or self.header["commit"].endswith("-dirty"):
            return False
        measured = {
            (line["shape"], line["scenario"], line["engine"], line["precision"])
            for line in self.lines
            if all(line.get(name) == value for name, value in self.header.items()) and self._is_enough(line)
        }
        return measured.issuperset(keys)

    def _is_enough(self, line: Line) -> bool:
        if line["bench"] == "peers-refused":
            return True
        return len(line["values"]) >= self.repeats or float(line.get("ended_after", -1)) >= self.max_seconds


@dataclass
class Measurement:
    """One engine with one precision, and its timed runs of one scenario."""

    engine: str
    precision: str
    versions: dict[str, str] = field(default_factory=dict)
    output: list[list[int]] | None = None  # tokens of the untimed run
    values: list[float] = field(default_factory=list)  # in the scenario's unit
    rounds: list[int] = field(default_factory=list)  # of each value
    major_faults: int = 0  # pages that were read from a disk while the time ran
    others_cpu: list[float] = field(default_factory=list)  # fraction of the cores that other processes used
    peak_rss: int = 0  # bytes
    more: dict[str, list[float]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.engine} {self.precision}"

    def add(self, reply: dict[str, Any], scenario: Scenario, number: int) -> None:
        """Add one timed run of the round ``number``."""
        seconds = reply["seconds"]
        self.rounds.append(number)
        tokens = reply["tokens"] if scenario.kind == "decode" else scenario.work
        self.values.append(seconds if scenario.unit == "seconds" else tokens / seconds)
        self.major_faults += reply["major_faults"]
        self.peak_rss = max(self.peak_rss, reply["peak_rss"])
        if "others_cpu" in reply:
            self.others_cpu.append(reply["others_cpu"])
        for name in ("imported_rss", "first_token_seconds"):
            if name in reply:
                self.more.setdefault(name, []).append(reply[name])


def result_line(
    shape: Shape, scenario: Scenario, measurement: Measurement, limits: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Return the JSON line of a measurement.

    ``limits`` are bytes and operations per second, measured before each round and after the last one. A value is
    compared with the larger ones around its round: the rates vary for seconds to minutes, and a rate that was reached
    is a lower bound of the limit.
    """
    values, is_time = measurement.values, scenario.unit == "seconds"
    cost = cost_of(shape, scenario, measurement.precision)
    around = [[max(pair) for pair in zip(*limits[number : number + 2], strict=True)] for number in measurement.rounds]
    least = [cost.seconds(read, multiply) for read, multiply in around]
    rooflines = least if is_time else [scenario.work / seconds for seconds in least]
    shares = [
        roofline / value if is_time else value / roofline for value, roofline in zip(values, rooflines, strict=True)
    ]
    median, roofline, share = map(statistics.median, (values, rooflines, shares))
    reads, products = zip(*around, strict=True)
    return {
        "bench": "peers",
        "shape": shape.name,
        "scenario": scenario.name,
        "engine": measurement.engine,
        "precision": measurement.precision,
        "label": f"{shape.name} {scenario.kind} {measurement.key}",
        "unit": scenario.unit,
        "median": float(f"{median:.5g}"),
        "min": float(f"{min(values):.5g}"),
        "max": float(f"{max(values):.5g}"),
        "values": [float(f"{value:.5g}") for value in values],
        "roofline": float(f"{roofline:.5g}"),
        "of_roofline": round(share, 3),
        "roofline_shares": [round(each, 3) for each in shares],
        "read_gb_per_second": round(statistics.median(reads) / 1e9, 2),
        "gflop_per_second": round(statistics.median(products) / 1e9, 1),
        "major_faults": measurement.major_faults,
        "others_cpu": round(statistics.median(measurement.others_cpu or [0.0]), 3),
        "peak_rss": measurement.peak_rss,
        "context": max(scenario.lengths),
        "rows": scenario.rows,
        "versions": measurement.versions,
        **{name: float(f"{statistics.median(each):.5g}") for name, each in measurement.more.items()},
    }


def agreement_among(measurements: Sequence[Measurement]) -> dict[str, dict[str, Any]]:
    """Compare the tokens with those of the first float32 engine that is not kvad, row by row, up to the first other."""
    references = [each for each in measurements if each.precision == "float32" and each.engine != "kvad"]
    if not references or references[0].output is None:
        return {}
    reference = references[0]
    assert reference.output is not None
    result = {}
    for each in measurements:
        agree = count = 0
        for row, expected in zip(each.output or [], reference.output, strict=True):
            differences = [at for at, (a, b) in enumerate(zip(row, expected, strict=False)) if a != b]
            agree += differences[0] if differences else len(expected)
            count += len(expected)
        result[each.key] = {"agree": agree, "count": count, "gap": None}
    return result
