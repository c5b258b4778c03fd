"""First fit: pairs into rows that hold ``context`` source tokens and ``context`` target tokens.  No torch.

Each pair goes into the first open row that has room for both of its sides, and opens a new one where none has::

    context 8     pair  a (3, 4)  b (4, 5)  c (4, 3)  d (5, 2)      (source, target) tokens
    row 0         a: 3, 4 used    c: 7, 7                           b does not fit: 4 + 5 > 8 targets
    row 1                   b: 4, 5                                 d does not: 4 + 5 > 8 sources
    row 2                                     d: 5, 2

Only the last :data:`OPEN_ROWS` rows are open, so a corpus of millions is packed in seconds.
"""

from __future__ import annotations

import numpy as np

from kvad.train.store import Ints

__all__ = ["OPEN_ROWS", "first_fit"]

OPEN_ROWS = 256


def first_fit(sources: Ints, targets: Ints, context: int) -> Ints:
    """The row of each pair, given the tokens of both sides ([n] each), none of which exceeds ``context``."""
    count = len(sources)
    assert not count or max(sources.max(), targets.max()) <= context, "what is too long is left out before"
    room_s, room_t = np.full(count, context), np.full(count, context)
    rows = np.empty(count, np.int64)
    low = high = 0  # rows low..high are open
    for pair, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        fits = (room_s[low:high] >= source) & (room_t[low:high] >= target)
        first = int(fits.argmax()) if high > low else 0
        if high == low or not fits[first]:
            low, first, high = max(low, high + 1 - OPEN_ROWS), -1, high + 1
        row = high - 1 if first < 0 else low + first
        rows[pair] = row
        room_s[row] -= source
        room_t[row] -= target
    return rows
