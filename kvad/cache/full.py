"""What is done when there is no more room: for a row at its limit, and for a pool that has run out.

==============  ======================================  ==============================================================
``on_full``     a row at its limit                      the pool runs out
==============  ======================================  ==============================================================
``preempt``     ends ("length")                         the youngest row gives its blocks back and comes back later
``stop``        ends                                    the youngest row that cannot grow ends, and keeps what it has
``refuse``      was refused when it was submitted       cannot be: what could run out was refused when it was submitted
``window``      goes on under ``window(L)``             as ``preempt``
``sinks``       goes on under ``sinks(4, L - 4)``       as ``preempt``
``summarise``   goes on up to the model's limit, its    as ``preempt``
                older tokens as summaries
``spill``       goes on up to the model's limit with    as ``preempt``
                the same tokens, its older ones in host
                memory and on disk
==============  ======================================  ==============================================================

``L``: the model's limit or the cache's capacity, whichever is less.  Names only; ``settle.py`` says what a cache needs
for them, ``engine/limits.py`` where rows end.  Nothing drops a token unless it was asked for by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["CONTINUING_MODES", "OVERFLOW_MODES", "NUM_SINKS", "LengthLimit", "OverflowMode", "resolve_endless"]

OverflowMode = Literal["preempt", "stop", "refuse", "window", "sinks", "summarise", "spill"]
LengthLimit = Literal["max_tokens", "model", "cache", "pool"]  # what ends a row by its length

NUM_SINKS = 4  # Xiao et al. 2023, sec. 3.1: four are enough

OVERFLOW_MODES: Mapping[str, str] = {
    "preempt": "a row ends at its limit L; without free blocks the youngest waits and comes back",
    "stop": "the same; without free blocks the youngest row that cannot grow ends",
    "refuse": "what could pass L or the blocks is refused at once; what runs never gives way",
    "window": "a row goes on past L with its last L tokens",
    "sinks": f"a row goes on past L with its first {NUM_SINKS} tokens and its last L - {NUM_SINKS}",
    "summarise": "a row goes on past the cache's capacity, older tokens as summaries",
    "spill": "the same, older tokens as they are in host memory and on disk: slower, and nothing is lost",
}
CONTINUING_MODES = ("window", "sinks", "summarise", "spill")


def resolve_endless(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A cache's fields as a user says them: ``endless`` alone, with no word on what stays, goes on under ``sinks``."""
    silent = fields.get("endless") is True and not fields.keys() & {"policy", "on_full"}
    return {**fields, "on_full": "sinks"} if silent else dict(fields)
