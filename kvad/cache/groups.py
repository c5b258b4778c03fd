"""Cache groups: number and bytes of blocks, computed as integers for the pools and for ``kvad plan`` alike.

These functions return exactly the bytes that KVCache allocates. No torch.

Layers with equal specs share block tables: one ``CacheGroup``. For a sequence of length ``n``, a group holds:

* Full attention: all tokens, ``ceil(n / block_size)`` blocks.
* Cross-attention: the encoder tokens, written once, in a pool with one longest input per sequence.
* A window ``W`` with spans of at most ``C`` new tokens: the first query of a span at position p needs the keys from
  ``p - W + 1`` on, while the last key is written at ``p + C - 1``: ``W + C - 1`` slots, plus one block because they
  rarely start at a block boundary.

      W = 6, C = 4, block_size = 4, p = 9:  keys 4..12 = slots of the blocks 1, 2, 3;  ceil(9 / 4) + 1 = 4 are enough.

* A window with sinks (``policy.py``): in addition the blocks of the sinks.
* An eviction policy: ``budget + interval`` slots, the maximum before an eviction.
* A tiered policy: the sinks, the recent tokens and those of one ``interval``. Its lower groups hold the quantized
  blocks and the summaries, at most as many as a sequence of that length demotes.

A contiguous cache is a paged one with one block per sequence (``block_size`` = the whole sequence, or a window's ring).
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

POSITION_BYTES = 8  # position of a slot, int64, once per group

StatefulPolicy = EvictionPolicy | TieredPolicy | OffloadPolicy | Quest


class LowerLevel(NamedTuple):
    """Lower group, which receives whole blocks of older tokens instead of new tokens."""

    token_group: int  # index of the group that takes the tokens
    upper_group: int  # index of the group from which blocks are demoted
    max_blocks: int  # maximum blocks per sequence after a demotion
    ratio: int = 1  # tokens per slot; above 1 for summaries
    is_offloaded: bool = False  # blocks are in an offload file (offload/token_offload.py), unchanged


class CacheGroup(NamedTuple):
    """Layers that share block tables."""

    spec: AttentionSpec
    layers: tuple[int, ...]
    block_size: int
    num_blocks: int  # reserved blocks included
    max_blocks_per_seq: int  # 1: the block is a ring, slot = position % block_size
    eviction_policy: EvictionPolicy | None = None
    demotion_policy: TieredPolicy | OffloadPolicy | None = None  # moves older tokens to lower groups
    lower_level: LowerLevel | None = None  # set if this is a lower group
    sparse_read_policy: Quest | None = None  # a query reads only some blocks
    key_format: str = "float32"  # names of formats
    value_format: str = "float32"

    @property
    def tensor_formats(self) -> tuple[tuple[CacheFormat, int], tuple[CacheFormat, int]]:
        """(format, head dim) of a layer's keys, and of its values."""
        keys, values = get_format(self.key_format, "keys"), get_format(self.value_format, "values")
        return (keys, self.spec.head_dim), (values, self.spec.value_dim)

    @property
    def weight_format(self) -> str:
        """Format of the weights that are added to the logits of summaries, one per head."""
        return "float64" if self.key_format == "float64" else "float32"

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks that sequences can own."""
        return self.num_blocks - RESERVED_BLOCKS


class GroupBytes(NamedTuple):
    """Bytes of one group's pool, per token of a growing sequence, and of the longest sequence."""

    payload: int
    scales: int  # scales and zeros of quantized formats; those of a block are divided by its tokens, rounded up
    metadata: int  # positions, and per-head data of policies
    per_token_payload: int
    per_token_scales: int
    per_token_metadata: int
    per_seq: int

    @property
    def total(self) -> int:
        return self.payload + self.scales + self.metadata


