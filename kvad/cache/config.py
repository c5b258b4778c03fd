"""What a cache is asked to hold: every field by itself and beside the others, but not yet of which model.

``settle.py`` fits it to a model, ``sizing.py`` says how many blocks and bytes it takes, ``planning.py`` what all of it
takes together.  A value that cannot be is refused when it is said, with what could.  No torch.

What is done when there is no more room: for a row at its limit, and for a pool that has run out.

==============  ======================================  ==============================================================
``on_full``     a row at its limit                      the pool runs out
==============  ======================================  ==============================================================
``preempt``     ends ("length")                         the youngest row gives its blocks back and comes back later
``stop``        ends                                    the youngest row that cannot grow ends, and keeps what it has
``refuse``      was refused when it was submitted       cannot be: what could run out was refused when it was submitted
``window``      goes on under ``window(L)``             as ``preempt``
``sinks``       goes on under ``sinks(4, L - 4)``       as ``preempt``
``summarise``   goes on up to the model's limit, its    as ``preempt``
                older tokens as summaries
``spill``       goes on up to the model's limit with    as ``preempt``
                the same tokens, its older ones in host
                memory and on disk
==============  ======================================  ==============================================================

``L``: the model's limit or the cache's capacity, whichever is less.  Names only; ``settle.py`` says what a cache needs
for them, ``engine/limits.py`` where rows end.  Nothing drops a token unless it was asked for by name.

From "go on when it is full" to what a cache must be laid out as: a policy, for one model.

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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from kvad.cache.policy import CachePolicy, KeepAll, OffloadPolicy, Sinks, TieredPolicy, Window
from kvad.cache.policy_parser import parse_policy, restrict_specs
from kvad.cache.quantization import get_format, join_format_names
from kvad.config import AttentionSpec, ModelConfig
from kvad.errors import ConfigError, suggest

OverflowMode = Literal["preempt", "stop", "refuse", "window", "sinks", "summarise", "spill"]
LengthLimit = Literal["max_tokens", "model", "cache", "pool"]  # what ends a row by its length

NUM_SINKS = 4  # Xiao et al. 2023, sec. 3.1: four are enough

OVERFLOW_MODES: Mapping[str, str] = {
    "preempt": "a row ends at its limit L; without free blocks the youngest waits and comes back",
    "stop": "the same; without free blocks the youngest row that cannot grow ends",
    "refuse": "what could pass L or the blocks is refused at once; what runs never gives way",
    "window": "a row goes on past L with its last L tokens",
    "sinks": f"a row goes on past L with its first {NUM_SINKS} tokens and its last L - {NUM_SINKS}",
    "summarise": "a row goes on past the cache's capacity, older tokens as summaries",
    "spill": "the same, older tokens as they are in host memory and on disk: slower, and nothing is lost",
}
CONTINUING_MODES = ("window", "sinks", "summarise", "spill")


def resolve_endless(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A cache's fields as a user says them: ``endless`` alone, with no word on what stays, goes on under ``sinks``."""
    silent = fields.get("endless") is True and not fields.keys() & {"policy", "on_full"}
    return {**fields, "on_full": "sinks"} if silent else dict(fields)


