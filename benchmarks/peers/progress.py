"""Progress of a run on stderr: what is measured, the time since the start, and an estimate of the rest."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.peers.scenarios import Scenario, cost_of
from benchmarks.peers.shapes import Shape

READ, PRODUCTS = 30e9, 400e9  # bytes and operations per second of two cores, about
SLOWER = 2.0  # an engine's time relative to the least one, on average
TURN_SECONDS = 2.0  # of limits, pauses and warm-ups, for an engine
INTERVAL = 20.0  # seconds between two lines at least


def expected_seconds(shape: Shape, scenario: Scenario, keys: Sequence[tuple[str, str]], repeats: int) -> float:
    """Return about how long a scenario takes with these engines and precisions.

    Only proportions matter after the first one. Prompts of ``decode`` are computed once by every engine, untimed.
    """
    seconds = 0.0
    for _, precision in keys:
        run = cost_of(shape, scenario, precision).seconds(READ, PRODUCTS)
        once = run
        if scenario.kind == "decode":
            once += cost_of(shape, replace(scenario, kind="prefill", new=1), precision).seconds(READ, PRODUCTS)
        seconds += SLOWER * (once + repeats * run) + (repeats + 1) * TURN_SECONDS
    return seconds


class Progress:
    """Prints lines such as ``[3/20] 135m decode-8k: turn 2 of 5; 12 min, about 95 min left``."""

    def __init__(
        self,
        weights: Sequence[float],
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self._weights, self._clock, self._write = weights, clock, write  # weights: expected seconds of the tasks
        self._done = 0
        self._start = self._last = clock()

    def rest(self, fraction: float) -> float:
        """Return the expected seconds of what is left, by the pace so far; ``fraction`` of the current task is done."""
        current = self._weights[self._done : self._done + 1]
        done = sum(self._weights[: self._done]) + fraction * sum(current)
        pace = (self._clock() - self._start) / done if done else 1.0
        return (sum(self._weights) - done) * pace

    def show(self, text: str, fraction: float, *, always: bool = False) -> None:
        """Print a line, unless one was printed just now; ``always`` prints it nevertheless."""
        now = self._clock()
        if not always and now - self._last < INTERVAL:
            return
        self._last = now
        minutes, rest = ((seconds + 30) // 60 for seconds in (now - self._start, self.rest(fraction)))
        place = f"[{self._done + 1}/{len(self._weights)}]"
        self._write(f"{place} {text}; {minutes:.0f} min, about {rest:.0f} min left")

    def finish(self) -> None:
        """Count the current task as done."""
        self._done += 1
