"""Length limits of sequences, and blocks reserved for requests in overflow mode "reject".

Integers only; ``cache/config.py`` defines the overflow modes. A request's own mode precedes the engine's. Sequences
continue past ``max_len`` only if the cache was created for it; there, a request in mode ``stop``, ``preempt`` or
``reject`` ends at ``max_len`` with the same tokens as in a cache that evicts nothing, since nothing is evicted earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvad import cache as cache_lib
from kvad.cache import CacheConfig, CacheGroup
from kvad.cache.manager import KVCacheManager, max_blocks
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import ConfigError, RequestError

ENDLESS = 1 << 40  # tokens of a sequence without a limit
LIMIT_NAMES: dict[cache_lib.config.LengthLimit, str] = {
    "model": "the model's limit",
    "cache": "the longest sequence of the cache",
    "pool": "the pool",
}


@dataclass(frozen=True)
class LengthLimits:
    """Longest sequence, the overflow mode, and the limit of sequences that continue."""

    max_len: int  # tokens of the longest sequence
    limited_by: cache_lib.config.LengthLimit = "model"  # what sets max_len
    overflow: cache_lib.config.OverflowMode = "preempt"
    overflow_max_len: int | None = None  # tokens of a sequence that continues past max_len
    overflow_policy: str = ""  # policy under which it continues
    # Lengths beyond which a sequence has other rotary frequencies, ascending (dynamic and longrope scaling).
    short_regime_lens: tuple[int, ...] = ()

    @staticmethod
    def from_config(model: int, cache: CacheConfig, short_regime_lens: tuple[int, ...] = ()) -> LengthLimits:
        """Build the limits from the model's maximum length and a resolved cache configuration."""
        limited_by: cache_lib.config.LengthLimit = "cache" if cache.max_seq_len < model else "model"
        policy: str = cache.overflow if cache.overflow in cache_lib.config.CONTINUING_MODES else ""
        if not policy and cache.endless:
            policy = cache.resolved_policy.name
        overflow_max_len = ENDLESS if cache.endless else model if cache.exceeds_max_seq_len else None
        max_len = min(model, cache.max_seq_len)
        return LengthLimits(max_len, limited_by, cache.overflow, overflow_max_len, policy, short_regime_lens)

    def rope_regime(self, num_tokens: int) -> int:
        """Return the rotary regime of a sequence of that many tokens, 0 for the short one.

        It depends on the tokens there are, never on ``max_tokens``: sequences of different regimes share no blocks, and
        one that grows into another regime is recomputed.
        """
        return sum(num_tokens > length for length in self.short_regime_lens)

    def rope_regime_room(self, num_tokens: int) -> int:
        """Return how many tokens more a sequence may have in the same rotary regime."""
        return min((end - num_tokens for end in self.short_regime_lens if end >= num_tokens), default=ENDLESS)

    @property
    def endless(self) -> bool:
        """True if a request without ``overflow`` has no length limit."""
        return self.overflow_max_len == ENDLESS

    def overflow_mode(self, sampling_params: SamplingParams) -> cache_lib.config.OverflowMode:
        """Return the request's overflow mode; raise RequestError if the cache does not support it."""
        requested = sampling_params.overflow
        if requested in cache_lib.config.CONTINUING_MODES and requested != self.overflow_policy:
            other = f", which uses {self.overflow_policy}" if self.overflow_policy else ""
            raise RequestError(
                f"overflow: {requested} must be configured when the cache is created{other}",
                f"Start the engine with --overflow {requested}, or pass overflow={requested!r} to LLM.load.",
            )
        return requested or self.overflow

    def max_len_for(self, sampling_params: SamplingParams) -> tuple[int, cache_lib.config.LengthLimit]:
        """Return the tokens of the request's longest sequence, and what limits them."""
        requested = sampling_params.overflow
        if self.overflow_max_len is not None and requested in (None, *cache_lib.config.CONTINUING_MODES):
            return self.overflow_max_len, "model"
        return self.max_len, self.limited_by

    def resolve(
        self, length: int, sampling_params: SamplingParams, max_cached_tokens: int
    ) -> tuple[int, cache_lib.config.LengthLimit]:
        """Return a sequence's maximum length, given its prompt length, and what limits it.

        Args:
            length: Prompt tokens.
            sampling_params: Options of the request.
            max_cached_tokens: Tokens of one sequence that the whole pool can hold.

        Raises:
            RequestError: If the request can never fit.
        """
        max_len, limited_by = self.max_len_for(sampling_params)
        if not length:
            raise RequestError("prompt: must have at least 1 token, got 0")
        if length > max_len:
            raise RequestError(f"prompt: must have at most {max_len} tokens, got {length}", "Shorten it.")
        requested = sampling_params.max_tokens
        if self.overflow_mode(sampling_params) == "reject" and max_len < ENDLESS:
            limit_text = f"{LIMIT_NAMES[limited_by]}, {max_len} tokens"
            hint = f"Set max_tokens to at most {max_len - length}."
            if requested is None:
                message = f"overflow=reject: without max_tokens the request could exceed {limit_text}"
                raise RequestError(message, hint)
            if length + requested > max_len:
                message = f"overflow=reject: {length} prompt tokens and max_tokens {requested} exceed {limit_text}"
                raise RequestError(message, hint)
        limit = max_len if requested is None else min(max_len, length + requested)
        if requested is None and limit > max(length, max_cached_tokens + 1):  # the last token is sampled, never stored
            limit, limited_by = max(length, max_cached_tokens + 1), "pool"
        num_slots = max(length, limit - 1)
        if num_slots > max_cached_tokens:
            raise RequestError(
                f"{length} prompt tokens and max_tokens {requested} need room for {num_slots} tokens, "
                f"the whole cache holds {max_cached_tokens} of one sequence",
                "Request fewer tokens, or give the cache more blocks.",
            )
        return limit, "max_tokens" if requested is not None and length + requested <= max_len else limited_by


