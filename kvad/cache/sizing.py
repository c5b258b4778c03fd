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
from typing import NamedTuple

from kvad.cache.config import CacheConfig
from kvad.cache.formats import Format, find_format
from kvad.cache.policy import Hierarchy, Quest, Scored, Spilled
from kvad.config import MixerSpec
from kvad.errors import ConfigError
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
MOST_ROWS = 4096  # fit asks no further
POSITION_BYTES = 8  # the one column of every slot: its position, int64, once per group

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
