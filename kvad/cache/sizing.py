"""How many blocks and bytes a cache takes: pure integers, asked by the real pools and by ``kvad plan`` alike.

The one promise: what these functions say is what Memory allocates, to the byte.  Nothing here imports torch.

Layers with equal specs share a table: one :class:`Group`.  A row of length ``n`` holds in its group

* full attention: every token, ``ceil(n / block_size)`` blocks;
* cross-attention: a source's tokens, once, in a pool with room for one longest source per row;
* a window ``W`` with spans of at most ``C`` new tokens: the first query of a span at position p still needs the keys
  from ``p - W + 1`` on while the last one is written at ``p + C - 1``: ``W + C - 1`` slots, plus a block because they
  rarely start at a block's edge.

    W = 6, C = 4, block_size = 4, p = 9:  keys 4..12 = slots of the blocks 1, 2, 3;  ceil(9 / 4) + 1 = 4 are enough.

* a window with sinks (``policy.py``): the blocks of the sinks beside that;
* a policy that ranks: ``budget + every`` slots, what a row holds when it is about to be cut;
* a hierarchy: the sinks, the recent tokens and those of one ``every``; and below it groups of their own, for the blocks
  that were packed and for the summaries: no more than a row of that length can send there.

Contiguous is paged with one block per row (``block_size`` = the whole row, or the whole ring of a window).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from kvad.cache.formats import Format, find_format, joined
from kvad.cache.full import ON_FULL, OnFull
from kvad.cache.named import narrowed, parse_policy
from kvad.cache.policy import Full, Hierarchy, Policy, Quest, Scored, Spilled
from kvad.config import MixerSpec
from kvad.errors import ConfigError, nearest
from kvad.step import RESERVED_BLOCKS

__all__ = [
    "DTYPE_BYTES",
    "CacheConfig",
    "Fit",
    "Group",
    "GroupBytes",
    "group_bytes",
    "groups",
    "grows",
]

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
DESCENT = 64  # tokens between two descents, where keys are packed by channel
MOST_ROWS = 4096  # fit asks no further
TIER_BYTES = 4 << 30  # of a tier's folder, where nothing else is said
TIER_QUEUE = 64 << 20  # bytes of blocks that wait to be written to it; beyond, blocks are not stored
POSITION_BYTES = 8  # the one column of every slot: its position, int64, once per group


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
    spill_ram: int = (
        1 << 30
    )  # bytes of host memory for spilled tokens; what passes them lies on disk.  No-op for others
    spill_dir: str | None = None  # where, in files that end with the engine; None = the user's cache folder
    park_ram: int | None = (
        None  # bytes of host memory for rows that give way; None: what those take that must be parked
    )
    tier: str | None = None  # a folder for published blocks, beyond the pool and the process: tiers.py
    tier_bytes: int | None = None  # what it may hold; None: TIER_BYTES
    tier_ram: int | None = None  # bytes of host memory for blocks that the pool had to give up
    tier_replacement: Literal["lru", "arc"] = "lru"  # which block of the folder goes first when it is full

    def __post_init__(self) -> None:
        self._check_tiers()
        if self.on_full not in ON_FULL:
            raise ConfigError(f"cache.on_full: {self.on_full!r}", nearest(str(self.on_full), ON_FULL))
        if isinstance(self.watermark, bool) or not isinstance(self.watermark, int | float):
            raise ConfigError(f"cache.watermark: expected a number, found {self.watermark!r}")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"cache.watermark: {self.watermark:g} is no share of the blocks", "from 0 to below 1")
        if self.park_ram is not None:
            _at_least(0, "park_ram", self.park_ram)
        if self.rotate not in ("write", "read"):
            raise ConfigError(f"cache.rotate: {self.rotate!r}", nearest(self.rotate, ("write", "read")))
        if self.layout not in ("paged", "contiguous"):
            raise ConfigError(f"cache.layout: {self.layout!r}", nearest(self.layout, ("paged", "contiguous")))
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
        recent, every = (_ceil(n, self.block_size) * self.block_size for n in (self.residual, DESCENT))
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
        if self.tier_replacement not in ("lru", "arc"):
            raise ConfigError(
                f"cache.tier_replacement: {self.tier_replacement!r}", nearest(self.tier_replacement, ("lru", "arc"))
            )
        if (self.tier is not None or self.tier_ram is not None) and (self.layout == "contiguous" or not self.prefix):
            what = "a contiguous cache" if self.layout == "contiguous" else "prefix=False"
            raise ConfigError(
                f"cache.tier: {what} shares no blocks, so there is nothing to keep", "take the paged layout"
            )

    @property
    def outgrown(self) -> bool:
        """Whether rows grow past ``capacity``."""
        return self.endless or self.on_full in ("summarise", "spill")

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


def _at_least(least: int, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"cache.{name}: expected a whole number, found {value!r}")
    if value < least:
        raise ConfigError(f"cache.{name}: must be at least {least}, found {value}")


Ranked = Scored | Hierarchy | Spilled | Quest


class Level(NamedTuple):
    """A group that no new token is written to: it takes whole blocks from the group ``above``; ``of`` is the one that
    takes tokens (indices of groups).  ``most``: blocks of a row that has just descended; ``ratio`` > 1: tokens of a
    slot.  ``spilled``: its blocks lie in no pool of Memory's but in a spool (``spilled.py``), bytes as they were."""

    of: int
    above: int
    most: int
    ratio: int = 1
    spilled: bool = False


