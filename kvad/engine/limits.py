"""Where rows end and whose limit that is, and what a pool owes to requests that must never give way.

Integers only; ``cache/full.py`` has the words.  A request's own ``on_full`` stands before the engine's.  Rows go on
past ``row`` only where the cache was laid out for it; there, one that asks for ``stop``, ``preempt`` or ``refuse`` ends
at ``row`` with the same tokens as in a cache that drops nothing, for nothing is dropped before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvad.cache.descent import blocks_of
from kvad.cache.full import GOES_ON, LimitName, OnFull
from kvad.cache.sizing import CacheConfig, Group
from kvad.engine.request import Sampling
from kvad.errors import RequestError

__all__ = ["ENDLESS", "Limits", "Promises"]

ENDLESS = 1 << 40  # tokens of a row without a limit
WHOSE: dict[LimitName, str] = {
    "model": "the model's limit",
    "cache": "what the cache holds of one row",
    "pool": "the pool",
}


@dataclass(frozen=True)
class Limits:
    """``row``: tokens of the longest row, ``by`` whom; ``beyond``: of one that goes on, under the policy ``under``."""

    row: int
    by: LimitName = "model"
    on_full: OnFull = "preempt"
    beyond: int | None = None
    under: str = ""

    @staticmethod
    def of(model: int, cache: CacheConfig) -> Limits:
        """Of a model's limit and a settled cache."""
        by: LimitName = "cache" if cache.capacity < model else "model"
        under = cache.on_full if cache.on_full in GOES_ON else cache.kept.name if cache.endless else ""
        beyond = ENDLESS if cache.endless else model if cache.outgrown else None
        return Limits(min(model, cache.capacity), by, cache.on_full, beyond, under)

    @property
    def endless(self) -> bool:
        """Whether a request that says nothing of it has no limit."""
        return self.beyond == ENDLESS

    def chosen(self, sampling: Sampling) -> OnFull:
        """RequestError where rows cannot go on in the way that is asked for."""
        asked = sampling.on_full
        if asked in GOES_ON and asked != self.under:
            other = f", and this one's goes on under {self.under}" if self.under else ""
            raise RequestError(
                f"on_full={asked}: the cache has to be laid out for it{other}",
                f"start the engine with it: --on-full {asked}, or on_full={asked!r} where the model is loaded",
            )
        return asked or self.on_full

    def longest(self, sampling: Sampling) -> tuple[int, LimitName]:
        """Tokens of the longest row of a request, and whose limit that is."""
        goes_on = self.beyond is not None and (sampling.on_full is None or sampling.on_full in GOES_ON)
        return (self.beyond, "model") if goes_on and self.beyond is not None else (self.row, self.by)

    def end(self, length: int, sampling: Sampling, holds: int) -> tuple[int, LimitName]:
        """What a row that starts with ``length`` tokens may reach, and whose limit that is; ``holds``: what the whole
        pool holds of one row.  RequestError for what could never fit, with both numbers."""
        most, by = self.longest(sampling)
        if not length:
            raise RequestError("the prompt is empty: a model continues at least one token")
        if length > most:
            raise RequestError(
                f"the prompt has {length} tokens, the limit is {most}", "shorten the prompt, nothing is cut"
            )
        asked = sampling.max_tokens
        if self.chosen(sampling) == "refuse" and most < ENDLESS:
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

    def _check_refused(self, length: int, asked: int | None, most: int, by: LimitName) -> None:
        hint = f"ask for max_tokens of at most {most - length}"
        if asked is None:
            raise RequestError(f"on_full=refuse: without max_tokens it could pass {WHOSE[by]}, {most} tokens", hint)
        if length + asked > most:
            raise RequestError(
                f"on_full=refuse: {length} prompt tokens and max_tokens {asked} pass {WHOSE[by]}, {most} tokens", hint
            )


class Promises:
    """Blocks promised to requests that say "refuse": all of them would fit at their longest, above the watermark.

    Samples count as if they shared nothing.  What other requests hold does not count: they give way.
    """

    def __init__(self, groups: Sequence[Group], spare: Sequence[int]) -> None:
        self._groups = groups[: len(spare)]
        self._every = groups
        self._left = [group.usable - free for group, free in zip(groups, spare, strict=False)]

    def take(self, rows: int, length: int) -> tuple[int, ...]:
        """Blocks of each group for ``rows`` rows of ``length`` tokens.  RequestError: they are not there to promise."""
        need = tuple(rows * blocks_of(group, self._every, length) for group in self._groups)
        for blocks, left, group in zip(need, self._left, self._groups, strict=True):
            if blocks > left:
                raise RequestError(
                    f"on_full=refuse: at its longest it takes {blocks} blocks, and {left} of {group.usable} are not "
                    "promised to others or left free",
                    "ask again when another request has ended, or for fewer tokens",
                )
        self.give_back(tuple(-blocks for blocks in need))
        return need

    def give_back(self, blocks: Sequence[int]) -> None:
        self._left = [left + more for left, more in zip(self._left, blocks, strict=True)]
