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
from kvad.cache.full import GOES_ON, SINKS
from kvad.cache.policy import Hierarchy, Policy, Sinks, Spilled, Window
from kvad.config import ModelConfig
from kvad.errors import ConfigError

__all__ = ["settle"]

RATIO, EVERY = 8, 128  # of summaries: tokens of one, and how often they are made, at most


def settle(config: ModelConfig, cache: CacheConfig) -> CacheConfig:
    """The cache with the policy that its ``on_full`` takes, for this model; one that takes none is returned as it is.

    Settling twice changes nothing.  ConfigError names what cannot be, and why.
    """
    if config.decoder is None:
        if cache.policy != "full" or cache.endless or cache.on_full in GOES_ON:
            raise ConfigError("cache.policy: an encoder keeps nothing from one step to the next", "leave it out")
        return cache
    if cache.on_full not in GOES_ON:
        return cache
    if cache.endless and cache.on_full in ("summarise", "spill"):
        raise ConfigError(
            f"cache.endless: under on_full={cache.on_full} a row ends at the model's limit",
            "leave it out, or take sinks",
        )
    policy = str(_policy(config, cache, min(config.limit, cache.capacity)))
    if cache.policy not in ("full", policy):
        raise ConfigError(
            f"cache.on_full: {cache.on_full} is {policy}, and policy {cache.policy} is given too",
            f"give one of them; endless=True lets rows go on under {cache.policy}",
        )
    return replace(cache, policy=policy, endless=cache.on_full in ("window", "sinks"))


def _policy(config: ModelConfig, cache: CacheConfig, longest: int) -> Policy:
    if cache.on_full == "summarise":
        return _summaries(config, cache)
    if cache.on_full == "spill":
        return _spilled(config, cache)
    added = config.embed.position
    if added is not None:
        raise ConfigError(
            f"cache.on_full: {cache.on_full}: {added.kind} positions are part of every key and value and cannot be "
            "numbered anew",
            "rows of this model end at its limit: preempt, stop or refuse",
        )
    if cache.on_full == "window":
        return Window(longest)
    least = SINKS + (1 if cache.layout == "contiguous" else cache.block_size)
    if longest < least:
        raise ConfigError(
            f"cache.on_full: sinks: rows of {longest} tokens are less than {SINKS} sinks and a block of "
            f"{least - SINKS}",
            f"give a row at least {least} tokens, or take window",
        )
    return Sinks(SINKS, longest - SINKS)


def _summaries(config: ModelConfig, cache: CacheConfig) -> Hierarchy:
    size, more = cache.block_size, config.limit - cache.capacity
    if more <= 0:
        raise ConfigError(
            f"cache.on_full: summarise: rows already end at the model's limit of {config.limit} tokens, and summaries "
            "keep their positions",
            f"give the cache fewer tokens (--context {max(1, config.limit // 2)}), or take sinks",
        )
    if cache.layout == "contiguous":
        raise ConfigError("cache.on_full: summarise: tokens are summarised in whole blocks", "take the paged layout")
    if cache.capacity < 2 * size:
        raise ConfigError(
            f"cache.on_full: summarise: {cache.capacity} tokens are less than two blocks of {size}, one for the first "
            "tokens and one for the latest",
            f"give the cache at least {2 * size}, or smaller blocks",
        )
    ratio = max((each for each in range(2, RATIO + 1) if size % each == 0), default=0)
    if not ratio:
        raise ConfigError(
            f"cache.on_full: summarise: blocks of {size} cannot be cut into summaries", "take cache.block_size=16"
        )
    every = max(1, min(EVERY, cache.capacity // 4) // size) * size
    whole = cache.capacity // size * size
    summaries = -(-(config.limit - whole) // ratio)
    return Hierarchy(whole - size, packed=0, summaries=summaries, ratio=ratio, every=every, sinks=size)


def _spilled(config: ModelConfig, cache: CacheConfig) -> Spilled:
    size = cache.block_size
    if config.limit <= cache.capacity:
        raise ConfigError(
            f"cache.on_full: spill: rows already end at the model's limit of {config.limit} tokens",
            f"give the cache fewer tokens (--context {max(1, config.limit // 4)}), or leave it out",
        )
    if cache.layout == "contiguous":
        raise ConfigError("cache.on_full: spill: tokens are spilled in whole blocks", "take the paged layout")
    if cache.capacity < 2 * size:
        raise ConfigError(
            f"cache.on_full: spill: {cache.capacity} tokens are less than two blocks of {size}",
            f"give the cache at least {2 * size}, or smaller blocks",
        )
    every = max(1, min(cache.chunk, cache.capacity // 4) // size) * size
    recent = cache.capacity // size * size - every
    return Spilled(recent, -(-(config.limit - recent) // size) * size, every)