class Group(NamedTuple):
    """Layers that share a table.  ``blocks`` counts the reserved ones (step.py: empty and bin) too."""

    mixer: MixerSpec
    layers: tuple[int, ...]
    block_size: int
    blocks: int
    blocks_per_row: int  # live blocks of one row at most; 1 = the row's block is a ring: slot = position % block_size
    scored: Scored | None = None  # the policy that ranks what these layers hold
    levels: Hierarchy | Spilled | None = (
        None  # the policy that moves older tokens to the groups whose level lies below this one
    )
    level: Level | None = None
    chooses: Quest | None = None  # the policy under which a query reads some blocks only
    keys: str = "float32"  # formats, by name
    values: str = "float32"

    @property
    def stores(self) -> tuple[tuple[Format, int], tuple[Format, int]]:
        """(format, numbers of a head) of a layer's keys, and of its values."""
        mixer = self.mixer
        return (find_format(self.keys, "keys"), mixer.head_dim), (find_format(self.values, "values"), mixer.value_dim)

    @property
    def weight_format(self) -> str:
        """Of what a summary's logit gets, one number for each of its heads."""
        return "float64" if self.keys == "float64" else "float32"

    @property
    def usable(self) -> int:
        """Blocks that rows can own."""
        return self.blocks - RESERVED_BLOCKS


class GroupBytes(NamedTuple):
    """Bytes of one group's pool.  ``scales``: what decodes the payload (scales, zeros), where it is not plain numbers.

    ``per_row``: one row at its longest; ``per_token``: while it grows (a block's own scales shared out, rounded up).
    """

    payload: int
    scales: int
    columns: int
    per_token_payload: int
    per_token_scales: int
    per_token_columns: int
    per_row: int

    @property
    def total(self) -> int:
        return self.payload + self.scales + self.columns


class Fit(NamedTuple):
    """``rows`` sequences of ``capacity`` tokens take ``bytes`` bytes of cache."""

    rows: int
    capacity: int
    bytes: int


def groups(mixers: Sequence[MixerSpec], config: CacheConfig) -> tuple[Group, ...]:
    """Cache groups in the order of their first layer.  ConfigError for layers that cannot be cached, or not so."""
    layers: dict[tuple[MixerSpec, Ranked | None], list[int]] = {}
    for index, mixer in enumerate(config.narrowed(mixers)):
        if not mixer.causal and not mixer.cross:
            raise ConfigError(
                f"layer {index} is bidirectional: every new token changes the keys of the ones before it",
                "a bidirectional model runs without a cache",
            )
        if config.endless and mixer.window is None and not mixer.cross:  # ranked tokens keep their positions
            hint = f"take a policy that drops old ones: sinks(4, {max(1, config.capacity - 4)})"
            raise ConfigError(f"cache.endless: layer {index} keeps all tokens of a row", hint)
        policy = config.kept.at(index)
        free = not mixer.cross and mixer.window is None
        ranked = policy.scored or policy.levels or policy.chooses if free else None
        layers.setdefault((mixer, ranked), []).append(index)
    if config.blocks is not None and layers and not grows(layers):
        raise ConfigError(
            "cache.blocks: no layer keeps all tokens of a row",
            "the size follows from cache.rows, cache.chunk and cache.policy",
        )
    keys, values = config.formats
    placed = [
        _group(mixer, ranked, tuple(where), config)._replace(keys=keys, values=values)
        for (mixer, ranked), where in layers.items()
    ]
    own = [group for group in placed if not group.mixer.cross]
    _check_spilled(own)
    below = [level for number, group in enumerate(own) for level in _levels(group, number, config)]
    made = (*own, *_numbered(below, len(own)), *(group for group in placed if group.mixer.cross))
    for group in made:
        _check_widths(group)
    return made


