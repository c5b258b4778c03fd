"""CacheConfig: the requested layout, sizes, formats and policy of a cache, independent of a model. No torch.

``resolve_for_model`` adapts it to a model, ``groups.py`` computes blocks and bytes, ``sizing/memory_plan.py`` the
total memory. Invalid values are refused at construction, with the valid ones in the hint.

The overflow mode (``OVERFLOW_MODES``) decides what happens when a sequence reaches its limit L, the model's or the
cache's, and when the pool has no free blocks. Modes that continue beyond L handle a full pool as ``preempt`` does.
``engine/scheduling/limits.py`` applies the limits. No token is dropped unless such a mode or policy was requested.

A mode that continues is a policy, which ``resolve_for_model`` computes:

* ``window`` and ``sinks`` apply from the start, with sequences that never end. A sequence shorter than L sees all its
  tokens, so nothing is lost before. Positions that are added to the embeddings cannot be renumbered: refused.
* ``summarize`` keeps positions, so sequences still end at the model's limit; only the cache's limit is lifted. The
  first block and the latest tokens stay unchanged; of older tokens, ``ratio`` make one summary, with enough
  summaries for the model's limit.

      max_seq_len 64, model's limit 256, blocks of 16:
      tiered(48, quantized=0, summaries=24, ratio=8, interval=16, num_sinks=16)

* ``offload`` lifts the cache's limit in the same way and loses nothing: the latest tokens, ``max_seq_len`` in whole
  blocks, are in the pool, older ones are offloaded.

      max_seq_len 64, model's limit 256, blocks of 16:  offload(48, max_offloaded=208, interval=16)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kvad import config as cfg
from kvad.cache.policy import CachePolicy, KeepAll, OffloadPolicy, Sinks, TieredPolicy, Window
from kvad.cache.policy_parser import parse_policy, restrict_specs
from kvad.cache.quantization import get_format, join_format_names
from kvad.config import AttentionSpec, ModelConfig
from kvad.errors import ConfigError

OverflowMode = Literal["preempt", "stop", "reject", "window", "sinks", "summarize", "offload"]
LengthLimit = Literal["max_tokens", "model", "cache", "pool"]  # limit that ends a sequence

NUM_SINKS = 4  # Xiao et al. 2023, sec. 3.1: four are enough

OVERFLOW_MODES: Mapping[str, str] = {
    "preempt": "a sequence ends at its limit L; without free blocks the youngest is preempted and resumes later",
    "stop": "the same; without free blocks the youngest sequence that cannot grow ends",
    "reject": "requests that could exceed L or the blocks are rejected at once; none is preempted",
    "window": "a sequence continues beyond L with its last L tokens",
    "sinks": f"a sequence continues beyond L with its first {NUM_SINKS} and its last L - {NUM_SINKS} tokens",
    "summarize": "a sequence continues beyond the cache's max_seq_len, older tokens as summaries",
    "offload": "the same, older tokens unchanged in host memory and on disk: slower, but lossless",
}
CONTINUING_MODES = ("window", "sinks", "summarize", "offload")


def resolve_endless(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Set ``overflow="sinks"`` if only ``endless`` is given, without a policy or an overflow mode."""
    is_endless_only = fields.get("endless") is True and not fields.keys() & {"policy", "overflow"}
    return {**fields, "overflow": "sinks"} if is_endless_only else dict(fields)


