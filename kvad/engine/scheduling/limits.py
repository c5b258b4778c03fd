"""Where rows end and whose limit that is, and what a pool owes to requests that must never give way.

Integers only; ``cache/full.py`` has the words.  A request's own ``on_full`` stands before the engine's.  Rows go on
past ``row`` only where the cache was laid out for it; there, one that asks for ``stop``, ``preempt`` or ``refuse`` ends
at ``row`` with the same tokens as in a cache that drops nothing, for nothing is dropped before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvad import cache as cache_lib
from kvad.cache import CacheConfig, CacheGroup
from kvad.cache.manager import max_blocks
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import RequestError

ENDLESS = 1 << 40  # tokens of a row without a limit
LIMIT_NAMES: dict[cache_lib.config.LengthLimit, str] = {
    "model": "the model's limit",
    "cache": "what the cache holds of one row",
    "pool": "the pool",
}


@dataclass(frozen=True)
class LengthLimits:
    """``row``: tokens of the longest row, ``by`` whom; ``beyond``: of one that goes on, under the policy ``under``."""

    max_len: int
    limited_by: cache_lib.config.LengthLimit = "model"
    on_full: cache_lib.config.OverflowMode = "preempt"
    overflow_max_len: int | None = None
    overflow_policy: str = ""

    @staticmethod
    def from_config(model: int, cache: CacheConfig) -> LengthLimits:
        """Of a model's limit and a settled cache."""
        by: cache_lib.config.LengthLimit = "cache" if cache.max_seq_len < model else "model"
        under = (
            cache.overflow
            if cache.overflow in cache_lib.config.CONTINUING_MODES
            else cache.resolved_policy.name
            if cache.endless
            else ""
        )
        beyond = ENDLESS if cache.endless else model if cache.exceeds_max_seq_len else None
        return LengthLimits(min(model, cache.max_seq_len), by, cache.overflow, beyond, under)

    @property
    def endless(self) -> bool:
        """Whether a request that says nothing of it has no limit."""
        return self.overflow_max_len == ENDLESS

    def overflow_mode(self, sampling: SamplingParams) -> cache_lib.config.OverflowMode:
        """RequestError where rows cannot go on in the way that is asked for."""
        asked = sampling.overflow
        if asked in cache_lib.config.CONTINUING_MODES and asked != self.overflow_policy:
            other = f", and this one's goes on under {self.overflow_policy}" if self.overflow_policy else ""
            raise RequestError(
                f"on_full={asked}: the cache has to be laid out for it{other}",
                f"start the engine with it: --on-full {asked}, or on_full={asked!r} where the model is loaded",
            )
        return asked or self.on_full

    def max_len_for(self, sampling: SamplingParams) -> tuple[int, cache_lib.config.LengthLimit]:
        """Tokens of the longest row of a request, and whose limit that is."""
        goes_on = self.overflow_max_len is not None and (
            sampling.overflow is None or sampling.overflow in cache_lib.config.CONTINUING_MODES
        )
        return (
            (self.overflow_max_len, "model")
            if goes_on and self.overflow_max_len is not None
            else (self.max_len, self.limited_by)
        )

    def resolve(self, length: int, sampling: SamplingParams, holds: int) -> tuple[int, cache_lib.config.LengthLimit]:
        """What a row that starts with ``length`` tokens may reach, and whose limit that is; ``holds``: what the whole
        pool holds of one row.  RequestError for what could never fit, with both numbers."""
        most, by = self.max_len_for(sampling)
        if not length:
            raise RequestError("the prompt is empty: a model continues at least one token")
        if length > most:
            raise RequestError(
                f"the prompt has {length} tokens, the limit is {most}", "shorten the prompt, nothing is cut"
            )
        asked = sampling.max_tokens
        if self.overflow_mode(sampling) == "refuse" and most < ENDLESS:
            self._check_refused(length, asked, most, by)
        limit = most if asked is None else min(most, length + asked)
        if asked is None and limit > max(length, holds + 1):  # the last token is sampled, never stored
            limit, by = max(length, holds + 1), "pool"
        needed = max(length, limit - 1)
        if needed > holds:
            raise RequestError(
                f"{length} prompt tokens and max_tokens {asked} need room for {needed} tokens, "
                f"the whole cache holds {holds} of one row",
                "ask for fewer tokens, or give the cache more blocks",
            )
        return limit, "max_tokens" if asked is not None and length + asked <= most else by

    def _check_refused(self, length: int, asked: int | None, most: int, by: cache_lib.config.LengthLimit) -> None:
        hint = f"ask for max_tokens of at most {most - length}"
        if asked is None:
            raise RequestError(
                f"on_full=refuse: without max_tokens it could pass {LIMIT_NAMES[by]}, {most} tokens", hint
            )
        if length + asked > most:
            raise RequestError(
                f"on_full=refuse: {length} prompt tokens and max_tokens {asked} pass {LIMIT_NAMES[by]}, {most} tokens",
                hint,
            )


class BlockReservations:
    """Blocks promised to requests that say "refuse": all of them would fit at their longest, above the watermark.

    Samples count as if they shared nothing.  What other requests hold does not count: they give way.
    """

    def __init__(self, groups: Sequence[CacheGroup], spare: Sequence[int]) -> None:
        self._groups = groups[: len(spare)]
        self._every = groups
        self._left = [group.num_usable_blocks - free for group, free in zip(groups, spare, strict=False)]

    def reserve(self, rows: int, length: int) -> tuple[int, ...]:
        """Blocks of each group for ``rows`` rows of ``length`` tokens.  RequestError: they are not there to promise."""
        need = tuple(rows * max_blocks(group, self._every, length) for group in self._groups)
        for blocks, left, group in zip(need, self._left, self._groups, strict=True):
            if blocks > left:
                raise RequestError(
                    f"on_full=refuse: at its longest it takes {blocks} blocks, and {left} of {group.num_usable_blocks} are not "
                    "promised to others or left free",
                    "ask again when another request has ended, or for fewer tokens",
                )
        self.release(tuple(-blocks for blocks in need))
        return need

    def release(self, blocks: Sequence[int]) -> None:
        self._left = [left + more for left, more in zip(self._left, blocks, strict=True)]
