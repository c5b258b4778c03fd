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
from kvad.cache.policy import EvictionPolicy, OffloadPolicy, Quest, TieredPolicy
from kvad.cache.quantization import CacheFormat, get_format
from kvad.config import AttentionSpec
from kvad.errors import ConfigError
from kvad.model_input import RESERVED_BLOCKS

MAX_PLANNED_SEQS = 4096  # fit asks no further
POSITION_BYTES = 8  # the one column of every slot: its position, int64, once per group

StatefulPolicy = EvictionPolicy | TieredPolicy | OffloadPolicy | Quest


class LowerLevel(NamedTuple):
    """A group that no new token is written to: it takes whole blocks from the group ``above``; ``of`` is the one that
    takes tokens (indices of groups).  ``most``: blocks of a row that has just descended; ``ratio`` > 1: tokens of a
    slot.  ``spilled``: its blocks lie in no pool of Memory's but in a spool (``spilled.py``), bytes as they were."""

    token_group: int
    upper_group: int
    max_blocks: int
    ratio: int = 1
    is_offloaded: bool = False


class CacheGroup(NamedTuple):
    """Layers that share a table.  ``blocks`` counts the reserved ones (step.py: empty and bin) too."""

    spec: AttentionSpec
    layers: tuple[int, ...]
    block_size: int
    num_blocks: int
    max_blocks_per_seq: (
        int  # live blocks of one row at most; 1 = the row's block is a ring: slot = position % block_size
    )
    eviction_policy: EvictionPolicy | None = None  # the policy that ranks what these layers hold
    demotion_policy: TieredPolicy | OffloadPolicy | None = (
        None  # the policy that moves older tokens to the groups whose level lies below this one
    )
    lower_level: LowerLevel | None = None
    sparse_read_policy: Quest | None = None  # the policy under which a query reads some blocks only
    key_format: str = "float32"  # formats, by name
    value_format: str = "float32"

    @property
    def tensor_formats(self) -> tuple[tuple[CacheFormat, int], tuple[CacheFormat, int]]:
        """(format, numbers of a head) of a layer's keys, and of its values."""
        mixer = self.spec
        return (get_format(self.key_format, "keys"), mixer.head_dim), (
            get_format(self.value_format, "values"),
            mixer.value_dim,
        )

    @property
    def weight_format(self) -> str:
        """Of what a summary's logit gets, one number for each of its heads."""
        return "float64" if self.key_format == "float64" else "float32"

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that rows can own."""
        return self.num_blocks - RESERVED_BLOCKS


class GroupBytes(NamedTuple):
    """Bytes of one group's pool.  ``scales``: what decodes the payload (scales, zeros), where it is not plain numbers.

    ``per_row``: one row at its longest; ``per_token``: while it grows (a block's own scales shared out, rounded up).
    """

    payload: int
    scales: int
    metadata: int
    per_token_payload: int
    per_token_scales: int
    per_token_metadata: int
    per_seq: int

    @property
    def total(self) -> int:
        return self.payload + self.scales + self.metadata


class MemoryFit(NamedTuple):
    """``rows`` sequences of ``capacity`` tokens take ``bytes`` bytes of cache."""

    num_seqs: int
    max_seq_len: int
    bytes: int


def build_groups(mixers: Sequence[AttentionSpec], config: CacheConfig) -> tuple[CacheGroup, ...]:
    """Cache groups in the order of their first layer.  ConfigError for layers that cannot be cached, or not so."""
    layers: dict[tuple[AttentionSpec, StatefulPolicy | None], list[int]] = {}
    for index, mixer in enumerate(config.restrict(mixers)):
        if not mixer.causal and not mixer.is_cross_attention:
            raise ConfigError(
                f"layer {index} is bidirectional: every new token changes the keys of the ones before it",
                "a bidirectional model runs without a cache",
            )
        if (
            config.endless and mixer.window is None and not mixer.is_cross_attention
        ):  # ranked tokens keep their positions
            hint = f"take a policy that drops old ones: sinks(4, {max(1, config.max_seq_len - 4)})"
            raise ConfigError(f"cache.endless: layer {index} keeps all tokens of a row", hint)
        policy = config.resolved_policy.for_layer(index)
        free = not mixer.is_cross_attention and mixer.window is None
        ranked = policy.eviction or policy.tiered or policy.sparse_read if free else None
        layers.setdefault((mixer, ranked), []).append(index)
    if config.num_blocks is not None and layers and not grows_with_length(layers):
        raise ConfigError(
            "cache.num_blocks: no layer keeps all tokens of a row",
            "the size follows from cache.max_num_seqs, cache.prefill_chunk_size and cache.policy",
        )
    keys, values = config.token_formats
    placed = [
        _group(mixer, ranked, tuple(where), config)._replace(key_format=keys, value_format=values)
        for (mixer, ranked), where in layers.items()
    ]
    own = [group for group in placed if not group.spec.is_cross_attention]
    _check_offload(own)
    below = [level for number, group in enumerate(own) for level in _lower_groups(group, number, config)]
    made = (*own, *_with_indices(below, len(own)), *(group for group in placed if group.spec.is_cross_attention))
    for group in made:
        _check_widths(group)
    return made


def _lower_groups(group: CacheGroup, number: int, config: CacheConfig) -> list[CacheGroup]:
    """What lies below a group, in the order of descent.  ``above`` is counted within them: -1 is the group itself."""
    policy = group.demotion_policy
    if policy is None:
        return []
    size = config.block_size
    if isinstance(policy, OffloadPolicy):
        return [_offload_group(group, policy, number, config)]
    for name in ("recent", "interval", "num_sinks", "quantized"):
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
    whole, step = _ceil(config.max_seq_len, size), policy.interval // size
    older = max(1, whole - (policy.recent + policy.num_sinks) // size)  # blocks of a row that ever descend
    below = []
    base = group._replace(demotion_policy=None, eviction_policy=None)
    if policy.quantized:
        most = whole if policy.quantized == -1 else min(whole, policy.quantized // size)
        per_row = min(older, most + step)
        usable = (
            config.max_num_seqs * per_row if policy.quantized != -1 or config.num_blocks is None else config.num_blocks
        )
        level = LowerLevel(number, -1, most)
        below.append(
            base._replace(
                num_blocks=usable + RESERVED_BLOCKS,
                max_blocks_per_seq=per_row,
                key_format=policy.key_format,
                value_format=policy.value_format,
                lower_level=level,
            )
        )
    if policy.summaries:
        most = _ceil(policy.summaries, size)
        per_row = most + _ceil(step, policy.ratio) + 1
        per_row = per_row if config.exceeds_max_seq_len else min(per_row, _ceil(older, policy.ratio) + 1)
        level = LowerLevel(number, len(below) - 1, most, policy.ratio)
        below.append(
            base._replace(
                num_blocks=config.max_num_seqs * per_row + RESERVED_BLOCKS,
                max_blocks_per_seq=per_row,
                lower_level=level,
            )
        )
    return below


def _check_offload(own: Sequence[CacheGroup]) -> None:
    """A row that spills is computed again when it gave way, and one that is lossy must not be."""
    policies = [
        group.eviction_policy or group.demotion_policy
        for group in own
        if group.eviction_policy or group.demotion_policy
    ]
    spilled = [policy for policy in policies if isinstance(policy, OffloadPolicy)]
    lossy = [policy for policy in policies if not isinstance(policy, OffloadPolicy)]
    if spilled and lossy:
        raise ConfigError(
            f"cache.policy: {spilled[0]} beside {lossy[0]}: a row is either kept whole or not",
            "spilled(...) goes with full, window, sinks, truncate and quest in other layers",
        )


def _offload_group(group: CacheGroup, policy: OffloadPolicy, number: int, config: CacheConfig) -> CacheGroup:
    size = config.block_size
    for name in ("recent", "interval", "max_offloaded"):
        if (value := getattr(policy, name)) > 0 and value % size:
            raise ConfigError(
                f"cache.policy: {policy}: {name} {value} is not a multiple of the block size {size}",
                f"{name}={_ceil(value, size) * size}",
            )
    older = max(1, _ceil(config.max_seq_len, size) - policy.recent // size)
    if policy.max_offloaded != -1:
        older = policy.max_offloaded // size if config.exceeds_max_seq_len else min(older, policy.max_offloaded // size)
    level = LowerLevel(number, -1, older, is_offloaded=True)
    return group._replace(
        num_blocks=config.max_num_seqs * older + RESERVED_BLOCKS,
        max_blocks_per_seq=older,
        demotion_policy=None,
        lower_level=level,
    )


def _with_indices(below: Sequence[CacheGroup], first: int) -> list[CacheGroup]:
    """With ``above`` counted among all groups, the first level of which is number ``first``."""
    made: list[CacheGroup] = []
    for number, group in enumerate(below, first):
        assert group.lower_level is not None
        above = group.lower_level.token_group if group.lower_level.upper_group < 0 else number - 1
        made.append(group._replace(lower_level=group.lower_level._replace(upper_group=above)))
    return made


def _check_widths(group: CacheGroup) -> None:
    mixer, layer = group.spec, group.layers[0]
    both = (group.key_format, group.value_format)
    for side, name, dim in zip(("keys", "values"), both, (mixer.head_dim, mixer.value_dim), strict=True):
        if get_format(name, f"cache.{side}").needs_even_dim and dim % 2:
            raise ConfigError(
                f"cache.{side}: {name} packs two numbers into a byte, and the {side} of layer {layer} have {dim}",
                f"cache.{side}='int8' takes any width",
            )


def grows_with_length(layers: Iterable[tuple[AttentionSpec, StatefulPolicy | None]]) -> bool:
    """Whether what some layer holds of a row grows with it."""
    return not all(
        mixer.window is not None
        or isinstance(ranked, EvictionPolicy)
        or (isinstance(ranked, TieredPolicy) and ranked.quantized != -1)
        for mixer, ranked in layers
    )


def _group(
    mixer: AttentionSpec, ranked: StatefulPolicy | None, layers: tuple[int, ...], config: CacheConfig
) -> CacheGroup:
    scored = ranked if isinstance(ranked, EvictionPolicy) else None
    if isinstance(ranked, Quest):
        _check_quest(ranked, config)
    if isinstance(ranked, TieredPolicy | OffloadPolicy) and config.layout == "contiguous":
        raise ConfigError(f"cache.policy: {ranked}: tokens descend in whole blocks", "take cache.layout='paged'")
    if mixer.is_cross_attention:
        return _cross_group(mixer, layers, config)
    slots = config.max_seq_len
    if mixer.window is not None:
        slots = mixer.window + min(config.prefill_chunk_size, config.max_seq_len) - 1
    if config.layout == "contiguous":
        slots += mixer.num_sinks
        if scored is not None:
            slots = scored.budget + scored.interval
        most = slots if config.endless else config.max_seq_len
        return CacheGroup(mixer, layers, min(slots, most), config.max_num_seqs + RESERVED_BLOCKS, 1, scored)
    whole = _ceil(config.max_seq_len, config.block_size)
    if mixer.window is not None:
        per_row = _ceil(mixer.num_sinks, config.block_size) + _ceil(slots, config.block_size) + 1
        per_row = per_row if config.exceeds_max_seq_len else min(whole, per_row)
        return CacheGroup(mixer, layers, config.block_size, config.max_num_seqs * per_row + RESERVED_BLOCKS, per_row)
    if scored is not None:
        per_row = min(whole, _ceil(scored.budget + scored.interval, config.block_size))
        usable = config.max_num_seqs * per_row
        return CacheGroup(mixer, layers, config.block_size, usable + RESERVED_BLOCKS, per_row, scored)
    if isinstance(ranked, TieredPolicy | OffloadPolicy):
        kept = _ceil(ranked.num_sinks, config.block_size) + _ceil(ranked.recent + ranked.interval, config.block_size)
        per_row = kept if config.exceeds_max_seq_len else min(whole, kept)
        asked = config.num_blocks if isinstance(ranked, OffloadPolicy) else None
        usable = config.max_num_seqs * per_row if asked is None else asked
        return CacheGroup(mixer, layers, config.block_size, usable + RESERVED_BLOCKS, per_row, demotion_policy=ranked)
    usable = config.max_num_seqs * whole if config.num_blocks is None else config.num_blocks
    chooses = ranked if isinstance(ranked, Quest) else None
    return CacheGroup(mixer, layers, config.block_size, usable + RESERVED_BLOCKS, whole, sparse_read_policy=chooses)


def _check_quest(policy: Quest, config: CacheConfig) -> None:
    if config.layout == "contiguous":
        raise ConfigError(f"cache.policy: {policy}: a row of one block has none to choose", "take cache.layout='paged'")
    if config.rope_at == "read":
        raise ConfigError(
            f"cache.policy: {policy}: bounds are of keys as queries see them, and these lie unrotated",
            "take cache.rope_at='write'",
        )


def _cross_group(mixer: AttentionSpec, layers: tuple[int, ...], config: CacheConfig) -> CacheGroup:
    """A source for every row: rows that share one leave blocks for later rows to find it in."""
    if config.max_source_len < 1:
        raise ConfigError("cache.max_source_len: this model attends to a source", "say how long a source may be")
    if config.layout == "contiguous":
        return CacheGroup(mixer, layers, config.max_source_len, config.max_num_seqs + RESERVED_BLOCKS, 1)
    per_row = _ceil(config.max_source_len, config.block_size)
    return CacheGroup(mixer, layers, config.block_size, config.max_num_seqs * per_row + RESERVED_BLOCKS, per_row)


def group_bytes(group: CacheGroup) -> GroupBytes:
    """``blocks * layers * K`` times what a block takes of every array of its formats; columns: one int64 position per
    slot, where a policy ranks or chooses those of each head, and of summaries the weights of each head.  Of a spilled
    level the pool has the columns alone; ``per_row`` and ``per_token`` count what lies in its spool, too.

    float32, D = Dv = 64, K = 1, one layer: 512 bytes of payload per token;  int8: 128, and 8 of scales.
    """
    size, lines = group.block_size, len(group.layers) * group.spec.num_kv_heads
    payload = scales = 0  # of a block
    for form, dim in group.tensor_formats:
        for array in form.arrays(dim):
            taken = lines * array.nbytes * (size if array.granularity == "slot" else 1)
            payload, scales = (payload + taken, scales) if array.name == "data" else (payload, scales + taken)
    spilled = group.lower_level is not None and group.lower_level.is_offloaded
    columns = size * (POSITION_BYTES + lines * _head_column_bytes(group)) + lines * _bound_bytes(group)
    return GroupBytes(
        0 if spilled else group.num_blocks * payload,
        0 if spilled else group.num_blocks * scales,
        group.num_blocks * columns,
        payload // size,
        _ceil(scales, size),
        _ceil(columns, size),
        group.max_blocks_per_seq * (payload + scales + columns),
    )


def _bound_bytes(group: CacheGroup) -> int:
    """Per block, layer and head, where queries choose: the smallest and the largest key of each channel."""
    return (
        0 if group.sparse_read_policy is None else 2 * group.spec.head_dim * (8 if group.key_format == "float64" else 4)
    )


def _head_column_bytes(group: CacheGroup) -> int:
    """Per slot, layer and head.  Where a policy ranks: a position (int32), and the attention that it got; of summaries:
    a weight."""
    if group.lower_level is not None and group.lower_level.ratio > 1:
        return get_format(group.weight_format, "weights").arrays(1)[0].nbytes
    if group.eviction_policy is None:
        return 0
    return 4 + (0 if not group.eviction_policy.observed_queries else 8 if group.key_format == "float64" else 4)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
