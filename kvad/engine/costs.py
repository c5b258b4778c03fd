"""What giving way costs on this machine: seconds per token computed, seconds per byte copied, as they were measured.

A row that gives way is computed again, or its bytes are copied out and in ("out", "in": between the pool and the host;
"write", "read": between the host and the disk).  The engine tells every prompt step and every copy; averages weigh the
latest most.  Until something was copied a guess stands in, as it does more and more for a way that was found too dear
again and again (:meth:`Costs.fade`): one slow moment is not believed for ever.

Plain numbers; no torch, and no clock but the one given.  Nothing that a row says depends on what is answered here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

__all__ = ["SwapCostModel", "CopyDirection"]

CopyDirection = Literal["out", "in", "write", "read"]
INITIAL_SECONDS_PER_BYTE: Mapping[CopyDirection, float] = {
    "out": 5e-10,
    "in": 5e-10,
    "write": 2e-9,
    "read": 1e-9,
}  # seconds per byte
GUESS_WEIGHT_BYTES = 1 << 20  # bytes that a guess weighs as much as
SMOOTHING = 0.75  # of what was known, when something new is measured
DECAY_FACTOR = 0.9  # of what was measured, when a way was too dear


class _Rate(NamedTuple):
    """Seconds for so many units, of late."""

    units: float = 0.0
    seconds: float = 0.0

    def later(self, units: float, seconds: float) -> _Rate:
        return _Rate(SMOOTHING * self.units + units, SMOOTHING * self.seconds + seconds)


class SwapCostModel:
    """``clock``: seconds, for whoever measures."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._seconds_per_token = _Rate()
        self._bytes: dict[CopyDirection, _Rate] = {way: _Rate() for way in get_args(CopyDirection)}

    def record_compute(self, tokens: int, seconds: float) -> None:
        """A step that read prompts computed so many tokens."""
        if tokens > 0 and seconds >= 0:
            self._seconds_per_token = self._seconds_per_token.later(tokens, seconds)

    def record_copy(self, way: CopyDirection, nbytes: int, seconds: float) -> None:
        if nbytes > 0 and seconds >= 0:
            self._bytes[way] = self._bytes[way].later(nbytes, seconds)

    @property
    def seconds_per_token(self) -> float:
        """Seconds per token; 0 while no prompt has been read."""
        return self._seconds_per_token.seconds / self._seconds_per_token.units if self._seconds_per_token.units else 0.0

    def seconds_per_byte(self, way: CopyDirection) -> float:
        """Seconds per byte, measured and guessed."""
        rate = self._bytes[way]
        return (rate.seconds + GUESS_WEIGHT_BYTES * INITIAL_SECONDS_PER_BYTE[way]) / (rate.units + GUESS_WEIGHT_BYTES)

    def swap_seconds(self, nbytes: int, *, disk: bool = False, back: bool = False) -> float:
        """Seconds to copy a row out and in, by way of the disk where said; ``back``: of the way in alone."""
        ways: tuple[CopyDirection, ...] = ("read", "in") if disk else ("in",)
        if not back:
            ways += ("out", "write") if disk else ("out",)
        return nbytes * sum(self.seconds_per_byte(way) for way in ways)

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        """Than computing so many tokens again."""
        return self.swap_seconds(nbytes, disk=disk, back=back) < tokens * self.seconds_per_token

    def decay(self) -> None:
        """Copying was found too dear: what was measured of it counts a little less from now on."""
        self._bytes = {
            way: _Rate(DECAY_FACTOR * rate.units, DECAY_FACTOR * rate.seconds) for way, rate in self._bytes.items()
        }

    def measured(self) -> dict[str, float]:
        """Microseconds per token, nanoseconds per byte each way, as they are believed now."""
        return {
            "token_us": 1e6 * self.seconds_per_token,
            **{f"{way}_ns": 1e9 * self.seconds_per_byte(way) for way in self._bytes},
        }
