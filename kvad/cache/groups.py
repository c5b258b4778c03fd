"""Cache groups: number and bytes of blocks, computed as integers for the pools and for ``kvad plan`` alike.

These functions return exactly the bytes that KVCache allocates. No torch. Of latent attention
(``AttentionSpec.values_in_keys``) only keys are stored, in the keys' format.

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
from kvad.cache.policy import EvictionPolicy, OffloadPolicy, Quest, StatefulPolicy, TieredPolicy
from kvad.cache.quantization import CacheFormat, get_format, join_format_names
from kvad.config import DTYPE_BYTES, AttentionSpec
from kvad.errors import ConfigError
from kvad.model_input import RESERVED_BLOCKS

POSITION_BYTES = 8  # position of a slot, int64, once per group


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
    def tensor_formats(self) -> tuple[tuple[CacheFormat, int], ...]:
        """(format, head dim) of a layer's keys, and of its values, unless they are part of the keys."""
        keys = get_format(self.key_format, "keys"), self.spec.head_dim
        if self.spec.values_in_keys:
            return (keys,)
        return keys, (get_format(self.value_format, "values"), self.spec.value_dim)

    @property
    def format_name(self) -> str:
        """Format of keys and values: "float32" or "int8/int4"."""
        return join_format_names(self.key_format, self.value_format)

    @property
    def weight_format(self) -> str:
        """Format of the weights that are added to the logits of summaries, one per head."""
        return "float64" if self.key_format == "float64" else "float32"

    @property
    def is_offloaded(self) -> bool:
        """True for a lower group whose blocks are in an offload file."""
        return self.lower_level is not None and self.lower_level.is_offloaded

    @property
    def has_summaries(self) -> bool:
        """True for a lower group whose slots are summaries of several tokens."""
        return self.lower_level is not None and self.lower_level.ratio > 1

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


def build_groups(
    specs: Sequence[AttentionSpec], config: CacheConfig, computed: str = "float32"
) -> tuple[CacheGroup, ...]:
    """Build the cache groups: token groups by their first layer, lower groups, cross-attention groups.

    ``computed`` is the dtype of the computation, in which states are stored.
    """
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
        policy = None if spec.is_cross_attention or spec.window else config.resolved_policy.for_layer(index).stateful
        layers.setdefault((spec, policy), []).append(index)
    if config.num_blocks is not None and layers and not grows_with_length(layers):
        raise ConfigError(
            "cache.num_blocks: no layer keeps all tokens of a sequence",
            "Omit it: the size follows from cache.max_num_seqs, cache.prefill_chunk_size and cache.policy",
        )
    layer_groups = [
        _with_formats(_build_group(spec, policy, tuple(layer_indices), config), *_formats(spec, config, computed))
        for (spec, policy), layer_indices in layers.items()
    ]
    token_groups = [group for group in layer_groups if not group.spec.is_cross_attention]
    # An offloading sequence is recomputed, and a lossy one must not be.
    offloading = [policy for _, policy in layers if isinstance(policy, OffloadPolicy)]
    lossy = [policy for _, policy in layers if isinstance(policy, EvictionPolicy | TieredPolicy)]
    if offloading and lossy:
        raise ConfigError(
            f"cache.policy: {offloading[0]} and {lossy[0]} cannot be combined",
            "Combine offload(...) with full, window, sinks, block-window or quest in other layers",
        )
    groups = list(token_groups)
    for group_index, group in enumerate(token_groups):
        groups += _lower_groups(group, group_index, len(groups), config)
    groups += layer_groups[len(token_groups) :]
    for group in groups:
        _check_widths(group)
    return tuple(groups)


