"""Attention weights as text for a terminal, SVG or JSON, from plain lists of numbers.

``plot.draw_attention`` draws them as PNG.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

SHADES = " ░▒▓█"
LABEL_WIDTH = 14  # of a token next to its row in a terminal
CELL = 14  # pixels of a token in an SVG
MAPS_PER_LINE = 4  # in an SVG


class AttentionMap(NamedTuple):
    """``weights`` [L, S] of one head: a row per query, a column per key.

    ``side``: of a model with an encoder "encoder", "decoder" or "cross" (from the decoder to the encoder);
    ``queries`` and ``keys``: their tokens (None: those of the text, on both sides).
    """

    layer: int
    head: int
    weights: Sequence[Sequence[float]]
    side: str = ""
    queries: Sequence[str] | None = None
    keys: Sequence[str] | None = None

    @property
    def name(self) -> str:
        """Name, as in ``layer 2, head 5``."""
        place = f"layer {self.layer}, head {self.head}"
        return f"{self.side}, {place}" if self.side else place

    def tokens(self, pieces: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Return the (queries, keys) of this map; ``pieces`` are the text's tokens."""
        return pieces if self.queries is None else self.queries, pieces if self.keys is None else self.keys


def shade(weight: float) -> str:
    """Return one of ``" ░▒▓█"`` for weights from 0, 0.0156, 0.14, 0.39 and 0.77 on.

    ``?`` for NaN.
    """
    if not math.isfinite(weight):
        return "?"
    level = round(math.sqrt(min(max(weight, 0.0), 1.0)) * (len(SHADES) - 1))
    return SHADES[level]


# ---------------------------------------------------------------- terminal


