"""The text of one sample as its tokens come: whole characters, and the end where a stop string is found."""

from __future__ import annotations

from kvad.engine.request import SamplingParams
from kvad.text.detokenize import Detokenizer
from kvad.text.stop import StopStringMatcher
from kvad.text.tokenizer import Tokenizer

__all__ = ["OutputTextStream"]


class OutputTextStream:
    """One sample's text: bytes made whole, stop strings found across tokens once ``min_tokens`` have come."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._words, self._stops = Detokenizer(tokenizer), StopStringMatcher(sampling.stop)
        self._unstoppable = sampling.min_tokens
        self._stopped = False

    def push(self, token: int | None) -> tuple[str, bool]:
        if token is None:
            return "", False
        text = self._words.push(token)
        self._unstoppable -= 1
        if self._unstoppable >= 0:
            return text, False
        text, stopped = self._stops.push(text)
        self._stopped = stopped is not None
        return text, self._stopped

    def flush(self) -> str:
        if self._stopped:
            return ""
        text, stopped = self._stops.push(self._words.flush())
        return text if stopped is not None else text + self._stops.flush()
