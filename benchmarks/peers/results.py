"""Result lines: what was measured of an engine, the least time of the machine, and the agreement of the tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.scenarios import Scenario, cost_of
from benchmarks.peers.shapes import Shape


@dataclass
class Measurement:
    """One engine with one precision, and its timed runs of one scenario."""

    engine: str
    precision: str
    versions: dict[str, str] = field(default_factory=dict)
    output: list[list[int]] | None = None  # tokens of the untimed run
    values: list[float] = field(default_factory=list)  # in the scenario's unit
    major_faults: int = 0  # pages that were read from a disk while the time ran
    others_cpu: list[float] = field(default_factory=list)  # fraction of the cores that other processes used
    peak_rss: int = 0  # bytes
    more: dict[str, list[float]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.engine} {self.precision}"

    def add(self, reply: dict[str, Any], scenario: Scenario) -> None:
        """Add one timed run."""
        seconds = reply["seconds"]
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
    """Return the JSON line of a measurement; ``limits`` are the bytes and operations per second of each round."""
    values = measurement.values
    median = statistics.median(values)
    cost = cost_of(shape, scenario, measurement.precision)
    read, multiply = (statistics.median(each) for each in zip(*limits, strict=True))
    least = cost.seconds(read, multiply)
    roofline = least if scenario.unit == "seconds" else scenario.work / least
    share = roofline / median if scenario.unit == "seconds" else median / roofline
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
        "read_gb_per_second": round(read / 1e9, 2),
        "gflop_per_second": round(multiply / 1e9, 1),
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