def attention_to_text(pieces: Sequence[str], attention_map: AttentionMap, width: int = 80) -> str:
    """Draw one map for a terminal of ``width`` columns, queries down, keys right, without a final newline."""
    queries, keys = attention_map.tokens(pieces)
    numbers = len(str(max(len(queries) - 1, 0)))
    room = max(width - LABEL_WIDTH - numbers - 3, 8)
    per_cell = max(1, -(-len(keys) // room))
    columns = 2 if per_cell == 1 and 2 * len(keys) <= room else 1
    cells = -(-len(keys) // per_cell)
    head = [f"{attention_map.name}: rows are queries, columns keys"]
    if attention_map.side == "cross":
        head.append(_wrap_tokens("keys:", keys, width))
    if per_cell > 1:
        head.append(f"a cell is {per_cell} keys and shows the largest weight among them")
    margin = " " * (LABEL_WIDTH + numbers + 2)
    head.append((margin + _ruler(cells, per_cell, columns)).rstrip())
    lines = []
    for index, (piece, row) in enumerate(zip(queries, attention_map.weights, strict=True)):
        shares = (max(row[low : low + per_cell], key=_order) for low in range(0, len(row), per_cell))
        drawn = "".join(shade(share) * columns for share in shares)
        lines.append(f"{index:>{numbers}} {_fitted(piece)} {drawn}".rstrip())
    return "\n".join([*head, *lines, f"{margin}shades: {_legend()}"])


def _wrap_tokens(what: str, pieces: Sequence[str], width: int) -> str:
    """Format tokens with their indices, in lines of ``width``."""
    lines = [what]
    for number, piece in enumerate(pieces):
        word = f"{number} {piece}"
        if len(lines[-1]) + 2 + len(word) > width:
            lines.append("    ")
        lines[-1] += f"  {word}"
    return "\n".join(lines)


def _order(weight: float) -> float:
    """Sort key; NaN counts as the largest, so that it is visible."""
    return weight if math.isfinite(weight) else math.inf


def _ruler(cells: int, per_cell: int, columns: int) -> str:
    """Format a ruler: the key's index at every tenth cell."""
    line = ""
    for cell in range(0, cells, 10):
        line = line.ljust(cell * columns) + str(cell * per_cell)
    return line


def _legend() -> str:
    steps = len(SHADES) - 1
    return "  ".join(f"{SHADES[i]} >= {((i - 0.5) / steps) ** 2:.2f}" for i in range(1, steps + 1))


def _fitted(piece: str) -> str:
    """Pad a token to exactly ``LABEL_WIDTH`` columns; a longer one ends in an ellipsis."""
    shown, used = "", 0
    for char in piece:
        wide = _columns(char)
        if used + wide > LABEL_WIDTH:
            while used > LABEL_WIDTH - 1:
                used -= _columns(shown[-1])
                shown = shown[:-1]
            shown, used = shown + "…", used + 1
            break
        shown, used = shown + char, used + wide
    return shown + " " * (LABEL_WIDTH - used)


def _columns(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


# ---------------------------------------------------------------- SVG


def attention_to_svg(pieces: Sequence[str], maps: Sequence[AttentionMap]) -> str:
    """Draw all maps as one SVG, up to four in a line.

    Each cell has its tokens and weight as a title.
    """
    tokens = [one.tokens(pieces) for one in maps]
    words = [*pieces, *(piece for both in tokens for each in both for piece in each)]
    label = 8 * min(max(map(len, words), default=0), 20) + 12
    wide = label + CELL * max((len(keys) for _, keys in tokens), default=0) + 16
    high = label + CELL * max((len(queries) for queries, _ in tokens), default=0) + 24
    per_line = min(MAPS_PER_LINE, max(len(maps), 1))
    lines = -(-len(maps) // per_line)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide * per_line}" height="{high * lines}" '
            f'viewBox="0 0 {wide * per_line} {high * lines}" font-family="monospace" font-size="11">'
        ),
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for number, one in enumerate(maps):
        x, y = wide * (number % per_line), high * (number // per_line)
        parts += [f'<g transform="translate({x},{y})">', *_svg_map(pieces, one, label), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _svg_map(pieces: Sequence[str], attention_map: AttentionMap, label: int) -> Iterable[str]:
    top, (queries, keys) = label + 20, attention_map.tokens(pieces)
    yield f'<text x="{label}" y="14" font-weight="bold">{attention_map.name}</text>'
    for index, piece in enumerate(queries):
        middle = index * CELL + CELL // 2 + 4
        yield f'<text x="{label - 4}" y="{top + middle}" text-anchor="end">{_short(piece)}</text>'
    for index, piece in enumerate(keys):
        at = f"{label + index * CELL + CELL // 2 + 4},{top - 4}"
        yield f'<text transform="translate({at}) rotate(-90)">{_short(piece)}</text>'
    for row, weights in enumerate(attention_map.weights):
        for column, weight in enumerate(weights):
            if weight == 0:
                continue
            known = math.isfinite(weight)
            colour = (
                f'fill="#123a8c" fill-opacity="{math.sqrt(min(max(weight, 0), 1)):.3f}"' if known else 'fill="#d00"'
            )
            yield (
                f'<rect x="{label + column * CELL}" y="{top + row * CELL}" width="{CELL}" height="{CELL}" {colour}>'
                f"<title>{_xml(queries[row])} to {_xml(keys[column])}: {weight:.4f}</title></rect>"
            )
    size = f'width="{CELL * len(keys)}" height="{CELL * len(queries)}"'
    yield f'<rect x="{label}" y="{top}" {size} fill="none" stroke="#999"/>'


def _short(piece: str) -> str:
    return _xml(piece if len(piece) <= 20 else piece[:19] + "…")


def _xml(text: str) -> str:
    """Escape text; characters that XML 1.0 forbids become a replacement character."""
    held = (char if char in "\t\n\r" or (char >= " " and not 0xD800 <= ord(char) <= 0xDFFF) else "�" for char in text)
    return escape("".join(held))


# ---------------------------------------------------------------- JSON


def attention_to_json(tokens: Sequence[int], pieces: Sequence[str], maps: Sequence[AttentionMap]) -> dict[str, object]:
    """Return ``{"tokens": [T], "pieces": [T], "attention": [{"layer", "head", "weights": [T][T]}]}``.

    A weight that is not finite is null. A model with an encoder also has "side", "queries" and "keys".
    """
    attention = [
        {
            "layer": attention_map.layer,
            "head": attention_map.head,
            **(
                {"side": attention_map.side, "queries": attention_map.queries, "keys": attention_map.keys}
                if attention_map.side
                else {}
            ),
            "weights": [[weight if math.isfinite(weight) else None for weight in row] for row in attention_map.weights],
        }
        for attention_map in maps
    ]
    return {"tokens": list(tokens), "pieces": list(pieces), "attention": attention}
