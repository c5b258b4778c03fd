"""From "go on when it is full" to what a cache must be laid out as: a policy, for one model.

``window`` and ``sinks`` are that policy with rows that never end, from the start: a row shorter than L sees everything,
so nothing is lost before.  Positions that are added to the embeddings cannot be numbered anew, so they are refused.

``summarise`` keeps positions, so its rows still end at the model's limit: it lifts the *cache's* limit, where that is
lower.  The first block and the rest of the capacity stay as they are; of what is older, ``ratio`` tokens make one
summary, up to the model's limit, so that none is gone.

    capacity 64, model's limit 256, blocks of 16:  hierarchy(48, packed=0, summaries=24, ratio=8, every=16, sinks=16)

``spill`` lifts the cache's limit in the same way and loses nothing: the latest tokens, the capacity in whole blocks,
are in the pool, and what is older lies below it.

    capacity 64, model's limit 256, blocks of 16:  spilled(48, older=208, every=16)

No torch.
"""

from __future__ import annotations

from dataclasses import replace

from kvad.cache.config import CacheConfig
from kvad.cache.full import CONTINUING_MODES, NUM_SINKS
from kvad.cache.policy import CachePolicy, OffloadPolicy, Sinks, TieredPolicy, Window
from kvad.config import ModelConfig
from kvad.errors import ConfigError

__all__ = ["resolve_for_model"]

MAX_RATIO, MAX_INTERVAL = 8, 128  # of summaries: tokens of one, and how often they are made, at most


def resolve_for_model(config: ModelConfig, cache: CacheConfig) -> CacheConfig:
    """The cache with the policy that its ``on_full`` takes, for this model; one that takes none is returned as it is.

    Settling twice changes nothing.  ConfigError names what cannot be, and why.
    """
    if config.decoder is None:
        if cache.policy != "full" or cache.endless or cache.overflow in CONTINUING_MODES:
            raise ConfigError("cache.policy: an encoder keeps nothing from one step to the next", "leave it out")
        return cache
    if cache.overflow not in CONTINUING_MODES:
        return cache
    if cache.endless and cache.overflow in ("summarise", "spill"):
        raise ConfigError(
            f"cache.endless: under on_full={cache.overflow} a row ends at the model's limit",
            "leave it out, or take sinks",
        )
    policy = str(_policy_for(config, cache, min(config.max_seq_len, cache.max_seq_len)))
    if cache.policy not in ("full", policy):
        raise ConfigError(
            f"cache.overflow: {cache.overflow} is {policy}, and policy {cache.policy} is given too",
            f"give one of them; endless=True lets rows go on under {cache.policy}",
        )
    return replace(cache, policy=policy, endless=cache.overflow in ("window", "sinks"))


def _policy_for(config: ModelConfig, cache: CacheConfig, longest: int) -> CachePolicy:
    if cache.overflow == "summarise":
        return _summary_policy(config, cache)
    if cache.overflow == "spill":
        return _offload_policy(config, cache)
    added = config.embedding.position
    if added is not None:
        raise ConfigError(
            f"cache.overflow: {cache.overflow}: {added.kind} positions are part of every key and value and cannot be "
            "numbered anew",
            "rows of this model end at its limit: preempt, stop or refuse",
        )
    if cache.overflow == "window":
        return Window(longest)
    least = NUM_SINKS + (1 if cache.layout == "contiguous" else cache.block_size)
    if longest < least:
        raise ConfigError(
            f"cache.overflow: sinks: rows of {longest} tokens are less than {NUM_SINKS} sinks and a block of "
            f"{least - NUM_SINKS}",
            f"give a row at least {least} tokens, or take window",
        )
    return Sinks(NUM_SINKS, longest - NUM_SINKS)


def _summary_policy(config: ModelConfig, cache: CacheConfig) -> TieredPolicy:
    size, more = cache.block_size, config.max_seq_len - cache.max_seq_len
    if more <= 0:
        raise ConfigError(
            f"cache.overflow: summarise: rows already end at the model's limit of {config.max_seq_len} tokens, and summaries "
            "keep their positions",
            f"give the cache fewer tokens (--context {max(1, config.max_seq_len // 2)}), or take sinks",
        )
    if cache.layout == "contiguous":
        raise ConfigError("cache.overflow: summarise: tokens are summarised in whole blocks", "take the paged layout")
    if cache.max_seq_len < 2 * size:
        raise ConfigError(
            f"cache.overflow: summarise: {cache.max_seq_len} tokens are less than two blocks of {size}, one for the first "
            "tokens and one for the latest",
            f"give the cache at least {2 * size}, or smaller blocks",
        )
    ratio = max((each for each in range(2, MAX_RATIO + 1) if size % each == 0), default=0)
    if not ratio:
        raise ConfigError(
            f"cache.overflow: summarise: blocks of {size} cannot be cut into summaries", "take cache.block_size=16"
        )
    every = max(1, min(MAX_INTERVAL, cache.max_seq_len // 4) // size) * size
    whole = cache.max_seq_len // size * size
    summaries = -(-(config.max_seq_len - whole) // ratio)
    return TieredPolicy(whole - size, quantized=0, summaries=summaries, ratio=ratio, interval=every, num_sinks=size)


def _offload_policy(config: ModelConfig, cache: CacheConfig) -> OffloadPolicy:
    size = cache.block_size
    if config.max_seq_len <= cache.max_seq_len:
        raise ConfigError(
            f"cache.overflow: spill: rows already end at the model's limit of {config.max_seq_len} tokens",
            f"give the cache fewer tokens (--context {max(1, config.max_seq_len // 4)}), or leave it out",
        )
    if cache.layout == "contiguous":
        raise ConfigError("cache.overflow: spill: tokens are spilled in whole blocks", "take the paged layout")
    if cache.max_seq_len < 2 * size:
        raise ConfigError(
            f"cache.overflow: spill: {cache.max_seq_len} tokens are less than two blocks of {size}",
            f"give the cache at least {2 * size}, or smaller blocks",
        )
    every = max(1, min(cache.prefill_chunk_size, cache.max_seq_len // 4) // size) * size
    recent = cache.max_seq_len // size * size - every
    return OffloadPolicy(recent, -(-(config.max_seq_len - recent) // size) * size, every)
