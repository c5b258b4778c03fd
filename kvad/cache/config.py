"""What a cache is asked to hold: every field by itself and beside the others, but not yet of which model.

``settle.py`` fits it to a model, ``sizing.py`` says how many blocks and bytes it takes, ``planning.py`` what all of it
takes together.  A value that cannot be is refused when it is said, with what could.  No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvad.cache.formats import find_format, joined
from kvad.cache.full import ON_FULL, OnFull
from kvad.cache.named import narrowed, parse_policy
from kvad.cache.policy import Full, Hierarchy, Policy
from kvad.config import MixerSpec
from kvad.errors import ConfigError, nearest

__all__ = ["TIER_QUEUE", "CacheConfig"]

DESCENT = 64  # tokens between two descents, where keys are packed by channel
TIER_BYTES = 4 << 30  # of a tier's folder, where nothing else is said
TIER_QUEUE = 64 << 20  # bytes of blocks that wait to be written to it; beyond, blocks are not stored


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What a cache is asked to hold.  ConfigError for a value that cannot be."""

    layout: Literal["paged", "contiguous"] = "paged"
    dtype: str = "float32"  # of keys and values, one of cache/formats.py, where the next two do not say otherwise
    keys: str | None = None
    values: str | None = None
    block_size: int = 16  # slots of a block; contiguous: no-op, a block is a row
    rows: int = 8  # live sequences
    capacity: int  # tokens of the longest row
    chunk: int = 512  # the longest span of new tokens of one row in one step
    blocks: int | None = None  # paged: usable blocks of a full group; None = enough for rows x capacity
    prefix: bool = True  # reuse the blocks of equal prefixes (paged only: a contiguous row is one block)
    source_capacity: int = 0  # tokens of the longest source of an encoder-decoder; no-op for other models
    policy: str = "full"  # what stays of a row: policy.py
    endless: bool = False  # rows go on past the model's limit: no layer may keep everything
    rotate: Literal["write", "read"] = "write"  # when RoPE turns a key: as it is stored, or each time it is read
    residual: int = 128  # latest tokens in full precision before keys by channel; no-op for other formats
    on_full: OnFull = "preempt"  # for a row at its limit and a pool that has run out: full.py; settle.py lays it out
    watermark: float = 0.0  # share of a pool's blocks that an admission leaves free for rows that grow
    spill_ram: int = 1 << 30  # bytes of host memory for spilled tokens; what passes them lies on disk
    spill_dir: str | None = None  # where, in files that end with the engine; None = the user's cache folder
    park_ram: int | None = None  # host memory for rows that give way; None: what those take that must be parked
    tier: str | None = None  # a folder for published blocks, beyond the pool and the process: tiers.py
    tier_bytes: int | None = None  # what it may hold; None: TIER_BYTES
    tier_ram: int | None = None  # bytes of host memory for blocks that the pool had to give up
    tier_replacement: Literal["lru", "arc"] = "lru"  # which block of the folder goes first when it is full

    def __post_init__(self) -> None:
        self._check_tiers()
        _one_of(ON_FULL, "on_full", self.on_full)
        if isinstance(self.watermark, bool) or not isinstance(self.watermark, int | float):
            raise ConfigError(f"cache.watermark: expected a number, found {self.watermark!r}")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"cache.watermark: {self.watermark:g} is no share of the blocks", "from 0 to below 1")
        if self.park_ram is not None:
            _at_least(0, "park_ram", self.park_ram)
        _one_of(("write", "read"), "rotate", self.rotate)
        _one_of(("paged", "contiguous"), "layout", self.layout)
        self._check_formats()
        for name, least in (("block_size", 1), ("rows", 1), ("capacity", 1), ("chunk", 1), ("source_capacity", 0)):
            _at_least(least, name, getattr(self, name))
        if self.blocks is not None:
            _at_least(1, "blocks", self.blocks)
        if self.blocks is not None and self.layout == "contiguous":
            raise ConfigError("cache.blocks: a contiguous cache has one block per row", "set cache.rows")
        _at_least(1, "residual", self.residual)
        _at_least(0, "spill_ram", self.spill_ram)
        self.kept  # noqa: B018  a name that is none is said now

    def _check_tiers(self) -> None:
        for name in ("tier_bytes", "tier_ram"):
            asked = getattr(self, name)
            if asked is not None:
                _at_least(1, name, asked)
        if self.tier is not None and not self.tier:
            raise ConfigError("cache.tier: a folder without a name", "name one, or leave it out")
        if self.tier is None and (self.tier_bytes is not None or self.tier_replacement != "lru"):
            raise ConfigError(
                "cache.tier_bytes: there is no tier that it could be of", "name its folder: --tier FOLDER"
            )
        _one_of(("lru", "arc"), "tier_replacement", self.tier_replacement)
        if (self.tier is not None or self.tier_ram is not None) and (self.layout == "contiguous" or not self.prefix):
            what = "a contiguous cache" if self.layout == "contiguous" else "prefix=False"
            raise ConfigError(
                f"cache.tier: {what} shares no blocks, so there is nothing to keep", "take the paged layout"
            )

    def _check_formats(self) -> None:
        every = find_format(self.dtype, "cache.dtype")
        for name, said in (("keys", self.keys), ("values", self.values)):
            key = f"cache.{name if said is not None else 'dtype'}"
            asked = find_format(said if said is not None else self.dtype, key)
            if asked.sealed and name == "values":
                raise ConfigError(
                    f"{key}: {asked.name} is for keys: values differ from token to token, not by channel",
                    f"cache.values={asked.name.partition('-')[0]!r}",
                )
            if asked.sealed and self.layout == "contiguous":
                raise ConfigError(f"{key}: {asked.name} packs whole blocks", "take cache.layout='paged'")
        if every.sealed:
            raise ConfigError(
                f"cache.dtype: {every.name} packs whole blocks of keys, and new tokens come one by one",
                f"cache.keys={every.name!r}, and a dtype for the latest",
            )

    @cached_property
    def kept(self) -> Policy:
        """The policy itself.  Keys by channel are encoded in whole blocks: everything stays, the latest unpacked."""
        policy = Full() if self.policy == "full" else parse_policy(self.policy)
        if self.keys is None or not find_format(self.keys, "cache.keys").sealed:
            return policy
        if policy != Full():
            raise ConfigError(
                f"cache.keys: {self.keys} packs whole blocks once, and {policy} takes tokens out of them",
                f"cache.keys={self.keys.partition('-')[0]!r} has a scale per token",
            )
        size = self.block_size
        recent, every = (-(-tokens // size) * size for tokens in (self.residual, DESCENT))
        return Hierarchy(recent, keys=self.keys, values=self.values or self.dtype, every=every)

    def narrowed(self, mixers: Sequence[MixerSpec]) -> tuple[MixerSpec, ...]:
        """A model's layers as this cache lets them see: what an uncached judge of it has to see, too."""
        grain = 1 if self.layout == "contiguous" else self.block_size
        return narrowed(mixers, self.kept, grain, renumber=self.endless)

    @property
    def tier_limit(self) -> int:
        """Bytes that the folder of the tier may hold."""
        return TIER_BYTES if self.tier_bytes is None else self.tier_bytes

    @property
    def tier_memory(self) -> int:
        """Host memory that the tiers take: blocks that were given up, and those that wait to be written."""
        return (self.tier_ram or 0) + (TIER_QUEUE if self.tier is not None else 0)

    @property
    def outgrown(self) -> bool:
        """Whether rows grow past ``capacity``."""
        return self.endless or self.on_full in ("summarise", "spill")

    @property
    def formats(self) -> tuple[str, str]:
        """Of keys, of values, as new tokens are stored."""
        if self.keys is not None and find_format(self.keys, "cache.keys").sealed:
            return self.dtype, self.dtype
        return self.keys or self.dtype, self.values or self.dtype

    @property
    def stored(self) -> str:
        """Both as they were asked for, by one name: "int8", or "int8/int4"."""
        return joined(self.keys or self.dtype, self.values or self.dtype)


def _one_of(names: Collection[str], name: str, value: object) -> None:
    if value not in names:
        raise ConfigError(f"cache.{name}: {value!r}", nearest(str(value), names))


def _at_least(least: int, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"cache.{name}: expected a whole number, found {value!r}")
    if value < least:
        raise ConfigError(f"cache.{name}: must be at least {least}, found {value}")