DEMOTION_INTERVAL = 64  # tokens between two demotions of keys in channel formats
DEFAULT_PREFIX_CACHE_SIZE = 4 << 30  # of prefix_cache_dir
WRITE_QUEUE_BYTES = 64 << 20  # pending writes to it; beyond, blocks are not stored


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Configuration of a cache; ConfigError if a value is invalid."""

    layout: Literal["paged", "contiguous"] = "paged"
    dtype: str = "float32"  # format of keys and values (quantization.py), unless the next two are given
    key_dtype: str | None = None
    value_dtype: str | None = None  # no-op for latent attention, whose values are part of the keys
    block_size: cfg.PositiveInt = 16  # slots per block; no-op for contiguous, where a block holds a sequence
    max_num_seqs: cfg.PositiveInt = 8  # maximum number of running sequences
    max_seq_len: cfg.PositiveInt  # maximum tokens per sequence
    prefill_chunk_size: cfg.PositiveInt = 512  # maximum new tokens per sequence and step
    num_blocks: cfg.PositiveInt | None = None  # paged: usable blocks of a full group; None: enough for all sequences
    enable_prefix_caching: bool = True  # reuse blocks of equal prefixes (paged only)
    max_source_len: cfg.NonNegativeInt = 0  # maximum encoder tokens of an encoder-decoder; no-op for other models
    policy: str = "full"  # which tokens stay: policy_parser.py
    endless: bool = False  # sequences continue beyond the model's limit: no layer may keep all tokens
    rope_at: Literal["write", "read"] = "write"  # rotate keys when they are stored, or each time they are read
    residual_length: cfg.PositiveInt = 128  # channel formats only: latest tokens in full precision
    overflow: OverflowMode = "preempt"  # behavior at a length limit or when the pool is full
    watermark: cfg.Fraction = 0.0  # fraction of a pool's blocks that an admission leaves free for growth
    offload_ram: cfg.NonNegativeInt = 1 << 30  # bytes of host memory for offloaded tokens; the rest is on disk
    offload_dir: str | Path | None = None  # directory of temporary offload files; None: the user's cache directory
    swap_space: cfg.NonNegativeInt | None = None  # bytes of host memory for swapped sequences; None: only if required
    prefix_cache_dir: str | Path | None = None  # directory of published blocks that outlive the process
    prefix_cache_size: cfg.PositiveInt | None = None  # maximum bytes in it; None: DEFAULT_PREFIX_CACHE_SIZE
    prefix_cache_ram: cfg.PositiveInt | None = None  # bytes of host memory for blocks that the pool evicts
    prefix_cache_eviction: Literal["lru", "arc"] = "lru"  # eviction order of prefix_cache_dir

    def __post_init__(self) -> None:
        cfg.check_fields(self, "cache")
        self._check_prefix_cache()
        self._check_formats()
        if self.num_blocks is not None and self.layout == "contiguous":
            raise ConfigError(
                "cache.num_blocks: a contiguous cache has one block per sequence", "Set cache.max_num_seqs"
            )
        self.resolved_policy  # noqa: B018  refuse an invalid policy now

    def _check_prefix_cache(self) -> None:
        if self.prefix_cache_dir == "":
            raise ConfigError("cache.prefix_cache_dir: must not be empty", "Give a directory, or omit it")
        is_configured = self.prefix_cache_size is not None or self.prefix_cache_eviction != "lru"
        if self.prefix_cache_dir is None and is_configured:
            raise ConfigError(
                "cache.prefix_cache_size: requires cache.prefix_cache_dir", "Give a directory: --prefix-cache-dir DIR"
            )
        has_store = self.prefix_cache_dir is not None or self.prefix_cache_ram is not None
        if has_store and (self.layout == "contiguous" or not self.enable_prefix_caching):
            reason = "a contiguous cache" if self.layout == "contiguous" else "enable_prefix_caching=False"
            raise ConfigError(
                f"cache.prefix_cache_dir: {reason} shares no blocks", "Use cache.layout='paged' with prefix caching"
            )

    def _check_formats(self) -> None:
        token_format = get_format(self.dtype, "cache.dtype")
        for name, explicit in (("key_dtype", self.key_dtype), ("value_dtype", self.value_dtype)):
            key = f"cache.{name if explicit is not None else 'dtype'}"
            value = get_format(explicit if explicit is not None else self.dtype, key)
            if value.is_blockwise and name == "value_dtype":
                raise ConfigError(
                    f"{key}: {value.name} is for keys only: values differ between tokens, not between channels",
                    f"cache.value_dtype={value.name.partition('-')[0]!r}",
                )
            if value.is_blockwise and self.layout == "contiguous":
                raise ConfigError(f"{key}: {value.name} packs whole blocks", "Use cache.layout='paged'")
        if token_format.is_blockwise:
            raise ConfigError(
                f"cache.dtype: {token_format.name} packs whole blocks of keys, but new tokens are stored one by one",
                f"cache.key_dtype={token_format.name!r}, and a plain dtype for the latest tokens",
            )

    @cached_property
    def resolved_policy(self) -> CachePolicy:
        """The parsed policy. For channel formats, a tiered policy: the latest tokens unquantized, all tokens kept."""
        policy = KeepAll() if self.policy == "full" else parse_policy(self.policy)
        if self.key_dtype is None or not get_format(self.key_dtype, "cache.key_dtype").is_blockwise:
            return policy
        if policy != KeepAll():
            raise ConfigError(
                f"cache.key_dtype: {self.key_dtype} packs whole blocks once, but {policy} removes tokens from them",
                f"cache.key_dtype={self.key_dtype.partition('-')[0]!r} has a scale per token",
            )
        size = self.block_size
        recent, interval = (-(-tokens // size) * size for tokens in (self.residual_length, DEMOTION_INTERVAL))
        value_format = self.value_dtype or self.dtype
        return TieredPolicy(recent, key_format=self.key_dtype, value_format=value_format, interval=interval)

    def restrict(self, specs: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
        """Restrict the specs of a model's layers to this policy. The uncached reference uses the same specs."""
        window_step = 1 if self.layout == "contiguous" else self.block_size
        specs = restrict_specs(specs, self.resolved_policy, window_step, renumber=self.endless)
        return tuple(  # The next token's block is computed from its start.
            spec._replace(window=spec.window + self.block_size - 1) if spec.snapshot_size and spec.window else spec
            for spec in specs
        )

    @property
    def prefix_cache_limit(self) -> int:
        """Maximum bytes in prefix_cache_dir."""
        return DEFAULT_PREFIX_CACHE_SIZE if self.prefix_cache_size is None else self.prefix_cache_size

    @property
    def prefix_cache_host_bytes(self) -> int:
        """Bytes of host memory of the block store: evicted blocks and pending writes."""
        return (self.prefix_cache_ram or 0) + (WRITE_QUEUE_BYTES if self.prefix_cache_dir is not None else 0)

    @property
    def exceeds_max_seq_len(self) -> bool:
        """True if sequences grow beyond ``max_seq_len``."""
        return self.endless or self.overflow in ("summarize", "offload")

    @property
    def token_formats(self) -> tuple[str, str]:
        """Formats of new keys and values."""
        if self.key_dtype is not None and get_format(self.key_dtype, "cache.key_dtype").is_blockwise:
            return self.dtype, self.dtype
        return self.key_dtype or self.dtype, self.value_dtype or self.dtype

    @property
    def format_name(self) -> str:
        """The requested formats in one name: "int8", or "int8/int4" for keys and values."""
        return join_format_names(self.key_dtype or self.dtype, self.value_dtype or self.dtype)