def build_groups(specs: Sequence[AttentionSpec], config: CacheConfig) -> tuple[CacheGroup, ...]:
    """Build the cache groups: token groups by their first layer, lower groups, cross-attention groups."""
    layers: dict[tuple[AttentionSpec, StatefulPolicy | None], list[int]] = {}
    for index, spec in enumerate(config.restrict(specs)):
        if not spec.causal and not spec.is_cross_attention:
            raise ConfigError(
                f"layer {index} is bidirectional: a new token changes the keys of earlier tokens",
                "Run a bidirectional model without a cache",
            )
        if config.endless and spec.window is None and not spec.is_cross_attention:  # Eviction keeps positions.
            hint = f"Use a policy that drops old tokens: sinks(4, {max(1, config.max_seq_len - 4)})"
            raise ConfigError(f"cache.endless: layer {index} keeps all tokens of a sequence", hint)
        policy = config.resolved_policy.for_layer(index)
        free = not spec.is_cross_attention and spec.window is None
        stateful = policy.eviction or policy.tiered or policy.sparse_read if free else None
        layers.setdefault((spec, stateful), []).append(index)
    if config.num_blocks is not None and layers and not grows_with_length(layers):
        raise ConfigError(
            "cache.num_blocks: no layer keeps all tokens of a sequence",
            "Omit it: the size follows from cache.max_num_seqs, cache.prefill_chunk_size and cache.policy",
        )
    keys, values = config.token_formats
    layer_groups = [
        _build_group(spec, stateful, tuple(layer_indices), config)._replace(key_format=keys, value_format=values)
        for (spec, stateful), layer_indices in layers.items()
    ]
    token_groups = [group for group in layer_groups if not group.spec.is_cross_attention]
    _check_offload(token_groups)
    lower_groups = [
        level for group_index, group in enumerate(token_groups) for level in _lower_groups(group, group_index, config)
    ]
    cross_groups = [group for group in layer_groups if group.spec.is_cross_attention]
    groups = (*token_groups, *_with_indices(lower_groups, len(token_groups)), *cross_groups)
    for group in groups:
        _check_widths(group)
    return groups


