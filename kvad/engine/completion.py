"""What a caller gets back: typed, frozen, printable results."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvad.cache.full import LimitName
from kvad.engine.request import FinishReason, TokenScore

__all__ = ["Completion", "Sample", "TextScore", "Timings", "Usage"]


@dataclass(frozen=True)
class Usage:
    """``cached``: prompt tokens whose keys and values were reused instead of computed."""

    prompt: int
    completion: int
    cached: int


@dataclass(frozen=True)
class Timings:
    """Seconds from submission to the first token and to the end; ``tokens_per_second`` after the first token.

    They are the request's own, on the scheduler's clock: when its tokens were made, not when somebody fetched them.
    Where no token was asked for, ``first_token`` is ``total``.
    """

    first_token: float
    total: float
    tokens_per_second: float


@dataclass(frozen=True)
class Sample:
    """One continuation.  ``tokens`` holds every generated token, the stop token too; ``text`` never shows it.
    ``total``: of a beam search, its sum of log-probabilities over the length penalty.  ``limit``: where it ended by its
    length, whose limit that was: "max_tokens", "model", "cache" (its capacity) or "pool" (no block was left)."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenScore, ...]
    finish_reason: FinishReason
    total: float | None = None
    limit: LimitName | None = None


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt: sample 0 through the plain attributes, all ``n`` of them in ``samples``."""

    samples: tuple[Sample, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenScore, ...] = ()

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.samples[0].tokens

    @property
    def logprobs(self) -> tuple[TokenScore, ...]:
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def limit(self) -> LimitName | None:
        return self.samples[0].limit


@dataclass(frozen=True)
class TextScore:
    """Log-probabilities of a text's tokens; the first token has none, for nothing stands before it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def total(self) -> float:
        return math.fsum(p for p in self.logprobs if p is not None)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability over the tokens that have one."""
        counted = sum(p is not None for p in self.logprobs)
        return math.exp(-self.total / counted) if counted else math.nan