MAX_RATIO, MAX_INTERVAL = 8, 128  # of summaries: maximum tokens per summary, maximum interval


def resolve_for_model(config: ModelConfig, cache: CacheConfig) -> CacheConfig:
    """Return the config with the policy of its overflow mode for this model. Applying it twice changes nothing."""
    if config.decoder is None:
        if cache.policy != "full" or cache.endless or cache.overflow in CONTINUING_MODES:
            raise ConfigError("cache.policy: an encoder has no cache", "Omit it")
        return cache
    if cache.overflow not in CONTINUING_MODES:
        return cache
    if cache.endless and cache.overflow in ("summarize", "offload"):
        raise ConfigError(
            f"cache.endless: with overflow={cache.overflow} a sequence ends at the model's limit",
            "Omit it, or use overflow=sinks",
        )
    policy = str(_policy_for(config, cache, min(config.max_seq_len, cache.max_seq_len)))
    if cache.policy not in ("full", policy):
        raise ConfigError(
            f"cache.overflow: {cache.overflow} is {policy}, but policy {cache.policy} is given too",
            f"Give one of them; endless=True continues under {cache.policy}",
        )
    return replace(cache, policy=policy, endless=cache.overflow in ("window", "sinks"))


def _policy_for(config: ModelConfig, cache: CacheConfig, max_len: int) -> CachePolicy:
    if cache.overflow in ("summarize", "offload"):
        return _demotion_policy(config, cache)
    position = config.embedding.position
    if position is not None:
        raise ConfigError(
            f"cache.overflow: {cache.overflow}: {position.kind} positions are part of every key and value "
            "and cannot be renumbered",
            "Sequences of this model end at its limit: use preempt, stop or reject",
        )
    if cache.overflow == "window":
        return Window(max_len)
    minimum = NUM_SINKS + (1 if cache.layout == "contiguous" else cache.block_size)
    if max_len < minimum:
        raise ConfigError(
            f"cache.overflow: sinks: max_seq_len {max_len} is less than {NUM_SINKS} sinks and a block of "
            f"{minimum - NUM_SINKS}",
            f"Use a max_seq_len of at least {minimum}, or overflow=window",
        )
    return Sinks(NUM_SINKS, max_len - NUM_SINKS)


