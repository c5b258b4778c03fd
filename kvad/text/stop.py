"""Stop strings: end a stream of text where one of them appears, however the text was cut into tokens.

The stop that counts is the one that is complete first; of several that end there, the one that began first.  What is
emitted is the text before it.  This depends on the text alone, not on how it was pushed:

    end, start, stop = min((text.find(s) + len(s), text.find(s), s) for s in stops if s in text);  emit text[:start]

Only a suffix that could still become a stop string (a proper prefix of one) is ever held back.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvad.errors import RequestError

__all__ = ["StopStringMatcher"]


class StopStringMatcher:
    """One per stream.  ``push`` text until ``stopped`` is not None, or ``flush`` at the end."""

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise RequestError("stop strings must be a list", f"[{stops!r}]")
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError("a stop string is empty, so it would stop before the first token", "remove it")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to emit now, the stop string that was met or None).  After a stop, nothing is emitted any more."""
        if self._stopped is not None:
            return "", self._stopped
        text = self._held + text
        found = min(((at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0), default=None)
        if found is not None:
            _, start, self._stopped = found
            self._held = ""
            return text[:start], self._stopped
        keep = len(text) - self._open_suffix(text)
        self._held = text[keep:]
        return text[:keep], None

    def _open_suffix(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that is a proper prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):  # not the whole stop: push has looked
                return length
        return 0

    def flush(self) -> str:
        """The text that was held back, once no more can come; ``""`` after a stop."""
        held, self._held = self._held, ""
        return held
