"""Measured costs of steps, and the prompt tokens of a step that keep running sequences within a time bound.

A step's seconds are those of its decoding sequences plus those of its prompt tokens. Seconds per prompt token grow with
the context, so they are kept apart for contexts of similar lengths. All are medians of recent steps; the first steps
are left out, because they allocate buffers and build kernels. Seconds per prompt token include a step's fixed costs.
Every step updates them, so the number of tokens settles where a step takes ``TARGET`` of the bound.

Durations are data: no clock, no torch.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from statistics import median

WARM_UP_STEPS = 2  # of each kind, left out
RECENT_STEPS = 9  # of which the median is taken
TARGET = 0.9  # share of the bound that a step may take, since half of the steps exceed their median
FIRST_TOKENS = 16  # prompt tokens of a step before any was measured
SHORT_CONTEXT = 1024  # tokens; shorter contexts have the same costs, longer ones those of their power of two
MIN_SECONDS = 0.010  # that ``max_slowdown`` leaves for prompts: fixed costs would dominate shorter parts of them
MIN_TOKENS = 4  # a prompt is read however low the bound is
LOG = logging.getLogger(__name__)


class StepCosts:
    """Costs of one scheduler's steps.

    Args:
        max_inter_token: Longest time between two tokens of a running sequence, in seconds; None: no bound.
        max_slowdown: Largest ratio of a step's seconds to those without prompt tokens; None: no bound. If more
            sequences wait or read their prompts than decode, prompts get as many times more, because they would
            otherwise be read at the pace of a few sequences.
    """

    def __init__(self, max_inter_token: float | None, max_slowdown: float | None = None) -> None:
        self.max_inter_token, self.max_slowdown = max_inter_token, max_slowdown
        self._decoding, self._prompts = _Recent(WARM_UP_STEPS), dict[int, _Recent]()  # by the size of the context
        self._has_warned = False

    def record(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """Record a step, given (first position, new tokens) of each sequence; those with one token decode."""
        prompts = [span for span in spans if span[1] > 1]
        if not prompts:
            self._decoding.add(seconds)
            self._warn_if_too_slow(len(spans))
            return
        if len(prompts) < len(spans):
            seconds -= self.decoding_seconds
        longest, num_tokens = max(_context_size(start) for start, _ in prompts), 0
        for start, num_new_tokens in prompts:
            if _context_size(start) == longest:
                num_tokens += num_new_tokens
            else:
                seconds -= self.seconds_of(start, num_new_tokens)
        if longest not in self._prompts:
            self._prompts[longest] = _Recent(0 if self._prompts else WARM_UP_STEPS)
        self._prompts[longest].add(max(0.0, seconds) / num_tokens)

    def _per_token(self, size: int) -> float | None:
        """Return the seconds per prompt token for contexts of this size, else of the next smaller or larger ones."""
        known = sorted(known for known, recent in self._prompts.items() if recent.median)
        nearest = [each for each in known if each <= size][-1:] or known[:1]
        return self._prompts[nearest[0]].median if nearest else None

    @property
    def decoding_seconds(self) -> float:
        """Seconds of a step without prompt tokens; 0 before the first."""
        return self._decoding.median or 0.0

    def _prompt_seconds(self, num_decoding: int, num_reading: int) -> float:
        """Return the seconds that a step with decoding sequences has for prompts.

        Args:
            num_decoding: Sequences that decode in the step.
            num_reading: Sequences that wait or read their prompts.
        """
        decoding = self.decoding_seconds
        seconds = math.inf if self.max_inter_token is None else TARGET * self.max_inter_token - decoding
        if self.max_slowdown is not None and decoding:
            share = max(1.0, num_reading / num_decoding)
            slowdown = max(MIN_SECONDS, share * (TARGET * self.max_slowdown - 1.0) * decoding)
            seconds = min(seconds, slowdown)
        return seconds

    def budget(self, num_tokens: int, num_decoding: int, num_reading: int) -> PromptBudget:
        """Return what a step with decoding sequences has for prompts: up to ``num_tokens``, within the bound."""
        seconds = self._prompt_seconds(num_decoding, num_reading)
        if seconds == math.inf or self._per_token(0) is None:
            return PromptBudget(min(num_tokens, FIRST_TOKENS))
        return PromptBudget(num_tokens, self, seconds)

    def max_prompt_tokens(self, seconds: float, start: int = 0) -> int:
        """Return how many prompt tokens from this position take so long."""
        return max(0, int(seconds / (self._per_token(_context_size(start)) or math.inf)))

    def seconds_of(self, start: int, num_tokens: int) -> float:
        """Return the time that a prompt's tokens from this position take; 0 before any was measured."""
        return num_tokens * (self._per_token(_context_size(start)) or 0.0)

    def _warn_if_too_slow(self, num_decoding: int) -> None:
        if self.max_inter_token is None or self._has_warned:
            return
        if self.decoding_seconds > self.max_inter_token:
            self._has_warned = True
            LOG.warning(
                "max_inter_token: %.3g ms cannot be met: a step of %d sequences takes %.3g ms without prompt tokens; "
                "prompts are read %d tokens at a time",
                1e3 * self.max_inter_token,
                num_decoding,
                1e3 * self.decoding_seconds,
                MIN_TOKENS,
            )


class PromptBudget:
    """Prompt tokens that a step may still compute, and the seconds that they may take.

    Args:
        tokens: Tokens.
        costs: Measured costs; None: the time is not bounded.
        seconds: Seconds, with ``costs``.
    """

    def __init__(self, tokens: int, costs: StepCosts | None = None, seconds: float = math.inf) -> None:
        self.tokens, self._costs, self._seconds = tokens, costs, seconds
        self._reserved_tokens, self._reserved_seconds = 0, 0.0

    @property
    def is_bounded(self) -> bool:
        """True if the time is bounded."""
        return self._costs is not None

    @property
    def has_room(self) -> bool:
        """True if another prompt can begin."""
        return self.max_tokens(0) >= (MIN_TOKENS if self.is_bounded else 1)

    def max_tokens(self, start: int, share: float = 1.0) -> int:
        """Return how many tokens of a prompt, from position ``start``, a share of what is left suffices for."""
        if self._costs is None:
            return self.tokens
        return min(self.tokens, self._costs.max_prompt_tokens(share * self._seconds, start))

    def spend(self, start: int, num_tokens: int) -> None:
        self.tokens -= num_tokens
        if self._costs is not None:
            self._seconds -= self._costs.seconds_of(start, num_tokens)

    def reserve(self, share: float) -> None:
        """Set a share aside until ``release``."""
        self._reserved_tokens, self._reserved_seconds = int(share * self.tokens), share * self._seconds
        self.tokens, self._seconds = self.tokens - self._reserved_tokens, self._seconds - self._reserved_seconds

    def release(self) -> None:
        """Return what ``reserve`` has set aside."""
        self.tokens, self._seconds = self.tokens + self._reserved_tokens, self._seconds + self._reserved_seconds


def _context_size(start: int) -> int:
    return max(start, SHORT_CONTEXT).bit_length()


class _Recent:
    """Median of recent values, after a warm-up."""

    def __init__(self, num_left_out: int) -> None:
        self._values: deque[float] = deque(maxlen=RECENT_STEPS)
        self._num_left_out = num_left_out
        self.median: float | None = None

    def add(self, value: float) -> None:
        if self._num_left_out:
            self._num_left_out -= 1
            return
        self._values.append(value)
        self.median = median(self._values)