def _demotion_policy(config: ModelConfig, cache: CacheConfig) -> TieredPolicy | OffloadPolicy:
    """Return the policy of a mode that moves older tokens in whole blocks."""
    mode, block_size, limit = cache.overflow, cache.block_size, config.max_seq_len
    is_summary = mode == "summarize"
    if limit <= cache.max_seq_len:
        reason = ", because summaries keep their positions" if is_summary else ""
        length, other = (limit // 2, "overflow=sinks") if is_summary else (limit // 4, "omit it")
        raise ConfigError(
            f"cache.overflow: {mode}: max_seq_len must be below the model's limit of {limit} tokens{reason}",
            f"Use --max-seq-len {max(1, length)}, or {other}",
        )
    if cache.layout == "contiguous":
        verb = "summarized" if is_summary else "offloaded"
        raise ConfigError(f"cache.overflow: {mode}: tokens are {verb} in whole blocks", "Use cache.layout='paged'")
    if cache.max_seq_len < 2 * block_size:
        purpose = ", for the first and the latest tokens" if is_summary else ""
        raise ConfigError(
            f"cache.overflow: {mode}: max_seq_len {cache.max_seq_len} is less than two blocks of {block_size}{purpose}",
            f"Use a max_seq_len of at least {2 * block_size}, or smaller blocks",
        )
    num_whole = cache.max_seq_len // block_size * block_size
    max_interval = MAX_INTERVAL if is_summary else cache.prefill_chunk_size
    interval = max(1, min(max_interval, cache.max_seq_len // 4) // block_size) * block_size
    if not is_summary:
        recent = num_whole - interval
        return OffloadPolicy(recent, -(-(limit - recent) // block_size) * block_size, interval)
    ratio = max((candidate for candidate in range(2, MAX_RATIO + 1) if block_size % candidate == 0), default=0)
    if not ratio:
        raise ConfigError(
            f"cache.overflow: summarize: blocks of {block_size} cannot be divided into summaries",
            "Use cache.block_size=16",
        )
    recent, summaries = num_whole - block_size, -(-(limit - num_whole) // ratio)
    return TieredPolicy(recent, quantized=0, summaries=summaries, ratio=ratio, interval=interval, num_sinks=block_size)
