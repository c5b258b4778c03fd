"""Attention weights as one self-contained HTML page: layers x heads to choose from, and the weight under the pointer.

Weights are embedded in 16 bits (rounded to 1/65535); a page has at most ``MAX_WEIGHTS``. No torch.
"""

from __future__ import annotations

import math
from array import array
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvad._html import self_contained_page
from kvad.errors import RequestError

MAX_WEIGHTS = 12_000_000  # of all maps: a page of 32 MB
NOT_FINITE = 65535  # code of NaN; weights from 0 to 1 have the codes below


class AttentionMap(NamedTuple):
    """Attention weights of one head: a row per query, a column per key."""

    layer: int
    head: int
    weights: Sequence[Sequence[float]]  # [L, S]
    side: str = ""  # of a model with an encoder: "encoder", "decoder" or "cross" (from decoder to encoder)
    queries: Sequence[str] | None = None  # tokens; None: those of the text, on both sides
    keys: Sequence[str] | None = None

    @property
    def name(self) -> str:
        """Name, as in ``layer 2, head 5``."""
        place = f"layer {self.layer}, head {self.head}"
        return f"{self.side}, {place}" if self.side else place

    def tokens(self, pieces: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Return the (queries, keys) of this map; ``pieces`` are the text's tokens."""
        return pieces if self.queries is None else self.queries, pieces if self.keys is None else self.keys


def attention_to_html(pieces: Sequence[str], maps: Sequence[AttentionMap], title: str = "attention") -> str:
    """Build the page.

    Args:
        pieces: Tokens of the text, of maps without tokens.
        maps: Heads in the order in which they are shown.
        title: Title of the page.

    Raises:
        RequestError: If the maps have too many weights.
    """
    count = sum(len(row) for one in maps for row in one.weights)
    if count > MAX_WEIGHTS:
        message = f"an attention page shows at most {MAX_WEIGHTS:,} weights, got {count:,}"
        raise RequestError(message, "Choose fewer layers or heads, or a shorter text.")
    texts: list[Sequence[str]] = []

    def text_index(tokens: Sequence[str]) -> int:
        if tokens not in texts:
            texts.append(tokens)
        return texts.index(tokens)

    shown = []
    for one in maps:
        queries, keys = one.tokens(pieces)
        place = {"side": one.side, "layer": one.layer, "head": one.head, "name": one.name}
        indices = {"queries": text_index(queries), "keys": text_index(keys)}
        shown.append({**place, **indices, "weights": _encode(one.weights)})
    data = {"title": title, "texts": [list(text) for text in texts], "maps": shown}
    text = "\n".join(f"{one.name}: {len(one.weights)} queries" for one in maps)
    return self_contained_page(Path(__file__).parent, "attention_page", title=title, text=text, data=data)


def _encode(weights: Sequence[Sequence[float]]) -> str:
    """Encode weights as little-endian 16-bit codes in base64, row by row."""
    codes = array("H", (_code(weight) for row in weights for weight in row))
    if array("H", [1]).tobytes() != b"\x01\x00":
        codes.byteswap()
    return b64encode(codes.tobytes()).decode("ascii")


def _code(weight: float) -> int:
    return round(min(max(weight, 0.0), 1.0) * (NOT_FINITE - 1)) if math.isfinite(weight) else NOT_FINITE
