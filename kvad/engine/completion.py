"""What a caller gets back: typed, frozen, printable results."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvad.cache.full import LengthLimit
from kvad.engine.request import FinishReason, TokenLogprob

__all__ = ["Completion", "CompletionChoice", "TextScore", "Timings", "CompletionUsage"]


@dataclass(frozen=True)
class CompletionUsage:
    """``cached``: prompt tokens whose keys and values were reused instead of computed."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


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
class CompletionChoice:
    """One continuation.  ``tokens`` holds every generated token, the stop token too; ``text`` never shows it.
    ``total``: of a beam search, its sum of log-probabilities over the length penalty.  ``limit``: where it ended by its
    length, whose limit that was: "max_tokens", "model", "cache" (its capacity) or "pool" (no block was left)."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    cumulative_logprob: float | None = None
    limit: LengthLimit | None = None


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt: sample 0 through the plain attributes, all ``n`` of them in ``samples``."""

    choices: tuple[CompletionChoice, ...]
    usage: CompletionUsage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def limit(self) -> LengthLimit | None:
        return self.choices[0].limit


@dataclass(frozen=True)
class TextScore:
    """Log-probabilities of a text's tokens; the first token has none, for nothing stands before it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def total_logprob(self) -> float:
        return math.fsum(p for p in self.logprobs if p is not None)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability over the tokens that have one."""
        counted = sum(p is not None for p in self.logprobs)
        return math.exp(-self.total_logprob / counted) if counted else math.nan
