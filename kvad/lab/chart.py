"""A small chart for the terminal: several series on logarithmic axes, in plain ASCII.

Promises: every point is drawn within the frame, a later series never hides a legend, and the text fits in ``width``
columns plus the labels at its left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

__all__ = ["POINT_CHARS", "ascii_chart"]

POINT_CHARS = "o*x+#@"

ChartPoints = Sequence[tuple[float, float]]


def ascii_chart(series: Mapping[str, ChartPoints], *, x: str, y: str, width: int = 60, height: int = 14) -> str:
    """``{"cache": [(64, 0.2), (128, 0.4)], ...}`` as lines of text; x and y name the axes, all values are above 0."""
    points = [point for line in series.values() for point in line]
    assert points and all(a > 0 and b > 0 for a, b in points), "a logarithmic axis has no zero"
    across = _Axis([a for a, _ in points], width)
    up = _Axis([b for _, b in points], height)
    grid = [[" "] * width for _ in range(height)]
    for mark, line in zip(POINT_CHARS, series.values(), strict=False):
        cells = [(across.cell(a), up.cell(b)) for a, b in line]
        for one, two in pairwise(cells):
            _dots(grid, one, two)
        for column, row in cells:
            grid[height - 1 - row][column] = mark
    return "\n".join([y, *_rows(grid, up), *_below(across, sorted({a for a, _ in points}), x), _legend(series)])


class _Axis:
    """Values spread over ``cells`` cells by their logarithms."""

    def __init__(self, values: Sequence[float], cells: int) -> None:
        self.low, self.high, self.cells = min(values), max(values), cells

    def cell(self, value: float) -> int:
        if self.high == self.low:
            return self.cells // 2
        return round((self.cells - 1) * math.log(value / self.low) / math.log(self.high / self.low))

    def value(self, cell: int) -> float:
        return self.low * math.exp(math.log(self.high / self.low) * cell / max(1, self.cells - 1))


def _dots(grid: list[list[str]], one: tuple[int, int], two: tuple[int, int]) -> None:
    """A dotted line between two cells, under whatever stands there already."""
    steps = max(abs(two[0] - one[0]), abs(two[1] - one[1]))
    for step in range(1, steps):
        column = round(one[0] + (two[0] - one[0]) * step / steps)
        row = len(grid) - 1 - round(one[1] + (two[1] - one[1]) * step / steps)
        if grid[row][column] == " ":
            grid[row][column] = "."


def _rows(grid: list[list[str]], up: _Axis) -> list[str]:
    last = len(grid) - 1
    labels = {at: f"{up.value(last - at):.3g}" for at in (0, last // 2, last)}
    return [f"{labels.get(at, ''):>8} |{''.join(cells).rstrip()}" for at, cells in enumerate(grid)]


def _below(across: _Axis, values: Sequence[float], name: str) -> list[str]:
    ticks = [" "] * (across.cells + 8)
    for value in values:
        text, at = f"{value:g}", across.cell(value)
        start = max(0, min(at - len(text) // 2, len(ticks) - len(text)))
        if all(cell == " " for cell in ticks[max(0, start - 1) : start + len(text) + 1]):
            ticks[start : start + len(text)] = text
    return [" " * 9 + "+" + "-" * across.cells, (" " * 10 + "".join(ticks)).rstrip() + f"  {name}"]


def _legend(series: Mapping[str, ChartPoints]) -> str:
    return " " * 10 + "   ".join(f"{mark} {name}" for mark, name in zip(POINT_CHARS, series, strict=False))