def _lower_groups(group: CacheGroup, group_index: int, config: CacheConfig) -> list[CacheGroup]:
    """Build a token group's lower groups, from upper to lower (``upper_group`` -1 is the token group itself)."""
    policy = group.demotion_policy
    if policy is None:
        return []
    block_size = config.block_size
    if isinstance(policy, OffloadPolicy):
        return [_offload_group(group, policy, group_index, config)]
    _check_multiples(policy, ("recent", "interval", "num_sinks", "quantized"), block_size)
    if policy.summaries and block_size % policy.ratio:
        raise ConfigError(
            f"cache.policy: {policy}: ratio must divide the block size {block_size}, got {policy.ratio}",
            "Use a divisor of the block size",
        )
    max_blocks, blocks_per_step = _ceil_div(config.max_seq_len, block_size), policy.interval // block_size
    max_older_blocks = max(1, max_blocks - (policy.recent + policy.num_sinks) // block_size)
    lower_groups = []
    base = group._replace(demotion_policy=None, eviction_policy=None)
    if policy.quantized:
        max_level_blocks = max_blocks if policy.quantized == -1 else min(max_blocks, policy.quantized // block_size)
        blocks_per_seq = min(max_older_blocks, max_level_blocks + blocks_per_step)
        num_blocks = config.num_blocks if policy.quantized == -1 else None
        group = _with_blocks(base, blocks_per_seq, config, num_blocks)
        lower_groups.append(
            group._replace(
                key_format=policy.key_format,
                value_format=policy.value_format,
                lower_level=LowerLevel(group_index, -1, max_level_blocks),
            )
        )
    if policy.summaries:
        max_level_blocks = _ceil_div(policy.summaries, block_size)
        blocks_per_seq = max_level_blocks + _ceil_div(blocks_per_step, policy.ratio) + 1
        if not config.exceeds_max_seq_len:
            blocks_per_seq = min(blocks_per_seq, _ceil_div(max_older_blocks, policy.ratio) + 1)
        level = LowerLevel(group_index, len(lower_groups) - 1, max_level_blocks, policy.ratio)
        lower_groups.append(_with_blocks(base, blocks_per_seq, config)._replace(lower_level=level))
    return lower_groups


def _check_multiples(policy: TieredPolicy | OffloadPolicy, names: Iterable[str], block_size: int) -> None:
    for name in names:
        if (value := getattr(policy, name)) > 0 and value % block_size:
            raise ConfigError(
                f"cache.policy: {policy}: {name} must be a multiple of the block size {block_size}, got {value}",
                f"Use {name}={_ceil_div(value, block_size) * block_size}",
            )


def _check_offload(token_groups: Sequence[CacheGroup]) -> None:
    """Refuse offloading and lossy layers together: an offloading sequence is recomputed, a lossy one must not be."""
    policies = [group.eviction_policy or group.demotion_policy for group in token_groups]
    offloading = [policy for policy in policies if isinstance(policy, OffloadPolicy)]
    lossy = [policy for policy in policies if isinstance(policy, EvictionPolicy | TieredPolicy)]
    if offloading and lossy:
        raise ConfigError(
            f"cache.policy: {offloading[0]} and {lossy[0]} cannot be combined",
            "Combine offload(...) with full, window, sinks, block-window or quest in other layers",
        )


def _offload_group(group: CacheGroup, policy: OffloadPolicy, group_index: int, config: CacheConfig) -> CacheGroup:
    block_size = config.block_size
    _check_multiples(policy, ("recent", "interval", "max_offloaded"), block_size)
    max_older_blocks = max(1, _ceil_div(config.max_seq_len, block_size) - policy.recent // block_size)
    if policy.max_offloaded != -1:
        limit = policy.max_offloaded // block_size
        max_older_blocks = limit if config.exceeds_max_seq_len else min(max_older_blocks, limit)
    level = LowerLevel(group_index, -1, max_older_blocks, is_offloaded=True)
    return _with_blocks(group, max_older_blocks, config)._replace(demotion_policy=None, lower_level=level)


def _with_indices(lower_groups: Sequence[CacheGroup], first: int) -> list[CacheGroup]:
    """Replace ``upper_group`` by an index into all groups; the first lower group has index ``first``."""
    groups: list[CacheGroup] = []
    for group_index, group in enumerate(lower_groups, first):
        assert group.lower_level is not None
        upper_group = group.lower_level.token_group if group.lower_level.upper_group < 0 else group_index - 1
        groups.append(group._replace(lower_level=group.lower_level._replace(upper_group=upper_group)))
    return groups


def _check_widths(group: CacheGroup) -> None:
    spec, layer = group.spec, group.layers[0]
    both = (group.key_format, group.value_format)
    for side, name, dim in zip(("key", "value"), both, (spec.head_dim, spec.value_dim), strict=True):
        if get_format(name, f"cache.{side}_dtype").needs_even_dim and dim % 2:
            raise ConfigError(
                f"cache.{side}_dtype: {name} packs two numbers per byte, but the {side} dim of layer {layer} is {dim}",
                f"cache.{side}_dtype='int8' takes any dimension",
            )


def grows_with_length(layers: Iterable[tuple[AttentionSpec, StatefulPolicy | None]]) -> bool:
    """Return True if the cache of some layer grows with the sequence."""
    return not all(
        spec.window is not None
        or isinstance(policy, EvictionPolicy)
        or (isinstance(policy, TieredPolicy) and policy.quantized != -1)
        for spec, policy in layers
    )


def _with_blocks(
    group: CacheGroup, blocks_per_seq: int, config: CacheConfig, num_blocks: int | None = None
) -> CacheGroup:
    """Set the size of a group's pool: ``num_blocks`` usable blocks, by default those of all sequences."""
    usable = config.max_num_seqs * blocks_per_seq if num_blocks is None else num_blocks
    return group._replace(num_blocks=usable + RESERVED_BLOCKS, max_blocks_per_seq=blocks_per_seq)


def _build_group(
    spec: AttentionSpec, policy: StatefulPolicy | None, layers: tuple[int, ...], config: CacheConfig
) -> CacheGroup:
    if isinstance(policy, Quest):
        _check_quest(policy, config)
    if isinstance(policy, TieredPolicy | OffloadPolicy) and config.layout == "contiguous":
        raise ConfigError(f"cache.policy: {policy}: tokens are demoted in whole blocks", "Use cache.layout='paged'")
    if spec.is_cross_attention and config.max_source_len < 1:
        raise ConfigError(
            "cache.max_source_len: must be at least 1 for an encoder-decoder, got 0", "Set the maximum encoder tokens"
        )
    group = CacheGroup(
        spec,
        layers,
        config.block_size,
        num_blocks=0,
        max_blocks_per_seq=0,
        eviction_policy=policy if isinstance(policy, EvictionPolicy) else None,
        demotion_policy=policy if isinstance(policy, TieredPolicy | OffloadPolicy) else None,
        sparse_read_policy=policy if isinstance(policy, Quest) else None,
    )
    if config.layout == "contiguous":
        return _with_blocks(
            group._replace(block_size=_contiguous_slots(spec, group.eviction_policy, config)), 1, config
        )
    if spec.is_cross_attention:  # room for one encoder input per sequence
        return _with_blocks(group, _ceil_div(config.max_source_len, config.block_size), config)
    max_blocks, block_size = _ceil_div(config.max_seq_len, config.block_size), config.block_size
    if spec.window is not None:
        slots = spec.window + min(config.prefill_chunk_size, config.max_seq_len) - 1
        num_held = _ceil_div(spec.num_sinks, block_size) + _ceil_div(slots, block_size) + 1
    elif isinstance(policy, EvictionPolicy):
        num_held = min(max_blocks, _ceil_div(policy.budget + policy.interval, block_size))
    elif isinstance(policy, TieredPolicy | OffloadPolicy):
        num_held = _ceil_div(policy.num_sinks, block_size) + _ceil_div(policy.recent + policy.interval, block_size)
    else:
        num_held = max_blocks
    is_bounded = spec.window is not None or isinstance(policy, EvictionPolicy | TieredPolicy)
    blocks_per_seq = num_held if config.exceeds_max_seq_len else min(max_blocks, num_held)
    return _with_blocks(group, blocks_per_seq, config, None if is_bounded else config.num_blocks)


def _contiguous_slots(spec: AttentionSpec, eviction: EvictionPolicy | None, config: CacheConfig) -> int:
    """Return the slots of a sequence: its maximum length, a window's ring, or an eviction policy's maximum."""
    if spec.is_cross_attention:
        return config.max_source_len
    slots = config.max_seq_len
    if spec.window is not None:
        slots = spec.window + min(config.prefill_chunk_size, config.max_seq_len) - 1 + spec.num_sinks
    if eviction is not None:
        slots = eviction.budget + eviction.interval
    return slots if config.endless else min(slots, config.max_seq_len)


def _check_quest(policy: Quest, config: CacheConfig) -> None:
    if config.layout == "contiguous":
        raise ConfigError(
            f"cache.policy: {policy}: a contiguous sequence has only one block", "Use cache.layout='paged'"
        )
    if config.rope_at == "read":
        raise ConfigError(
            f"cache.policy: {policy}: block bounds require rotated keys, but they are stored unrotated",
            "Use cache.rope_at='write'",
        )


def group_bytes(group: CacheGroup) -> GroupBytes:
    """Compute the bytes of a group: ``num_blocks * layers * K`` times the bytes of a block in all its arrays.

    Metadata: one int64 position per slot, per-head data of eviction policies and Quest, and weights of summaries. The
    pool of an offloaded group has metadata only; ``per_seq`` and ``per_token_*`` include its offload file.

    float32, D = Dv = 64, K = 1, one layer: 512 bytes of payload per token;  int8: 128, and 8 of scales.
    """
    block_size, num_heads = group.block_size, len(group.layers) * group.spec.num_kv_heads
    payload = scales = 0  # per block
    for fmt, dim in group.tensor_formats:
        for array in fmt.arrays(dim):
            nbytes = num_heads * array.nbytes * (block_size if array.granularity == "slot" else 1)
            payload, scales = (payload + nbytes, scales) if array.name == "data" else (payload, scales + nbytes)
    offloading = group.lower_level is not None and group.lower_level.is_offloaded
    metadata = block_size * (POSITION_BYTES + num_heads * _head_metadata_bytes(group)) + num_heads * _bound_bytes(group)
    return GroupBytes(
        0 if offloading else group.num_blocks * payload,
        0 if offloading else group.num_blocks * scales,
        group.num_blocks * metadata,
        payload // block_size,
        _ceil_div(scales, block_size),
        _ceil_div(metadata, block_size),
        group.max_blocks_per_seq * (payload + scales + metadata),
    )


def _bound_bytes(group: CacheGroup) -> int:
    """Return the bytes of key bounds per block, layer and head: minimum and maximum of each channel."""
    wide = 8 if group.key_format == "float64" else 4
    return 0 if group.sparse_read_policy is None else 2 * group.spec.head_dim * wide


def _head_metadata_bytes(group: CacheGroup) -> int:
    """Return bytes per slot, layer and head: position (int32) and attention mass, or the weight of a summary."""
    if group.lower_level is not None and group.lower_level.ratio > 1:
        return get_format(group.weight_format, "weights").arrays(1)[0].nbytes
    if group.eviction_policy is None:
        return 0
    return 4 + (0 if not group.eviction_policy.observed_queries else 8 if group.key_format == "float64" else 4)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