DEMOTION_INTERVAL = 64  # tokens between two descents, where keys are packed by channel
DEFAULT_PREFIX_CACHE_SIZE = 4 << 30  # of a tier's folder, where nothing else is said
WRITE_QUEUE_BYTES = 64 << 20  # bytes of blocks that wait to be written to it; beyond, blocks are not stored


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What a cache is asked to hold.  ConfigError for a value that cannot be."""

    layout: Literal["paged", "contiguous"] = "paged"
    dtype: str = "float32"  # of keys and values, one of cache/formats.py, where the next two do not say otherwise
    key_dtype: str | None = None
    value_dtype: str | None = None
    block_size: int = 16  # slots of a block; contiguous: no-op, a block is a row
    max_num_seqs: int = 8  # live sequences
    max_seq_len: int  # tokens of the longest row
    prefill_chunk_size: int = 512  # the longest span of new tokens of one row in one step
    num_blocks: int | None = None  # paged: usable blocks of a full group; None = enough for rows x capacity
    enable_prefix_caching: bool = True  # reuse the blocks of equal prefixes (paged only: a contiguous row is one block)
    max_source_len: int = 0  # tokens of the longest source of an encoder-decoder; no-op for other models
    policy: str = "full"  # what stays of a row: policy.py
    endless: bool = False  # rows go on past the model's limit: no layer may keep everything
    rope_at: Literal["write", "read"] = "write"  # when RoPE turns a key: as it is stored, or each time it is read
    residual_length: int = 128  # latest tokens in full precision before keys by channel; no-op for other formats
    overflow: OverflowMode = (
        "preempt"  # for a row at its limit and a pool that has run out: full.py; settle.py lays it out
    )
    watermark: float = 0.0  # share of a pool's blocks that an admission leaves free for rows that grow
    offload_ram: int = 1 << 30  # bytes of host memory for spilled tokens; what passes them lies on disk
    offload_dir: str | None = None  # where, in files that end with the engine; None = the user's cache folder
    swap_space: int | None = None  # host memory for rows that give way; None: what those take that must be parked
    prefix_cache_dir: str | None = None  # a folder for published blocks, beyond the pool and the process: tiers.py
    prefix_cache_size: int | None = None  # what it may hold; None: TIER_BYTES
    prefix_cache_ram: int | None = None  # bytes of host memory for blocks that the pool had to give up
    prefix_cache_eviction: Literal["lru", "arc"] = "lru"  # which block of the folder goes first when it is full

    def __post_init__(self) -> None:
        self._check_tiers()
        _check_choice(OVERFLOW_MODES, "overflow", self.overflow)
        if isinstance(self.watermark, bool) or not isinstance(self.watermark, int | float):
            raise ConfigError(f"cache.watermark: expected a number, found {self.watermark!r}")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"cache.watermark: {self.watermark:g} is no share of the blocks", "from 0 to below 1")
        if self.swap_space is not None:
            _check_min(0, "swap_space", self.swap_space)
        _check_choice(("write", "read"), "rope_at", self.rope_at)
        _check_choice(("paged", "contiguous"), "layout", self.layout)
        self._check_formats()
        for name, least in (
            ("block_size", 1),
            ("max_num_seqs", 1),
            ("max_seq_len", 1),
            ("prefill_chunk_size", 1),
            ("max_source_len", 0),
        ):
            _check_min(least, name, getattr(self, name))
        if self.num_blocks is not None:
            _check_min(1, "num_blocks", self.num_blocks)
        if self.num_blocks is not None and self.layout == "contiguous":
            raise ConfigError("cache.num_blocks: a contiguous cache has one block per row", "set cache.max_num_seqs")
        _check_min(1, "residual_length", self.residual_length)
        _check_min(0, "offload_ram", self.offload_ram)
        self.resolved_policy  # noqa: B018  a name that is none is said now

    def _check_tiers(self) -> None:
        for name in ("prefix_cache_size", "prefix_cache_ram"):
            asked = getattr(self, name)
            if asked is not None:
                _check_min(1, name, asked)
        if self.prefix_cache_dir is not None and not self.prefix_cache_dir:
            raise ConfigError("cache.prefix_cache_dir: a folder without a name", "name one, or leave it out")
        if self.prefix_cache_dir is None and (
            self.prefix_cache_size is not None or self.prefix_cache_eviction != "lru"
        ):
            raise ConfigError(
                "cache.prefix_cache_size: there is no tier that it could be of", "name its folder: --tier FOLDER"
            )
        _check_choice(("lru", "arc"), "prefix_cache_eviction", self.prefix_cache_eviction)
        if (self.prefix_cache_dir is not None or self.prefix_cache_ram is not None) and (
            self.layout == "contiguous" or not self.enable_prefix_caching
        ):
            what = "a contiguous cache" if self.layout == "contiguous" else "prefix=False"
            raise ConfigError(
                f"cache.prefix_cache_dir: {what} shares no blocks, so there is nothing to keep", "take the paged layout"
            )

    def _check_formats(self) -> None:
        every = get_format(self.dtype, "cache.dtype")
        for name, said in (("keys", self.key_dtype), ("values", self.value_dtype)):
            key = f"cache.{name if said is not None else 'dtype'}"
            asked = get_format(said if said is not None else self.dtype, key)
            if asked.is_blockwise and name == "values":
                raise ConfigError(
                    f"{key}: {asked.name} is for keys: values differ from token to token, not by channel",
                    f"cache.value_dtype={asked.name.partition('-')[0]!r}",
                )
            if asked.is_blockwise and self.layout == "contiguous":
                raise ConfigError(f"{key}: {asked.name} packs whole blocks", "take cache.layout='paged'")
        if every.is_blockwise:
            raise ConfigError(
                f"cache.dtype: {every.name} packs whole blocks of keys, and new tokens come one by one",
                f"cache.key_dtype={every.name!r}, and a dtype for the latest",
            )

    @cached_property
    def resolved_policy(self) -> CachePolicy:
        """The policy itself.  Keys by channel are encoded in whole blocks: everything stays, the latest unpacked."""
        policy = KeepAll() if self.policy == "full" else parse_policy(self.policy)
        if self.key_dtype is None or not get_format(self.key_dtype, "cache.key_dtype").is_blockwise:
            return policy
        if policy != KeepAll():
            raise ConfigError(
                f"cache.key_dtype: {self.key_dtype} packs whole blocks once, and {policy} takes tokens out of them",
                f"cache.key_dtype={self.key_dtype.partition('-')[0]!r} has a scale per token",
            )
        size = self.block_size
        recent, every = (-(-tokens // size) * size for tokens in (self.residual_length, DEMOTION_INTERVAL))
        return TieredPolicy(
            recent, key_format=self.key_dtype, value_format=self.value_dtype or self.dtype, interval=every
        )

    def restrict(self, mixers: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
        """A model's layers as this cache lets them see: what an uncached judge of it has to see, too."""
        grain = 1 if self.layout == "contiguous" else self.block_size
        return restrict_specs(mixers, self.resolved_policy, grain, renumber=self.endless)

    @property
    def prefix_cache_limit(self) -> int:
        """Bytes that the folder of the tier may hold."""
        return DEFAULT_PREFIX_CACHE_SIZE if self.prefix_cache_size is None else self.prefix_cache_size

    @property
    def prefix_cache_host_bytes(self) -> int:
        """Host memory that the tiers take: blocks that were given up, and those that wait to be written."""
        return (self.prefix_cache_ram or 0) + (WRITE_QUEUE_BYTES if self.prefix_cache_dir is not None else 0)

    @property
    def exceeds_max_seq_len(self) -> bool:
        """Whether rows grow past ``capacity``."""
        return self.endless or self.overflow in ("summarise", "spill")

    @property
    def token_formats(self) -> tuple[str, str]:
        """Of keys, of values, as new tokens are stored."""
        if self.key_dtype is not None and get_format(self.key_dtype, "cache.key_dtype").is_blockwise:
            return self.dtype, self.dtype
        return self.key_dtype or self.dtype, self.value_dtype or self.dtype

    @property
    def format_name(self) -> str:
        """Both as they were asked for, by one name: "int8", or "int8/int4"."""
        return join_format_names(self.key_dtype or self.dtype, self.value_dtype or self.dtype)


def _check_choice(names: Collection[str], name: str, value: object) -> None:
    if value not in names:
        raise ConfigError(f"cache.{name}: {value!r}", suggest(str(value), names))


def _check_min(least: int, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"cache.{name}: expected a whole number, found {value!r}")
    if value < least:
        raise ConfigError(f"cache.{name}: must be at least {least}, found {value}")


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