class BlockReservations:
    """Blocks reserved for requests in mode "reject", so that all of them fit at their longest, above the watermark.

    Samples count as if they shared no blocks. Other requests do not count, because those can be preempted.
    """

    def __init__(self, groups: Sequence[CacheGroup], watermark_blocks: Sequence[int]) -> None:
        self._groups = groups[: len(watermark_blocks)]
        self._all_groups = groups
        self._left = [group.num_usable_blocks - free for group, free in zip(groups, watermark_blocks, strict=False)]

    def reserve(self, num_seqs: int, length: int) -> tuple[int, ...]:
        """Reserve and return blocks per group; raise RequestError if too few are left."""
        num_blocks = tuple(num_seqs * max_blocks(group, self._all_groups, length) for group in self._groups)
        for needed, left, group in zip(num_blocks, self._left, self._groups, strict=True):
            if needed > left:
                raise RequestError(
                    f"overflow=reject: the request can need {needed} blocks, but {left} of "
                    f"{group.num_usable_blocks} are neither reserved nor kept free",
                    "Retry when another request has ended, or request fewer tokens.",
                )
        self.release([-needed for needed in num_blocks])
        return num_blocks

    def release(self, num_blocks: Sequence[int]) -> None:
        self._left = [left + change for left, change in zip(self._left, num_blocks, strict=True)]


def check_beams(sampling_params: SamplingParams, limit: int, manager: KVCacheManager, max_num_seqs: int) -> None:
    """Raise RequestError if this cache cannot hold a beam search of ``limit`` tokens."""
    num_beams = sampling_params.num_beams
    if manager.lossy:
        raise RequestError(
            "num_beams: beams share cached tokens, but under this policy each sequence keeps its own selection",
            "Use a policy by position (full, window, sinks, block-window), or sample.",
        )
    if num_beams > max_num_seqs:
        message = f"num_beams: must be at most max_num_seqs ({max_num_seqs}), got {num_beams}"
        raise RequestError(message, "Request fewer beams.")
    if not manager.has_capacity(num_beams, limit - 1):  # the last token is sampled, never stored
        raise RequestError(
            f"the cache has no room for {num_beams} beams of {limit} tokens",
            "Request fewer beams or tokens, or give the cache more blocks.",
        )


def check_encoder_input(tokens: Sequence[int], max_len: int | None) -> None:
    """Raise RequestError for an empty encoder input, or one that exceeds the cache's limit, if any."""
    if not tokens:
        raise RequestError("encoder input: must have at least 1 token, got 0")
    if max_len is not None and len(tokens) > max_len:
        raise RequestError(f"encoder input: must have at most {max_len} tokens, got {len(tokens)}", "Shorten it.")


def check_sizes(max_num_seqs: int, max_num_batched_tokens: int, prefill_chunk_size: int, max_len: int) -> None:
    """Raise ConfigError if a batch could not hold every running sequence."""
    if max_num_seqs < 1 or prefill_chunk_size < 1 or max_len < 1:
        raise ConfigError(
            "max_num_seqs, prefill_chunk_size and max_len: must be at least 1, "
            f"got {max_num_seqs}, {prefill_chunk_size} and {max_len}"
        )
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens: must be at least max_num_seqs ({max_num_seqs}), got {max_num_batched_tokens}"
        )
