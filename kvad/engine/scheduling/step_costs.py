"""Measured costs of steps, and the prompt tokens of a step that keep running sequences within a time bound.

A step's seconds are those of its decoding sequences plus those of its prompt tokens. Both are medians of recent steps;
the first steps of each kind are left out, because they allocate buffers and build kernels. Seconds per prompt token
include a step's fixed costs and grow with the context. Every step updates them, so the number of tokens settles where
a step takes ``TARGET`` of the bound.

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
        self._decoding, self._prompt = _Recent(), _Recent()
        self._has_warned = False

    def record(self, num_new_tokens: Sequence[int], seconds: float) -> None:
        """Record a step, given the new tokens of each sequence; those with one token decode."""
        num_decoding = num_new_tokens.count(1)
        num_prompt_tokens = sum(num_new_tokens) - num_decoding
        if not num_prompt_tokens:
            self._decoding.add(seconds)
            self._warn_if_too_slow(num_decoding)
            return
        decoding_seconds = self.decoding_seconds if num_decoding else 0.0
        self._prompt.add(max(0.0, seconds - decoding_seconds) / num_prompt_tokens)

    @property
    def decoding_seconds(self) -> float:
        """Seconds of a step without prompt tokens; 0 before the first."""
        return self._decoding.median or 0.0

    def max_prompt_tokens(self, num_decoding: int = 1, num_reading: int = 1) -> int:
        """Return how many prompt tokens a step with decoding sequences may compute.

        Args:
            num_decoding: Sequences that decode in the step.
            num_reading: Sequences that wait or read their prompts.
        """
        per_token, decoding = self._prompt.median, self.decoding_seconds
        if not per_token:
            return FIRST_TOKENS
        seconds = math.inf if self.max_inter_token is None else TARGET * self.max_inter_token - decoding
        if self.max_slowdown is not None and decoding:
            share = max(1.0, num_reading / num_decoding)
            slowdown = max(MIN_SECONDS, share * (TARGET * self.max_slowdown - 1.0) * decoding)
            seconds = min(seconds, slowdown)
        return FIRST_TOKENS if seconds == math.inf else max(MIN_TOKENS, int(seconds / per_token))

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


class _Recent:
    """Median of recent values, after a warm-up."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=RECENT_STEPS)
        self._num_left_out = 0
        self.median: float | None = None

    def add(self, value: float) -> None:
        if self._num_left_out < WARM_UP_STEPS:
            self._num_left_out += 1
            return
        self._values.append(value)
        self.median = median(self._values)
