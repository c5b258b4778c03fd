"""Tables of result lines: values by engine, kvad's ratio to each, and the bars that were set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Line = dict[str, Any]


def latest(lines: Sequence[Line]) -> dict[tuple[str, str, str, str], Line]:
    """Return the last line of each shape, scenario, precision and engine, in the order of their first lines."""
    found: dict[tuple[str, str, str, str], Line] = {}
    for line in lines:
        found[line["shape"], line["scenario"], line["precision"], line["engine"]] = line
    return found


def ratio(kvad: Line, peer: Line) -> float:
    """Return kvad's speed relative to a peer's; above 1 kvad is faster."""
    quotient = kvad["median"] / peer["median"]
    return float(1 / quotient if kvad["unit"] == "seconds" else quotient)


def table(lines: Sequence[Line]) -> str:
    """Return one row per measurement: median, spread, share of the roofline, agreement, and kvad's ratio to it."""
    found = latest(lines)
    rows = [("shape", "scenario", "precision", "engine", "median", "min - max", "unit", "roofline", "agree", "kvad is")]
    for (shape, scenario, precision, engine), line in found.items():
        own = found.get((shape, scenario, precision, "kvad"))
        factor = "" if own is None or engine == "kvad" else f"{ratio(own, line):.2f}x"
        agree = f"{line['agree']}/{line['count']}" if "agree" in line else ""
        if line.get("gap"):
            agree += f" gap {line['gap']:.3f}"
        spread = f"{line['min']:.4g} - {line['max']:.4g}"
        share = f"{line['of_roofline']:.0%}"
        rows.append(
            (shape, scenario, precision, engine, f"{line['median']:.4g}", spread, line["unit"], share, agree, factor)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