def _levels(group: Group, number: int, config: CacheConfig) -> list[Group]:
    """What lies below a group, in the order of descent.  ``above`` is counted within them: -1 is the group itself."""
    policy = group.levels
    if policy is None:
        return []
    size = config.block_size
    if isinstance(policy, Spilled):
        return [_spilled(group, policy, number, config)]
    for name in ("recent", "every", "sinks", "packed"):
        if (value := getattr(policy, name)) > 0 and value % size:
            raise ConfigError(
                f"cache.policy: {policy}: {name} {value} is not a multiple of the block size {size}",
                f"{name}={_ceil(value, size) * size}",
            )
    if policy.summaries and size % policy.ratio:
        raise ConfigError(
            f"cache.policy: {policy}: blocks of {size} tokens cannot be cut by {policy.ratio}",
            "take a ratio that divides the block size",
        )
    whole, step = _ceil(config.capacity, size), policy.every // size
    older = max(1, whole - (policy.recent + policy.sinks) // size)  # blocks of a row that ever descend
    below = []
    base = group._replace(levels=None, scored=None)
    if policy.packed:
        most = whole if policy.packed == -1 else min(whole, policy.packed // size)
        per_row = min(older, most + step)
        usable = config.rows * per_row if policy.packed != -1 or config.blocks is None else config.blocks
        level = Level(number, -1, most)
        below.append(
            base._replace(
                blocks=usable + RESERVED_BLOCKS,
                blocks_per_row=per_row,
                keys=policy.keys,
                values=policy.values,
                level=level,
            )
        )
    if policy.summaries:
        most = _ceil(policy.summaries, size)
        per_row = most + _ceil(step, policy.ratio) + 1
        per_row = per_row if config.outgrown else min(per_row, _ceil(older, policy.ratio) + 1)
        level = Level(number, len(below) - 1, most, policy.ratio)
        below.append(base._replace(blocks=config.rows * per_row + RESERVED_BLOCKS, blocks_per_row=per_row, level=level))
    return below


def _check_spilled(own: Sequence[Group]) -> None:
    """A row that spills is computed again when it gave way, and one that is lossy must not be."""
    policies = [group.scored or group.levels for group in own if group.scored or group.levels]
    spilled = [policy for policy in policies if isinstance(policy, Spilled)]
    lossy = [policy for policy in policies if not isinstance(policy, Spilled)]
    if spilled and lossy:
        raise ConfigError(
            f"cache.policy: {spilled[0]} beside {lossy[0]}: a row is either kept whole or not",
            "spilled(...) goes with full, window, sinks, truncate and quest in other layers",
        )


def _spilled(group: Group, policy: Spilled, number: int, config: CacheConfig) -> Group:
    size = config.block_size
    for name in ("recent", "every", "older"):
        if (value := getattr(policy, name)) > 0 and value % size:
            raise ConfigError(
                f"cache.policy: {policy}: {name} {value} is not a multiple of the block size {size}",
                f"{name}={_ceil(value, size) * size}",
            )
    older = max(1, _ceil(config.capacity, size) - policy.recent // size)
    if policy.older != -1:
        older = policy.older // size if config.outgrown else min(older, policy.older // size)
    level = Level(number, -1, older, spilled=True)
    return group._replace(blocks=config.rows * older + RESERVED_BLOCKS, blocks_per_row=older, levels=None, level=level)


def _numbered(below: Sequence[Group], first: int) -> list[Group]:
    """With ``above`` counted among all groups, the first level of which is number ``first``."""
    made: list[Group] = []
    for number, group in enumerate(below, first):
        assert group.level is not None
        above = group.level.of if group.level.above < 0 else number - 1
        made.append(group._replace(level=group.level._replace(above=above)))
    return made


def _check_widths(group: Group) -> None:
    mixer, layer = group.mixer, group.layers[0]
    both = (group.keys, group.values)
    for side, name, dim in zip(("keys", "values"), both, (mixer.head_dim, mixer.value_dim), strict=True):
        if find_format(name, f"cache.{side}").even and dim % 2:
            raise ConfigError(
                f"cache.{side}: {name} packs two numbers into a byte, and the {side} of layer {layer} have {dim}",
                f"cache.{side}='int8' takes any width",
            )


def grows(layers: Iterable[tuple[MixerSpec, Ranked | None]]) -> bool:
    """Whether what some layer holds of a row grows with it."""
    return not all(
        mixer.window is not None
        or isinstance(ranked, Scored)
        or (isinstance(ranked, Hierarchy) and ranked.packed != -1)
        for mixer, ranked in layers
    )


def _group(mixer: MixerSpec, ranked: Ranked | None, layers: tuple[int, ...], config: CacheConfig) -> Group:
    scored = ranked if isinstance(ranked, Scored) else None
    if isinstance(ranked, Quest):
        _check_quest(ranked, config)
    if isinstance(ranked, Hierarchy | Spilled) and config.layout == "contiguous":
        raise ConfigError(f"cache.policy: {ranked}: tokens descend in whole blocks", "take cache.layout='paged'")
    if mixer.cross:
        return _cross_group(mixer, layers, config)
    slots = config.capacity
    if mixer.window is not None:
        slots = mixer.window + min(config.chunk, config.capacity) - 1
    if config.layout == "contiguous":
        slots += mixer.sinks
        if scored is not None:
            slots = scored.budget + scored.every
        most = slots if config.endless else config.capacity
        return Group(mixer, layers, min(slots, most), config.rows + RESERVED_BLOCKS, 1, scored)
    whole = _ceil(config.capacity, config.block_size)
    if mixer.window is not None:
        per_row = _ceil(mixer.sinks, config.block_size) + _ceil(slots, config.block_size) + 1
        per_row = per_row if config.outgrown else min(whole, per_row)
        return Group(mixer, layers, config.block_size, config.rows * per_row + RESERVED_BLOCKS, per_row)
    if scored is not None:
        per_row = min(whole, _ceil(scored.budget + scored.every, config.block_size))
        usable = config.rows * per_row
        return Group(mixer, layers, config.block_size, usable + RESERVED_BLOCKS, per_row, scored)
    if isinstance(ranked, Hierarchy | Spilled):
        kept = _ceil(ranked.sinks, config.block_size) + _ceil(ranked.recent + ranked.every, config.block_size)
        per_row = kept if config.outgrown else min(whole, kept)
        asked = config.blocks if isinstance(ranked, Spilled) else None
        usable = config.rows * per_row if asked is None else asked
        return Group(mixer, layers, config.block_size, usable + RESERVED_BLOCKS, per_row, levels=ranked)
    usable = config.rows * whole if config.blocks is None else config.blocks
    chooses = ranked if isinstance(ranked, Quest) else None
    return Group(mixer, layers, config.block_size, usable + RESERVED_BLOCKS, whole, chooses=chooses)


def _check_quest(policy: Quest, config: CacheConfig) -> None:
    if config.layout == "contiguous":
        raise ConfigError(f"cache.policy: {policy}: a row of one block has none to choose", "take cache.layout='paged'")
    if config.rotate == "read":
        raise ConfigError(
            f"cache.policy: {policy}: bounds are of keys as queries see them, and these lie unrotated",
            "take cache.rotate='write'",
        )


def _cross_group(mixer: MixerSpec, layers: tuple[int, ...], config: CacheConfig) -> Group:
    """A source for every row: rows that share one leave blocks for later rows to find it in."""
    if config.source_capacity < 1:
        raise ConfigError("cache.source_capacity: this model attends to a source", "say how long a source may be")
    if config.layout == "contiguous":
        return Group(mixer, layers, config.source_capacity, config.rows + RESERVED_BLOCKS, 1)
    per_row = _ceil(config.source_capacity, config.block_size)
    return Group(mixer, layers, config.block_size, config.rows * per_row + RESERVED_BLOCKS, per_row)


def group_bytes(group: Group) -> GroupBytes:
    """``blocks * layers * K`` times what a block takes of every array of its formats; columns: one int64 position per
    slot, where a policy ranks or chooses those of each head, and of summaries the weights of each head.  Of a spilled
    level the pool has the columns alone; ``per_row`` and ``per_token`` count what lies in its spool, too.

    float32, D = Dv = 64, K = 1, one layer: 512 bytes of payload per token;  int8: 128, and 8 of scales.
    """
    size, lines = group.block_size, len(group.layers) * group.mixer.kv_heads
    payload = scales = 0  # of a block
    for form, dim in group.stores:
        for array in form.arrays(dim):
            taken = lines * array.nbytes * (size if array.grain == "slot" else 1)
            payload, scales = (payload + taken, scales) if array.name == "data" else (payload, scales + taken)
    spilled = group.level is not None and group.level.spilled
    columns = size * (POSITION_BYTES + lines * _head_column_bytes(group)) + lines * _bound_bytes(group)
    return GroupBytes(
        0 if spilled else group.blocks * payload,
        0 if spilled else group.blocks * scales,
        group.blocks * columns,
        payload // size,
        _ceil(scales, size),
        _ceil(columns, size),
        group.blocks_per_row * (payload + scales + columns),
    )


def _bound_bytes(group: Group) -> int:
    """Per block, layer and head, where queries choose: the smallest and the largest key of each channel."""
    return 0 if group.chooses is None else 2 * group.mixer.head_dim * (8 if group.keys == "float64" else 4)


def _head_column_bytes(group: Group) -> int:
    """Per slot, layer and head.  Where a policy ranks: a position (int32), and the attention that it got; of summaries:
    a weight."""
    if group.level is not None and group.level.ratio > 1:
        return find_format(group.weight_format, "weights").arrays(1)[0].nbytes
    if group.scored is None:
        return 0
    return 4 + (0 if not group.scored.watch else 8 if group.keys == "float64" else 4)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
