"""Attention weights as text for a terminal or JSON, from plain lists of numbers.

``plot.draw_attention`` draws them as a figure, ``engine/attention_page.py`` as an HTML page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from kvad.engine import AttentionMap

SHADES = " ░▒▓█"
LABEL_WIDTH = 14  # columns of a token next to its row in a terminal


def shade(weight: float) -> str:
    """Return one of ``" ░▒▓█"`` for weights from 0, 0.0156, 0.14, 0.39 and 0.77 on; ``?`` for NaN."""
    if not math.isfinite(weight):
        return "?"
    level = round(math.sqrt(min(max(weight, 0.0), 1.0)) * (len(SHADES) - 1))
    return SHADES[level]


def attention_to_text(pieces: Sequence[str], attention_map: AttentionMap, width: int = 80) -> str:
    """Draw one map for a terminal of ``width`` columns, queries down, keys right, without a final newline.

    If several keys share a cell, the largest weight is shown; NaN counts as the largest.
    """
    queries, keys = attention_map.tokens(pieces)
    numbers = len(str(max(len(queries) - 1, 0)))
    room = max(width - LABEL_WIDTH - numbers - 3, 8)
    per_cell = max(1, -(-len(keys) // room))
    columns = 2 if per_cell == 1 and 2 * len(keys) <= room else 1
    cells = -(-len(keys) // per_cell)
    head = [f"{attention_map.name}: rows are queries, columns keys"]
    if attention_map.side == "cross":
        head += _wrap_tokens(keys, width)
    if per_cell > 1:
        head.append(f"a cell is {per_cell} keys and shows the largest weight among them")
    margin = " " * (LABEL_WIDTH + numbers + 2)
    head.append((margin + ruler(cells, per_cell, columns)).rstrip())
    lines = []
    for index, (piece, row) in enumerate(zip(queries, attention_map.weights, strict=True)):
        sortable = [weight if math.isfinite(weight) else math.inf for weight in row]
        shares = (max(sortable[low : low + per_cell]) for low in range(0, len(row), per_cell))
        drawn = "".join(shade(share) * columns for share in shares)
        lines.append(f"{index:>{numbers}} {_fitted(piece)} {drawn}".rstrip())
    steps = len(SHADES) - 1
    legend = "  ".join(f"{SHADES[i]} >= {((i - 0.5) / steps) ** 2:.2f}" for i in range(1, steps + 1))
    return "\n".join([*head, *lines, f"{margin}shades: {legend}"])


def _wrap_tokens(pieces: Sequence[str], width: int) -> list[str]:
    """Format the keys with their indices, in lines of ``width``."""
    lines = ["keys:"]
    for number, piece in enumerate(pieces):
        word = f"{number} {piece}"
        if len(lines[-1]) + 2 + len(word) > width:
            lines.append("    ")
        lines[-1] += f"  {word}"
    return lines


def ruler(cells: int, per_cell: int, columns: int = 1) -> str:
    """Format a ruler: the index of the first token at every tenth cell; a cell has ``columns`` characters."""
    line = ""
    for cell in range(0, cells, 10):
        line = line.ljust(cell * columns) + str(cell * per_cell)
    return line


def _fitted(piece: str) -> str:
    """Pad a token to exactly ``LABEL_WIDTH`` columns; a longer one ends in an ellipsis."""
    if cell_len(piece) > LABEL_WIDTH:
        piece = set_cell_size(piece, LABEL_WIDTH - 1).rstrip() + "…"
    return set_cell_size(piece, LABEL_WIDTH)


def attention_to_json(tokens: Sequence[int], pieces: Sequence[str], maps: Sequence[AttentionMap]) -> dict[str, object]:
    """Return ``{"tokens": [T], "pieces": [T], "attention": [{"layer", "head", "weights": [T][T]}]}``.

    A weight that is not finite is null. A model with an encoder also has "side", "queries" and "keys".
    """
    attention = []
    for one in maps:
        sides = {"side": one.side, "queries": one.queries, "keys": one.keys} if one.side else {}
        weights = [[weight if math.isfinite(weight) else None for weight in row] for row in one.weights]
        attention.append({"layer": one.layer, "head": one.head, **sides, "weights": weights})
    return {"tokens": list(tokens), "pieces": list(pieces), "attention": attention}