def _lower_groups(group: CacheGroup, group_index: int, first: int, config: CacheConfig) -> list[CacheGroup]:
    """Build a token group's lower groups, from upper to lower; the first one gets the index ``first``."""
    policy = group.demotion_policy
    if policy is None:
        return []
    block_size = config.block_size
    for name in ("recent", "interval", "num_sinks", "quantized", "max_offloaded"):
        if (value := getattr(policy, name, 0)) > 0 and value % block_size:
            raise ConfigError(
                f"cache.policy: {policy}: {name} must be a multiple of the block size {block_size}, got {value}",
                f"Use {name}={_ceil_div(value, block_size) * block_size}",
            )
    max_blocks, blocks_per_step = _ceil_div(config.max_seq_len, block_size), policy.interval // block_size
    max_older_blocks = max(1, max_blocks - (policy.recent + policy.num_sinks) // block_size)
    if isinstance(policy, OffloadPolicy):
        if policy.max_offloaded != -1:
            limit = policy.max_offloaded // block_size
            max_older_blocks = limit if config.exceeds_max_seq_len else min(max_older_blocks, limit)
        level = LowerLevel(group_index, group_index, max_older_blocks, is_offloaded=True)
        return [_with_blocks(group, max_older_blocks, config)._replace(demotion_policy=None, lower_level=level)]
    if policy.summaries and block_size % policy.ratio:
        raise ConfigError(
            f"cache.policy: {policy}: ratio must divide the block size {block_size}, got {policy.ratio}",
            "Use a divisor of the block size",
        )
    lower_groups = []
    base = group._replace(demotion_policy=None, eviction_policy=None)
    if policy.quantized:
        max_level_blocks = max_blocks if policy.quantized == -1 else min(max_blocks, policy.quantized // block_size)
        blocks_per_seq = min(max_older_blocks, max_level_blocks + blocks_per_step)
        num_blocks = config.num_blocks if policy.quantized == -1 else None
        group = _with_blocks(base, blocks_per_seq, config, num_blocks)
        lower_groups.append(
            _with_formats(group, policy.key_format, policy.value_format)._replace(
                lower_level=LowerLevel(group_index, group_index, max_level_blocks)
            )
        )
    if policy.summaries:
        max_level_blocks = _ceil_div(policy.summaries, block_size)
        blocks_per_seq = max_level_blocks + _ceil_div(blocks_per_step, policy.ratio) + 1
        if not config.exceeds_max_seq_len:
            blocks_per_seq = min(blocks_per_seq, _ceil_div(max_older_blocks, policy.ratio) + 1)
        upper_group = first if lower_groups else group_index
        level = LowerLevel(group_index, upper_group, max_level_blocks, policy.ratio)
        lower_groups.append(_with_blocks(base, blocks_per_seq, config)._replace(lower_level=level))
    return lower_groups


def _formats(spec: AttentionSpec, config: CacheConfig, computed: str) -> tuple[str, str]:
    """Return the formats of new keys and values.

    Nothing of a state is rounded, since an error would reach all later tokens: a convolution's inputs have the dtype of
    the computation, and states at least float32, in which they are computed.
    """
    states = computed, "float64" if computed == "float64" else "float32"
    return states if spec.is_state else config.token_formats


def _with_formats(group: CacheGroup, keys: str, values: str) -> CacheGroup:
    """Set the formats; values that are part of the keys have theirs."""
    return group._replace(key_format=keys, value_format=keys if group.spec.values_in_keys else values)


def _check_widths(group: CacheGroup) -> None:
    layer = group.layers[0]
    for side, (fmt, dim) in zip(("key", "value"), group.tensor_formats, strict=False):
        if fmt.needs_even_dim and dim % 2:
            raise ConfigError(
                f"cache.{side}_dtype: {fmt.name} packs two numbers per byte, but the {side} dim of layer {layer} is "
                f"{dim}",
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
    if policy is not None and config.layout == "contiguous" and not isinstance(policy, EvictionPolicy):
        is_quest = isinstance(policy, Quest)
        reason = "a contiguous sequence has only one block" if is_quest else "tokens are demoted in whole blocks"
        raise ConfigError(f"cache.policy: {policy}: {reason}", "Use cache.layout='paged'")
    if isinstance(policy, Quest) and config.rope_at == "read":
        raise ConfigError(
            f"cache.policy: {policy}: block bounds require rotated keys, but they are stored unrotated",
            "Use cache.rope_at='write'",
        )
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
    num_sinks, slots, max_slots = 0, config.max_seq_len, config.max_seq_len  # of one sequence, behind its sinks
    if spec.is_cross_attention:  # room for one encoder input per sequence
        slots = max_slots = config.max_source_len
    elif spec.window is not None:
        num_sinks, slots = spec.num_sinks, spec.window + min(config.prefill_chunk_size, config.max_seq_len) - 1
    elif isinstance(policy, EvictionPolicy):
        slots = min(max_slots, policy.budget + policy.interval)
    elif isinstance(policy, TieredPolicy | OffloadPolicy):
        num_sinks, slots = policy.num_sinks, policy.recent + policy.interval
    if config.layout == "contiguous" and not spec.snapshot_size:  # States are stored at the end of blocks.
        slots += num_sinks
        return _with_blocks(group._replace(block_size=slots if config.endless else min(slots, max_slots)), 1, config)
    block_size, is_window = config.block_size, spec.window is not None
    blocks_per_seq = _ceil_div(num_sinks, block_size) + _ceil_div(slots, block_size) + is_window
    if not config.exceeds_max_seq_len:
        blocks_per_seq = min(blocks_per_seq, _ceil_div(max_slots, block_size))
    is_bounded = spec.is_cross_attention or is_window or isinstance(policy, EvictionPolicy | TieredPolicy)
    return _with_blocks(group, blocks_per_seq, config, None if is_bounded else config.num_blocks)


def group_bytes(group: CacheGroup) -> GroupBytes:
    """Compute the bytes of a group: ``num_blocks * layers * K`` times the bytes of a block in all its arrays.

    Payload: keys, values, and states that are stored once per block. Metadata: one int64 position per slot, per-head
    data of eviction policies and Quest, and weights of summaries. The pool of an offloaded group has metadata only;
    ``per_seq`` and ``per_token_*`` include its offload file.

    float32, D = Dv = 64, K = 1, one layer: 512 bytes of payload per token;  int8: 128, and 8 of scales.
    """
    block_size, num_heads = group.block_size, len(group.layers) * group.spec.num_kv_heads
    payload = scales = 0  # per block
    for fmt, dim in group.tensor_formats:
        for array in fmt.arrays(dim):
            nbytes = num_heads * array.nbytes * (block_size if array.granularity == "slot" else 1)
            payload, scales = (payload + nbytes, scales) if array.name == "data" else (payload, scales + nbytes)
    if group.spec.snapshot_size:
        payload += len(group.layers) * group.spec.snapshot_size * DTYPE_BYTES[group.value_format]
    # Bytes per layer and head, of a slot (position and attention mass, or weight) and of a block (key bounds).
    wide = 8 if group.key_format == "float64" else 4  # of mass, weights and bounds
    slot_bytes = wide * group.has_summaries
    if group.eviction_policy is not None and not group.has_summaries:
        slot_bytes = 4 + wide * (group.eviction_policy.observed_queries > 0)
    bound_bytes = 0 if group.sparse_read_policy is None else 2 * group.spec.head_dim * wide
    metadata = block_size * (POSITION_BYTES + num_heads * slot_bytes) + num_heads * bound_bytes
    return GroupBytes(
        0 if group.is_offloaded else group.num_blocks * payload,
        0 if group.is_offloaded else group.num_blocks * scales,
        group.num_blocks * metadata,
        payload // block_size,
        _ceil_div(scales, block_size),
        _ceil_div(metadata, block_size),
        group.max_blocks_per_seq * (payload + scales + metadata),
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
